#include "ops/rms_norm.h"

#include <omp.h>

#include "ops/common.h"

namespace ebb {

namespace cpu {

void rms_norm_fwd(const Tensor& x, const Tensor& residual, const Tensor& w, float eps,
                  const Tensor& y, const Tensor& u, const Tensor& r) {
  const int64_t d = w.numel(), n = d ? x.numel() / d : 0;
  visit_float(x.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const T* p_x = x.data<T>();
    const T* p_res = residual ? residual.data<T>() : nullptr;
    T* p_u = u ? u.data<T>() : nullptr;
    T* p_y = y.data<T>();
    const A* p_w = w.data<A>();
    A* p_r = r.data<A>();
#pragma omp parallel for if (n * d > 16384)
    for (int64_t i = 0; i < n; ++i) {
      const T* row = p_x + i * d;
      if (p_u) {
        for (int64_t j = 0; j < d; ++j) p_u[i * d + j] = T(A(row[j]) + A(p_res[i * d + j]));
        row = p_u + i * d;
      }
      A sum = 0;
      for (int64_t j = 0; j < d; ++j) sum += A(row[j]) * A(row[j]);
      const A scale = 1 / std::sqrt(sum / A(d) + A(eps));
      p_r[i] = scale;
      for (int64_t j = 0; j < d; ++j) p_y[i * d + j] = T(A(row[j]) * scale * p_w[j]);
    }
  });
}

void rms_norm_bwd(const Tensor& u, const Tensor& w, const Tensor& r, const Tensor& dy,
                  const Tensor& du, const Tensor& dx, const Tensor& dw) {
  const int64_t d = w.numel(), n = d ? u.numel() / d : 0;
  visit_float(u.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const T *p_u = u.data<T>(), *p_dy = dy.data<T>(), *p_du = du ? du.data<T>() : nullptr;
    const A *p_w = w.data<A>(), *p_r = r.data<A>();
    T* p_dx = dx ? dx.data<T>() : nullptr;
    // Partial weight gradients per fixed block of rows, summed in order: the result does not
    // depend on the number of threads.
    constexpr int64_t kRows = 256;
    const int64_t blocks = (n + kRows - 1) / kRows;
    std::vector<A> partial(dw ? size_t(blocks * d) : 0);
#pragma omp parallel for if (n * d > 16384)
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t i = b * kRows; i < std::min(n, (b + 1) * kRows); ++i) {
        const T *row = p_u + i * d, *g = p_dy + i * d;
        A dot = 0;
        for (int64_t j = 0; j < d; ++j) dot += A(g[j]) * p_w[j] * A(row[j]);
        const A mean = dot * p_r[i] / A(d);  // mean of c·x̂ with c = dy·w
        if (p_dx) {
          for (int64_t j = 0; j < d; ++j) {
            const A v = p_r[i] * (A(g[j]) * p_w[j] - A(row[j]) * p_r[i] * mean);
            p_dx[i * d + j] = T(p_du ? v + A(p_du[i * d + j]) : v);
          }
        }
        if (dw)
          for (int64_t j = 0; j < d; ++j)
            partial[size_t(b * d + j)] += A(g[j]) * A(row[j]) * p_r[i];
      }
    }
    if (dw) {
      A* out = dw.data<A>();
      std::fill(out, out + d, A(0));
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t j = 0; j < d; ++j) out[j] += partial[size_t(b * d + j)];
    }
  });
}

}  // namespace cpu

namespace {

AddRmsNorm run(const char* op, const Var& xv, const Var& rv, const Var& wv, float eps) {
  check_defined(op, "x", xv.value());
  check_defined(op, "w", wv.value());
  const bool add = rv.defined();
  check_compute_dtype(op, "x", xv.value());
  check_same_device(op, xv.value(), {&rv.value(), &wv.value()});
  check(xv.dim() >= 1 && wv.shape() == Shape{xv.shape().back()},
        "{}: w is {}, x is {}; want w = [{}]", op, wv.shape(), xv.shape(),
        xv.dim() ? xv.shape().back() : 0);
  check(!add || rv.shape() == xv.shape(), "{}: residual is {}, x is {}", op, rv.shape(),
        xv.shape());
  check(!add || rv.dtype() == xv.dtype() || (xv.on_cuda() && rv.dtype() == DType::f32),
        "{}: residual is {}, x is {}", op, rv.dtype(), xv.dtype());
  const Tensor x = xv.value().contiguous(), w = parameter_values(op, "w", wv.value(), x);
  const Tensor residual = add ? rv.value().contiguous() : Tensor();
  const Tensor y = Tensor::empty_like(x), u = add ? Tensor::empty_like(residual) : Tensor();
  const Shape rows = x.shape().first(x.dim() - 1);
  const Tensor r = Tensor::empty(rows, accumulate_type(x.dtype()), x.device());
  if (kWithCuda && x.on_cuda())
    gpu::rms_norm_fwd(x, residual, w, eps, y, u, r);
  else
    cpu::rms_norm_fwd(x, residual, w, eps, y, u, r);

  const auto back = [add](BackwardContext& ctx) {
    const Tensor &u = ctx.saved(0), &w = ctx.saved(1), &r = ctx.saved(2);
    const int weight = add ? 2 : 1;
    const bool needs_x = ctx.needs(0) || (add && ctx.needs(1));
    const Tensor dx = needs_x ? Tensor::empty_like(u) : Tensor();
    const Tensor dw = ctx.needs(weight) ? Tensor::empty_like(w) : Tensor();
    const Tensor du = add && ctx.has_dy(1) ? ctx.dy(1).contiguous() : Tensor();
    const Tensor dy = ctx.dy(0).contiguous();
    if (kWithCuda && u.on_cuda())
      gpu::rms_norm_bwd(u, w, r, dy, du, dx, dw);
    else
      cpu::rms_norm_bwd(u, w, r, dy, du, dx, dw);
    if (ctx.needs(0)) ctx.grad(0, add ? dx.to(dy.dtype()) : dx);
    if (add && ctx.needs(1)) ctx.grad(1, dx);
    if (dw) ctx.grad(weight, dw);
  };
  if (!add) return {record(op, {xv, wv}, {x, w, r}, {y}, back)[0], {}};
  const std::vector<Var> out = record(op, {xv, rv, wv}, {u, w, r}, {y, u}, back);
  return {out[0], out[1]};
}

}  // namespace

Var rms_norm(const Var& x, const Var& w, float eps) {
  const OpScope scope("rms_norm");
  return run("rms_norm", x, {}, w, eps).y;
}

AddRmsNorm add_rms_norm(const Var& x, const Var& residual, const Var& w, float eps) {
  const OpScope scope("add_rms_norm");
  check_defined("add_rms_norm", "residual", residual.value());
  return run("add_rms_norm", x, residual, w, eps);
}

}  // namespace ebb
