// Gated delta rule in bf16 on tensor cores: the scan over chunks with the read-out, and the forward
// pass as a whole (cuda/delta_fast.cuh, cuda/delta_scan.cuh).
#include "cuda/delta_scan.cuh"
#include "tensor/device_flags.h"

namespace ebb::gpu::delta {
namespace {

// Y = β (V − γ K S) as left operands, from K S.
__device__ __forceinline__ void combine_values(unsigned (&ya)[4][4], float (&y)[8][4],
                                               const unsigned (&v)[4][4], const float* beta,
                                               const float* gamma, const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int t = 16 * k + 8 * h + 2 * l.c;
      const float2 b = *reinterpret_cast<const float2*>(beta + t);
      const float2 g = *reinterpret_cast<const float2*>(gamma + t);
      const float(&x)[4] = y[2 * k + h];
      const unsigned top = v[k][2 * h], bottom = v[k][2 * h + 1];
      ya[k][2 * h] =
          pack_bf16(b.x * (low_half(top) - g.x * x[0]), b.y * (high_half(top) - g.y * x[1]));
      ya[k][2 * h + 1] =
          pack_bf16(b.x * (low_half(bottom) - g.x * x[2]), b.y * (high_half(bottom) - g.y * x[3]));
    }
}

// By the warps that multiply. Per chunk: 1 K S and Q S; S out meanwhile. 2 Y = β (V − γ K S).
// 3 V' = A Y. 4 S = γ_n S + Kᵀ (τ V'), and o = scale γ Q S + P V'; V' out meanwhile, then o. At the
// end: 5 ht. ENDS: the state only, written for chain_segments.
template <int SLABS, bool ENDS>
__device__ void scan(const FastProblem& p, const ScanItem& item, const Segments& segments,
                     ScanShared<SLABS, 2>& s, Arrivals& arrivals, float* ht) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  float state[SLABS][8][4];
  read_start<SLABS, ENDS>(state, p, item, segments, p.h0, warp, l);
  Turn turn;
  for (int step = 0; step < int(item.steps); ++step) {
    arrivals.wait(s.arrived, turn.at);
    const ScanInputs<SLABS, 2>& now = s.in[turn.at];
    constexpr int kOuts = ScanShared<SLABS, 2>::kOuts;
    ValueOutputs& results = s.out[step % kOuts];
    constexpr int kStates = ScanShared<SLABS, 2>::kStates;
    unsigned v[4][4], ya[4][4], va[4][4];
    float y[8][4], out[8][4];
    if constexpr (SLABS > 2) {  // 1
      if (step > 0) wait_for_state<!ENDS>();
      publish_state<SLABS, !ENDS>(s.states[0], state, warp);
      warpgroup_begin();
      multiply_state<SLABS>(y, s.states[0], now.k(), warp);
      warpgroup_commit();
      if (!ENDS) {
        multiply_state<SLABS>(out, s.states[0], now.q(), warp);
        warpgroup_commit();
      }
    } else {
      unsigned sa[4 * SLABS][4];
      state_as_left<SLABS>(sa, state);
      warpgroup_begin();
      multiply_rows<true>(y, sa, now.k()[0]);
#pragma unroll
      for (int j = 1; j < SLABS; ++j) multiply_rows(y, sa + 4 * j, now.k()[j]);
      warpgroup_commit();
      if (!ENDS) {
        multiply_rows<true>(out, sa, now.q()[0]);
#pragma unroll
        for (int j = 1; j < SLABS; ++j) multiply_rows(out, sa + 4 * j, now.q()[j]);
        warpgroup_commit();
        if (step >= kStates) barrier_wait<256>(kFree + step % kStates);
        put_state<SLABS>(s.states[step % kStates], sa, warp);
      }
    }
    load_values(v, now.v, warp, l);
    warpgroup_wait<ENDS ? 0 : 1>();
    settle(y);
    combine_values(ya, y, v, now.beta(), now.gamma(), l);  // 2
    float vp[8][4];                                        // 3
    warpgroup_begin();
    multiply_rows<true>(vp, ya, now.a);
    warpgroup_commit();
    scale_state<SLABS>(state, now.total());
    warpgroup_wait<0>();
    settle(vp);
    if (!ENDS) settle(out), values_as_left(va, vp);
    scale_tokens(vp, now.tail(), 1.f, l);
    values_as_left(ya, vp);
    warpgroup_begin();  // 4
#pragma unroll
    for (int j = 0; j < SLABS; ++j) multiply_columns(state[j], ya, now.k()[j]);
    warpgroup_commit();
    if (!ENDS) {
      scale_tokens(out, now.read(p.logits), p.scale, l);
      settle(out);
      warpgroup_begin();
      multiply_rows(out, va, now.p);
      warpgroup_commit();
      wait_for_values<kOuts>(step);
      put_values(results.values, va, warp);
    }
    warpgroup_wait<0>();
    settle_state<SLABS>(state);
    barrier_arrive<192>(kDone + turn.at);
    if (!ENDS) {
      settle(out);
      values_as_left(va, out);
      put_values(results.other, va, warp);
      barrier_arrive<256>(kReady + (step & 1));
    }
    turn.next<ScanShared<SLABS, 2>::kStages>();
  }
  if (ENDS)
    write_end<SLABS>(state, p, item, segments, warp, l);
  else if (ht && item.segment == segments.count - 1)  // 5
    write_transposed<SLABS>(ht + item.state_at(p), state, p.key_dim, p.value_dim,
                            item.v0 + 16 * warp, l);
}

template <int SLABS, bool ENDS>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_kernel(FastProblem p, Segments segments, const __grid_constant__ ScanMaps<2> maps,
                bf16_t* o, float* ht) {
  auto& s = swizzled_shared<ScanShared<SLABS, 2>>();
  run_scan<SLABS, 2, ENDS, false>(
      p, segments, maps, s,
      [&](const ScanItem& item, Arrivals& arrivals) {
        scan<SLABS, ENDS>(p, item, segments, s, arrivals, ht);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk) {
        return gated_source(p, p.v, p.value_step, item.hv, token, chunk);
      },
      [&](const ScanItem& item) {
        ScanStore<SLABS, 2, false>(p, item, s, p.values, o, p.value_stride())
            .run(ChunkStates{p, item, p.states});
      });
}

template <int SLABS, bool ENDS>
void launch_scan(const FastProblem& p, const Segments& segments, const ScanMaps<2>& maps, bf16_t* o,
                 float* ht, cudaStream_t stream) {
  launch_fast<ScanShared<SLABS, 2>>(scan_kernel<SLABS, ENDS>, kScanThreads,
                                    grid_of(ScanItem::count(p, segments, ENDS)), stream, p,
                                    segments, maps, o, ht);
}

}  // namespace

bool fast_sizes(const DeltaRuleProblem& p) {
  return p.v.dtype() == DType::bf16 && scans_fit(p.v.device(), p.key_dim() > 128) &&
         p.chunk >= kChunk && p.key_dim() % 8 == 0 && p.value_dim() % 8 == 0;
}

bool fast_path(const DeltaRuleProblem& p) {
  const auto aligned = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
  };
  return fast_sizes(p) && (p.in_place || (aligned(p.q) && aligned(p.k) && aligned(p.v)));
}

FastProblem make_fast_problem(const DeltaRuleProblem& problem, const DeltaRuleSaved& saved,
                              const Tensor& before) {
  FastProblem p{make_problem<bf16>(problem, saved, before)};
  const auto logits = [](const Tensor& t) {
    return Logits{t.raw(), token_step(t, 1), t.dtype() == DType::bf16};
  };
  p.gates = reinterpret_cast<RuleGates*>(ptr<float>(saved.gates));
  p.key_step = token_step(problem.q, 2), p.value_step = token_step(problem.v, 2);
  p.decays = logits(problem.g), p.strengths = logits(problem.beta);
  p.A_log = ptr<float>(problem.A_log), p.dt_bias = ptr<float>(problem.dt_bias);
  p.lower_bound = float(problem.lower_bound), p.beta_scale = float(problem.beta_scale);
  p.sigmoid = problem.sigmoid, p.normalize = problem.normalize;
  p.logits = p.sigmoid || p.normalize || p.A_log || p.key_step != p.key_stride() ||
             p.value_step != p.value_stride();
  if (!p.logits && problem.in_place) {  // finished gates, but perhaps in rows that lie apart
    p.g = ptr<float>(problem.g), p.beta = ptr<float>(problem.beta);
    p.logits = p.decays.step != p.value_heads || p.strengths.step != p.value_heads;
  }
  return p;
}

DeltaRuleSaved fast_fwd(const DeltaRuleProblem& problem, const Tensor& o, const Tensor& ht) {
  const Device device = problem.v.device();
  const int64_t hv = problem.value_heads(), tokens = problem.batch() * problem.time();
  const int64_t k = problem.key_dim(), v = problem.value_dim();
  const int64_t chunks = problem.layout.chunk_count(problem.batch(), problem.time(), kChunk);
  const DeltaRuleSaved saved{Tensor::empty({hv, tokens, 2 * kChunk}, DType::bf16, device),
                             Tensor::empty({chunks, hv, v, k}, DType::bf16, device),
                             Tensor::empty({hv, tokens, v}, DType::bf16, device),
                             Tensor::empty({chunks, hv, kRuleGateFloats}, DType::f32, device)};
  const Tensor before = chunk_offsets(problem);
  const cudaStream_t stream = stream_of(o);
  const FastProblem p = make_fast_problem(problem, saved, before);
  Tensor buffers[2];
  const Segments segments = cut_sequences(p, device, buffers);
  const ScanMaps<2> maps = gated_maps(p, p.v, p.value_step, device);
  prepare_chunks(p, stream);
  visit_rule_slabs(k, [&]<int SLABS>() {
    if (segments.count > 1) {
      launch_scan<SLABS, true>(p, segments, maps, nullptr, nullptr, stream);
      chain_segments(p, segments, p.h0, false, stream);
    }
    launch_scan<SLABS, false>(p, segments, maps, ptr<bf16>(o), ptr<float>(ht), stream);
  });
  return saved;
}

}  // namespace ebb::gpu::delta
