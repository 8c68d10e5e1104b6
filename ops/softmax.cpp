#include "ops/softmax.h"

#include <omp.h>

#include "ops/common.h"
#include "ops/reduce_states.h"

namespace ebb {

namespace cpu {

constexpr int64_t kParallelItems = 1 << 14;

void softmax_fwd(const Tensor& x, const Tensor& y, const Tensor& stats) {
  const int64_t d = x.shape().back(), n = x.numel() / d;
  visit_float(x.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const T* p_x = x.data<T>();
    T* p_y = y.data<T>();
    A* p_stats = stats ? stats.data<A>() : nullptr;
#pragma omp parallel for if (n * d > kParallelItems)
    for (int64_t i = 0; i < n; ++i) {
      const T* row = p_x + i * d;
      A max = -A(INFINITY), sum = 0;
      for (int64_t j = 0; j < d; ++j) max = A(row[j]) > max ? A(row[j]) : max;
      for (int64_t j = 0; j < d; ++j) sum += std::exp(A(row[j]) - max);
      const A log_sum = std::log(sum);
      for (int64_t j = 0; j < d; ++j) {
        const A v = A(row[j]) - max;
        p_y[i * d + j] = T(p_stats ? v - log_sum : std::exp(v) / sum);
      }
      if (p_stats) {
        p_stats[2 * i] = max;
        p_stats[2 * i + 1] = log_sum;
      }
    }
  });
}

void softmax_bwd(const Tensor& dy, const Tensor& from, const Tensor& stats, const Tensor& dx) {
  const int64_t d = dy.shape().back(), n = dy.numel() / d;
  visit_float(dy.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const T *p_dy = dy.data<T>(), *p_from = from.data<T>();
    const A* p_stats = stats ? stats.data<A>() : nullptr;
    T* p_dx = dx.data<T>();
#pragma omp parallel for if (n * d > kParallelItems)
    for (int64_t i = 0; i < n; ++i) {
      const T *g = p_dy + i * d, *row = p_from + i * d;
      A sum = 0;
      for (int64_t j = 0; j < d; ++j) sum += p_stats ? A(g[j]) : A(g[j]) * A(row[j]);
      for (int64_t j = 0; j < d; ++j) {
        if (p_stats)
          p_dx[i * d + j] =
              T(A(g[j]) - std::exp(A(row[j]) - p_stats[2 * i] - p_stats[2 * i + 1]) * sum);
        else
          p_dx[i * d + j] = T(A(row[j]) * (A(g[j]) - sum));
      }
    }
  });
}

}  // namespace cpu

namespace {

Var run(const char* op, const Var& xv, bool logarithm) {
  const OpScope scope(op);
  check_float(op, "x", xv.value());
  check(xv.dim() >= 1, "{}: x is {}, want at least one dimension", op, xv.shape());
  const Tensor x = xv.value().contiguous(), y = Tensor::empty_like(x);
  Tensor stats;
  if (logarithm) {
    Shape rows = x.shape().first(x.dim() - 1);
    stats = Tensor::empty({rows.numel(), 2}, accumulate_type(x.dtype()), x.device());
  }
  if (x.numel()) {
    if (kWithCuda && x.on_cuda())
      gpu::softmax_fwd(x, y, stats);
    else
      cpu::softmax_fwd(x, y, stats);
  }
  return record(op, {xv}, {logarithm ? x : y, stats}, {y}, [](BackwardContext& ctx) {
    const Tensor dy = ctx.dy(0).contiguous(), dx = Tensor::empty_like(dy);
    if (dy.numel()) {
      if (kWithCuda && dy.on_cuda())
        gpu::softmax_bwd(dy, ctx.saved(0), ctx.saved(1), dx);
      else
        cpu::softmax_bwd(dy, ctx.saved(0), ctx.saved(1), dx);
    }
    ctx.grad(0, dx);
  })[0];
}

}  // namespace

Var softmax(const Var& x) { return run("softmax", x, false); }
Var log_softmax(const Var& x) { return run("log_softmax", x, true); }

Cost softmax_cost(Pass pass, const Shape& x, DType dtype) {
  const double n = double(x.numel()), item = double(item_size(dtype));
  return pass == Pass::forward ? Cost{2 * n * item, 4 * n} : Cost{3 * n * item, 4 * n};
}

}  // namespace ebb
