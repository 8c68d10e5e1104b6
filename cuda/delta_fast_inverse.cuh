// The triangular inverse of a chunk by two warps in f32 on tensor cores (delta_fast_prepare.cu,
// delta_fast_channel_prepare.cu).
#pragma once
#include "cuda/delta_fast.cuh"

namespace ebb::gpu::delta {

inline constexpr int kInverseRow = 68;  // rows of the matrix, padded

__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// x = the sum of two tf32 numbers, of which products look at the upper 19 bits only. Cut, not
// rounded: cvt.rna is five instructions, and what is lost is below 2^-20 either way.
__device__ __forceinline__ void split(unsigned& high, unsigned& low, float x) {
  high = __float_as_uint(x) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}
// d[16,8] += a[16,8] b[8,8] in f32. The order of the eight inner indices is 0, 2, 4, 6, 1, 3, 5, 7,
// so that an accumulator serves as a: its element e is the operand's {0, 2, 1, 3}[e].
__device__ __forceinline__ void mma_f32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  unsigned a_high[4], a_low[4], b_high[2], b_low[2];
#pragma unroll
  for (int e = 0; e < 4; ++e) split(a_high[e], a_low[e], a[e]);
#pragma unroll
  for (int e = 0; e < 2; ++e) split(b_high[e], b_low[e], b[e]);
  mma_tf32(d, a_low, b_high);
  mma_tf32(d, a_high, b_low);
  mma_tf32(d, a_high, b_high);
}
__device__ __forceinline__ void left_f32(float (&a)[4], const float* s, int m0, int k0,
                                         const Lane& l) {
  const float2 top = *reinterpret_cast<const float2*>(s + (m0 + l.g) * kInverseRow + k0 + 2 * l.c);
  const float2 bottom =
      *reinterpret_cast<const float2*>(s + (m0 + 8 + l.g) * kInverseRow + k0 + 2 * l.c);
  a[0] = top.x, a[1] = bottom.x, a[2] = top.y, a[3] = bottom.y;
}
__device__ __forceinline__ void right_f32(float (&b)[2], const float* s, int k0, int n0,
                                          const Lane& l) {
  b[0] = s[(k0 + 2 * l.c) * kInverseRow + n0 + l.g];
  b[1] = s[(k0 + 2 * l.c + 1) * kInverseRow + n0 + l.g];
}

// A21 = −A22 M21 A11 for blocks of 8·N rows at `base`, in place, 16 rows m0 of the block by a warp.
// merge leaves −A21 in r; all warps that work on a block have read it before one writes.
template <int N>
__device__ __forceinline__ void merge(float (&r)[N][4], const float* s, int base, int m0,
                                      const Lane& l) {
  const int half = base + 8 * N;
  float t[N][4] = {}, a[4], b[2];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (8 * k > m0 + 15) continue;
    left_f32(a, s, half + m0, half + 8 * k, l);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      right_f32(b, s, half + 8 * k, base + 8 * n, l);
      mma_f32(t[n], a, b);
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float x[4] = {t[k][0], t[k][2], t[k][1], t[k][3]};
#pragma unroll
    for (int n = 0; n <= (k | 1); ++n) {  // what lies above the leaves of A11 is not there
      right_f32(b, s, base + 8 * k, base + 8 * n, l);
      mma_f32(r[n], x, b);
    }
  }
}
template <int N>
__device__ __forceinline__ void put_merged(float* s, const float (&r)[N][4], int base, int m0,
                                           const Lane& l) {
  const int half = base + 8 * N;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(s + (half + m0 + l.g + 8 * h) * kInverseRow + base + 8 * n +
                                 2 * l.c) = {-r[n][2 * h], -r[n][2 * h + 1]};
}

// A leaf of 16 rows per half warp by forward substitution, then the 32 rows of the warp.
__device__ __forceinline__ void invert_half(float* s, int warp, const Lane& l) {
  const int lane = int(threadIdx.x) & 31;
  const int col = lane & 15;
  float* leaf = s + (32 * warp + (lane & 16)) * (kInverseRow + 1);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == col ? 1.f : 0.f, other = 0.f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 m = *reinterpret_cast<const float4*>(leaf + i * kInverseRow + j);
      sum -= m.x * x[j];
      if (j + 1 < i) other -= m.y * x[j + 1];
      if (j + 2 < i) sum -= m.z * x[j + 2];
      if (j + 3 < i) other -= m.w * x[j + 3];
    }
    x[i] = sum + other;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) leaf[i * kInverseRow + col] = x[i];
  __syncwarp();
  float r[2][4] = {};
  merge<2>(r, s, 32 * warp, 0, l);
  __syncwarp();
  put_merged<2>(s, r, 32 * warp, 0, l);
}

// s = (I + s)⁻¹ on and below the diagonal, in f32 (what lies above in the 16x16 leaves becomes 0,
// elsewhere it stays), by warps 0 and 1, while the block's others do others(). All threads of the
// block come here; the inverse may be read after its next barrier.
template <class F>
__device__ __forceinline__ void invert_by_two_warps(float* s, F&& others) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  if (warp < 2)
    invert_half(s, warp, l);
  else
    others();
  __syncthreads();
  float r[4][4] = {};
  if (warp < 2) merge<4>(r, s, 0, 16 * warp, l);
  __syncthreads();
  if (warp < 2) put_merged<4>(s, r, 0, 16 * warp, l);
}

}  // namespace ebb::gpu::delta
