// Shared by the kernels of state-memory attention (state_memory_attention.cu, _bwd.cu): the problem
// as raw pointers, which tokens see which memories, tiles of 64x64 slabs. Notation of
// ops/state_memory_attention.h.
#pragma once
#include "cuda/delta_rule.cuh"
#include "ops/state_memory_attention.h"

namespace ebb::gpu::state_memory {

using delta::Span;

template <class T>
struct Attention {
  const T *q, *e, *c, *memories;         // [tokens,*,N], [tokens,*,P], [tokens,*,N], [M,H,N,P]
  const T* rest;                         // of memories in f32, what rounding has left; or null
  const T* gate;                         // [tokens,*] or null
  const float *q_scale, *e_scale, *rho;  // 1/rms of the rows of q, e, memories; null: 1
  float scale;
  int heads, n, p, q_heads, e_heads, c_heads, gate_heads;
  int rows, pieces;           // a run is cut into pieces of up to 64 tokens
  int64_t run, tiles;         // tokens of a run; pieces of all runs
  int64_t runs_per_row;       // dense
  const int64_t* run_before;  // [N+1] runs before each sequence; null: dense
  const int64_t* before;      // [N] tokens before those here; null: none
  int64_t room;               // with `before`: memories of a sequence
  SequenceCursor cursor;

  __device__ __forceinline__ int shared_head(int head, int of) const { return head / (heads / of); }
  __device__ __forceinline__ int64_t row_at(int64_t t, int head) const {  // of r, o, dy
    return (t * heads + head) * p;
  }
  __device__ __forceinline__ int64_t memory_at(int64_t m, int head) const {
    return (m * heads + head) * n * p;
  }
  __device__ __forceinline__ float gate_of(int64_t t, int head) const {
    return gate ? to_float(gate[t * gate_heads + shared_head(head, gate_heads)]) : 1.f;
  }
  // Row of `head` at token t in a vector of `of` heads, times its width.
  __device__ __forceinline__ int64_t vector_at(int64_t t, int head, int of, int width) const {
    return (t * of + shared_head(head, of)) * width;
  }
  __device__ __forceinline__ float inverse(const float* all, int64_t t, int head, int of) const {
    return all ? all[t * of + shared_head(head, of)] : 1.f;
  }
};

// Tokens of one run, which see the memories [first_memory, memory).
struct Tile {
  Span span;
  int64_t first_memory, memory, sequence;
};

template <class T>
__device__ __forceinline__ int64_t sequence_of(const Attention<T>& p, int64_t run) {
  if (!p.run_before) return run / p.runs_per_row;
  int64_t low = 0, high = p.cursor.count;  // the last n with run_before[n] <= run
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (p.run_before[middle] <= run ? low : high) = middle;
  }
  return low;
}
template <class T>
__device__ __forceinline__ Tile tile_of(const Attention<T>& p, int64_t index) {
  Tile t;
  const int64_t run = index / p.pieces;  // of those with tokens here
  t.sequence = sequence_of(p, run);
  const int64_t opens = p.run_before ? p.run_before[t.sequence] : t.sequence * p.runs_per_row;
  const int64_t past = p.before ? p.before[t.sequence] : 0;
  const int64_t place = past / p.run + run - opens;  // of the run in its sequence
  t.first_memory = p.before ? t.sequence * p.room : opens;
  t.memory = t.first_memory + place;
  SequenceCursor s = p.cursor;
  s.select(t.sequence);
  const int64_t begin = s.begin + place * p.run - past;  // may lie before the tokens here
  const int64_t end = begin + p.run < s.end ? begin + p.run : s.end;
  t.span.first = (begin > s.begin ? begin : s.begin) + index % p.pieces * p.rows;
  const int64_t left = end - t.span.first;
  t.span.rows = int(left < 0 ? 0 : left < p.rows ? left : p.rows);
  return t;
}

// Leading dimension of a slab [64,64].
template <class T>
constexpr int slab_ld() {
  return row_length<T>(64);
}

// s [64,64] = columns 64·slab... of the tile's rows of x [tokens,of,width], times factor(row,
// column); zeros around it.
template <class T, class F>
__device__ __forceinline__ void load_scaled(T* s, const T* x, const Attention<T>& p, Span span,
                                            int head, int of, int width, int slab, F&& factor) {
  for (int i = int(threadIdx.x); i < 64 * 64; i += kTileThreads) {
    const int r = i / 64, c = i % 64, column = 64 * slab + c;
    float v = 0.f;
    if (r < span.rows && column < width)
      v = to_float(x[p.vector_at(span.first + r, head, of, width) + column]) * factor(r, column);
    s[r * slab_ld<T>() + c] = from_float<T>(v);
  }
}
// The same as it is. Complete after wait_copies() and a barrier.
template <class T>
__device__ __forceinline__ void load_vectors(T* s, const T* x, const Attention<T>& p, Span span,
                                             int head, int of, int width, int slab) {
  load_tile(s, slab_ld<T>(), 64, 64, x + p.vector_at(span.first, head, of, width) + 64 * slab,
            int64_t(of) * width, span.rows, min(64, width - 64 * slab));
}
// s [64,64] = rows 64·row_slab..., columns 64·column_slab... of a memory, or of its rest. Likewise.
template <class T>
__device__ __forceinline__ void load_memory(T* s, const T* memories, const Attention<T>& p,
                                            int64_t m, int head, int row_slab, int column_slab) {
  load_tile(s, slab_ld<T>(), 64, 64,
            memories + p.memory_at(m, head) + int64_t(64 * row_slab) * p.p + 64 * column_slab, p.p,
            min(64, p.n - 64 * row_slab), min(64, p.p - 64 * column_slab));
}

// s_parts: the row sums of q∘ρ∘F over slab `slab` of N, F [64,64] in registers; in two parts, to be
// added after a barrier.
template <class T>
__device__ __forceinline__ void key_sums(Accumulator<T, 64>& f, float* s_parts,
                                         const Attention<T>& p, Span span, int64_t m, int head,
                                         int slab) {
  const float* rho = p.rho ? p.rho + (m * p.heads + head) * p.n : nullptr;
  f.row_sums(s_parts, [&](int r, int c, int i) {
    const int column = 64 * slab + c;
    if (r >= span.rows || column >= p.n) return 0.f;
    const T q = p.q[p.vector_at(span.first + r, head, p.q_heads, p.n) + column];
    return f.v[i] * to_float(q) * (rho ? rho[column] : 1.f);
  });
}
// The logit of token t from the sum over all of N: the same number in every pass.
template <class T>
__device__ __forceinline__ float logit_of(const Attention<T>& p, int64_t t, int head, float sum) {
  return p.scale * sum * p.inverse(p.q_scale, t, head, p.q_heads) *
         p.inverse(p.e_scale, t, head, p.e_heads);
}

// The device's view; what it points at must outlive the launches.
struct Scales {
  Tensor q, e, rho;  // f32, undefined without normalisation
  Tensor rest;       // as Attention::rest
  Tensor run_before, before;
  int64_t runs = 0;  // that have tokens here
};
// With memories of q's dtype, which is all that these kernels take; the others' rest.
StateMemoryProblem with_narrow_memories(StateMemoryProblem p, Tensor* rest);
Scales make_scales(const StateMemoryProblem& p, const Tensor& rest);
template <class T>
Attention<device_t<T>> make_attention(const StateMemoryProblem& p, const Scales& scales);

// f.operator()<SLABS>() with the number of slabs of 64 that hold `width`: 1, 2 or 4.
using delta::visit_slabs;

}  // namespace ebb::gpu::state_memory
