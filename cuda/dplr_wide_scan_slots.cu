// dplr of heads of more than 128 keys on tensor cores: the scans over chunks (cuda/dplr_wide.cuh).
// As dplr_wide_scan.cu; but a chunk's step does not fit in shared memory, and the state not beside
// its own copy in registers: steps come in slots, a panel of the next state each, and products find
// the copy where the storing warps do.
#include "cuda/dplr_scan.cuh"
#include "cuda/dplr_wide.cuh"

namespace ebb::gpu::low_rank {
namespace {

constexpr int kPanels = 4;
constexpr int kTileBytes = int(sizeof(SwizzledTile)), kRowBytes = 64 * int(sizeof(float));
constexpr Inner kLast = Inner::last, kFirst = Inner::first;

// Of panel i of the next state: row i of B̄ᵀ W, what V adds and its units, ε². The last slot: what
// reads the state and the rest of the outputs.
struct ForwardSlot {
  SwizzledTile from[kPanels], add;
  float units[64], decay[64];
};
// Column i of B̄ᵀ W, what reads panel i, ε²; in the first slot dO.
struct ReverseSlot {
  SwizzledTile from[kPanels], read, d_o;
  float decay[64];
};
struct ForwardOutput {
  SwizzledTile state[kPanels], out;
};
struct ReverseOutput {
  SwizzledTile state[kPanels];
};
template <bool ENDS>
using ForwardShared = StepShared<ForwardSlot, ForwardOutput, 3, 2, ENDS ? kPanels : kPanels + 1>;
using ReverseShared = StepShared<ReverseSlot, ReverseOutput, 3, 2, kPanels>;
static_assert(sizeof(ForwardShared<false>) + 1024 <= 227 * 1024);
static_assert(sizeof(ReverseShared) + 1024 <= 227 * 1024);

// By one warp.
__device__ __forceinline__ void fetch_slot(const WideProblem& p, int64_t at, int block, int slot,
                                           ForwardSlot& to, Mbarrier& arrived) {
  const WideStep<kPanels>& step = p.step<kPanels>(at);
  const WideTerms<kPanels>& terms = p.term<kPanels>(at, block);
  const bool reads = slot == kPanels;
  const Run runs[] = {{&to.from, reads ? step.read : step.move[slot], kPanels * kTileBytes},
                      {&to.add, reads ? &terms.out : &terms.state[slot], kTileBytes},
                      {&to.units, terms.units[reads ? 0 : slot], kRowBytes},
                      {&to.decay, step.decay + (reads ? 0 : 64 * slot), kRowBytes}};
  fetch_runs(runs, arrived);
}
__device__ __forceinline__ void fetch_slot(const WideProblem& p, const CUtensorMap& d_o, int64_t at,
                                           int64_t token, int head, int block, int slot,
                                           ReverseSlot& to, Mbarrier& arrived) {
  const WideStep<kPanels>& step = p.step<kPanels>(at);
  const int lane = int(threadIdx.x) & 31;
#if EBB_WGMMA
  if (lane != 0) return arrived.arrive();
  arrive_expecting(arrived, (kPanels + (slot == 0 ? 2 : 1)) * kTileBytes + kRowBytes);
#pragma unroll
  for (int i = 0; i < kPanels; ++i)
    fetch_run(Run{&to.from[i], &step.move[i][slot], kTileBytes}, arrived);
  fetch_run(Run{&to.read, &step.read[slot], kTileBytes}, arrived);
  fetch_run(Run{&to.decay, step.decay + 64 * slot, kRowBytes}, arrived);
  if (slot == 0) gpu::fetch_box(to.d_o, d_o, 64 * block, head, token, arrived);
#else
  const auto copy = [&](void* shared, const void* from, int bytes) {
    for (int i = 16 * lane; i < bytes; i += 16 * 32)
      copy_async(static_cast<char*>(shared) + i, static_cast<const char*>(from) + i);
  };
  for (int i = 0; i < kPanels; ++i) copy(&to.from[i], &step.move[i][slot], kTileBytes);
  copy(&to.read, &step.read[slot], kTileBytes);
  copy(&to.decay, step.decay + 64 * slot, kRowBytes);
  for (int i = lane; slot == 0 && i < 64 * 8; i += 32) {
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

// The state in bf16 to where products and storing warps find it, by the four warps that multiply.
__device__ __forceinline__ void publish(SwizzledTile (&s)[kPanels],
                                        const float (&state)[kPanels][8][4], int warp,
                                        const Lane& l) {
#pragma unroll
  for (int i = 0; i < kPanels; ++i) put_rows(s[i], state[i], 16 * warp, l);
  publish_tiles();
  meet_group(0);
}

// By the warps that multiply. Per chunk: 1 S out in bf16. 2 by panels, S = Diag(ε²) S + what V adds
// + M S. 3 R S; o out. At the end: 4 ht. ENDS: as in dplr_wide_scan.cu.
template <bool ENDS>
__device__ __forceinline__ void scan(const FastProblem& p, const ScanItem& item,
                                     const Segments& segments, ForwardShared<ENDS>& s,
                                     RingPlace<3>& in, OutputPlace<2>& to, float* ht) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, m0 = 16 * warp;
  const bool unit = is_unit<ENDS>(p, item);
  float state[kPanels][8][4];
  read_start<kPanels, ENDS>(state, p, item, segments, p.h0, warp, l);
  for (int step = 0; step < int(item.steps); ++step) {
    ForwardOutput& now = s.out[to.at];
    if (!ENDS) to.wait_empty(s.outputs);
    publish(now.state, state, warp, l);  // 1
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {  // 2
      in.wait_full(s.ring);
      const ForwardSlot& slot = s.in[in.at];
      scale_columns(state[i], slot.decay, l);
      if (!unit) add_terms(state[i], slot.add, slot.units, m0, l);
      settle(state[i]);
      warpgroup_begin();
#pragma unroll
      for (int j = 0; j < kPanels; ++j)
        multiply_tiles<false, kLast, kLast>(state[i], now.state[j], slot.from[j], warp);
      finish(state[i]);
      in.release(s.ring);
      in.next();
    }
    if (!ENDS) {  // 3
      in.wait_full(s.ring);
      const ForwardSlot& slot = s.in[in.at];
      float out[8][4];
      warpgroup_begin();
      multiply_tiles<true, kLast, kLast>(out, now.state[0], slot.from[0], warp);
#pragma unroll
      for (int j = 1; j < kPanels; ++j)
        multiply_tiles<false, kLast, kLast>(out, now.state[j], slot.from[j], warp);
      finish(out);
      add_columns(out, slot.add, warp, l);
      in.release(s.ring);
      in.next();
      unsigned oa[4][4];
      values_as_left(oa, out);
      put_values(now.out, oa, warp);
      OutputPlace<2>::arrive(s.outputs.full[to.at]);
    }
    to.next();
  }
  if (ENDS)
    write_end<kPanels>(state, p, item, segments, warp, l);
  else if (ht && item.segment == segments.count - 1)  // 4
    write_transposed<kPanels>(ht + item.state_at(p), state, p.key_dim, p.value_dim, item.v0 + m0,
                              l);
}

// The same in reverse, D in registers. Per chunk, from the last: 1 D out in bf16. 2 by panels, D =
// Diag(ε²) D + Mᵀ D + Rᵀ dO. At the end: 3 dh0.
template <bool ENDS>
__device__ __forceinline__ void reverse_scan(const FastProblem& p, const ScanItem& item,
                                             const Segments& segments, ReverseShared& s,
                                             RingPlace<3>& in, OutputPlace<2>& to) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  const bool unit = is_unit<ENDS>(p, item);
  float state[kPanels][8][4];
  read_start<kPanels, ENDS>(state, p, item, segments, p.dht, warp, l);
  for (int step = 0; step < int(item.steps); ++step) {
    ReverseOutput& now = s.out[to.at];
    if (!ENDS) to.wait_empty(s.outputs);
    publish(now.state, state, warp, l);  // 1
    unsigned doa[4][4];
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {  // 2
      in.wait_full(s.ring);
      const ReverseSlot& slot = s.in[in.at];
      if (i == 0) {
        load_values(doa, slot.d_o, warp, l);
        if (step == 0 || unit) cut_tokens(doa, unit ? 0 : item.last_rows(), l);
        settle(doa);
      }
      scale_columns(state[i], slot.decay, l);
      settle(state[i]);
      warpgroup_begin();
#pragma unroll
      for (int j = 0; j < kPanels; ++j)
        multiply_tiles<false, kLast, kFirst>(state[i], now.state[j], slot.from[j], warp);
      multiply_columns(state[i], doa, slot.read);
      finish(state[i]);
      in.release(s.ring);
      in.next();
    }
    if (!ENDS) OutputPlace<2>::arrive(s.outputs.full[to.at]);
    to.next();
  }
  if (ENDS)
    write_end<kPanels>(state, p, item, segments, warp, l);
  else if (p.dh0 && item.segment == 0)  // 3
    write_transposed<kPanels>(p.dh0 + item.state_at(p), state, p.key_dim, p.value_dim,
                              item.v0 + 16 * warp, l);
}

template <bool ENDS>
__global__ void __launch_bounds__(kSharingThreads, 1)
    slot_scan_kernel(WideProblem p, Segments segments, bf16_t* o, float* ht) {
  auto& s = swizzled_shared<ForwardShared<ENDS>>();
  run_roles<ENDS, false>(
      p, segments, s,
      [&](const ScanItem& item, RingPlace<3>& in, OutputPlace<2>& to) {
        scan<ENDS>(p, item, segments, s, in, to, ht);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk, int rows, const ForwardOutput& from) {
        store_values(o + p.value_at(token, item.hv) + item.v0, p.value_stride(), from.out, rows,
                     p.value_dim - item.v0);
        const int64_t to = p.state_tile(p.tile_at(chunk, item.hv), item.v0 / kFastTile, 0);
#pragma unroll
        for (int i = 0; i < kPanels; ++i) store_tile(p.chunk_states[to + i], from.state[i]);
      },
      [&](const ScanItem& item, int64_t, int64_t chunk, int slot, ForwardSlot& to,
          Mbarrier& arrived) {
        fetch_slot(p, p.tile_at(chunk, item.hv), block_of<ENDS>(p, item), slot, to, arrived);
      });
}

template <bool ENDS>
__global__ void __launch_bounds__(kSharingThreads, 1)
    slot_reverse_kernel(WideProblem p, Segments segments, const __grid_constant__ CUtensorMap d_o) {
  auto& s = swizzled_shared<ReverseShared>();
  run_roles<ENDS, true>(
      p, segments, s,
      [&](const ScanItem& item, RingPlace<3>& in, OutputPlace<2>& to) {
        reverse_scan<ENDS>(p, item, segments, s, in, to);
      },
      [&](const ScanItem& item, int64_t, int64_t chunk, int, const ReverseOutput& from) {
        const int64_t to = p.state_tile(p.tile_at(chunk, item.hv), item.v0 / kFastTile, 0);
#pragma unroll
        for (int i = 0; i < kPanels; ++i) store_tile(p.dstates[to + i], from.state[i]);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk, int slot, ReverseSlot& to,
          Mbarrier& arrived) {
        fetch_slot(p, d_o, p.tile_at(chunk, item.hv), token, item.hv, block_of<ENDS>(p, item), slot,
                   to, arrived);
      });
}

}  // namespace

void slot_scan(const WideProblem& p, const Segments& segments, bool ends, bf16_t* o, float* ht,
               cudaStream_t stream) {
  launch_fast<ForwardShared<false>>(ends ? slot_scan_kernel<true> : slot_scan_kernel<false>,
                                    kSharingThreads, scan_grid(p, segments, ends), stream, p,
                                    segments, o, ht);
}

void slot_reverse(const WideProblem& p, const Segments& segments, bool ends, const CUtensorMap& d_o,
                  cudaStream_t stream) {
  launch_fast<ReverseShared>(ends ? slot_reverse_kernel<true> : slot_reverse_kernel<false>,
                             kSharingThreads, scan_grid(p, segments, ends), stream, p, segments,
                             d_o);
}

}  // namespace ebb::gpu::low_rank
