// Delta rule with a decay per key channel (ops/delta_rule.h is the member with one per head;
// models.md 3, 6). Per sequence and value head, with h = hv / (HV/H),
//   S̃_t = Diag(e^{g_t}) S_{t-1}     u_t = w_t∘v_t − S̃_tᵀ (b_t∘k_t)     S_t = S̃_t + k_t u_tᵀ
//   o_t = scale · S_tᵀ q_t
// kda: Kimi delta attention, b_t = w_t = β_t, one number per head. gdn2: Gated DeltaNet-2, an erase
// gate b_t [K] and a write gate w_t [V].
//
//   DeltaRuleOutput r = kda(q, k, v, g, beta, h0, {.scale = 1 / std::sqrt(64.0)});
//   DeltaRuleOutput p = kda(q, k, v, z, b, {}, {.scale = s, .normalize_qk = true, .sigmoid = true,
//                                               .A_log = A_log, .dt_bias = dt_bias});
//
// q, k [B,T,H,K] and v [B,T,HV,V]: f32, f64 (CPU) or bf16 (CUDA), any strides. g, b [B,T,HV,K],
// w [B,T,HV,V], beta [B,T,HV] and h0 [N,HV,K,V]: f32 (f64 beside f64). g is a natural-log decay
// <= 0 (−inf clears its channel); a positive one is an Error on the CPU and raises
// DeviceFlag::positive_decay on the GPU. K, V: 1...256; T, B, N may be 0. Returns o [B,T,HV,V] in
// v's dtype and ht [N,HV,K,V] in h0's. Differentiable in all inputs; upstream gradients on o, ht or
// both.
//
// Chunks of C tokens (WY form) in sub-chunks of 16. M_ij = Σ_d b_i k_i k_j e^{G_i−G_j} does not
// factor as it does with one decay per head: between sub-chunks I > J it is a product of
// b_i k_i e^{G_i−R} and k_j e^{R−G_j}, R the sum before I; inside one, it is summed channel by
// channel over running products of decays. Every exponent is a sum of log decays, never a
// difference of such sums, so nothing overflows and nothing cancels.
//
// Saves q, k, v, the gates, A [HV,B·T,C], the state before each chunk [chunks,HV,K,V] and V'
// [HV,B·T,V]; on the GPU also P [HV,B·T,C], while the decayed operands b∘k∘γ, k∘τ and q∘γ of the
// scans are made again in the backward pass. options.recompute keeps the inputs only.
//
// Which kernels of the GPU run, in both passes alike:
//   bf16, K and V multiples of 8, chunk >= 64   tensor cores; K to 64, 128 or 256 in one, two or
//                                               four slabs of 64 channels (all of a slab is worked
//                                               on: K 192 takes as long as K 256), V in tiles of 64
//   f32; other K or V; chunk 16 or 32; inputs   general kernels, which take longer
//   that begin at no 16-byte boundary; blocks
//   with less than 227 KB of shared memory
// Few and long sequences are cut into segments that run side by side.
//
// What the options make of raw inputs is the work of the same kernels on tensor cores where logits
// by channel are bf16 (those of beta may be f32); so is the normalisation of q and k for K <= 64
// and HV = H; GDN2's only if b and w are logits. Inputs are then saved as they are, and no finished
// copy of them is made. Elsewhere the options are operators of their own inside the one node.
#pragma once
#include "ops/delta_rule.h"

namespace ebb {

DeltaRuleOutput kda(const Var& q, const Var& k, const Var& v, const Var& g, const Var& beta,
                    const Var& h0 /*may be undefined*/, const DeltaRuleOptions& options = {});
DeltaRuleOutput gdn2(const Var& q, const Var& k, const Var& v, const Var& g, const Var& b,
                     const Var& w, const Var& h0 /*may be undefined*/,
                     const DeltaRuleOptions& options = {});

// One token of decoding, nothing recorded: q, k [B,H,K], v [B,HV,V], g, b [B,HV,K], w [B,HV,V],
// beta [B,HV], and the state [B,HV,K,V] (f32; f64 beside f64; dense), which is updated in place.
// Returns o [B,HV,V]. Of the options, scale and those that replace finished inputs, as
// gated_delta_rule_step.
Tensor kda_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const Tensor& beta, const Tensor& state, const DeltaRuleOptions& options = {});
Tensor gdn2_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                 const Tensor& b, const Tensor& w, const Tensor& state,
                 const DeltaRuleOptions& options = {});

enum class DeltaGates { kda, gdn2 };
// Floors, as gated_delta_rule_cost; `saves`: the forward pass also writes the scores P.
Cost channel_delta_rule_cost(Pass pass, const DeltaRuleSize& s, DeltaGates gates, DType dtype,
                             bool saves = true);
Cost channel_delta_rule_step_cost(const DeltaRuleSize& s, DeltaGates gates, DType dtype);

// As gated_delta_rule_fwd and _bwd, on a problem with g [B,T,HV,K] and either beta or both of
// erase and write. The step's problem has one token: q [B,1,H,K], ...; h0 is not looked at.
namespace cpu {
DeltaRuleSaved channel_delta_rule_fwd(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht);
void channel_delta_rule_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                            const Tensor& d_o, const Tensor& dht, const DeltaRuleGradients& grads);
void channel_delta_rule_step(const DeltaRuleProblem& p, const Tensor& state, const Tensor& o);
}  // namespace cpu
namespace gpu {
// Whether v, and the gradient of v, may lie in rows of tokens apart from each other (multiples of
// 16 bytes): of q and v only sizes, dtype and device are looked at, and the chunk.
bool channel_delta_rule_reads_rows(const DeltaRuleProblem& p);
// Such problems may also be `in_place` in parts (with erase and write only if those are logits): g
// in bf16 beside A_log, and beta of any dtype or erase and write in bf16 beside `sigmoid`, in rows
// of tokens that may lie apart (by-channel ones aligned to 16 bytes; what is not said to be a logit
// is finished, dense and aligned); q and k in rows at equal distances, and their gradients too.
// Whether `normalize` may be set as well:
bool channel_delta_rule_normalizes(const DeltaRuleProblem& p);
DeltaRuleSaved channel_delta_rule_fwd(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht);
void channel_delta_rule_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                            const Tensor& d_o, const Tensor& dht, const DeltaRuleGradients& grads);
}  // namespace gpu

}  // namespace ebb
