// State-memory attention on tensor cores: the gradients of the memories
// (cuda/state_memory_fast.cuh). With the factors of pairs that the gradients of the tokens' vectors
// leave, they are Gᵀ = Σ (w gate dy) cᵀ and Xᵀ = Σ (dℓ' e) qᵀ, products of tiles of tokens in bf16,
// of which only the left operands are rounded.
#include "cuda/state_memory_fast.cuh"
#include "cuda/tensor_map.h"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kReaders = 8, kMultiplyThreads = 32 * kReaders;

// kMemories neighbouring memories of one head: the even ones are summed by one group of four warps,
// the odd ones by the other.
template <int NT>
struct MemoryShared {
  static constexpr int kMemories = 8 / NT, kOwn = kMemories / 2, kStages = NT == 1 ? 5 : 3;
  struct Stage {                   // or a MemoryRecord
    SwizzledTile right[NT];        // c or q
    SwizzledTile left;             // dy or e
    float factors[kMemories][64];  // of every memory, for the 64 tokens
  };
  static constexpr int kRecordBytes = MemoryRecord<NT>::kStreamed + 256 * NT;
  static_assert(kRecordBytes <= int(sizeof(Stage)) && sizeof(Stage) % 1024 == 0);
  Stage stage[kStages];
  float4 values[kOwn * NT * 8][kMultiplyThreads];  // every thread's part of G while X is summed
  float parts[2][2][NT][4][64];
  Ring<kStages, kReaders> ring;
};

struct MemorySources {
  const bf16_t *q, *c, *e, *dy;
};
struct MemoryMaps {
  CUtensorMap q, c, e, dy;
};
enum class Pass { values, keys };  // G, X

// Memories of one sequence and head, and the tiles of tokens that may see them.
struct MemoryItem {
  int head = 0, index = 0, count = 0;  // first memory in its sequence; how many there are
  int readable = 0;                    // those of them that a token sees
  int64_t memory = 0;                  // that one among all
  int64_t begin = 0, tile = 0;         // first token, first tile of the sequence
  int length = 0, tiles_begin = 0, tiles_end = 0;  // of the strip
  bool adds = false;                               // to what strips before have written

  // Of its memories, those that a token of the i-th tile sees.
  __device__ __forceinline__ int seen(int i, int run) const {
    return min(count, (min(64 * i + 64, length) - 1) / run - index);
  }
};
template <int MEMORIES>
__device__ __forceinline__ MemoryItem memory_item(const FastProblem& p, const int64_t* group_before,
                                                  int64_t index) {
  MemoryItem x;
  x.head = p.first_head + int(index % p.some_heads);
  const int64_t group = index / p.some_heads;
  int64_t n, runs, i;
  SequenceCursor s = p.cursor;
  if (group_before) {
    n = last_not_above(group_before, s.count, group);
    i = group - group_before[n];
  } else {
    n = group % s.count, i = group / s.count;
  }
  s.select(n);
  x.begin = s.begin, x.length = int(s.end - s.begin);
  runs = (int64_t(x.length) + p.run - 1) / p.run;
  x.index = int(i) * MEMORIES;
  x.count = int(min(int64_t(MEMORIES), runs - x.index));
  x.memory = (p.run_before ? p.run_before[n] : n * p.runs_per_row) + x.index;
  x.tile = p.tile_before ? p.tile_before[n] : n * p.tiles_per_row;
  const int64_t first = (int64_t(x.index) + 1) * p.run;  // the first token that sees one
  x.readable = min(x.count, (x.length - 1) / p.run - x.index);
  x.tiles_end = (x.length + 63) / 64;
  x.tiles_begin = first >= x.length ? x.tiles_end : int(first / 64);
  if (p.strip_end) {
    const int64_t before = p.strip_begin - x.tile, after = p.strip_end - x.tile;
    // Memories that nobody sees are written with the first strip.
    if (x.tiles_begin == x.tiles_end && p.strip_begin > 0) x.count = 0;
    if (x.tiles_begin < x.tiles_end) {
      x.adds = x.tiles_begin < before;
      x.tiles_begin = int(max(int64_t(x.tiles_begin), before));
      x.tiles_end = int(min(int64_t(x.tiles_end), after));
      if (x.tiles_begin >= x.tiles_end) x.count = 0;
    }
  }
  return x;
}

// By one warp: tile `i` of the item's sequence into a stage.
template <int NT>
__device__ __forceinline__ void fetch_tokens(const FastProblem& p, const MemorySources& from,
                                             const MemoryMaps& maps, const PairFactors& pairs,
                                             const MemoryItem& item, int i, Pass pass,
                                             typename MemoryShared<NT>::Stage& to,
                                             Mbarrier& arrived) {
  const int lane = int(threadIdx.x) & 31;
  const int64_t token = item.begin + int64_t(i) * 64;
  const int rows = min(64, item.length - 64 * i);
  const bool keys = pass == Pass::keys;
  const int right_of = keys ? p.q_heads : p.c_heads, left_of = keys ? p.e_heads : p.heads;
  const int right_head = p.shared_head(item.head, right_of);
  const int left_head = p.shared_head(item.head, left_of);
  const Run factors[1] = {
      {to.factors,
       pairs.of(p, item.tile + i, item.head) + (keys ? pairs.half : 0) + int64_t(item.index) * 64,
       item.seen(i, p.run) * 256}};
  const auto copy = [&](SwizzledTile& tile, const bf16_t* x, int of, int head, int column0,
                        int width) {
    for (int k = lane; k < 64 * 8; k += 32) {
      const int r = k / 8, column = k % 8 * 8;
      const bool there = r < rows && column0 + column < width;
      const bf16_t* source = x + ((token + r) * of + head) * width + column0 + column;
      delta::copy_async_or_zero(tile.at(r, column), there ? source : x, there);
    }
  };
  const auto copy_all = [&] {
#pragma unroll
    for (int t = 0; t < NT; ++t)
      copy(to.right[t], keys ? from.q : from.c, right_of, right_head, 64 * t, p.n);
    copy(to.left, keys ? from.e : from.dy, left_of, left_head, 0, p.p);
  };
#if EBB_WGMMA
  const bool whole = rows == 64;
  if (!whole) {  // what follows in memory belongs to another sequence
    copy_all();
    wait_copies();
    publish_tiles();
    __syncwarp();
  }
  if (lane != 0) return arrived.arrive();
  arrive_expecting(arrived, factors[0].bytes + (whole ? (NT + 1) * int(sizeof(SwizzledTile)) : 0));
  fetch_run(factors[0], arrived);
  if (!whole) return;
#pragma unroll
  for (int t = 0; t < NT; ++t)
    fetch_box(to.right[t], keys ? maps.q : maps.c, 64 * t, right_head, token, arrived);
  fetch_box(to.left, keys ? maps.e : maps.dy, 0, left_head, token, arrived);
#else
  copy_all();
  fetch_runs(factors, arrived);
#endif
}

// x += a tile, under way when this returns.
__device__ __forceinline__ void add_columns(float (&x)[8][4], const unsigned (&a)[4][4],
                                            const SwizzledTile& tile) {
#if EBB_WGMMA
  const unsigned base = wgmma::descriptor_base(tile);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    wgmma::product<false, 1>(x, a[k], wgmma::descriptor_at(base, 128 * k));
#else
  multiply_columns(x, a, tile);
#endif
}

// One of two groups of four warps: sums over tokens [P,N] of each of its memories, first Gᵀ, then
// Xᵀ; a warp has 16 rows of P. Left operands are made of a tile of dy (or e) and the factors of a
// memory while the product of the memory before runs.
template <int NT>
struct MemoryGradients {
  using Shared = MemoryShared<NT>;
  using Stage = typename Shared::Stage;
  static constexpr int kOwn = Shared::kOwn;
  float sum[kOwn][NT][8][4];
  unsigned left[2][4][4];  // of the last two products
  int group, thread, warp;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[j][t][n][i] = 0.f;
  }
  __device__ __forceinline__ void finish() {  // nothing is under way
    warpgroup_wait<0>();
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
#pragma unroll
      for (int t = 0; t < NT; ++t) settle(sum[j][t]);
  }

  __device__ __forceinline__ void load_rows_of(unsigned (&raw)[4][4], const SwizzledTile& from,
                                               const Lane& l) const {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      load_matrices_transposed(raw[k], from.at(16 * k + l.low + 8 * l.high, 16 * warp + 8 * l.odd));
  }
  __device__ __forceinline__ static void scale(unsigned (&a)[4][4], const unsigned (&raw)[4][4],
                                               const float (&factors)[64], const Lane& l) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 f = *reinterpret_cast<const float2*>(factors + 16 * k + 8 * h + 2 * l.c);
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i)
          a[k][i] = pack_bf16(delta::low_half(raw[k][i]) * f.x, delta::high_half(raw[k][i]) * f.y);
      }
  }
  __device__ __forceinline__ void begin_sum(int j, const unsigned (&a)[4][4], const Stage& now) {
#pragma unroll
    for (int t = 0; t < NT; ++t) settle(sum[j][t]);
    warpgroup_begin();
#pragma unroll
    for (int t = 0; t < NT; ++t) add_columns(sum[j][t], a, now.right[t]);
    warpgroup_commit();
  }
  // A tile of tokens that see all memories of the item; its last product is under way when this
  // returns. release(): the tile before is done with.
  template <class F>
  __device__ __forceinline__ void take_in(const Stage& now, const Lane& l, F&& release) {
    unsigned raw[4][4];
    load_rows_of(raw, now.left, l);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (NT == 1 && j == 0)
        warpgroup_wait<0>();
      else
        warpgroup_wait<1>();  // what left[j & 1] held
      if (j == 1) release();
      scale(left[j & 1], raw, now.factors[2 * j + group], l);
      settle_left(left[j & 1]);
      begin_sum(j, left[j & 1], now);
    }
  }
  // One that sees the first `seen` of them; nothing is under way before and after it.
  __device__ __forceinline__ void take_in_some(const Stage& now, int seen, const Lane& l) {
    unsigned raw[4][4];
    load_rows_of(raw, now.left, l);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (2 * j + group >= seen) break;
      scale(left[0], raw, now.factors[2 * j + group], l);
      settle_left(left[0]);
      begin_sum(j, left[0], now);
      warpgroup_wait<0>();
#pragma unroll
      for (int t = 0; t < NT; ++t) settle(sum[j][t]);
    }
  }
  // All tiles of an item, from where the ring stands.
  __device__ __forceinline__ void sum_tokens(const FastProblem& p, const MemoryItem& item,
                                             RingPlace<Shared::kStages>& place, Shared& s,
                                             const Lane& l) {
    clear();
    int i = item.tiles_begin;
    for (; i < item.tiles_end; ++i, place.next()) {
      const int seen = item.seen(i, p.run);
      if (seen == Shared::kMemories) break;
      place.wait_full(s.ring);
      take_in_some(s.stage[place.at], seen, l);
      place.release(s.ring);
    }
    if (i == item.tiles_end) return;
    RingPlace<Shared::kStages> before = place;
    bool held = false;
    for (; i < item.tiles_end; ++i) {
      place.wait_full(s.ring);
      take_in(s.stage[place.at], l, [&] {
        if (held) before.release(s.ring);
      });
      before = place, held = true;
      place.next();
    }
    finish();
    before.release(s.ring);
  }
  __device__ __forceinline__ void put_values(Shared& s) const {
#pragma unroll
    for (int i = 0; i < kOwn * NT * 8; ++i) {
      const float(&x)[4] = sum[i / (8 * NT)][i / 8 % NT][i % 8];
      s.values[i][threadIdx.x] = float4{x[0], x[1], x[2], x[3]};
    }
  }

  // Of Δ̂, f16 as the sums lie: rows (of P) of this lane, columns 8n... and 8n + 8....
  __device__ __forceinline__ void load_keys(float2 (&key)[2][2], const SwizzledTile& tile, int n,
                                            const Lane& l) const {
    unsigned both[4];
    load_matrices_transposed(both, tile.at(8 * n + l.low + 8 * l.high, 16 * warp + 8 * l.odd));
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i / 2][i % 2] = unpack_half(both[i]);
  }
  // dΔ = G + ρ∘(X − Δ̂ mean(X∘Δ̂)) of this group's j-th memory: 1 G + ρ∘X takes the place of G, and
  // mean(X∘Δ̂) by warps, in order then; 2 what is written.
  template <class T>
  __device__ __forceinline__ void close(const FastProblem& p, const MemoryRecord<NT>& m, int j,
                                        bool adds, bool readable, Shared& s, T* to,
                                        const Lane& l) const {
    float(&parts)[NT][4][64] = s.parts[group][j & 1];
    float2 key[2][2];
#pragma unroll
    for (int t = 0; t < NT; ++t)  // 1
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (n % 2 == 0) load_keys(key, m.tile[t], n, l);
        const float(&x)[4] = sum[j][t][n];
        const float2(&k)[2] = key[n % 2];
        const float2 rho = *reinterpret_cast<const float2*>(m.rho + 64 * t + 8 * n + 2 * l.c);
        float4& y = s.values[(j * NT + t) * 8 + n][threadIdx.x];
        const float4 g = y;
        y = float4{g.x + rho.x * x[0], g.y + rho.y * x[1], g.z + rho.x * x[2], g.w + rho.y * x[3]};
        float part[2] = {x[0] * k[0].x + x[2] * k[1].x, x[1] * k[0].y + x[3] * k[1].y};
#pragma unroll
        for (int b = 0; b < 2; ++b) {
#pragma unroll
          for (int o = 4; o < 32; o *= 2) part[b] += __shfl_xor_sync(0xffffffffu, part[b], o);
          if (l.g == 0) parts[t][warp][8 * n + 2 * l.c + b] = part[b];
        }
      }
    barrier_wait<128>(1 + group);
    const float unit = m.key_unit;  // Δ̂ = unit key
    const float share = p.normalize ? unit * unit / float(p.p) : 0.f;
    const int column = 16 * warp + l.g;
#pragma unroll 1
    for (int i = 0; i < 4 * NT; ++i) {  // 2
      load_keys(key, m.tile[i / 4], i % 4 * 2, l);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 y = s.values[8 * NT * j + 2 * i + h][threadIdx.x];
        const float(&k)[2][2] = reinterpret_cast<const float(&)[2][2]>(key[h]);
        const float d[2][2] = {{y.x, y.y}, {y.z, y.w}};
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const int row = 16 * i + 8 * h + 2 * l.c + b;
          if (row >= p.n) continue;
          const auto& by_warp = parts[i / 4];
          const float mean = share * ((by_warp[0][row % 64] + by_warp[1][row % 64]) +
                                      (by_warp[2][row % 64] + by_warp[3][row % 64]));
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (column + 8 * r < p.p) {
              T& at = to[row * p.p + column + 8 * r];
              // What no token sees may be NaN.
              const float sum = readable ? d[r][b] - m.rho[row] * (k[r][b] * mean) : 0.f;
              at = from_float<T>(adds ? to_float(at) + sum : sum);
            }
        }
      }
    }
  }
};

// The gradient of memories that no token sees, by the threads that multiply.
template <class T>
__device__ __forceinline__ void write_zeros(const FastProblem& p, const MemoryItem& item, T* out) {
  for (int j = 0; j < item.count; ++j) {
    T* to = out + ((item.memory + j) * p.heads + item.head) * p.n * p.p;
    for (int i = int(threadIdx.x); i < p.n * p.p; i += kMultiplyThreads) to[i] = from_float<T>(0.f);
  }
}

// Item (head, memories of one sequence): the tiles of tokens that see one of them go by twice, with
// c and dy, then with q and e; then the memories themselves.
template <int NT, class T>
__global__ void __launch_bounds__(kFedThreads, 1)
    memory_kernel(FastProblem p, MemorySources from, const __grid_constant__ MemoryMaps maps,
                  PairFactors pairs, const int64_t* group_before, int64_t groups, T* out) {
  using Shared = MemoryShared<NT>;
  constexpr int kMemories = Shared::kMemories;
  auto& s = swizzled_shared<Shared>();
  const int warp = int(threadIdx.x) >> 5;
  if (threadIdx.x == 0) s.ring.init();
  __syncthreads();
  RingPlace<Shared::kStages> place;
  if (warp >= kReaders) {
    fetcher_registers();
    if (warp > kReaders) return;
    each_item(groups * p.some_heads, [&](int64_t index) {
      const MemoryItem item = memory_item<kMemories>(p, group_before, index);
      if (item.tiles_begin >= item.tiles_end) return;
      for (const Pass pass : {Pass::values, Pass::keys})
        for (int i = item.tiles_begin; i < item.tiles_end; ++i, place.next()) {
          place.wait_empty(s.ring);
          fetch_tokens<NT>(p, from, maps, pairs, item, i, pass, s.stage[place.at],
                           s.ring.full[place.at]);
        }
      for (int j = 0; j < item.count; ++j, place.next()) {
        place.wait_empty(s.ring);
        fetch_runs<1>(
            {{&s.stage[place.at], &p.record<NT>(item.memory + j, item.head), Shared::kRecordBytes}},
            s.ring.full[place.at]);
      }
    });
    return;
  }
  multiplier_registers();
  const Lane l;
  MemoryGradients<NT> work;
  work.group = warp / 4, work.warp = warp & 3;
  each_item(groups * p.some_heads, [&](int64_t index) {
    const MemoryItem item = memory_item<kMemories>(p, group_before, index);
    if (item.tiles_begin >= item.tiles_end) return write_zeros(p, item, out);
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      work.sum_tokens(p, item, place, s, l);
      if (pass == 0) work.put_values(s);
    }
#pragma unroll
    for (int j = 0; j < kMemories; ++j) {
      if (j >= item.count) break;
      place.wait_full(s.ring);
      if ((j & 1) == work.group)
        work.close(p, reinterpret_cast<const MemoryRecord<NT>&>(s.stage[place.at]), j / 2,
                   item.adds, j < item.readable, s,
                   out + ((item.memory + j) * p.heads + item.head) * p.n * p.p, l);
      place.release(s.ring);
      place.next();
    }
  });
}

// A tensor whose rows the copy engine can read.
Tensor wide_rows(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 ? x : x.clone();
}

}  // namespace

void memory_gradients(const StateMemoryProblem& problem, const FastProblem& p,
                      const PairFactors& pairs, const Tensor& d_o, const Tensor& dmemories) {
  const Device device = dmemories.device();
  const Tensor q = wide_rows(problem.q), c = wide_rows(problem.c), e = wide_rows(problem.e);
  const MemorySources from{ptr<bf16>(q), ptr<bf16>(c), ptr<bf16>(e), ptr<bf16>(d_o)};
  const auto map = [&](const bf16_t* x, int of, int width) {
    return tile_map(x, width, of, width, problem.batch() * problem.time(), int64_t(of) * width,
                    device);
  };
  const MemoryMaps maps{map(from.q, p.q_heads, p.n), map(from.c, p.c_heads, p.n),
                        map(from.e, p.e_heads, p.p), map(from.dy, p.heads, p.p)};
  visit_tiles(p.n, [&]<int NT>() {
    const int64_t reach = problem.memory_chunk * MemoryShared<NT>::kMemories;
    const int64_t groups = problem.layout.chunk_count(problem.batch(), problem.time(), reach);
    Tensor before;
    if (problem.layout.is_packed())
      before = problem.layout.chunk_offsets(problem.batch(), problem.time(), reach, device);
    visit_compute(dmemories.dtype(), [&]<class Host>() {
      launch_persistent<MemoryShared<NT>>(memory_kernel<NT, device_t<Host>>, kFedThreads,
                                          groups * p.some_heads, dmemories, p, from, maps, pairs,
                                          ptr<int64_t>(before), groups, ptr<Host>(dmemories));
    });
  });
}

}  // namespace ebb::gpu::state_memory
