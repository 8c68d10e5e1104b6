// Products by mma m16n8k16 from padded tiles in shared memory, for the kernels that warps run on
// their own (cuda/delta_fast_prepare.cu, cuda/delta_fast_channel.cu).
#pragma once
#include "cuda/delta_fast.cuh"

namespace ebb::gpu::delta {

inline constexpr int kRow = 72;                              // tile rows of 64 values, padded
inline constexpr int kPairRow = 136;                         // rows of A and P, side by side
constexpr int key_row(int slabs) { return 64 * slabs + 8; }  // of q, k, Sᵀ

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

// Left operand [16,16] at s[m0..,k0..]; stored transposed: s[k0..,m0..].
__device__ __forceinline__ void left(unsigned (&a)[4], const bf16_t* s, int ld, int m0, int k0,
                                     const Lane& l) {
  load_matrices(a, s + (m0 + l.low + 8 * l.odd) * ld + k0 + 8 * l.high);
}
__device__ __forceinline__ void left_transposed(unsigned (&a)[4], const bf16_t* s, int ld, int m0,
                                                int k0, const Lane& l) {
  load_matrices_transposed(a, s + (k0 + l.low + 8 * l.high) * ld + m0 + 8 * l.odd);
}
// Right operand [16,16], two fragments of 8 columns: stored [n,k], or [k,n].
__device__ __forceinline__ void right(unsigned (&b)[4], const bf16_t* s, int ld, int k0, int n0,
                                      const Lane& l) {
  load_matrices(b, s + (n0 + l.low + 8 * l.high) * ld + k0 + 8 * l.odd);
}
__device__ __forceinline__ void right_transposed(unsigned (&b)[4], const bf16_t* s, int ld, int k0,
                                                 int n0, const Lane& l) {
  load_matrices_transposed(b, s + (k0 + l.low + 8 * l.odd) * ld + n0 + 8 * l.high);
}

// A warp's corner of shared memory, through which it writes to global memory in rows.
template <int SLABS>
struct Staging {
  static constexpr int kTokenRow = 24;  // 16 values, padded
  static constexpr int kSize = 64 * kTokenRow > 16 * key_row(SLABS) ? 64 * kTokenRow
                                                                    : 16 * key_row(SLABS);
  bf16_t s[kSize];

  // g[token, 0..16) = xᵀ for x [16, 64 tokens] given as left operands.
  __device__ __forceinline__ void write_values(bf16_t* g, int64_t stride, const unsigned (&x)[4][4],
                                               int rows, int cols) {
    const int lane = int(threadIdx.x) & 31;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      store_matrices<true>(
          s + (16 * k + 8 * (lane >> 4) + (lane & 7)) * kTokenRow + 8 * ((lane >> 3) & 1), x[k]);
    __syncwarp();
    const int c = 8 * (lane & 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = 16 * i + (lane >> 1);
      if (t < rows && c < cols)
        *reinterpret_cast<uint4*>(g + int64_t(t) * stride + c) =
            *reinterpret_cast<const uint4*>(s + t * kTokenRow + c);
    }
  }
  // g [16,K] = the transposed state, given as left operands.
  __device__ __forceinline__ void write_state(bf16_t* g, int key_dim,
                                              const unsigned (&x)[4 * SLABS][4], int cols) {
    constexpr int ld = key_row(SLABS);
    const Lane l;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4 * SLABS; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        *reinterpret_cast<unsigned*>(s + (l.g + 8 * (e & 1)) * ld + 16 * k + 8 * (e >> 1) +
                                     2 * l.c) = x[k][e];
    __syncwarp();
    const int lane = int(threadIdx.x) & 31;
#pragma unroll
    for (int i = 0; i < 4 * SLABS; ++i) {
      const int at = 32 * i + lane, r = at / (8 * SLABS), c = at % (8 * SLABS) * 8;
      if (r < cols && c < key_dim)
        *reinterpret_cast<uint4*>(g + int64_t(r) * key_dim + c) =
            *reinterpret_cast<const uint4*>(s + r * ld + c);
    }
  }
};

// The warp's transposed state from and to f32 [K,V] in memory, columns v... of V; null: zero.
template <int SLABS>
__device__ __forceinline__ void read_transposed(float (&state)[8 * SLABS][4], const float* g,
                                                int key_dim, int value_dim, int v, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * l.c + (e & 1), col = v + l.g + 8 * (e >> 1);
      state[n][e] = g && k < key_dim && col < value_dim ? g[int64_t(k) * value_dim + col] : 0.f;
    }
}
template <int SLABS>
__device__ __forceinline__ void write_transposed(float* g, const float (&state)[8 * SLABS][4],
                                                 int key_dim, int value_dim, int v, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * l.c + (e & 1), col = v + l.g + 8 * (e >> 1);
      if (k < key_dim && col < value_dim) g[int64_t(k) * value_dim + col] = state[n][e];
    }
}

}  // namespace ebb::gpu::delta
