// What the two kernels of the gradients of a chunk share (delta_fast_gradients.cu, for K <= 128,
// and delta_fast_gradients_wide.cu): their shared memory, and what the two groups of warps work
// out.
#pragma once
#include "cuda/delta_fast_gradient_products.cuh"

namespace ebb::gpu::delta::rule {

// dg and dβ of a token, or those of their logits; to the sums what A_log and dt_bias want.
template <class P>
__device__ __forceinline__ void write_gates(const P& p, int64_t token, int hv, float dg,
                                            float dbeta, float (&sums)[2]) {
  const int64_t at = token * p.value_heads + hv;
  if constexpr (!P::kLogits) {
    if (p.dg) static_cast<float*>(p.dg)[at] = dg;
    if (p.dbeta) static_cast<float*>(p.dbeta)[at] = dbeta;
  } else {
    if (p.A_log && (p.dg || p.gate_sums)) {
      const float y = p.decays.at(token, hv) + (p.dt_bias ? p.dt_bias[hv] : 0.f);
      const float scale = expf(p.A_log[hv]);
      float log;
      dg = p.lower_bound < 0.f ? log_decay_slope<true>(y, scale, p.lower_bound, dg, log)
                               : log_decay_slope<false>(y, scale, 0.f, dg, log);
      sums[0] += dg, sums[1] += log;
    }
    if (p.dg) put_logit(p.dg, at, dg, p.decays.half);
    if (!p.dbeta) return;
    if (p.sigmoid) dbeta *= p.beta_scale * sigmoid_slope(p.strengths.at(token, hv));
    put_logit(p.dbeta, at, dbeta, p.strengths.half);
  }
}

// Last step of gradient_kernel, one warp; lane l has tokens 2l and 2l+1:
// dg_t = Σ_{i>=t} (row_i − column_i + reads_i) + Σ_{j<t} kept_j + γ_n <S, D>, where the sums of z
// over rows minus those over columns leave the pairs that cross t.
template <class P, class Shared>
__device__ __forceinline__ void write_gate_gradients(const P& p, const Shared& s, Span span,
                                                     int64_t chunk, int hv) {
  float sums[2] = {};
  const int lane = int(threadIdx.x) & 31;
  float carry = 0;
  for (int w = 0; w < 8; ++w) carry += s.carry[w];
  carry *= s.gates.total[0];
  float after[2], before[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    float column = 0;
    for (int w = 0; w < 8; ++w) column += s.column_z[w][t];
    after[e] = s.row_z[0][t] + s.row_z[1][t] - column + s.reads[0][t] + s.reads[1][t];
    before[e] = s.kept[t];
  }
  const float2 dg = crossing_sums(after, before);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    if (t >= span.rows) continue;
    const float dbeta = s.key_p[t] + s.value_p[t];
    write_gates(p, span.first + t, hv, (e ? dg.y : dg.x) + carry, dbeta, sums);
  }
  if (!P::kLogits || !p.gate_sums) return;
  const float da = warp_sum(sums[0]), log = warp_sum(sums[1]);
  double* g_sums = p.gate_sums + (chunk * 2) * p.value_heads + hv;
  if (lane == 0) g_sums[0] = da, g_sums[p.value_heads] = log;
}

// The thread's part of <S, D> over a tile of V.
template <int SLABS>
__device__ __forceinline__ float state_product(const ValueStage<SLABS>& s) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < SLABS; ++j) sum += tile_product(s.state[j], s.dstate[j], int(threadIdx.x));
  return sum;
}

// The thread's part of V beside the first two stages, asked for while those are under way.
struct ValueRows {
  Pack<bf16_t, 8> v[2][2];  // of rows r and r+32, by stage

  ValueRows() = default;
  template <class P>
  __device__ __forceinline__ ValueRows(const P& p, Span span, int hv) {
    if (!p.dbeta) return;
    const TilePlace at;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int stage = 0; stage < 2; ++stage) {
        const int r = at.r + 32 * i, column = stage * kFastTile + at.c;
        if (r < span.rows && column < p.value_dim)
          v[i][stage] = load_raw<bf16_t, 8>(p.v + p.input_at(span.first + r, hv) + column);
      }
  }
};

// The staged columns of dv = β X, in the place X has been read from, and X·V. By all threads, eight
// to a row. LATER: V is still to be read, there are no registers for it to wait in.
template <bool LATER, class P, class Shared>
__device__ __forceinline__ void write_value_gradients(const P& p, Shared& s,
                                                      const ValueRows& values, Span span, int hv,
                                                      int v0) {
  const TilePlace at;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = at.r + 32 * i;
    const float beta = s.gates.beta[r];
    float sum = 0;
#pragma unroll(LATER ? 1 : 2)
    for (int stage = 0; stage < 2; ++stage) {
      const int column = v0 + stage * kFastTile + at.c;
      if (r >= span.rows || column >= p.value_dim) continue;
      float x[8];
      load_pack<bf16_t>(x, s.stage[stage].x.at(r, at.c));
      if (p.dbeta) {
        float v[8];
        if constexpr (LATER)
          load_pack<bf16_t>(v, p.v + p.input_at(span.first + r, hv) + column);
        else
          unpack(v, values.v[i][stage]);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += v[e] * x[e];
      }
      if (!p.dv) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] *= beta;
      store_pack<bf16_t>(p.dv + p.x_at(span.first + r, hv) + column, x);
    }
    sum = quad_sum(sum);
    sum += __shfl_xor_sync(0xffffffffu, sum, 4);
    if (at.c == 0) s.value_p[r] = v0 == 0 ? sum : s.value_p[r] + sum;
  }
}

// A group's products with the tiles of V, of which the first two are there; FIRST: also those that
// no slab of K has a part in; LAST: dv of the later tiles. Both groups meet at the barriers.
// Returns the warp's part of <S, D>.
template <bool FIRST, bool LAST, class P, class Shared, class Group>
__device__ __forceinline__ float value_products(const P& p, Shared& s, Group& group, Span span,
                                                int64_t chunk, int hv, int slab, int warp) {
  float carry = 0;
  group.template settle_all<FIRST>();
  for (int v0 = 0; v0 < p.value_dim; v0 += 2 * kFastTile) {
    if (v0 > 0) {
      meet<Group::kGroup>();
      fetch_values(p, span, chunk, hv, v0, slab, s.stage[0]);
      if (v0 + kFastTile < p.value_dim)
        fetch_values(p, span, chunk, hv, v0 + kFastTile, slab, s.stage[1]);
      commit_copies();
      wait_copy_groups<0>();
      publish_tiles();
      meet<Group::kGroup>();
      if (LAST) write_value_gradients<true>(p, s, ValueRows(), span, hv, v0);
    }
    for (int i = 0; i < 2 && v0 + i * kFastTile < p.value_dim; ++i) {
      group.template values<FIRST>(s.stage[i], warp);
      carry += state_product(s.stage[i]);
      warpgroup_wait<0>();
      group.template settle_all<FIRST>();
    }
  }
  meet<Group::kGroup>();
  return warp_sum(carry);
}

// What the first group has of dk goes to the second by way of shared memory.
template <int SLABS, class Shared>
__device__ __forceinline__ void hand_over(Shared& s, const float (&x)[SLABS][8][4]) {
  const int t = int(threadIdx.x) & 127;
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n) {
    const float(&y)[4] = x[n / 8][n % 8];
    s.exchange()[n * 128 + t] = {y[0], y[1], y[2], y[3]};
  }
}
template <int SLABS, class Shared>
__device__ __forceinline__ void take_over(Shared& s, float (&x)[SLABS][8][4]) {
  const int t = int(threadIdx.x) & 127;
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n) {
    const float4 y = s.exchange()[n * 128 + t];
    float(&to)[4] = x[n / 8][n % 8];
    to[0] += y.x, to[1] += y.y, to[2] += y.z, to[3] += y.w;
  }
}
template <int SLABS>
__device__ __forceinline__ void put_gradients(SwizzledTile (&s)[SLABS],
                                              const float (&x)[SLABS][8][4], int m0,
                                              const Lane& l) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) {
    unsigned a[4][4];
    values_as_left(a, x[j]);
    put_rows(s[j], a, m0, l);
  }
}
// dq and dk of slabs from `first` on to memory, by all threads.
template <class P, class Shared>
__device__ __forceinline__ void store_gradients(const P& p, Shared& s, Span span, int hv,
                                                int first) {
  const TilePlace at;
  const int64_t key = p.dkey_at(span.first, hv);
#pragma unroll
  for (int j = 0; j < Shared::kSlabs; ++j) {
    const int k0 = 64 * (first + j), cols = p.key_dim - k0;
    if (p.dq) at.store(p.dq + key + k0, p.dkey_stride(), s.dq()[j], span.rows, cols);
    if (p.dk) at.store(p.dk + key + k0, p.dkey_stride(), s.dk()[j], span.rows, cols);
  }
}

}  // namespace ebb::gpu::delta::rule
