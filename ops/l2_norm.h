// L2 normalisation over the last axis, of queries and keys (models.md 1.5).
//   r[n] = 1 / sqrt(Σ_i x[n,i]² + eps)        y[n,i] = x[n,i]·r[n]
//   dx = r (dy − y·Σ y·dy)
// eps stands inside the root: a zero row gives zeros and dx = dy/sqrt(eps) (eps > 0).
// x [...,d], y like x: f32 f64 bf16, any strides, d >= 1. Statistics in f32 (f64 for f64); on the
// GPU a row whose Σx² exceeds 3.4e38 becomes NaN, never silently zero. Saves y, r [...].
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

Var l2_norm(const Var& x /*[...,d]*/, float eps = 1e-6f);
Cost l2_norm_cost(Pass pass, const Shape& x, DType dtype);

// Rows [tokens, groups, width] (ops/norm_rows.h), r [tokens, groups] or undefined if it is not
// wanted.
namespace cpu {
void l2_norm_fwd(const Tensor& x, float eps, const Tensor& y, const Tensor& r);
void l2_norm_bwd(const Tensor& y, const Tensor& r, const Tensor& dy, const Tensor& dx);
}  // namespace cpu
namespace gpu {
void l2_norm_fwd(const Tensor& x, float eps, const Tensor& y, const Tensor& r);
void l2_norm_bwd(const Tensor& y, const Tensor& r, const Tensor& dy, const Tensor& dx);
}  // namespace gpu

}  // namespace ebb
