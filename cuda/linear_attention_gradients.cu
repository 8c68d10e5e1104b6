// Gated linear attention in bf16 on tensor cores, backward: the gradients of every chunk, from the
// states and their gradients (cuda/linear_attention_gradient.cuh). Notation and formulas of
// ops/gated_linear_attention_cpu_bwd.cpp. With P = scale·q kᵀ∘Γ, Z = scale·(dO vᵀ)∘Γ·w:
//   dq = Σ_heads scale γ dO Sᵀ + Z k            dk = Σ_heads τ w v Dᵀ + Zᵀ q
//   dv = τ w k D + (P w + skip)ᵀ dO             dw = τ k·v Dᵀ + Σ_i P_ij dO_i·v_j
#include "cuda/linear_attention_gradient.cuh"

namespace ebb::gpu::linear_attention {
namespace {

constexpr int kAll = kGradientThreads;  // of a barrier that all three groups meet at

// By a group of four warps. Column sums of 16 rows: lane (g, c) leaves with columns 8g+2c and the
// next; x holds the lane's columns 8n+2c+e at 2n+e.
__device__ __forceinline__ float2 sum_columns(float (&x)[16]) {
  const int lane = int(threadIdx.x) & 31;
#pragma unroll
  for (int o = 16, n = 8; o >= 4; o /= 2, n /= 2) {
    const bool upper = lane & o;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float sent = upper ? x[i] : x[i + n], kept = upper ? x[i + n] : x[i];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, o);
    }
  }
  return {x[0], x[1]};
}

// ---- scores ----

// Γ·scale, q kᵀ of the chunk and dO vᵀ of the head, 16 rows a warp.
template <int SLABS, bool OWN, bool WIDE>
struct ScoreSide {
  const AttentionBackward& p;
  GradientShared<SLABS, OWN>& s;
  const Lane l;
  const int warp = (int(threadIdx.x) >> 5) & 3, m0 = 16 * warp;
  // q kᵀ stays in f32: dw and dg cancel in the gradients of SSD's steps.
  float qk[8][4], factor[8][4], ds[8][4];

  __device__ __forceinline__ void key_products(const KeyTiles<SLABS>& keys) {
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::last>(qk, keys.q[0], keys.k[0], warp);
#pragma unroll
    for (int j = 1; j < SLABS; ++j)
      multiply_tiles<false, Inner::last, Inner::last>(qk, keys.q[j], keys.k[j], warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(qk);
  }
  // scale·Γ, and P w + skip to memory.
  __device__ __forceinline__ void write_scores(const FastGates& gates, SwizzledTile& to,
                                               float skip) {
    const int r = m0 + l.g;
    const float high[2] = {gates.high[r], gates.high[r + 8]};
    const float low[2] = {gates.low[r], gates.low[r + 8]};
    unsigned a[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int c = 8 * n + 2 * l.c;
      const float2 h = pair(gates.high, c), d = pair(gates.low, c), weight = pair(gates.beta, c);
      float y[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e >> 1, row = r + 8 * half, column = c + (e & 1);
        const float decay =
            exp2_fast((high[half] - (e & 1 ? h.y : h.x)) + (low[half] - (e & 1 ? d.y : d.x)));
        factor[n][e] = column <= row ? p.scale * decay : 0.f;
        y[e] = factor[n][e] * qk[n][e] * (e & 1 ? weight.y : weight.x);
        if (column == row) y[e] += skip;
      }
      a[n / 2][2 * (n & 1)] = pack_bf16(y[0], y[1]);
      a[n / 2][2 * (n & 1) + 1] = pack_bf16(y[2], y[3]);
    }
    put_tile_rows(to, a, m0, l);
  }
  // Z to memory, and the sums of P∘dO vᵀ.
  __device__ __forceinline__ void write_products(const FastGates& gates, SwizzledTile& to,
                                                 HeadSums& sums) {
    float rows[2] = {}, columns[16] = {}, through = 0;
    unsigned a[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int c = 8 * n + 2 * l.c;
      const float2 weight = pair(gates.beta, c);
      float z[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e >> 1, row = m0 + l.g + 8 * half, column = c + (e & 1);
        const float w = e & 1 ? weight.y : weight.x, x = factor[n][e] * ds[n][e];
        const float y = x * qk[n][e], below = column < row ? y : 0.f;
        z[e] = w * x;
        rows[half] += w * below;
        columns[2 * n + (e & 1)] += below;
        if (column == row) sums.diagonal[row] = y, through += ds[n][e];
      }
      a[n / 2][2 * (n & 1)] = pack_bf16(z[0], z[1]);
      a[n / 2][2 * (n & 1) + 1] = pack_bf16(z[2], z[3]);
    }
    put_tile_rows(to, a, m0, l);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float row = quad_sum(rows[half]);
      if (l.c == 0) sums.row_z[m0 + l.g + 8 * half] = row;
    }
    *reinterpret_cast<float2*>(sums.column_z[warp] + 8 * l.g + 2 * l.c) = sum_columns(columns);
    if (p.head_sums) through = warp_sum(through);
    const int t = int(threadIdx.x) & 127;
    if ((t & 31) == 0) sums.through[warp] = through;
    if (t < kChunk) sums.weight[t] = gates.beta[t];
    if (t == 0) sums.total = gates.total[0];
  }
};

template <int SLABS, bool OWN, bool WIDE>
__device__ __forceinline__ void run_scores(const AttentionBackward& p,
                                           const GradientSources& sources,
                                           GradientShared<SLABS, OWN>& s) {
  constexpr int kStages = GradientShared<SLABS, OWN>::kStages;
  ScoreSide<SLABS, OWN, WIDE> side{p, s, Lane()};
  const GradientFetch<SLABS, OWN> fetch{p, sources, s};
  int done = 0;  // steps that the others are known to be through with
  const auto wait_done = [&](int steps) {
    for (; done < steps; ++done) barrier_wait<kAll>(kStepDone + done % kStages);
  };
  GradientWalk ahead(p);
#pragma unroll 1
  for (int i = 0; i < kStages && ahead.valid(); ++i, ahead.next()) fetch.step(ahead, i);
  Arrivals arrivals, keys_arrivals;
  Turn turn;
  int step = 0, heads = 0;
  for (GradientWalk at(p); at.valid(); at.next(), ++step) {
    const bool first = !WIDE || at.tile == 0, last = !WIDE || at.ends_head();  // of the head
    if (!OWN && at.begins_item()) {
      wait_done(step);
      fetch.keys(at);
      keys_arrivals.wait(s.keys_arrived, 0);
      side.key_products(s.keys(0));
    }
    arrivals.wait(s.arrived, turn.at);
    const auto& now = s.stage[turn.at];
    if (OWN && first) side.key_products(s.keys(turn.at));
    if (WIDE && first) {
#pragma unroll
      for (int n = 0; n < 8; ++n) side.ds[n][0] = side.ds[n][1] = side.ds[n][2] = side.ds[n][3] = 0;
    }
    if (WIDE) settle(side.ds);
    warpgroup_begin();
    multiply_tiles<!WIDE, Inner::last, Inner::last>(side.ds, now.d_o, now.v, side.warp);
    warpgroup_commit();
    if (first) {
      side.write_scores(s.gates[turn.at], s.scores[heads & 1], p.skip ? p.skip[at.h()] : 0.f);
      publish_tiles();
      barrier_arrive<256>(kScoresReadyFor + (heads & 1));
    }
    warpgroup_wait<0>();
    settle(side.ds);
    if (last) {
      side.write_products(s.gates[turn.at], s.z[heads & 1], s.sums[heads & 1]);
      publish_tiles();
      barrier_arrive<kAll>(kProductsReady + (heads & 1));
      ++heads;
    }
    wait_done(step);
    if (step > 0 && ahead.valid()) {
      fetch.step(ahead, (step - 1) % kStages);
      ahead.next();
    }
    turn.next<kStages>();
  }
  wait_done(step);
}

// ---- queries and keys ----

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

// A head's A, bias and the dt of a lane's tokens, asked for early.
struct LaneSteps {
  float rate = 0, dt[2] = {};

  __device__ __forceinline__ LaneSteps(const AttentionBackward& p, Span span, int h) {
    if (!p.steps.dt) return;
    rate = p.steps.rate(h);
    const float offset = p.steps.offset(h);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * (int(threadIdx.x) & 31) + e;
      if (i < span.rows) dt[e] = p.steps.raw(span.first + i, h) + offset;
    }
  }
  // ddt of a token from its dw and dg.
  __device__ __forceinline__ void write(const AttentionBackward& p, int e, int64_t at, float dw,
                                        float dg, float (&sums)[2]) const {
    float slope;
    const float step = p.steps.step(dt[e], slope), ddt = slope * (dw + rate * dg);
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

// Per head 1 x = dO Sᵀ, half of <S,D>. 2 dq += scale γ x, its rows' products with q. 3 dq += Z k;
// dg and dw meanwhile.
template <int SLABS, bool OWN, bool WIDE>
__device__ __forceinline__ void run_queries(const AttentionBackward& p,
                                            GradientShared<SLABS, OWN>& s) {
  constexpr int kStages = GradientShared<SLABS, OWN>::kStages;
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, m0 = 16 * warp;
  TokenSums<SLABS> dq;
  float x[SLABS][8][4], carry = 0;
  Arrivals arrivals, keys_arrivals;
  Turn turn;
  int heads = 0;
  for (GradientWalk at(p); at.valid(); at.next()) {
    const bool first = !WIDE || at.tile == 0, last = !WIDE || at.ends_head();  // of the head
    if (at.begins_item()) {
      dq.clear();
      if (!OWN) keys_arrivals.wait(s.keys_arrived, 0);
    }
    const LaneSteps steps(p, warp == 0 ? at.span : Span{0, 0}, at.h());
    arrivals.wait(s.arrived, turn.at);
    const auto& now = s.stage[turn.at];
    const FastGates& gates = s.gates[turn.at];
    const KeyTiles<SLABS>& keys = s.keys(turn.at);
    if (WIDE && first) clear_slabs<SLABS>(x);
    if (WIDE) settle_state<SLABS>(x);
    warpgroup_begin();  // 1
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
      multiply_tiles<!WIDE, Inner::last, Inner::first>(x[j], now.d_o, now.state[j], warp);
    warpgroup_commit();
    carry = (first ? 0.f : carry) + state_product<SLABS, OWN>(now);
    warpgroup_wait<0>();
    settle_state<SLABS>(x);
    if (last) {
      HeadSums& sums = s.sums[heads & 1];
      const float all = warp_sum(carry);
      if ((threadIdx.x & 31) == 0) sums.carry[warp] = all;
      const int r = m0 + l.g;
      const float gamma[2] = {p.scale * gates.gamma[r], p.scale * gates.gamma[r + 8]};
      float reads[2] = {};
#pragma unroll
      for (int j = 0; j < SLABS; ++j) dq.add(j, x[j], gamma, keys.q[j], reads, m0, l);  // 2
      put_rows(sums.reads, reads, gamma, m0, l);
      dq.settle_all();
      barrier_wait<kAll>(kProductsReady + (heads & 1));
      warpgroup_begin();  // 3
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
        multiply_tiles<false, Inner::last, Inner::first>(dq.sum[j], s.z[heads & 1], keys.k[j],
                                                         warp);
      warpgroup_commit();
      if (warp == 0) write_gate_gradients(p, sums, steps, at.span, at.chunk, at.h());
      warpgroup_wait<0>();
      dq.settle_all();
      ++heads;
    }
    barrier_arrive<kAll>(kStepDone + turn.at);
    if (at.ends_item()) {
      SwizzledTile* by = nullptr;
      if constexpr (OWN) by = &s.queries_out;
      dq.write(p, at, p.dq, p.dq_terms, by, m0, l);
    }
    turn.next<kStages>();
  }
}

// Per head 1 u = k D, y = v Dᵀ, the other half of <S,D>. 2 dv = τ w u + (P w + skip)ᵀ dO. 3 dk +=
// τ w y, its rows' products with k. 4 dk += Zᵀ q.
template <int SLABS, bool OWN, bool WIDE>
__device__ __forceinline__ void run_keys(const AttentionBackward& p,
                                         GradientShared<SLABS, OWN>& s) {
  constexpr int kStages = GradientShared<SLABS, OWN>::kStages;
  const Lane l;
  const int warp = (int(threadIdx.x) >> 5) & 3, m0 = 16 * warp;
  TokenSums<SLABS> dk;
  // One slab after the other, unless they are sums over tiles of V.
  constexpr int kSlabs = WIDE ? SLABS : 1;
  float u[8][4], y[kSlabs][8][4], carry = 0;
  Arrivals arrivals, keys_arrivals;
  Turn turn;
  int heads = 0;
  for (GradientWalk at(p); at.valid(); at.next()) {
    const bool first = !WIDE || at.tile == 0, last = !WIDE || at.ends_head();  // of the head
    if (at.begins_item()) {
      dk.clear();
      if (!OWN) keys_arrivals.wait(s.keys_arrived, 0);
    }
    arrivals.wait(s.arrived, turn.at);
    const auto& now = s.stage[turn.at];
    const FastGates& gates = s.gates[turn.at];
    const KeyTiles<SLABS>& keys = s.keys(turn.at);
    if (WIDE && first) clear_slabs<kSlabs>(y);
    if (WIDE) settle_state<kSlabs>(y);
    warpgroup_begin();  // 1
    multiply_tiles<true, Inner::last, Inner::last>(u, keys.k[0], now.dstate[0], warp);
#pragma unroll
    for (int j = 1; j < SLABS; ++j)
      multiply_tiles<false, Inner::last, Inner::last>(u, keys.k[j], now.dstate[j], warp);
    warpgroup_commit();
#pragma unroll
    for (int j = 0; j < kSlabs; ++j)
      multiply_tiles<!WIDE, Inner::last, Inner::first>(y[j], now.v, now.dstate[j], warp);
    warpgroup_commit();
    carry = (first ? 0.f : carry) + state_product<SLABS, OWN>(now);
    const int r = m0 + l.g;
    const float tail[2] = {gates.tail[r], gates.tail[r + 8]};
    const float factor[2] = {tail[0] * gates.beta[r], tail[1] * gates.beta[r + 8]};
    warpgroup_wait<1>();
    settle(u);
#pragma unroll
    for (int n = 0; n < 8; ++n)  // 2
#pragma unroll
      for (int e = 0; e < 4; ++e) u[n][e] *= factor[e >> 1];
    settle(u);
    if (first) barrier_wait<256>(kScoresReadyFor + (heads & 1));
    warpgroup_begin();
    multiply_tiles<false, Inner::first, Inner::first>(u, s.scores[heads & 1], now.d_o, warp);
    warpgroup_commit();
    warpgroup_wait<1>();
    settle_state<kSlabs>(y);
    HeadSums& sums = s.sums[heads & 1];
    if (last) {
      const float all = warp_sum(carry);
      if ((threadIdx.x & 31) == 0) sums.carry[4 + warp] = all;
      float kept[2] = {};
#pragma unroll
      for (int j = 0; j < SLABS; ++j) {  // 3
        if (j >= kSlabs) {
          warpgroup_begin();
          multiply_tiles<true, Inner::last, Inner::first>(y[0], now.v, now.dstate[j], warp);
          warpgroup_commit();
          warpgroup_wait<0>();
          settle(y[0]);
        }
        dk.add(j, y[j < kSlabs ? j : 0], factor, keys.k[j], kept, m0, l);
      }
      put_rows(sums.kept, kept, tail, m0, l);
      dk.settle_all();
    }
    warpgroup_wait<0>();
    settle(u);
    unsigned a[4][4];
    values_as_left(a, u);
    if (last) {
      barrier_wait<kAll>(kProductsReady + (heads & 1));
      warpgroup_begin();  // 4
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
        multiply_tiles<false, Inner::first, Inner::first>(dk.sum[j], s.z[heads & 1], keys.q[j],
                                                          warp);
      warpgroup_commit();
      write_values(p, s.keys_out, a, at, m0, l);
      warpgroup_wait<0>();
      dk.settle_all();
      ++heads;
    } else {
      write_values(p, s.keys_out, a, at, m0, l);
    }
    barrier_arrive<kAll>(kStepDone + turn.at);
    if (at.ends_item()) dk.write(p, at, p.dk, p.dk_terms, OWN ? &s.keys_out : nullptr, m0, l);
    turn.next<kStages>();
  }
}

template <int SLABS, bool OWN, bool WIDE>
__global__ void __launch_bounds__(kGradientThreads, 1)
    gradient_kernel(AttentionBackward p, const __grid_constant__ GradientSources sources) {
  auto& s = swizzled_shared<GradientShared<SLABS, OWN>>();
  open_stages(s.keys_arrived);
  open_stages(s.arrived);
  if (threadIdx.x < 128) {
    run_queries<SLABS, OWN, WIDE>(p, s);
  } else if (threadIdx.x < 256) {
    take_registers<184>();
    run_keys<SLABS, OWN, WIDE>(p, s);
  } else {
    give_registers<152>();
    run_scores<SLABS, OWN, WIDE>(p, sources, s);
  }
}

template <int SLABS, bool OWN, bool WIDE>
void launch(const AttentionBackward& p, const GradientSources& sources, Device device,
            cudaStream_t stream) {
  static_assert(sizeof(GradientShared<SLABS, OWN>) <= kFastShared);
  const int64_t items = p.chunks * p.heads * p.parts;
  launch_fast<GradientShared<SLABS, OWN>>(
      gradient_kernel<SLABS, OWN, WIDE>, kGradientThreads,
      grid_of(std::min<int64_t>(items, multiprocessors(device))), stream, p, sources);
}

}  // namespace

void chunk_gradients(const AttentionBackward& p, Device device, cudaStream_t stream) {
  const int64_t states = p.chunks * p.value_heads, size = int64_t(p.key_dim) * p.value_dim;
  const auto state_source = [&](const bf16_t* g) {
    return TileSource{tile_map(g, p.key_dim, states, size, p.value_dim, p.key_dim, device), g, size,
                      p.key_dim, p.key_dim};
  };
  const auto keys = [&](const bf16_t* g, int64_t step) {
    return token_source(p, g, p.key_dim, p.heads, step, device);
  };
  const auto values = [&](const bf16_t* g, int64_t step) {
    return token_source(p, g, p.value_dim, p.value_heads, step, device);
  };
  GradientSources sources{keys(p.q, p.q_step),
                          keys(p.k, p.k_step),
                          values(p.v, p.v_step),
                          values(p.d_o, p.value_stride()),
                          state_source(p.states),
                          state_source(p.dstates),
                          false};
  sources.mapped = can_map({sources.q, sources.k, sources.v, sources.d_o});
  const bool own = p.value_heads == p.heads * p.parts, wide = p.value_dim > kFastTile;
  visit_fast_slabs(p.key_dim, [&]<int SLABS>() {
    if (own)
      wide ? launch<SLABS, true, true>(p, sources, device, stream)
           : launch<SLABS, true, false>(p, sources, device, stream);
    else
      wide ? launch<SLABS, false, true>(p, sources, device, stream)
           : launch<SLABS, false, false>(p, sources, device, stream);
  });
}

}  // namespace ebb::gpu::linear_attention
