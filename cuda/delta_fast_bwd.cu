// Gated delta rule in bf16 on tensor cores: the scan from the last chunk to the first, and the
// backward pass as a whole (cuda/delta_fast.cuh, cuda/delta_scan.cuh). The adjoint form of
// ops/delta_rule_cpu_bwd.cpp: X = Aᵀ dV', no gradient of the inverse.
#include "cuda/delta_scan.cuh"
#include "cuda/ordered_sum.cuh"

namespace ebb::gpu::delta {
namespace {

// x [16, 64 tokens] as left operands, each value times its token's first·second·factor.
__device__ __forceinline__ void scaled_left(unsigned (&a)[4][4], const float (&x)[8][4],
                                            const float* s_first, const float* s_second,
                                            float factor, const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * k + h, t = 8 * n + 2 * l.c;
      float2 f = *reinterpret_cast<const float2*>(s_first + t);
      if (s_second) {
        const float2 second = *reinterpret_cast<const float2*>(s_second + t);
        f.x *= second.x, f.y *= second.y;
      }
      f.x *= factor, f.y *= factor;
      a[k][2 * h] = pack_bf16(f.x * x[n][0], f.y * x[n][1]);
      a[k][2 * h + 1] = pack_bf16(f.x * x[n][2], f.y * x[n][3]);
    }
}

// scale γ dO for dO as left operands [16 columns of V, 64 tokens].
__device__ __forceinline__ void scale_left(unsigned (&to)[4][4], const unsigned (&from)[4][4],
                                           const float* s_scale, float factor, const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int t = 16 * k + 2 * l.c;
    const float2 first = *reinterpret_cast<const float2*>(s_scale + t);
    const float2 second = *reinterpret_cast<const float2*>(s_scale + t + 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 by = e < 2 ? first : second;
      to[k][e] =
          pack_bf16(factor * by.x * low_half(from[k][e]), factor * by.y * high_half(from[k][e]));
    }
  }
}

// state += Qᵀ (what scale γ dO has lost when it was rounded to an operand).
template <int SLABS>
__device__ __forceinline__ void add_rest(float (&state)[SLABS][8][4],
                                         const ScanInputs<SLABS, 2>& now, const float* s_scale,
                                         float factor, int warp, const Lane& l) {
  unsigned a[4][4];
  load_values(a, now.v, warp, l);
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 f = *reinterpret_cast<const float2*>(s_scale + 16 * k + 8 * (e / 2) + 2 * l.c);
      const float x = factor * f.x * low_half(a[k][e]), y = factor * f.y * high_half(a[k][e]);
      const unsigned rounded = pack_bf16(x, y);
      a[k][e] = pack_bf16(x - low_half(rounded), y - high_half(rounded));
    }
  warpgroup_begin();
#pragma unroll
  for (int j = 0; j < SLABS; ++j) multiply_columns(state[j], a, now.q()[j]);
  warpgroup_commit();
  warpgroup_wait<0>();
  settle_state<SLABS>(state);
}

// By the warps that multiply; Dᵀ in registers. Per chunk, from the last: 1 dV' = τ K D + Pᵀ dO; D
// out meanwhile. 2 X = Aᵀ dV'. 3 D = γ_n D + Qᵀ (scale γ dO) − Kᵀ (γ β X); X out meanwhile. At the
// end: 4 dh0; where it is wanted, without the error of its largest operand, which is else the
// largest error that it has. ENDS: the state only, written for chain_segments.
template <int SLABS, bool ENDS>
__device__ void reverse_scan(const FastBackward& p, const ScanItem& item, const Segments& segments,
                             ScanShared<SLABS, 2>& s, Arrivals& arrivals) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  float state[SLABS][8][4];
  read_start<SLABS, ENDS>(state, p, item, segments, p.dht, warp, l);
  Turn turn;
  for (int step = 0; step < int(item.steps); ++step) {
    arrivals.wait(s.arrived, turn.at);
    const ScanInputs<SLABS, 2>& now = s.in[turn.at];
    constexpr int kOuts = ScanShared<SLABS, 2>::kOuts;
    ValueOutputs& results = s.out[step % kOuts];
    constexpr int kStates = ScanShared<SLABS, 2>::kStates;
    unsigned doa[4][4], dos[4][4], dva[4][4], xa[4][4], xs[4][4];
    float kd[8][4], dv[8][4];
    if constexpr (SLABS > 2) {  // 1
      if (step > 0) wait_for_state<!ENDS>();
      publish_state<SLABS, !ENDS>(s.states[0], state, warp);
      load_values(doa, now.v, warp, l);
      warpgroup_begin();
      multiply_state<SLABS>(kd, s.states[0], now.k(), warp);
      multiply_columns<true>(dv, doa, now.p);
      warpgroup_commit();
    } else {
      unsigned da[4 * SLABS][4];
      state_as_left<SLABS>(da, state);
      load_values(doa, now.v, warp, l);
      warpgroup_begin();
      multiply_rows<true>(kd, da, now.k()[0]);
#pragma unroll
      for (int j = 1; j < SLABS; ++j) multiply_rows(kd, da + 4 * j, now.k()[j]);
      multiply_columns<true>(dv, doa, now.p);
      warpgroup_commit();
      scale_left(dos, doa, now.read(p.logits), p.scale, l);
      if (!ENDS) {
        if (step >= kStates) barrier_wait<256>(kFree + step % kStates);
        put_state<SLABS>(s.states[step % kStates], da, warp);
      }
    }
    warpgroup_wait<0>();
    settle(kd), settle(dv);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(now.tail() + 8 * n + 2 * l.c);
      dv[n][0] += f.x * kd[n][0], dv[n][1] += f.y * kd[n][1];
      dv[n][2] += f.x * kd[n][2], dv[n][3] += f.y * kd[n][3];
    }
    values_as_left(dva, dv);
    float x[8][4];  // 2
    warpgroup_begin();
    multiply_columns<true>(x, dva, now.a);
    warpgroup_commit();
    scale_state<SLABS>(state, now.total());
    warpgroup_wait<0>();
    settle(x);
    if constexpr (SLABS > 2) scale_left(dos, doa, now.read(p.logits), p.scale, l);
    scaled_left(xs, x, now.gamma(), now.beta(), -1.f, l);  // 3
    warpgroup_begin();
#pragma unroll
    for (int j = 0; j < SLABS; ++j) {
      multiply_columns(state[j], dos, now.q()[j]);
      multiply_columns(state[j], xs, now.k()[j]);
    }
    warpgroup_commit();
    if (!ENDS) {
      wait_for_values<kOuts>(step);
      values_as_left(xa, x);
      put_values(results.other, xa, warp);
      barrier_arrive<256>(kReady + (step & 1));
    }
    warpgroup_wait<0>();
    settle_state<SLABS>(state);
    if (p.dh0) add_rest<SLABS>(state, now, now.read(p.logits), p.scale, warp, l);
    barrier_arrive<192>(kDone + turn.at);
    turn.next<ScanShared<SLABS, 2>::kStages>();
  }
  if (ENDS)
    write_end<SLABS>(state, p, item, segments, warp, l);
  else if (p.dh0 && item.segment == 0)  // 4
    write_transposed<SLABS>(p.dh0 + item.state_at(p), state, p.key_dim, p.value_dim,
                            item.v0 + 16 * warp, l);
}

template <int SLABS, bool ENDS>
__global__ void __launch_bounds__(kScanThreads, 1)
    reverse_kernel(LogitBackward p, Segments segments, const __grid_constant__ ScanMaps<2> maps) {
  auto& s = swizzled_shared<ScanShared<SLABS, 2>>();
  run_scan<SLABS, 2, ENDS, true>(
      p, segments, maps, s,
      [&](const ScanItem& item, Arrivals& arrivals) {
        reverse_scan<SLABS, ENDS>(p, item, segments, s, arrivals);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk) {
        return gated_source(p, p.d_o, p.value_stride(), item.hv, token, chunk);
      },
      [&](const ScanItem& item) {
        ScanStore<SLABS, 2, true>(p, item, s, nullptr, p.x, p.dvalue_step)
            .run([&](const Span& span, int64_t chunk) {
              return dstate_at(p, span, chunk, item.hv, item.v0);
            });
      });
}

template <int SLABS, bool ENDS>
void launch_reverse(const FastBackward& p, const Segments& segments, const ScanMaps<2>& maps,
                    cudaStream_t stream) {
  launch_fast<ScanShared<SLABS, 2>>(reverse_kernel<SLABS, ENDS>, kScanThreads,
                                    grid_of(ScanItem::count(p, segments, ENDS)), stream,
                                    LogitBackward{p}, segments, maps);
}

// Σ da and Σ of dA_log's summands by head.
struct PutGateSums {
  float *g_ddt_bias, *g_dA_log;
  int64_t heads;
  __device__ void operator()(int64_t col, double sum) const {
    float* g = col < heads ? g_ddt_bias : g_dA_log;
    if (g) g[col < heads ? col : col - heads] = float(sum);
  }
};

}  // namespace

void fast_bwd(const DeltaRuleProblem& problem, const DeltaRuleSaved& saved, const Tensor& d_out,
              const Tensor& dht, const DeltaRuleGradients& grads) {
  const Device device = problem.v.device();
  const int64_t hv = problem.value_heads(), k = problem.key_dim();
  const int group = int(hv / problem.heads());
  const bool aligned = reinterpret_cast<uintptr_t>(ptr<bf16>(d_out)) % 16 == 0;
  const Tensor d_o = aligned ? d_out : d_out.clone();
  // X lies where dv will, and the states' gradients where dq and dk will if they fit there.
  const Tensor x =
      grads.dv.defined() ? grads.dv : Tensor::empty(problem.v.shape(), DType::bf16, device);
  const bool in_keys =
      group == 1 && grads.dq.defined() && grads.dk.defined() && problem.value_dim() <= 2 * kChunk;
  Shape states = saved.states.shape();
  if (in_keys) states[0] = problem.sequences();
  const Tensor dstates = Tensor::empty(states, DType::bf16, device);
  const Tensor dq_terms = group_terms(problem, grads.dq), dk_terms = group_terms(problem, grads.dk);
  const Tensor before = chunk_offsets(problem);
  const cudaStream_t stream = stream_of(x);
  FastBackward p{make_fast_problem(problem, saved, before)};
  p.d_o = ptr<bf16>(d_o), p.dht = ptr<float>(dht);
  p.x = ptr<bf16>(x), p.dstates = ptr<bf16>(dstates), p.in_keys = in_keys;
  p.dq = group == 1 ? ptr<bf16>(grads.dq) : nullptr;
  p.dk = group == 1 ? ptr<bf16>(grads.dk) : nullptr;
  p.dv = ptr<bf16>(grads.dv);
  p.dq_terms = ptr<float>(dq_terms), p.dk_terms = ptr<float>(dk_terms);
  p.dg = grads.dg ? grads.dg.raw() : nullptr, p.dbeta = grads.dbeta ? grads.dbeta.raw() : nullptr;
  p.dh0 = ptr<float>(grads.dh0);
  p.dkey_step = token_step(grads.dq ? grads.dq : grads.dk ? grads.dk : problem.q, 2);
  p.dvalue_step = token_step(x, 2);
  p.logits = p.logits || p.dkey_step != p.key_stride() || p.dvalue_step != p.value_stride();
  // Chunks behind the last one of packed sequences add nothing.
  const bool sums = grads.dA_log || grads.ddt_bias;
  const Shape sum_shape{p.chunks, 2 * hv};
  const Tensor gate_sums = !sums ? Tensor()
                           : problem.layout.is_packed()
                               ? Tensor::zeros(sum_shape, DType::f64, device)
                               : Tensor::empty(sum_shape, DType::f64, device);
  p.gate_sums = ptr<double>(gate_sums);
  Tensor buffers[2];
  const Segments segments = cut_sequences(p, device, buffers);
  const ScanMaps<2> maps = gated_maps(p, p.d_o, p.value_stride(), device);
  visit_rule_slabs(k, [&]<int SLABS>() {
    if (segments.count > 1) {
      launch_reverse<SLABS, true>(p, segments, maps, stream);
      chain_segments(p, segments, p.dht, true, stream);
    }
    launch_reverse<SLABS, false>(p, segments, maps, stream);
  });
  chunk_gradients(p, stream);
  sum_groups(dq_terms, grads.dq, group);
  sum_groups(dk_terms, grads.dk, group);
  if (sums)
    ordered_sum(p.gate_sums, p.chunks, 2 * hv, stream,
                PutGateSums{ptr<float>(grads.ddt_bias), ptr<float>(grads.dA_log), hv});
}

}  // namespace ebb::gpu::delta
