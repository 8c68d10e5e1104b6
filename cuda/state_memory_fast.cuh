// State-memory attention in bf16 on tensor cores, N <= 128 and P <= 64, both multiples of 8:
// state_memory_fast_prepare.cu (memories as the products read them), _fwd.cu, and for the backward
// _bwd.cu, _tokens.cu (with _keys.cuh) and _memories.cu. Notation of ops/state_memory_attention.h.
//
// Products of the memories take f16 operands: the rows of Δ̂ = ρ∘Δ are about one in size, so f16 is
// eight times finer than bf16, whose rounding of Δ alone would show in the gradients where the
// softmax is sharp. Rows of q, c and dy are bf16 times a power of two, hence exact. Logits come
// from K' = q Δ̂ and values from V = (c/ρ) Δ̂, both [tokens,P], or dy Δ̂ᵀ/ρ [tokens,N] in the
// backward: one record of a memory serves all.
#pragma once
#include "cuda/delta_fast.cuh"
#include "cuda/half.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/state_memory_attention.cuh"

namespace ebb::gpu::state_memory {

using delta::bf16_t;
using delta::Lane;

// What the kernels read of one memory, N padded to 64·NT and P to 64 with zeros. Without
// normalisation Δ̂ is Δ times a power of two and 1/ρ is 1; with it there is a power of two where
// eps_row leaves all of Δ̂ small.
template <int NT>
struct alignas(1024) MemoryRecord {
  SwizzledTile tile[NT];          // Δ̂ f16 [N,P]
  unsigned inverse_rho[32 * NT];  // f16 pairs, 1/ρ over value_unit: see rho_pair
  float value_unit, key_unit;     // Δ = value_unit inverse_rho tile; Δ̂ = key_unit tile
  float padding[2];
  float rho[64 * NT];  // f32

  static constexpr int kStreamed = NT * int(sizeof(SwizzledTile)) + 128 * NT + 16;

  // Columns 8j+2c and 8j+2c+1 of inverse_rho: the pairs that a lane of column pair c needs lie
  // together in fours.
  __host__ __device__ static constexpr int rho_pair(int j, int c) {
    return (j / 4 * 4 + c) * 4 + j % 4;
  }
};

struct FastProblem {
  const bf16_t *q = {}, *e = {}, *c = {}, *gate = {};  // as Attention; gate may be null
  unsigned char* records = {};                         // [M,H] of MemoryRecord
  float scale = 1, eps = 0;
  bool normalize = true;
  int heads = 1, n = 0, p = 0, q_heads = 1, e_heads = 1, c_heads = 1, gate_heads = 1;
  int run = 1;  // tokens of a run
  // What the kernels of the backward go through: these heads, and tiles [strip_begin, strip_end); a
  // strip_end of 0: all tiles.
  int first_head = 0, some_heads = 1;
  int64_t strip_begin = 0, strip_end = 0;
  int64_t memories = 0;
  int64_t runs_per_row = 0;                           // dense
  const int64_t *run_before = {}, *tile_before = {};  // [sequences+1]; null: dense
  const int64_t* before = {};                         // as StateMemoryProblem; null: none
  int64_t room = 0;
  int64_t tiles = 0, tiles_per_row = 0;  // of kTileTokens tokens
  SequenceCursor cursor;

  __device__ __forceinline__ int shared_head(int head, int of) const { return head * of / heads; }
  __device__ __forceinline__ int64_t row_at(int64_t t, int head) const {  // of r, o, dy
    return (t * heads + head) * p;
  }
  __device__ __forceinline__ const bf16_t* vector(const bf16_t* x, int64_t t, int head, int of,
                                                  int width) const {
    return x + (t * of + shared_head(head, of)) * width;
  }
  __device__ __forceinline__ float gate_of(int64_t t, int head) const {
    return gate ? to_float(gate[t * gate_heads + shared_head(head, gate_heads)]) : 1.f;
  }
  template <int NT>
  __device__ __forceinline__ MemoryRecord<NT>& record(int64_t memory, int head) const {
    return reinterpret_cast<MemoryRecord<NT>*>(records)[memory * heads + head];
  }
  // Whether a head is the first of those that share one of `of` vectors, or any of its vectors.
  __device__ __forceinline__ bool opens(int head, int of) const { return head % (heads / of) == 0; }
  __device__ __forceinline__ bool opens_any(int head) const {
    return opens(head, q_heads) || opens(head, e_heads) || opens(head, c_heads);
  }
};

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr int kTileTokens = 64;  // the unit of FastProblem::tiles

// Asks for the 128 bytes around an address of global memory that is soon to be read.
__device__ __forceinline__ void fetch_ahead(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

// The last n with before[n] <= x.
__device__ __forceinline__ int64_t last_not_above(const int64_t* before, int64_t count, int64_t x) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (before[middle] <= x ? low : high) = middle;
  }
  return low;
}

// Up to `rows` neighbouring tokens of one sequence, which starts with memory `memory`; the first of
// them is its `at`-th token, those before these included.
struct TokenTile {
  int64_t first = 0, memory = 0, number = 0;  // number: among tiles of 64, sequence by sequence
  int rows = 0, at = 0;

  // Memories that row r sees.
  __device__ __forceinline__ int visible(int r, int run) const { return (at + r) / run; }
  // That any of the rows [begin, begin+64) sees.
  __device__ __forceinline__ int seen(int begin, int run) const {
    const int last = min(rows, begin + 64) - 1;
    return last < begin ? 0 : visible(last, run);
  }
};
// Tiles of 64·PARTS tokens, those that see most first where all sequences are equally long. Of a
// strip only with PARTS 1.
template <int PARTS>
struct TokenTiles {
  int64_t per_row, last, count;
  bool by_number;

  __device__ __forceinline__ explicit TokenTiles(const FastProblem& p)
      : per_row((p.tiles_per_row + PARTS - 1) / PARTS),
        last(p.strip_end ? p.strip_end : p.tiles),
        by_number(p.tile_before || p.strip_end) {
    count = by_number ? last - p.strip_begin : per_row * p.cursor.count;
  }
  // rows is 0 where a packed sequence has no such tile.
  __device__ __forceinline__ TokenTile at(const FastProblem& p, int64_t index) const {
    TokenTile t;
    int64_t n, i;
    if (by_number) {
      const int64_t tile = last - 1 - index;
      n = p.tile_before ? last_not_above(p.tile_before, p.cursor.count, tile)
                        : tile / p.tiles_per_row;
      i = tile - (p.tile_before ? p.tile_before[n] : n * p.tiles_per_row);
      t.number = tile;
      if (i % PARTS) return t;
      i /= PARTS;
    } else {
      n = index % p.cursor.count;
      i = per_row - 1 - index / p.cursor.count;
      t.number = n * p.tiles_per_row + i * PARTS;
    }
    SequenceCursor s = p.cursor;
    s.select(n);
    t.first = s.begin + i * 64 * PARTS;
    t.at = int(i) * 64 * PARTS + (p.before ? int(p.before[n]) : 0);
    const int64_t left = s.end - t.first;
    t.rows = int(left < 64 * PARTS ? left : 64 * PARTS);
    t.memory = p.before ? n * p.room : p.run_before ? p.run_before[n] : n * p.runs_per_row;
    return t;
  }
};

// Shares of `count` items, the costliest first, among the blocks of a grid: every second round in
// reverse. f(item).
template <class F>
__device__ __forceinline__ void each_item(int64_t count, F&& f) {
  const int64_t blocks = gridDim.x, block = blockIdx.x;
  for (int64_t round = 0; round * blocks < count; ++round) {
    const int64_t item = round * blocks + (round & 1 ? blocks - 1 - block : block);
    if (item < count) f(item);
  }
}

// Items of kernels whose readers have tokens (64·PARTS tokens, block of heads): f(tile, first head,
// memories that any of the tokens sees).
template <int PARTS, class F>
__device__ __forceinline__ void each_token_item(const FastProblem& p, int heads_per_item, F&& f) {
  const TokenTiles<PARTS> tiles(p);
  const int blocks = p.some_heads / heads_per_item;
  each_item(tiles.count * blocks, [&](int64_t item) {
    const TokenTile tile = tiles.at(p, item / blocks);
    int all = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) all = max(all, tile.seen(64 * part, p.run));
    f(tile, p.first_head + int(item % blocks) * heads_per_item, all);
  });
}
template <int PARTS>
int64_t token_items(const FastProblem& p, int heads_per_item) {
  const int64_t dense = ceil_div(p.tiles_per_row, PARTS) * p.cursor.count;
  return (p.strip_end ? p.strip_end - p.strip_begin : std::max(p.tiles, dense)) *
         (p.some_heads / heads_per_item);
}
// By one warp: the memories of every item, one after the other and on into the next head and item,
// through a ring. fetch(place, memory, head).
template <int PARTS, int STAGES, int READERS, class F>
__device__ __forceinline__ void fetch_memories(const FastProblem& p, int heads_per_item,
                                               Ring<STAGES, READERS>& ring, F&& fetch) {
  RingPlace<STAGES> place;
  each_token_item<PARTS>(p, heads_per_item, [&](const TokenTile& tile, int first, int all) {
    for (int head = first; head < first + heads_per_item; ++head)
      for (int i = 0; i < all; ++i, place.next()) {
        place.wait_empty(ring);
        fetch(place.at, tile.memory + i, head);
      }
  });
}

// Rows `row` and `row`+8 of a left operand, bf16 pairs, from memory; zeros beyond `width` and where
// a row is null.
template <int STEPS>
__device__ __forceinline__ void load_left(unsigned (&a)[STEPS][4], const bf16_t* row0,
                                          const bf16_t* row1, int width, const Lane& l) {
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = 16 * k + 8 * h + 2 * l.c;
      const bool there = column < width;
      a[k][2 * h] = row0 && there ? *reinterpret_cast<const unsigned*>(row0 + column) : 0u;
      a[k][2 * h + 1] = row1 && there ? *reinterpret_cast<const unsigned*>(row1 + column) : 0u;
    }
}

// The rows of two tokens, of those vectors that `head` shares; a token below zero has none.
template <int STEPS>
__device__ __forceinline__ void load_rows(unsigned (&a)[STEPS][4], const FastProblem& p,
                                          const bf16_t* x, const int64_t (&token)[2], int head,
                                          int of, int width, const Lane& l) {
  const bf16_t* at[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    at[r] = token[r] < 0 ? nullptr : p.vector(x, token[r], head, of, width);
  load_left(a, at[0], at[1], width, l);
}

// 2^k that brings `largest` to [2^to, 2^(to+1)); 1 for zero, NaN and infinity.
__device__ __forceinline__ float power_to(float largest, int to) {
  const int exponent = int(__float_as_uint(largest) >> 23 & 255);
  if (exponent == 0 || exponent == 255) return 1.f;
  return __uint_as_float(unsigned(min(254 + to - exponent, 253)) << 23);
}
__device__ __forceinline__ float inverse_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// 1/rms of the two rows of a left operand in bf16; 1 without normalisation.
template <int STEPS>
__device__ __forceinline__ void inverse_rms(float (&inverse)[2], const unsigned (&a)[STEPS][4],
                                            int width, const FastProblem& p) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = delta::low_half(a[k][2 * h + r]), y = delta::high_half(a[k][2 * h + r]);
        sum += x * x;
        sum += y * y;
      }
    inverse[r] = p.normalize ? 1.f / sqrtf(quad_sum(sum) / float(width) + p.eps) : 1.f;
  }
}
// Rows from bf16 to f16, each times a power of two that brings its largest entry to about 2^to;
// unit: what the rows are to be multiplied with to be themselves again.
template <int STEPS>
__device__ __forceinline__ void to_half_rows(unsigned (&a)[STEPS][4], float (&unit)[2], int to) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = 0;
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned x = a[k][2 * h + r];
        largest = fmaxf(largest, fmaxf(fabsf(delta::low_half(x)), fabsf(delta::high_half(x))));
      }
    const float power = power_to(quad_max(largest), to);
    unit[r] = inverse_power(power);
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        unsigned& x = a[k][2 * h + r];
        x = pack_half(delta::low_half(x) * power, delta::high_half(x) * power);
      }
  }
}
// to = from ∘ 1/ρ of a memory.
template <int NT>
__device__ __forceinline__ void scale_by_rho(unsigned (&to)[4 * NT][4],
                                             const unsigned (&from)[4 * NT][4],
                                             const MemoryRecord<NT>& m, const Lane& l) {
#pragma unroll
  for (int i = 0; i < 2 * NT; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(m.inverse_rho + m.rho_pair(4 * i, l.c));
    const unsigned pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int k = 2 * i + j / 2, h = 2 * (j & 1);
      to[k][h] = multiply_halves(from[k][h], pairs[j]);
      to[k][h + 1] = multiply_halves(from[k][h + 1], pairs[j]);
    }
  }
}
// x = a · the tiles of a memory, [64,P].
template <int NT>
__device__ __forceinline__ void multiply_memory(float (&x)[8][4], const unsigned (&a)[4 * NT][4],
                                                const MemoryRecord<NT>& m) {
  multiply_half_columns<true>(x, a, m.tile[0]);
#pragma unroll
  for (int t = 1; t < NT; ++t) multiply_half_columns(x, a + 4 * t, m.tile[t]);
}
// Row dots of sums [64,64] with rows in bf16 pairs of the same places, over the quad.
__device__ __forceinline__ void row_dots(float (&dot)[2], const float (&x)[8][4],
                                         const unsigned (&a)[4][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const unsigned y = a[n / 2][2 * (n & 1) + r];
      sum[0] += x[n][2 * r] * delta::low_half(y);
      sum[1] += x[n][2 * r + 1] * delta::high_half(y);
    }
    dot[r] = quad_sum(sum[0] + sum[1]);
  }
}
// f.operator()<NT>(): tiles of 64 rows that hold N.
template <class F>
void visit_tiles(int64_t n, F&& f) {
  if (n <= 64)
    f.template operator()<1>();
  else
    f.template operator()<2>();
}

// Launches a kernel of `threads` threads, with an S as its shared memory, of which one block fits a
// multiprocessor.
template <class S, class... P, class... A>
void launch_persistent(void (*kernel)(P...), int threads, int64_t items, const Tensor& on,
                       const A&... arguments) {
  static_assert(sizeof(S) <= 227 * 1024);
  if (items <= 0) return;
  cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(S))),
      "shared memory");
  const int64_t blocks = std::min<int64_t>(items, multiprocessors(on.device()));
  kernel<<<unsigned(blocks), unsigned(threads), sizeof(S), stream_of(on)>>>(arguments...);
  check_launch();
}

// What comes back from o, for the backward.
struct FastUpstream {
  const bf16_t* dy = {};                 // [tokens,H,P]
  const float *lse = {}, *through = {};  // [tokens,H]; through = R·dy, so δ = gate·through
};
// What the gradients of the tokens' vectors leave for those of the memories: of every pair of a
// token and a memory w gate, and dℓ' times 1/rms of q and of e. f32 [2][tiles of the strip]
// [some heads][runs][64 tokens]; written for the memories that a token of the tile sees, zero for
// the tokens that do not. Null: not wanted.
struct PairFactors {
  float* factors = {};
  int64_t half = 0;  // floats of either factor
  int runs = 0;      // of the longest sequence

  __device__ __forceinline__ float* of(const FastProblem& p, int64_t tile, int head) const {
    return factors + ((tile - p.strip_begin) * p.some_heads + (head - p.first_head)) * runs * 64;
  }
};
// Where the gradients of q̂, ê or c go before they are summed: f32 [tokens,of,parts,width]. A part
// is what `heads_per_part` neighbouring heads have added. Null: not wanted.
struct TokenParts {
  float* out = {};
  int of = 1, parts = 1, width = 0, heads_per_part = 1;
};

// dq̂, dê and dc in parts, and the factors; a block goes through `heads_per_item` heads.
void token_gradients(const FastProblem& p, const FastUpstream& u, int heads_per_item,
                     const TokenParts& dq, const TokenParts& de, const TokenParts& dc,
                     const PairFactors& pairs, const Tensor& on);
// dΔ, f32 or bf16 [M,H,N,P]; of a strip's tokens added to that of the strips before, f32.
void memory_gradients(const StateMemoryProblem& problem, const FastProblem& p,
                      const PairFactors& pairs, const Tensor& d_o, const Tensor& dmemories);

// Whether these kernels take the problem.
bool fast_path(const StateMemoryProblem& p);
// What the device needs of it, and what that points at.
struct FastView {
  Tensor records, run_before, tile_before, before;
  FastProblem p = {};
};
// With the records of all memories: the problem's, or made by a kernel.
FastView prepare(const StateMemoryProblem& problem);
// Returns the records.
Tensor fast_fwd(const StateMemoryProblem& problem, const Tensor& o, const Tensor& r,
                const Tensor& lse);
void fast_bwd(const StateMemoryProblem& problem, const Tensor& r, const Tensor& lse,
              const Tensor& d_o, const StateMemoryGradients& grads);

}  // namespace ebb::gpu::state_memory
