#include "ops/sigmoid_gate.h"

#include <omp.h>

#include "ops/common.h"
#include "ops/cpu_math.h"

namespace ebb {

namespace cpu {

void sigmoid_gate_fwd(const Rows& x, double scale, const Tensor& y) {
  visit_float(x.t.dtype(), [&]<class T>() {
    using A = acc_t<T>;
#pragma omp parallel for if (y.numel() > 16384)
    for (int64_t n = 0; n < x.count; ++n) {
      const T* in = x.t.data<T>() + n * x.stride;
      A* out = y.data<A>() + n * x.width;
      for (int64_t i = 0; i < x.width; ++i) out[i] = A(scale) * sigmoid(A(in[i]));
    }
  });
}

void sigmoid_gate_bwd(const Rows& x, double scale, const Tensor& dy, const Tensor& dx) {
  visit_float(x.t.dtype(), [&]<class T>() {
    using A = acc_t<T>;
#pragma omp parallel for if (dx.numel() > 16384)
    for (int64_t n = 0; n < x.count; ++n) {
      const T* in = x.t.data<T>() + n * x.stride;
      const A* g = dy.data<A>() + n * x.width;
      T* out = dx.data<T>() + n * x.width;
      // σ(−x) instead of 1 − σ(x), which would have no digits left where the gate is open.
      for (int64_t i = 0; i < x.width; ++i)
        out[i] = T(g[i] * A(scale) * sigmoid(A(in[i])) * sigmoid(-A(in[i])));
    }
  });
}

}  // namespace cpu

Var sigmoid_gate(const Var& xv, double scale) {
  const char* op = "sigmoid_gate";
  const OpScope scope(op);
  const Tensor& x = xv.value();
  check_defined(op, "x", x);
  check_compute_dtype(op, "x", x);
  check(std::isfinite(scale), "{}: scale is {}, want a finite number", op, scale);
  const Rows rows = as_rows(x.dim() ? x : x.unsqueeze(0));
  const Tensor y = Tensor::empty(x.shape(), accumulate_type(x.dtype()), x.device());
  if (kWithCuda && x.on_cuda())
    gpu::sigmoid_gate_fwd(rows, scale, y);
  else
    cpu::sigmoid_gate_fwd(rows, scale, y);
  return record(op, {xv}, {rows.t}, {y}, [scale, shape = x.shape()](BackwardContext& ctx) {
    const Rows rows = as_rows(ctx.saved(0));
    const Tensor dx = Tensor::empty(shape, rows.t.dtype(), rows.t.device());
    const Tensor dy = ctx.dy(0).contiguous();
    if (kWithCuda && dx.on_cuda())
      gpu::sigmoid_gate_bwd(rows, scale, dy, dx);
    else
      cpu::sigmoid_gate_bwd(rows, scale, dy, dx);
    ctx.grad(0, dx);
  })[0];
}

Cost sigmoid_gate_cost(Pass pass, int64_t elements, DType dtype) {
  const double n = double(elements), size = double(item_size(dtype));
  const double wide = double(item_size(accumulate_type(dtype)));
  if (pass == Pass::forward) return {n * (size + wide), n * 4};
  return {n * (2 * size + wide), n * 8};
}

}  // namespace ebb
