// Scores of a chunk without a bound of the decays (PARTS = 4 of cuda/dplr_fast.cuh), by each warp
// alone: 16 tokens with those before them.
#pragma once
#include "cuda/dplr_chunk.cuh"

namespace ebb::gpu::low_rank {

struct PartScores {
  float x[2][4];
};
__device__ __forceinline__ void right_rows(unsigned (&b)[4], const SwizzledTile& s, int n0, int k,
                                           const Lane& l) {
  load_matrices(b, s.at(n0 + l.low + 8 * l.high, 16 * k + 8 * l.odd));
}
// Scores of rows that refer to borders, by each warp alone: x += those with earlier parts.
__device__ __forceinline__ void add_borders(float (&x)[8][4], const SwizzledTile& left,
                                            const SwizzledTile& right, const SteepSums& s, int warp,
                                            const Lane& l) {
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    if (part >= warp) continue;
    unsigned a[4][4], b[4];
    if (part + 1 == warp) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        load_matrices(a[k], left.at(16 * warp + l.low + 8 * l.odd, 16 * k + 8 * l.high));
    } else {
      const float* gap = part + 2 == warp ? s.over[part + 1] : s.middle;
      load_scaled(a, left, 16 * warp, l, [&](float2 v, int c) {
        return times(v, *reinterpret_cast<const float2*>(gap + c));
      });
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      right_rows(b, right, 16 * part, k, l);
      mma_bf16(x[2 * part], a[k], b[0], b[1]);
      mma_bf16(x[2 * part + 1], a[k], b[2], b[3]);
    }
  }
}
// x = those, and what is given inside the warp's part; zeros with later ones.
__device__ __forceinline__ void multiply_borders(float (&x)[8][4], const SwizzledTile& left,
                                                 const SwizzledTile& right, const SteepSums& s,
                                                 const PartScores& inside, int warp,
                                                 const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = n / 2 == warp ? inside.x[n % 2][e] : 0.f;
  add_borders(x, left, right, s, warp, l);
}
// From leaves centred on their own: scores inside the warp's part; those above the diagonal may be
// anything.
__device__ __forceinline__ void multiply_leaves(PartScores& out, const SwizzledTile& left,
                                                const SwizzledTile& right, const SteepSums& s,
                                                int warp, const Lane& l) {
  float across[4] = {};  // of the second leaf's rows with the first's
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) out.x[n][e] = 0.f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    unsigned a[4], b[4];
    load_matrices(a, left.at(16 * warp + l.low + 8 * l.odd, 16 * k + 8 * l.high));
    right_rows(b, right, 16 * warp, k, l);
    mma_bf16(out.x[0], a, b[0], b[1]);
    mma_bf16(out.x[1], a, b[2], b[3]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = 16 * k + 8 * (e >> 1) + 2 * l.c;
      const float2 f = *reinterpret_cast<const float2*>(s.half[2 * warp + 1] + c);
      a[e] = pack_pair(
          times(times(pair_of(a[e]), f), *reinterpret_cast<const float2*>(s.half[2 * warp] + c)));
    }
    mma_bf16(across, a, b[0], b[1]);
  }
  out.x[0][2] = across[2], out.x[0][3] = across[3];
}

}  // namespace ebb::gpu::low_rank
