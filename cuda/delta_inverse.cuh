// The triangular inverse of the delta rule's chunks, for blocks of 256 threads.
#pragma once
#include "cuda/tile.cuh"

namespace ebb::gpu::delta {

// s_a = (I + s_m)⁻¹ for a strictly lower s_m, in f32: 16x16 leaves by forward substitution, then
// 16→32→64 by A21 = −A22 M21 A11.
__device__ inline void invert(const float* s_m, float* s_a, float* s_product) {
  constexpr int ld = row_length<float>(64);
  const int t = int(threadIdx.x);
  for (int i = t; i < kTileRows * 64; i += kTileThreads) s_a[i / 64 * ld + i % 64] = 0.f;
  __syncthreads();
  if (t < 64) {  // thread: one column of one leaf
    const int b = t & ~15, c = t & 15;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum = i == c ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < i; ++j) sum -= s_m[(b + i) * ld + b + j] * x[j];
      x[i] = sum;
      s_a[(b + i) * ld + b + c] = sum;
    }
  }
  __syncthreads();
  for (int size = 16; size <= 32; size *= 2) {
    const int blocks = 32 / size, outputs = size * size;  // pairs of blocks, elements of each
    for (int o = t; o < blocks * outputs; o += kTileThreads) {
      const int c0 = o / outputs * 2 * size, i = o % outputs / size, j = o % size;
      float sum = 0;
      for (int p = 0; p < size; ++p)
        sum += s_m[(c0 + size + i) * ld + c0 + p] * s_a[(c0 + p) * ld + c0 + j];
      s_product[(o / outputs * size + i) * (size + 1) + j] = sum;
    }
    __syncthreads();
    for (int o = t; o < blocks * outputs; o += kTileThreads) {
      const int c0 = o / outputs * 2 * size, i = o % outputs / size, j = o % size;
      float sum = 0;
      for (int p = 0; p < size; ++p)
        sum += s_a[(c0 + size + i) * ld + c0 + size + p] *
               s_product[(o / outputs * size + p) * (size + 1) + j];
      s_a[(c0 + size + i) * ld + c0 + j] = -sum;
    }
    __syncthreads();
  }
}

}  // namespace ebb::gpu::delta
