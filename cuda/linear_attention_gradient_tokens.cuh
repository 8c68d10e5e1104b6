// What the groups of warps for queries and keys of linear_attention_gradients.cu have in common:
// sums over heads, 16 tokens a warp, and what goes to memory by token.
#pragma once
#include "cuda/linear_attention_gradient.cuh"

namespace ebb::gpu::linear_attention {

// dv of the warp's tokens.
__device__ __forceinline__ void write_values(const AttentionBackward& p, SwizzledTile& by,
                                             const unsigned (&a)[4][4], const GradientWalk& at,
                                             int m0, const Lane& l) {
  if (!p.dv) return;
  put_tile_rows(by, a, m0, l);
  store_rows(p.dv + p.value_at(at.span.first, at.h()) + at.v0(), p.value_stride(), by, m0,
             at.span.rows, p.value_dim - at.v0());
}

// Sums over heads, 16 tokens a warp, and what both sides do with them.
template <int SLABS>
struct TokenSums {
  float sum[SLABS][8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n / 8][n % 8][e] = 0.f;
  }
  // sum of slab j += factor·x, row by row; products += the thread's part of the rows' products of x
  // with those of a tile.
  __device__ __forceinline__ void add(int j, const float (&x)[8][4], const float (&factor)[2],
                                      const SwizzledTile& against, float (&products)[2], int m0,
                                      const Lane& l) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = pair_at(against, m0, n, half, l);
        const float first = x[n][2 * half], second = x[n][2 * half + 1];
        products[half] += first * y.x + second * y.y;
        sum[j][n][2 * half] += factor[half] * first;
        sum[j][n][2 * half + 1] += factor[half] * second;
      }
  }
  __device__ __forceinline__ void settle_all() { settle_state<SLABS>(sum); }
  // To [tokens,G,K] by way of a tile, or straight from registers; or as terms in f32.
  __device__ __forceinline__ void write(const AttentionBackward& p, const GradientWalk& at,
                                        bf16_t* g, float* g_terms, SwizzledTile* by, int m0,
                                        const Lane& l) const {
    const int64_t first = at.span.first * at.columns() + at.column;
#pragma unroll
    for (int j = 0; j < SLABS; ++j) {
      if (g && by) {
        unsigned a[4][4];
        values_as_left(a, sum[j]);
        put_tile_rows(*by, a, m0, l);
        store_rows(g + first * p.key_dim + 64 * j, int64_t(at.columns()) * p.key_dim, *by, m0,
                   at.span.rows, p.key_dim - 64 * j);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = m0 + l.g + 8 * half, c = 64 * j + 8 * n + 2 * l.c;
          if (r >= at.span.rows || c >= p.key_dim) continue;
          const int64_t to = (first + int64_t(r) * at.columns()) * p.key_dim + c;
          const float(&x)[4] = sum[j][n];
          if (g_terms)
            *reinterpret_cast<float2*>(g_terms + to) = {x[2 * half], x[2 * half + 1]};
          else if (g && !by)
            *reinterpret_cast<unsigned*>(g + to) = pack_bf16(x[2 * half], x[2 * half + 1]);
        }
    }
  }
};

template <int SLABS, bool OWN>
__device__ __forceinline__ float state_product(const GradientStage<SLABS, OWN>& s) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < SLABS; ++j) sum += tile_product(s.state[j], s.dstate[j], int(threadIdx.x));
  return sum;
}
// s[row] = factor·Σ over the row's threads of x.
__device__ __forceinline__ void put_rows(float (&s)[64], const float (&x)[2],
                                         const float (&factor)[2], int m0, const Lane& l) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float row = factor[half] * quad_sum(x[half]);
    if (l.c == 0) s[m0 + l.g + 8 * half] = row;
  }
}
template <int SLABS>
__device__ __forceinline__ void clear_slabs(float (&x)[SLABS][8][4]) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n / 8][n % 8][e] = 0.f;
}

// A head's A, bias and the dt of a lane's tokens, asked for early and unread until write().
struct LaneSteps {
  float a = 0, offset = 0;
  unsigned dt[2] = {};

  __device__ __forceinline__ LaneSteps(const AttentionBackward& p, Span span, int h) {
    if (!p.steps.dt) return;
    a = p.steps.A[h], offset = p.steps.offset(h);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * (int(threadIdx.x) & 31) + e;
      if (i < span.rows) dt[e] = p.steps.bits(span.first + i, h);
    }
  }
  // ddt of a token from its dw and dg.
  __device__ __forceinline__ void write(const AttentionBackward& p, int e, int64_t at, float dw,
                                        float dg, float (&sums)[2]) const {
    float slope;
    const float step = p.steps.step(p.steps.value(dt[e]) + offset, slope);
    const float ddt = slope * (dw + p.steps.rate_of(a) * dg);
    sums[0] += ddt, sums[1] += step * dg;
    if (!p.ddt) return;
    if (p.steps.wide)
      static_cast<float*>(p.ddt)[at] = ddt;
    else
      static_cast<bf16_t*>(p.ddt)[at] = from_float<bf16_t>(ddt);
  }
};

// One warp; lane l has tokens 2l and 2l+1: dg_t = Σ_{i>=t} (row_i − column_i + reads_i) + Σ_{j<t}
// kept_j + γ_n <S,D>, where the sums of Z∘q kᵀ over rows minus those over columns leave the pairs
// that cross t. And the chunk's part of what is summed over tokens.
__device__ __forceinline__ void write_gate_gradients(const AttentionBackward& p, const HeadSums& s,
                                                     const LaneSteps& steps, Span span,
                                                     int64_t chunk, int h) {
  const int lane = int(threadIdx.x) & 31;
  float carry = 0;
  for (int w = 0; w < 8; ++w) carry += s.carry[w];
  carry *= s.total;
  if (p.through_run) carry -= p.through_run[chunk / p.pieces * p.value_heads + h];
  float after[2], before[2], dweight[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    float column = 0;
    for (int w = 0; w < 4; ++w) column += s.column_z[w][t];
    after[e] = s.row_z[t] - s.weight[t] * column + s.reads[t];
    before[e] = s.weight[t] * s.kept[t];
    dweight[e] = s.kept[t] + column + s.diagonal[t];
  }
  const float2 crossing = crossing_sums(after, before);
  float sums[2] = {};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (2 * lane + e >= span.rows) continue;
    const int64_t at = p.gate_at(span.first + 2 * lane + e, h);
    const float dg = (e ? crossing.y : crossing.x) + carry;
    if (p.steps.dt) steps.write(p, e, at, dweight[e], dg, sums);
    if (p.dg) p.dg[at] = dg;
    if (p.dweight) p.dweight[at] = dweight[e];
  }
  if (!p.head_sums) return;
  sums[0] = warp_sum(sums[0]), sums[1] = warp_sum(sums[1]);
  if (lane != 0) return;
  float* to = p.head_sums + 3 * chunk * p.value_heads + h;
  to[0] = (s.through[0] + s.through[1]) + (s.through[2] + s.through[3]);
  to[p.value_heads] = sums[0], to[2 * p.value_heads] = sums[1];
}

}  // namespace ebb::gpu::linear_attention
