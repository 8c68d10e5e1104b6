// The formulas behind MapOp, shared by ops/map.cpp (float and double) and cuda/elementwise.cu
// (float). NaN operands give NaN; nothing multiplies a masked value.
#pragma once
#include <cmath>

#include "ops/device_fn.h"
#include "ops/map.h"

namespace ebb {

// n / d for d in [1, 4], where the device's fast division is accurate to 2 ulp.
template <class A>
EBB_FN A quotient(A n, A d) {
#if defined(__CUDA_ARCH__)
  return __fdividef(n, d);
#else
  return n / d;
#endif
}

template <class A>
EBB_FN A reciprocal_sqrt(A x) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(x);
#else
  return 1 / std::sqrt(x);
#endif
}

// Only exponentials of non-positive numbers, so nothing overflows and small results keep their
// digits.
template <class A>
EBB_FN A logistic(A x) {
  const A e = std::exp(-std::abs(x));
  return quotient(x < 0 ? e : A(1), 1 + e);
}
template <class A>
EBB_FN A logistic_slope(A x) {  // σ(x) σ(−x)
  const A e = std::exp(-std::abs(x));
  return quotient(e, (1 + e) * (1 + e));
}
template <class A>
EBB_FN A hyperbolic_tangent_slope(A x) {  // 1 − tanh²x without its cancellation
  const A e = std::exp(-2 * std::abs(x));
  return quotient(4 * e, (1 + e) * (1 + e));
}

inline constexpr double kSoftplusLinear =
    20;  // softplus(x) = x above, as the public models have it

// Calls visit(f) with the function of (a, b, c) that `op` names.
template <class A, class Visit>
EBB_FN void visit_comparison(MapOp op, Visit&& visit) {
  switch (op) {
    case MapOp::eq:
      return visit([](A a, A b, A) { return A(a == b); });
    case MapOp::ne:
      return visit([](A a, A b, A) { return A(a != b); });
    case MapOp::lt:
      return visit([](A a, A b, A) { return A(a < b); });
    case MapOp::le:
      return visit([](A a, A b, A) { return A(a <= b); });
    case MapOp::gt:
      return visit([](A a, A b, A) { return A(a > b); });
    case MapOp::ge:
      return visit([](A a, A b, A) { return A(a >= b); });
    default:
      return;
  }
}

template <class A, class Visit>
EBB_FN void visit_unary(MapOp op, A p0, A p1, Visit&& visit) {
  switch (op) {
    case MapOp::identity:
      return visit([](A x, A, A) { return x; });
    case MapOp::neg:
      return visit([](A x, A, A) { return -x; });
    case MapOp::exp:
      return visit([](A x, A, A) { return std::exp(x); });
    case MapOp::log:
      return visit([](A x, A, A) { return std::log(x); });
    case MapOp::sqrt:
      return visit([](A x, A, A) { return std::sqrt(x); });
    case MapOp::rsqrt:
      return visit([](A x, A, A) { return reciprocal_sqrt(x); });
    case MapOp::square:
      return visit([](A x, A, A) { return x * x; });
    case MapOp::relu:
      return visit([](A x, A, A) { return x <= 0 ? A(0) : x; });
    case MapOp::relu2:
      return visit([](A x, A, A) { return x <= 0 ? A(0) : x * x; });
    case MapOp::sigmoid:
      return visit([](A x, A, A) { return logistic(x); });
    case MapOp::silu:
      return visit([](A x, A, A) { return x * logistic(x); });
    case MapOp::tanh:
      return visit([](A x, A, A) { return std::tanh(x); });
    case MapOp::softplus:
      return visit([](A x, A, A) { return x > A(kSoftplusLinear) ? x : std::log1p(std::exp(x)); });
    case MapOp::abs:
      return visit([](A x, A, A) { return std::abs(x); });
    case MapOp::pow:
      return visit([p0](A x, A, A) { return std::pow(x, p0); });
    case MapOp::clamp:
      return visit([p0, p1](A x, A, A) { return x < p0 ? p0 : x > p1 ? p1 : x; });
    case MapOp::add_scalar:
      return visit([p0](A x, A, A) { return x + p0; });
    case MapOp::mul_scalar:
      return visit([p0](A x, A, A) { return x * p0; });
    case MapOp::div_scalar:
      return visit([p0](A x, A, A) { return x / p0; });
    case MapOp::rsub_scalar:
      return visit([p0](A x, A, A) { return p0 - x; });
    case MapOp::rdiv_scalar:
      return visit([p0](A x, A, A) { return p0 / x; });
    default:
      return;
  }
}

template <class A, class Visit>
EBB_FN void visit_binary(MapOp op, A p0, Visit&& visit) {
  switch (op) {
    case MapOp::add:
      return visit([](A a, A b, A) { return a + b; });
    case MapOp::sub:
      return visit([](A a, A b, A) { return a - b; });
    case MapOp::mul:
      return visit([](A a, A b, A) { return a * b; });
    case MapOp::div:
      return visit([](A a, A b, A) { return a / b; });
    case MapOp::maximum:  // a NaN on either side wins
      return visit([](A a, A b, A) { return a > b || a != a ? a : b; });
    case MapOp::minimum:
      return visit([](A a, A b, A) { return a < b || a != a ? a : b; });
    case MapOp::masked_fill:
      return visit([p0](A a, A mask, A) { return mask != 0 ? p0 : a; });
    case MapOp::masked_keep:
      return visit([p0](A a, A mask, A) { return mask != 0 ? a : p0; });
    default:
      return;
  }
}

// Gradients. Tests are written so that a NaN operand lets dy through rather than hiding it.
template <class A, class Visit>
EBB_FN void visit_gradient(MapOp op, A p0, A p1, Visit&& visit) {
  switch (op) {
    case MapOp::sqrt_grad:
      return visit([](A dy, A y, A) { return dy / (2 * y); });
    case MapOp::rsqrt_grad:
      return visit([](A dy, A y, A) { return A(-0.5) * dy * y * y * y; });
    case MapOp::square_grad:
      return visit([](A dy, A x, A) { return 2 * x * dy; });
    case MapOp::relu_grad:
      return visit([](A dy, A y, A) { return y <= 0 ? A(0) : dy; });
    case MapOp::relu2_grad:
      return visit([](A dy, A x, A) { return x <= 0 ? A(0) : 2 * x * dy; });
    case MapOp::sigmoid_grad:
      return visit([](A dy, A x, A) { return dy * logistic_slope(x); });
    case MapOp::silu_grad:
      return visit([](A dy, A x, A) { return dy * logistic(x) * (1 + x * logistic(-x)); });
    case MapOp::tanh_grad:
      return visit([](A dy, A x, A) { return dy * hyperbolic_tangent_slope(x); });
    case MapOp::softplus_grad:
      return visit([](A dy, A x, A) { return x > A(kSoftplusLinear) ? dy : dy * logistic(x); });
    case MapOp::abs_grad:
      return visit([](A dy, A x, A) { return x > 0 ? dy : x < 0 ? -dy : x == 0 ? A(0) : x; });
    case MapOp::pow_grad:
      return visit([p0](A dy, A x, A) { return p0 == 0 ? A(0) : dy * p0 * std::pow(x, p0 - 1); });
    case MapOp::clamp_grad:
      return visit([p0, p1](A dy, A x, A) { return x < p0 || x > p1 ? A(0) : dy; });
    case MapOp::rdiv_grad:
      return visit([p0](A dy, A x, A) { return -dy * p0 / (x * x); });
    default:
      return;
  }
}

template <class A, class Visit>
EBB_FN void visit_ternary(MapOp op, Visit&& visit) {
  switch (op) {
    case MapOp::where:
      return visit([](A mask, A a, A b) { return mask != 0 ? a : b; });
    case MapOp::div_grad:
      return visit([](A dy, A a, A b) { return -dy * (a / b) / b; });
    case MapOp::maximum_grad:  // ties share dy equally
      return visit([](A dy, A a, A b) { return a < b ? A(0) : a == b ? dy / 2 : dy; });
    case MapOp::logsumexp_grad:
      return visit([](A dy, A x, A y) { return x == -A(INFINITY) ? A(0) : dy * std::exp(x - y); });
    case MapOp::norm_grad:
      return visit([](A dy, A x, A y) { return y == 0 ? A(0) : dy * (x / y); });
    default:
      return;
  }
}

// `inputs`: how many operands the function has.
template <int inputs, class A, class Visit>
EBB_FN void visit_map(MapOp op, A p0, A p1, Visit&& visit) {
  if constexpr (inputs == 1) {
    visit_unary<A>(op, p0, p1, visit);
  } else if constexpr (inputs == 3) {
    visit_ternary<A>(op, visit);
  } else if (op >= MapOp::eq) {
    visit_comparison<A>(op, visit);
  } else if (op >= MapOp::sqrt_grad) {
    visit_gradient<A>(op, p0, p1, visit);
  } else {
    visit_binary<A>(op, p0, visit);
  }
}

}  // namespace ebb
