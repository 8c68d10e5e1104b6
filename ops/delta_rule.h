// Gated delta rule with scalar decay (Gated DeltaNet; models.md 3): the member of the delta family
// whose decay is one number per head. Per sequence and value head, with h = hv / (HV/H),
//   S̃_t = e^{g_t} S_{t-1}     u_t = β_t (v_t − S̃_tᵀ k_t)     S_t = S̃_t + k_t u_tᵀ
//   o_t = scale · S_tᵀ q_t
//
//   DeltaRuleOutput r = gated_delta_rule(q, k, v, g, beta, {}, {.scale = 1 / std::sqrt(64.0)});
//   DeltaRuleOutput p = gated_delta_rule(q, k, v, g, beta, h0, {.scale = s, .want_final_state =
//   true,
//                                        .layout = SeqLayout::packed({0, 3, 3, 8})});
//
// q, k [B,T,H,K] and v [B,T,HV,V]: f32, f64 (CPU) or bf16 (CUDA), any strides. g, beta [B,T,HV] and
// h0 [N,HV,K,V]: f32 (f64 beside f64). g is a natural-log decay <= 0 (−inf clears the state); a
// positive one is an Error on the CPU and raises DeviceFlag::positive_decay on the GPU. beta may be
// anything, (0, 2) in models. K, V: 1...256; T, B, N may be 0. Returns o [B,T,HV,V] in v's dtype
// and ht [N,HV,K,V] in h0's, the state after each sequence's last token (h0 where it has none).
// Differentiable in all six inputs, with upstream gradients on o, ht or both.
//
// Computed in chunks of C tokens (WY form): V' = A·diag(β)(V − diag(e^G) K S), A = (I + M)⁻¹,
// M_ij = β_i k_i·k_j e^{G_i−G_j} below the diagonal, G the sum of g inside the chunk. Exponents are
// differences <= 0, masked first. A comes from forward substitution in f32, never from a Neumann
// series. Saves q, k, v, g, beta, A [HV,B·T,C], the state before each chunk [chunks,HV,K,V] and, on
// the CPU, V' [HV,B·T,V]. With options.recompute nothing but the inputs: less memory for the time
// of one more forward pass, and the same gradients bit for bit. Which kernels of the GPU run is as
// in ops/delta_rule_channel.h.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/rows.h"
#include "ops/seq_layout.h"

namespace ebb {

struct DeltaRuleOptions {
  double scale = 1;               // of the read-out; models use K^(−1/2)
  bool want_final_state = false;  // else ht stays undefined
  SeqLayout layout = {};          // N sequences; dense: N = B
  int64_t chunk = 64;             // C: 16, 32, 64 or 128; changes results by rounding only
  bool recompute = false;         // keep the inputs only; backward runs the forward pass again
  // Instead of finished inputs; the kernels on tensor cores do this by themselves, with one decay
  // per head for K <= 128, per channel as ops/delta_rule_channel.h says:
  bool normalize_qk = false;  // q, k to length 1 (ops/l2_norm.h)
  bool sigmoid = false;       // beta (b and w) are logits of any dtype ...
  double beta_scale = 1;      // ... beta = beta_scale·σ, b too; 2 allows negative eigenvalues
  Var A_log = {};             // [HV]: g is the raw gate, of any dtype (ops/decay_gate.h)
  Var dt_bias = {};           // [HV] or, per channel, [HV,K] or [HV·K]
  double lower_bound = 0;     // of the bounded gate; 0: softplus
};
struct DeltaRuleOutput {
  Var o;   // [B,T,HV,V]
  Var ht;  // [N,HV,K,V]
};
DeltaRuleOutput gated_delta_rule(const Var& q, const Var& k, const Var& v, const Var& g,
                                 const Var& beta, const Var& h0 /*may be undefined*/,
                                 const DeltaRuleOptions& options = {});

// One token of decoding, nothing recorded: q, k [B,H,K], v [B,HV,V], g, beta [B,HV], and the state
// [B,HV,K,V] (f32; f64 beside f64; dense), which is updated in place. Returns o [B,HV,V]. A
// positive g is an Error on the CPU, before the state is touched. Of the options, scale and those
// that replace finished inputs; on the GPU one kernel does it all, from rows that may lie apart.
Tensor gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                             const Tensor& beta, const Tensor& state,
                             const DeltaRuleOptions& options = {});

// Floors: every tensor moved once, products counted dense. `saves`: forward writes A and the chunk
// states for backward (in `dtype`), which reads them.
struct DeltaRuleSize {
  int64_t batch = 1, time = 0, heads = 1, value_heads = 1, key_dim = 64, value_dim = 64;
  int64_t chunk = 64;
};
Cost gated_delta_rule_cost(Pass pass, const DeltaRuleSize& s, DType dtype, bool saves = true);
Cost gated_delta_rule_step_cost(const DeltaRuleSize& s, DType dtype);  // time is not used

// What the backends see: checked, dense tensors. The members of the family with a decay per channel
// (ops/delta_rule_channel.h) have g [B,T,HV,K]; with an erase and a write gate they have no beta.
struct DeltaRuleProblem {
  Tensor q, k, v, g, beta;
  Tensor h0 = {};     // undefined: zero
  Tensor erase = {};  // [B,T,HV,K]
  Tensor write = {};  // [B,T,HV,V]
  double scale = 1;
  SeqLayout layout = {};
  int64_t chunk = 64;
  // Set only where gpu::gated_delta_rule_fuses: rows of tokens may lie apart (aligned to 16 bytes,
  // those of q and k at equal distances), and g and beta may be logits of any dtype. Per channel:
  // gpu::channel_delta_rule_normalizes.
  bool in_place = false;
  bool normalize = false, sigmoid = false;
  double beta_scale = 1, lower_bound = 0;
  Tensor A_log = {}, dt_bias = {};  // [HV]; [HV] or [HV·K]

  int64_t batch() const { return q.size(0); }
  int64_t time() const { return q.size(1); }
  int64_t heads() const { return q.size(2); }
  int64_t value_heads() const { return v.size(2); }
  int64_t key_dim() const { return q.size(3); }
  int64_t value_dim() const { return v.size(3); }
  int64_t sequences() const { return layout.count(batch()); }
  int64_t chunks() const { return layout.chunk_count(batch(), time(), chunk); }
};
// One token on the GPU, of the whole family: rows of a sequence may lie apart. Finished gates are
// f32; logits, where A_log or sigmoid say so, of any dtype.
struct DeltaRuleStep {
  Rows q = {}, k = {}, v = {};  // [B,H·K], [B,HV·V]
  Rows g = {}, beta = {};       // [B,HV] or, by_channel, [B,HV·K]; [B,HV] or instead
  Rows erase = {}, write = {};  // [B,HV·K], [B,HV·V]
  int64_t heads = 1;            // of q and k
  bool by_channel = false;
  double scale = 1;
  bool normalize = false, sigmoid = false;
  double beta_scale = 1, lower_bound = 0;
  Tensor A_log = {}, dt_bias = {};  // [HV]; [HV] or [HV·K]
};
struct DeltaRuleSaved {  // a backend may leave what it recomputes undefined
  Tensor a;              // [HV,B·T,C]: row t of its chunk's A
  Tensor states;         // [chunks,HV,K,V]: the state before each chunk
  Tensor values;         // [HV,B·T,V]: V'
  Tensor gates = {};     // what the backend keeps of the gates
  Tensor scores = {};    // P [HV,B·T,C], of a decay per channel on the GPU
};
struct DeltaRuleGradients {  // undefined: not wanted. Dense, overwritten.
  Tensor dq = {}, dk = {}, dv = {}, dg = {}, dbeta = {}, dh0 = {};
  Tensor derase = {}, dwrite = {};
  Tensor dA_log = {}, ddt_bias = {};
};
// o, ht (if defined) and the gradients asked for are overwritten. d_o is dense, dht may be
// undefined.
namespace cpu {
DeltaRuleSaved gated_delta_rule_fwd(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht);
void gated_delta_rule_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& d_o,
                          const Tensor& dht, const DeltaRuleGradients& grads);
void gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                           const Tensor& beta, const Tensor& state, double scale, const Tensor& o);
}  // namespace cpu
namespace gpu {
// Whether a problem with q, k, v of these sizes and dtypes is taken as `in_place` describes: the
// kernels then normalise q and k and make the gates themselves, and no copy of either is kept.
bool gated_delta_rule_fuses(const DeltaRuleProblem& p);
DeltaRuleSaved gated_delta_rule_fwd(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht);
void gated_delta_rule_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& d_o,
                          const Tensor& dht, const DeltaRuleGradients& grads);
void delta_rule_step(const DeltaRuleStep& p, const Tensor& state, const Tensor& o);
}  // namespace gpu

}  // namespace ebb
