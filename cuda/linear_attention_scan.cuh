// What the scans of gated linear attention have in common (linear_attention_fast_fwd.cu,
// linear_attention_reverse.cu). A block has 64 columns of V of one head and one segment of a
// sequence; warps multiply, fetch or store. Step s is a chunk, in reverse from the end.
//   fetching s                     multiplying s                      storing s
//   wait for done(s mod STAGES);
//   ask for stage[s mod STAGES]  ->  wait for arrived[s mod STAGES]
//                                  the state out: StateReady      ->  stored: StateFree
//                                <-  products; done(s mod STAGES)
// Whole chunks are fetched by the copy engine (cuda/tensor_map.h); the ragged chunk at a sequence's
// end, whose rows go on in the next sequence, and everything on other GPUs, by the threads.
//
// Where sequences and heads are few, a sequence is cut into segments. With a decay per head a
// segment is S_end = δ S_start + E, δ its whole decay: a first pass finds E and δ of each, a small
// kernel goes from one to the next, and the scan proper runs all segments at once.
#pragma once
#include <type_traits>

#include "cuda/linear_attention_gates.cuh"
#include "cuda/meet.cuh"

namespace ebb::gpu::linear_attention {

inline constexpr int kScanFetchThreads = 64, kScanStoreThreads = 64;
// Named barriers; up to six stages, states by parity of the step: for those that store them and for
// those that read them; up to three roles that meet between items.
enum ScanBarrier {
  kStageDone = 1,
  kStateReady = 7,
  kStateFree = 9,
  kStateReadable = 11,
  kItemDone = 13
};

// Roles need different numbers of registers, of 65,536 in all. Called by all four warps of a
// group.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
#if EBB_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
#if EBB_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// Tiles of bf16 [heads, rows, columns], the columns next to each other.
struct TileSource {
  CUtensorMap map;
  const bf16_t* g;
  int64_t head_stride, row_stride;
  int columns;

  __device__ __forceinline__ void ask(SwizzledTile& to, int64_t h, int64_t row, int column,
                                      uint64_t* arrived) const {
#if EBB_WGMMA
    fetch_box(to, map, column, int(h), row, arrived);
#endif
  }
  // By 64 threads; zeros after `rows` rows.
  __device__ __forceinline__ void copy(SwizzledTile& to, int64_t h, int64_t row, int column,
                                       int rows) const {
    const TileMover<kScanFetchThreads> mover(int(threadIdx.x) % kScanFetchThreads);
    mover.fetch(to, g + h * head_stride + row * row_stride + column, row_stride, rows,
                columns - column);
  }
};

#if EBB_WGMMA
// By one thread: a tile to where it lies in a matrix, as far as it lies inside.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const SwizzledTile& tile,
                                          int column, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
          reinterpret_cast<uint64_t>(&map)),
      "r"(column), "r"(head), "r"(row), "r"(shared_address(tile.s))
      : "memory");
}
// Until what it has asked for so far has been read.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
#endif
// Where tiles of bf16 [heads, rows, columns] without gaps are written.
struct TileTarget {
  CUtensorMap map;
  bf16_t* g;
  int rows, columns;

  // By the 64 storing threads: tiles side by side from row `at` on, or BELOW one another from
  // column `at` on. They have been read when it returns.
  template <bool BELOW, int SLABS>
  __device__ __forceinline__ void store(const SwizzledTile (&tiles)[SLABS], int64_t h,
                                        int at) const {
    const int thread = int(threadIdx.x) % kScanStoreThreads;
    if (EBB_WGMMA) {
#if EBB_WGMMA
      if (thread == 0) {
#pragma unroll
        for (int j = 0; j < SLABS; ++j)
          store_box(map, tiles[j], BELOW ? at : 64 * j, int(h), BELOW ? 64 * j : at);
        wait_stores_read();
      }
      __syncwarp();
#endif
    } else {
      const TileMover<kScanStoreThreads> mover(thread);
#pragma unroll
      for (int j = 0; j < SLABS; ++j) {
        const int row = BELOW ? 64 * j : at, column = BELOW ? at : 64 * j;
        mover.store(g + (h * rows + row) * columns + column, columns, tiles[j], rows - row,
                    columns - column);
      }
    }
  }
};
TileTarget tile_target(bf16_t* g, int64_t heads, int64_t rows, int64_t columns, Device device);
inline TileTarget state_target(const FastAttention& p, bf16_t* states, Device device) {
  return tile_target(states, p.chunks * p.value_heads, p.value_dim, p.key_dim, device);
}

// What a scan reads: KEYS matrices of K channels, one of V, and with RUN the gradients of the
// contributions [runs·H,K,V].
template <int KEYS>
struct ScanSources {
  TileSource keys[KEYS], v, run;
  bool mapped;  // whether the maps can be used
};
// Rows of a token's heads, `step` elements from token to token.
TileSource token_source(const FastAttention& p, const bf16_t* g, int columns, int heads,
                        int64_t step, Device device);
inline bool can_map(std::initializer_list<TileSource> sources) {
  for (const TileSource& s : sources)
    if (s.row_stride <= 0) return false;
  return true;
}

template <int SLABS>
struct RunTiles {
  SwizzledTile run[SLABS];  // [K,V]
};
struct NoTiles {};
template <int SLABS, int KEYS, bool RUN = false>
struct ScanStage : std::conditional_t<RUN, RunTiles<SLABS>, NoTiles> {
  SwizzledTile keys[KEYS][SLABS], v;
};

// How sequences are cut: the same number of segments each, of equal length (the last may be
// shorter, or empty).
struct AttentionSegments {
  int count = 1;
  float *ends = nullptr, *starts = nullptr;  // [N,segments,H,V,K]: E, and what each begins with
  float* decays = nullptr;                   // [N,segments,H]: δ
};

// One block's share.
struct AttentionItem {
  int v0, h, segment;
  int64_t n, begin, end;  // sequence, its tokens
  int64_t first_chunk;    // of the sequence, among all
  int64_t first = 0;      // chunk of the sequence
  int steps = 0;

  __device__ __forceinline__ AttentionItem(const FastAttention& p, const AttentionSegments& cut,
                                           int64_t item) {
    const int tiles = tile_count(p);
    v0 = int(item % tiles) * kFastTile;
    h = int(item / tiles % p.value_heads);
    segment = int(item / tiles / p.value_heads % cut.count);
    n = item / tiles / p.value_heads / cut.count;
    first_chunk = p.first_chunk(n) * p.pieces;
    SequenceCursor s = p.cursor;
    s.select(n);
    begin = s.begin, end = s.end;
    const int64_t chunks = (end - begin + kChunk - 1) / kChunk;
    int64_t length = (chunks + cut.count - 1) / cut.count;  // whole runs
    length = (length + p.pieces - 1) / p.pieces * p.pieces;
    first = segment * length;
    if (first < chunks) steps = int(chunks - first < length ? chunks - first : length);
  }
  __host__ __device__ __forceinline__ static int tile_count(const FastAttention& p) {
    return (p.value_dim + kFastTile - 1) / kFastTile;
  }
  __host__ __device__ __forceinline__ static int64_t count(const FastAttention& p,
                                                           const AttentionSegments& cut) {
    return p.sequences * cut.count * p.value_heads * tile_count(p);
  }
  template <bool REVERSE>
  __device__ __forceinline__ int64_t chunk(int step) const {
    return first + (REVERSE ? steps - 1 - step : step);
  }
  __device__ __forceinline__ Span span(int64_t chunk) const {
    const int64_t at = begin + chunk * kChunk, left = end - at;
    return {at, int(left < kChunk ? left : kChunk)};
  }
  // Of the f32 states [N,H,K,V].
  __device__ __forceinline__ int64_t state_at(const FastAttention& p) const {
    return (n * p.value_heads + h) * p.key_dim * p.value_dim;
  }
  __device__ __forceinline__ int64_t segment_at(const FastAttention& p,
                                                const AttentionSegments& cut) const {
    return (n * cut.count + segment) * p.value_heads + h;
  }
};

// A block's items one after the other, by role ROLE of roles with THREADS... threads. Each is a
// loop of its own, or the compiler would not see which of them has the registers.
template <int ROLE, int... THREADS, class F>
__device__ __forceinline__ void each_attention_item(const FastAttention& p,
                                                    const AttentionSegments& cut, F&& f) {
  const int64_t items = AttentionItem::count(p, cut);
  for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
    f(AttentionItem(p, cut, at));
    if (at + gridDim.x < items) barrier_meet<ROLE, THREADS...>(kItemDone);
  }
}

template <int STAGES>
__device__ __forceinline__ void open_stages(uint64_t (&arrived)[STAGES]) {
  if (threadIdx.x == 0) {
    for (uint64_t& a : arrived) expect_arrivals(&a);
    publish_tiles();
  }
  __syncthreads();
}

// By the 64 fetching threads: every step of an item. USERS threads read a stage. GATES: the second
// warp works out the gates, and leaves them in memory too.
template <int USERS, bool REVERSE, bool RUN, int SLABS, bool GATES, int KEYS, class Shared>
__device__ __forceinline__ void fetch_steps(const FastAttention& p, const AttentionItem& item,
                                            const ScanSources<KEYS>& from, Shared& s) {
  constexpr int kStages = Shared::kStages, kAll = USERS + kScanFetchThreads;
  const int thread = int(threadIdx.x) % kScanFetchThreads;
  const int64_t group = p.group(item.h);
  LaneGates ahead[2];  // of the next two steps, by parity
  const auto fetch_gates = [&](LaneGates& to, int step) {
    if (step < item.steps) to.fetch(p, item.span(item.template chunk<REVERSE>(step)), item.h);
  };
  if (GATES && thread >= 32) fetch_gates(ahead[0], 0), fetch_gates(ahead[1], 1);
  Turn turn;
  for (int step = 0; step < item.steps; ++step) {
    const int64_t chunk = item.template chunk<REVERSE>(step);
    const Span span = item.span(chunk);
    GateRecord record;
    if (GATES && thread >= 32) {
      LaneGates now;
      if (step & 1)
        now = ahead[1], fetch_gates(ahead[1], step + 2);
      else
        now = ahead[0], fetch_gates(ahead[0], step + 2);
      now.apply_steps(p, span.rows, item.h);
      record = GateRecord(p, now);
    }
    if (step >= kStages) barrier_wait<kAll>(kStageDone + turn.at);
    const bool begins = RUN && (step == 0 || (chunk + 1) % p.pieces == 0);  // a run, from its end
    const int64_t run = (item.first_chunk + chunk) / p.pieces * p.value_heads + item.h;
    auto& to = s.stage[turn.at];
    FastGates& gates = s.gates[turn.at];
    FastGates& g_gates = p.gates[(item.first_chunk + chunk) * p.value_heads + item.h];
    uint64_t* arrived = s.arrived + turn.at;
    const auto put_record = [&](const GateRecord& record) {
      record.put(gates);
      if (item.v0 == 0) record.put(g_gates);
    };
    // f(source, tile, head, row, column, rows) of all tiles.
    const auto each_tile = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < KEYS; ++i)
#pragma unroll
        for (int j = 0; j < SLABS; ++j)
          f(from.keys[i], to.keys[i][j], group, span.first, 64 * j, span.rows);
      f(from.v, to.v, item.h, span.first, item.v0, span.rows);
      if constexpr (RUN)
        for (int j = 0; begins && j < SLABS; ++j)
          f(from.run, to.run[j], run, 64 * j, item.v0, p.key_dim - 64 * j);
    };
    if (EBB_WGMMA && from.mapped && span.rows == kChunk) {
      if (thread == 0) {
#if EBB_WGMMA
        const int tiles = KEYS * SLABS + 1 + (begins ? SLABS : 0);
        const int gate_bytes = GATES ? 0 : int(sizeof(FastGates));
        arrive_with_bytes(arrived, tiles * int(sizeof(SwizzledTile)) + gate_bytes);
        if (!GATES) fetch_run(&gates, &g_gates, gate_bytes, arrived);
        each_tile([&](const TileSource& source, SwizzledTile& tile, int64_t h, int64_t row,
                      int column, int) { source.ask(tile, h, row, column, arrived); });
#endif
      } else {
        if (GATES && thread >= 32) put_record(record);
        arrive(arrived);
      }
    } else {
      if (GATES && thread >= 32) put_record(record);
      each_tile([&](const TileSource& source, SwizzledTile& tile, int64_t h, int64_t row,
                    int column, int rows) { source.copy(tile, h, row, column, rows); });
      if (!GATES) TileMover<kScanFetchThreads>(thread).fetch_gates(gates, g_gates);
      wait_copies();
      publish_tiles();
      arrive(arrived);
    }
    turn.next<kStages>();
  }
  // Arrivals that no further step waits for.
  for (int step = max(0, item.steps - kStages); step < item.steps; ++step)
    barrier_wait<kAll>(kStageDone + step % kStages);
}

// A tile row of the transposed states by segment, f32 [...,V,K].
template <int SLABS, class F>
__device__ __forceinline__ void each_pair(const FastAttention& p, int v, const Lane& l, F&& f) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = 8 * n + 2 * l.c, r = v + l.g + 8 * half;
      f(n, half, k < p.key_dim && r < p.value_dim, int64_t(r) * p.key_dim + k);
    }
}

// What an item begins with: of one segment what the caller gives, f32 [N,H,K,V] or null.
template <int SLABS>
__device__ __forceinline__ void read_begin(float (&state)[SLABS][8][4], const FastAttention& p,
                                           const AttentionItem& item, const AttentionSegments& cut,
                                           const float* given, int warp, const Lane& l) {
  const int v = item.v0 + 16 * warp;
  if (cut.count == 1) {
    read_transposed<SLABS>(state, given ? given + item.state_at(p) : nullptr, p.key_dim,
                           p.value_dim, v, l);
    return;
  }
  const float* from = cut.starts + item.segment_at(p, cut) * p.key_dim * p.value_dim;
  each_pair<SLABS>(p, v, l, [&](int n, int half, bool inside, int64_t at) {
    const float2 x = inside ? *reinterpret_cast<const float2*>(from + at) : float2{0.f, 0.f};
    state[n / 8][n % 8][2 * half] = x.x, state[n / 8][n % 8][2 * half + 1] = x.y;
  });
}

// How many segments fill the GPU, and their buffers; one where it is full anyway.
AttentionSegments cut_sequences(const FastAttention& p, Device device, Tensor (&buffers)[3]);
// First pass and chain: cut.starts, from the state before the first segment (in reverse: after the
// last), f32 [N,H,K,V] or null. Sources: k and v, or q and dO in reverse.
void begin_segments(const FastAttention& p, const AttentionSegments& cut,
                    const ScanSources<1>& sources, const float* given, bool reverse,
                    cudaStream_t stream);
// What each run writes, as if it began with an empty state, [runs,H,K,V]; from k and v.
void write_contributions(const FastAttention& p, const AttentionSegments& cut,
                         const ScanSources<1>& sources, const Tensor& contributions,
                         cudaStream_t stream);
// dstates [chunks,H,V,K]: (D+E)ᵀ after each chunk, from q, dO and the gradients of contributions
// (or none); dh0 if wanted. dht, dh0 f32 [N,H,K,V] or null.
void reverse_scan(const FastAttention& p, const AttentionSegments& cut,
                  const ScanSources<1>& sources, const float* dht, const TileTarget& dstates,
                  float* dh0, cudaStream_t stream);

}  // namespace ebb::gpu::linear_attention
