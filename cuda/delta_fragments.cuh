// Products by mma m16n8k16 from padded tiles in shared memory, for kernels whose warps multiply
// each on its own (cuda/delta_fast_prepare.cu).
#pragma once
#include "cuda/delta_fast.cuh"

namespace ebb::gpu::delta {

constexpr int key_row(int slabs) { return 64 * slabs + 8; }  // rows of q and k, padded

// s [64,COLS] = rows of g, zeros beyond `rows` and `cols` (a multiple of 8).
template <int COLS, int THREADS>
__device__ __forceinline__ void fetch_tile(bf16_t* s, int ld, const bf16_t* g, int64_t stride,
                                           int rows, int cols) {
  constexpr int kPerRow = COLS / 8, kStep = THREADS / kPerRow;
  static_assert(THREADS % kPerRow == 0 && 64 % kStep == 0);
  const int r0 = int(threadIdx.x) / kPerRow, c = int(threadIdx.x) % kPerRow * 8;
  const bf16_t* from = g + int64_t(r0) * stride + c;
#pragma unroll
  for (int i = 0; i < 64 / kStep; ++i) {
    const int r = r0 + i * kStep;
    const bool valid = r < rows && c < cols;
    copy_async_or_zero(s + r * ld + c, valid ? from : g, valid);
    from += int64_t(kStep) * stride;
  }
}
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16,8] += a[16,8] b[8,8].
__device__ __forceinline__ void mma_k8(float (&d)[4], unsigned a0, unsigned a1, unsigned b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Left operand [16,16] at s[m0..,k0..].
__device__ __forceinline__ void left(unsigned (&a)[4], const bf16_t* s, int ld, int m0, int k0,
                                     const Lane& l) {
  load_matrices(a, s + (m0 + l.low + 8 * l.odd) * ld + k0 + 8 * l.high);
}
// Right operand [16,16], two fragments of 8 columns, stored [n,k].
__device__ __forceinline__ void right(unsigned (&b)[4], const bf16_t* s, int ld, int k0, int n0,
                                      const Lane& l) {
  load_matrices(b, s + (n0 + l.low + 8 * l.high) * ld + k0 + 8 * l.odd);
}

}  // namespace ebb::gpu::delta
