// Gated delta rule in bf16 on tensor cores: dq, dk, dv, dg and dβ of every chunk, from X, V' and
// the states and their gradients (cuda/delta_fast.cuh). dv = β X in X's place. dβ_i = X_i·V_i − γ_i
// X_i·(S k_i) − Σ_{j<i} Γ_ij (k_i·k_j) (X_i·V'_j), which is X_i·V'_i/β_i, but V has not been
// rounded and V' has, twice. Where q and k came unnormalised, with reciprocal lengths r, all
// products are with q and k as they are and carry r beside the decays; what comes out is r times
// the gradient of the normalised row, and projecting out its own direction is all that is left of
// the normalisation.
#include "cuda/delta_fast_gradients.cuh"

namespace ebb::gpu::delta {
namespace {

using namespace rule;

// Block (head, chunk): the two groups side by side, then dq, dk, dg and dβ to memory.
template <int SLABS, class P>
__global__ void __launch_bounds__(kRuleThreads, SLABS == 1 ? 2 : 1) gradient_kernel(P p) {
  constexpr bool kLogits = P::kLogits;
  auto& s = swizzled_shared<GradientShared<SLABS>>();
  const Lane l;
  const int warp = (int(threadIdx.x) >> 5) & 3, m0 = 16 * warp;
  const int hv = int(blockIdx.x);
  for (int64_t chunk = blockIdx.y; chunk < p.chunks; chunk += gridDim.y) {
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    const ValueRows values(p, span, hv);
    fetch_values(p, span, chunk, hv, 0, 0, s.stage[0]);
    if (p.value_dim > kFastTile) fetch_values(p, span, chunk, hv, kFastTile, 0, s.stage[1]);
    fetch_keys(p, p.q, span, hv, 0, s.q);
    fetch_keys(p, p.k, span, hv, 0, s.k);
    fetch_chunk(p, span, chunk, hv, s);
    commit_copies();
    wait_copy_groups<0>();
    publish_tiles();
    __syncthreads();
    write_value_gradients<false>(p, s, values, span, hv, 0);
    unsigned a[4][4];
    if (threadIdx.x < kRuleThreads / 2) {
      ReadGradients<SLABS> x = {};
      const float carry = value_products<true, true>(p, s, x, span, chunk, hv, 0, warp);
      if ((threadIdx.x & 31) == 0) s.carry[warp] = carry;
      x.template scores<kLogits>(s, p.scale, a, warp, l);
      x.template row_sums<kLogits, false>(s, p.scale, warp, l);
      publish_tiles();
      meet<0>();
      x.keys(s, a, warp);
      hand_over<SLABS>(s, x.dk);
      if (kLogits && p.normalize) project_rows<SLABS>(x.dq, s.q, s.gates.query, m0, l);
      put_gradients<SLABS>(s.dq(), x.dq, m0, l);
      if (p.dq_terms) write_terms<SLABS>(p, p.dq_terms, x.dq, span, hv, 0, m0, l);
      meet<0>();
      if (warp == 0) write_gate_gradients(p, s, span, chunk, hv);
    } else {
      EraseGradients<SLABS> x = {};
      const float carry = value_products<true, true>(p, s, x, span, chunk, hv, 0, warp);
      if ((threadIdx.x & 31) == 0) s.carry[4 + warp] = carry;
      float key_p[2];
      x.template scores<kLogits>(s, a, key_p, warp, l);
      x.template row_sums<false>(s, key_p, warp, l);
      publish_tiles();
      meet<1>();
      x.keys(s, a, warp);
      meet<1>();
      take_over<SLABS>(s, x.dk);
      if (kLogits && p.normalize) project_rows<SLABS>(x.dk, s.k, s.gates.key, m0, l);
      put_gradients<SLABS>(s.dk(), x.dk, m0, l);
      if (p.dk_terms) write_terms<SLABS>(p, p.dk_terms, x.dk, span, hv, 0, m0, l);
    }
    barrier_wait<kRuleThreads>(0);
    store_gradients(p, s, span, hv, 0);
    __syncthreads();
  }
}

}  // namespace

void chunk_gradients(const FastBackward& p, cudaStream_t stream) {
  if (p.key_dim > 128) return wide_chunk_gradients(p, stream);
  visit_fast_slabs(p.key_dim, [&]<int SLABS>() {
    if (p.logits)
      launch_fast<GradientShared<SLABS>>(gradient_kernel<SLABS, LogitBackward>, kRuleThreads,
                                         chunk_grid(p), stream, LogitBackward{p});
    else
      launch_fast<GradientShared<SLABS>>(gradient_kernel<SLABS, FastBackward>, kRuleThreads,
                                         chunk_grid(p), stream, p);
  });
}

}  // namespace ebb::gpu::delta
