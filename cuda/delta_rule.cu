// Gated delta rule on the GPU: what the passes share on the host (cuda/delta_rule_fwd.cu, _bwd.cu).
#include "cuda/delta_rule.cuh"

#include "tensor/device_flags.h"

namespace ebb::gpu::delta {

Tensor chunk_offsets(const DeltaRuleProblem& p) {
  if (!p.layout.is_packed()) return {};
  return p.layout.chunk_offsets(p.batch(), p.time(), chunk_of(p), p.v.device());
}

template <class T>
Problem<device_t<T>> make_problem(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                                  const Tensor& chunk_before) {
  Problem<device_t<T>> d;
  d.q = ptr<T>(p.q), d.k = ptr<T>(p.k), d.v = ptr<T>(p.v);
  d.g = ptr<float>(p.g), d.beta = ptr<float>(p.beta), d.h0 = ptr<float>(p.h0);
  d.a = ptr<T>(saved.a), d.states = ptr<T>(saved.states), d.values = ptr<T>(saved.values);
  d.positive_decay = ebb::device_flags(p.v.device()) + int(DeviceFlag::positive_decay);
  d.scale = float(p.scale);
  d.heads = int(p.heads()), d.value_heads = int(p.value_heads());
  d.key_dim = int(p.key_dim()), d.value_dim = int(p.value_dim());
  d.chunk = int(chunk_of(p));
  d.tokens = p.batch() * p.time();
  d.sequences = p.sequences();
  d.chunks = p.layout.chunk_count(p.batch(), p.time(), d.chunk);
  d.cursor.cu = p.layout.is_packed() ? p.layout.device_offsets().data<int64_t>() : nullptr;
  d.cursor.time = p.time();
  d.cursor.count = d.sequences;
  d.chunk_before = ptr<int64_t>(chunk_before);
  d.chunks_per_row = ceil_div(p.time(), d.chunk);
  return d;
}
template Problem<float> make_problem<float>(const DeltaRuleProblem&, const DeltaRuleSaved&,
                                            const Tensor&);
template Problem<__nv_bfloat16> make_problem<bf16>(const DeltaRuleProblem&, const DeltaRuleSaved&,
                                                   const Tensor&);

}  // namespace ebb::gpu::delta
