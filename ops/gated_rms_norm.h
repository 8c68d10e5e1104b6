// RMS normalisation with an output gate over the last axis (models.md 1.3); a = act(gate),
// act = silu or sigmoid, groups = equal slices of the last axis that are normalised apart.
//   norm_first:  y = rms(x)·w·a      GDN, KDA, GLA ...: x [...,H,V], w [V] shared by all heads
//   gate_first:  y = rms(x·a)·w      Mamba-2, DART: x [...,D], w [D]
//   rms(u) = u·r,  r = 1/sqrt(mean u² + eps), the mean over a slice
// Backward, û = u·r, ḡ(c) = r (c − û·mean(c·û)):
//   norm_first:  dx = ḡ(dy·a·w),              dgate = dy·x̂·w·a',      dw = Σ dy·a·x̂
//   gate_first:  du = ḡ(dy·w), dx = du·a,     dgate = du·x·a',        dw = Σ dy·û
// x, gate, y of one shape and dtype: f32 f64 bf16, any strides; w [D] of the last axis or undefined
// (= 1), f32 beside bf16, and so is its gradient (summed over all leading dimensions). Statistics
// in f32 (f64 on the CPU) of unrounded products; on the GPU a slice whose Σu² exceeds 3.4e38
// becomes NaN, never silently zero. Saves x, gate, w, r [..., groups].
// A slice of a wider projection is read in place.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

enum class GateAct { silu, sigmoid };
enum class GateOrder { norm_first, gate_first };

struct GatedRmsNormOptions {
  float eps = 1e-6f;
  GateAct act = GateAct::silu;
  GateOrder order = GateOrder::norm_first;
  int64_t groups = 1;
};

Var gated_rms_norm(const Var& x /*[...,D]*/, const Var& gate /*[...,D]*/, const Var& w /*[D]*/,
                   const GatedRmsNormOptions& options);
Cost gated_rms_norm_cost(Pass pass, const Shape& x, DType dtype, int64_t groups = 1);

// Rows [tokens, groups, width] (ops/norm_rows.h); w [weight_groups·width] repeats over the groups;
// r [tokens, groups]. options.groups is not read. w, r (forward), dx, dgate, dw may be undefined.
namespace cpu {
void gated_rms_norm_fwd(const Tensor& x, const Tensor& gate, const Tensor& w,
                        const GatedRmsNormOptions& options, const Tensor& y, const Tensor& r);
void gated_rms_norm_bwd(const Tensor& x, const Tensor& gate, const Tensor& w, const Tensor& r,
                        const Tensor& dy, const GatedRmsNormOptions& options, const Tensor& dx,
                        const Tensor& dgate, const Tensor& dw);
}  // namespace cpu
namespace gpu {
void gated_rms_norm_fwd(const Tensor& x, const Tensor& gate, const Tensor& w,
                        const GatedRmsNormOptions& options, const Tensor& y, const Tensor& r);
void gated_rms_norm_bwd(const Tensor& x, const Tensor& gate, const Tensor& w, const Tensor& r,
                        const Tensor& dy, const GatedRmsNormOptions& options, const Tensor& dx,
                        const Tensor& dgate, const Tensor& dw);
}  // namespace gpu

}  // namespace ebb
