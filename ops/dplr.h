// Diagonal plus low rank: the recurrence of RWKV-7 and of every delta rule (models.md 5). Per
// sequence and head,
//   S_t = Diag(e^{w_t}) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ      o_t = scale · S_tᵀ r_t
// a_t reads the state before it decays. RWKV-7: a = −k̂, b = k̂∘rate with k̂ of length 1. A delta
// rule with erase gate: a = −e^w∘b_erase∘k, b = k.
//
//   DplrOutput y = dplr(r, w, k, v, a, b, h0, {.want_final_state = true, .lower_bound = -0.6066});
//
// r, k, a, b [B,T,H,K] and v [B,T,H,V]: f32, f64 (CPU) or bf16 (CUDA), any strides. w [B,T,H,K] and
// h0 [N,H,K,V]: f32 (f64 beside f64). w is a natural-log decay <= 0, not the factor e^w (−inf
// clears its channel); a positive one is an Error on the CPU and raises DeviceFlag::positive_decay
// on the GPU. K, V: 1...256; T, B, N may be 0. Returns o [B,T,H,V] in v's dtype and ht [N,H,K,V] in
// h0's, the state after each sequence's last token (h0 where it has none). States are [K,V], the
// key axis first. Differentiable in all seven inputs; upstream gradients on o, ht or both.
//
// lower_bound declares that no w lies below it (0: none declared). On the GPU it selects how bf16
// inputs, K and V multiples of 8, are computed by products of matrices: down to −2.1875, with the
// decays of a chunk centred on its middle; down to −4.375, with each half of a chunk centred on its
// own; below or without a bound, with those of each 16 tokens referring to their borders, at
// somewhat more than twice the time. A w below what was declared is an Error on the CPU and raises
// DeviceFlag::unbounded_decay on the GPU. Other sizes, and f32, go token by token. By products of
// matrices dw is a difference of sums in f32: a gradient some 1e-7 of its neighbours' in the chunk
// (of a channel that forgets everything at every token) is their rounding.
//
// Chunks of C tokens, G_i the sum of w up to token i, Gx_i the sum before it, S the entering state:
//   A_ab, A_ak [i,j<i] = Σ_d a_i {b_j, k_j} e^{Gx_i−G_j}
//   A_rb, A_rk [i,j<=i] = Σ_d r_i {b_j, k_j} e^{G_i−G_j}
//   Y = (I − A_ab)⁻¹ ((a∘e^{Gx}) S + A_ak V)
//   o = scale ((r∘e^G) S + A_rk V + A_rb Y)
//   S⁺ = Diag(e^{G_C}) S + (k∘e^{G_C−G})ᵀ V + (b∘e^{G_C−G})ᵀ Y
// Every exponent is a sum of log decays, so nothing overflows and nothing cancels. Saves the
// inputs, (I − A_ab)⁻¹ [H,B·T,C], the state before each chunk [chunks,H,K,V] and Y [H,B·T,V] (on
// tensor cores what a chunk makes of the state, two matrices, in its place); options.recompute
// keeps the inputs only.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/seq_layout.h"

namespace ebb {

struct DplrOptions {
  double scale = 1;               // of the read-out
  bool want_final_state = false;  // else ht stays undefined
  SeqLayout layout = {};          // N sequences; dense: N = B
  int64_t chunk = 64;             // C: 16, 32, 64 or 128; changes results by rounding only
  bool recompute = false;         // keep the inputs only; backward runs the forward pass again
  double lower_bound = 0;         // of w; 0: not known
};
struct DplrOutput {
  Var o;   // [B,T,H,V]
  Var ht;  // [N,H,K,V]
};
DplrOutput dplr(const Var& r, const Var& w, const Var& k, const Var& v, const Var& a, const Var& b,
                const Var& h0 /*may be undefined*/, const DplrOptions& options = {});

// One token of decoding, nothing recorded: r, w, k, a, b [B,H,K], v [B,H,V], and the state
// [B,H,K,V] (f32; f64 beside f64; dense), which is updated in place. Returns o [B,H,V]. A positive
// w is an Error on the CPU, before the state is touched.
Tensor dplr_step(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                 const Tensor& a, const Tensor& b, const Tensor& state, double scale = 1);

// Floors: every tensor moved once, products counted dense. `saves`: forward writes the inverse and
// the chunk states for backward (in `dtype`), which reads them.
struct DplrSize {
  int64_t batch = 1, time = 0, heads = 1, key_dim = 64, value_dim = 64;
  int64_t chunk = 64;
};
Cost dplr_cost(Pass pass, const DplrSize& s, DType dtype, bool saves = true);
Cost dplr_step_cost(const DplrSize& s, DType dtype);  // time is not used

// What the backends see: checked, dense tensors.
struct DplrProblem {
  Tensor r = {}, w = {}, k = {}, v = {}, a = {}, b = {};
  Tensor h0 = {};  // undefined: zero
  double scale = 1;
  SeqLayout layout = {};
  int64_t chunk = 64;
  double lower_bound = 0;
  bool zero_start = false;  // of backward, which need not have h0: there was none

  int64_t batch() const { return r.size(0); }
  int64_t time() const { return r.size(1); }
  int64_t heads() const { return r.size(2); }
  int64_t value_heads() const { return heads(); }
  int64_t key_dim() const { return r.size(3); }
  int64_t value_dim() const { return v.size(3); }
  int64_t sequences() const { return layout.count(batch()); }
  int64_t chunks() const { return layout.chunk_count(batch(), time(), chunk); }
};
struct DplrSaved {      // a backend may leave what it recomputes undefined
  Tensor inverse = {};  // [H,B·T,C]: row t of its chunk's (I − A_ab)⁻¹
  Tensor states = {};   // [chunks,H,K,V]: the state before each chunk
  Tensor values = {};   // [H,B·T,V]: Y
  Tensor scores = {};   // what the backend keeps of the scores
};
struct DplrGradients {  // undefined: not wanted. Dense, overwritten.
  Tensor dr = {}, dw = {}, dk = {}, dv = {}, da = {}, db = {}, dh0 = {};
};
// o, ht (if defined) and the gradients asked for are overwritten. d_o is dense, dht may be
// undefined. The step's problem has one token: r [B,1,H,K], ...; h0 is not looked at.
namespace cpu {
DplrSaved dplr_fwd(const DplrProblem& p, const Tensor& o, const Tensor& ht);
void dplr_bwd(const DplrProblem& p, const DplrSaved& saved, const Tensor& d_o, const Tensor& dht,
              const DplrGradients& grads);
void dplr_step(const DplrProblem& p, const Tensor& state, const Tensor& o);
}  // namespace cpu
namespace gpu {
DplrSaved dplr_fwd(const DplrProblem& p, const Tensor& o, const Tensor& ht);
void dplr_bwd(const DplrProblem& p, const DplrSaved& saved, const Tensor& d_o, const Tensor& dht,
              const DplrGradients& grads);
void dplr_step(const DplrProblem& p, const Tensor& state, const Tensor& o);
}  // namespace gpu

}  // namespace ebb
