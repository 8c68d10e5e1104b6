// Gated linear attention, backward (gated_linear_attention_bwd.cu): dq, dk and dg of every chunk
// from the states and their gradients, and what its kernels share.
#pragma once
#include "cuda/linear_attention.cuh"

namespace ebb::gpu::linear_attention {

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

}  // namespace ebb::gpu::linear_attention
