// Gated delta rule, backward, in three kernels: 1 the gradient of V' inside each chunk, 2 the scan
// from the last chunk to the first, 3 the gradients of every chunk; with grouped heads 4, their
// sums. The adjoint form of ops/delta_rule_cpu_bwd.cpp: X = Aᵀ dV', no gradient of the inverse.
// dβ_i is X_i·V'_i/β_i (the diagonal of X V'ᵀ), from V where β_i = 0.
#include "cuda/delta_fast.cuh"
#include "cuda/delta_rule.cuh"
#include "tensor/device_flags.h"

namespace ebb::gpu::delta {
namespace {

template <class T>
struct Backward : Problem<T> {
  const T* d_o = {};               // [tokens,HV,V]
  const float* dht = {};           // [N,HV,K,V] or null
  T *x = {}, *dstates = {};        // X [HV,tokens,V]; D after each chunk [chunks,HV,K,V]
  T *dq = {}, *dk = {}, *dv = {};  // null: not wanted (or, with grouped heads, wanted as f32 terms)
  float *dq_terms = {}, *dk_terms = {};  // [tokens,HV,K]
  float *dg = {}, *dbeta = {}, *dh0 = {};
};

template <class T>
struct LocalShared {
  Gates gates;
  T q[kTileRows * row_length<T>(64)], k[kTileRows * row_length<T>(64)];
  T d_o[kTileRows * row_length<T>(64)];
};

// Item (chunk, head, 64 columns of V). 1 P from QKᵀ over slabs of K. 2 X = Pᵀ dO.
template <class T>
__global__ void __launch_bounds__(kTileThreads) local_kernel(Backward<T> p) {
  auto& s = dynamic_shared<LocalShared<T>>();
  constexpr int ld = row_length<T>(64);
  const int64_t tiles = (p.value_dim + 63) / 64;
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * 64, cols = min(64, p.value_dim - v0);
    const int hv = int(item / tiles % p.value_heads);
    const Span span = span_of(p, item / tiles / p.value_heads);
    if (span.rows == 0) return;
    GateLoader loader;
    loader.fetch(p, span, hv);
    loader.template finish<T>(s.gates);
    load_tile(s.d_o, ld, kTileRows, 64, p.d_o + p.value_at(span.first, hv) + v0, p.value_stride(),
              span.rows, cols);
    Accumulator<T, 64> acc;  // 1
    acc.clear();
    for (int slab = 0; 64 * slab < p.key_dim; ++slab) {
      load_keys(p.q, p, span, hv, slab, s.q);
      load_keys(p.k, p, span, hv, slab, s.k);
      wait_copies();
      __syncthreads();
      multiply<Stored::rows, Stored::columns>(acc, s.q, ld, s.k, ld, 64);
      __syncthreads();
    }
    write_scores(acc, s.gates, p.scale, s.q);
    __syncthreads();
    acc.clear();  // 2
    multiply<Stored::columns, Stored::rows>(acc, s.q, ld, s.d_o, ld, (span.rows + 15) & ~15);
    acc.put(s.k, ld, [](int, int, float v) { return v; });
    __syncthreads();
    store_tile(p.x + p.row_at(span.first, hv) * p.value_dim + v0, p.value_dim, s.k, ld, span.rows,
               cols);
    __syncthreads();
  }
}

template <class T, int SLABS>
struct ReverseStage {
  static constexpr bool kAllSlabs = all_slabs_fit<T, SLABS>(2);
  static constexpr int kHeld = kAllSlabs ? SLABS : 1;
  Gates gates;
  T q[kHeld][kTileRows * row_length<T>(64)], k[kHeld][kTileRows * row_length<T>(64)];
  T a[kTileRows * row_length<T>(64)];
  T d_o[kTileRows * row_length<T>(kScanColumns)];  // dO, then scale·γ dO
  T x[kTileRows * row_length<T>(kScanColumns)];    // Pᵀ dO, then dV', then −γ β X
};
template <class T, int SLABS>
struct ReverseShared {
  static constexpr int kTile = kTileRows * row_length<T>(kScanColumns);
  static constexpr int kStages = stages_beside<ReverseStage<T, SLABS>>(2 * kTile * sizeof(T));
  ReverseStage<T, SLABS> stage[kStages];
  T state[kTile];  // a slab of D
  T x[kTile];      // X
};

template <class T, int SLABS>
__device__ void load_stage(const Backward<T>& p, Span span, int hv, int v0,
                           ReverseStage<T, SLABS>& s) {
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  const int cols = min(kScanColumns, p.value_dim - v0);
  if constexpr (ReverseStage<T, SLABS>::kAllSlabs)
    for (int slab = 0; slab < SLABS; ++slab) {
      load_keys(p.q, p, span, hv, slab, s.q[slab]);
      load_keys(p.k, p, span, hv, slab, s.k[slab]);
    }
  load_tile(s.a, ld, kTileRows, 64, p.a + p.row_at(span.first, hv) * p.chunk, p.chunk, span.rows,
            p.chunk);
  load_tile(s.d_o, ld_v, kTileRows, kScanColumns, p.d_o + p.value_at(span.first, hv) + v0,
            p.value_stride(), span.rows, cols);
  load_tile(s.x, ld_v, kTileRows, kScanColumns, p.x + p.row_at(span.first, hv) * p.value_dim + v0,
            p.value_dim, span.rows, cols);
}

// Item (sequence, head, 32 columns of V), D in registers as S in the forward scan. Per chunk, from
// the last: 1 store D. 2 dV' = Pᵀ dO + τ K D. 3 X = Aᵀ dV', stored. 4 D = γ_n D + Qᵀ (scale γ dO)
// − Kᵀ (γ β X). At the end: 5 dh0.
template <class T, int SLABS>
__global__ void __launch_bounds__(kTileThreads) reverse_kernel(Backward<T> p) {
  using Shared = ReverseShared<T, SLABS>;
  using Stage = ReverseStage<T, SLABS>;
  auto& s = dynamic_shared<Shared>();
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  for (int64_t item = blockIdx.x; item < ScanShare::count(p); item += gridDim.x) {
    const ScanShare at(p, item);
    const int v0 = at.v0, cols = at.cols, hv = at.head;
    const int64_t n = at.n;
    const ChunkWalk walk(p, n);
    Accumulator<T, kScanColumns> state[SLABS];
    read_state(state, p.dht, n * p.value_heads + hv, v0, p);
    const auto fetch = [&](GateLoader& loader, int64_t i) { loader.fetch(p, walk.span(p, i), hv); };
    const auto load = [&](Stage& stage, int64_t i) {
      load_stage<T, SLABS>(p, walk.span(p, i), hv, v0, stage);
    };
    walk_chunks<T, Order::reverse>(s, walk.count, nullptr, fetch, load, [&](Stage& now, int64_t i) {
      const Span span = walk.span(p, i);
      const int rows = (span.rows + 15) & ~15;
      Accumulator<T, kScanColumns> acc;  // 1, 2
      acc.clear();
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        if (!Stage::kAllSlabs) load_keys(p.k, p, span, hv, slab, now.k[0]);
        state[slab].put(s.state, ld_v, [](int, int, float v) { return v; });
        if (!Stage::kAllSlabs) wait_copies();
        __syncthreads();
        store_state(p.dstates + p.state_at(walk.first + i, hv), p, slab, v0, cols, s.state);
        multiply<Stored::rows, Stored::rows>(acc, now.k[Stage::kAllSlabs ? slab : 0], ld, s.state,
                                             ld_v, 64);
        __syncthreads();
      }
      acc.put(now.x, ld_v, [&](int r, int c, float kd) {
        return to_float(now.x[r * ld_v + c]) + now.gates.tail[r] * kd;
      });
      acc.put(now.d_o, ld_v, [&](int r, int c, float) {
        return p.scale * now.gates.gamma[r] * to_float(now.d_o[r * ld_v + c]);
      });
      __syncthreads();

      acc.clear();  // 3
      multiply<Stored::columns, Stored::rows>(acc, now.a, ld, now.x, ld_v, rows);
      __syncthreads();
      acc.put(s.x, ld_v, [](int, int, float v) { return v; });
      acc.put(now.x, ld_v,
              [&](int r, int, float v) { return -now.gates.gamma[r] * now.gates.beta[r] * v; });
      if (!Stage::kAllSlabs) {
        load_keys(p.q, p, span, hv, 0, now.q[0]);
        load_keys(p.k, p, span, hv, 0, now.k[0]);
        wait_copies();
      }
      __syncthreads();
      store_tile(p.x + p.row_at(span.first, hv) * p.value_dim + v0, p.value_dim, s.x, ld_v,
                 span.rows, cols);

#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {  // 4
        const int held = Stage::kAllSlabs ? slab : 0;
        if (!Stage::kAllSlabs && slab > 0) {
          __syncthreads();
          load_keys(p.q, p, span, hv, slab, now.q[0]);
          load_keys(p.k, p, span, hv, slab, now.k[0]);
          wait_copies();
          __syncthreads();
        }
        state[slab].each([&](int, int, float& v) { v *= now.gates.total; });
        multiply<Stored::columns, Stored::rows>(state[slab], now.q[held], ld, now.d_o, ld_v, rows);
        multiply<Stored::columns, Stored::rows>(state[slab], now.k[held], ld, now.x, ld_v, rows);
      }
    });
    if (p.dh0) write_state(p.dh0, state, n * p.value_heads + hv, v0, p);  // 5
    __syncthreads();
  }
}

template <class T>
struct GradientShared {
  static constexpr int kNarrow = kTileRows * row_length<T>(kScanColumns);
  static constexpr int kFull = kTileRows * row_length<T>(64);
  Gates gates;
  T dp[kFull];  // scale·dP∘Γ
  T dm[kFull];  // β dM∘Γ
  union {       // one after the other
    struct {
      T d_o[kNarrow], x[kNarrow], values[kNarrow], state[kNarrow], dstate[kNarrow];
    } v;  // 32 columns of V
    struct {
      T q[kFull], k[kFull];
    } k;                                         // a slab of K
    float z[kTileRows * row_length<float>(64)];  // dP∘P + dM∘M
  };
  float parts[3][2 * kTileRows];  // row sums
  float reads[kTileRows], kept[kTileRows], key_p[kTileRows], crossing[kTileRows];
  float diagonal[kTileRows];  // X_i·V'_i
  float scratch[32];
};

// Tiles of 32 columns of V: dO, X, V'.
template <class T>
__device__ __forceinline__ void load_value_tiles(const Backward<T>& p, Span span, int hv, int v0,
                                                 GradientShared<T>& s) {
  constexpr int ld_v = row_length<T>(kScanColumns);
  const int cols = min(kScanColumns, p.value_dim - v0);
  const int64_t at = p.row_at(span.first, hv) * p.value_dim + v0;
  load_tile(s.v.d_o, ld_v, kTileRows, kScanColumns, p.d_o + p.value_at(span.first, hv) + v0,
            p.value_stride(), span.rows, cols);
  load_tile(s.v.x, ld_v, kTileRows, kScanColumns, p.x + at, p.value_dim, span.rows, cols);
  load_tile(s.v.values, ld_v, kTileRows, kScanColumns, p.values + at, p.value_dim, span.rows, cols);
}

// Steps 1 to 3 of gradient_kernel: s.dp, s.dm, s.crossing, s.diagonal, the part of s.key_p inside
// the chunk; dv.
template <class T>
__device__ void score_gradients(const Backward<T>& p, Span span, int hv, GradientShared<T>& s) {
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  constexpr int ld_z = row_length<float>(64);
  Accumulator<T, 64> dp, dm, qk, kk;
  dp.clear(), dm.clear(), qk.clear(), kk.clear();
  for (int v0 = 0; v0 < p.value_dim; v0 += kScanColumns) {  // 1
    load_value_tiles(p, span, hv, v0, s);
    wait_copies();
    __syncthreads();
    multiply<Stored::rows, Stored::columns>(dp, s.v.d_o, ld_v, s.v.values, ld_v, kScanColumns);
    multiply<Stored::rows, Stored::columns>(dm, s.v.x, ld_v, s.v.values, ld_v, kScanColumns);
    if (p.dv)
      for (int i = int(threadIdx.x); i < span.rows * kScanColumns; i += kTileThreads) {
        const int r = i / kScanColumns, c = i % kScanColumns;
        if (v0 + c < p.value_dim)
          p.dv[p.value_at(span.first + r, hv) + v0 + c] =
              from_float<T>(s.gates.beta[r] * to_float(s.v.x[r * ld_v + c]));
      }
    __syncthreads();
  }
  for (int slab = 0; 64 * slab < p.key_dim; ++slab) {  // 2
    load_keys(p.q, p, span, hv, slab, s.k.q);
    load_keys(p.k, p, span, hv, slab, s.k.k);
    wait_copies();
    __syncthreads();
    multiply<Stored::rows, Stored::columns>(qk, s.k.q, ld, s.k.k, ld, 64);
    multiply<Stored::rows, Stored::columns>(kk, s.k.k, ld, s.k.k, ld, 64);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < Accumulator<T, 64>::kCount; ++i) {  // 3
    const int r = dp.row(i), c = dp.col(i);
    if (r == c) s.diagonal[r] = dm.v[i];
    const float decay = c <= r ? s.gates.template decay<T>(r, c) : 0.f;
    const float scores = c <= r ? p.scale * decay * dp.v[i] : 0.f;
    const float inner = c < r ? -decay * dm.v[i] : 0.f, beta = s.gates.beta[r];
    dp.v[i] = scores;
    dm.v[i] = beta * inner;
    qk.v[i] = c < r ? scores * qk.v[i] + beta * inner * kk.v[i] : 0.f;
    kk.v[i] *= inner;
  }
  dp.put(s.dp, ld, [](int, int, float v) { return v; });
  dm.put(s.dm, ld, [](int, int, float v) { return v; });
  qk.each([&](int r, int c, float v) { s.z[r * ld_z + c] = v; });
  kk.row_sums(s.parts[0], [&](int, int, int i) { return kk.v[i]; });
  __syncthreads();
  if (threadIdx.x < kTileRows) {
    const int t = int(threadIdx.x);
    s.key_p[t] = s.parts[0][t] + s.parts[0][kTileRows + t];
    s.reads[t] = s.kept[t] = 0.f;
  }
  sum_crossing(s.z, s.crossing);
}

// Writes a slab of dq or dk: from s in T, or, with grouped heads, the f32 sums themselves.
template <class T>
__device__ __forceinline__ void write_key_gradient(const Backward<T>& p, Accumulator<T, 64>& acc,
                                                   T* g, float* g_terms, Span span, int hv,
                                                   int slab, const T* s) {
  const int width = slab_width(p, slab);
  if (g)
    store_tile(g + p.key_at(span.first, hv) + 64 * slab, p.key_stride(), s, row_length<T>(64),
               span.rows, width);
  if (g_terms)
    acc.each([&](int r, int c, float v) {
      if (r < span.rows && c < width)
        g_terms[((span.first + r) * p.value_heads + hv) * p.key_dim + 64 * slab + c] = v;
    });
}

// Steps 4 to 6 of gradient_kernel for one slab of K. Returns the thread's part of <S, D>.
template <class T>
__device__ float key_gradients(const Backward<T>& p, Span span, int64_t chunk, int hv, int slab,
                               GradientShared<T>& s) {
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  const int width = slab_width(p, slab), rows = (span.rows + 15) & ~15;
  const int64_t state_at = p.state_at(chunk, hv) + int64_t(64 * slab) * p.value_dim;
  Accumulator<T, 64> dq, dp, dk;
  dq.clear(), dp.clear(), dk.clear();
  float carry = 0;
  for (int v0 = 0; v0 < p.value_dim; v0 += kScanColumns) {  // 4
    const int cols = min(kScanColumns, p.value_dim - v0);
    load_value_tiles(p, span, hv, v0, s);
    load_tile(s.v.state, ld_v, kTileRows, kScanColumns, p.states + state_at + v0, p.value_dim,
              width, cols);
    load_tile(s.v.dstate, ld_v, kTileRows, kScanColumns, p.dstates + state_at + v0, p.value_dim,
              width, cols);
    wait_copies();
    __syncthreads();
    multiply<Stored::rows, Stored::columns>(dq, s.v.d_o, ld_v, s.v.state, ld_v, kScanColumns);
    multiply<Stored::rows, Stored::columns>(dp, s.v.x, ld_v, s.v.state, ld_v, kScanColumns);
    multiply<Stored::rows, Stored::columns>(dk, s.v.values, ld_v, s.v.dstate, ld_v, kScanColumns);
    for (int i = int(threadIdx.x); i < kTileRows * kScanColumns; i += kTileThreads) {
      const int at = i / kScanColumns * ld_v + i % kScanColumns;
      carry += to_float(s.v.state[at]) * to_float(s.v.dstate[at]);
    }
    __syncthreads();
  }
  load_keys(p.q, p, span, hv, slab, s.k.q);
  load_keys(p.k, p, span, hv, slab, s.k.k);
  dq.each([&](int r, int, float& v) { v *= p.scale * s.gates.gamma[r]; });
  dp.each([&](int r, int, float& v) { v *= -s.gates.gamma[r]; });
  dk.each([&](int r, int, float& v) { v *= s.gates.tail[r]; });
  wait_copies();
  __syncthreads();
  const auto key = [&](int r, int c) { return to_float(s.k.k[r * ld + c]); };  // 5
  dq.row_sums(s.parts[0],
              [&](int r, int c, int i) { return to_float(s.k.q[r * ld + c]) * dq.v[i]; });
  dp.row_sums(s.parts[1], [&](int r, int c, int i) { return key(r, c) * dp.v[i]; });
  dk.row_sums(s.parts[2], [&](int r, int c, int i) { return key(r, c) * dk.v[i]; });
  __syncthreads();
  if (threadIdx.x < kTileRows) {
    const int t = int(threadIdx.x);
    const float key_p = s.parts[1][t] + s.parts[1][kTileRows + t];
    s.reads[t] += s.parts[0][t] + s.parts[0][kTileRows + t] + s.gates.beta[t] * key_p;
    s.key_p[t] += key_p;
    s.kept[t] += s.parts[2][t] + s.parts[2][kTileRows + t];
  }
#pragma unroll
  for (int i = 0; i < Accumulator<T, 64>::kCount; ++i)  // 6
    dk.v[i] += s.gates.beta[dk.row(i)] * dp.v[i];
  if (p.dq || p.dq_terms) multiply<Stored::rows, Stored::rows>(dq, s.dp, ld, s.k.k, ld, rows);
  if (p.dk || p.dk_terms) {
    multiply<Stored::rows, Stored::rows>(dk, s.dm, ld, s.k.k, ld, rows);
    multiply<Stored::columns, Stored::rows>(dk, s.dp, ld, s.k.q, ld, rows);
    multiply<Stored::columns, Stored::rows>(dk, s.dm, ld, s.k.k, ld, rows);
  }
  __syncthreads();
  dq.put(s.k.q, ld, [](int, int, float v) { return v; });
  dk.put(s.k.k, ld, [](int, int, float v) { return v; });
  __syncthreads();
  write_key_gradient(p, dq, p.dq, p.dq_terms, span, hv, slab, s.k.q);
  write_key_gradient(p, dk, p.dk, p.dk_terms, span, hv, slab, s.k.k);
  __syncthreads();
  return carry;
}

// Item (chunk, head). Over tiles of V: 1 dP = dO V'ᵀ, dM = −X V'ᵀ; dv = β X. Over slabs of K: 2
// QKᵀ, KKᵀ. 3 both score gradients with their decays, and what of dg lies inside the chunk. Then
// per slab of K, 4 over tiles of V: S dO, S X, D V'; 5 their products with q and k for dg; 6 dq,
// dk. Last: 7 dg_t = crossing + Σ_{i>=t} reads + Σ_{j<t} kept + γ_n <S, D>; dβ.
template <class T>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 2 ? 2 : 1)
    gradient_kernel(Backward<T> p) {
  auto& s = dynamic_shared<GradientShared<T>>();
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads; item += gridDim.x) {
    const int hv = int(item % p.value_heads);
    const int64_t chunk = item / p.value_heads;
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    GateLoader loader;
    loader.fetch(p, span, hv);
    loader.template finish<T>(s.gates);
    __syncthreads();
    score_gradients(p, span, hv, s);
    float carry = 0;
    for (int slab = 0; 64 * slab < p.key_dim; ++slab)
      carry += key_gradients(p, span, chunk, hv, slab, s);
    carry = s.gates.total * block_sum(carry, s.scratch);
    const int t = int(threadIdx.x);  // 7
    if (t < span.rows) {
      const int64_t at = (span.first + t) * p.value_heads + hv;
      float dg = 0;
      for (int i = span.rows - 1; i >= t; --i) dg += s.reads[i];
      for (int j = 0; j < t; ++j) dg += s.kept[j];
      if (p.dg) p.dg[at] = dg + s.crossing[t] + carry;
      if (p.dbeta) {
        const float beta = s.gates.beta[t];
        float sum = s.key_p[t];
        if (beta == 0.f)
          for (int j = 0; j < p.value_dim; ++j)
            sum += to_float(p.v[p.value_at(span.first + t, hv) + j]) *
                   to_float(p.x[p.row_at(span.first + t, hv) * p.value_dim + j]);
        p.dbeta[at] = beta == 0.f ? sum : s.diagonal[t] / beta;
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace ebb::gpu::delta

namespace ebb::gpu {

void gated_delta_rule_bwd(const DeltaRuleProblem& problem, const DeltaRuleSaved& saved,
                          const Tensor& d_o, const Tensor& dht, const DeltaRuleGradients& grads) {
  using namespace delta;
  if (saved.gates) return fast_bwd(problem, saved, d_o, dht, grads);
  const DType dtype = problem.v.dtype();
  const Device device = problem.v.device();
  const int64_t hv = problem.value_heads(), k = problem.key_dim(), v = problem.value_dim();
  const int group = int(hv / problem.heads());
  const Tensor x = Tensor::empty(saved.values.shape(), dtype, device);
  const Tensor dstates = Tensor::empty(saved.states.shape(), dtype, device);
  const Tensor dq_terms = group_terms(problem, grads.dq), dk_terms = group_terms(problem, grads.dk);
  const Tensor before = chunk_offsets(problem);
  const cudaStream_t stream = stream_of(x);
  visit_compute(dtype, [&]<class Host>() {
    using T = device_t<Host>;
    Backward<T> p{make_problem<Host>(problem, saved, before)};
    p.d_o = ptr<Host>(d_o), p.dht = ptr<float>(dht);
    p.x = ptr<Host>(x), p.dstates = ptr<Host>(dstates);
    p.dq = group == 1 ? ptr<Host>(grads.dq) : nullptr;
    p.dk = group == 1 ? ptr<Host>(grads.dk) : nullptr;
    p.dv = ptr<Host>(grads.dv);
    p.dq_terms = ptr<float>(dq_terms), p.dk_terms = ptr<float>(dk_terms);
    p.dg = ptr<float>(grads.dg), p.dbeta = ptr<float>(grads.dbeta), p.dh0 = ptr<float>(grads.dh0);
    launch_tiles<LocalShared<T>>(local_kernel<T>, p.chunks * hv * ceil_div(v, 64), stream, p);
    visit_slabs(k, [&]<int SLABS>() {
      launch_tiles<ReverseShared<T, SLABS>>(reverse_kernel<T, SLABS>,
                                            scan_blocks(p.sequences, hv, v), stream, p);
    });
    launch_tiles<GradientShared<T>>(gradient_kernel<T>, p.chunks * hv, stream, p);
  });
  sum_groups(dq_terms, grads.dq, group);
  sum_groups(dk_terms, grads.dk, group);
}

}  // namespace ebb::gpu
