// SwiGLU's elementwise part (models.md 1.6): y = silu(gate) ⊙ up.
//   Var h = swiglu(linear(x, w_gate), linear(x, w_up));
//   Var h = swiglu(linear(x, w_gate_up));    // one projection, gate first: [...,2I] -> [...,I]
// Backward computes silu anew: dgate = dy ⊙ up ⊙ silu'(gate), dup = dy ⊙ silu(gate), with
// silu'(z) = σ(z)(1 + z(1 − σ(z))). Saves the inputs (views of the projection, never copies of a
// view with dense rows); f32 f64 bf16, arithmetic in f32 (f64 for f64).
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/rows.h"

namespace ebb {

Var swiglu(const Var& gate /*[...,I]*/, const Var& up /*[...,I]*/);
Var swiglu(const Var& gate_up /*[...,2I]*/);  // the gradient is one [...,2I], written in place

Cost swiglu_cost(Pass pass, int64_t elements, DType dtype);  // elements of y

// Rows of I elements. dgate, dup: rows in tensors the caller made; undefined where not wanted.
namespace cpu {
void swiglu_fwd(const Rows& gate, const Rows& up, const Tensor& y);
void swiglu_bwd(const Rows& gate, const Rows& up, const Rows& dy, const Rows& dgate,
                const Rows& dup);
}  // namespace cpu
namespace gpu {
void swiglu_fwd(const Rows& gate, const Rows& up, const Tensor& y);
void swiglu_bwd(const Rows& gate, const Rows& up, const Rows& dy, const Rows& dgate,
                const Rows& dup);
}  // namespace gpu

}  // namespace ebb
