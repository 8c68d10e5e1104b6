// Gated delta rule, forward, in three kernels: 1 the inverse of every chunk, 2 the scan over
// chunks, 3 the read-out of every chunk (ops/delta_rule.h; Yang et al. 2024, gated WY form). Blocks
// of 256 threads; each loops over its items, should there be more than the grid can hold.
#include "cuda/delta_fast.cuh"
#include "cuda/delta_inverse.cuh"
#include "cuda/delta_rule.cuh"
#include "tensor/device_flags.h"

namespace ebb::gpu::delta {
namespace {

template <class T>
struct InverseShared {
  Gates gates;
  T k[kTileRows * row_length<T>(64)];          // one slab of K
  float m[kTileRows * row_length<float>(64)];  // M, below the diagonal
  float a[kTileRows * row_length<float>(64)];  // A
  float product[32 * 33];
};

// Item (chunk, head). 1 gates; flag a positive decay. 2 K Kᵀ over slabs of K. 3 M = stril(β KKᵀ∘Γ).
// 4 A = (I+M)⁻¹. 5 store.
template <class T>
__global__ void __launch_bounds__(kTileThreads) inverse_kernel(Problem<T> p) {
  auto& s = dynamic_shared<InverseShared<T>>();
  constexpr int ld = row_length<T>(64), ld_f = row_length<float>(64);
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads; item += gridDim.x) {
    const int hv = int(item % p.value_heads);
    const Span span = span_of(p, item / p.value_heads);
    if (span.rows == 0) return;
    GateLoader loader;  // 1
    loader.fetch(p, span, hv);
    if (threadIdx.x < 32 && (loader.g[0] > 0.f || loader.g[1] > 0.f)) *p.positive_decay = 1;
    loader.finish<T>(s.gates);
    Accumulator<T, 64> kk;  // 2
    kk.clear();
    for (int slab = 0; 64 * slab < p.key_dim; ++slab) {
      load_keys(p.k, p, span, hv, slab, s.k);
      wait_copies();
      __syncthreads();
      multiply<Stored::rows, Stored::columns>(kk, s.k, ld, s.k, ld, 64);
      __syncthreads();
    }
    kk.each([&](int r, int c, float v) {  // 3
      s.m[r * ld_f + c] =
          c < r && r < span.rows ? s.gates.beta[r] * s.gates.template decay<T>(r, c) * v : 0.f;
    });
    __syncthreads();
    invert(s.m, s.a, s.product);                        // 4
    T* g_a = p.a + p.row_at(span.first, hv) * p.chunk;  // 5
    for (int i = int(threadIdx.x); i < span.rows * p.chunk; i += kTileThreads)
      g_a[i] = from_float<T>(s.a[i / p.chunk * ld_f + i % p.chunk]);
    __syncthreads();
  }
}

// What one chunk of a scan reads.
template <class T, int SLABS>
struct ScanStage {
  static constexpr bool kAllSlabs = all_slabs_fit<T, SLABS>(1);  // else K is read slab by slab
  Gates gates;
  T k[kAllSlabs ? SLABS : 1][kTileRows * row_length<T>(64)];
  T a[kTileRows * row_length<T>(64)];
  T v[kTileRows * row_length<T>(kScanColumns)];  // V, then Y, then τV'
};
template <class T, int SLABS>
struct ScanShared {
  static constexpr int kTile = kTileRows * row_length<T>(kScanColumns);
  static constexpr int kStages = stages_beside<ScanStage<T, SLABS>>(2 * kTile * sizeof(T));
  ScanStage<T, SLABS> stage[kStages];
  T state[kTile];   // a slab of S
  T values[kTile];  // V'
};

template <class T, int SLABS>
__device__ void load_stage(const Problem<T>& p, Span span, int hv, int v0, ScanStage<T, SLABS>& s) {
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  if constexpr (ScanStage<T, SLABS>::kAllSlabs)
    for (int slab = 0; slab < SLABS; ++slab) load_keys(p.k, p, span, hv, slab, s.k[slab]);
  load_tile(s.a, ld, kTileRows, 64, p.a + p.row_at(span.first, hv) * p.chunk, p.chunk, span.rows,
            p.chunk);
  load_tile(s.v, ld_v, kTileRows, kScanColumns, p.v + p.value_at(span.first, hv) + v0,
            p.value_stride(), span.rows, min(kScanColumns, p.value_dim - v0));
}

// Item (sequence, head, 32 columns of V). The state is held in registers, [64·SLABS,32] f32. Per
// chunk: 1 store S. 2 Y = β (V − γ K S). 3 V' = A Y, stored. 4 S = γ_n S + Kᵀ (τ V'). The next
// chunk's tiles are on their way meanwhile, where two stages fit. At the end: 5 ht.
template <class T, int SLABS>
__global__ void __launch_bounds__(kTileThreads) scan_kernel(Problem<T> p, float* ht) {
  using Shared = ScanShared<T, SLABS>;
  using Stage = ScanStage<T, SLABS>;
  auto& s = dynamic_shared<Shared>();
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  for (int64_t item = blockIdx.x; item < ScanShare::count(p); item += gridDim.x) {
    const ScanShare at(p, item);
    const int v0 = at.v0, cols = at.cols, hv = at.head;
    const int64_t n = at.n;
    const ChunkWalk walk(p, n);
    Accumulator<T, kScanColumns> state[SLABS];
    read_state(state, p.h0, n * p.value_heads + hv, v0, p);
    const auto fetch = [&](GateLoader& loader, int64_t i) { loader.fetch(p, walk.span(p, i), hv); };
    const auto load = [&](Stage& stage, int64_t i) {
      load_stage<T, SLABS>(p, walk.span(p, i), hv, v0, stage);
    };
    walk_chunks<T, Order::forward>(s, walk.count, nullptr, fetch, load, [&](Stage& now, int64_t i) {
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
        store_state(p.states + p.state_at(walk.first + i, hv), p, slab, v0, cols, s.state);
        multiply<Stored::rows, Stored::rows>(acc, now.k[Stage::kAllSlabs ? slab : 0], ld, s.state,
                                             ld_v, 64);
        __syncthreads();
      }
      acc.put(now.v, ld_v, [&](int r, int c, float kv) {
        return now.gates.beta[r] * (to_float(now.v[r * ld_v + c]) - now.gates.gamma[r] * kv);
      });
      __syncthreads();

      acc.clear();  // 3
      multiply<Stored::rows, Stored::rows>(acc, now.a, ld, now.v, ld_v, rows);
      __syncthreads();
      acc.put(s.values, ld_v, [](int, int, float v) { return v; });
      acc.put(now.v, ld_v, [&](int r, int, float v) { return now.gates.tail[r] * v; });
      if (!Stage::kAllSlabs) {
        load_keys(p.k, p, span, hv, 0, now.k[0]);
        wait_copies();
      }
      __syncthreads();
      store_tile(p.values + p.row_at(span.first, hv) * p.value_dim + v0, p.value_dim, s.values,
                 ld_v, span.rows, cols);

#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {  // 4
        if (!Stage::kAllSlabs && slab > 0) {
          __syncthreads();
          load_keys(p.k, p, span, hv, slab, now.k[0]);
          wait_copies();
          __syncthreads();
        }
        state[slab].each([&](int, int, float& v) { v *= now.gates.total; });
        multiply<Stored::columns, Stored::rows>(state[slab], now.k[Stage::kAllSlabs ? slab : 0], ld,
                                                now.v, ld_v, rows);
      }
    });
    if (ht) write_state(ht, state, n * p.value_heads + hv, v0, p);  // 5
    __syncthreads();
  }
}

template <class T>
struct ReadShared {
  Gates gates;
  T q[kTileRows * row_length<T>(64)], k[kTileRows * row_length<T>(64)];
  T s[kTileRows * row_length<T>(64)];  // a slab of S; V'; o
};

// Item (chunk, head, 64 columns of V). Over slabs of K: 1 QKᵀ and Q S. 2 P. 3 o = scale γ Q S + P
// V'.
template <class T>
__global__ void __launch_bounds__(kTileThreads) read_kernel(Problem<T> p, T* o) {
  auto& s = dynamic_shared<ReadShared<T>>();
  constexpr int ld = row_length<T>(64);
  const int64_t tiles = (p.value_dim + 63) / 64;
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * 64, cols = min(64, p.value_dim - v0);
    const int hv = int(item / tiles % p.value_heads);
    const int64_t chunk = item / tiles / p.value_heads;
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    GateLoader loader;
    loader.fetch(p, span, hv);
    loader.finish<T>(s.gates);
    Accumulator<T, 64> scores, out;
    scores.clear();
    out.clear();
    for (int slab = 0; 64 * slab < p.key_dim; ++slab) {  // 1
      load_keys(p.q, p, span, hv, slab, s.q);
      load_keys(p.k, p, span, hv, slab, s.k);
      load_tile(s.s, ld, 64, 64,
                p.states + p.state_at(chunk, hv) + int64_t(64 * slab) * p.value_dim + v0,
                p.value_dim, slab_width(p, slab), cols);
      wait_copies();
      __syncthreads();
      multiply<Stored::rows, Stored::columns>(scores, s.q, ld, s.k, ld, 64);
      multiply<Stored::rows, Stored::rows>(out, s.q, ld, s.s, ld, 64);
      __syncthreads();
    }
    load_tile(s.s, ld, kTileRows, 64, p.values + p.row_at(span.first, hv) * p.value_dim + v0,
              p.value_dim, span.rows, cols);
    write_scores(scores, s.gates, p.scale, s.q);  // 2
    out.each([&](int r, int, float& v) { v *= p.scale * s.gates.gamma[r]; });
    wait_copies();
    __syncthreads();
    multiply<Stored::rows, Stored::rows>(out, s.q, ld, s.s, ld, (span.rows + 15) & ~15);  // 3
    out.put(s.k, ld, [](int, int, float v) { return v; });
    __syncthreads();
    store_tile(o + p.value_at(span.first, hv) + v0, p.value_stride(), s.k, ld, span.rows, cols);
    __syncthreads();
  }
}

}  // namespace
}  // namespace ebb::gpu::delta

namespace ebb::gpu {

bool gated_delta_rule_fuses(const DeltaRuleProblem& problem) {
  return problem.key_dim() <= 128 && delta::fast_sizes(problem);
}

DeltaRuleSaved gated_delta_rule_fwd(const DeltaRuleProblem& problem, const Tensor& o,
                                    const Tensor& ht) {
  using namespace delta;
  if (fast_path(problem)) return fast_fwd(problem, o, ht);
  const DType dtype = problem.v.dtype();
  const Device device = problem.v.device();
  const int64_t hv = problem.value_heads(), tokens = problem.batch() * problem.time();
  const int64_t k = problem.key_dim(), v = problem.value_dim(), c = chunk_of(problem);
  const int64_t chunks = problem.layout.chunk_count(problem.batch(), problem.time(), c);
  const DeltaRuleSaved saved{Tensor::empty({hv, tokens, c}, dtype, device),
                             Tensor::empty({chunks, hv, k, v}, dtype, device),
                             Tensor::empty({hv, tokens, v}, dtype, device)};
  const Tensor before = chunk_offsets(problem);
  const cudaStream_t stream = stream_of(o);
  visit_compute(dtype, [&]<class Host>() {
    using T = device_t<Host>;
    const Problem<T> p = make_problem<Host>(problem, saved, before);
    launch_tiles<InverseShared<T>>(inverse_kernel<T>, chunks * hv, stream, p);
    visit_slabs(k, [&]<int SLABS>() {
      launch_tiles<ScanShared<T, SLABS>>(scan_kernel<T, SLABS>, scan_blocks(p.sequences, hv, v),
                                         stream, p, ptr<float>(ht));
    });
    launch_tiles<ReadShared<T>>(read_kernel<T>, chunks * hv * ceil_div(v, 64), stream, p,
                                ptr<Host>(o));
  });
  return saved;
}

}  // namespace ebb::gpu
