// Picking along one dimension by integer index, and back.
//   index_select(x, 0, ids)      // y[m,...] = x[ids[m],...]
//   gather(x, -1, index)         // y[...,m] = x[...,index[...,m]]
// x: any dtype and strides (gradients for floats); indices i64 or i32, on x's device, in
// [0, size of the dimension). One outside throws on the CPU; on the GPU it gives 0 and raises the
// device flag gather_index. Saves the indices. Backward adds the terms of an element in the order
// of their indices, in f32 (f64 for f64), so reruns are bitwise equal.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

Var index_select(const Var& x, int dim, const Tensor& ids /*[M]*/);
// index has x's shape except along dim.
Var gather(const Var& x, int dim, const Tensor& index);

// Picking `picked` of x's elements by `indices` indices. Backward writes the whole gradient of x.
Cost indexing_cost(Pass pass, const Shape& x, int64_t picked, int64_t indices, DType dtype);

// Kernels see dense x [outer,n,inner], y [outer,m,inner] and i64 indices [m] or [outer,m,inner].
// dx is zero on entry and has the accumulate type.
struct GatherShape {
  int64_t outer = 1, n = 1, m = 1, inner = 1;
};
namespace cpu {
void index_select_fwd(const Tensor& x, const Tensor& ids, GatherShape s, const Tensor& y);
void index_select_bwd(const Tensor& dy, const Tensor& ids, GatherShape s, const Tensor& dx);
void gather_fwd(const Tensor& x, const Tensor& index, GatherShape s, const Tensor& y);
void gather_bwd(const Tensor& dy, const Tensor& index, GatherShape s, const Tensor& dx);
}  // namespace cpu
namespace gpu {
void index_select_fwd(const Tensor& x, const Tensor& ids, GatherShape s, const Tensor& y);
void index_select_bwd(const Tensor& dy, const Tensor& ids, GatherShape s, const Tensor& dx);
void gather_fwd(const Tensor& x, const Tensor& index, GatherShape s, const Tensor& y);
void gather_bwd(const Tensor& dy, const Tensor& index, GatherShape s, const Tensor& dx);
}  // namespace gpu

}  // namespace ebb
