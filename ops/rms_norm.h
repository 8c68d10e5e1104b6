// Root-mean-square normalisation over the last axis (models.md 1.1).
//   r[n] = 1 / sqrt(mean_i x[n,i]² + eps)        y[n,i] = x[n,i]·r[n]·w[i]
// x [...,d] f32 f64 bf16 (any strides), w [d] (f32 beside bf16 x; its gradient is f32). Statistics
// in f32 (f64 for f64). Saves x, w, r [N]. d may be any size >= 1, N may be 0.
#pragma once
#include "autograd/var.h"

namespace ebb {

Var rms_norm(const Var& x /*[...,d]*/, const Var& w /*[d]*/, float eps);

// u = x + residual, y = rms_norm(u, w): the pre-norm residual stream in one pass. u has the
// residual's dtype (an f32 stream beside bf16 activations is fine), y has x's.
struct AddRmsNorm {
  Var y;  // [...,d]
  Var u;  // [...,d]
};
AddRmsNorm add_rms_norm(const Var& x, const Var& residual, const Var& w, float eps);

// Rows n = all leading dimensions. residual, u: undefined for the plain norm. du: gradient that
// arrives at u from elsewhere, may be undefined. dw: f32 (f64 for f64), overwritten, undefined to
// skip. dx receives the gradient of u.
namespace cpu {
void rms_norm_fwd(const Tensor& x, const Tensor& residual, const Tensor& w, float eps,
                  const Tensor& y, const Tensor& u, const Tensor& r);
void rms_norm_bwd(const Tensor& u, const Tensor& w, const Tensor& r, const Tensor& dy,
                  const Tensor& du, const Tensor& dx, const Tensor& dw);
}  // namespace cpu
namespace gpu {
void rms_norm_fwd(const Tensor& x, const Tensor& residual, const Tensor& w, float eps,
                  const Tensor& y, const Tensor& u, const Tensor& r);
void rms_norm_bwd(const Tensor& u, const Tensor& w, const Tensor& r, const Tensor& dy,
                  const Tensor& du, const Tensor& dx, const Tensor& dw);
}  // namespace gpu

}  // namespace ebb
