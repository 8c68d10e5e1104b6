// LayerNorm and GroupNorm over the last axis (RWKV-7; models.md 1.2).
//   m = mean_i x,  r = 1 / sqrt(mean_i (x−m)² + eps),  x̂ = (x−m)·r,  y = x̂·w + b
//   with c = dy·w:  dx = r (c − mean c − x̂·mean(c·x̂)),  dw = Σ_n dy·x̂,  db = Σ_n dy
// The means are over the last axis (layer_norm) or over each of `groups` equal slices of it
// (group_norm: the channels of one token, never over time); the variance is the biased one.
// x [...,D], y like x: f32 f64 bf16, any strides, D >= 1; w, b [D], each may be undefined (1, 0),
// f32 beside bf16 x, and so are their gradients. Statistics in f32 (f64 on the CPU), the variance
// from the deviations; on the GPU deviations around 1e18 make NaN, never silently zero.
// Saves x, w, m and r [..., groups].
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

Var layer_norm(const Var& x /*[...,D]*/, const Var& w /*[D]*/, const Var& b /*[D]*/, float eps);
// RWKV-7's g_norm: groups = heads, eps = head size · 1e-5.
Var group_norm(const Var& x /*[...,D]*/, const Var& w /*[D]*/, const Var& b /*[D]*/, int64_t groups,
               float eps);
Cost layer_norm_cost(Pass pass, const Shape& x, DType dtype, int64_t groups = 1);

// Rows [tokens, groups, width] (ops/norm_rows.h); w, b [weight_groups·width] repeat over the
// groups; m, r [tokens, groups]. w, b, m and r (forward), dx, dw, db may be undefined.
namespace cpu {
void layer_norm_fwd(const Tensor& x, const Tensor& w, const Tensor& b, float eps, const Tensor& y,
                    const Tensor& m, const Tensor& r);
void layer_norm_bwd(const Tensor& x, const Tensor& w, const Tensor& m, const Tensor& r,
                    const Tensor& dy, const Tensor& dx, const Tensor& dw, const Tensor& db);
}  // namespace cpu
namespace gpu {
void layer_norm_fwd(const Tensor& x, const Tensor& w, const Tensor& b, float eps, const Tensor& y,
                    const Tensor& m, const Tensor& r);
void layer_norm_bwd(const Tensor& x, const Tensor& w, const Tensor& m, const Tensor& r,
                    const Tensor& dy, const Tensor& dx, const Tensor& dw, const Tensor& db);
}  // namespace gpu

}  // namespace ebb
