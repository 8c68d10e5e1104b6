// State-memory attention on tensor cores: the gradients of the memories
// (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast_memories.cuh"
#include "cuda/tensor_map.h"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kReaders = 8, kMultiplyThreads = 32 * kReaders;

// kMemories neighbouring memories of one head; they see nothing of each other.
template <int NT>
struct MemoryShared {
  static constexpr int kMemories = 4 / NT, kStages = NT == 1 ? 4 : 3;
  struct Stage {
    VectorRecord<NT> vectors[2];  // q, c
    VectorRecord<1> e;
    SwizzledTile dy;
    HeadNumbers numbers;
  };
  SwizzledTile memory[2][kMemories][NT];  // f16: Δ̂; Δ over its unit
  Stage stage[kStages];
  float dots[2][2][kMemories][64];  // K'·e, V·dy of a tile of tokens, two turns
  float factors[2][kMemories][64];  // what rows of e, dy are multiplied with in X, G
  float rho[kMemories][64 * NT];
  float units[2][kMemories];  // of logits, of values
  float lifts[2][kMemories];  // powers of two that bring the left operands of X, G to f16
  float bounds[2][kReaders];
  Ring<kStages, kReaders> ring;
};

struct MemorySources {
  const void *q, *c, *e;  // VectorRecord
  const HeadNumbers* numbers;
  const bf16_t* dy;
};

// Memories of one sequence and head, and the tiles of tokens that may see them.
struct MemoryItem {
  int head = 0, index = 0, count = 0;  // first memory in its sequence; how many there are
  int64_t memory = 0;                  // that one among all
  int64_t begin = 0, tile = 0;         // first token, first tile of the sequence
  int length = 0, tiles_begin = 0, tiles_end = 0;
};
template <int MEMORIES>
__device__ __forceinline__ MemoryItem memory_item(const FastProblem& p, const int64_t* group_before,
                                                  int64_t index) {
  MemoryItem x;
  x.head = int(index % p.heads);
  const int64_t group = index / p.heads;
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
  x.tiles_end = (x.length + 63) / 64;
  x.tiles_begin = first >= x.length ? x.tiles_end : int(first / 64);
  return x;
}

// By one warp: tile `i` of the item's sequence into a stage.
template <int NT>
__device__ __forceinline__ void fetch_tokens(const FastProblem& p, const MemorySources& from,
                                             const CUtensorMap& map, const MemoryItem& item, int i,
                                             typename MemoryShared<NT>::Stage& to,
                                             Mbarrier& arrived) {
  const int lane = int(threadIdx.x) & 31;
  const int64_t tile = item.tile + i, token = item.begin + int64_t(i) * 64;
  const int rows = min(64, item.length - 64 * i);
  using Vectors = VectorRecord<NT>;
  const auto at = [&](const auto* records, int of) {
    return records + tile * of + p.shared_head(item.head, of);
  };
  const Run runs[4] = {
      {&to.vectors[0], at(static_cast<const Vectors*>(from.q), p.q_heads), Vectors::kBytes},
      {&to.vectors[1], at(static_cast<const Vectors*>(from.c), p.c_heads), Vectors::kBytes},
      {&to.e, at(static_cast<const VectorRecord<1>*>(from.e), p.e_heads), VectorRecord<1>::kBytes},
      {&to.numbers, at(from.numbers, p.heads), int(sizeof(HeadNumbers))}};
  const auto copy_dy = [&] {
    for (int k = lane; k < 64 * 8; k += 32) {
      const int r = k / 8, column = k % 8 * 8;
      const bool there = r < rows && column < p.p;
      const bf16_t* source = from.dy + p.row_at(token + r, item.head) + column;
      delta::copy_async_or_zero(to.dy.at(r, column), there ? source : from.dy, there);
    }
  };
#if EBB_WGMMA
  const bool whole = rows == 64;
  if (!whole) {  // what follows in memory belongs to another sequence
    copy_dy();
    wait_copies();
    publish_tiles();
    __syncwarp();
  }
  if (lane != 0) return;
  int bytes = whole ? int(sizeof(SwizzledTile)) : 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) bytes += runs[k].bytes;
  arrive_expecting(arrived, bytes);
#pragma unroll
  for (int k = 0; k < 4; ++k) fetch_run(runs[k], arrived);
  if (whole) fetch_box(to.dy, map, 0, item.head, token, arrived);
#else
  copy_dy();
  fetch_runs<4>(runs, arrived);
#endif
}

// The same number; the compiler keeps nothing that it works out from it, for which there are no
// registers.
__device__ __forceinline__ int afresh(int x) {
#if EBB_WGMMA
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// One of two groups of four warps. The first has q and e, hence logits and Xᵀ = Σ ê (dℓ q̂)ᵀ; the
// second c and dy, hence values and Gᵀ = Σ dy (w gate c)ᵀ; for all memories of the item. What the
// two need of each other are the row dots. Products of one tile of tokens run beside the dots of
// the next.
template <int NT>
struct MemoryGradients {
  using Shared = MemoryShared<NT>;
  using Stage = typename Shared::Stage;
  static constexpr int kMemories = Shared::kMemories;
  float sum[kMemories][NT][8][4];  // [P,N] each, times the lift
  int role, thread, warp;

  // The item's memories to shared memory, by both groups.
  __device__ __forceinline__ void open(const FastProblem& p, const HeadNumbers* numbers,
                                       const MemoryItem& item, Shared& s) const {
    constexpr int kEach = kMemories * NT * 512 / kMultiplyThreads;
    static_assert(kMemories * NT * 64 == kMultiplyThreads);
    const auto memory = [&](int j) -> const MemoryRecord<NT>& {
      return p.record<NT>(item.memory + min(j, item.count - 1), item.head);
    };
    barrier_wait<kMultiplyThreads>(1);  // the memories before these are done with
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int k = int(threadIdx.x) + i * kMultiplyThreads;
      const int j = k / (NT * 512), t = k / 512 % NT, n = k % 512 / 8, column = k % 8 * 8;
      const int64_t m = item.memory + min(j, item.count - 1);
      delta::copy_async_or_zero(s.memory[0][j][t].at(n, column),
                                p.record<NT>(m, item.head).tile[t].at(n, column), j < item.count);
      delta::copy_async_or_zero(s.memory[1][j][t].at(n, column),
                                p.value_record<NT>(m, item.head).tile[t].at(n, column),
                                j < item.count);
    }
    const int own = int(threadIdx.x);
    s.rho[own / (64 * NT)][own % (64 * NT)] = memory(own / (64 * NT)).rho[own % (64 * NT)];
    float bounds[2] = {0.f, 0.f};
    for (int i = item.tiles_begin + own; i < item.tiles_end; i += kMultiplyThreads) {
      const float4 x =
          *reinterpret_cast<const float4*>(numbers[(item.tile + i) * p.heads + item.head].bounds);
      bounds[0] = fmaxf(bounds[0], fmaxf(x.x, x.y)), bounds[1] = fmaxf(bounds[1], fmaxf(x.z, x.w));
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const float largest = warp_max(bounds[which]);
      if ((own & 31) == 0) s.bounds[which][own / 32] = largest;
    }
    wait_copies();
    publish_tiles();
    barrier_wait<kMultiplyThreads>(1);
    if (own < 2 * kMemories) set_units(p, own & 1, own / 2, memory(own / 2), s);
  }
  // The unit and the lift of one memory. Its rows are below 2^7 value_unit in root mean square (or
  // in their largest entry), over the boost, which is 1/key_unit with normalisation.
  __device__ __forceinline__ static void set_units(const FastProblem& p, int which, int j,
                                                   const MemoryRecord<NT>& m, Shared& s) {
    float bound = 0;
#pragma unroll
    for (int w = 0; w < kReaders; ++w) bound = fmaxf(bound, s.bounds[which][w]);
    if (which == 0) {
      const float row = 128.f * m.value_unit / (p.normalize ? m.key_unit : 1.f);
      const float size = row * sqrtf(float(p.n) * float(p.p));  // |Δ|₂
      bound *= 2.f * fabsf(p.scale) * 256.f * sqrtf(float(p.n) * float(p.p)) * size;
    }
    s.units[which][j] = which ? m.value_unit : m.key_unit;
    s.lifts[which][j] = power_to(bound, 14);
  }

  // K' (or V) of one memory for 64 tokens, under way when this returns.
  __device__ __forceinline__ void begin_product(float (&x)[8][4], const Stage& of, int j,
                                                const Shared& s) const {
    const int which = afresh(role);
    const SwizzledTile(&a)[NT] = of.vectors[which].tile;
    const SwizzledTile(&b)[NT] = s.memory[which][j];
    warpgroup_begin();
    multiply_half_tiles<true, Inner::last, Inner::first>(x, a[0], b[0], warp);
#pragma unroll
    for (int t = 1; t < NT; ++t)
      multiply_half_tiles<false, Inner::last, Inner::first>(x, a[t], b[t], warp);
    warpgroup_commit();
  }
  __device__ __forceinline__ const SwizzledTile& mates(const Stage& of) const {
    return role ? of.dy : of.e.tile[0];
  }
  __device__ __forceinline__ void load_mates(unsigned (&mate)[4][4], const Stage& of,
                                             const Lane& l) const {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      load_matrices(mate[k], mates(of).at(16 * warp + l.low + 8 * l.odd, 16 * k + 8 * l.high));
  }
  __device__ __forceinline__ void put_dots(const float (&x)[8][4], const unsigned (&mate)[4][4],
                                           float (&to)[64], const Lane& l) const {
    float dot[2];
    row_dots(dot, x, mate);
    if (l.c == 0) to[16 * warp + l.g] = dot[0], to[16 * warp + l.g + 8] = dot[1];
  }
  // The row dots of the item's first tile, with nothing beside them; the sums, whose registers hold
  // the products meanwhile, begin.
  __device__ __forceinline__ void first_dots(const Stage& of, int turn, Shared& s, const Lane& l) {
#pragma unroll
    for (int j = 0; j < kMemories; ++j) begin_product(sum[j][0], of, j, s);
    unsigned mate[4][4];
    load_mates(mate, of, l);
    warpgroup_wait<0>();
#pragma unroll
    for (int j = 0; j < kMemories; ++j) {
      settle(sum[j][0]);
      put_dots(sum[j][0], mate, s.dots[turn][role][j], l);
    }
#pragma unroll
    for (int j = 0; j < kMemories; ++j)
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[j][t][n][i] = 0.f;
  }

  // The factors of this group's rows.
  __device__ __forceinline__ void make_factors(const FastProblem& p, const MemoryItem& item,
                                               const Stage& now, int at, Shared& s) const {
    const int r = thread & 63, visible = (at + r) / p.run, turn = at / 64 & 1;
    const float q = now.vectors[0].factor[r] * now.e.factor[r], c = now.vectors[1].factor[r];
    const bool there = at + r < item.length;
#pragma unroll
    for (int i = 0; i < kMemories / 2; ++i) {
      const int j = (thread >> 6) + 2 * i;
      const float logit = kLog2e * p.scale * q * s.units[0][j] * s.dots[turn][0][j][r];
      const float w = now.numbers.gate[r] * exp2_approximately(logit - now.numbers.lse[r]);
      const float value = s.dots[turn][1][j][r] * s.units[1][j] * c;
      // A token that sees one memory gives it weight 1 whatever.
      const bool sees = there && item.index + j < visible && (role || visible > 1);
      const float factor = role ? w * c : p.scale * w * (value - now.numbers.through[r]) * q;
      s.factors[role][j][r] = sees ? factor * s.lifts[role][j] : 0.f;
    }
  }
  // X (or G) of one memory, under way when this returns.
  __device__ __forceinline__ void begin_sum(float (&to)[NT][8][4], unsigned (&a)[4][4],
                                            const Stage& now, const float (&factors)[64],
                                            const Lane& l) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      load_matrices_transposed(a[k],
                               mates(now).at(16 * k + l.low + 8 * l.high, 16 * warp + 8 * l.odd));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 f = *reinterpret_cast<const float2*>(factors + 16 * k + 8 * h + 2 * l.c);
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i)
          a[k][i] = pack_half(delta::low_half(a[k][i]) * f.x, delta::high_half(a[k][i]) * f.y);
      }
    }
    settle_left(a);
#pragma unroll
    for (int t = 0; t < NT; ++t) settle(to[t]);
    warpgroup_begin();
    const SwizzledTile(&tiles)[NT] = now.vectors[afresh(role)].tile;
#pragma unroll
    for (int t = 0; t < NT; ++t) multiply_half_columns(to[t], a, tiles[t]);
    warpgroup_commit();
  }
  // One tile of tokens, the first of which is the at-th of the sequence and whose dots are there:
  // 1 factors; 2 memory by memory X (or G), and K' (or V) of the tile after it, where there is one,
  // with their dots. release() when the tile before is done with.
  template <bool MORE, class F>
  __device__ __forceinline__ void take_in(const FastProblem& p, const MemoryItem& item, int at,
                                          const Stage& now, const Stage& next, Shared& s,
                                          const Lane& l, F&& release) {
    float x[8][4];
    unsigned mate[4][4], a[4][4];
    barrier_wait<kMultiplyThreads>(1);
    if constexpr (MORE) begin_product(x, next, 0, s);
    make_factors(p, item, now, at, s);  // 1
    if constexpr (MORE) load_mates(mate, next, l);
    warpgroup_wait<MORE ? 1 : 0>();  // the last sum of the tile before
    release();
    barrier_wait<128>(2 + role);
#pragma unroll
    for (int j = 0; j < kMemories; ++j) {  // 2
      begin_sum(sum[j], a, now, s.factors[role][j], l);
      if constexpr (MORE) {
        warpgroup_wait<1>();
        settle(x);
        put_dots(x, mate, s.dots[at / 64 & 1 ^ 1][role][j], l);
        if (j + 1 == kMemories) break;
        settle(x);
        begin_product(x, next, j + 1, s);
        warpgroup_wait<1>();  // what a holds
      } else {
        warpgroup_wait<0>();
      }
    }
  }

  // dΔ = G + ρ∘(X − Δ̂ mean(X∘Δ̂)), in four slabs of 64 of N of one memory: in each of two rounds
  // either group writes one, with what the other gives it.
  template <class T>
  __device__ __forceinline__ void close(const FastProblem& p, const MemoryItem& item, Shared& s,
                                        T* out, const Lane& l) const {
    using Given = float4[8][128];
    Given* given = reinterpret_cast<Given*>(&s.memory[1]);
    static_assert(sizeof(s.memory[1]) == 2 * sizeof(Given));
    using Parts = float[4][64];
    Parts* parts = reinterpret_cast<Parts*>(&s.dots);
    static_assert(sizeof(s.dots) >= 2 * sizeof(Parts));
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      const float(&first)[8][4] = sum[round / NT][round % NT];
      const float(&second)[8][4] = sum[(2 + round) / NT][(2 + round) % NT];
      const int slab = 2 * role + round, j = slab / NT, n0 = slab % NT * 64;
      barrier_wait<kMultiplyThreads>(1);
#pragma unroll
      for (int n = 0; n < 8; ++n)
        given[role][n][thread] =
            role ? float4{first[n][0], first[n][1], first[n][2], first[n][3]}
                 : float4{second[n][0], second[n][1], second[n][2], second[n][3]};
      barrier_wait<kMultiplyThreads>(1);
      float x[8][4], g[8][4];  // [P,N]
      unsigned key[8][2];      // f16, as both
      const float x_unit = inverse_power(s.lifts[0][j]), g_unit = inverse_power(s.lifts[1][j]);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float4 y = given[role ^ 1][n][thread];
        const float other[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[n][i] = (role ? other[i] : first[n][i]) * x_unit;
          g[n][i] = (role ? second[n][i] : other[i]) * g_unit;
        }
      }
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        unsigned both[4];
        load_matrices_transposed(
            both, s.memory[0][j][slab % NT].at(8 * n + l.low + 8 * l.high, 16 * warp + 8 * l.odd));
        key[n][0] = both[0], key[n][1] = both[1], key[n + 1][0] = both[2], key[n + 1][1] = both[3];
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {  // over the columns of this warp, in order of the warps then
        float part[2] = {0.f, 0.f};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 k = unpack_half(key[n][r]);
          part[0] += x[n][2 * r] * k.x, part[1] += x[n][2 * r + 1] * k.y;
        }
#pragma unroll
        for (int b = 0; b < 2; ++b) {
#pragma unroll
          for (int o = 4; o < 32; o *= 2) part[b] += __shfl_xor_sync(0xffffffffu, part[b], o);
          if (l.g == 0) parts[role][warp][8 * n + 2 * l.c + b] = part[b];
        }
      }
      barrier_wait<128>(2 + role);
      if (j >= item.count) continue;
      const float unit = s.units[0][j];  // Δ̂ = unit key
      const float share = p.normalize ? unit * unit / float(p.p) : 0.f;
      T* to = out + ((item.memory + j) * p.heads + item.head) * p.n * p.p;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 k[2] = {unpack_half(key[n][0]), unpack_half(key[n][1])};
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const int at = 8 * n + 2 * l.c + b, row = n0 + at;
          if (row >= p.n) continue;
          const float mean = share * ((parts[role][0][at] + parts[role][1][at]) +
                                      (parts[role][2][at] + parts[role][3][at]));
          const float rho = s.rho[j][row];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int column = 16 * warp + l.g + 8 * r, i = 2 * r + b;
            if (column < p.p)
              to[int64_t(row) * p.p + column] =
                  from_float<T>(g[n][i] + rho * (x[n][i] - (b ? k[r].y : k[r].x) * mean));
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

// Item (head, memories of one sequence): the tiles of tokens that see one of them go by.
template <int NT, class T>
__global__ void __launch_bounds__(kFedThreads, 1)
    memory_kernel(FastProblem p, MemorySources from, const __grid_constant__ CUtensorMap map,
                  const int64_t* group_before, int64_t groups, T* out) {
  using Shared = MemoryShared<NT>;
  auto& s = swizzled_shared<Shared>();
  const int warp = int(threadIdx.x) >> 5;
  if (threadIdx.x == 0) s.ring.init();
  __syncthreads();
  RingPlace<Shared::kStages> place;
  if (warp >= kReaders) {
    fetcher_registers();
    if (warp > kReaders) return;
    each_item(groups * p.heads, [&](int64_t index) {
      const MemoryItem item = memory_item<Shared::kMemories>(p, group_before, index);
      for (int i = item.tiles_begin; i < item.tiles_end; ++i, place.next()) {
        place.wait_empty(s.ring);
        fetch_tokens<NT>(p, from, map, item, i, s.stage[place.at], s.ring.full[place.at]);
      }
    });
    return;
  }
  multiplier_registers();
  const Lane l;
  MemoryGradients<NT> work;
  work.role = warp / 4, work.warp = warp & 3, work.thread = int(threadIdx.x) & 127;
  each_item(groups * p.heads, [&](int64_t index) {
    const MemoryItem item = memory_item<Shared::kMemories>(p, group_before, index);
    if (item.tiles_begin >= item.tiles_end) return write_zeros(p, item, out);
    work.open(p, from.numbers, item, s);
    place.wait_full(s.ring);
    work.first_dots(s.stage[place.at], item.tiles_begin & 1, s, l);
    RingPlace<Shared::kStages> before = place, next = place;
    bool held = false;  // the tile before, by products that are under way
    const auto release = [&] {
      if (held) before.release(s.ring);
    };
    for (int i = item.tiles_begin; i + 1 < item.tiles_end; ++i) {
      next.next();
      next.wait_full(s.ring);
      work.template take_in<true>(p, item, 64 * i, s.stage[place.at], s.stage[next.at], s, l,
                                  release);
      before = place, held = true, place = next;
    }
    work.template take_in<false>(p, item, 64 * (item.tiles_end - 1), s.stage[place.at],
                                 s.stage[place.at], s, l, release);
    for (auto& of_memory : work.sum)
#pragma unroll
      for (int t = 0; t < NT; ++t) settle(of_memory[t]);
    place.release(s.ring);
    place.next();
    work.close(p, item, s, out, l);
  });
}

}  // namespace

void memory_gradients(const StateMemoryProblem& problem, const FastProblem& p,
                      const FastUpstream& u, const Tensor& dmemories) {
  const Device device = dmemories.device();
  const TokenRecords records = token_records(problem, p, u);
  const MemorySources from{records.q.raw(), records.c.raw(), records.e.raw(),
                           static_cast<const HeadNumbers*>(records.numbers.raw()), u.dy};
  const CUtensorMap map = tile_map(u.dy, p.p, p.heads, p.p, problem.batch() * problem.time(),
                                   int64_t(p.heads) * p.p, device);
  visit_tiles(p.n, [&]<int NT>() {
    const int64_t reach = problem.memory_chunk * MemoryShared<NT>::kMemories;
    const int64_t groups = problem.layout.chunk_count(problem.batch(), problem.time(), reach);
    Tensor before;
    if (problem.layout.is_packed())
      before = problem.layout.chunk_offsets(problem.batch(), problem.time(), reach, device);
    visit_compute(dmemories.dtype(), [&]<class Host>() {
      launch_persistent<MemoryShared<NT>>(memory_kernel<NT, device_t<Host>>, kFedThreads,
                                          groups * p.heads, dmemories, p, from, map,
                                          ptr<int64_t>(before), groups, ptr<Host>(dmemories));
    });
  });
}

}  // namespace ebb::gpu::state_memory
