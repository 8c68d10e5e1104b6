// The gradients of a chunk of gated linear attention in bf16 on tensor cores: what the three groups
// of warps of linear_attention_gradients.cu share. A block goes through steps: chunks, the heads of
// a group (or of a part of it), tiles of 64 columns of V.
//   scores (one step ahead at most)        queries                     keys
//   P, without v: ScoresReady  ->                                      dv needs it
//   Z, sums: ProductsReady     ->          dq needs it             <-  sums
//                                          ProductsSeen            ->  dk needs Z
//   fetches step s+STAGES  <-              step s done: StepDone       step s done: StepDone
// Whole chunks are fetched by the copy engine, ragged ones by threads.
#pragma once
#include <type_traits>

#include "cuda/delta_gradient_sums.cuh"
#include "cuda/linear_attention_scan.cuh"

namespace ebb::gpu::linear_attention {

struct AttentionBackward : FastAttention {
  const bf16_t* d_o = {};               // [tokens,H,V]
  const bf16_t* dcontributions = {};    // [runs,H,K,V] or null
  float* through_run = {};              // [runs,H]: e^{Σ g of the run} <S before it, its gradient>
  bf16_t* dstates = {};                 // (D+E)ᵀ after each chunk [chunks,H,V,K]
  bf16_t *dq = {}, *dk = {}, *dv = {};  // null: not wanted (or as f32 terms)
  float *dq_terms = {}, *dk_terms = {};  // [tokens,G·parts,K]: sums of a part of the heads
  float *dg = {}, *dweight = {};         // [tokens,H]
  void* ddt = {};                        // [tokens,H], as dt, where there are steps
  float* head_sums = {};                 // [chunks,3,H]: of v·dO, ddt and Δ dg; null: not wanted
  int parts = 1, part_heads = 1;         // how the heads of a group are dealt to blocks
};
struct GradientSources {
  TileSource q, k, v, d_o, states, dstates;  // of the states: [chunks·H,V,K]
  bool mapped;                               // whether the maps can be used
};

// dq, dk (or their terms), dv, dg, dw (or ddt) and sums over tokens, of every chunk.
void chunk_gradients(const AttentionBackward& p, Device device, cudaStream_t stream);

enum GradientBarrier { kStepDone = 1, kScoresReadyFor = 5, kProductsReady = 7, kProductsSeen = 9 };
inline constexpr int kGradientThreads = 384;

// OWN: every head has q and k of its own, which come with each step; else they stay for all heads
// of the group.
template <int SLABS>
struct KeyTiles {
  SwizzledTile q[SLABS], k[SLABS];
};
template <int SLABS, bool OWN>
struct GradientStage : std::conditional_t<OWN, KeyTiles<SLABS>, NoTiles> {
  SwizzledTile v, d_o, state[SLABS], dstate[SLABS];  // the states as [V,K]
};
struct alignas(16) HeadSums {
  float row_z[64];                    // of Z∘q kᵀ below the diagonal, over the columns
  float column_z[4][64];              // the same without w, over the rows of a warp
  float diagonal[64];                 // of the same
  float weight[64];                   // w
  float reads[64], kept[64];          // rows of dq's and dk's part from the states, with q and k;
                                      // kept without w
  float carry[8], through[4], total;  // of a warp: <S,D>, v·dO; γ_n
};
template <int SLABS, bool OWN>
struct GradientShared : std::conditional_t<OWN, NoTiles, KeyTiles<SLABS>> {
  static constexpr int kStages = OWN ? (SLABS == 1 ? 3 : 2) : (SLABS == 1 ? 4 : 3);
  GradientStage<SLABS, OWN> stage[kStages];
  SwizzledTile scores[2], z[2];                                // by head: P w + skip, Z
  SwizzledTile keys_out;                                       // dv, then dk
  std::conditional_t<OWN, SwizzledTile, NoTiles> queries_out;  // dq
  alignas(16) FastGates gates[kStages];
  HeadSums sums[2];
  uint64_t arrived[kStages], keys_arrived[1];

  __device__ __forceinline__ KeyTiles<SLABS>& keys(int stage) {
    if constexpr (OWN)
      return this->stage[stage];
    else
      return *this;
  }
};

// A block's steps: items (chunk, group, part of its heads), their heads, tiles of V. Their numbers
// fit an int: the states of more would not fit a device.
struct GradientWalk {
  const AttentionBackward& p;
  int item, chunk = 0;
  int column = 0, head = 0, tile = 0;  // column of G·parts
  Span span = {0, 0};

  __device__ __forceinline__ explicit GradientWalk(const AttentionBackward& problem)
      : p(problem), item(int(blockIdx.x)) {
    find();
  }
  __device__ __forceinline__ int columns() const { return p.heads * p.parts; }
  __device__ __forceinline__ bool valid() const { return item < int(p.chunks) * columns(); }
  // The item, or the next that has tokens. Rows of equal length go side by side from their first
  // chunks on: what the reverse scan has left last is read first, while the cache holds it.
  __device__ __forceinline__ void find() {
    for (; valid(); item += int(gridDim.x)) {
      const int place = item / columns();
      column = item - place * columns();
      if (p.chunk_before) {
        chunk = place, span = chunk_span(p, chunk);
      } else {
        const int rows = int(p.sequences), n = place % rows, c = place / rows;
        chunk = n * int(p.chunks_per_row) * p.pieces + c;
        const int64_t left = p.cursor.time - int64_t(kChunk) * c;
        span = {n * p.cursor.time + int64_t(kChunk) * c,
                left <= 0 ? 0 : int(left < kChunk ? left : kChunk)};
      }
      if (span.rows > 0) return;
    }
  }
  __device__ __forceinline__ void next() {
    if (++tile < tiles()) return;
    tile = 0;
    if (++head < p.part_heads) return;
    head = 0, item += int(gridDim.x);
    find();
  }
  __device__ __forceinline__ int tiles() const { return AttentionItem::tile_count(p); }
  __device__ __forceinline__ int h() const { return column * p.part_heads + head; }
  __device__ __forceinline__ int v0() const { return tile * kFastTile; }
  __device__ __forceinline__ bool begins_item() const { return head == 0 && tile == 0; }
  __device__ __forceinline__ bool ends_head() const { return tile + 1 == tiles(); }
  __device__ __forceinline__ bool ends_item() const {
    return ends_head() && head + 1 == p.part_heads;
  }
};

// What the scores' warps fetch with, 64 threads of them.
template <int SLABS, bool OWN>
struct GradientFetch {
  const AttentionBackward& p;
  const GradientSources& from;
  GradientShared<SLABS, OWN>& s;

  // Tiles by f(source, tile, head, row, column, rows), gates by thread 0 or all; BYTES of them.
  template <class Tiles>
  __device__ __forceinline__ void run(Tiles&& tiles, int rows, int bytes, FastGates* gates,
                                      const FastGates* g_gates, uint64_t* arrived) const {
    const int thread = int(threadIdx.x) % 128;
    if (thread >= kScanFetchThreads) return;
    if (EBB_WGMMA && from.mapped && rows == kChunk) {
      if (thread == 0) {
#if EBB_WGMMA
        arrive_with_bytes(arrived, bytes + (gates ? int(sizeof(FastGates)) : 0));
        if (gates) fetch_run(gates, g_gates, int(sizeof(FastGates)), arrived);
        tiles([&](const TileSource& source, SwizzledTile& tile, int64_t h, int64_t row, int column,
                  int) { source.ask(tile, h, row, column, arrived); });
#endif
      } else {
        arrive(arrived);
      }
      return;
    }
    tiles([&](const TileSource& source, SwizzledTile& tile, int64_t h, int64_t row, int column,
              int n) { source.copy(tile, h, row, column, n); });
    if (gates) TileMover<kScanFetchThreads>(thread).fetch_gates(*gates, *g_gates);
    wait_copies();
    publish_tiles();
    arrive(arrived);
  }
  template <class F>
  __device__ __forceinline__ void key_tiles(const GradientWalk& at, KeyTiles<SLABS>& to,
                                            F&& f) const {
#pragma unroll
    for (int j = 0; j < SLABS; ++j) {
      const int64_t group = p.group(at.h());
      f(from.q, to.q[j], group, at.span.first, 64 * j, at.span.rows);
      f(from.k, to.k[j], group, at.span.first, 64 * j, at.span.rows);
    }
  }
  // q and k of an item.
  __device__ __forceinline__ void keys(const GradientWalk& at) const {
    run([&](auto&& f) { key_tiles(at, s.keys(0), f); }, at.span.rows,
        2 * SLABS * int(sizeof(SwizzledTile)), nullptr, nullptr, s.keys_arrived);
  }
  __device__ __forceinline__ void step(const GradientWalk& at, int stage) const {
    const int64_t state = int64_t(at.chunk) * p.value_heads + at.h();
    const Span span = at.span;
    auto& to = s.stage[stage];
    run(
        [&](auto&& f) {
          f(from.v, to.v, at.h(), span.first, at.v0(), span.rows);
          f(from.d_o, to.d_o, at.h(), span.first, at.v0(), span.rows);
#pragma unroll
          for (int j = 0; j < SLABS; ++j) {
            f(from.states, to.state[j], state, at.v0(), 64 * j, p.value_dim - at.v0());
            f(from.dstates, to.dstate[j], state, at.v0(), 64 * j, p.value_dim - at.v0());
          }
          if constexpr (OWN) key_tiles(at, to, f);
        },
        span.rows, int(sizeof(GradientStage<SLABS, OWN>)), s.gates + stage,
        &p.gates_of(at.chunk, at.h()), s.arrived + stage);
  }
};

}  // namespace ebb::gpu::linear_attention
