// Shared by the kernels of gated linear attention (gated_linear_attention_fwd.cu, _bwd.cu): the
// problem as raw pointers and where a chunk's tokens lie. Notation of
// ops/gated_linear_attention_cpu.cpp: γ, τ, Γ, w per chunk; S and D, the states and their
// gradients; M and E, the same of the current run of memory_chunk tokens alone.
#pragma once
#include "cuda/delta_rule.cuh"
#include "ops/gated_linear_attention.h"

namespace ebb::gpu::linear_attention {

using namespace delta;

// delta::Problem with the groups as `heads`, the weights (or null) as `beta` and a run as its
// chunk: a sequence is cut into runs of `chunk` tokens, a run into `pieces` chunks of `rows`. Chunk
// `i` of all is piece i % pieces of run i / pieces; a ragged run's last pieces may be empty.
template <class T>
struct Attention : Problem<T> {
  const float* skip = {};  // [H] or null
  T* partials = {};        // M before each chunk [chunks,H,K,V], where pieces > 1 and M is wanted
  int rows = 0, pieces = 1;
  int64_t q_step = 0, k_step = 0, v_step = 0;  // elements from token to token

  // The rows of a head at token t.
  __device__ __forceinline__ const T* q_row(int64_t t, int h) const {
    return this->q + t * q_step + group(h) * this->key_dim;
  }
  __device__ __forceinline__ const T* k_row(int64_t t, int h) const {
    return this->k + t * k_step + group(h) * this->key_dim;
  }
  __device__ __forceinline__ const T* v_row(int64_t t, int h) const {
    return this->v + t * v_step + int64_t(h) * this->value_dim;
  }
  __host__ __device__ int64_t group(int h) const { return h / (this->value_heads / this->heads); }
  __host__ __device__ int64_t gate_at(int64_t t, int h) const { return t * this->value_heads + h; }
};

__device__ __forceinline__ Span piece_of(Span run, int piece, int rows) {
  const int before = piece * rows;
  return {run.first + before, max(0, min(rows, run.rows - before))};
}

// The tokens of chunk `index` of all.
template <class T>
__device__ __forceinline__ Span chunk_span(const Attention<T>& p, int64_t index) {
  return piece_of(span_of<T>(p, index / p.pieces), int(index % p.pieces), p.rows);
}

// The chunks of one sequence.
struct PieceWalk {
  ChunkWalk runs;
  int64_t first, count;

  template <class T>
  __device__ __forceinline__ PieceWalk(const Attention<T>& p, int64_t n)
      : runs(p, n), first(runs.first * p.pieces), count(runs.count * p.pieces) {}
  template <class T>
  __device__ __forceinline__ Span span(const Attention<T>& p, int64_t i) const {
    return piece_of(runs.span(p, i / p.pieces), int(i % p.pieces), p.rows);
  }
};

// delta::GateLoader::fetch with weights that may be absent.
template <class T>
__device__ __forceinline__ void fetch_gates(GateLoader& loader, const Attention<T>& p, Span span,
                                            int h) {
  if (threadIdx.x >= 32) return;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * int(threadIdx.x) + e;
    const int64_t at = p.gate_at(span.first + i, h);
    loader.g[e] = i < span.rows ? p.g[at] : 0.f;
    loader.beta[e] = i < span.rows ? (p.beta ? p.beta[at] : 1.f) : 0.f;
  }
}

// s [64, row_length(64)] = a slab of the chunk's q or k, zeros around it.
template <class T>
__device__ __forceinline__ void load_queries(const Attention<T>& p, Span span, int h, int slab,
                                             T* s) {
  load_tile(s, row_length<T>(64), kTileRows, 64, p.q_row(span.first, h) + 64 * slab, p.q_step,
            span.rows, slab_width(p, slab));
}
template <class T>
__device__ __forceinline__ void load_keys(const Attention<T>& p, Span span, int h, int slab, T* s) {
  load_tile(s, row_length<T>(64), kTileRows, 64, p.k_row(span.first, h) + 64 * slab, p.k_step,
            span.rows, slab_width(p, slab));
}

// A scanning block's columns of states [...,K,V] in T, entry `index` (state_at).
template <class T, int SLABS, class F>
__device__ __forceinline__ void each_state(Accumulator<T, kScanColumns> (&state)[SLABS], int v0,
                                           const Attention<T>& p, F&& f) {
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab)
    state[slab].each([&](int r, int c, float& v) {
      const int k = 64 * slab + r;
      if (k < p.key_dim && v0 + c < p.value_dim) f(int64_t(k) * p.value_dim + v0 + c, v);
    });
}

// The problem with g and weight worked out, where it has steps instead.
LinearAttentionProblem with_gates(const LinearAttentionProblem& p);
// Where runs are not made of whole chunks, a pass of its own sees to them, and all others to the
// problem without them: nothing else depends on S then, to the last bit.
inline int64_t longest_chunk(const LinearAttentionProblem& p) {
  return std::clamp<int64_t>(p.chunk, 16, kChunk);
}
inline bool runs_apart(const LinearAttentionProblem& p) {
  return p.memory_chunk % longest_chunk(p) != 0;
}
inline LinearAttentionProblem without_apart_runs(LinearAttentionProblem p) {
  if (runs_apart(p)) p.memory_chunk = 0;
  return p;
}
// How a sequence is cut: chunks of at most 64 tokens, runs of one chunk where there is no memory.
struct Cut {
  explicit Cut(const LinearAttentionProblem& p);
  int rows, pieces;
  int64_t run, chunks;
};
// The device's view. `run_before` (run_offsets) must outlive the launches.
template <class T>
Attention<device_t<T>> make_attention(const LinearAttentionProblem& p, const Cut& cut,
                                      const LinearAttentionSaved& saved, const Tensor& run_before);
Tensor run_offsets(const LinearAttentionProblem& p, const Cut& cut);

// In how many parts the heads of a group are dealt to blocks: as few as give every multiprocessor
// of a large GPU something to do.
int parts_of(int64_t blocks, int64_t heads_per_group);
// out[h] = Σ over the chunks of partial [chunks,H], in order.
void sum_chunks(const Tensor& partial, const Tensor& out);

}  // namespace ebb::gpu::linear_attention
