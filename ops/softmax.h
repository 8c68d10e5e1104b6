// Softmax over the last dimension.
//   softmax:      y = exp(x − max) / Σ exp(x − max)      dx = y (dy − Σ dy y)
//   log_softmax:  y = (x − max) − log Σ exp(x − max)     dx = dy − softmax(x) Σ dy
// x [...,d] f32, f64 (CPU), bf16, any strides; statistics in f32 (f64 for f64). softmax saves y;
// log_softmax saves x and its statistics [N,2], since exp of a rounded y would lose digits. −∞ is
// a masked entry; a row of nothing else gives NaN.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

Var softmax(const Var& x);
Var log_softmax(const Var& x);
Cost softmax_cost(Pass pass, const Shape& x, DType dtype);

// All tensors dense, rows n = all leading dimensions. stats [N,2]: maximum and log Σ exp(x − max)
// in the accumulate type, undefined for the plain softmax; from: y of softmax, x of log_softmax.
namespace cpu {
void softmax_fwd(const Tensor& x, const Tensor& y, const Tensor& stats);
void softmax_bwd(const Tensor& dy, const Tensor& from, const Tensor& stats, const Tensor& dx);
}  // namespace cpu
namespace gpu {
void softmax_fwd(const Tensor& x, const Tensor& y, const Tensor& stats);
void softmax_bwd(const Tensor& dy, const Tensor& from, const Tensor& stats, const Tensor& dx);
}  // namespace gpu

}  // namespace ebb
