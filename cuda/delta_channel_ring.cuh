// Fetching for the scans of delta_fast_channel_wide.cu, heads of 136 to 256 channels. What they
// read of a chunk, three operands [64,256] and four tiles more, does not fit twice beside the
// state. So the operands go through a ring of four places, in the order in which the products want
// them, and each place is free again when its product is done: while a chunk's last operand is
// read, the next chunk's first two are on their way. V, A, P, γ_n and β have two places.
//   operand i of a step (n-th of all)              the rest of step s
//   wait for ring_done(n mod 4) of n−4; ask   ->   wait for done(s mod 2) of s−2; ask   ->
//   wait for arrived[n mod 4]; its product; ring_done; at the step's end done
// Two of the fetching warps have the operands, two the rest; the other roles, and how whole and
// ragged chunks come, are as in cuda/delta_scan.cuh.
#pragma once
#include "cuda/delta_channel_scan.cuh"

namespace ebb::gpu::delta {

inline constexpr int kRingPlaces = 4;
struct RingTiles {
  SwizzledTile a, p, v;  // v: V or dO
};
template <>
struct ScanShared<4, 3> {
  static constexpr int kStages = 2, kOuts = 1, kStates = 1;
  static constexpr int kNumbers = 64 * 4 + kChunk;  // γ_n by channel and β, one behind the other
  SwizzledTile ring[kRingPlaces][4];
  RingTiles tiles[kStages];
  SwizzledTile states[kStates][4];  // [V,K]
  ValueOutputs out[kOuts];
  float numbers[kStages][kNumbers];
  uint64_t arrived[kRingPlaces + kStages];
};
using RingShared = ScanShared<4, 3>;
static_assert(sizeof(RingShared) <= sizeof(ScanShared<4, 2>));  // what scans_fit() looks at

// Barriers of the ring's places: ids that scans of four slabs leave free, 3, 5, 9 and 15.
__device__ __forceinline__ int ring_done(int place) { return 0xf953 >> 4 * place & 15; }
__device__ __forceinline__ int next_place(int place) { return (place + 1) & (kRingPlaces - 1); }

// The order of the operands of ScanSource: erased, queries, kept; in reverse the other way. PLAIN:
// without the first. ENDS: forward without the second.
template <bool REVERSE, bool ENDS, bool PLAIN>
struct RingOrder {
  static constexpr int kCount = 3 - PLAIN - (ENDS && !REVERSE);
  static constexpr int operand(int i) {
    if (REVERSE) return 2 - i;
    return i + 1 == kCount ? 2 : PLAIN ? 1 : i;
  }
};

// Where the multiplying warps stand in the ring.
struct RingTurn {
  int place = 0, stage = 0;

  using Operand = const SwizzledTile (&)[4];
  // Waits for the operand whose turn it is; for the one behind it, too.
  __device__ __forceinline__ Operand wait(RingShared& s, Arrivals& arrivals) const {
    arrivals.wait(s.arrived, place);
    return s.ring[place];
  }
  __device__ __forceinline__ Operand wait_next(RingShared& s, Arrivals& arrivals) const {
    arrivals.wait(s.arrived, next_place(place));
    return s.ring[next_place(place)];
  }
  __device__ __forceinline__ void wait_tiles(RingShared& s, Arrivals& arrivals) const {
    arrivals.wait(s.arrived, kRingPlaces + stage);
  }
  // After the product with the operand whose turn it was.
  __device__ __forceinline__ void done() {
    barrier_arrive<192>(ring_done(place));
    place = next_place(place);
  }
  __device__ __forceinline__ void stage_done() {
    barrier_arrive<192>(kDone + stage);
    stage ^= 1;
  }
};

// The fetching warps.
template <bool REVERSE, class Order>
struct RingFetch {
  const Problem<bf16_t>& p;
  const ScanItem& item;
  RingShared& s;
  const ScanMaps<3>& maps;
  int thread = int(threadIdx.x) & 63;

  // A tile by all 64 threads: `rows` rows, zeros after them.
  __device__ __forceinline__ void copy(SwizzledTile& to, const bf16_t* g, int64_t stride, int rows,
                                       int cols) const {
    const int r = thread / 8, c = thread % 8 * 8;
#pragma unroll 2
    for (int i = 0; i < 8; ++i) {
      const bool valid = r + 8 * i < rows && c < cols;
      copy_async_or_zero(to.at(r, c) + 8 * i * 64, valid ? g + (r + 8 * i) * stride + c : p.states,
                         valid);
    }
  }
  // What the copies of all 64 threads have brought has arrived.
  __device__ __forceinline__ void arrive_copied(uint64_t* arrived) const {
    wait_copies();
    publish_tiles();
    arrive(arrived);
  }
  __device__ __forceinline__ void fetch_operand(int which, const ScanSource<3>& from, int64_t token,
                                                int rows, int place) const {
    SwizzledTile(&to)[4] = s.ring[place];
    uint64_t* arrived = s.arrived + place;
#if EBB_WGMMA
    if (rows == kChunk) {
      if (thread > 0) return arrive(arrived);
      arrive_with_bytes(arrived, int(sizeof to));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        fetch_box(to[j], maps.keys[which], 64 * j, item.hv, token, arrived);
      return;
    }
#endif
    for (int j = 0; j < 4; ++j)
      copy(to[j], from.keys[which] + 64 * j, from.key_stride, rows, p.key_dim - 64 * j);
    arrive_copied(arrived);
  }
  __device__ __forceinline__ void fetch_rest(const ScanSource<3>& from, int64_t token, int rows,
                                             int stage) const {
    RingTiles& to = s.tiles[stage];
    uint64_t* arrived = s.arrived + kRingPlaces + stage;
#if EBB_WGMMA
    if (rows == kChunk) {
      if (thread > 0) return arrive(arrived);
      const int bytes = 4 * from.number_count;
      arrive_with_bytes(arrived, int(sizeof to) + bytes);
      fetch_box(to.v, maps.v, item.v0, item.hv, token, arrived);
      fetch_run(s.numbers[stage], from.numbers, bytes, arrived);
      fetch_box(to.a, maps.a, 0, item.hv, token, arrived);
      fetch_box(to.p, maps.p, 0, item.hv, token, arrived);
      return;
    }
#endif
    copy(to.v, from.v + item.v0, from.value_stride, rows, p.value_dim - item.v0);
    copy(to.a, from.a, kChunk, rows, kChunk);
    copy(to.p, from.p, kChunk, rows, kChunk);
    for (int i = 4 * thread; i < from.number_count; i += 4 * kFetchThreads / 2)
      copy_async(s.numbers[stage] + i, from.numbers + i);
    arrive_copied(arrived);
  }

  // at(token, chunk): the source there. f(step, source, token, rows).
  template <class At, class F>
  __device__ __forceinline__ void each_step(At&& at, F&& f) const {
    const int steps = int(item.steps), last_rows = item.last_rows();
    for (int step = 0; step < steps; ++step) {
      const int64_t chunk = chunk_of_step<REVERSE>(item, step);
      const int64_t token = item.walk.begin + chunk * kChunk;
      f(step, at(token, item.walk.first + chunk), token,
        step == (REVERSE ? 0 : steps - 1) ? last_rows : kChunk);
    }
  }
  template <class At>
  __device__ __forceinline__ void run(At&& at) const {
    const int steps = int(item.steps);
    if (threadIdx.x < kMultiplyThreads + kFetchThreads / 2) {
      int place = 0;
      each_step(at, [&](int step, const ScanSource<3>& from, int64_t token, int rows) {
#pragma unroll
        for (int i = 0; i < Order::kCount; ++i) {
          if (Order::kCount * step + i >= kRingPlaces) barrier_wait<192>(ring_done(place));
          fetch_operand(Order::operand(i), from, token, rows, place);
          place = next_place(place);
        }
      });
      // What no further operand waits for.
      const int all = Order::kCount * steps;
      for (int n = max(0, all - kRingPlaces); n < all; ++n)
        barrier_wait<192>(ring_done(n & (kRingPlaces - 1)));
    } else {
      each_step(at, [&](int step, const ScanSource<3>& from, int64_t token, int rows) {
        if (step >= RingShared::kStages) barrier_wait<192>(kDone + (step & 1));
        fetch_rest(from, token, rows, step & 1);
      });
      for (int step = max(0, steps - RingShared::kStages); step < steps; ++step)
        barrier_wait<192>(kDone + (step & 1));
    }
  }
};

// As run_scan(), with operands through the ring.
template <bool REVERSE, bool ENDS, bool PLAIN, class Multiply, class Source, class Store>
__device__ __forceinline__ void run_ring_scan(const Problem<bf16_t>& p, const Segments& segments,
                                              const ScanMaps<3>& maps, RingShared& s,
                                              Multiply&& multiply, Source&& source, Store&& store) {
  run_roles<ENDS, REVERSE>(
      p, segments, s, multiply,
      [&](const ScanItem& item) {
        RingFetch<REVERSE, RingOrder<REVERSE, ENDS, PLAIN>>{p, item, s, maps}.run(
            [&](int64_t token, int64_t chunk) { return source(item, token, chunk); });
      },
      store);
}

}  // namespace ebb::gpu::delta
