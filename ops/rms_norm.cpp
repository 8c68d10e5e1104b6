#include "ops/rms_norm.h"

#include "ops/common.h"
#include "ops/norm_rows.h"

namespace ebb {

namespace cpu {

void rms_norm_fwd(const Tensor& x, const Tensor& residual, const Tensor& w, float eps,
                  const Tensor& y, const Tensor& u, const Tensor& r) {
  const int64_t d = x.size(2), n = x.size(0) * x.size(1);
  if (n * d == 0) return;
  visit_cpu(x.dtype(), [&]<class T>() {
    const RowsAt<T> x_at(x), res_at(residual), y_at(y), u_at(u);
    const Tensor weights = or_constant(w, d, 1, x.dtype());
    const T* p_w = weights.data<T>();
    T* p_r = data_or_null<T>(r);
#pragma omp parallel for if (n * d > kParallelValues)
    for (int64_t i = 0; i < n; ++i) {
      const T *row = x_at(i), *res = res_at(i);
      T *sum = u_at(i), *out = y_at(i);
      if (sum) {
#pragma omp simd
        for (int64_t j = 0; j < d; ++j) sum[j] = row[j] + res[j];
        row = sum;
      }
      const double square = row_sum(d, [=](int64_t j) { return double(row[j]) * double(row[j]); });
      const T scale = T(rstd_of(square / double(d), eps));
      if (p_r) p_r[i] = scale;
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) out[j] = row[j] * scale * p_w[j];
    }
  });
}

void rms_norm_bwd(const Tensor& u, const Tensor& w, const Tensor& r, const Tensor& dy,
                  const Tensor& du, const Tensor& dx, const Tensor& dresidual, const Tensor& dw) {
  const int64_t d = u.size(2), n = u.size(0) * u.size(1);
  visit_cpu(u.dtype(), [&]<class T>() {
    const RowsAt<T> u_at(u), dy_at(dy), du_at(du);
    const RowsAt<T> out_at(dx ? dx : dresidual);  // one dtype on the CPU, so one gradient
    const Tensor weights = or_constant(w, d, 1, u.dtype());
    const T *p_w = weights.data<T>(), *p_r = r.data<T>();
    const auto row_gradients = [&](int64_t i, T* sums) {
      const T *row = u_at(i), *g = dy_at(i), *more = du_at(i), scale = p_r[i];
      T* out = out_at(i);
      const auto c = [=](int64_t j) { return g[j] * p_w[j]; };
      const double dot = row_sum(d, [=](int64_t j) { return double(c(j)) * double(row[j]); });
      const T mean = T(dot * double(scale) / double(d));
      if (out)
#pragma omp simd
        for (int64_t j = 0; j < d; ++j) out[j] = scale * (c(j) - row[j] * scale * mean);
      if (out && more)
#pragma omp simd
        for (int64_t j = 0; j < d; ++j) out[j] += more[j];
      if (sums)
#pragma omp simd
        for (int64_t j = 0; j < d; ++j) sums[j] += g[j] * row[j] * scale;
    };
    const auto sums = for_rows_summing<T>(n, dw ? d : 0, n * d, row_gradients);
    if (dw) std::copy(sums.begin(), sums.end(), dw.data<T>());
  });
  if (dx && dresidual) dresidual.copy_(dx);
}

}  // namespace cpu

namespace {

// Saved: u (or x) as rows, w, r.
struct Backward {
  RowForm form;
  bool add = false;

  void operator()(BackwardContext& ctx) const {
    const Tensor &u = ctx.saved(0), &w = ctx.saved(1), &r = ctx.saved(2);
    const Tensor dy = ctx.dy(0), du = add && ctx.has_dy(1) ? ctx.dy(1) : Tensor();
    const int weight = add ? 2 : 1;
    const bool needs_x = ctx.needs(0), needs_residual = add && ctx.needs(1);
    // One tensor serves both where x and the stream have one dtype.
    const bool shared = u.dtype() == dy.dtype();
    const auto fresh = [&](bool wanted, DType t) {
      return wanted ? Tensor::empty(dy.shape(), t, u.device()) : Tensor();
    };
    const Tensor dx = fresh(needs_x || (needs_residual && shared), dy.dtype());
    const Tensor dresidual = fresh(needs_residual && !shared, u.dtype());
    const Tensor dw = ctx.needs(weight) ? Tensor::empty_like(w) : Tensor();
    const auto run = kWithCuda && u.on_cuda() ? gpu::rms_norm_bwd : cpu::rms_norm_bwd;
    run(u, w, r, to_rows(dy, form), to_rows(du, form), to_rows(dx, form), to_rows(dresidual, form),
        dw);
    if (needs_x) ctx.grad(0, dx);
    if (needs_residual) ctx.grad(1, shared ? dx : dresidual);
    if (dw) ctx.grad(weight, dw);
  }
};

AddRmsNorm run(const char* op, const Var& xv, const Var& rv, const Var& wv, float eps) {
  check_defined(op, "x", xv.value());
  const bool add = rv.defined();
  check_compute_dtype(op, "x", xv.value());
  check_same_device(op, xv.value(), {&rv.value(), &wv.value()});
  check(xv.dim() >= 1, "{}: x is a scalar, want [...,d]", op);
  const int64_t d = xv.shape().back();
  check(!wv || wv.shape() == Shape{d}, "{}: w is {}, x is {}; want w = [{}]", op, wv.shape(),
        xv.shape(), d);
  check(!add || rv.shape() == xv.shape(), "{}: residual is {}, x is {}", op, rv.shape(),
        xv.shape());
  check(!add || rv.dtype() == xv.dtype() || (xv.on_cuda() && rv.dtype() == DType::f32),
        "{}: residual is {}, x is {}", op, rv.dtype(), xv.dtype());
  const RowForm form = row_form({&xv.value(), &rv.value()}, 1);
  const Tensor x = to_rows(xv.value(), form), residual = to_rows(rv.value(), form);
  const Tensor w = wv ? parameter_values(op, "w", wv.value(), x) : Tensor();
  const Tensor y = Tensor::empty(xv.shape(), x.dtype(), x.device());
  const Tensor u = add ? Tensor::empty(xv.shape(), rv.dtype(), x.device()) : Tensor();
  const Tensor r = will_record({xv, rv, wv}) ? row_statistics(x) : Tensor();
  const auto run = kWithCuda && x.on_cuda() ? gpu::rms_norm_fwd : cpu::rms_norm_fwd;
  run(x, residual, w, eps, to_rows(y, form), to_rows(u, form), r);
  const Backward backward{form, add};
  if (!add) return {record(op, {xv, wv}, {x, w, r}, {y}, backward)[0], {}};
  const std::vector<Var> out = record(op, {xv, rv, wv}, {to_rows(u, form), w, r}, {y, u}, backward);
  return {out[0], out[1]};
}

double row_count(const Shape& x) { return x.back() ? double(x.numel() / x.back()) : 0; }

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

Cost rms_norm_cost(Pass pass, const Shape& x, DType dtype) {
  const double n = double(x.numel()), item = double(item_size(dtype));
  const double small = double(item_size(accumulate_type(dtype)));
  const double w = small * double(x.back()), r = small * row_count(x);
  if (pass == Pass::forward) return {2 * n * item + w + r, 4 * n};
  return {3 * n * item + 2 * w + r, 10 * n};
}

Cost add_rms_norm_cost(Pass pass, const Shape& x, DType dtype, DType stream) {
  const double n = double(x.numel()), wide = double(item_size(stream));
  // forward: the residual in, u out. backward: u has the stream's type, the other gradient comes
  // in, and a second dtype asks for a second output.
  const double more = pass == Pass::forward ? 2 * wide
                      : stream == dtype     ? wide
                                            : 3 * wide - double(item_size(dtype));
  return rms_norm_cost(pass, x, dtype) + Cost{more * n, n};
}

}  // namespace ebb
