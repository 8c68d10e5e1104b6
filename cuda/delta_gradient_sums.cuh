// Sums that the gradients of a chunk need beside its products (delta_fast_gradients.cu,
// linear_attention_gradients.cu).
#pragma once
#include "cuda/delta_fast.cuh"

namespace ebb::gpu::delta {

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// A pair of a tile's values where the accumulators of fragment n, rows g or g+8 lie.
__device__ __forceinline__ float2 pair_at(const SwizzledTile& s, int m0, int n, int half,
                                          const Lane& l) {
  const unsigned x = *reinterpret_cast<const unsigned*>(s.at(m0 + l.g + 8 * half, 8 * n) + 2 * l.c);
  return {low_half(x), high_half(x)};
}
// One of 256 threads' part of <a, b>.
__device__ __forceinline__ float tile_product(const SwizzledTile& a, const SwizzledTile& b,
                                              int thread) {
  const TilePlace at(thread);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x[8], y[8];
    load_pack<bf16_t>(x, a.at(at.r + 32 * i, at.c));
    load_pack<bf16_t>(y, b.at(at.r + 32 * i, at.c));
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
  }
  return sum;
}
// By one warp, lane l with tokens 2l and 2l+1: Σ_{i>=t} after_i + Σ_{j<t} before_j.
__device__ __forceinline__ float2 crossing_sums(const float (&after)[2], const float (&before)[2]) {
  const int lane = int(threadIdx.x) & 31;
  float suffix = after[0] + after[1], prefix = before[0] + before[1];
  const float own_prefix = prefix;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const float down = __shfl_down_sync(0xffffffffu, suffix, o);
    const float up = __shfl_up_sync(0xffffffffu, prefix, o);
    if (lane + o < 32) suffix += down;
    if (lane >= o) prefix += up;
  }
  prefix -= own_prefix;
  return {suffix + prefix, suffix - after[0] + prefix + before[0]};
}

}  // namespace ebb::gpu::delta
