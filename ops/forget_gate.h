// Log decays from a sigmoid forget gate (models.md 7.7, 7.8, 11.2): GLA, HGRN2, Simple Decay.
//   f = l + (1 − l) σ(z + bias)      g = log(f) / divisor
//
//   Var g = forget_gate(z, {.divisor = 16});              // GLA: logsigmoid(z)/16
//   Var g = forget_gate(z, {.lower_bound = l});           // HGRN2
//   Var g = forget_gate(z, {.bias = delta});              // Simple Decay: median decay σ(δ)
//
// z [...,C] or, as heads, [...,H,K] with H·K = C: f32 f64 bf16, read in place. bias and the lower
// bounds l in [0,1) have C values in any shape, f32 (f64 beside f64) in every precision mode;
// absent: 0. g has z's shape and is f32 (f64 for f64), never positive. Near f = 1 it is taken as
// log1p of 1 − f, so that no digits are lost at either end.
// Backward: dz = (1−l) σ(−y)σ(y)/f · dg/divisor, dbias = Σ dz, dl = Σ σ(−y)/f · dg/divisor, the
// sums over tokens in f64, in a fixed order. Saves z, bias, l.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/rows.h"

namespace ebb {

struct ForgetGateOptions {
  Var bias = {};         // C values
  Var lower_bound = {};  // C values
  double divisor = 1;
};
Var forget_gate(const Var& z, const ForgetGateOptions& options = {});

Cost forget_gate_cost(Pass pass, int64_t elements, DType dtype);  // elements of g

struct ForgetGateArgs {
  Rows z = {};        // rows of C
  Tensor bias = {};   // [C] or undefined
  Tensor lower = {};  // [C] or undefined
  double divisor = 1;
};
// Gradients; an undefined one is not wanted.
struct ForgetGateGrads {
  Tensor dz = {};      // dense, z's dtype
  Tensor dbias = {};   // [C]
  Tensor dlower = {};  // [C]
};
namespace cpu {
void forget_gate_fwd(const ForgetGateArgs& in, const Tensor& g);
void forget_gate_bwd(const ForgetGateArgs& in, const Tensor& dg, const ForgetGateGrads& out);
}  // namespace cpu
namespace gpu {
void forget_gate_fwd(const ForgetGateArgs& in, const Tensor& g);
void forget_gate_bwd(const ForgetGateArgs& in, const Tensor& dg, const ForgetGateGrads& out);
}  // namespace gpu

}  // namespace ebb
