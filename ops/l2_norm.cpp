#include "ops/l2_norm.h"

#include "ops/common.h"
#include "ops/norm_rows.h"

namespace ebb {

namespace cpu {

void l2_norm_fwd(const Tensor& x, float eps, const Tensor& y, const Tensor& r) {
  const int64_t d = x.size(2), n = x.size(0) * x.size(1);
  visit_cpu(x.dtype(), [&]<class T>() {
    const RowsAt<T> x_at(x), y_at(y);
    T* p_r = data_or_null<T>(r);
#pragma omp parallel for if (n * d > kParallelValues)
    for (int64_t i = 0; i < n; ++i) {
      const T* row = x_at(i);
      T* out = y_at(i);
      const double square = row_sum(d, [=](int64_t j) { return double(row[j]) * double(row[j]); });
      const T scale = T(rstd_of(square, eps));
      if (p_r) p_r[i] = scale;
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) out[j] = row[j] * scale;
    }
  });
}

void l2_norm_bwd(const Tensor& y, const Tensor& r, const Tensor& dy, const Tensor& dx) {
  const int64_t d = y.size(2), n = y.size(0) * y.size(1);
  visit_cpu(y.dtype(), [&]<class T>() {
    const RowsAt<T> y_at(y), dy_at(dy), dx_at(dx);
    const T* p_r = r.data<T>();
#pragma omp parallel for if (n * d > kParallelValues)
    for (int64_t i = 0; i < n; ++i) {
      const T *row = y_at(i), *g = dy_at(i), scale = p_r[i];
      T* out = dx_at(i);
      const T dot = T(row_sum(d, [=](int64_t j) { return double(row[j]) * double(g[j]); }));
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) out[j] = scale * (g[j] - row[j] * dot);
    }
  });
}

}  // namespace cpu

Var l2_norm(const Var& xv, float eps) {
  const OpScope scope("l2_norm");
  check_defined("l2_norm", "x", xv.value());
  check_compute_dtype("l2_norm", "x", xv.value());
  check(xv.dim() >= 1, "l2_norm: x is a scalar, want [...,d]");
  const RowForm form = row_form({&xv.value()}, 1);
  const Tensor x = to_rows(xv.value(), form), y = Tensor::empty(xv.shape(), x.dtype(), x.device());
  const Tensor r = will_record({xv}) ? row_statistics(x) : Tensor();
  const auto run = kWithCuda && x.on_cuda() ? gpu::l2_norm_fwd : cpu::l2_norm_fwd;
  run(x, eps, to_rows(y, form), r);
  return record("l2_norm", {xv}, {to_rows(y, form), r}, {y}, [form](BackwardContext& ctx) {
    const Tensor &y = ctx.saved(0), &r = ctx.saved(1);
    const Tensor dy = ctx.dy(0), dx = Tensor::empty(dy.shape(), y.dtype(), y.device());
    const auto run = kWithCuda && y.on_cuda() ? gpu::l2_norm_bwd : cpu::l2_norm_bwd;
    run(y, r, to_rows(dy, form), to_rows(dx, form));
    ctx.grad(0, dx);
  })[0];
}

Cost l2_norm_cost(Pass pass, const Shape& x, DType dtype) {
  const double n = double(x.numel()), item = double(item_size(dtype));
  const double rows = x.back() ? n / double(x.back()) : 0;
  const double r = rows * double(item_size(accumulate_type(dtype)));
  if (pass == Pass::forward) return {2 * n * item + r, 3 * n};
  return {3 * n * item + r, 5 * n};
}

}  // namespace ebb
