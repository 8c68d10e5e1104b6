// Log decays of the gated recurrences (models.md 3.3, 6.3), y = a + dt_bias:
//   softplus   g = −exp(A_log[h])·softplus(y)             softplus(y) = log(1 + e^y), y above 20
//   bounded    g = lower_bound·σ(exp(A_log[h])·y)         lower_bound < 0, g in (lower_bound, 0)
// One decay per head (GDN, Mamba-2): a [...,H], A_log [H], dt_bias [H]. One per channel (KDA,
// GDN2): a [...,H,K] or [...,H·K], A_log [H], dt_bias [H,K] or [H·K]. g has a's shape and is always
// f32 (f64 for f64); it is a natural logarithm and never positive. Backward: softplus da =
// −exp(A_log) σ(y) dg, dA_log[h] = Σ dg·g; bounded, with u = exp(A_log) y, du =
// lower_bound·σ(u)σ(−u) dg, da = exp(A_log) du, dA_log[h] = Σ du·u. ddt_bias = Σ da. The sums over
// tokens are taken in f64, in a fixed order. A recurrence that clamps a decay must hand back dg = 0
// there: exp(A_log) would blow rounding noise up. Saves a, A_log, dt_bias.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/rows.h"

namespace ebb {

struct DecayGateOptions {
  double lower_bound = 0;         // 0: softplus
  int64_t channels_per_head = 1;  // K; read only where dt_bias is absent
};

// a f32 f64 bf16. A_log and dt_bias are f32 (f64 beside f64) in every precision mode: a bf16 one is
// refused, since a step of the learning rate would round away.
Var decay_gate(const Var& a, const Var& A_log, const Var& dt_bias = {},
               const DecayGateOptions& options = {});

Cost decay_gate_cost(Pass pass, int64_t elements, DType dtype);  // elements of g

struct DecayGateArgs {
  Rows a = {};          // rows of H·K
  Tensor A_log = {};    // [H] f32 (f64)
  Tensor dt_bias = {};  // [H·K], same dtype; undefined: zeros
  double lower_bound = 0;
};
// Gradients; an undefined one is not wanted.
struct DecayGateGrads {
  Tensor da = {};        // dense, a's dtype
  Tensor dA_log = {};    // [H]
  Tensor ddt_bias = {};  // [H·K]
};
namespace cpu {
void decay_gate_fwd(const DecayGateArgs& in, const Tensor& g);
void decay_gate_bwd(const DecayGateArgs& in, const Tensor& dg, const DecayGateGrads& out);
}  // namespace cpu
namespace gpu {
void decay_gate_fwd(const DecayGateArgs& in, const Tensor& g);
void decay_gate_bwd(const DecayGateArgs& in, const Tensor& dg, const DecayGateGrads& out);
}  // namespace gpu

}  // namespace ebb
