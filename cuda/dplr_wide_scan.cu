// dplr of wide heads on tensor cores: the scans over chunks (cuda/dplr_wide.cuh). A block has a
// segment of a sequence, a head and 64 columns of V; its warps as in dplr_fast_scan.cu. Products go
// into the decayed state itself, while what they multiply is its copy in bf16.
#include "cuda/dplr_scan.cuh"
#include "cuda/dplr_wide.cuh"

namespace ebb::gpu::low_rank {
namespace {

template <int PANELS>
struct ForwardInput {
  WideStep<PANELS> step;
  WideTerms<PANELS> terms;
};
template <int PANELS>
struct ReverseInput {
  WideStep<PANELS> step;
  SwizzledTile d_o;
};
template <int PANELS>
struct ForwardOutput {
  SwizzledTile state[PANELS], out;
};
template <int PANELS>
struct ReverseOutput {
  SwizzledTile state[PANELS];
};
template <int PANELS>
using ForwardShared = StepShared<ForwardInput<PANELS>, ForwardOutput<PANELS>, 2, 2>;
template <int PANELS>
using ReverseShared = StepShared<ReverseInput<PANELS>, ReverseOutput<PANELS>, 3, 2>;
static_assert(sizeof(ForwardShared<2>) + 1024 <= 227 * 1024);
static_assert(sizeof(ReverseShared<2>) + 1024 <= 227 * 1024);

// Of WideStep, without what fills it up to whole tiles.
template <int PANELS>
constexpr int kWideStepBytes = (PANELS * PANELS + PANELS) * int(sizeof(SwizzledTile)) +
                               64 * PANELS* int(sizeof(float));

// A chunk's step and 64 rows and columns of dO, as far as there are tokens; by one warp.
template <int PANELS>
__device__ __forceinline__ void fetch_step(const WideProblem& p, const CUtensorMap& d_o,
                                           const WideStep<PANELS>& from, int64_t token, int head,
                                           int block, ReverseInput<PANELS>& to, Mbarrier& arrived) {
  constexpr int kBytes = kWideStepBytes<PANELS>;
  const int lane = int(threadIdx.x) & 31;
#if EBB_WGMMA
  if (lane != 0) return arrived.arrive();
  arrive_expecting(arrived, kBytes + int(sizeof(SwizzledTile)));
  fetch_run(Run{&to.step, &from, kBytes}, arrived);
  gpu::fetch_box(to.d_o, d_o, 64 * block, head, token, arrived);
#else
  for (int at = 16 * lane; at < kBytes; at += 16 * 32)
    copy_async(reinterpret_cast<char*>(&to.step) + at, reinterpret_cast<const char*>(&from) + at);
  for (int i = lane; i < 64 * 8; i += 32) {
    const int r = i / 8, c = i % 8 * 8;
    const bool valid = token + r < p.tokens && 64 * block + c < p.value_dim;
    copy_async_or_zero(to.d_o.at(r, c),
                       valid ? p.d_o + p.value_at(token + r, head) + 64 * block + c : p.d_o, valid);
  }
  wait_copies();
  publish_tiles();
  arrived.arrive();
#endif
}

template <int PANELS>
constexpr int kWideTermsBytes = (PANELS + 1) * int(sizeof(SwizzledTile)) +
                                64 * PANELS* int(sizeof(float));

// The state as left operands, and to where the storing warps find it.
template <int PANELS>
__device__ __forceinline__ void put_panels(SwizzledTile (&s)[PANELS],
                                           const unsigned (&x)[PANELS][4][4], int warp) {
#pragma unroll
  for (int i = 0; i < PANELS; ++i) put_rows(s[i], x[i], 16 * warp, Lane());
}

// By the warps that multiply. Per chunk: 1 S in bf16. 2 S = Diag(ε²) S + what V adds, then + M S,
// and R S; S before that out meanwhile. 3 o out. At the end: 4 ht. ENDS: the state only, for
// chain_segments, from a zero state with what V adds, or from unit vectors without.
template <int PANELS, bool ENDS>
__device__ __forceinline__ void scan(const FastProblem& p, const ScanItem& item,
                                     const Segments& segments, ForwardShared<PANELS>& s,
                                     RingPlace<2>& in, OutputPlace<2>& to, float* ht) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, m0 = 16 * warp;
  const bool unit = is_unit<ENDS>(p, item);
  float state[PANELS][8][4];
  read_start<PANELS, ENDS>(state, p, item, segments, p.h0, warp, l);
  for (int step = 0; step < int(item.steps); ++step) {
    in.wait_full(s.ring);
    const ForwardInput<PANELS>& now = s.in[in.at];
    unsigned sa[PANELS][4][4];
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      values_as_left(sa[i], state[i]);  // 1
      scale_columns(state[i], now.step.decay + 64 * i, l);
      if (!unit) add_terms(state[i], now.terms.state[i], now.terms.units[i], m0, l);
      settle(sa[i]), settle(state[i]);
    }
    warpgroup_begin();  // 2
#pragma unroll
    for (int i = 0; i < PANELS; ++i)
#pragma unroll
      for (int j = 0; j < PANELS; ++j) multiply_rows(state[i], sa[j], now.step.move[i][j]);
    float out[8][4];
    if (!ENDS) {
      multiply_rows<true>(out, sa[0], now.step.read[0]);
#pragma unroll
      for (int j = 1; j < PANELS; ++j) multiply_rows(out, sa[j], now.step.read[j]);
    }
    warpgroup_commit();
    if (!ENDS) {
      to.wait_empty(s.outputs);
      put_panels<PANELS>(s.out[to.at].state, sa, warp);
    }
    warpgroup_wait<0>();
    settle_state<PANELS>(state);
    if (!ENDS) {
      settle(out);
      add_columns(out, now.terms.out, warp, l);
    }
    in.release(s.ring);
    in.next();
    if (!ENDS) {
      unsigned oa[4][4];
      values_as_left(oa, out);
      put_values(s.out[to.at].out, oa, warp);  // 3
      OutputPlace<2>::arrive(s.outputs.full[to.at]);
      to.next();
    }
  }
  if (ENDS)
    write_end<PANELS>(state, p, item, segments, warp, l);
  else if (ht && item.segment == segments.count - 1)  // 4
    write_transposed<PANELS>(ht + item.state_at(p), state, p.key_dim, p.value_dim, item.v0 + m0, l);
}

// The same in reverse, D in registers. Per chunk, from the last: 1 D in bf16. 2 D = Diag(ε²) D,
// then
// + Mᵀ D + Rᵀ dO; D before that out meanwhile. At the end: 3 dh0.
template <int PANELS, bool ENDS>
__device__ __forceinline__ void reverse_scan(const FastProblem& p, const ScanItem& item,
                                             const Segments& segments, ReverseShared<PANELS>& s,
                                             RingPlace<3>& in, OutputPlace<2>& to) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  const bool unit = is_unit<ENDS>(p, item);
  float state[PANELS][8][4];
  read_start<PANELS, ENDS>(state, p, item, segments, p.dht, warp, l);
  for (int step = 0; step < int(item.steps); ++step) {
    in.wait_full(s.ring);
    const ReverseInput<PANELS>& now = s.in[in.at];
    unsigned da[PANELS][4][4], doa[4][4];
    load_values(doa, now.d_o, warp, l);
    if (step == 0 || unit) cut_tokens(doa, unit ? 0 : item.last_rows(), l);
    settle(doa);
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      values_as_left(da[i], state[i]);  // 1
      scale_columns(state[i], now.step.decay + 64 * i, l);
      settle(da[i]), settle(state[i]);
    }
    warpgroup_begin();  // 2
#pragma unroll
    for (int j = 0; j < PANELS; ++j) {
#pragma unroll
      for (int i = 0; i < PANELS; ++i) multiply_columns(state[j], da[i], now.step.move[i][j]);
      multiply_columns(state[j], doa, now.step.read[j]);
    }
    warpgroup_commit();
    if (!ENDS) {
      to.wait_empty(s.outputs);
      put_panels<PANELS>(s.out[to.at].state, da, warp);
      OutputPlace<2>::arrive(s.outputs.full[to.at]);
      to.next();
    }
    warpgroup_wait<0>();
    settle_state<PANELS>(state);
    in.release(s.ring);
    in.next();
  }
  if (ENDS)
    write_end<PANELS>(state, p, item, segments, warp, l);
  else if (p.dh0 && item.segment == 0)  // 3
    write_transposed<PANELS>(p.dh0 + item.state_at(p), state, p.key_dim, p.value_dim,
                             item.v0 + 16 * warp, l);
}

template <int PANELS, bool ENDS>
__global__ void __launch_bounds__(kThreads, 1)
    scan_kernel(WideProblem p, Segments segments, bf16_t* o, float* ht) {
  auto& s = swizzled_shared<ForwardShared<PANELS>>();
  run_roles<ENDS, false>(
      p, segments, s,
      [&](const ScanItem& item, RingPlace<2>& in, OutputPlace<2>& to) {
        scan<PANELS, ENDS>(p, item, segments, s, in, to, ht);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk, int rows,
          const ForwardOutput<PANELS>& from) {
        store_values(o + p.value_at(token, item.hv) + item.v0, p.value_stride(), from.out, rows,
                     p.value_dim - item.v0);
        const int64_t to = p.state_tile(p.tile_at(chunk, item.hv), item.v0 / kFastTile, 0);
#pragma unroll
        for (int i = 0; i < PANELS; ++i) store_tile(p.chunk_states[to + i], from.state[i]);
      },
      [&](const ScanItem& item, int64_t, int64_t chunk, int, ForwardInput<PANELS>& to,
          Mbarrier& arrived) {
        const int64_t at = p.tile_at(chunk, item.hv);
        const Run runs[] = {{&to.step, &p.template step<PANELS>(at), kWideStepBytes<PANELS>},
                            {&to.terms, &p.template term<PANELS>(at, block_of<ENDS>(p, item)),
                             kWideTermsBytes<PANELS>}};
        fetch_runs(runs, arrived);
      });
}

template <int PANELS, bool ENDS>
__global__ void __launch_bounds__(kThreads, 1)
    reverse_kernel(WideProblem p, Segments segments, const __grid_constant__ CUtensorMap d_o) {
  auto& s = swizzled_shared<ReverseShared<PANELS>>();
  run_roles<ENDS, true>(
      p, segments, s,
      [&](const ScanItem& item, RingPlace<3>& in, OutputPlace<2>& to) {
        reverse_scan<PANELS, ENDS>(p, item, segments, s, in, to);
      },
      [&](const ScanItem& item, int64_t, int64_t chunk, int, const ReverseOutput<PANELS>& from) {
        const int64_t to = p.state_tile(p.tile_at(chunk, item.hv), item.v0 / kFastTile, 0);
#pragma unroll
        for (int i = 0; i < PANELS; ++i) store_tile(p.dstates[to + i], from.state[i]);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk, int, ReverseInput<PANELS>& to,
          Mbarrier& arrived) {
        fetch_step<PANELS>(p, d_o, p.template step<PANELS>(p.tile_at(chunk, item.hv)), token,
                           item.hv, block_of<ENDS>(p, item), to, arrived);
      });
}

// run.operator()<PANELS, ENDS>() for the pass over segments, where there are several, with what
// joins them, and for the scan proper.
template <class Run>
void run_passes(const WideProblem& p, const Segments& segments, const float* given, bool reverse,
                cudaStream_t stream, Run&& run) {
  const auto passes = [&]<int PANELS>() {
    if (segments.count > 1) {
      run.template operator()<PANELS, true>();
      chain_segments(p, segments, given, reverse, stream);
    }
    run.template operator()<PANELS, false>();
  };
  visit_panels(p, passes);
}

}  // namespace

void wide_scan(const WideProblem& p, bf16_t* o, float* ht, Device device, cudaStream_t stream) {
  Tensor buffers[2];
  const Segments segments = cut_sequences(p, device, buffers);
  run_passes(p, segments, p.h0, false, stream, [&]<int PANELS, bool ENDS>() {
    if constexpr (PANELS > 2)
      slot_scan(p, segments, ENDS, o, ht, stream);
    else
      launch_fast<ForwardShared<PANELS>>(scan_kernel<PANELS, ENDS>, kThreads,
                                         scan_grid(p, segments, ENDS), stream, p, segments, o, ht);
  });
}

void wide_reverse(const WideProblem& p, Device device, cudaStream_t stream) {
  Tensor buffers[2];
  const Segments segments = cut_sequences(p, device, buffers);
  const CUtensorMap d_o =
      tile_map(p.d_o, p.value_dim, p.heads, p.value_dim, p.tokens, p.value_stride(), device);
  run_passes(p, segments, p.dht, true, stream, [&]<int PANELS, bool ENDS>() {
    if constexpr (PANELS > 2)
      slot_reverse(p, segments, ENDS, d_o, stream);
    else
      launch_fast<ReverseShared<PANELS>>(reverse_kernel<PANELS, ENDS>, kThreads,
                                         scan_grid(p, segments, ENDS), stream, p, segments, d_o);
  });
}

}  // namespace ebb::gpu::low_rank
