// Gated delta rule on the GPU (ops/delta_rule.h).
#include "ops/delta_rule.h"

namespace ebb::gpu {

DeltaRuleSaved gated_delta_rule_fwd(const DeltaRuleProblem&, const Tensor&, const Tensor&) {
  throw Error("gated_delta_rule: no CUDA kernels in this version");
}
void gated_delta_rule_bwd(const DeltaRuleProblem&, const DeltaRuleSaved&, const Tensor&,
                          const Tensor&, const DeltaRuleGradients&) {
  throw Error("gated_delta_rule: no CUDA kernels in this version");
}
void gated_delta_rule_step(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor&, double, const Tensor&) {
  throw Error("gated_delta_rule_step: no CUDA kernels in this version");
}

}  // namespace ebb::gpu
