// dplr in bf16 on tensor cores: which problems, and the kernels of each pass in order
// (cuda/dplr_fast.cuh, cuda/dplr_wide.cuh).
#include "cuda/dplr_fast.cuh"
#include "cuda/dplr_wide.cuh"

#include <algorithm>
#include <limits>

namespace ebb::gpu::low_rank {
namespace {

// Into how many parts, each with a centre, the declared bound cuts a chunk; 4: with borders
// instead.
int parts_of(const DplrProblem& p) {
  if (p.lower_bound == 0) return 4;
  const double whole = 0.5 * delta::kChunk * -p.lower_bound;
  return whole <= kMostExponent ? 1 : whole <= 2 * kMostExponent ? 2 : 4;
}

bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0; }

// As a delta rule: what the layout of chunks and the cutting of sequences look at.
DeltaRuleProblem as_delta_rule(const DplrProblem& p) {
  DeltaRuleProblem d{p.r, p.k, p.v, p.w, {}};
  d.h0 = p.h0, d.scale = p.scale, d.layout = p.layout, d.chunk = delta::kChunk;
  return d;
}

FastProblem make_fast(const DplrProblem& p, const DplrSaved& saved, const Tensor& chunk_before) {
  FastProblem d{delta::make_problem<bf16>(as_delta_rule(p), DeltaRuleSaved{}, chunk_before)};
  d.low_a = ptr<bf16>(p.a), d.low_b = ptr<bf16>(p.b);
  d.unbounded_decay = ebb::device_flags(p.v.device()) + int(DeviceFlag::unbounded_decay);
  d.least = p.lower_bound < 0 ? float(p.lower_bound * (1 + 1e-5))
                              : -std::numeric_limits<float>::infinity();
  d.zero_start = p.zero_start;
  d.inverse = reinterpret_cast<SwizzledTile*>(ptr<bf16>(saved.inverse));
  d.chunk_states = reinterpret_cast<SwizzledTile*>(ptr<bf16>(saved.states));
  d.steps = reinterpret_cast<ChunkStep*>(ptr<bf16>(saved.values));
  d.scores = reinterpret_cast<ChunkScores*>(ptr<bf16>(saved.scores));
  return d;
}

// `size` bytes for each chunk and head.
Tensor per_chunk(const DplrProblem& p, size_t size) {
  return Tensor::empty({as_delta_rule(p).chunks(), p.heads(), int64_t(size / sizeof(bf16_t))},
                       DType::bf16, p.v.device());
}

// Heads that dplr_wide.cuh is for.
bool is_wide(const DplrProblem& p) { return p.key_dim() > 64 || p.value_dim() > 64; }

int panels_of(const DplrProblem& p) { return p.key_dim() <= 64 ? 1 : p.key_dim() <= 128 ? 2 : 4; }

WideProblem make_wide(const DplrProblem& p, const DplrSaved& saved, const Tensor& chunk_before) {
  WideProblem d{make_fast(p, saved, chunk_before)};
  d.panels = panels_of(p), d.blocks = int(ceil_div(p.value_dim(), 64));
  d.wide_steps = d.steps;
  return d;
}
template <template <int> class S>
size_t size_for(int panels) {
  return panels == 1 ? sizeof(S<1>) : panels == 2 ? sizeof(S<2>) : sizeof(S<4>);
}

DplrSaved save_for(const DplrProblem& p) {
  if (!is_wide(p))
    return {.inverse = per_chunk(p, sizeof(SwizzledTile)),
            .states = per_chunk(p, sizeof(SwizzledTile)),
            .values = per_chunk(p, sizeof(ChunkStep)),
            .scores = parts_of(p) == 4 ? per_chunk(p, sizeof(ChunkScores)) : Tensor()};
  const int panels = panels_of(p);
  const size_t blocks = size_t(ceil_div(p.value_dim(), 64));
  return {.inverse = per_chunk(p, sizeof(SwizzledTile)),
          .states = per_chunk(p, size_t(panels) * blocks * sizeof(SwizzledTile)),
          .values = per_chunk(p, size_for<WideStep>(panels)),
          .scores = per_chunk(p, sizeof(ChunkScores))};
}

void run_wide_fwd(const DplrProblem& problem, const DplrSaved& saved, const Tensor& before,
                  const Tensor& o, const Tensor& ht) {
  WideProblem p = make_wide(problem, saved, before);
  const Tensor terms = per_chunk(problem, size_t(p.blocks) * size_for<WideTerms>(p.panels));
  p.wide_terms = ptr<bf16>(terms);
  const cudaStream_t stream = stream_of(o);
  wide_scores(p, parts_of(problem), stream);
  wide_prepare(p, stream);
  wide_scan(p, ptr<bf16>(o), ptr<float>(ht), problem.v.device(), stream);
}

void give(FastProblem& p, const Tensor& d_o, const Tensor& dht, const Tensor& dstates,
          const DplrGradients& grads) {
  p.d_o = ptr<bf16>(d_o), p.dht = ptr<float>(dht);
  p.dstates = reinterpret_cast<SwizzledTile*>(ptr<bf16>(dstates));
  p.dr = ptr<bf16>(grads.dr), p.dk = ptr<bf16>(grads.dk), p.dv = ptr<bf16>(grads.dv);
  p.da = ptr<bf16>(grads.da), p.db = ptr<bf16>(grads.db);
  p.dw = ptr<float>(grads.dw), p.dh0 = ptr<float>(grads.dh0);
}

void run_wide_bwd(const DplrProblem& problem, const DplrSaved& saved, const Tensor& before,
                  const Tensor& d_o, const Tensor& dht, const DplrGradients& grads) {
  WideProblem p = make_wide(problem, saved, before);
  const size_t tiles = size_t(p.blocks) * size_t(p.panels);
  const Tensor dstates = per_chunk(problem, tiles * sizeof(SwizzledTile));
  const Tensor values = per_chunk(problem, size_t(p.blocks) * sizeof(ChunkValues));
  const Tensor scores = per_chunk(problem, sizeof(ScoreGradients));
  const int parts = parts_of(problem);
  const Tensor inside = parts == 4 ? per_chunk(problem, sizeof(InsideGradients)) : Tensor();
  give(p, d_o, dht, dstates, grads);
  p.chunk_values = reinterpret_cast<ChunkValues*>(ptr<bf16>(values));
  p.score_gradients = reinterpret_cast<ScoreGradients*>(ptr<bf16>(scores));
  p.inside_gradients = reinterpret_cast<InsideGradients*>(ptr<bf16>(inside));
  const cudaStream_t stream = stream_of(d_o);
  wide_reverse(p, problem.v.device(), stream);
  wide_values(p, stream);
  if (grads.dr || grads.dw || grads.dk || grads.da || grads.db) wide_gradients(p, parts, stream);
}

}  // namespace

bool fast_path(const DplrProblem& p) {
  return p.v.dtype() == DType::bf16 && p.chunk >= delta::kChunk &&
         p.key_dim() <= 64 * kMostPanels && p.value_dim() <= 64 * kMostBlocks &&
         p.key_dim() % 8 == 0 && p.value_dim() % 8 == 0 && aligned(p.r) && aligned(p.w) &&
         aligned(p.k) && aligned(p.v) && aligned(p.a) && aligned(p.b) && scans_fit(p.v.device());
}

DplrSaved fast_fwd(const DplrProblem& problem, const Tensor& o, const Tensor& ht) {
  const DplrSaved saved = save_for(problem);
  if (problem.batch() * problem.time() == 0 || problem.heads() == 0) {  // the states as they were
    if (!ht) return saved;
    problem.h0 ? ht.copy_(problem.h0) : ht.zero_();
    return saved;
  }
  const Tensor before = chunk_offsets(as_delta_rule(problem));
  if (is_wide(problem)) {
    run_wide_fwd(problem, saved, before, o, ht);
    return saved;
  }
  const Tensor terms = per_chunk(problem, sizeof(ChunkTerms));
  FastProblem p = make_fast(problem, saved, before);
  p.terms = reinterpret_cast<ChunkTerms*>(ptr<bf16>(terms));
  const cudaStream_t stream = stream_of(o);
  fast_prepare(p, parts_of(problem), stream);
  fast_scan(p, ptr<bf16>(o), ptr<float>(ht), problem.v.device(), stream);
  return saved;
}

void fast_bwd(const DplrProblem& problem, const DplrSaved& saved, const Tensor& dense_d_o,
              const Tensor& dht, const DplrGradients& grads) {
  const Tensor d_o = aligned(dense_d_o) ? dense_d_o : dense_d_o.clone();
  if (problem.batch() * problem.time() == 0 || problem.heads() == 0) {
    if (grads.dh0) dht ? grads.dh0.copy_(dht) : grads.dh0.zero_();
    return;
  }
  const Tensor before = chunk_offsets(as_delta_rule(problem));
  if (is_wide(problem)) return run_wide_bwd(problem, saved, before, d_o, dht, grads);
  const Tensor dstates = per_chunk(problem, sizeof(SwizzledTile));
  FastProblem p = make_fast(problem, saved, before);
  give(p, d_o, dht, dstates, grads);
  const cudaStream_t stream = stream_of(d_o);
  fast_reverse(p, problem.v.device(), stream);
  const int parts = parts_of(problem);
  parts == 4 ? steep_gradients(p, stream) : fast_gradients(p, parts, stream);
}

}  // namespace ebb::gpu::low_rank
