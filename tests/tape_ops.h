// Minimal recorded operators for the tape's own tests: plain loops through f64, any float dtype,
// CPU. They exist so that a failure points at the tape and not at an operator.
#pragma once
#include <gtest/gtest.h>

#include <functional>

#include "autograd/node.h"
#include "autograd/tape.h"
#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb::testing {

inline Tensor map(const Tensor& a, const std::function<double(double, int64_t)>& f) {
  std::vector<double> v = a.to_vector<double>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = f(v[i], int64_t(i));
  return Tensor::from(v, a.shape()).to(a.dtype());
}
inline Tensor map(const Tensor& a, const Tensor& b, double (*f)(double, double)) {
  check(a.shape() == b.shape(), "map: {} with {}", a.shape(), b.shape());
  const std::vector<double> other = b.to_vector<double>();
  return map(a, [&](double x, int64_t i) { return f(x, other[size_t(i)]); });
}
inline Tensor product(const Tensor& a, const Tensor& b) {
  return map(a, b, [](double x, double y) { return x * y; });
}

// y = x; the gradient passes through untouched, as in views. Works on every device.
inline Var identity(const Var& x) {
  return record("identity", {x}, {}, {x.value().clone()},
                [](BackwardContext& ctx) { ctx.grad(0, ctx.dy(0)); })[0];
}

// x + y: one tensor is the gradient of both.
inline Var add(const Var& x, const Var& y) {
  const Tensor sum = map(x.value(), y.value(), [](double a, double b) { return a + b; });
  return record("add", {x, y}, {}, {sum}, [](BackwardContext& ctx) {
    if (ctx.needs(0)) ctx.grad(0, ctx.dy(0));
    if (ctx.needs(1)) ctx.grad(1, ctx.dy(0));
  })[0];
}

inline Var mul(const Var& x, const Var& y) {
  return record("mul", {x, y}, {x.value(), y.value()}, {product(x.value(), y.value())},
                [](BackwardContext& ctx) {
                  if (ctx.needs(0)) ctx.grad(0, product(ctx.dy(0), ctx.saved(1)));
                  if (ctx.needs(1)) ctx.grad(1, product(ctx.dy(0), ctx.saved(0)));
                })[0];
}

// y = s·x; `wrong` is a factor on the gradient, 1 for the right one.
inline Var scale(const Var& x, double s, double wrong = 1) {
  const auto times = [](const Tensor& t, double c) {
    return map(t, [c](double v, int64_t) { return c * v; });
  };
  return record("scale", {x}, {}, {times(x.value(), s)},
                [=](BackwardContext& ctx) { ctx.grad(0, times(ctx.dy(0), s * wrong)); })[0];
}

inline Var sum(const Var& x) {
  double total = 0;
  for (double v : x.value().to_vector<double>()) total += v;
  return record(
      "sum", {x}, {}, {Tensor::full({}, total, x.dtype())},
      [shape = x.shape()](BackwardContext& ctx) { ctx.grad(0, ctx.dy(0).expand(shape)); })[0];
}

// Two results from one operator: x + 1 and 2x.
inline std::vector<Var> pair(const Var& x) {
  const Tensor a = map(x.value(), [](double v, int64_t) { return v + 1; });
  const Tensor b = map(x.value(), [](double v, int64_t) { return v * 2; });
  return record("pair", {x}, {}, {a, b}, [](BackwardContext& ctx) {
    const Tensor da = ctx.dy(0), db = ctx.dy(1);
    ctx.grad(0, map(da, db, [](double p, double q) { return p + 2 * q; }));
  });
}

// Keeps each element with probability 1/2, doubled; the mask is regenerated in backward from the
// key, which is drawn when the operator runs.
inline Tensor masked(const Tensor& x, RandomKey key) {
  return map(
      x, [key](double v, int64_t i) { return random_word(key, uint64_t(i)) & 1u ? 2 * v : 0.0; });
}
inline Var dropout(const Var& x) {
  const RandomKey key = next_random_key();
  return record("dropout", {x}, {}, {masked(x.value(), key)},
                [key](BackwardContext& ctx) { ctx.grad(0, masked(ctx.dy(0), key)); })[0];
}

// [m,k]·[k,n] that adds dW into the tape's accumulator where there is one, as GEMMs do.
inline Tensor gemm(const Tensor& a, const Tensor& b) {
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  std::vector<double> out(size_t(m * n));
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l)
        out[size_t(i * n + j)] += x[size_t(i * k + l)] * y[size_t(l * n + j)];
  return Tensor::from(out, {m, n}).to(a.dtype());
}
inline Var matmul(const Var& x, const Var& w, int* times_accumulated = nullptr) {
  return record("matmul", {x, w}, {x.value(), w.value()}, {gemm(x.value(), w.value())},
                [times_accumulated](BackwardContext& ctx) {
                  const Tensor& x = ctx.saved(0);
                  const Tensor& w = ctx.saved(1);
                  if (ctx.needs(0)) ctx.grad(0, gemm(ctx.dy(0), w.transpose(0, 1)));
                  if (!ctx.needs(1)) return;
                  const Tensor dw = gemm(x.transpose(0, 1), ctx.dy(0));
                  const Tensor into = ctx.accumulator(1);
                  if (!into) return ctx.grad(1, dw);
                  copy(into,
                       map(into, dw.to(into.dtype()), [](double a, double b) { return a + b; }));
                  ctx.grad_accumulated(1);
                  if (times_accumulated) ++*times_accumulated;
                })[0];
}

inline Var leaf(std::vector<double> values, DType dtype = DType::f64) {
  const Shape shape{int64_t(values.size())};
  return Var::leaf(Tensor::from(values, shape).to(dtype));
}
inline std::vector<double> grad_of(const Var& v) {
  return v.grad().defined() ? v.grad().to_vector<double>() : std::vector<double>{};
}

// The message of the ebb::Error that f throws; empty when it throws none.
inline std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}
// EXPECT_TRUE(contains(error_of(...), "part of the message")), with both shown on failure.
inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << text << "\" does not contain \"" << part << '"';
}

}  // namespace ebb::testing
