// Gated linear attention, backward, in three kernels: 1 the scan from the last chunk to the first,
// which leaves D after each, 2 dv and dw of every chunk, 3 dq, dk and dg of every chunk, summed
// over the heads of a group; then ordered sums of what is left. Notation and formulas of
// ops/gated_linear_attention_cpu_bwd.cpp.
#include "cuda/gated_linear_attention_keys.cuh"
#include "cuda/linear_attention_fast.cuh"
#include "ops/ssd.h"

namespace ebb::gpu::linear_attention {
namespace {

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
