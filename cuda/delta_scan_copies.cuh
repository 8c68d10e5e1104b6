// The fetching and storing warps of the scans (cuda/delta_scan.cuh).
#pragma once
#include "cuda/delta_scan_shared.cuh"

namespace ebb::gpu::delta {

// The fetching warps: two for the even places of shared memory, two for the odd ones. That a place
// is always filled by the same threads is not needed for the order of the fillings, but makes it
// one that racecheck follows: by the barrier that those threads and the multiplying ones meet at.
template <int SLABS, int KEYS, bool REVERSE>
struct ScanFetch {
  static constexpr int kStages = ScanShared<SLABS, KEYS>::kStages;
  const Problem<bf16_t>& p;
  const ScanItem& item;
  ScanShared<SLABS, KEYS>& s;
  const ScanMaps<KEYS>& maps;
  int thread = int(threadIdx.x) & 63, group = (int(threadIdx.x) - kMultiplyThreads) >> 6;

  // By one thread: all of it, as it lies in memory.
  __device__ __forceinline__ void ask(const ScanSource<KEYS>& from, int64_t token,
                                      ScanInputs<SLABS, KEYS>& to, uint64_t* arrived) const {
#if EBB_WGMMA
    const int bytes = 4 * from.number_count;
    constexpr int kTiles = KEYS * SLABS + 3;
    arrive_with_bytes(arrived, kTiles * int(sizeof(SwizzledTile)) + bytes);
    const auto keys = [&](int i) {
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
        fetch_box(to.keys[i][j], maps.keys[i], 64 * j, item.hv / maps.group, token, arrived);
    };
    keys(0);
    fetch_box(to.v, maps.v, item.v0, item.hv, token, arrived);
    fetch_run(to.numbers, from.numbers, bytes, arrived);
    fetch_box(to.a, maps.a, 0, item.hv, token, arrived);
    fetch_box(to.p, maps.p, 0, item.hv, token, arrived);
#pragma unroll
    for (int i = 1; i < KEYS; ++i) keys(i);
#endif
  }

  // By all 64 threads: `rows` rows, zeros after them.
  __device__ __forceinline__ void copy(const ScanSource<KEYS>& from, int rows,
                                       ScanInputs<SLABS, KEYS>& to) const {
    const int r = thread / 8, c = thread % 8 * 8;
    const auto tile = [&](SwizzledTile& to, const bf16_t* g, int64_t stride, int cols) {
#pragma unroll 2
      for (int i = 0; i < 8; ++i) {
        const bool valid = r + 8 * i < rows && c < cols;
        const void* source = valid ? static_cast<const void*>(g + (r + 8 * i) * stride + c)
                                   : static_cast<const void*>(from.numbers);
        copy_async_or_zero(to.at(r, c) + 8 * i * 64, source, valid);
      }
    };
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
        tile(to.keys[i][j], from.keys[i] + 64 * j, from.key_stride, p.key_dim - 64 * j);
    tile(to.v, from.v + item.v0, from.value_stride, p.value_dim - item.v0);
    tile(to.a, from.a, from.kPairStride, kChunk);
    tile(to.p, from.p, from.kPairStride, kChunk);
    for (int i = 4 * thread; i < from.number_count; i += 4 * kFetchThreads / 2)
      copy_async(to.numbers + i, from.numbers + i);
    wait_copies();
    publish_tiles();
  }

  // at(token, chunk): the source there.
  template <class At>
  __device__ __forceinline__ void run(At&& at) const {
    const int steps = int(item.steps), last_rows = item.last_rows();
    Turn turn;
    for (int step = 0; step < steps; ++step, turn.next<kStages>()) {
      if ((turn.at & 1) != group) continue;
      if (step >= kStages) barrier_wait<192>(kDone + turn.at);  // of step − kStages
      const int64_t chunk = chunk_of_step<REVERSE>(item, step);
      const int64_t token = item.walk.begin + chunk * kChunk;
      const int rows = step == (REVERSE ? 0 : steps - 1) ? last_rows : kChunk;
      const ScanSource<KEYS> from = at(token, item.walk.first + chunk);
      ScanInputs<SLABS, KEYS>& to = s.in[turn.at];
      uint64_t* arrived = s.arrived + turn.at;
      if (EBB_WGMMA && rows == kChunk) {
        if (thread == 0)
          ask(from, token, to, arrived);
        else
          arrive(arrived);
      } else {
        copy(from, rows, to);
        arrive(arrived);
      }
    }
    // Arrivals that no further step waits for.
    for (int step = steps - kStages; step < steps; ++step)
      if (step >= 0 && (step % kStages & 1) == group) barrier_wait<192>(kDone + step % kStages);
  }
};

// The states of all chunks one after the other, [chunks,HV,V,K].
struct ChunkStates {
  const Problem<bf16_t>& p;
  const ScanItem& item;
  bf16_t* g;

  __device__ __forceinline__ StateRows operator()(const Span&, int64_t chunk) const {
    return {g + p.state_at(chunk, item.hv) + int64_t(item.v0) * p.key_dim, p.key_dim};
  }
};

// The storing warps.
template <int SLABS, int KEYS, bool REVERSE>
struct ScanStore {
  static constexpr int64_t kStep = REVERSE ? -1 : 1;
  ScanShared<SLABS, KEYS>& s;
  const ScanItem& item;
  int steps, last_rows, r, c, cols, key_cols;
  int64_t value_stride, value_dim;
  bf16_t *values, *other;  // [HV,tokens,V] and [tokens,HV,V] of the next step; one may be null

  __device__ __forceinline__ ScanStore(const Problem<bf16_t>& p, const ScanItem& at,
                                       ScanShared<SLABS, KEYS>& shared, bf16_t* g_values,
                                       bf16_t* g_other, int64_t other_step)
      : s(shared), item(at), steps(int(at.steps)), last_rows(at.last_rows()) {
    const int t = int(threadIdx.x) & 127;
    r = t / 8, c = t % 8 * 8;
    cols = p.value_dim - at.v0 - c, key_cols = p.key_dim - c;
    value_stride = other_step, value_dim = p.value_dim;
    const int64_t token = at.walk.begin + chunk_of_step<REVERSE>(at, 0) * kChunk;
    values = g_values ? g_values + (p.row_at(token, at.hv) + r) * value_dim + at.v0 + c : nullptr;
    other = g_other ? g_other + (token + r) * value_stride + int64_t(at.hv) * value_dim + at.v0 + c
                    : nullptr;
  }
  __device__ __forceinline__ void put(bf16_t* g, int64_t stride, const SwizzledTile& tile,
                                      int rows) const {
    const bf16_t* from = tile.at(r, c);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (r + 16 * i < rows)
        store_word(reinterpret_cast<uint4*>(g + 16 * i * stride),
                   *reinterpret_cast<const uint4*>(from + 16 * i * 64));
  }
  template <class F>
  __device__ __forceinline__ void put_state(int step, int rows, F&& state_rows) const {
    constexpr int kStates = ScanShared<SLABS, KEYS>::kStates;
    const int64_t chunk = chunk_of_step<REVERSE>(item, step);
    const Span span{item.walk.begin + chunk * kChunk, rows, item.sequence};
    const StateRows to = state_rows(span, item.walk.first + chunk);
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
      if (key_cols > 64 * j)
        put(to.at + r * to.stride + c + 64 * j, to.stride, s.states[step % kStates][j], cols + c);
    if (step + kStates < steps) barrier_arrive<256>(kFree + step % kStates);
  }
  // state_rows(span, chunk): where the state of that chunk goes, from column v0 of V on. Of a
  // single place for states the products only read, and it is stored while they run.
  template <class F>
  __device__ __forceinline__ void run(F&& state_rows) {
    constexpr int kOuts = ScanShared<SLABS, KEYS>::kOuts;
    constexpr bool kEarly = ScanShared<SLABS, KEYS>::kStates == 1;
    for (int step = 0; step < steps; ++step) {
      const int n = step == (REVERSE ? 0 : steps - 1) ? last_rows : kChunk;
      if (kEarly) {
        barrier_wait<256>(kStateReady);
        put_state(step, n, state_rows);
      }
      barrier_wait<256>(kReady + (step & 1));
      const ValueOutputs& from = s.out[step % kOuts];
      if (cols > 0) {
        if (values) put(values, value_dim, from.values, n);
        if (other) put(other, value_stride, from.other, n);
      }
      if (step + kOuts < steps) barrier_arrive<256>(kFreeValues + step % kOuts);
      if (!kEarly) put_state(step, n, state_rows);
      if (values) values += kStep * kChunk * value_dim;
      if (other) other += kStep * kChunk * value_stride;
    }
  }
};

// Before a step's values may be written.
template <int OUTS>
__device__ __forceinline__ void wait_for_values(int step) {
  if (step >= OUTS) barrier_wait<256>(kFreeValues + step % OUTS);
}

}  // namespace ebb::gpu::delta
