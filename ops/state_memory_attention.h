// State-memory attention (models.md 10): every token attends to what earlier runs of S tokens have
// written into a linear-attention state. DART adds it to Mamba-2. Per sequence and head h, with
// memories Δ_c [N,P] (`contributions` of ops/ssd.h or ops/gated_linear_attention.h with
// memory_chunk = S), the query q_t and read vector c_t over N, and e_t over P:
//   q̂ = q / sqrt(mean q² + eps)                    ê = e / sqrt(mean e² + eps)
//   ρ_c[n] = (mean_p Δ_c[n,p]² + eps_row)^-½
//   ℓ_tc = scale Σ_n q̂_t[n] ρ_c[n] Σ_p Δ_c[n,p] ê_t[p]                   scale = 1/√N
//   w_t· = softmax of ℓ_t· over the runs c that ended before t's own
//   R_t = Σ_c w_tc Δ_cᵀ c_t                        the values are Δ as it is
//   o_t = base_t + gate_t R_t
//
//   StateMemoryAttention r = state_memory_attention(q, e, c, y.contributions, 256,
//                                                   {.gate = g, .base = y.y});
//
// q, c [B,T,*,N] and e [B,T,*,P] with any divisor of H as *: 1 for all heads, H for one each, head
// h reads h / (H/*). c is the SSM's read vector, or one of its own. contributions [M,H,N,P], M =
// layout.chunk_count(B, T, S): the runs of one sequence after the other; what the last run of a
// sequence holds is not read, NaN neither. gate [B,T,*] (undefined: 1) and base [B,T,H,P]
// (undefined: 0). All f32, f64 (CPU) or bf16 (CUDA; contributions then bf16 or, eight times
// finer in what the softmax sees, f32), any strides; N, P: 1...256; S >= 1; T, B may be 0.
//
// Returns o [B,T,H,P] in q's dtype, r = R [B,T,H,P] and lse [B,T,H], the log Σ_c e^ℓ_tc, f32 (f64):
// V·dR − R·dR below is a small difference where one weight is near 1. Tokens of a sequence's first
// run see nothing: R = 0, lse (which is not defined there) 0. Differentiable in all inputs through
// o alone; r may be o itself where there is neither gate nor base. Saves q, e, c, contributions
// (in bf16 on CUDA for sizes of tensor cores: Δ̂ in f16 and ρ in their stead), gate, r, lse: nothing
// of size tokens × runs. (The backward pass there has two numbers of every token, run and head in a
// place of at most 128 MB, strip by strip where that is too small.) With dR = gate dy:
//   dgate = Σ_{h,p} R dy       δ = R·dR       V = Δ_cᵀ c_t     dℓ = w (V·dR − δ)      dbase = dy
//   dc   = Σ_c w Δ_c dR        dq̂ = scale Σ_c dℓ ρ_c∘(Δ_c ê)       dê = scale Σ_c dℓ Δ_cᵀ(ρ_c∘q̂)
//   X_c  = scale Σ_t dℓ q̂ êᵀ   Δ̂ = ρ_c∘Δ_c   dΔ_c = Σ_t w c dRᵀ + ρ_c∘(X_c − Δ̂ mean_p(X_c∘Δ̂))
//   dq   = (dq̂ − q̂ mean(dq̂∘q̂)) / rms, de alike; those of shared vectors summed over their heads
// Without `normalize` q̂, ê, ρ are q, e, 1.
#pragma once
#include <vector>

#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/seq_layout.h"

namespace ebb {

struct StateMemoryOptions {
  Var gate = {};           // [B,T,*]; undefined: 1
  Var base = {};           // [B,T,H,P]; undefined: 0
  double scale = 0;        // of the logits; 0: 1/√N
  double eps = 1e-6;       // in the mean squares of q and e
  double eps_row = 1e-12;  // of Δ's rows, which are 1e-4...1e-2 as models begin
  bool normalize = true;
  SeqLayout layout = {};  // the one that the contributions were made with
};
struct StateMemoryAttention {
  Var o;       // [B,T,H,P]
  Tensor r;    // [B,T,H,P]; no gradient flows through this or lse
  Tensor lse;  // [B,T,H]
};
StateMemoryAttention state_memory_attention(const Var& q, const Var& e, const Var& c,
                                            const Var& contributions, int64_t memory_chunk,
                                            const StateMemoryOptions& options = {});

// Floors: every tensor moved once; per token, head and visible memory two products of N·P forward
// (one shared left operand of width 2N), five backward (two again, three for gradients), for dense
// sequences. `gate` and `base` are counted as given.
struct StateMemorySize {
  int64_t batch = 1, time = 0, heads = 1, state_dim = 128, value_dim = 64;
  int64_t memory_chunk = 256;
  int64_t query_heads = 1, read_heads = 1, gate_heads = 1;
  bool wide_contributions = false;  // f32 beside bf16
};
Cost state_memory_attention_cost(Pass pass, const StateMemorySize& s, DType dtype);

// What the backends see: checked, dense tensors.
struct StateMemoryProblem {
  Tensor q = {}, e = {}, c = {};  // [B,T,*,N], [B,T,*,P], [B,T,*,N]
  Tensor memories = {};           // [M,H,N,P]
  Tensor gate = {}, base = {};    // undefined: 1, 0
  double scale = 1, eps = 0, eps_row = 0;
  bool normalize = true;
  int64_t memory_chunk = 1;
  SeqLayout layout = {};
  // Decoding, forward only: how many tokens of each sequence came before those here (empty: none,
  // as above). Sequence n then finds all its complete runs, theirs too, at memories n·room ...
  std::vector<int64_t> before = {};
  int64_t room = 0;
  // Backward, CUDA: what the forward pass has made of the memories, [M,H,bytes]; they are undefined
  // then.
  Tensor prepared = {};

  int64_t batch() const { return q.size(0); }
  int64_t time() const { return q.size(1); }
  int64_t memory_count() const { return (memories ? memories : prepared).size(0); }
  int64_t heads() const { return (memories ? memories : prepared).size(1); }
  int64_t state_dim() const { return q.size(3); }
  int64_t value_dim() const { return e.size(3); }
};
struct StateMemoryGradients {  // undefined: not wanted. Dense, overwritten.
  Tensor dq = {}, de = {}, dc = {}, dmemories = {}, dgate = {};
};
// r and lse are overwritten, and o if it is defined (it is not where it would be r itself).
namespace cpu {
void state_memory_attention_fwd(const StateMemoryProblem& p, const Tensor& o, const Tensor& r,
                                const Tensor& lse);
void state_memory_attention_bwd(const StateMemoryProblem& p, const Tensor& r, const Tensor& lse,
                                const Tensor& d_o, const StateMemoryGradients& grads);
}  // namespace cpu
namespace gpu {
// Returns `prepared` for the backward pass; undefined where that reads the memories themselves.
Tensor state_memory_attention_fwd(const StateMemoryProblem& p, const Tensor& o, const Tensor& r,
                                  const Tensor& lse);
void state_memory_attention_bwd(const StateMemoryProblem& p, const Tensor& r, const Tensor& lse,
                                const Tensor& d_o, const StateMemoryGradients& grads);
}  // namespace gpu

}  // namespace ebb
