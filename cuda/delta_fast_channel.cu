// The scans of the delta rule with a decay per channel in bf16 on tensor cores
// (cuda/delta_scan.cuh), K <= 128: as those of the gated delta rule, with the decays already in the
// operands that delta_fast_channel_prepare.cu has made, so that only γ_n is left for the state.
#include "cuda/delta_channel_scan.cuh"

namespace ebb::gpu::delta {
namespace {

template <int SLABS>
__device__ __forceinline__ void multiply_state(float (&x)[8][4], const unsigned (*a)[4],
                                               const SwizzledTile (&keys)[SLABS]) {
  multiply_rows<true>(x, a, keys[0]);
#pragma unroll
  for (int j = 1; j < SLABS; ++j) multiply_rows(x, a + 4 * j, keys[j]);
}

// By the warps that multiply. Per chunk: 1 K̂ S and Q̃ S; S out meanwhile. 2 Y = β V − K̂ S (β is 1
// where V came with its gate). 3 V' = A Y. 4 S = Diag(γ_n) S + K̄ᵀ V', and o = Q̃ S + P V'; V' out
// meanwhile, then o. At the end: 5 ht. ENDS: the state only, written for chain_segments.
// PLAIN: nothing is erased, V' = V.
template <int SLABS, bool ENDS, bool PLAIN>
__device__ void scan(const Channel<bf16_t>& p, const ScanItem& item, const Segments& segments,
                     ScanShared<SLABS, 3>& s, Arrivals& arrivals, float* ht) {
  using Shared = ScanShared<SLABS, 3>;
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  float state[SLABS][8][4];
  read_start<SLABS, ENDS>(state, p, item, segments, p.h0, warp, l);
  Turn turn;
  for (int step = 0; step < int(item.steps); ++step) {
    arrivals.wait(s.arrived, turn.at);
    const ScanInputs<SLABS, 3>& now = s.in[turn.at];
    constexpr int kOuts = Shared::kOuts;
    ValueOutputs& results = s.out[step % kOuts];
    unsigned sa[4 * SLABS][4], v[4][4], va[4][4];
    state_as_left<SLABS>(sa, state);  // 1
    float y[8][4], out[8][4];
    warpgroup_begin();
    if constexpr (!PLAIN) {
      multiply_state<SLABS>(y, sa, now.k());
      warpgroup_commit();
    }
    if (!ENDS) {
      multiply_state<SLABS>(out, sa, now.q());
      warpgroup_commit();
      if (step >= 2) barrier_wait<256>(kFree + (step & 1));
      put_state<SLABS>(s.states[step & 1], sa, warp);
    }
    load_values(PLAIN ? va : v, now.v, warp, l);
    if constexpr (PLAIN) {
      warpgroup_wait<0>();
      settle(va);
      decay_state<SLABS>(state, now.numbers, p.key_dim, l);
    } else {
      warpgroup_wait<ENDS ? 0 : 1>();
      settle(y);
      const float* beta = now.numbers + p.key_dim;
#pragma unroll
      for (int n = 0; n < 8; ++n) {  // 2
        const float2 b = *reinterpret_cast<const float2*>(beta + 8 * n + 2 * l.c);
        const unsigned top = v[n / 2][2 * (n % 2)], bottom = v[n / 2][2 * (n % 2) + 1];
        y[n][0] = b.x * low_half(top) - y[n][0], y[n][1] = b.y * high_half(top) - y[n][1];
        y[n][2] = b.x * low_half(bottom) - y[n][2], y[n][3] = b.y * high_half(bottom) - y[n][3];
      }
      values_as_left(v, y);
      float values[8][4];  // 3
      warpgroup_begin();
      multiply_rows<true>(values, v, now.a);
      warpgroup_commit();
      decay_state<SLABS>(state, now.numbers, p.key_dim, l);
      warpgroup_wait<0>();
      settle(values);
      values_as_left(va, values);
    }
    if (!ENDS) settle(out);
    warpgroup_begin();  // 4
    add_to_state<SLABS>(state, va, now.kept());
    warpgroup_commit();
    if (!ENDS) {
      multiply_rows(out, va, now.p);
      warpgroup_commit();
      wait_for_values<kOuts>(step);
      put_values(results.values, va, warp);
    }
    warpgroup_wait<0>();
    settle_state<SLABS>(state);
    if (!ENDS) settle(out);
    barrier_arrive<192>(kDone + turn.at);
    if (!ENDS) {
      values_as_left(v, out);
      put_values(results.other, v, warp);
      barrier_arrive<256>(kReady + (step & 1));
    }
    turn.next<Shared::kStages>();
  }
  if (ENDS)
    write_end<SLABS>(state, p, item, segments, warp, l);
  else if (ht && item.segment == segments.count - 1)  // 5
    write_transposed<SLABS>(ht + item.state_at(p), state, p.key_dim, p.value_dim,
                            item.v0 + 16 * warp, l);
}

template <int SLABS, bool ENDS, bool PLAIN>
__global__ void __launch_bounds__(kScanThreads, 1)
    channel_scan_kernel(Channel<bf16_t> p, Segments segments,
                        const __grid_constant__ ScanMaps<3> maps, bf16_t* o, float* ht) {
  auto& s = swizzled_shared<ScanShared<SLABS, 3>>();
  run_scan<SLABS, 3, ENDS, false>(
      p, segments, maps, s,
      [&](const ScanItem& item, Arrivals& arrivals) {
        scan<SLABS, ENDS, PLAIN>(p, item, segments, s, arrivals, ht);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk) {
        const bf16_t* v = p.written ? p.written + p.row_at(token, item.hv) * p.value_dim
                                    : p.v + p.v_at(token, item.hv);
        return channel_source(p, v, p.written ? p.value_dim : p.v_stride(), item.hv, token, chunk);
      },
      [&](const ScanItem& item) {
        ScanStore<SLABS, 3, false>(p, item, s, p.values, o, p.value_stride())
            .run(ChunkStates{p, item, p.states});
      });
}

// By the warps that multiply; Dᵀ in registers. Per chunk, from the last: 1 dV' = K̄ D + Pᵀ dO; D out
// meanwhile. 2 X = Aᵀ dV'. 3 D = Diag(γ_n) D + Q̃ᵀ dO − K̂ᵀ X; X out meanwhile. At the end: 4 dh0.
// PLAIN: nothing is erased, X = dV', which is dv.
template <int SLABS, bool ENDS, bool PLAIN>
__device__ void reverse_scan(const ChannelBackward<bf16_t>& p, const ScanItem& item,
                             const Segments& segments, ScanShared<SLABS, 3>& s,
                             Arrivals& arrivals) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  float state[SLABS][8][4];
  read_start<SLABS, ENDS>(state, p, item, segments, p.dht, warp, l);
  Turn turn;
  for (int step = 0; step < int(item.steps); ++step) {
    arrivals.wait(s.arrived, turn.at);
    const ScanInputs<SLABS, 3>& now = s.in[turn.at];
    constexpr int kOuts = ScanShared<SLABS, 3>::kOuts;
    ValueOutputs& results = s.out[step % kOuts];
    unsigned da[4 * SLABS][4], doa[4][4], xa[4][4];
    state_as_left<SLABS>(da, state);  // 1
    load_values(doa, now.v, warp, l);
    float dv[8][4];
    warpgroup_begin();
    multiply_state<SLABS>(dv, da, now.kept());
    multiply_columns(dv, doa, now.p);
    warpgroup_commit();
    if (!ENDS) {
      if (step >= 2) barrier_wait<256>(kFree + (step & 1));
      put_state<SLABS>(s.states[step & 1], da, warp);
    }
    warpgroup_wait<0>();
    settle(dv);
    values_as_left(xa, dv);
    unsigned minus[4][4];  // −X
    if constexpr (PLAIN) {
      decay_state<SLABS>(state, now.numbers, p.key_dim, l);
    } else {
      float x[8][4];  // 2
      warpgroup_begin();
      multiply_columns<true>(x, xa, now.a);
      warpgroup_commit();
      decay_state<SLABS>(state, now.numbers, p.key_dim, l);
      warpgroup_wait<0>();
      settle(x);
      values_as_left(xa, x);
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) minus[k][e] = xa[k][e] ^ 0x80008000u;
    }
    if (!ENDS) {
      wait_for_values<kOuts>(step);
      put_values(PLAIN ? results.other : results.values, xa, warp);
    }
    if constexpr (!PLAIN) settle(minus);
    warpgroup_begin();  // 3
    add_to_state<SLABS>(state, doa, now.q());
    if constexpr (!PLAIN) add_to_state<SLABS>(state, minus, now.k());
    warpgroup_commit();
    if (!ENDS) barrier_arrive<256>(kReady + (step & 1));
    warpgroup_wait<0>();
    settle_state<SLABS>(state);
    barrier_arrive<192>(kDone + turn.at);
    turn.next<ScanShared<SLABS, 3>::kStages>();
  }
  if (ENDS)
    write_end<SLABS>(state, p, item, segments, warp, l);
  else if (p.dh0 && item.segment == 0)  // 4
    write_transposed<SLABS>(p.dh0 + item.state_at(p), state, p.key_dim, p.value_dim,
                            item.v0 + 16 * warp, l);
}

template <int SLABS, bool ENDS, bool PLAIN>
__global__ void __launch_bounds__(kScanThreads, 1)
    channel_reverse_kernel(ChannelBackward<bf16_t> p, Segments segments,
                           const __grid_constant__ ScanMaps<3> maps) {
  auto& s = swizzled_shared<ScanShared<SLABS, 3>>();
  run_scan<SLABS, 3, ENDS, true>(
      p, segments, maps, s,
      [&](const ScanItem& item, Arrivals& arrivals) {
        reverse_scan<SLABS, ENDS, PLAIN>(p, item, segments, s, arrivals);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk) {
        return channel_source(p, p.d_o + p.value_at(token, item.hv), p.value_stride(), item.hv,
                              token, chunk);
      },
      [&](const ScanItem& item) {
        ScanStore<SLABS, 3, true>(p, item, s, PLAIN ? nullptr : p.x, PLAIN ? p.dv : nullptr,
                                  p.dv_step())
            .run(ChunkStates{p, item, p.dstates});
      });
}

template <int SLABS, class P, class... P2, class... A>
void launch(void (*kernel)(P2...), const P& p, const Segments& segments, const ScanMaps<3>& maps,
            bool ends, cudaStream_t stream, const A&... more) {
  launch_fast<ScanShared<SLABS, 3>>(kernel, kScanThreads,
                                    grid_of(ScanItem::count(p, segments, ends)), stream, p,
                                    segments, maps, more...);
}

template <int SLABS, bool PLAIN>
void run_segments(const Channel<bf16_t>& p, const Segments& segments, const ScanMaps<3>& maps,
                  bf16_t* o, float* ht, cudaStream_t stream) {
  if (segments.count > 1) {
    launch<SLABS>(channel_scan_kernel<SLABS, true, PLAIN>, p, segments, maps, true, stream, o, ht);
    chain_segments(p, segments, p.h0, false, stream);
  }
  launch<SLABS>(channel_scan_kernel<SLABS, false, PLAIN>, p, segments, maps, false, stream, o, ht);
}

}  // namespace

bool channel_fast_sizes(const DeltaRuleProblem& p) {
  return p.v.dtype() == DType::bf16 && scans_fit(p.v.device(), p.key_dim() > 128) &&
         p.chunk >= kChunk && p.key_dim() % 8 == 0 && p.value_dim() % 8 == 0;
}

bool channel_fast_path(const DeltaRuleProblem& p) {
  const auto aligned = [](const Tensor& t) {
    return !t.defined() || reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
  };
  return channel_fast_sizes(p) && aligned(p.q) && aligned(p.k) && aligned(p.v) && aligned(p.g) &&
         aligned(p.erase) && aligned(p.write);
}

void channel_fast_scan(const Channel<bf16_t>& p, bf16_t* o, float* ht, Device device,
                       cudaStream_t stream) {
  const ScanMaps<3> maps =
      p.written ? channel_maps(p, p.written, p.tokens * p.value_dim, p.value_dim, device)
                : channel_maps(p, p.v, p.value_dim, p.v_stride(), device);
  Tensor buffers[2];
  const Segments segments = cut_sequences(p, device, buffers);
  if (p.key_dim > 128) return wide_channel_scan(p, segments, maps, o, ht, stream);
  visit_fast_slabs(p.key_dim, [&]<int SLABS>() {
    if (p.plain)
      run_segments<SLABS, true>(p, segments, maps, o, ht, stream);
    else
      run_segments<SLABS, false>(p, segments, maps, o, ht, stream);
  });
}

void channel_fast_reverse(const ChannelBackward<bf16_t>& p, Device device, cudaStream_t stream) {
  const ScanMaps<3> maps = channel_maps(p, p.d_o, p.value_dim, p.value_stride(), device);
  Tensor buffers[2];
  const Segments segments = cut_sequences(p, device, buffers);
  if (p.key_dim > 128) return wide_channel_reverse(p, segments, maps, stream);
  const auto run = [&]<int SLABS, bool PLAIN>() {
    if (segments.count > 1) {
      launch<SLABS>(channel_reverse_kernel<SLABS, true, PLAIN>, p, segments, maps, true, stream);
      chain_segments(p, segments, p.dht, true, stream);
    }
    launch<SLABS>(channel_reverse_kernel<SLABS, false, PLAIN>, p, segments, maps, false, stream);
  };
  visit_fast_slabs(p.key_dim, [&]<int SLABS>() {
    p.plain ? run.template operator()<SLABS, true>() : run.template operator()<SLABS, false>();
  });
}

}  // namespace ebb::gpu::delta
