// The first group of warps of linear_attention_gradients.cu: P and Z of every step, their sums, and
// the fetching of all steps.
#pragma once
#include "cuda/linear_attention_gradient.cuh"

namespace ebb::gpu::linear_attention {

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
    for (; done < steps; ++done) barrier_wait<kGradientThreads>(kStepDone + done % kStages);
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
      barrier_arrive<kGradientThreads>(kProductsReady + (heads & 1));
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

}  // namespace ebb::gpu::linear_attention
