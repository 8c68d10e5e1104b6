// What the two scans of cuda/delta_fast.cuh have in common. A block of twelve warps has 64 columns
// of V of one segment of a sequence and one head: four warps multiply, 16 columns each; four fetch
// tiles, two for even and two for odd steps, so that two steps' loads are always under way; two
// store results. Step s is a chunk, in reverse from the end.
//   fetching s                       multiplying s                    storing s
//   wait for done(s−STAGES); ask
//   for in[s mod STAGES], which
//   arrives by itself            ->  wait for arrived[s mod STAGES], free(s−2)  <-  states[s mod 2]
//                                                                                  stored: free(s)
//                                <-  products; done(s), ready(s)  ->  wait for ready(s)
// Whole chunks are fetched by the copy engine (cuda/tensor_map.h), which reports their arrival to
// an mbarrier: all stages are under way while the products run, and no thread works out addresses.
// The ragged chunk at a sequence's end, whose rows go on in the next sequence, is copied by the
// threads (and so are all on other GPUs). The rest are named barriers.
//
// Where sequences and heads are few, a sequence is cut into segments. A first pass finds what each
// makes of a zero state and, in extra columns, of each unit vector: S_end = M S_start + E. The
// states between segments follow one after the other (chain_segments), and the scan proper runs all
// segments at once.
#pragma once
#include "cuda/delta_fast.cuh"
#include "cuda/tensor_map.h"

namespace ebb::gpu::delta {

inline constexpr int kMultiplyThreads = 128, kFetchThreads = 128, kStoreThreads = 128;
inline constexpr int kScanThreads = kMultiplyThreads + kFetchThreads + kStoreThreads;

// Two scans exist: with a decay per head (KEYS = 2: k, q), and with one per channel (KEYS = 3: the
// operands k for the erasing, q for the reading and k for the writing that
// delta_rule_channel.cu has multiplied with their decays).
template <int SLABS, int KEYS>
struct ScanInputs {
  SwizzledTile keys[KEYS][SLABS], a, p, v;  // v: V or dO
  // With a decay per head γ, τ, β, γ_n; else γ_n by channel and β.
  float numbers[KEYS == 2 ? kScanGateFloats : 64 * SLABS + kChunk];

  __device__ __forceinline__ const SwizzledTile (&k() const)[SLABS] { return keys[0]; }
  __device__ __forceinline__ const SwizzledTile (&q() const)[SLABS] { return keys[1]; }
  __device__ __forceinline__ const SwizzledTile (&kept() const)[SLABS] { return keys[KEYS - 1]; }
  __device__ __forceinline__ const float* gamma() const { return numbers; }
  __device__ __forceinline__ const float* tail() const { return numbers + kChunk; }
  __device__ __forceinline__ const float* beta() const { return numbers + 2 * kChunk; }
  __device__ __forceinline__ float total() const { return numbers[3 * kChunk]; }
};
struct ValueOutputs {
  SwizzledTile values, other;  // [tokens,V]
};
template <int SLABS, int KEYS>
struct ScanShared {
  static constexpr int kStages = SLABS == 1 || KEYS == 2 ? 3 : 2;
  static constexpr int kOuts = SLABS == 1 ? 2 : 1;  // the states have two always
  ScanInputs<SLABS, KEYS> in[kStages];
  SwizzledTile states[2][SLABS];  // [V,K]
  ValueOutputs out[kOuts];
  uint64_t arrived[kStages];
};

// What a scan reads: matrices in memory, coordinates (column, head, token), keys of head hv/group.
template <int KEYS>
struct ScanMaps {
  CUtensorMap keys[KEYS], v, a, p;
  int group = 1;
};
// The same at one token and chunk of a head, for copies by threads.
template <int KEYS>
struct ScanSource {
  static constexpr int64_t kPairStride = KEYS == 2 ? 2 * kChunk : kChunk;  // rows of a and p

  const bf16_t *keys[KEYS], *v, *a, *p;
  const float* numbers;
  int64_t key_stride, value_stride;
  int number_count;
};

// Named barriers between the 128 multiplying threads and THREADS − 128 others.
template <int THREADS>
__device__ __forceinline__ void barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void barrier_wait(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
// The multiplying warps need more registers than a block of twelve warps has for each; the others
// need fewer. Called by all four warps of a group.
__device__ __forceinline__ void take_registers() {
#if EBB_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#endif
}
__device__ __forceinline__ void give_registers() {
#if EBB_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
#endif
}
inline constexpr int kDone = 1, kFree = 4, kReady = 6, kFreeValues = 8;  // first ids

// A stage's arrivals: half of the fetching threads, and the bytes that one of them announces.
__device__ __forceinline__ void expect_arrivals(uint64_t* arrived) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(arrived)),
               "n"(kFetchThreads / 2)
               : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* arrived) {
  asm volatile(
      "{\n.reg .b64 t;\nmbarrier.arrive.shared.b64 t, [%0];\n}" ::"r"(shared_address(arrived))
      : "memory");
}
#if EBB_WGMMA
__device__ __forceinline__ void arrive_with_bytes(uint64_t* arrived, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(arrived)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void fetch_box(SwizzledTile& tile, const CUtensorMap& map, int column,
                                          int head, int64_t row, uint64_t* arrived) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(tile.s)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(head), "r"(int(row)),
      "r"(shared_address(arrived))
      : "memory");
}
// A multiple of 16 bytes, aligned to 16.
__device__ __forceinline__ void fetch_run(void* shared, const void* global, int bytes,
                                          uint64_t* arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(arrived))
      : "memory");
}
#endif
// What the multiplying warps wait with; it counts how often each stage has been filled.
struct Arrivals {
  unsigned phases = 0;  // a bit per stage

  __device__ __forceinline__ void wait(uint64_t* arrived, int stage) {
    const unsigned phase = phases >> stage & 1, address = shared_address(arrived + stage);
    unsigned ready = 0;
    while (!ready) {
#if __CUDA_ARCH__ >= 900
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(ready)
          : "r"(address), "r"(phase)
          : "memory");
#else
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(ready)
          : "r"(address), "r"(phase)
          : "memory");
#endif
    }
    phases ^= 1u << stage;
  }
};

// How sequences are cut: the same number of segments each, of equal length (the last may be
// shorter, or empty). ends: what the first pass leaves, f32 [N,segments,HV,rows,K], rows of V and
// then of M; starts: [N,segments,HV,V,K], transposed states.
struct Segments {
  int count = 1;
  float *ends = nullptr, *starts = nullptr;
};

// One block's share: a segment of a sequence, a head, 64 columns of V. ENDS: the first pass, where
// columns from the next multiple of 64 behind V on are the unit vectors of K.
struct ScanItem {
  int v0, hv, segment;
  int64_t sequence;
  int64_t first, steps;  // chunk of the sequence, how many
  ChunkWalk walk;

  __device__ __forceinline__ ScanItem(const Problem<bf16_t>& p, const Segments& segments, bool ends,
                                      int64_t item)
      : v0(int(item % tiles(p, ends)) * kFastTile),
        hv(int(item / tiles(p, ends) % p.value_heads)),
        segment(int(item / tiles(p, ends) / p.value_heads % segments.count)),
        sequence(item / tiles(p, ends) / p.value_heads / segments.count),
        walk(p, sequence) {
    const int64_t length = (walk.count + segments.count - 1) / segments.count;
    first = segment * length;
    const int64_t left = walk.count - first;
    steps = left < 0 ? 0 : (left < length ? left : length);
  }
  __host__ __device__ __forceinline__ static int tiles(const Problem<bf16_t>& p, bool ends) {
    const int values = (p.value_dim + kFastTile - 1) / kFastTile;
    return values + (ends ? (p.key_dim + 63) / 64 : 0);
  }
  __host__ __device__ __forceinline__ static int64_t count(const Problem<bf16_t>& p,
                                                           const Segments& segments, bool ends) {
    return p.sequences * segments.count * p.value_heads * tiles(p, ends);
  }
  // Of the f32 states [N,HV,K,V].
  __device__ __forceinline__ int64_t state_at(const Problem<bf16_t>& p) const {
    return (sequence * p.value_heads + hv) * p.key_dim * p.value_dim;
  }
  // Row 0 of this item's place in Segments::ends or ::starts.
  __device__ __forceinline__ int64_t segment_row(const Problem<bf16_t>& p, const Segments& segments,
                                                 int rows) const {
    return ((sequence * segments.count + segment) * p.value_heads + hv) * rows;
  }
  __device__ __forceinline__ int last_rows() const {
    const int64_t left = walk.end - walk.begin - (first + steps - 1) * kChunk;
    return int(left < kChunk ? left : kChunk);
  }
};

// The place of a step among `SIZE` buffers.
struct Turn {
  int at = 0;
  template <int SIZE>
  __device__ __forceinline__ void next(int by = 1) {
    at += by;
    if (at >= SIZE) at -= SIZE;
  }
};

// Where an item begins: its first chunk, in reverse its last, and `back` steps from there.
template <bool REVERSE>
__device__ __forceinline__ int64_t chunk_of_step(const ScanItem& item, int step) {
  return item.first + (REVERSE ? item.steps - 1 - step : step);
}

// The fetching warps: two for even steps, two for odd ones.
template <int SLABS, int KEYS, bool REVERSE>
struct ScanFetch {
  static constexpr int kStages = ScanShared<SLABS, KEYS>::kStages;
  const Problem<bf16_t>& p;
  const ScanItem& item;
  ScanShared<SLABS, KEYS>& s;
  const ScanMaps<KEYS>& maps;
  int thread = int(threadIdx.x) & 63, parity = (int(threadIdx.x) - kMultiplyThreads) >> 6;

  // By one thread: all of it, as it lies in memory.
  __device__ __forceinline__ void ask(const ScanSource<KEYS>& from, int64_t token,
                                      ScanInputs<SLABS, KEYS>& to, uint64_t* arrived) const {
#if EBB_WGMMA
    const int bytes = 4 * from.number_count;
    arrive_with_bytes(arrived, (KEYS * SLABS + 3) * int(sizeof(SwizzledTile)) + bytes);
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
    const auto tile = [&](SwizzledTile& tile, const bf16_t* g, int64_t stride, int cols) {
#pragma unroll 2
      for (int i = 0; i < 8; ++i) {
        const bool valid = r + 8 * i < rows && c < cols;
        const void* source = valid ? static_cast<const void*>(g + (r + 8 * i) * stride + c)
                                   : static_cast<const void*>(from.numbers);
        copy_async_or_zero(tile.at(r, c) + 8 * i * 64, source, valid);
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
    if (4 * thread < from.number_count)
      copy_async(to.numbers + 4 * thread, from.numbers + 4 * thread);
    wait_copies();
    publish_tiles();
  }

  // at(token, chunk): the source there.
  template <class At>
  __device__ __forceinline__ void run(At&& at) const {
    const int steps = int(item.steps), last_rows = item.last_rows();
    Turn turn;
    turn.at = parity;
    for (int step = parity; step < steps; step += 2) {
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
      turn.next<kStages>(2);
    }
    // Arrivals that no further step waits for.
    for (int step = steps - kStages; step < steps; ++step)
      if (step >= 0 && ((step + kStages) & 1) == parity) barrier_wait<192>(kDone + step % kStages);
  }
};

// The storing warps.
template <int SLABS, int KEYS, bool REVERSE>
struct ScanStore {
  static constexpr int64_t kStep = REVERSE ? -1 : 1;
  ScanShared<SLABS, KEYS>& s;
  int steps, last_rows, r, c, cols, key_cols;
  int64_t value_stride, key_dim, value_dim, state_stride;
  bf16_t *state, *values, *other;  // of the next step; other may be null

  __device__ __forceinline__ ScanStore(const Problem<bf16_t>& p, const ScanItem& at,
                                       ScanShared<SLABS, KEYS>& shared, bf16_t* g_states,
                                       bf16_t* g_values, bf16_t* g_other)
      : s(shared), steps(int(at.steps)), last_rows(at.last_rows()) {
    const int t = int(threadIdx.x) & 127;
    r = t / 8, c = t % 8 * 8;
    cols = p.value_dim - at.v0 - c, key_cols = p.key_dim - c;
    value_stride = p.value_stride(), key_dim = p.key_dim, value_dim = p.value_dim;
    state_stride = int64_t(p.value_heads) * p.key_dim * p.value_dim;
    const int64_t chunk = chunk_of_step<REVERSE>(at, 0);
    const int64_t token = at.walk.begin + chunk * kChunk;
    state = g_states + p.state_at(at.walk.first + chunk, at.hv) + (at.v0 + r) * key_dim + c;
    values = g_values + (p.row_at(token, at.hv) + r) * value_dim + at.v0 + c;
    other = g_other ? g_other + p.value_at(token, at.hv) + at.v0 + r * value_stride + c : nullptr;
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
  __device__ __forceinline__ void run() {
    constexpr int kOuts = ScanShared<SLABS, KEYS>::kOuts;
    for (int step = 0; step < steps; ++step) {
      barrier_wait<256>(kReady + (step & 1));
      const ValueOutputs& from = s.out[step % kOuts];
      const int n = step == (REVERSE ? 0 : steps - 1) ? last_rows : kChunk;
      if (cols > 0) {
        put(values, value_dim, from.values, n);
        if (other) put(other, value_stride, from.other, n);
      }
      if (step + kOuts < steps) barrier_arrive<256>(kFreeValues + step % kOuts);
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
        if (key_cols > 64 * j) put(state + 64 * j, key_dim, s.states[step & 1][j], cols + c);
      if (step + 2 < steps) barrier_arrive<256>(kFree + (step & 1));
      state += kStep * state_stride;
      values += kStep * kChunk * value_dim;
      if (other) other += kStep * kChunk * value_stride;
    }
  }
};

// Before a step's values may be written.
template <int OUTS>
__device__ __forceinline__ void wait_for_values(int step) {
  if (step >= OUTS) barrier_wait<256>(kFreeValues + step % OUTS);
}

// What a segment starts from, transposed: in the first pass zero or a unit vector per column; of
// one segment the state given by the caller (or zero); else what chain_segments left.
template <int SLABS, bool ENDS>
__device__ __forceinline__ void read_start(float (&state)[SLABS][8][4], const Problem<bf16_t>& p,
                                           const ScanItem& item, const Segments& segments,
                                           const float* given, int warp, const Lane& l) {
  const int v = item.v0 + 16 * warp;
  if (!ENDS && segments.count == 1) {
    read_transposed<SLABS>(state, given ? given + item.state_at(p) : nullptr, p.key_dim,
                           p.value_dim, v, l);
    return;
  }
  const int unit = v - ScanItem::tiles(p, false) * kFastTile;
  const int64_t row = item.segment_row(p, segments, p.value_dim);
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * l.c + (e & 1), r = l.g + 8 * (e >> 1);
      float x = 0;
      if (ENDS)
        x = unit + r == k ? 1.f : 0.f;
      else if (k < p.key_dim && v + r < p.value_dim)
        x = segments.starts[(row + v + r) * p.key_dim + k];
      state[n / 8][n % 8][e] = x;
    }
}
template <int SLABS>
__device__ __forceinline__ void write_end(const float (&state)[SLABS][8][4],
                                          const Problem<bf16_t>& p, const ScanItem& item,
                                          const Segments& segments, int warp, const Lane& l) {
  const int rows = ScanItem::tiles(p, true) * kFastTile, v = item.v0 + 16 * warp;
  const int64_t row = item.segment_row(p, segments, rows);
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = 8 * n + 2 * l.c;
      if (k < p.key_dim)
        *reinterpret_cast<float2*>(segments.ends + (row + v + l.g + 8 * half) * p.key_dim + k) = {
            state[n / 8][n % 8][2 * half], state[n / 8][n % 8][2 * half + 1]};
    }
}
// What a block does: its items one after the other, by role. Each role is a loop of its own, or the
// compiler would not see which of them has the registers.
template <bool ENDS, bool REVERSE, class F>
__device__ __forceinline__ void each_item(const Problem<bf16_t>& p, const Segments& segments,
                                          F&& f) {
  const int64_t items = ScanItem::count(p, segments, ENDS);
  for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
    const ScanItem item(p, segments, ENDS, at);
    // Nobody starts from the end of the last segment, in the order of the scan.
    if (ENDS && item.segment == (REVERSE ? 0 : segments.count - 1)) continue;
    f(item);
    asm volatile("bar.sync 0;" ::: "memory");
  }
}

// With a decay per head; v is V or dO.
__device__ __forceinline__ ScanSource<2> gated_source(const FastProblem& p, const bf16_t* v, int hv,
                                                      int64_t token, int64_t chunk) {
  const int64_t key = p.key_at(token, hv);
  const bf16_t* a = p.a + p.row_at(token, hv) * 2 * kChunk;
  return {{p.k + key, p.q + key},
          v + p.value_at(token, hv),
          a,
          a + kChunk,
          reinterpret_cast<const float*>(p.gates + chunk * p.value_heads + hv),
          p.key_stride(),
          p.value_stride(),
          kScanGateFloats};
}
inline ScanMaps<2> gated_maps(const FastProblem& p, const bf16_t* v, Device device) {
  const auto keys = [&](const bf16_t* g) {
    return tile_map(g, p.key_dim, p.heads, p.key_dim, p.tokens, p.key_stride(), device);
  };
  const auto square = [&](const bf16_t* g) {
    return tile_map(g, kChunk, p.value_heads, p.tokens * 2 * kChunk, p.tokens, 2 * kChunk, device);
  };
  return {{keys(p.k), keys(p.q)},
          tile_map(v, p.value_dim, p.value_heads, p.value_dim, p.tokens, p.value_stride(), device),
          square(p.a),
          square(p.a + kChunk),
          p.value_heads / p.heads};
}

// A scan's kernel by roles: multiply(item, arrivals), and for the others source(item)(token, chunk)
// and store(item), which runs a ScanStore.
template <int SLABS, int KEYS, bool ENDS, bool REVERSE, class Multiply, class Source, class Store>
__device__ __forceinline__ void run_scan(const Problem<bf16_t>& p, const Segments& segments,
                                         const ScanMaps<KEYS>& maps, ScanShared<SLABS, KEYS>& s,
                                         Multiply&& multiply, Source&& source, Store&& store) {
  if (threadIdx.x == 0) {
    for (uint64_t& arrived : s.arrived) expect_arrivals(&arrived);
    publish_tiles();
  }
  __syncthreads();
  if (threadIdx.x < kMultiplyThreads) {
    take_registers();
    Arrivals arrivals;
    each_item<ENDS, REVERSE>(p, segments, [&](const ScanItem& item) { multiply(item, arrivals); });
  } else if (threadIdx.x < kMultiplyThreads + kFetchThreads) {
    give_registers();
    each_item<ENDS, REVERSE>(p, segments, [&](const ScanItem& item) {
      ScanFetch<SLABS, KEYS, REVERSE>{p, item, s, maps}.run(
          [&](int64_t token, int64_t chunk) { return source(item, token, chunk); });
    });
  } else {
    give_registers();
    each_item<ENDS, REVERSE>(p, segments, [&](const ScanItem& item) {
      if (!ENDS) store(item);
    });
  }
}

// How many segments fill the GPU, and their buffers; one where it is full anyway.
Segments cut_sequences(const Problem<bf16_t>& p, Device device, Tensor (&buffers)[2]);
// Segments::starts from ::ends and the state before the first segment (after the last, in reverse),
// f32 [N,HV,K,V] or null.
void chain_segments(const Problem<bf16_t>& p, const Segments& segments, const float* given,
                    bool reverse, cudaStream_t stream);

// The multiplying warps write their results: x [16 columns of V, 64 tokens] as left operands, and a
// transposed state.
__device__ __forceinline__ void put_values(SwizzledTile& s, const unsigned (&x)[4][4], int warp) {
  const int lane = int(threadIdx.x) & 31;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    store_matrices<true>(
        s.at(16 * k + 8 * (lane >> 4) + (lane & 7), 16 * warp + 8 * ((lane >> 3) & 1)), x[k]);
}
template <int SLABS>
__device__ __forceinline__ void put_state(SwizzledTile (&s)[SLABS],
                                          const unsigned (&x)[4 * SLABS][4], int warp) {
  const int lane = int(threadIdx.x) & 31;
#pragma unroll
  for (int k = 0; k < 4 * SLABS; ++k)
    store_matrices<false>(
        s[k / 4].at(16 * warp + 8 * ((lane >> 3) & 1) + (lane & 7), 16 * (k % 4) + 8 * (lane >> 4)),
        x[k]);
}
template <int SLABS>
__device__ __forceinline__ void state_as_left(unsigned (&a)[4 * SLABS][4],
                                              const float (&state)[SLABS][8][4]) {
#pragma unroll
  for (int k = 0; k < 4 * SLABS; ++k)
    as_left(a[k], state[k / 4][2 * k % 8], state[k / 4][2 * k % 8 + 1]);
}
template <int SLABS>
__device__ __forceinline__ void scale_state(float (&state)[SLABS][8][4], float factor) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[j][n][e] *= factor;
    settle(state[j]);
  }
}
template <int SLABS>
__device__ __forceinline__ void settle_state(float (&state)[SLABS][8][4]) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) settle(state[j]);
}

// Registers of a [16, 64 tokens] tile scaled token by token.
__device__ __forceinline__ void scale_tokens(float (&x)[8][4], const float* s_scale, float factor,
                                             const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 f = *reinterpret_cast<const float2*>(s_scale + 8 * n + 2 * l.c);
    x[n][0] *= factor * f.x, x[n][1] *= factor * f.y;
    x[n][2] *= factor * f.x, x[n][3] *= factor * f.y;
  }
}
// Left operands [16 columns of V, 64 tokens] of a tile [tokens,V].
__device__ __forceinline__ void load_values(unsigned (&a)[4][4], const SwizzledTile& s, int warp,
                                            const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    load_matrices_transposed(a[k], s.at(16 * k + l.low + 8 * l.high, 16 * warp + 8 * l.odd));
}

}  // namespace ebb::gpu::delta
