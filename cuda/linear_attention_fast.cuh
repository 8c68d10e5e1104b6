// The tensor-core kernels of gated linear attention in bf16, for chunks of 64 tokens, K <= 128,
// both head sizes multiples of 8, and runs that are multiples of 64 or shorter:
// linear_attention_fast_fwd.cu (gates, the scan with the read-out), linear_attention_reverse.cu
// (the scans that only carry the state), linear_attention_gradients.cu (every chunk),
// linear_attention_runs.cu (short runs), linear_attention_fast_bwd.cu (backward as a whole).
// States lie transposed, [chunks,H,V,K], as in cuda/delta_fast.cuh, whose gates (beta: the weights)
// and fragments these are.
#pragma once
#include "cuda/delta_scan.cuh"
#include "cuda/linear_attention.cuh"
#include "cuda/ssd_gate.cuh"

namespace ebb::gpu::linear_attention {

inline constexpr int kFastShared = 227 * 1024;  // bytes of a block, as compute capability 9.0 has

struct FastAttention : Attention<bf16_t> {
  FastGates* gates = nullptr;  // [chunks,H]
  StepSource steps = {};       // instead of g and beta

  __device__ __forceinline__ const FastGates& gates_of(int64_t chunk, int h) const {
    return gates[chunk * value_heads + h];
  }
};

// A tile [64,64] from and to memory, 16 bytes at a time, by THREADS threads of which this is number
// t; zero beyond `rows` and `cols`.
template <int THREADS>
struct TileMover {
  static constexpr int kStep = THREADS / 8;
  int r, c;

  __device__ __forceinline__ explicit TileMover(int t) : r(t / 8), c(t % 8 * 8) {}
  __device__ __forceinline__ void fetch(SwizzledTile& s, const bf16_t* g, int64_t stride, int rows,
                                        int cols) const {
    // Beside the copy engine only for ragged chunks: addresses must not take registers of others.
    constexpr int kAtOnce = EBB_WGMMA ? 1 : 64 / kStep;
#pragma unroll kAtOnce
    for (int i = 0; i < 64 / kStep; ++i) {
      const int row = r + kStep * i;
      const bool valid = row < rows && c < cols;
      copy_async_or_zero(s.at(row, c), valid ? g + row * stride + c : g, valid);
    }
  }
  __device__ __forceinline__ void store(bf16_t* g, int64_t stride, const SwizzledTile& s, int rows,
                                        int cols) const {
#pragma unroll
    for (int i = 0; i < 64 / kStep; ++i)
      if (r + kStep * i < rows && c < cols)
        store_word(reinterpret_cast<uint4*>(g + (r + kStep * i) * stride + c),
                   *reinterpret_cast<const uint4*>(s.at(r + kStep * i, c)));
  }
  // The record of a chunk's gates.
  __device__ __forceinline__ void fetch_gates(FastGates& s, const FastGates& g) const {
    float* to = reinterpret_cast<float*>(&s);
    const float* from = reinterpret_cast<const float*>(&g);
    for (int i = (r * 8 + c / 8) * 4; i < kGateFloats; i += THREADS * 4)
      copy_async_or_zero(to + i, from + i, true);
  }
};

// Columns 16k... of a tile's rows m0..., or all of them, from left operands of one warp.
__device__ __forceinline__ void put_tile_columns(SwizzledTile& s, const unsigned (&x)[4], int m0,
                                                 int k, const Lane& l) {
  store_matrices<false>(s.at(m0 + l.low + 8 * l.odd, 16 * k + 8 * l.high), x);
}
__device__ __forceinline__ void put_tile_rows(SwizzledTile& s, const unsigned (&x)[4][4], int m0,
                                              const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k) put_tile_columns(s, x[k], m0, k, l);
}

// Rows m0... of the warp, from a tile it has written itself.
__device__ __forceinline__ void store_rows(bf16_t* g, int64_t stride, const SwizzledTile& s, int m0,
                                           int rows, int cols) {
  const int lane = int(threadIdx.x) & 31, c = lane % 8 * 8;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = m0 + lane / 8 + 4 * i;
    if (r < rows && c < cols)
      store_word(reinterpret_cast<uint4*>(g + r * stride + c),
                 *reinterpret_cast<const uint4*>(s.at(r, c)));
  }
  __syncwarp();
}

// Left operands [16 columns of V, 64 tokens] scaled by one factor per token, factor(t) for the pair
// of tokens t and t+1.
template <class F>
__device__ __forceinline__ void scale_left(unsigned (&to)[4][4], const unsigned (&from)[4][4],
                                           const Lane& l, F&& factor) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 f = factor(16 * k + 8 * h + 2 * l.c);
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; ++e)
        to[k][e] = pack_bf16(f.x * low_half(from[k][e]), f.y * high_half(from[k][e]));
    }
}

__device__ __forceinline__ float2 pair(const float* s, int t) {
  return *reinterpret_cast<const float2*>(s + t);
}

// Whether these kernels take the problem; forward and backward agree.
bool fast_attention(const LinearAttentionProblem& p);
FastAttention make_fast_attention(const LinearAttentionProblem& p, const Cut& cut,
                                  const LinearAttentionSaved& saved, const Tensor& run_before);
LinearAttentionSaved fast_attention_fwd(const LinearAttentionProblem& p, const Tensor& o,
                                        const Tensor& ht, const Tensor& contributions);
void fast_attention_bwd(const LinearAttentionProblem& p, const LinearAttentionSaved& saved,
                        const Tensor& d_o, const Tensor& dht, const Tensor& dcontributions,
                        const LinearAttentionGradients& grads);

}  // namespace ebb::gpu::linear_attention
