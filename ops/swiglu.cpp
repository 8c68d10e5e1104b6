#include "ops/swiglu.h"

#include <omp.h>

#include "ops/common.h"
#include "ops/cpu_math.h"

namespace ebb {

namespace cpu {

void swiglu_fwd(const Rows& gate, const Rows& up, const Tensor& y) {
  visit_float(y.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const int64_t width = gate.width;
#pragma omp parallel for if (y.numel() > 16384)
    for (int64_t n = 0; n < gate.count; ++n) {
      const T *a = gate.t.data<T>() + n * gate.stride, *b = up.t.data<T>() + n * up.stride;
      T* out = y.data<T>() + n * width;
      for (int64_t i = 0; i < width; ++i) out[i] = T(A(a[i]) * sigmoid(A(a[i])) * A(b[i]));
    }
  });
}

void swiglu_bwd(const Rows& gate, const Rows& up, const Rows& dy, const Rows& dgate,
                const Rows& dup) {
  visit_float(dy.t.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const int64_t width = gate.width;
#pragma omp parallel for if (gate.count * width > 16384)
    for (int64_t n = 0; n < gate.count; ++n) {
      const T *a = gate.t.data<T>() + n * gate.stride, *b = up.t.data<T>() + n * up.stride;
      const T* g = dy.t.data<T>() + n * dy.stride;
      if (dgate.t) {
        T* da = dgate.t.data<T>() + n * dgate.stride;
        for (int64_t i = 0; i < width; ++i) {
          const A z = A(a[i]), s = sigmoid(z);
          da[i] = T(A(g[i]) * A(b[i]) * s * (1 + z * (1 - s)));
        }
      }
      if (dup.t) {
        T* db = dup.t.data<T>() + n * dup.stride;
        for (int64_t i = 0; i < width; ++i) db[i] = T(A(g[i]) * A(a[i]) * sigmoid(A(a[i])));
      }
    }
  });
}

}  // namespace cpu

namespace {

constexpr const char* kOp = "swiglu";

Tensor forward(const Rows& gate, const Rows& up, const Shape& shape) {
  const Tensor y = Tensor::empty(shape, gate.t.dtype(), gate.t.device());
  if (kWithCuda && y.on_cuda())
    gpu::swiglu_fwd(gate, up, y);
  else
    cpu::swiglu_fwd(gate, up, y);
  return y;
}

void backward(const Rows& gate, const Rows& up, const Tensor& dy, const Tensor& dgate,
              const Tensor& dup) {
  const Rows a = dgate ? as_rows(dgate) : Rows{}, b = dup ? as_rows(dup) : Rows{};
  if (kWithCuda && dy.on_cuda())
    gpu::swiglu_bwd(gate, up, as_rows(dy), a, b);
  else
    cpu::swiglu_bwd(gate, up, as_rows(dy), a, b);
}

}  // namespace

Var swiglu(const Var& gate, const Var& up) {
  const OpScope scope(kOp);
  check_defined(kOp, "gate", gate.value());
  check_shape(kOp, "up", up.value(), gate.shape());
  check_compute_dtype(kOp, "gate", gate.value());
  check(gate.dim() >= 1, "{}: gate is {}, want [...,I]", kOp, gate.shape());
  check(up.dtype() == gate.dtype(), "{}: gate is {}, up is {}", kOp, gate.dtype(), up.dtype());
  check_same_device(kOp, gate.value(), {&up.value()});
  const Rows a = as_rows(gate.value()), b = as_rows(up.value());
  return record(kOp, {gate, up}, {a.t, b.t}, {forward(a, b, gate.shape())},
                [](BackwardContext& ctx) {
                  const Rows a = as_rows(ctx.saved(0)), b = as_rows(ctx.saved(1));
                  const Tensor da = ctx.needs(0) ? Tensor::empty_like(a.t) : Tensor();
                  const Tensor db = ctx.needs(1) ? Tensor::empty_like(b.t) : Tensor();
                  backward(a, b, ctx.dy(0), da, db);
                  if (da) ctx.grad(0, da);
                  if (db) ctx.grad(1, db);
                })[0];
}

Var swiglu(const Var& gate_up) {
  const OpScope scope(kOp);
  const Tensor& x = gate_up.value();
  check_defined(kOp, "gate_up", x);
  check_compute_dtype(kOp, "gate_up", x);
  check(x.dim() >= 1 && x.size(-1) % 2 == 0, "{}: gate_up is {}, want [...,2I]", kOp, x.shape());
  Shape half = x.shape();
  half[x.dim() - 1] /= 2;
  const int64_t width = half.back();
  // Both halves as rows of x itself, or of one dense copy of it.
  const Tensor rows = as_rows(x).t;
  const auto halves = [](const Tensor& t, int64_t n) {
    return std::pair(t.slice(-1, 0, n), t.slice(-1, n, 2 * n));
  };
  const auto [a, b] = halves(rows, width);
  return record(kOp, {gate_up}, {rows}, {forward(as_rows(a), as_rows(b), half)},
                [halves, width](BackwardContext& ctx) {
                  const Tensor dx = Tensor::empty_like(ctx.saved(0));
                  const auto [a, b] = halves(ctx.saved(0), width);
                  const auto [da, db] = halves(dx, width);
                  backward(as_rows(a), as_rows(b), ctx.dy(0), da, db);
                  ctx.grad(0, dx);
                })[0];
}

Cost swiglu_cost(Pass pass, int64_t elements, DType dtype) {
  const double n = double(elements), size = double(item_size(dtype));
  if (pass == Pass::forward) return {3 * n * size, n * 5};
  return {5 * n * size, n * 12};
}

}  // namespace ebb
