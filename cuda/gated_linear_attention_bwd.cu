// Gated linear attention, backward, in three kernels: 1 the scan from the last chunk to the first,
// which leaves D after each, 2 dv and dw of every chunk, 3 dq, dk and dg of every chunk, summed
// over the heads of a group; then ordered sums of what is left. Notation and formulas of
// ops/gated_linear_attention_cpu_bwd.cpp.
#include "cuda/linear_attention_fast.cuh"
#include "ops/ssd.h"

namespace ebb::gpu::linear_attention {
namespace {

template <class T>
struct Backward : Attention<T> {
  const T* d_o = {};             // [tokens,H,V]
  const float* dht = {};         // [N,H,K,V] or null
  const T* dcontributions = {};  // [runs,H,K,V] or null
  T* dstates = {};               // D after each chunk [chunks,H,K,V]
  T* druns = {};                 // E after each chunk, as dcontributions where pieces = 1; or null
  T *dq = {}, *dk = {}, *dv = {};        // null: not wanted
  float *dq_terms = {}, *dk_terms = {};  // [tokens,G·parts,K]: instead, sums of a part of the heads
  float *dg = {}, *dweight = {}, *dh0 = {}, *dskip = {};  // dskip: [chunks,H]
  int parts = 1;                                          // of the heads of a group
};

template <class T, int SLABS>
struct ReverseStage {
  static constexpr bool kAllSlabs = all_slabs_fit<T, SLABS>(1);
  Gates gates;
  T q[kAllSlabs ? SLABS : 1][kTileRows * row_length<T>(64)];
  T d_o[kTileRows * row_length<T>(kScanColumns)];  // dO, then scale·γ dO
};
template <class T, int SLABS>
struct ReverseShared {
  static constexpr int kTile = kTileRows * row_length<T>(kScanColumns);
  static constexpr int kStages = stages_beside<ReverseStage<T, SLABS>>(SLABS * kTile * sizeof(T));
  ReverseStage<T, SLABS> stage[kStages];
  T state[SLABS][kTile];  // D
};

template <class T, int SLABS>
__device__ void load_stage(const Backward<T>& p, Span span, int h, int v0,
                           ReverseStage<T, SLABS>& s) {
  if constexpr (ReverseStage<T, SLABS>::kAllSlabs)
    for (int slab = 0; slab < SLABS; ++slab) load_queries(p, span, h, slab, s.q[slab]);
  load_tile(s.d_o, row_length<T>(kScanColumns), kTileRows, kScanColumns,
            p.d_o + p.value_at(span.first, h) + v0, p.value_stride(), span.rows,
            min(kScanColumns, p.value_dim - v0));
}

// Item (sequence, head, 32 columns of V), D in registers as S in the forward scan; with MEMORY
// (runs of several chunks) E, too. Per chunk, from the last: 1 store D and E. 2 dO ← scale γ dO.
// 3 D = γ_n D + qᵀ dO, E = γ_n E. At the end: 4 dh0.
template <class T, int SLABS, bool MEMORY>
__global__ void __launch_bounds__(kTileThreads) reverse_kernel(Backward<T> p) {
  using Shared = ReverseShared<T, SLABS>;
  using Stage = ReverseStage<T, SLABS>;
  auto& s = dynamic_shared<Shared>();
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  for (int64_t item = blockIdx.x; item < ScanShare::count(p); item += gridDim.x) {
    const ScanShare at(p, item);
    const int v0 = at.v0, cols = at.cols, h = at.head;
    const int64_t n = at.n;
    const PieceWalk walk(p, n);
    Accumulator<T, kScanColumns> state[SLABS], run[MEMORY ? SLABS : 1];
    read_state(state, p.dht, n * p.value_heads + h, v0, p);
    const auto fetch = [&](GateLoader& loader, int64_t i) {
      fetch_gates(loader, p, walk.span(p, i), h);
    };
    const auto load = [&](Stage& stage, int64_t i) {
      load_stage<T, SLABS>(p, walk.span(p, i), h, v0, stage);
    };
    walk_chunks<T, Order::reverse>(s, walk.count, nullptr, fetch, load, [&](Stage& now, int64_t i) {
      const Span span = walk.span(p, i);
      const int rows = (span.rows + 15) & ~15;
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab)  // 1
        state[slab].put(s.state[slab], ld_v, [](int, int, float v) { return v; });
      if (MEMORY) {
        const int64_t at_run = p.state_at((walk.first + i) / p.pieces, h);
        if ((i + 1) % p.pieces == 0) {
#pragma unroll
          for (auto& e : run) e.clear();
          each_state(run, v0, p,
                     [&](int64_t at, float& v) { v = to_float(p.dcontributions[at_run + at]); });
        }
        T* to = p.druns + p.state_at(walk.first + i, h);
        each_state(run, v0, p, [&](int64_t at, float v) { to[at] = from_float<T>(v); });
#pragma unroll
        for (auto& e : run) e.each([&](int, int, float& v) { v *= now.gates.total; });
      }
      for (int at = int(threadIdx.x); at < kTileRows * kScanColumns; at += kTileThreads) {  // 2
        const int r = at / kScanColumns;
        T& d = now.d_o[r * ld_v + at % kScanColumns];
        d = from_float<T>(p.scale * now.gates.gamma[r] * to_float(d));
      }
      if (!Stage::kAllSlabs) {
        load_queries(p, span, h, 0, now.q[0]);
        wait_copies();
      }
      __syncthreads();
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab)
        store_state(p.dstates + p.state_at(walk.first + i, h), p, slab, v0, cols, s.state[slab]);

#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {  // 3
        if (!Stage::kAllSlabs && slab > 0) {
          __syncthreads();
          load_queries(p, span, h, slab, now.q[0]);
          wait_copies();
          __syncthreads();
        }
        state[slab].each([&](int, int, float& v) { v *= now.gates.total; });
        multiply<Stored::columns, Stored::rows>(state[slab], now.q[Stage::kAllSlabs ? slab : 0], ld,
                                                now.d_o, ld_v, rows);
      }
    });
    if (p.dh0) write_state(p.dh0, state, n * p.value_heads + h, v0, p);  // 4
    __syncthreads();
  }
}

// s += E (of druns), a tile of 64 rows of K from `slab` and COLS columns from v0, of a chunk and
// head; what M∘E and, before that, S∘s come to in this thread's elements. Between two barriers.
template <int COLS, class T>
__device__ __forceinline__ float add_run(const Backward<T>& p, int64_t chunk, int h, int slab,
                                         int v0, T* s, const T* s_state) {
  constexpr int ld = row_length<T>(COLS);
  const int64_t from = p.state_at(chunk, h) + int64_t(64 * slab) * p.value_dim + v0;
  float inner = 0;
  for (int i = int(threadIdx.x); i < 64 * COLS; i += kTileThreads) {
    const int r = i / COLS, c = i % COLS, at = r * ld + c;
    const float d = to_float(s[at]);
    if (s_state) inner += to_float(s_state[at]) * d;
    if (!p.druns || 64 * slab + r >= p.key_dim || v0 + c >= p.value_dim) continue;
    const int64_t g = from + int64_t(r) * p.value_dim + c;
    const float e = to_float(p.druns[g]);
    if (s_state && p.partials) inner += to_float(p.partials[g]) * e;
    s[at] = from_float<T>(d + e);
  }
  return inner;
}

template <class T>
struct ValueShared {
  static constexpr int kTile = kTileRows * row_length<T>(64);
  Gates gates;
  T p[kTile];      // a slab of q, then scale·q kᵀ∘Γ
  T k[kTile];      // a slab of k
  T state[kTile];  // a slab of D+E, then dv
  T d_o[kTile], v[kTile];
  float parts[2 * kTileRows], dweight[kTileRows];
  float scratch[32];
};

// Item (chunk, head). Over slabs of K: 1 P = scale·q kᵀ∘Γ. Per 64 columns of V: 2 U = τ k (D+E) +
// Pᵀ dO. 3 v·U. 4 dv = w U + skip dO. Last: 5 dw; the chunk's part of dskip.
template <class T>
__global__ void __launch_bounds__(kTileThreads) value_kernel(Backward<T> p) {
  auto& s = dynamic_shared<ValueShared<T>>();
  constexpr int ld = row_length<T>(64);
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads; item += gridDim.x) {
    const int h = int(item % p.value_heads);
    const int64_t chunk = item / p.value_heads;
    const Span span = chunk_span(p, chunk);
    if (span.rows == 0) {
      if (p.dskip && threadIdx.x == 0) p.dskip[item] = 0.f;
      continue;
    }
    const int rows = (span.rows + 15) & ~15;
    GateLoader loader;
    fetch_gates(loader, p, span, h);
    loader.template finish<T>(s.gates);
    Accumulator<T, 64> acc;
    acc.clear();
    for (int slab = 0; 64 * slab < p.key_dim; ++slab) {  // 1
      load_queries(p, span, h, slab, s.p);
      load_keys(p, span, h, slab, s.k);
      wait_copies();
      __syncthreads();
      multiply<Stored::rows, Stored::columns>(acc, s.p, ld, s.k, ld, 64);
      __syncthreads();
    }
    acc.put(s.p, ld, [&](int r, int c, float v) {
      return c <= r ? p.scale * s.gates.template decay<T>(r, c) * v : 0.f;
    });
    if (threadIdx.x < kTileRows) s.dweight[threadIdx.x] = 0.f;
    const float skip = p.skip ? p.skip[h] : 0.f;
    float through = 0;  // this thread's part of v·dO
    for (int v0 = 0; v0 < p.value_dim; v0 += 64) {
      const int cols = min(64, p.value_dim - v0);
      const int64_t at = p.value_at(span.first, h) + v0;
      load_tile(s.d_o, ld, kTileRows, 64, p.d_o + at, p.value_stride(), span.rows, cols);
      load_tile(s.v, ld, kTileRows, 64, p.v_row(span.first, h) + v0, p.v_step, span.rows, cols);
      acc.clear();
      for (int slab = 0; 64 * slab < p.key_dim; ++slab) {  // 2
        load_keys(p, span, h, slab, s.k);
        load_tile(s.state, ld, 64, 64,
                  p.dstates + p.state_at(chunk, h) + int64_t(64 * slab) * p.value_dim + v0,
                  p.value_dim, slab_width(p, slab), cols);
        wait_copies();
        __syncthreads();
        if (p.druns) {
          add_run<64>(p, chunk, h, slab, v0, s.state, static_cast<const T*>(nullptr));
          __syncthreads();
        }
        multiply<Stored::rows, Stored::rows>(acc, s.k, ld, s.state, ld, 64);
        __syncthreads();
      }
      acc.each([&](int r, int, float& v) { v *= s.gates.tail[r]; });
      multiply<Stored::columns, Stored::rows>(acc, s.p, ld, s.d_o, ld, rows);
      acc.row_sums(s.parts,  // 3
                   [&](int r, int c, int i) { return to_float(s.v[r * ld + c]) * acc.v[i]; });
      if (p.dskip)
        for (int i = int(threadIdx.x); i < kTileRows * 64; i += kTileThreads) {
          const int e = i / 64 * ld + i % 64;
          through += to_float(s.v[e]) * to_float(s.d_o[e]);
        }
      acc.put(s.state, ld, [&](int r, int c, float v) {  // 4
        return s.gates.beta[r] * v + skip * to_float(s.d_o[r * ld + c]);
      });
      __syncthreads();
      if (threadIdx.x < kTileRows)
        s.dweight[threadIdx.x] += s.parts[threadIdx.x] + s.parts[kTileRows + threadIdx.x];
      if (p.dv) store_tile(p.dv + at, p.value_stride(), s.state, ld, span.rows, cols);
      __syncthreads();
    }
    const int t = int(threadIdx.x);  // 5
    if (p.dweight && t < span.rows) p.dweight[p.gate_at(span.first + t, h)] = s.dweight[t];
    if (p.dskip) {
      through = block_sum(through, s.scratch);
      if (t == 0) p.dskip[item] = through;
    }
    __syncthreads();
  }
}

template <class T>
struct KeyShared {
  static constexpr int kNarrow = kTileRows * row_length<T>(kScanColumns);
  static constexpr int kFull = kTileRows * row_length<T>(64);
  Gates gates;
  T z[kFull];  // Z
  union {      // one after the other
    struct {
      T d_o[kNarrow], v[kNarrow], state[kNarrow], dstate[kNarrow];
    } v;  // 32 columns of V
    struct {
      T q[kFull], k[kFull];
    } k;                                         // a slab of K
    float z[kTileRows * row_length<float>(64)];  // Z∘q kᵀ below the diagonal
  } u;
  float parts[2][2 * kTileRows];  // row sums
  float reads[kTileRows], kept[kTileRows], crossing[kTileRows];
  float scratch[32];
};

// Tiles of 32 columns of V: dO, v.
template <class T>
__device__ __forceinline__ void load_value_tiles(const Backward<T>& p, Span span, int h, int v0,
                                                 KeyShared<T>& s) {
  constexpr int ld_v = row_length<T>(kScanColumns);
  const int cols = min(kScanColumns, p.value_dim - v0);
  const int64_t at = p.value_at(span.first, h) + v0;
  load_tile(s.u.v.d_o, ld_v, kTileRows, kScanColumns, p.d_o + at, p.value_stride(), span.rows,
            cols);
  load_tile(s.u.v.v, ld_v, kTileRows, kScanColumns, p.v_row(span.first, h) + v0, p.v_step,
            span.rows, cols);
}

// Step 2 of key_kernel: s.z and s.crossing.
template <class T>
__device__ __forceinline__ void score_gradients(const Backward<T>& p, Span span, int h,
                                                const Accumulator<T, 64>& qk, KeyShared<T>& s) {
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  constexpr int ld_z = row_length<float>(64);
  Accumulator<T, 64> z;
  z.clear();
  for (int v0 = 0; v0 < p.value_dim; v0 += kScanColumns) {
    load_value_tiles(p, span, h, v0, s);
    wait_copies();
    __syncthreads();
    multiply<Stored::rows, Stored::columns>(z, s.u.v.d_o, ld_v, s.u.v.v, ld_v, kScanColumns);
    __syncthreads();
  }
  z.each([&](int r, int c, float& v) {
    v = c <= r ? p.scale * s.gates.template decay<T>(r, c) * s.gates.beta[c] * v : 0.f;
  });
  z.put(s.z, ld, [](int, int, float v) { return v; });
#pragma unroll
  for (int i = 0; i < Accumulator<T, 64>::kCount; ++i) {
    const int r = z.row(i), c = z.col(i);
    s.u.z[r * ld_z + c] = c < r ? z.v[i] * qk.v[i] : 0.f;
  }
  __syncthreads();
  sum_crossing(s.u.z, s.crossing);
}

// Steps 3 to 5 of key_kernel for one slab of K. Returns the thread's part of <S,D> + <M,E>.
template <class T>
__device__ __forceinline__ float key_gradients(const Backward<T>& p, Span span, int64_t chunk,
                                               int h, int slab, Accumulator<T, 64>& dq,
                                               Accumulator<T, 64>& dk, KeyShared<T>& s) {
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  const int width = slab_width(p, slab), rows = (span.rows + 15) & ~15;
  const int64_t state_at = p.state_at(chunk, h) + int64_t(64 * slab) * p.value_dim;
  Accumulator<T, 64> x, y;
  x.clear(), y.clear();
  float carry = 0;
  for (int v0 = 0; v0 < p.value_dim; v0 += kScanColumns) {  // 3
    const int cols = min(kScanColumns, p.value_dim - v0);
    load_value_tiles(p, span, h, v0, s);
    load_tile(s.u.v.state, ld_v, kTileRows, kScanColumns, p.states + state_at + v0, p.value_dim,
              width, cols);
    load_tile(s.u.v.dstate, ld_v, kTileRows, kScanColumns, p.dstates + state_at + v0, p.value_dim,
              width, cols);
    wait_copies();
    __syncthreads();
    carry += add_run<kScanColumns>(p, chunk, h, slab, v0, s.u.v.dstate, s.u.v.state);
    if (p.druns) __syncthreads();
    multiply<Stored::rows, Stored::columns>(x, s.u.v.d_o, ld_v, s.u.v.state, ld_v, kScanColumns);
    multiply<Stored::rows, Stored::columns>(y, s.u.v.v, ld_v, s.u.v.dstate, ld_v, kScanColumns);
    __syncthreads();
  }
  load_queries(p, span, h, slab, s.u.k.q);
  load_keys(p, span, h, slab, s.u.k.k);
  x.each([&](int r, int, float& v) { v *= p.scale * s.gates.gamma[r]; });
  y.each([&](int r, int, float& v) { v *= s.gates.tail[r] * s.gates.beta[r]; });
  wait_copies();
  __syncthreads();
  x.row_sums(s.parts[0],  // 4
             [&](int r, int c, int i) { return to_float(s.u.k.q[r * ld + c]) * x.v[i]; });
  y.row_sums(s.parts[1],
             [&](int r, int c, int i) { return to_float(s.u.k.k[r * ld + c]) * y.v[i]; });
#pragma unroll
  for (int i = 0; i < Accumulator<T, 64>::kCount; ++i) dq.v[i] += x.v[i], dk.v[i] += y.v[i];
  multiply<Stored::rows, Stored::rows>(dq, s.z, ld, s.u.k.k, ld, rows);  // 5
  multiply<Stored::columns, Stored::rows>(dk, s.z, ld, s.u.k.q, ld, rows);
  __syncthreads();
  if (threadIdx.x < kTileRows) {
    const int t = int(threadIdx.x);
    s.reads[t] += s.parts[0][t] + s.parts[0][kTileRows + t];
    s.kept[t] += s.parts[1][t] + s.parts[1][kTileRows + t];
  }
  __syncthreads();
  return carry;
}

// A slab of the sums over the item's heads, as T or as f32 terms. s [64, row_length(64)].
template <class T>
__device__ __forceinline__ void write_key_gradient(const Backward<T>& p, Accumulator<T, 64>& acc,
                                                   T* g, float* g_terms, Span span, int64_t column,
                                                   int64_t columns, int slab, T* s) {
  const int width = slab_width(p, slab);
  if (g) {
    acc.put(s, row_length<T>(64), [](int, int, float v) { return v; });
    __syncthreads();
    store_tile(g + (span.first * columns + column) * p.key_dim + 64 * slab, columns * p.key_dim, s,
               row_length<T>(64), span.rows, width);
  }
  if (g_terms)
    acc.each([&](int r, int c, float v) {
      if (r < span.rows && c < width)
        g_terms[((span.first + r) * columns + column) * p.key_dim + 64 * slab + c] = v;
    });
}

// Item (chunk, group, part of its heads). 1 q kᵀ over slabs of K. Per head: 2 over tiles of V, Z =
// scale (dO vᵀ)∘Γ·w, and what of dg lies inside the chunk; per slab of K, 3 over tiles of V, dO Sᵀ
// and v (D+E)ᵀ; 4 their products with q and k for dg; 5 dq, dk; 6 dg_t = crossing + Σ_{i>=t} reads
// + Σ_{j<t} kept + γ_n (<S,D> + <M,E>). Last: 7 dq and dk of all heads.
template <class T, int SLABS>
__global__ void __launch_bounds__(kTileThreads) key_kernel(Backward<T> p) {
  auto& s = dynamic_shared<KeyShared<T>>();
  constexpr int ld = row_length<T>(64);
  const int64_t columns = int64_t(p.heads) * p.parts;
  const int per_part = p.value_heads / p.heads / p.parts;
  for (int64_t item = blockIdx.x; item < p.chunks * columns; item += gridDim.x) {
    const int first = int(item % columns) * per_part;  // head
    const int64_t chunk = item / columns;
    const Span span = chunk_span(p, chunk);
    if (span.rows == 0) continue;
    Accumulator<T, 64> qk, dq[SLABS], dk[SLABS];
    qk.clear();
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {  // 1
      dq[slab].clear(), dk[slab].clear();
      load_queries(p, span, first, slab, s.u.k.q);
      load_keys(p, span, first, slab, s.u.k.k);
      wait_copies();
      __syncthreads();
      multiply<Stored::rows, Stored::columns>(qk, s.u.k.q, ld, s.u.k.k, ld, 64);
      __syncthreads();
    }
    for (int h = first; h < first + per_part; ++h) {
      GateLoader loader;
      fetch_gates(loader, p, span, h);
      loader.template finish<T>(s.gates);
      if (threadIdx.x < kTileRows) s.reads[threadIdx.x] = s.kept[threadIdx.x] = 0.f;
      __syncthreads();
      score_gradients(p, span, h, qk, s);  // 2
      float carry = 0;
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab)
        if (64 * slab < p.key_dim)
          carry += key_gradients(p, span, chunk, h, slab, dq[slab], dk[slab], s);
      carry = s.gates.total * block_sum(carry, s.scratch);
      const int t = int(threadIdx.x);  // 6
      if (p.dg && t < span.rows) {
        float dg = 0;
        for (int i = span.rows - 1; i >= t; --i) dg += s.reads[i];
        for (int j = 0; j < t; ++j) dg += s.kept[j];
        p.dg[p.gate_at(span.first + t, h)] = dg + s.crossing[t] + carry;
      }
      __syncthreads();
    }
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {  // 7
      write_key_gradient(p, dq[slab], p.dq, p.dq_terms, span, item % columns, columns, slab,
                         s.u.k.q);
      write_key_gradient(p, dk[slab], p.dk, p.dk_terms, span, item % columns, columns, slab,
                         s.u.k.k);
      __syncthreads();
    }
  }
}

// All gradients of the gates as they are, and of everything else.
void backward(const LinearAttentionProblem& problem, const LinearAttentionSaved& saved,
              const Tensor& d_o, const Tensor& dht, const Tensor& dcontributions,
              const LinearAttentionGradients& grads) {
  const DType dtype = problem.v.dtype();
  const Device device = problem.v.device();
  const int64_t h = problem.heads(), groups = problem.groups(), k = problem.key_dim();
  const int64_t v = problem.value_dim(), tokens = problem.batch() * problem.time();
  const Cut cut(problem);
  const bool split_runs = dcontributions && cut.pieces > 1;
  const int parts = parts_of(cut.chunks * groups, h / groups);
  const Tensor dstates = Tensor::empty(saved.states.shape(), dtype, device);
  const Tensor druns = split_runs ? Tensor::empty_like(dstates) : dcontributions;
  const auto terms = [&](const Tensor& grad) {
    return grad && parts > 1 ? Tensor::empty({tokens, groups * parts, k}, DType::f32, device)
                             : Tensor();
  };
  const Tensor dq_terms = terms(grads.dq), dk_terms = terms(grads.dk);
  const Tensor dskip = grads.dskip ? Tensor::empty({cut.chunks, h}, DType::f32, device) : Tensor();
  const Tensor before = run_offsets(problem, cut);
  const cudaStream_t stream = stream_of(dstates);
  visit_compute(dtype, [&]<class Host>() {
    using T = device_t<Host>;
    Backward<T> p{make_attention<Host>(problem, cut, saved, before)};
    p.d_o = ptr<Host>(d_o), p.dht = ptr<float>(dht);
    p.dcontributions = ptr<Host>(dcontributions);
    p.dstates = ptr<Host>(dstates), p.druns = ptr<Host>(druns);
    p.dq = parts == 1 ? ptr<Host>(grads.dq) : nullptr;
    p.dk = parts == 1 ? ptr<Host>(grads.dk) : nullptr;
    p.dv = ptr<Host>(grads.dv);
    p.dq_terms = ptr<float>(dq_terms), p.dk_terms = ptr<float>(dk_terms);
    p.dg = ptr<float>(grads.dg), p.dweight = ptr<float>(grads.dweight);
    p.dh0 = ptr<float>(grads.dh0), p.dskip = ptr<float>(dskip);
    p.parts = parts;
    visit_slabs(k, [&]<int SLABS>() {
      launch_tiles<ReverseShared<T, SLABS>>(
          split_runs ? reverse_kernel<T, SLABS, true> : reverse_kernel<T, SLABS, false>,
          scan_blocks(p.sequences, h, v), stream, p);
      if (p.dv || p.dweight || p.dskip)
        launch_tiles<ValueShared<T>>(value_kernel<T>, p.chunks * h, stream, p);
      if (grads.dq || grads.dk || p.dg)
        launch_tiles<KeyShared<T>>(key_kernel<T, SLABS>, p.chunks * groups * parts, stream, p);
    });
  });
  sum_groups(dq_terms, grads.dq, parts);
  sum_groups(dk_terms, grads.dk, parts);
  if (grads.dskip) sum_chunks(dskip, grads.dskip);
}

// Adds what the gradients of the contributions bring: everything else has none.
void add_gradients_of_runs(LinearAttentionProblem runs, const Tensor& partials,
                           const Tensor& dcontributions, const LinearAttentionGradients& grads) {
  runs.h0 = runs.skip = {};
  const DType dtype = runs.v.dtype();
  const Device device = runs.v.device();
  const auto like = [](const Tensor& t) { return t ? Tensor::empty_like(t) : Tensor(); };
  const LinearAttentionGradients own{.dk = like(grads.dk),
                                     .dv = like(grads.dv),
                                     .dg = like(grads.dg),
                                     .dweight = like(grads.dweight)};
  const Shape states = {Cut(runs).chunks, runs.heads(), runs.key_dim(), runs.value_dim()};
  backward(runs, {Tensor::zeros(states, dtype, device), partials},
           Tensor::zeros(runs.v.shape(), dtype, device), {}, dcontributions, own);
  for (const auto& [to, from] :
       {std::pair{&grads.dk, &own.dk}, std::pair{&grads.dv, &own.dv}, std::pair{&grads.dg, &own.dg},
        std::pair{&grads.dweight, &own.dweight}})
    if (*to) add_into(*to, *from);
}

}  // namespace
}  // namespace ebb::gpu::linear_attention

namespace ebb::gpu {

void gated_linear_attention_bwd(const LinearAttentionProblem& given,
                                const LinearAttentionSaved& saved, const Tensor& d_o,
                                const Tensor& dht, const Tensor& upstream,
                                const LinearAttentionGradients& wanted) {
  using namespace linear_attention;
  if (saved.gates) return fast_attention_bwd(given, saved, d_o, dht, upstream, wanted);
  const Tensor dcontributions = upstream ? upstream.to(given.v.dtype()) : Tensor();
  const LinearAttentionProblem problem = with_gates(given);
  LinearAttentionGradients grads = wanted;
  const bool steps = wanted.ddt || wanted.dA || wanted.dbias;
  if (steps)
    grads.dg = Tensor::empty_like(problem.g), grads.dweight = Tensor::empty_like(problem.g);
  backward(without_apart_runs(problem), saved, d_o, dht,
           runs_apart(given) ? Tensor() : dcontributions, grads);
  if (dcontributions && runs_apart(given))
    add_gradients_of_runs(problem, saved.partials, dcontributions, grads);
  if (steps)
    ssd_gate_bwd(given.gate, grads.dweight, grads.dg, {wanted.ddt, wanted.dA, wanted.dbias});
}

}  // namespace ebb::gpu
