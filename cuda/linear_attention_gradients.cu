// Gated linear attention in bf16 on tensor cores, backward: the gradients of every chunk, from the
// states and their gradients (cuda/linear_attention_gradient.cuh). Notation and formulas of
// ops/gated_linear_attention_cpu_bwd.cpp. With P = scale·q kᵀ∘Γ, Z = scale·(dO vᵀ)∘Γ·w:
//   dq = Σ_heads scale γ dO Sᵀ + Z k            dk = Σ_heads τ w v Dᵀ + Zᵀ q
//   dv = τ w k D + (P w + skip)ᵀ dO             dw = τ k·v Dᵀ + Σ_i P_ij dO_i·v_j
#include "cuda/linear_attention_gradient_scores.cuh"
#include "cuda/linear_attention_gradient_tokens.cuh"

namespace ebb::gpu::linear_attention {
namespace {

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
      barrier_wait<kGradientThreads>(kProductsReady + (heads & 1));
      barrier_arrive<256>(kProductsSeen + (heads & 1));
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
    barrier_arrive<kGradientThreads>(kStepDone + turn.at);
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
      barrier_arrive<kGradientThreads>(kProductsReady + (heads & 1));
      barrier_wait<256>(kProductsSeen + (heads & 1));
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
    barrier_arrive<kGradientThreads>(kStepDone + turn.at);
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
