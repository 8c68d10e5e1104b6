// Gated linear attention with a decay per key channel: the part of ops/gated_linear_attention.h
// that takes g [B,T,H,K] (models.md 4.2). It is the delta rule of ops/delta_rule_channel.h that
// erases nothing and writes v as it is: a DeltaRuleProblem with neither beta nor erase nor write.
// With P_ij = scale Σ_d q_i k_j e^{G_i−G_j} (i >= j) and H the state before the chunk,
//   o = scale (q∘e^G) H + P v      H⁺ = Diag(e^{G_C}) H + (k∘e^{G_C−G})ᵀ v
// computed in sub-chunks of 16 as there: every exponent is a sum of log decays.
#pragma once
#include "ops/delta_rule.h"
#include "ops/gated_linear_attention.h"

namespace ebb {

// As gated_linear_attention, whose checks of q, k, v and h0 are done here. `k` undefined: 1 − e^g.
LinearAttentionOutput channel_linear_attention(const Var& q, const Var& k, const Var& v,
                                               const Var& g, const Var& h0,
                                               const LinearAttentionOptions& options);
Tensor channel_linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& g, const Tensor& state, double scale);

// On the GPU this is gpu::channel_delta_rule_fwd and _bwd (cuda/delta_rule_channel_fwd.cu).
// shared_key: k = 1 − e^g, g dense and k [as g] overwritten. shared_key_bwd: dg −= e^g dk.
namespace cpu {
DeltaRuleSaved channel_linear_attention_fwd(const DeltaRuleProblem& p, const Tensor& o,
                                            const Tensor& ht);
void channel_linear_attention_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                                  const Tensor& d_o, const Tensor& dht,
                                  const DeltaRuleGradients& grads);
void channel_linear_attention_step(const DeltaRuleProblem& p, const Tensor& state, const Tensor& o);
void shared_key(const Tensor& g, const Tensor& k);
void shared_key_bwd(const Tensor& g, const Tensor& dk, const Tensor& dg);
}  // namespace cpu
namespace gpu {
void shared_key(const Tensor& g, const Tensor& k);
void shared_key_bwd(const Tensor& g, const Tensor& dk, const Tensor& dg);
}  // namespace gpu

}  // namespace ebb
