// Gated linear attention, forward, in two kernels: 1 the scan over chunks, which leaves the state
// before each, 2 the read-out of every chunk (ops/gated_linear_attention.h; models.md 4.1). Blocks
// of 256 threads; each loops over its items, should there be more than the grid can hold.
#include "cuda/linear_attention_fast.cuh"

namespace ebb::gpu::linear_attention {
namespace {

// What one chunk of a scan reads.
template <class T, int SLABS>
struct WriteStage {
  static constexpr bool kAllSlabs = all_slabs_fit<T, SLABS>(1);  // else K is read slab by slab
  Gates gates;
  T k[kAllSlabs ? SLABS : 1][kTileRows * row_length<T>(64)];
  T v[kTileRows * row_length<T>(kScanColumns)];  // v, then τ w v
};
template <class T, int SLABS>
struct WriteShared {
  static constexpr int kTile = kTileRows * row_length<T>(kScanColumns);
  static constexpr int kStages = stages_beside<WriteStage<T, SLABS>>(SLABS * kTile * sizeof(T));
  WriteStage<T, SLABS> stage[kStages];
  T state[SLABS][kTile];
};

template <class T, int SLABS>
__device__ void load_stage(const Attention<T>& p, Span span, int h, int v0,
                           WriteStage<T, SLABS>& s) {
  if constexpr (WriteStage<T, SLABS>::kAllSlabs)
    for (int slab = 0; slab < SLABS; ++slab) load_keys(p, span, h, slab, s.k[slab]);
  load_tile(s.v, row_length<T>(kScanColumns), kTileRows, kScanColumns, p.v_row(span.first, h) + v0,
            p.v_step, span.rows, min(kScanColumns, p.value_dim - v0));
}

// Item (sequence, head, 32 columns of V). The state is held in registers, [64·SLABS,32] f32, and
// with MEMORY what the current run has written, M. Per chunk: 1 store S. 2 v ← τ w v. 3 S = γ_n S +
// kᵀ v, M likewise; at the end of a run it is a contribution. The next chunk's tiles are on their
// way meanwhile, where two stages fit. At the end: 4 ht.
template <class T, int SLABS, bool MEMORY>
__global__ void __launch_bounds__(kTileThreads)
    write_kernel(Attention<T> p, float* ht, T* contributions, float* wide_contributions) {
  using Shared = WriteShared<T, SLABS>;
  using Stage = WriteStage<T, SLABS>;
  auto& s = dynamic_shared<Shared>();
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  for (int64_t item = blockIdx.x; item < ScanShare::count(p); item += gridDim.x) {
    const ScanShare at(p, item);
    const int v0 = at.v0, cols = at.cols, h = at.head;
    const int64_t n = at.n;
    const PieceWalk walk(p, n);
    Accumulator<T, kScanColumns> state[SLABS], run[MEMORY ? SLABS : 1];
    read_state(state, p.h0, n * p.value_heads + h, v0, p);
    const auto fetch = [&](GateLoader& loader, int64_t i) {
      fetch_gates(loader, p, walk.span(p, i), h);
    };
    const auto load = [&](Stage& stage, int64_t i) {
      load_stage<T, SLABS>(p, walk.span(p, i), h, v0, stage);
    };
    walk_chunks<T, Order::forward>(
        s, walk.count, p.positive_decay, fetch, load, [&](Stage& now, int64_t i) {
          const Span span = walk.span(p, i);
          const int rows = (span.rows + 15) & ~15;
#pragma unroll
          for (int slab = 0; slab < SLABS; ++slab)  // 1
            state[slab].put(s.state[slab], ld_v, [](int, int, float v) { return v; });
          for (int at = int(threadIdx.x); at < kTileRows * kScanColumns; at += kTileThreads) {  // 2
            const int r = at / kScanColumns;
            T& v = now.v[r * ld_v + at % kScanColumns];
            v = from_float<T>(to_float(v) * now.gates.tail[r] * now.gates.beta[r]);
          }
          if (!Stage::kAllSlabs) {
            load_keys(p, span, h, 0, now.k[0]);
            wait_copies();
          }
          __syncthreads();
#pragma unroll
          for (int slab = 0; slab < SLABS; ++slab)
            store_state(p.states + p.state_at(walk.first + i, h), p, slab, v0, cols, s.state[slab]);
          if (MEMORY) {
            const int piece = int(i % p.pieces);
            if (piece == 0)
#pragma unroll
              for (auto& m : run) m.clear();
            if (p.partials)
              each_state(run, v0, p,
                         [&, to = p.partials + p.state_at(walk.first + i, h)](int64_t at, float v) {
                           to[at] = from_float<T>(v);
                         });
          }

#pragma unroll
          for (int slab = 0; slab < SLABS; ++slab) {  // 3
            if (!Stage::kAllSlabs && slab > 0) {
              __syncthreads();
              load_keys(p, span, h, slab, now.k[0]);
              wait_copies();
              __syncthreads();
            }
            const T* k = now.k[Stage::kAllSlabs ? slab : 0];
            const float total = now.gates.total;
            // One way of adding, with and without runs: the state does not depend on them.
            state[slab].each([&](int, int, float& v) { v *= total; });
            multiply<Stored::columns, Stored::rows>(state[slab], k, ld, now.v, ld_v, rows);
            if (MEMORY) {
              run[slab].each([&](int, int, float& v) { v *= total; });
              multiply<Stored::columns, Stored::rows>(run[slab], k, ld, now.v, ld_v, rows);
            }
          }
          if (MEMORY && (i + 1) % p.pieces == 0)
            each_state(
                run, v0, p,
                [&, first = p.state_at((walk.first + i) / p.pieces, h)](int64_t at, float v) {
                  if (wide_contributions)
                    wide_contributions[first + at] = v;
                  else
                    contributions[first + at] = from_float<T>(v);
                });
        });
    if (ht) write_state(ht, state, n * p.value_heads + h, v0, p);  // 4
    __syncthreads();
  }
}

template <class T>
struct ReadShared {
  Gates gates;
  T q[kTileRows * row_length<T>(64)], k[kTileRows * row_length<T>(64)];
  T s[kTileRows * row_length<T>(64)];  // a slab of S; v
};

// Item (chunk, head, 64 columns of V). Over slabs of K: 1 q kᵀ and q S. 2 P = scale·(q kᵀ∘Γ)·w +
// skip on the diagonal. 3 o = scale γ q S + P v.
template <class T>
__global__ void __launch_bounds__(kTileThreads) read_kernel(Attention<T> p, T* o) {
  auto& s = dynamic_shared<ReadShared<T>>();
  constexpr int ld = row_length<T>(64);
  const int64_t tiles = (p.value_dim + 63) / 64;
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * 64, cols = min(64, p.value_dim - v0);
    const int h = int(item / tiles % p.value_heads);
    const int64_t chunk = item / tiles / p.value_heads;
    const Span span = chunk_span(p, chunk);
    if (span.rows == 0) continue;
    GateLoader loader;
    fetch_gates(loader, p, span, h);
    loader.finish<T>(s.gates);
    Accumulator<T, 64> scores, out;
    scores.clear();
    out.clear();
    for (int slab = 0; 64 * slab < p.key_dim; ++slab) {  // 1
      load_queries(p, span, h, slab, s.q);
      load_keys(p, span, h, slab, s.k);
      load_tile(s.s, ld, 64, 64,
                p.states + p.state_at(chunk, h) + int64_t(64 * slab) * p.value_dim + v0,
                p.value_dim, slab_width(p, slab), cols);
      wait_copies();
      __syncthreads();
      multiply<Stored::rows, Stored::columns>(scores, s.q, ld, s.k, ld, 64);
      multiply<Stored::rows, Stored::rows>(out, s.q, ld, s.s, ld, 64);
      __syncthreads();
    }
    load_tile(s.s, ld, kTileRows, 64, p.v_row(span.first, h) + v0, p.v_step, span.rows, cols);
    const float skip = p.skip ? p.skip[h] : 0.f;
    scores.put(s.q, ld, [&](int r, int c, float v) {  // 2
      if (c > r) return 0.f;
      v *= p.scale * s.gates.template decay<T>(r, c) * s.gates.beta[c];
      return c == r ? v + skip : v;
    });
    out.each([&](int r, int, float& v) { v *= p.scale * s.gates.gamma[r]; });
    wait_copies();
    __syncthreads();
    multiply<Stored::rows, Stored::rows>(out, s.q, ld, s.s, ld, (span.rows + 15) & ~15);  // 3
    out.put(s.k, ld, [](int, int, float v) { return v; });
    __syncthreads();
    store_tile(o + p.value_at(span.first, h) + v0, p.value_stride(), s.k, ld, span.rows, cols);
    __syncthreads();
  }
}

// The states before each chunk, ht and the contributions (where wanted).
void scan(const LinearAttentionProblem& problem, const Cut& cut, const LinearAttentionSaved& saved,
          const Tensor& before, const Tensor& ht, const Tensor& contributions) {
  const DType dtype = problem.v.dtype();
  const bool wide = contributions && contributions.dtype() != dtype;
  visit_compute(dtype, [&]<class Host>() {
    using T = device_t<Host>;
    const Attention<T> p = make_attention<Host>(problem, cut, saved, before);
    visit_slabs(problem.key_dim(), [&]<int SLABS>() {
      launch_tiles<WriteShared<T, SLABS>>(
          contributions ? write_kernel<T, SLABS, true> : write_kernel<T, SLABS, false>,
          scan_blocks(p.sequences, p.value_heads, p.value_dim), stream_of(saved.states), p,
          ptr<float>(ht), wide ? nullptr : ptr<Host>(contributions),
          wide ? ptr<float>(contributions) : nullptr);
    });
  });
}

void read_out(const LinearAttentionProblem& problem, const Cut& cut,
              const LinearAttentionSaved& saved, const Tensor& before, const Tensor& o) {
  visit_compute(o.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    const Attention<T> p = make_attention<Host>(problem, cut, saved, before);
    launch_tiles<ReadShared<T>>(read_kernel<T>,
                                p.chunks * p.value_heads * ceil_div(p.value_dim, 64), stream_of(o),
                                p, ptr<Host>(o));
  });
}

LinearAttentionSaved empty_states(const LinearAttentionProblem& p, const Cut& cut, bool runs) {
  const Shape shape = {cut.chunks, p.heads(), p.key_dim(), p.value_dim()};
  const auto states = [&] { return Tensor::empty(shape, p.v.dtype(), p.v.device()); };
  return {states(), runs && cut.pieces > 1 ? states() : Tensor()};
}

}  // namespace
}  // namespace ebb::gpu::linear_attention

namespace ebb::gpu {

LinearAttentionSaved gated_linear_attention_fwd(const LinearAttentionProblem& given,
                                                const Tensor& o, const Tensor& ht,
                                                const Tensor& contributions) {
  using namespace linear_attention;
  if (fast_attention(given)) return fast_attention_fwd(given, o, ht, contributions);
  const LinearAttentionProblem gated = with_gates(given), problem = without_apart_runs(gated);
  const bool apart = contributions && runs_apart(given);
  const Cut cut(problem);
  LinearAttentionSaved saved = empty_states(problem, cut, contributions && !apart);
  const Tensor before = run_offsets(problem, cut);
  scan(problem, cut, saved, before, ht, apart ? Tensor() : contributions);
  read_out(problem, cut, saved, before, o);
  if (apart) {
    LinearAttentionProblem runs = gated;
    runs.h0 = {};
    const Cut own(runs);
    const LinearAttentionSaved written = empty_states(runs, own, true);
    scan(runs, own, written, run_offsets(runs, own), {}, contributions);
    saved.partials = written.partials;
  }
  return saved;
}

}  // namespace ebb::gpu
