#include "ops/gated_rms_norm.h"

#include "ops/common.h"
#include "ops/cpu_math.h"
#include "ops/norm_rows.h"

namespace ebb {

namespace cpu {
namespace {

// A thread's row buffers: act(z) and act'(z), in loops simple enough for GCC to vectorise.
template <class T>
struct GateRow {
  std::vector<T> value, slope;

  void fill(GateAct act, const T* z, int64_t d, bool slopes) {
    value.resize(size_t(d)), slope.resize(size_t(slopes ? d : 0));
    T *a = value.data(), *da = slope.data();
    const bool silu = act == GateAct::silu;
#pragma omp simd
    for (int64_t j = 0; j < d; ++j) a[j] = sigmoid(z[j]);
    if (slopes && silu)
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) da[j] = a[j] * (1 + z[j] * (1 - a[j]));
    else if (slopes)
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) da[j] = a[j] * (1 - a[j]);
    if (silu)
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) a[j] *= z[j];
  }
};

}  // namespace

void gated_rms_norm_fwd(const Tensor& x, const Tensor& gate, const Tensor& w,
                        const GatedRmsNormOptions& options, const Tensor& y, const Tensor& r) {
  const int64_t d = x.size(2), n = x.size(0) * x.size(1);
  if (n * d == 0) return;
  const int64_t columns = w ? w.numel() : d;
  const bool gate_first = options.order == GateOrder::gate_first;
  visit_cpu(x.dtype(), [&]<class T>() {
    const RowsAt<T> x_at(x), gate_at(gate), y_at(y);
    const Tensor weights = or_constant(w, columns, 1, x.dtype());
    const T* p_w = weights.data<T>();
    T* p_r = data_or_null<T>(r);
#pragma omp parallel for if (n * d > kParallelValues)
    for (int64_t i = 0; i < n; ++i) {
      thread_local GateRow<T> gates;
      gates.fill(options.act, gate_at(i), d, false);
      const T *row = x_at(i), *a = gates.value.data();
      const T* weight = p_w + i % (columns / d) * d;
      T* out = y_at(i);
      const auto gated = [=](int64_t j) {
        const double u = double(row[j]) * double(a[j]);
        return u * u;
      };
      const auto plain = [=](int64_t j) { return double(row[j]) * double(row[j]); };
      const double square = gate_first ? row_sum(d, gated) : row_sum(d, plain);
      const T scale = T(rstd_of(square / double(d), options.eps));
      if (p_r) p_r[i] = scale;
#pragma omp simd
      for (int64_t j = 0; j < d; ++j) out[j] = row[j] * a[j] * (scale * weight[j]);
    }
  });
}

void gated_rms_norm_bwd(const Tensor& x, const Tensor& gate, const Tensor& w, const Tensor& r,
                        const Tensor& dy, const GatedRmsNormOptions& options, const Tensor& dx,
                        const Tensor& dgate, const Tensor& dw) {
  const int64_t d = x.size(2), n = x.size(0) * x.size(1);
  const int64_t columns = w ? w.numel() : d;
  const bool gate_first = options.order == GateOrder::gate_first;
  visit_cpu(x.dtype(), [&]<class T>() {
    const RowsAt<T> x_at(x), gate_at(gate), dy_at(dy), dx_at(dx), dgate_at(dgate);
    const Tensor weights = or_constant(w, columns, 1, x.dtype());
    const T *p_w = weights.data<T>(), *p_r = r.data<T>();
    const auto row_gradients = [&](int64_t i, T* sums) {
      thread_local GateRow<T> gates;
      gates.fill(options.act, gate_at(i), d, true);
      const int64_t column = i % (columns / d) * d;
      const T *row = x_at(i), *g = dy_at(i), *weight = p_w + column;
      const T *a = gates.value.data(), *da = gates.slope.data(), scale = p_r[i];
      T *out = dx_at(i), *out_gate = dgate_at(i);
      const auto gw = [=](int64_t j) { return g[j] * weight[j]; };
      // c·u is dy·w·a·x in either order.
      const double dot =
          row_sum(d, [=](int64_t j) { return double(gw(j)) * double(a[j]) * double(row[j]); });
      const T mean = T(dot * double(scale) / double(d));
      const auto hat = [=](int64_t j) { return (gate_first ? row[j] * a[j] : row[j]) * scale; };
      const auto du = [=](int64_t j) {
        return scale * ((gate_first ? gw(j) : gw(j) * a[j]) - hat(j) * mean);
      };
      if (out)
#pragma omp simd
        for (int64_t j = 0; j < d; ++j) out[j] = gate_first ? du(j) * a[j] : du(j);
      if (out_gate)
#pragma omp simd
        for (int64_t j = 0; j < d; ++j)
          out_gate[j] = (gate_first ? du(j) * row[j] : gw(j) * hat(j)) * da[j];
      if (sums)
#pragma omp simd
        for (int64_t j = 0; j < d; ++j)
          sums[column + j] += g[j] * hat(j) * (gate_first ? T(1) : a[j]);
    };
    const auto sums = for_rows_summing<T>(n, dw ? columns : 0, n * d, row_gradients);
    if (dw) std::copy(sums.begin(), sums.end(), dw.data<T>());
  });
}

}  // namespace cpu

namespace {

void check_arguments(const Var& x, const Var& gate, const Var& w,
                     const GatedRmsNormOptions& options) {
  const char* op = "gated_rms_norm";
  check_defined(op, "x", x.value());
  check_defined(op, "gate", gate.value());
  check_compute_dtype(op, "x", x.value());
  check_same_device(op, x.value(), {&gate.value(), &w.value()});
  check(x.dim() >= 1, "{}: x is a scalar, want [...,D]", op);
  check(gate.shape() == x.shape() && gate.dtype() == x.dtype(),
        "{}: gate is {} {}, x is {} {}; want them alike", op, gate.shape(), gate.dtype(), x.shape(),
        x.dtype());
  const int64_t d = x.shape().back();
  check(options.groups >= 1 && d % options.groups == 0,
        "{}: x is {}; {} groups do not divide {} channels", op, x.shape(), options.groups, d);
  check(!w || w.shape() == Shape{d}, "{}: w is {}, x is {}; want w = [{}]", op, w.shape(),
        x.shape(), d);
}

}  // namespace

Var gated_rms_norm(const Var& xv, const Var& gatev, const Var& wv,
                   const GatedRmsNormOptions& options) {
  const OpScope scope("gated_rms_norm");
  check_arguments(xv, gatev, wv, options);
  const RowForm form = row_form({&xv.value(), &gatev.value()}, options.groups);
  const Tensor x = to_rows(xv.value(), form), gate = to_rows(gatev.value(), form);
  const Tensor w = wv ? parameter_values("gated_rms_norm", "w", wv.value(), x) : Tensor();
  const Tensor y = Tensor::empty(xv.shape(), x.dtype(), x.device());
  const Tensor r = will_record({xv, gatev, wv}) ? row_statistics(x) : Tensor();
  const auto run = kWithCuda && x.on_cuda() ? gpu::gated_rms_norm_fwd : cpu::gated_rms_norm_fwd;
  run(x, gate, w, options, to_rows(y, form), r);
  const auto backward = [form, options](BackwardContext& ctx) {
    const Tensor &x = ctx.saved(0), &gate = ctx.saved(1), &w = ctx.saved(2), &r = ctx.saved(3);
    const Tensor dy = ctx.dy(0);
    const auto fresh = [&](int input) {
      return ctx.needs(input) ? Tensor::empty(dy.shape(), x.dtype(), x.device()) : Tensor();
    };
    const Tensor dx = fresh(0), dgate = fresh(1);
    const Tensor dw = ctx.needs(2) ? Tensor::empty_like(w) : Tensor();
    const auto run = kWithCuda && x.on_cuda() ? gpu::gated_rms_norm_bwd : cpu::gated_rms_norm_bwd;
    run(x, gate, w, r, to_rows(dy, form), options, to_rows(dx, form), to_rows(dgate, form), dw);
    if (dx) ctx.grad(0, dx);
    if (dgate) ctx.grad(1, dgate);
    if (dw) ctx.grad(2, dw);
  };
  return record("gated_rms_norm", {xv, gatev, wv}, {x, gate, w, r}, {y}, backward)[0];
}

Cost gated_rms_norm_cost(Pass pass, const Shape& x, DType dtype, int64_t groups) {
  const double n = double(x.numel()), item = double(item_size(dtype));
  const double small = double(item_size(accumulate_type(dtype)));
  const double w = small * double(x.back());
  const double r = x.back() ? small * n / double(x.back()) * double(groups) : 0;
  if (pass == Pass::forward) return {3 * n * item + w + r, 9 * n};
  return {5 * n * item + 2 * w + r, 22 * n};
}

}  // namespace ebb
