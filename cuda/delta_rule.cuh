// Shared by the kernels of the gated delta rule (delta_rule_fwd.cu, delta_rule_bwd.cu): the problem
// as raw pointers, where a chunk's tokens lie, and the gates of one chunk. Notation of
// ops/delta_rule_cpu.cpp: γ, τ, Γ, β per chunk; A, P, V', X; S and D, the states and their
// gradients.
#pragma once
#include "cuda/tile.cuh"
#include "ops/delta_rule.h"
#include "ops/rows.h"
#include "ops/sequence_cursor.h"

namespace ebb::gpu::delta {

inline constexpr int kChunk = 64;        // rows of a tile; a chunk has at most as many tokens
inline constexpr int kScanColumns = 32;  // columns of V that one scanning block owns

template <class T>
struct Problem {
  const T *q, *k, *v;       // [tokens,H,K], [tokens,HV,V]
  const float *g, *beta;    // [tokens,HV]
  const float* h0;          // [N,HV,K,V] or null
  T *a, *states, *values;   // saved: [HV,tokens,C], [chunks,HV,K,V], [HV,tokens,V]
  int32_t* positive_decay;  // device flag
  float scale;
  int heads, value_heads, key_dim, value_dim, chunk;
  int64_t tokens, sequences, chunks;
  SequenceCursor cursor;        // sequences over the flat tokens
  const int64_t* chunk_before;  // [N+1] chunks before each sequence; null: dense
  int64_t chunks_per_row;       // dense

  // Where the rows of a value head begin at token t.
  __host__ __device__ int64_t key_at(int64_t t, int hv) const {
    return (t * heads + hv / (value_heads / heads)) * key_dim;
  }
  __host__ __device__ int64_t value_at(int64_t t, int hv) const {
    return (t * value_heads + hv) * value_dim;
  }
  __host__ __device__ int64_t key_stride() const { return int64_t(heads) * key_dim; }
  __host__ __device__ int64_t value_stride() const { return int64_t(value_heads) * value_dim; }
  __host__ __device__ int64_t row_at(int64_t t, int hv) const {
    return hv * tokens + t;
  }  // of a and values
  __host__ __device__ int64_t state_at(int64_t chunk_index, int hv) const {
    return (chunk_index * value_heads + hv) * key_dim * value_dim;
  }
  __host__ __device__ int64_t first_chunk(int64_t n) const {
    return chunk_before ? chunk_before[n] : n * chunks_per_row;
  }
};

struct Span {
  int64_t first;         // flat token
  int rows;              // 1...C; 0: no such chunk
  int64_t sequence = 0;  // that it belongs to
};

// The tokens of chunk `index` of all chunks.
template <class T>
__device__ __forceinline__ Span span_of(const Problem<T>& p, int64_t index) {
  int64_t n;
  if (p.chunk_before) {
    int64_t low = 0, high = p.sequences;  // the last n with chunk_before[n] <= index
    if (high == 0 || index >= p.chunk_before[high]) return {0, 0};
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (p.chunk_before[middle] <= index)
        low = middle;
      else
        high = middle;
    }
    n = low;
  } else {
    n = index / p.chunks_per_row;
  }
  SequenceCursor s = p.cursor;
  s.select(n);
  const int64_t first = s.begin + (index - p.first_chunk(n)) * p.chunk;
  const int64_t left = s.end - first;
  return {first, int(left < p.chunk ? left : p.chunk), n};
}

template <class T>
__device__ __forceinline__ float decay_exp(float x) {
  return sizeof(T) == 2 ? __expf(x) : expf(x);
}

// The gates of one chunk. G is kept as high + low: its differences stay exact to f32 however large
// the sums are.
struct alignas(16) Gates {  // tiles follow it in shared memory
  float high[kChunk], low[kChunk];
  float gamma[kChunk], tail[kChunk], beta[kChunk];
  float total;

  // Γ_ij for j <= i.
  template <class T>
  __device__ __forceinline__ float decay(int i, int j) const {
    return decay_exp<T>((high[i] - high[j]) + (low[i] - low[j]));
  }
};

// Reads the gates of a chunk early and works them out late, so that their latency hides behind
// other work. Warp 0 only; lane l has rows 2l and 2l+1.
struct GateLoader {
  float g[2] = {}, beta[2] = {};

  template <class T>
  __device__ __forceinline__ void fetch(const Problem<T>& p, Span span, int hv) {
    if (threadIdx.x >= 32) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * int(threadIdx.x) + e;
      const int64_t at = (span.first + i) * p.value_heads + hv;
      g[e] = i < span.rows ? p.g[at] : 0.f;
      beta[e] = i < span.rows ? p.beta[at] : 0.f;
    }
  }
  // Visible to the block after its next barrier.
  template <class T>
  __device__ __forceinline__ void finish(Gates& s) const {
    if (threadIdx.x >= 32) return;
    const int lane = int(threadIdx.x);
    double x[2];
#pragma unroll
    for (int e = 0; e < 2; ++e)
      x[e] = double(g[e] < -1000.f ? -1000.f : g[e]);  // −inf: e^-1000 = 0
    double sum = x[0] + x[1];
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, sum, o);
      if (lane >= o) sum += before;
    }
    const double total = __shfl_sync(0xffffffffu, sum, 31);
    const double through[2] = {sum - x[1], sum};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane + e;
      s.high[i] = float(through[e]);
      s.low[i] = float(through[e] - double(s.high[i]));
      s.gamma[i] = decay_exp<T>(float(through[e]));
      s.tail[i] = decay_exp<T>(float(total - through[e]));
      s.beta[i] = beta[e];
    }
    if (lane == 0) s.total = decay_exp<T>(float(total));
  }
};

// The chunks of one sequence.
struct ChunkWalk {
  int64_t first, count, begin, end;  // index of its first chunk, how many, its tokens

  template <class T>
  __device__ __forceinline__ ChunkWalk(const Problem<T>& p, int64_t n) : first(p.first_chunk(n)) {
    SequenceCursor s = p.cursor;
    s.select(n);
    begin = s.begin, end = s.end;
    count = (end - begin + p.chunk - 1) / p.chunk;
  }
  template <class T>
  __device__ __forceinline__ Span span(const Problem<T>& p, int64_t i) const {
    const int64_t at = begin + i * p.chunk, left = end - at;
    return {at, int(left < p.chunk ? left : p.chunk)};
  }
};

// Channels of slab `slab`, 64 of them or what is left of K.
template <class T>
__device__ __forceinline__ int slab_width(const Problem<T>& p, int slab) {
  return max(0, min(64, p.key_dim - 64 * slab));
}

// s [64, row_length(64)] = a slab of the chunk's q or k, zeros around it.
template <class T>
__device__ __forceinline__ void load_keys(const T* g_x, const Problem<T>& p, Span span, int hv,
                                          int slab, T* s) {
  load_tile(s, row_length<T>(64), kTileRows, 64, g_x + p.key_at(span.first, hv) + 64 * slab,
            p.key_stride(), span.rows, slab_width(p, slab));
}

// A slab of a state [K,V] in memory, columns v0..., from s [64, row_length(kScanColumns)].
template <class T>
__device__ __forceinline__ void store_state(T* g_state, const Problem<T>& p, int slab, int v0,
                                            int cols, const T* s) {
  store_tile(g_state + int64_t(64 * slab) * p.value_dim + v0, p.value_dim, s,
             row_length<T>(kScanColumns), slab_width(p, slab), cols);
}

// A scanning block's columns of the f32 states [...,K,V], entry `index`; null: zero.
template <class T, int SLABS>
__device__ __forceinline__ void read_state(Accumulator<T, kScanColumns> (&state)[SLABS],
                                           const float* g, int64_t index, int v0,
                                           const Problem<T>& p) {
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab)
    state[slab].each([&](int r, int c, float& v) {
      const int k = 64 * slab + r;
      v = g && k < p.key_dim && v0 + c < p.value_dim
              ? g[(index * p.key_dim + k) * p.value_dim + v0 + c]
              : 0.f;
    });
}
template <class T, int SLABS>
__device__ __forceinline__ void write_state(float* g, Accumulator<T, kScanColumns> (&state)[SLABS],
                                            int64_t index, int v0, const Problem<T>& p) {
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab)
    state[slab].each([&](int r, int c, float v) {
      const int k = 64 * slab + r;
      if (k < p.key_dim && v0 + c < p.value_dim)
        g[(index * p.key_dim + k) * p.value_dim + v0 + c] = v;
    });
}

// s [64, row_length(64)] = P from the products QKᵀ.
template <class T>
__device__ __forceinline__ void write_scores(Accumulator<T, 64>& qk, const Gates& gates,
                                             float scale, T* s) {
  qk.put(s, row_length<T>(64), [&](int r, int c, float v) {
    return c <= r ? scale * gates.template decay<T>(r, c) * v : 0.f;
  });
}

// s_crossing[t] = Σ_{i>=t>j} z_ij for z [64,64] of zeros on and above the diagonal; overwrites z.
__device__ inline void sum_crossing(float* s_z, float* s_crossing) {
  constexpr int ld = row_length<float>(64);
  const int t = int(threadIdx.x), segment = t >> 6;
  float sum = 0;  // column t%64: sums from below, in four segments of 16 rows
  for (int i = 16 * segment + 15; i >= 16 * segment; --i) {
    sum += s_z[i * ld + (t & 63)];
    s_z[i * ld + (t & 63)] = sum;
  }
  __syncthreads();
  for (int row = 8 * (t >> 5); row < 8 * (t >> 5) + 8; ++row) {
    float part = 0;
    for (int j = t & 31; j < row; j += 32) {
      part += s_z[row * ld + j];
      for (int below = (row & ~15) + 16; below < kTileRows; below += 16)
        part += s_z[below * ld + j];
    }
    part = warp_sum(part);
    if ((t & 31) == 0) s_crossing[row] = part;
  }
  __syncthreads();
}

// Two stages of prefetched tiles, where they fit beside `rest` bytes.
template <class Stage>
constexpr int stages_beside(size_t rest) {
  return 2 * sizeof(Stage) + rest <= kSharedLimit ? 2 : 1;
}
// Whether all slabs of `operands` matrices [64,K] are held at once, or one after the other.
template <class T, int SLABS>
constexpr bool all_slabs_fit(int operands) {
  return SLABS * operands * 64 * row_length<T>(64) * int(sizeof(T)) <= 38 * 1024;
}

// A scanning block's share: columns v0... of a head of a sequence.
struct ScanShare {
  int v0, cols, head;
  int64_t n;

  template <class T>
  __device__ __forceinline__ ScanShare(const Problem<T>& p, int64_t item) {
    const int64_t tiles = (p.value_dim + kScanColumns - 1) / kScanColumns;
    v0 = int(item % tiles) * kScanColumns, cols = min(kScanColumns, p.value_dim - v0);
    head = int(item / tiles % p.value_heads), n = item / tiles / p.value_heads;
  }
  template <class T>
  __device__ __forceinline__ static int64_t count(const Problem<T>& p) {
    return p.sequences * p.value_heads * ((p.value_dim + kScanColumns - 1) / kScanColumns);
  }
};

// A scanning block's way through `count` chunks, the next one's tiles on their way meanwhile where
// two stages fit. fetch(loader, i) asks for the gates of chunk i, load(stage, i) for its tiles;
// body(stage, i) finds both in shared memory. A positive decay raises the flag, if there is one.
enum class Order { forward, reverse };
template <class T, Order ORDER, class Shared, class Fetch, class Load, class Body>
__device__ __forceinline__ void walk_chunks(Shared& s, int64_t count, int32_t* positive_decay,
                                            Fetch&& fetch, Load&& load, Body&& body) {
  const auto chunk = [&](int64_t step) {
    return ORDER == Order::reverse ? count - 1 - step : step;
  };
  GateLoader loader;
  if (count > 0) {
    fetch(loader, chunk(0));
    load(s.stage[0], chunk(0));
  }
  for (int64_t step = 0; step < count; ++step) {
    auto& now = s.stage[step % Shared::kStages];
    if (positive_decay && threadIdx.x < 32 && (loader.g[0] > 0.f || loader.g[1] > 0.f))
      *positive_decay = 1;
    loader.template finish<T>(now.gates);
    wait_copies();
    __syncthreads();
    const bool more = step + 1 < count;
    if (more) fetch(loader, chunk(step + 1));
    if (more && Shared::kStages > 1) load(s.stage[(step + 1) % Shared::kStages], chunk(step + 1));
    body(now, chunk(step));
    if (more && Shared::kStages == 1) {
      __syncthreads();
      load(now, chunk(step + 1));
    }
  }
}

// Blocks of the scans: one per sequence, value head and kScanColumns columns of V.
inline int64_t scan_blocks(int64_t sequences, int64_t value_heads, int64_t value_dim) {
  return sequences * value_heads * ceil_div(value_dim, kScanColumns);
}

// Elements between the rows of neighbouring tokens, each the last `inner` dimensions.
inline int64_t token_step(const Tensor& t, int inner) {
  const Rows r = as_rows(t, inner);
  return r.count > 1 ? r.stride : r.width;
}

// Chunks of more than 64 tokens are cut: results do not depend on C but for rounding.
inline int64_t chunk_of(const DeltaRuleProblem& p) { return std::min<int64_t>(p.chunk, kChunk); }

// The device's view. `chunk_before` must outlive the launches.
template <class T>
Problem<device_t<T>> make_problem(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                                  const Tensor& chunk_before);
// chunk_before for make_problem: undefined when dense.
Tensor chunk_offsets(const DeltaRuleProblem& p);

// With grouped heads: f32 terms [B·T,HV,K] of a gradient of q or k (undefined where that is, or
// without groups), and grad [t,h,:] = their sums over the value heads of h, in order.
Tensor group_terms(const DeltaRuleProblem& p, const Tensor& grad);
void sum_groups(const Tensor& terms, const Tensor& grad, int group);

// f.operator()<SLABS>() with the number of 64-channel slabs that hold K: 1, 2 or 4.
template <class F>
void visit_slabs(int64_t key_dim, F&& f) {
  if (key_dim <= 64)
    f.template operator()<1>();
  else if (key_dim <= 128)
    f.template operator()<2>();
  else
    f.template operator()<4>();
}

}  // namespace ebb::gpu::delta
