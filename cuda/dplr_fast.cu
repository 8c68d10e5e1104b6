// dplr in bf16 on tensor cores: which problems, and the kernels of each pass in order
// (cuda/dplr_fast.cuh).
#include "cuda/dplr_fast.cuh"

#include <algorithm>

namespace ebb::gpu::low_rank {
namespace {

// Into how many parts, each with a centre, the declared bound cuts a chunk: 1, 2, or 3 for more.
int halves_of(const DplrProblem& p) {
  const double whole = 0.5 * delta::kChunk * -p.lower_bound;
  return whole <= kMostExponent ? 1 : whole <= 2 * kMostExponent ? 2 : 3;
}

bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0; }

// As a delta rule with a decay per channel: what its scans and the layout of chunks look at.
DeltaRuleProblem as_delta_rule(const DplrProblem& p) {
  DeltaRuleProblem d{p.r, p.k, p.v, p.w, {}};
  d.h0 = p.h0, d.scale = p.scale, d.layout = p.layout, d.chunk = delta::kChunk;
  return d;
}

FastProblem make_fast(const DplrProblem& p, const DplrSaved& saved, const ChannelOperands& operands,
                      const Tensor& chunk_before) {
  const DeltaRuleSaved kept{saved.inverse, saved.states, saved.values, {}, saved.scores};
  FastProblem d;
  static_cast<Channel<bf16_t>&>(d) =
      make_channel<bf16>(as_delta_rule(p), kept, operands, chunk_before);
  d.low_a = ptr<bf16>(p.a), d.low_b = ptr<bf16>(p.b);
  d.unbounded_decay = ebb::device_flags(p.v.device()) + int(DeviceFlag::unbounded_decay);
  d.least = float(p.lower_bound * (1 + 1e-5));
  return d;
}

}  // namespace

bool fast_path(const DplrProblem& p) {
  return p.v.dtype() == DType::bf16 && p.chunk >= delta::kChunk && p.lower_bound < 0 &&
         halves_of(p) <= 2 && p.key_dim() <= 64 && p.value_dim() <= 64 && p.key_dim() % 8 == 0 &&
         p.value_dim() % 8 == 0 && aligned(p.r) && aligned(p.w) && aligned(p.k) && aligned(p.v) &&
         aligned(p.a) && aligned(p.b) && scans_fit(p.v.device());
}

DplrSaved fast_fwd(const DplrProblem& problem, const Tensor& o, const Tensor& ht) {
  const Device device = problem.v.device();
  const int64_t h = problem.heads(), tokens = problem.batch() * problem.time();
  const int64_t k = problem.key_dim(), v = problem.value_dim();
  const DeltaRuleProblem as_delta = as_delta_rule(problem);
  const int64_t chunks = as_delta.chunks();
  const auto empty = [&](const Shape& shape) { return Tensor::empty(shape, DType::bf16, device); };
  const DplrSaved saved{empty({h, tokens, delta::kChunk}), empty({chunks, h, v, k}),
                        empty({h, tokens, v}), empty({h, tokens, delta::kChunk})};
  const ChannelOperands operands = make_operands(as_delta);
  const Tensor y0 = empty({h, tokens, v}), added = empty({chunks, h, v, k});
  const Tensor before = chunk_offsets(as_delta);
  FastProblem p = make_fast(problem, saved, operands, before);
  if (tokens == 0 || h == 0) {  // the states as they were
    if (!ht) return saved;
    problem.h0 ? ht.copy_(problem.h0) : ht.zero_();
    return saved;
  }
  p.y0 = p.written = ptr<bf16>(y0);
  p.add = ptr<bf16>(added), p.added = p.add;
  p.out = ptr<bf16>(o), p.local = p.out;
  const cudaStream_t stream = stream_of(o);
  fast_prepare(p, true, halves_of(problem), stream);
  channel_fast_scan(p, p.out, ptr<float>(ht), device, stream);
  return saved;
}

void fast_bwd(const DplrProblem& problem, const DplrSaved& saved, const Tensor& dense_d_o,
              const Tensor& dht, const DplrGradients& grads) {
  const Device device = problem.v.device();
  const int64_t h = problem.heads(), tokens = problem.batch() * problem.time();
  const Tensor d_o = aligned(dense_d_o) ? dense_d_o : dense_d_o.clone();
  if (tokens == 0 || h == 0) {
    if (grads.dh0) dht ? grads.dh0.copy_(dht) : grads.dh0.zero_();
    return;
  }
  DeltaRuleGradients places;
  places.dq = grads.dr, places.dk = grads.dk;
  const DeltaRuleProblem as_delta = as_delta_rule(problem);
  const ChannelOperands operands = make_operands(as_delta, places);
  const Tensor before = chunk_offsets(as_delta);
  const Tensor z = Tensor::empty({h, tokens, problem.value_dim()}, DType::bf16, device);
  const Tensor dstates = Tensor::empty(saved.states.shape(), DType::bf16, device);
  FastProblem p = make_fast(problem, saved, operands, before);
  p.d_o = ptr<bf16>(d_o), p.dht = ptr<float>(dht);
  p.x = ptr<bf16>(z), p.dstates = ptr<bf16>(dstates);
  p.dq = ptr<bf16>(grads.dr), p.dk = ptr<bf16>(grads.dk), p.dv = ptr<bf16>(grads.dv);
  p.da = ptr<bf16>(grads.da), p.db = ptr<bf16>(grads.db);
  p.dw = ptr<float>(grads.dw), p.dh0 = ptr<float>(grads.dh0);
  const cudaStream_t stream = stream_of(d_o);
  const int halves = halves_of(problem);
  fast_prepare(p, false, halves, stream);
  channel_fast_reverse(p, device, stream);
  fast_gradients(p, halves, stream);
}

}  // namespace ebb::gpu::low_rank
