// Root-mean-square normalisation over the last axis (models.md 1.1).
//   r[n] = 1 / sqrt(mean_i x[n,i]² + eps)        y[n,i] = x[n,i]·r[n]·w[i]
//   with c = dy·w, x̂ = x·r:  dx = r (c − x̂·mean(c·x̂)),  dw = Σ_n dy·x̂
// x [...,d] f32 f64 bf16 (any strides), w [d] or undefined (= 1); f32 beside bf16 x, and so is its
// gradient. d may be any size >= 1, the number of rows 0. Statistics in f32 (f64 on the CPU): on
// the GPU a row whose Σx² exceeds 3.4e38 (values around 1e18) becomes NaN, never silently zero.
// Saves x, w, r [...].
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

Var rms_norm(const Var& x /*[...,d]*/, const Var& w /*[d]*/, float eps);

// u = x + residual, y = rms_norm(u, w): the pre-norm residual stream in one pass. u has the
// residual's dtype (on the GPU an f32 stream beside bf16 activations is fine), y has x's. y is the
// norm of u as rounded to that dtype, so that forward and backward agree. Saves u, w, r.
struct AddRmsNorm {
  Var y;  // [...,d]
  Var u;  // [...,d]
};
AddRmsNorm add_rms_norm(const Var& x, const Var& residual, const Var& w, float eps);

Cost rms_norm_cost(Pass pass, const Shape& x, DType dtype);
// The backward pass counts a gradient that arrives at u.
Cost add_rms_norm_cost(Pass pass, const Shape& x, DType dtype, DType stream);

// Rows [tokens, groups, width] (ops/norm_rows.h), w [width], r [tokens, groups]. residual, u:
// undefined for the plain norm. r: undefined if it is not wanted. du: the gradient that arrives at
// u from elsewhere, may be undefined. The gradient of u goes to dx (dtype of y) and to dresidual
// (dtype of u); either may be undefined, and so may dw.
namespace cpu {
void rms_norm_fwd(const Tensor& x, const Tensor& residual, const Tensor& w, float eps,
                  const Tensor& y, const Tensor& u, const Tensor& r);
void rms_norm_bwd(const Tensor& u, const Tensor& w, const Tensor& r, const Tensor& dy,
                  const Tensor& du, const Tensor& dx, const Tensor& dresidual, const Tensor& dw);
}  // namespace cpu
namespace gpu {
void rms_norm_fwd(const Tensor& x, const Tensor& residual, const Tensor& w, float eps,
                  const Tensor& y, const Tensor& u, const Tensor& r);
void rms_norm_bwd(const Tensor& u, const Tensor& w, const Tensor& r, const Tensor& dy,
                  const Tensor& du, const Tensor& dx, const Tensor& dresidual, const Tensor& dw);
}  // namespace gpu

}  // namespace ebb
