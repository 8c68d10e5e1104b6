// Gated linear attention (models.md 4.1, 4.2): one log decay per token and head, or one for each of
// its key channels. RetNet, TNL and scalar gates are the first; Mamba-2's SSD (ops/ssd.h) is it
// with B as k, C as q and the step Δ as weight. GLA, HGRN2 and LightNet are the second. Per
// sequence and head, with group = h / (H/G),
//   S_t = e^{g_t} S_{t−1} + w_t k_t v_tᵀ      o_t = scale · S_tᵀ q_t + skip·v_t
// where e^{g_t} is a number or a diagonal matrix.
//
//   LinearAttentionOutput r = gated_linear_attention(q, k, v, g, {}, {.scale = 0.125});
//   LinearAttentionOutput p = gated_linear_attention(q, k, v, g, h0,
//       {.want_final_state = true, .layout = SeqLayout::packed({0, 3, 3, 8}), .memory_chunk =
//       256});
//   LinearAttentionOutput s = gated_linear_attention(q, {}, v, g, h0);   // k = 1 − e^g
//
// q, k [B,T,G,K] and v [B,T,H,V], H a multiple of G: f32, f64 (CPU) or bf16 (CUDA), any strides.
// g and the optional weight w [B,T,H], the optional skip [H] and h0 [N,H,K,V]: f32 (f64 beside
// f64). g is a natural-log decay <= 0 (−inf clears the state); a positive one is an Error on the
// CPU and raises DeviceFlag::positive_decay on the GPU. K, V: 1...256; T, B, N may be 0.
//
// g [B,T,H,K] is a decay per channel (ops/linear_attention_channel.h). Then k may be undefined: the
// key is shared with the decay, k = 1 − e^g (H = G), and dg receives −e^g dk. There is no weight,
// skip or memory_chunk with it.
//
// Returns o [B,T,H,V] in v's dtype; if asked for, ht [N,H,K,V] in h0's, the state after each
// sequence's last token (h0 where it has none); and, for memory_chunk = S > 0, what each run of S
// tokens of a sequence has written, as if it began with an empty state:
//   contributions [M,H,K,V] in v's dtype (or wider),  Δ_c = Σ_{s in c} e^{Σ g after s in c} w_s k_s
//   v_sᵀ
// M = layout.chunk_count(B, T, S): the runs of one sequence after the other, ragged last ones
// included. Nothing else depends on S, to the last bit: runs that are not whole chunks have a pass
// of their own. Differentiable in all inputs, with upstream gradients on any of the three.
//
// Computed in chunks of C tokens, G_i the sum of g inside the chunk, H the state before it:
//   o = scale ((q kᵀ ∘ Γ) diag(w) v + e^G q H) + skip v,  Γ_ij = e^{G_i−G_j} for i >= j, else 0
//   H⁺ = e^{G_C} H + Σ_i e^{G_C−G_i} w_i k_i v_iᵀ
// Exponents are differences <= 0 of sums, masked first. Saves q, k, v, g, w, skip and the state
// before each chunk [chunks,H,K,V] (with S > C also the part of it that the current run wrote).
#pragma once
#include <limits>

#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/rows.h"
#include "ops/seq_layout.h"

namespace ebb {

struct LinearAttentionOptions {
  double scale = 1;               // of the read-out
  bool want_final_state = false;  // else ht stays undefined
  SeqLayout layout = {};          // N sequences; dense: N = B
  int64_t chunk = 64;        // C >= 1; a backend may take a shorter one. Only rounding differs.
  int64_t memory_chunk = 0;  // S; 0: contributions stay undefined
  bool wide_contributions = false;  // f32 beside bf16: for a reader whose softmax is sharp
  Var weight = {};                  // [B,T,H]: w; undefined: 1
  Var skip = {};                    // [H]; undefined: 0
};
struct LinearAttentionOutput {
  Var o;              // [B,T,H,V]
  Var ht;             // [N,H,K,V]
  Var contributions;  // [M,H,K,V]
};
LinearAttentionOutput gated_linear_attention(const Var& q, const Var& k, const Var& v, const Var& g,
                                             const Var& h0 /*may be undefined*/,
                                             const LinearAttentionOptions& options = {});

// One token of decoding, nothing recorded: q, k [B,G,K], v [B,H,V], g [B,H] or [B,H,K] (then k may
// be undefined), weight (or undefined) [B,H], skip [H] or undefined, and the state [B,H,K,V] (f32;
// f64 beside f64; dense), which is updated in place. Returns o [B,H,V]. A positive g is an Error on
// the CPU, before the state is touched.
struct LinearAttentionStep {
  double scale = 1;
  Tensor weight = {}, skip = {};
};
Tensor gated_linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& g, const Tensor& state,
                                   const LinearAttentionStep& options = {});

// Floors: every tensor moved once, products counted dense, q kᵀ once per group. `saves`: forward
// writes the chunk states for backward (in `dtype`), which reads them. Weight and skip are left
// out.
struct LinearAttentionSize {
  int64_t batch = 1, time = 0, groups = 1, heads = 1, key_dim = 64, value_dim = 64;
  int64_t chunk = 64;
  bool by_channel = false;
};
Cost gated_linear_attention_cost(Pass pass, const LinearAttentionSize& s, DType dtype,
                                 bool saves = true);
Cost gated_linear_attention_step_cost(const LinearAttentionSize& s, DType dtype);  // time: not used

// SSD's steps (ops/ssd.h), Δ = clamp(softplus(dt + bias)), from which w = Δ and g = A Δ.
struct SsdGateArgs {
  Rows dt = {};      // rows of H
  Tensor A = {};     // [H]: A or A_log
  Tensor bias = {};  // [H] or undefined
  bool softplus = true, log_A = false;
  double dt_min = 0, dt_max = std::numeric_limits<double>::infinity();
};
// gated_linear_attention with q = C, k = B, v = x and g and w from steps, on the GPU; `gate` holds
// the values of dt [B,T,H], A and bias [H] (or undefined), ready for the backends.
LinearAttentionOutput gated_linear_attention_by_steps(const Var& q, const Var& k, const Var& v,
                                                      const Var& dt, const Var& A, const Var& bias,
                                                      const SsdGateArgs& gate, const Var& h0,
                                                      const LinearAttentionOptions& options);

// What the backends see: checked, dense tensors. On the GPU only the heads of a token need be dense
// in q, k and v: tokens may lie apart, as in slices of a wider projection (ops/rows.h).
struct LinearAttentionProblem {
  Tensor q = {}, k = {}, v = {}, g = {};
  Tensor h0 = {};         // undefined: zero
  Tensor weight = {};     // undefined: 1
  Tensor skip = {};       // undefined: 0
  SsdGateArgs gate = {};  // GPU: instead of g and weight, where dt is defined
  double scale = 1;
  SeqLayout layout = {};
  int64_t chunk = 64;
  int64_t memory_chunk = 0;

  int64_t batch() const { return q.size(0); }
  int64_t time() const { return q.size(1); }
  int64_t groups() const { return q.size(2); }
  int64_t heads() const { return v.size(2); }
  int64_t key_dim() const { return q.size(3); }
  int64_t value_dim() const { return v.size(3); }
  int64_t sequences() const { return layout.count(batch()); }
  int64_t memories() const {
    return memory_chunk ? layout.chunk_count(batch(), time(), memory_chunk) : 0;
  }
};
struct LinearAttentionSaved {
  Tensor states = {};    // [chunks,H,K,V]: the state before each chunk
  Tensor partials = {};  // [chunks,H,K,V]: what the chunk's run had written before it, if S > C
  Tensor gates = {};     // what the backend keeps of g and w
};
struct LinearAttentionGradients {  // undefined: not wanted. Dense, overwritten.
  Tensor dq = {}, dk = {}, dv = {}, dg = {}, dh0 = {}, dweight = {}, dskip = {};
  Tensor ddt = {}, dA = {}, dbias = {};  // where the problem has steps, instead of dg and dweight
};
// o, and ht and contributions if defined, and the gradients asked for are overwritten. d_o is
// dense; dht and dcontributions may be undefined.
namespace cpu {
LinearAttentionSaved gated_linear_attention_fwd(const LinearAttentionProblem& p, const Tensor& o,
                                                const Tensor& ht, const Tensor& contributions);
void gated_linear_attention_bwd(const LinearAttentionProblem& p, const LinearAttentionSaved& saved,
                                const Tensor& d_o, const Tensor& dht, const Tensor& dcontributions,
                                const LinearAttentionGradients& grads);
void gated_linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                 const Tensor& state, const LinearAttentionStep& options,
                                 const Tensor& o);
}  // namespace cpu
namespace gpu {
LinearAttentionSaved gated_linear_attention_fwd(const LinearAttentionProblem& p, const Tensor& o,
                                                const Tensor& ht, const Tensor& contributions);
void gated_linear_attention_bwd(const LinearAttentionProblem& p, const LinearAttentionSaved& saved,
                                const Tensor& d_o, const Tensor& dht, const Tensor& dcontributions,
                                const LinearAttentionGradients& grads);
void gated_linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                 const Tensor& state, const LinearAttentionStep& options,
                                 const Tensor& o);
}  // namespace gpu

}  // namespace ebb
