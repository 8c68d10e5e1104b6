// What the scans with a decay per channel share (delta_fast_channel.cu, K <= 128, and
// delta_fast_channel_wide.cu): where their operands lie, and the state's own decay.
#pragma once
#include "cuda/delta_rule_channel.cuh"
#include "cuda/delta_scan.cuh"

namespace ebb::gpu::delta {

// v is w∘V or V, in the reverse scan dO.
__device__ __forceinline__ ScanSource<3> channel_source(const Channel<bf16_t>& p, const bf16_t* v,
                                                        int64_t value_stride, int hv, int64_t token,
                                                        int64_t chunk) {
  const int64_t row = p.row_at(token, hv), key = row * p.key_dim;
  return {{p.erased + key, p.queries + key, p.kept + key},
          v,
          p.a + row * kChunk,
          p.scores + row * kChunk,
          p.total + p.total_at(chunk, hv),
          p.key_dim,
          value_stride,
          p.key_dim + kChunk};
}
// v as [heads, tokens, V] with these strides.
inline ScanMaps<3> channel_maps(const Channel<bf16_t>& p, const bf16_t* v, int64_t head_stride,
                                int64_t row_stride, Device device) {
  const auto rows = [&](const bf16_t* g, int64_t columns) {
    return tile_map(g, columns, p.value_heads, p.tokens * columns, p.tokens, columns, device);
  };
  return {{rows(p.erased, p.key_dim), rows(p.queries, p.key_dim), rows(p.kept, p.key_dim)},
          tile_map(v, p.value_dim, p.value_heads, head_stride, p.tokens, row_stride, device),
          rows(p.a, kChunk),
          rows(p.scores, kChunk)};
}

// The state times γ_n by channel; channels beyond K stay zero whatever s_total holds there.
template <int SLABS>
__device__ __forceinline__ void decay_state(float (&state)[SLABS][8][4], const float* s_total,
                                            int key_dim, const Lane& l) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int k = 64 * j + 8 * n;
      if (k >= key_dim) continue;
      const float2 f = *reinterpret_cast<const float2*>(s_total + k + 2 * l.c);
      float(&x)[4] = state[j][n];
      x[0] *= f.x, x[1] *= f.y, x[2] *= f.x, x[3] *= f.y;
    }
    settle(state[j]);
  }
}

template <int SLABS>
__device__ __forceinline__ void add_to_state(float (&state)[SLABS][8][4], const unsigned (*a)[4],
                                             const SwizzledTile (&keys)[SLABS]) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) multiply_columns(state[j], a, keys[j]);
}

// channel_fast_scan and channel_fast_reverse for K > 128.
void wide_channel_scan(const Channel<bf16_t>& p, const Segments& segments, const ScanMaps<3>& maps,
                       bf16_t* o, float* ht, cudaStream_t stream);
void wide_channel_reverse(const ChannelBackward<bf16_t>& p, const Segments& segments,
                          const ScanMaps<3>& maps, cudaStream_t stream);

}  // namespace ebb::gpu::delta
