#include "ops/layer_norm.h"

#include "ops/common.h"
#include "ops/norm_rows.h"

namespace ebb {

namespace cpu {

void layer_norm_fwd(const Tensor& x, const Tensor& w, const Tensor& b, float eps, const Tensor& y,
                    const Tensor& m, const Tensor& r) {
  const int64_t d = x.size(2), n = x.size(0) * x.size(1);
  if (n * d == 0) return;
  const int64_t columns = w ? w.numel() : b ? b.numel() : d;
  visit_cpu(x.dtype(), [&]<class T>() {
    const RowsAt<T> x_at(x), y_at(y);
    const Tensor weights = or_constant(w, columns, 1, x.dtype());
    const Tensor biases = or_constant(b, columns, 0, x.dtype());
    const T *p_w = weights.data<T>(), *p_b = biases.data<T>();
    T *p_m = data_or_null<T>(m), *p_r = data_or_null<T>(r);
#pragma omp parallel for if (n * d > kParallelValues)
    for (int64_t i = 0; i < n; ++i) {
      const int64_t column = i % (columns / d) * d;
      const T *row = x_at(i), *weight = p_w + column, *bias = p_b + column;
      T* out = y_at(i);
      const double mean = row_sum(d, [=](int64_t j) { return row[j]; }) / double(d);
      const double square = row_sum(d, [=](int64_t j) {
        const double deviation = double(row[j]) - mean;
        return deviation * deviation;
      });
      const T centre = T(mean), scale = T(rstd_of(square / double(d), eps));
      if (p_m) p_m[i] = centre;
      if (p_r) p_r[i] = scale;
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) out[j] = (row[j] - centre) * scale * weight[j] + bias[j];
    }
  });
}

void layer_norm_bwd(const Tensor& x, const Tensor& w, const Tensor& m, const Tensor& r,
                    const Tensor& dy, const Tensor& dx, const Tensor& dw, const Tensor& db) {
  const int64_t d = x.size(2), n = x.size(0) * x.size(1);
  const int64_t columns = w ? w.numel() : dw ? dw.numel() : db ? db.numel() : d;
  visit_cpu(x.dtype(), [&]<class T>() {
    const RowsAt<T> x_at(x), dy_at(dy), dx_at(dx);
    const Tensor weights = or_constant(w, columns, 1, x.dtype());
    const T *p_w = weights.data<T>(), *p_m = m.data<T>(), *p_r = r.data<T>();
    const auto row_gradients = [&](int64_t i, T* sums) {  // sums: dw [D], db [D]
      const int64_t column = i % (columns / d) * d;
      const T *row = x_at(i), *g = dy_at(i), *weight = p_w + column;
      const T centre = p_m[i], scale = p_r[i];
      T* out = dx_at(i);
      const auto c = [=](int64_t j) { return g[j] * weight[j]; };
      const auto hat = [=](int64_t j) { return (row[j] - centre) * scale; };
      if (out) {
        const T mean = T(row_sum(d, c) / double(d));
        const T dot =
            T(row_sum(d, [=](int64_t j) { return double(c(j)) * double(hat(j)); }) / double(d));
#pragma omp simd
        for (int64_t j = 0; j < d; ++j) out[j] = scale * (c(j) - mean - hat(j) * dot);
      }
      if (!sums) return;
      T *sums_w = sums + column, *sums_b = sums_w + columns;
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) {
        sums_w[j] += g[j] * hat(j);
        sums_b[j] += g[j];
      }
    };
    const auto sums = for_rows_summing<T>(n, dw || db ? 2 * columns : 0, n * d, row_gradients);
    if (dw) std::copy(sums.begin(), sums.begin() + columns, dw.data<T>());
    if (db) std::copy(sums.begin() + columns, sums.end(), db.data<T>());
  });
}

}  // namespace cpu

namespace {

Var run(const char* op, const Var& xv, const Var& wv, const Var& bv, int64_t groups, float eps) {
  check_defined(op, "x", xv.value());
  check_compute_dtype(op, "x", xv.value());
  check_same_device(op, xv.value(), {&wv.value(), &bv.value()});
  check(xv.dim() >= 1, "{}: x is a scalar, want [...,D]", op);
  const int64_t d = xv.shape().back();
  check(groups >= 1 && d % groups == 0, "{}: x is {}; {} groups do not divide {} channels", op,
        xv.shape(), groups, d);
  check(!wv || wv.shape() == Shape{d}, "{}: w is {}, x is {}; want w = [{}]", op, wv.shape(),
        xv.shape(), d);
  check(!bv || bv.shape() == Shape{d}, "{}: b is {}, x is {}; want b = [{}]", op, bv.shape(),
        xv.shape(), d);
  const RowForm form = row_form({&xv.value()}, groups);
  const Tensor x = to_rows(xv.value(), form), y = Tensor::empty(xv.shape(), x.dtype(), x.device());
  const Tensor w = wv ? parameter_values(op, "w", wv.value(), x) : Tensor();
  const Tensor b = bv ? parameter_values(op, "b", bv.value(), x) : Tensor();
  const bool recorded = will_record({xv, wv, bv});
  const Tensor m = recorded ? row_statistics(x) : Tensor(), r = recorded ? row_statistics(x) : m;
  const auto run = kWithCuda && x.on_cuda() ? gpu::layer_norm_fwd : cpu::layer_norm_fwd;
  run(x, w, b, eps, to_rows(y, form), m, r);
  return record(op, {xv, wv, bv}, {x, w, m, r}, {y}, [form, d](BackwardContext& ctx) {
    const Tensor &x = ctx.saved(0), &w = ctx.saved(1), &m = ctx.saved(2), &r = ctx.saved(3);
    const Tensor dy = ctx.dy(0);
    const auto column_sums = [&](int input) {
      return ctx.needs(input) ? Tensor::empty({d}, r.dtype(), x.device()) : Tensor();
    };
    const Tensor dx = ctx.needs(0) ? Tensor::empty(dy.shape(), x.dtype(), x.device()) : Tensor();
    const Tensor dw = column_sums(1), db = column_sums(2);
    const auto run = kWithCuda && x.on_cuda() ? gpu::layer_norm_bwd : cpu::layer_norm_bwd;
    run(x, w, m, r, to_rows(dy, form), to_rows(dx, form), dw, db);
    if (dx) ctx.grad(0, dx);
    if (dw) ctx.grad(1, dw);
    if (db) ctx.grad(2, db);
  })[0];
}

}  // namespace

Var layer_norm(const Var& x, const Var& w, const Var& b, float eps) {
  const OpScope scope("layer_norm");
  return run("layer_norm", x, w, b, 1, eps);
}

Var group_norm(const Var& x, const Var& w, const Var& b, int64_t groups, float eps) {
  const OpScope scope("group_norm");
  return run("group_norm", x, w, b, groups, eps);
}

Cost layer_norm_cost(Pass pass, const Shape& x, DType dtype, int64_t groups) {
  const double n = double(x.numel()), item = double(item_size(dtype));
  const double small = double(item_size(accumulate_type(dtype)));
  const double w = small * double(x.back());
  const double stats = x.back() ? 2 * small * n / double(x.back()) * double(groups) : 0;
  if (pass == Pass::forward) return {2 * n * item + 2 * w + stats, 8 * n};
  return {3 * n * item + 3 * w + stats, 14 * n};
}

}  // namespace ebb
