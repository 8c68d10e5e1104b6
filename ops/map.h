// The engine under the elementwise operators: out[i] = f(a[i], b[i], c[i]) for one f of a closed
// list, over operands of any strides that broadcast against each other, without copies.
//   Tensor y = map({MapOp::silu}, x.dtype(), x);
//   Tensor dx = map({MapOp::silu_grad}, x.dtype(), dy, x);
// Operands are f32, f64 (CPU), bf16 or u8 masks, mixed freely. Arithmetic is f64 when any operand
// or the result is f64, else f32. Nothing is recorded here.
#pragma once
#include "tensor/tensor.h"

namespace ebb {

enum class MapOp : int {
  // of x
  identity,
  neg,
  exp,
  log,
  sqrt,
  rsqrt,
  square,
  relu,
  relu2,
  sigmoid,
  silu,
  tanh,
  softplus,
  abs,
  pow,          // x^p0
  clamp,        // into [p0, p1]
  add_scalar,   // x + p0
  mul_scalar,   // x · p0
  div_scalar,   // x / p0
  rsub_scalar,  // p0 − x
  rdiv_scalar,  // p0 / x
  // of a and b
  add,
  sub,
  mul,
  div,
  maximum,
  minimum,
  masked_fill,  // b ? p0 : a
  masked_keep,  // b ? a : p0
  // gradients, of dy and the saved x or y
  sqrt_grad,   // dy, y
  rsqrt_grad,  // dy, y
  square_grad,
  relu_grad,
  relu2_grad,
  sigmoid_grad,
  silu_grad,
  tanh_grad,
  softplus_grad,
  abs_grad,
  pow_grad,
  clamp_grad,
  rdiv_grad,
  // of three
  where,           // a ? b : c
  div_grad,        // gradient of b in a / b, of dy, a, b
  maximum_grad,    // gradient of a in maximum(a, b), of dy, a, b
  logsumexp_grad,  // dy · exp(x − y), of dy, x, y
  norm_grad,       // dy · x / y, 0 where y is 0, of dy, x, y
  // comparisons of a and b, 1 or 0
  eq,
  ne,
  lt,
  le,
  gt,
  ge
};

struct MapFunction {
  MapOp op = MapOp::identity;
  double p0 = 0, p1 = 0;
};

// What a kernel needs: the operands' layouts with size-1 dimensions dropped and neighbours merged
// where every operand allows it. The result is dense in row-major order.
inline constexpr int kMapInputs = 3;
struct MapPlan {
  MapFunction f = {};
  int inputs = 0;  // operands in use
  int rank = 1;
  int64_t numel = 0;
  int64_t size[kMaxDims] = {};
  const void* in[kMapInputs] = {};
  DType in_dtype[kMapInputs] = {};
  int64_t stride[kMapInputs][kMaxDims] = {};
  void* out = nullptr;
  DType out_dtype = DType::f32;
};

// Broadcasts, allocates and runs. Comparisons also take integers, two at a time, and then compare
// exactly in i64. Errors name the current operator.
Tensor map(const MapFunction& f, DType out, const Tensor& a, const Tensor& b = {},
           const Tensor& c = {});

namespace cpu {
void map(const MapPlan& plan);
}
namespace gpu {
void map(const MapPlan& plan, Stream stream);
}

}  // namespace ebb
