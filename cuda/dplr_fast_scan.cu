// dplr in bf16 on tensor cores: the scans over chunks (cuda/dplr_fast.cuh). A block has a segment
// of a sequence and a head. One warp fetches steps and terms as runs of bytes, four multiply and
// keep the transposed state in f32, 16 columns of V each, four store results; two rings of buffers
// lie between them. Where sequences and heads are few, a sequence is cut (cuda/delta_scan.cuh): a
// first pass finds what each segment makes of a zero state and of each unit vector.
#include "cuda/dplr_scan.cuh"
#include "cuda/dplr_terms.cuh"

namespace ebb::gpu::low_rank {
namespace {

struct ForwardInput {
  ChunkStep step;
  ChunkTerms terms;
};
struct ReverseInput {
  ChunkStep step;
  SwizzledTile d_o;
};
struct ForwardOutput {
  SwizzledTile state, out;
};
struct ReverseOutput {
  SwizzledTile state;
};

using ForwardShared = StepShared<ForwardInput, ForwardOutput, 4, 2>;
using ReverseShared = StepShared<ReverseInput, ReverseOutput, 4, 2>;
using InPlace = RingPlace<4>;
using OutPlace = OutputPlace<2>;

// All 64 rows of dO from a token on, as far as there are tokens; by one warp.
__device__ __forceinline__ void fetch_step(const FastProblem& p, const CUtensorMap& d_o,
                                           const ChunkStep& from, int64_t token, int head,
                                           ReverseInput& to, Mbarrier& arrived) {
  const int lane = int(threadIdx.x) & 31;
#if EBB_WGMMA
  if (lane != 0) return arrived.arrive();
  arrive_expecting(arrived, kStepBytes + int(sizeof(SwizzledTile)));
  fetch_run(Run{&to.step, &from, kStepBytes}, arrived);
  gpu::fetch_box(to.d_o, d_o, 0, head, token, arrived);
#else
  for (int at = 16 * lane; at < kStepBytes; at += 16 * 32)
    copy_async(reinterpret_cast<char*>(&to.step) + at, reinterpret_cast<const char*>(&from) + at);
  for (int i = lane; i < 64 * 8; i += 32) {
    const int r = i / 8, c = i % 8 * 8;
    const bool valid = token + r < p.tokens && c < p.value_dim;
    copy_async_or_zero(to.d_o.at(r, c), valid ? p.d_o + p.value_at(token + r, head) + c : p.d_o,
                       valid);
  }
  wait_copies();
  publish_tiles();
  arrived.arrive();
#endif
}

__device__ __forceinline__ void decay_state(float (&state)[8][4], const float* s_decay,
                                            const Lane& l) {
  scale_columns(state, s_decay, l);
}
__device__ __forceinline__ void add(float (&x)[8][4], const float (&y)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] += y[n][e];
}
// By the warps that multiply. Per chunk: 1 M S and R S; S out meanwhile. 2 S = Diag(ε²) S + M S and
// the terms; o out. At the end: 3 ht. ENDS: the state only, for chain_segments, from a zero state
// with the terms, or from unit vectors without them.
template <bool ENDS>
__device__ __forceinline__ void scan(const FastProblem& p, const ScanItem& item,
                                     const Segments& segments, ForwardShared& s, InPlace& in,
                                     OutPlace& to, float* ht) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, m0 = 16 * warp;
  const bool unit = ENDS && item.v0 > 0;
  float state[1][8][4];
  read_start<1, ENDS>(state, p, item, segments, p.h0, warp, l);
  for (int step = 0; step < int(item.steps); ++step) {
    in.wait_full(s.ring);
    const ForwardInput& now = s.in[in.at];
    unsigned sa[4][4];
    state_as_left<1>(sa, state);  // 1
    float moved[8][4], out[8][4];
    settle(sa);
    warpgroup_begin();
    multiply_rows<true>(moved, sa, now.step.move);
    warpgroup_commit();
    if (!ENDS) {
      multiply_rows<true>(out, sa, now.step.read);
      warpgroup_commit();
      to.wait_empty(s.outputs);
      put_state<1>(reinterpret_cast<SwizzledTile(&)[1]>(s.out[to.at].state), sa, warp);
    }
    decay_state(state[0], now.step.decay, l);  // 2
    if (!unit) add_terms(state[0], now.terms.state, now.terms.units, m0, l);
    warpgroup_wait<ENDS ? 0 : 1>();
    settle(moved);
    add(state[0], moved);
    if (!ENDS) {
      warpgroup_wait<0>();
      settle(out);
      add_columns(out, now.terms.out, warp, l);
    }
    in.release(s.ring);
    in.next();
    if (!ENDS) {
      values_as_left(sa, out);
      put_values(s.out[to.at].out, sa, warp);
      OutPlace::arrive(s.outputs.full[to.at]);
      to.next();
    }
  }
  if (ENDS)
    write_end<1>(state, p, item, segments, warp, l);
  else if (ht && item.segment == segments.count - 1)  // 3
    write_transposed<1>(ht + item.state_at(p), state, p.key_dim, p.value_dim, m0, l);
}

// The same in reverse, D in registers. Per chunk, from the last: 1 Mᵀ D + Rᵀ dO; D out meanwhile.
// 2 D = Diag(ε²) D + that. At the end: 3 dh0.
template <bool ENDS>
__device__ __forceinline__ void reverse_scan(const FastProblem& p, const ScanItem& item,
                                             const Segments& segments, ReverseShared& s,
                                             InPlace& in, OutPlace& to) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  const bool unit = ENDS && item.v0 > 0;
  float state[1][8][4];
  read_start<1, ENDS>(state, p, item, segments, p.dht, warp, l);
  for (int step = 0; step < int(item.steps); ++step) {
    in.wait_full(s.ring);
    const ReverseInput& now = s.in[in.at];
    unsigned da[4][4], doa[4][4];
    state_as_left<1>(da, state);  // 1
    load_values(doa, now.d_o, warp, l);
    if (step == 0 || unit) cut_tokens(doa, unit ? 0 : item.last_rows(), l);
    float moved[8][4];
    settle(da), settle(doa);
    warpgroup_begin();
    multiply_columns<true>(moved, da, now.step.move);
    multiply_columns(moved, doa, now.step.read);
    warpgroup_commit();
    if (!ENDS) {
      to.wait_empty(s.outputs);
      put_state<1>(reinterpret_cast<SwizzledTile(&)[1]>(s.out[to.at].state), da, warp);
      OutPlace::arrive(s.outputs.full[to.at]);
      to.next();
    }
    decay_state(state[0], now.step.decay, l);  // 2
    warpgroup_wait<0>();
    settle(moved);
    add(state[0], moved);
    in.release(s.ring);
    in.next();
  }
  if (ENDS)
    write_end<1>(state, p, item, segments, warp, l);
  else if (p.dh0 && item.segment == 0)  // 3
    write_transposed<1>(p.dh0 + item.state_at(p), state, p.key_dim, p.value_dim, 16 * warp, l);
}

template <bool ENDS>
__global__ void __launch_bounds__(kThreads, 1)
    scan_kernel(FastProblem p, Segments segments, bf16_t* o, float* ht) {
  auto& s = swizzled_shared<ForwardShared>();
  run_roles<ENDS, false>(
      p, segments, s,
      [&](const ScanItem& item, InPlace& in, OutPlace& to) {
        scan<ENDS>(p, item, segments, s, in, to, ht);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk, int rows, const ForwardOutput& from) {
        store_values(o + p.value_at(token, item.hv), p.value_stride(), from.out, rows, p.value_dim);
        store_tile(p.chunk_states[p.tile_at(chunk, item.hv)], from.state);
      },
      [&](const ScanItem& item, int64_t, int64_t chunk, int, ForwardInput& to, Mbarrier& arrived) {
        const int64_t at = p.tile_at(chunk, item.hv);
        const Run runs[] = {{&to.step, p.steps + at, kStepBytes},
                            {&to.terms, p.terms + at, kTermsBytes}};
        fetch_runs(runs, arrived);
      });
}

template <bool ENDS>
__global__ void __launch_bounds__(kThreads, 1)
    reverse_kernel(FastProblem p, Segments segments, const __grid_constant__ CUtensorMap d_o) {
  auto& s = swizzled_shared<ReverseShared>();
  run_roles<ENDS, true>(
      p, segments, s,
      [&](const ScanItem& item, InPlace& in, OutPlace& to) {
        reverse_scan<ENDS>(p, item, segments, s, in, to);
      },
      [&](const ScanItem& item, int64_t, int64_t chunk, int, const ReverseOutput& from) {
        store_tile(p.dstates[p.tile_at(chunk, item.hv)], from.state);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk, int, ReverseInput& to,
          Mbarrier& arrived) {
        fetch_step(p, d_o, p.steps[p.tile_at(chunk, item.hv)], token, item.hv, to, arrived);
      });
}

}  // namespace

void fast_scan(const FastProblem& p, bf16_t* o, float* ht, Device device, cudaStream_t stream) {
  Tensor buffers[2];
  const Segments segments = cut_sequences(p, device, buffers);
  if (segments.count > 1) {
    launch_fast<ForwardShared>(scan_kernel<true>, kThreads, scan_grid(p, segments, true), stream, p,
                               segments, o, ht);
    chain_segments(p, segments, p.h0, false, stream);
  }
  launch_fast<ForwardShared>(scan_kernel<false>, kThreads, scan_grid(p, segments, false), stream, p,
                             segments, o, ht);
}

void fast_reverse(const FastProblem& p, Device device, cudaStream_t stream) {
  Tensor buffers[2];
  const Segments segments = cut_sequences(p, device, buffers);
  const CUtensorMap d_o =
      tile_map(p.d_o, p.value_dim, p.heads, p.value_dim, p.tokens, p.value_stride(), device);
  if (segments.count > 1) {
    launch_fast<ReverseShared>(reverse_kernel<true>, kThreads, scan_grid(p, segments, true), stream,
                               p, segments, d_o);
    chain_segments(p, segments, p.dht, true, stream);
  }
  launch_fast<ReverseShared>(reverse_kernel<false>, kThreads, scan_grid(p, segments, false), stream,
                             p, segments, d_o);
}

}  // namespace ebb::gpu::low_rank
