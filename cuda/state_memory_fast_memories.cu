// State-memory attention on tensor cores: the gradients of the memories
// (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast.cuh"
#include "cuda/tensor_map.h"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kReaders = 8, kMultiplyThreads = 32 * kReaders, kThreads = 256;

// 64 tokens of q, c (f16 rows) or e (bf16), and what a row is to be multiplied with: its unit, and
// 1/rms for q and e. Rows that are not there are zero.
template <int NT>
struct alignas(1024) VectorRecord {
  SwizzledTile tile[NT];
  float factor[64];

  static constexpr int kBytes = NT * int(sizeof(SwizzledTile)) + 256;
};
// Of 64 tokens of one head.
struct HeadNumbers {
  float lse[64], through[64], gate[64];  // base 2; R·dy
};

// A block per 64 tokens and head of x [tokens,of,width]: eight lanes per row.
template <int NT, bool HALF>
__global__ void __launch_bounds__(kThreads)
    vector_kernel(FastProblem p, const bf16_t* x, int of, int width, bool normalize,
                  VectorRecord<NT>* records) {
  const TokenTiles<1> tiles(p);
  const int chunk = int(threadIdx.x) % 8;
  for (int64_t item = blockIdx.x; item < tiles.count * of; item += gridDim.x) {
    const TokenTile tile = tiles.at(p, item / of);
    VectorRecord<NT>& to = records[tile.number * of + item % of];
    for (int r = int(threadIdx.x) / 8; r < 64; r += kThreads / 8) {
      float v[NT][8], largest = 0, square = 0;
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const int column = 64 * t + 8 * chunk;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[t][i] = 0.f;
        if (r < tile.rows && column < width) {
          const bf16_t* from = x + ((tile.first + r) * of + item % of) * width + column;
#pragma unroll
          for (int i = 0; i < 8; i += 2) {
            const unsigned pair = *reinterpret_cast<const unsigned*>(from + i);
            v[t][i] = delta::low_half(pair), v[t][i + 1] = delta::high_half(pair);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
          largest = fmaxf(largest, fabsf(v[t][i])), square += v[t][i] * v[t][i];
      }
#pragma unroll
      for (int o = 1; o < 8; o *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
        square += __shfl_xor_sync(0xffffffffu, square, o);
      }
      const float power = HALF ? power_to(largest, 7) : 1.f;
      const auto pack = [&](float low, float high) {
        return HALF ? pack_half(low * power, high * power) : pack_bf16(low, high);
      };
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const uint4 w{pack(v[t][0], v[t][1]), pack(v[t][2], v[t][3]), pack(v[t][4], v[t][5]),
                      pack(v[t][6], v[t][7])};
        store_word(reinterpret_cast<uint4*>(to.tile[t].at(r, 8 * chunk)), w);
      }
      if (chunk == 0) {
        const float inverse = normalize ? 1.f / sqrtf(square / float(width) + p.eps) : 1.f;
        to.factor[r] = inverse_power(power) * inverse;
      }
    }
  }
}

// A thread per token of a tile and head.
__global__ void __launch_bounds__(kThreads)
    number_kernel(FastProblem p, FastUpstream u, HeadNumbers* records) {
  const TokenTiles<1> tiles(p);
  const int64_t count = tiles.count * p.heads * 64;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const int head = int(i / 64 % p.heads), r = int(i % 64);
    const TokenTile tile = tiles.at(p, i / 64 / p.heads);
    HeadNumbers& to = records[tile.number * p.heads + head];
    const bool there = r < tile.rows;
    const int64_t t = tile.first + r, at = t * p.heads + head;
    to.lse[r] = there ? kLog2e * u.lse[at] : 0.f;
    to.through[r] = there ? u.through[at] : 0.f;
    to.gate[r] = there ? p.gate_of(t, head) : 0.f;
  }
}

// MEMORIES neighbouring memories of one head; they see nothing of each other.
template <int NT>
struct MemoryShared {
  static constexpr int kMemories = 4 / NT, kStages = 3;
  struct Stage {
    VectorRecord<NT> vectors[2];  // q, c
    VectorRecord<1> e;
    SwizzledTile dy;
    HeadNumbers numbers;
    float padding[64];
  };
  SwizzledTile memory[2][kMemories][NT];  // f16: Δ̂; Δ over its unit
  Stage stage[kStages];
  float dots[2][2][kMemories][64];  // K'·e, V·dy of a tile of tokens, two turns
  float factors[2][kMemories][64];  // what rows of q, c are multiplied with in X, G
  float units[2][kMemories];        // of logits, of values
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

// One of two groups of four warps. The first has q and e, hence logits and X = Σ (dℓ q̂)ᵀ ê; the
// second c and dy, hence values and G = Σ (w gate c)ᵀ dy; for all memories of the item.
template <int NT>
struct MemoryGradients {
  using Shared = MemoryShared<NT>;
  static constexpr int kMemories = Shared::kMemories;
  float sum[kMemories][NT][8][4];  // [N,P] each
  int role, thread, warp;

  // The item's memories to shared memory, by both groups; the sums begin.
  __device__ __forceinline__ void open(const FastProblem& p, const MemoryItem& item, Shared& s) {
#pragma unroll
    for (int j = 0; j < kMemories; ++j)
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[j][t][n][i] = 0.f;
    barrier_wait<kMultiplyThreads>(1);  // the memories before these are done with
    for (int k = int(threadIdx.x); k < kMemories * NT * 512; k += kMultiplyThreads) {
      const int j = k / (NT * 512), t = k / 512 % NT, n = k % 512 / 8, column = k % 8 * 8;
      uint4 x{}, y{};
      if (j < item.count) {
        const MemoryRecord<NT>& m = p.record<NT>(item.memory + j, item.head);
        x = *reinterpret_cast<const uint4*>(m.tile[t].at(n, column));
        const int row = 64 * t + n;
        const unsigned pair = m.inverse_rho[m.rho_pair(row / 8, row % 8 / 2)];
        const unsigned both = (row & 1 ? pair >> 16 : pair & 0xffffu) * 0x10001u;
        y = uint4{multiply_halves(x.x, both), multiply_halves(x.y, both),
                  multiply_halves(x.z, both), multiply_halves(x.w, both)};
      }
      *reinterpret_cast<uint4*>(s.memory[0][j][t].at(n, column)) = x;
      *reinterpret_cast<uint4*>(s.memory[1][j][t].at(n, column)) = y;
    }
    if (threadIdx.x < 2 * kMemories) {
      const int j = int(threadIdx.x) / 2, which = int(threadIdx.x) & 1;
      const MemoryRecord<NT>* m =
          j < item.count ? &p.record<NT>(item.memory + j, item.head) : nullptr;
      s.units[which][j] = !m ? 0.f : which ? m->value_unit : m->key_unit;
    }
    publish_tiles();
    barrier_wait<kMultiplyThreads>(1);
  }

  // 1 K' (or V) of the first SEEN memories, and its row dots with e (or dy).
  template <int SEEN>
  __device__ __forceinline__ void row_dots_of(const typename Shared::Stage& now, int turn,
                                              Shared& s, const Lane& l) const {
    const int m0 = 16 * warp;
    unsigned a[4 * NT][4], mate[4][4];
#pragma unroll
    for (int k = 0; k < 4 * NT; ++k)
      load_matrices(a[k], now.vectors[role].tile[k / 4].at(m0 + l.low + 8 * l.odd,
                                                           16 * (k % 4) + 8 * l.high));
    const SwizzledTile& other = role ? now.dy : now.e.tile[0];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      load_matrices(mate[k], other.at(m0 + l.low + 8 * l.odd, 16 * k + 8 * l.high));
#pragma unroll
    for (int j = 0; j < SEEN; ++j) {
      float x[8][4], dot[2];
      warpgroup_begin();
      multiply_half_columns<true>(x, a, s.memory[role][j][0]);
#pragma unroll
      for (int t = 1; t < NT; ++t) multiply_half_columns(x, a + 4 * t, s.memory[role][j][t]);
      warpgroup_commit();
      warpgroup_wait<0>();
      settle(x);
      row_dots(dot, x, mate);
      if (l.c == 0)
#pragma unroll
        for (int r = 0; r < 2; ++r) s.dots[turn][role][j][m0 + l.g + 8 * r] = dot[r];
    }
  }
  // 2 The factors of this group's rows.
  template <int SEEN>
  __device__ __forceinline__ void make_factors(const FastProblem& p, const MemoryItem& item,
                                               const typename Shared::Stage& now, int at, int turn,
                                               Shared& s) const {
    const int r = thread & 63, visible = (at + r) / p.run;
    const float q = now.vectors[0].factor[r] * now.e.factor[r], c = now.vectors[1].factor[r];
#pragma unroll
    for (int i = 0; i < (SEEN + 1) / 2; ++i) {
      const int j = (thread >> 6) + 2 * i;
      if (j >= SEEN) break;
      const bool sees = at + r < item.length && item.index + j < visible;
      float factor = 0.f;
      if (sees) {
        const float logit = kLog2e * p.scale * q * s.units[0][j] * s.dots[turn][0][j][r];
        const float w = now.numbers.gate[r] * exp2_approximately(logit - now.numbers.lse[r]);
        const float value = s.dots[turn][1][j][r] * s.units[1][j] * c;
        if (role)
          factor = w * c;
        else if (visible > 1)  // a token that sees one memory gives it weight 1 whatever
          factor = p.scale * w * (value - now.numbers.through[r]) * q;
      }
      s.factors[role][j][r] = factor;
    }
  }
  // 3 X (or G) of one memory.
  __device__ __forceinline__ void add(float (&to)[NT][8][4], const typename Shared::Stage& now,
                                      const float (&factors)[64], const Lane& l) const {
    const SwizzledTile& other = role ? now.dy : now.e.tile[0];
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      unsigned a[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_matrices_transposed(
            a[k], now.vectors[role].tile[t].at(16 * k + l.low + 8 * l.high, 16 * warp + 8 * l.odd));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 f = *reinterpret_cast<const float2*>(factors + 16 * k + 8 * h + 2 * l.c);
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            const float2 x = unpack_half(a[k][i]);
            a[k][i] = pack_bf16(x.x * f.x, x.y * f.y);
          }
        }
      }
      settle(to[t]);
      warpgroup_begin();
      multiply_columns(to[t], a, other);
      warpgroup_commit();
      warpgroup_wait<1>();  // of the operands, registers hold two sets
    }
  }
  // A tile of tokens, the first of which is the at-th of the sequence, that sees SEEN memories or
  // fewer. No branches: products that are under way must not meet any.
  template <int SEEN, class F>
  __device__ __forceinline__ void take_in(const FastProblem& p, const MemoryItem& item, int at,
                                          const typename Shared::Stage& now, Shared& s,
                                          const Lane& l, F&& release) {
    const int turn = at / 64 & 1;
    row_dots_of<SEEN>(now, turn, s, l);  // 1
    barrier_wait<kMultiplyThreads>(1);
    make_factors<SEEN>(p, item, now, at, turn, s);  // 2
    barrier_wait<128>(2 + role);
#pragma unroll
    for (int j = 0; j < SEEN; ++j) add(sum[j], now, s.factors[role][j], l);  // 3
    warpgroup_wait<0>();
#pragma unroll
    for (int j = 0; j < SEEN; ++j)
#pragma unroll
      for (int t = 0; t < NT; ++t) settle(sum[j][t]);
    release();
  }

  // dΔ = G + ρ∘(X − Δ̂ mean(X∘Δ̂)): the second group hands its sums over, the first writes.
  template <class T>
  __device__ __forceinline__ void close(const FastProblem& p, const MemoryItem& item, Shared& s,
                                        T* out, const Lane& l) {
    float4* g = reinterpret_cast<float4*>(&s.memory[1]);  // [16·NT... of 128 threads
    static_assert(sizeof(s.memory[1]) >= size_t(NT) * 8 * 128 * sizeof(float4));
#pragma unroll
    for (int j = 0; j < kMemories; ++j) {
      if (j >= item.count) break;
      barrier_wait<kMultiplyThreads>(1);
      if (role)
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            const float(&x)[4] = sum[j][t][n];
            g[(8 * t + n) * 128 + thread] = float4{x[0], x[1], x[2], x[3]};
          }
      barrier_wait<kMultiplyThreads>(1);
      if (role) continue;
      const MemoryRecord<NT>& m = p.record<NT>(item.memory + j, item.head);
      T* to = out + ((item.memory + j) * p.heads + item.head) * p.n * p.p;
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int n0 = 16 * warp + l.g + 8 * r, row = 64 * t + n0;
          float2 key[8];
          float mean = 0;
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            key[n] = unpack_half(
                *reinterpret_cast<const unsigned*>(s.memory[0][j][t].at(n0, 8 * n) + 2 * l.c));
            mean += sum[j][t][n][2 * r] * key[n].x + sum[j][t][n][2 * r + 1] * key[n].y;
          }
          mean = p.normalize ? quad_sum(mean) / float(p.p) : 0.f;
          if (row >= p.n) continue;
          const float rho = m.rho[row];
          const bool seen = item.tiles_begin < item.tiles_end;  // else it is not to be read
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            const int column = 8 * n + 2 * l.c;
            if (column >= p.p) continue;
            const float4 y = g[(8 * t + n) * 128 + thread];
            float a = r ? y.z : y.x, b = r ? y.w : y.y;
            if (seen) {
              a += rho * (sum[j][t][n][2 * r] - key[n].x * mean);
              b += rho * (sum[j][t][n][2 * r + 1] - key[n].y * mean);
            }
            const float both[2] = {a, b};
            store_pack<T, 2>(to + int64_t(row) * p.p + column, both);
          }
        }
    }
  }
};

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
    work.open(p, item, s);
    for (int i = item.tiles_begin; i < item.tiles_end; ++i, place.next()) {
      place.wait_full(s.ring);
      const auto release = [&] { place.release(s.ring); };
      const int last = min(64 * i + 64, item.length) - 1, seen = last / p.run - item.index;
      if (seen > Shared::kMemories / 2)
        work.template take_in<Shared::kMemories>(p, item, 64 * i, s.stage[place.at], s, l, release);
      else
        work.template take_in<Shared::kMemories / 2>(p, item, 64 * i, s.stage[place.at], s, l,
                                                     release);
    }
    work.close(p, item, s, out, l);
  });
}

template <int NT, bool HALF>
Tensor vector_records(const FastProblem& p, const Tensor& x, bool normalize) {
  const int of = int(x.size(2)), width = int(x.size(3));
  const Tensor records =
      Tensor::empty({p.tiles * of, int64_t(sizeof(VectorRecord<NT>))}, DType::u8, x.device());
  const int64_t blocks = std::min<int64_t>(p.tiles * of, int64_t(1) << 30);
  vector_kernel<NT, HALF><<<unsigned(blocks), kThreads, 0, stream_of(x)>>>(
      p, ptr<bf16>(x), of, width, normalize, static_cast<VectorRecord<NT>*>(records.raw()));
  check_launch();
  return records;
}

}  // namespace

void memory_gradients(const StateMemoryProblem& problem, const FastProblem& p,
                      const FastUpstream& u, const Tensor& dmemories) {
  const Device device = dmemories.device();
  const Tensor numbers =
      Tensor::empty({p.tiles * p.heads, int64_t(sizeof(HeadNumbers))}, DType::u8, device);
  const int64_t blocks =
      std::min<int64_t>(ceil_div(p.tiles * p.heads * 64, kThreads), int64_t(1) << 30);
  number_kernel<<<unsigned(blocks), kThreads, 0, stream_of(numbers)>>>(
      p, u, static_cast<HeadNumbers*>(numbers.raw()));
  check_launch();
  const Tensor e = vector_records<1, false>(p, problem.e, p.normalize);
  const CUtensorMap map = tile_map(u.dy, p.p, p.heads, p.p, problem.batch() * problem.time(),
                                   int64_t(p.heads) * p.p, device);
  visit_tiles(p.n, [&]<int NT>() {
    constexpr int kMemories = MemoryShared<NT>::kMemories;
    const Tensor q = vector_records<NT, true>(p, problem.q, p.normalize);
    const Tensor c = vector_records<NT, true>(p, problem.c, false);
    const int64_t reach = problem.memory_chunk * kMemories;
    const int64_t groups = problem.layout.chunk_count(problem.batch(), problem.time(), reach);
    Tensor before;
    if (problem.layout.is_packed())
      before = problem.layout.chunk_offsets(problem.batch(), problem.time(), reach, device);
    const MemorySources from{q.raw(), c.raw(), e.raw(),
                             static_cast<const HeadNumbers*>(numbers.raw()), u.dy};
    visit_compute(dmemories.dtype(), [&]<class Host>() {
      launch_persistent<MemoryShared<NT>>(memory_kernel<NT, device_t<Host>>, kFedThreads,
                                          groups * p.heads, dmemories, p, from, map,
                                          ptr<int64_t>(before), groups, ptr<Host>(dmemories));
    });
  });
}

}  // namespace ebb::gpu::state_memory
