// β = scale·σ(x): write and erase strengths of the delta family (models.md 3; scale 2 where
// negative eigenvalues are allowed) and RWKV-7's decay (scale −0.6065). x [...] f32 f64 bf16, any
// strides; β in f32 (f64 for f64), as the recurrences take it. Saves x: dx = dβ·scale·σ(x)σ(−x).
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/rows.h"

namespace ebb {

Var sigmoid_gate(const Var& x, double scale = 1);

Cost sigmoid_gate_cost(Pass pass, int64_t elements, DType dtype);

namespace cpu {
void sigmoid_gate_fwd(const Rows& x, double scale, const Tensor& y);
void sigmoid_gate_bwd(const Rows& x, double scale, const Tensor& dy, const Tensor& dx);
}  // namespace cpu
namespace gpu {
void sigmoid_gate_fwd(const Rows& x, double scale, const Tensor& y);
void sigmoid_gate_bwd(const Rows& x, double scale, const Tensor& dy, const Tensor& dx);
}  // namespace gpu

}  // namespace ebb
