// What a reduction carries along, shared by ops/reduce.cpp and the CUDA kernels: an empty state,
// one more value, the union of two states. A is the arithmetic type. Merging is associative up to
// rounding and is always done in an order fixed by the shape.
#pragma once
#include <cmath>
#include <cstdint>

#include "ops/device_fn.h"

namespace ebb {

template <class A>
struct SumState {
  A sum;
  static EBB_FN SumState empty() { return {A(0)}; }
  EBB_FN void add(A v, int64_t) { sum += v; }
  EBB_FN void merge(const SumState& o) { sum += o.sum; }
};

// The largest value and where it first occurs; the first NaN beats every number.
template <class A>
struct MaxState {
  A value;
  int64_t index;
  static EBB_FN MaxState empty() { return {A(0), -1}; }
  EBB_FN void add(A v, int64_t i) { merge({v, i}); }
  EBB_FN void merge(const MaxState& o) {
    if (o.index < 0) return;
    const bool nan = value != value, other_nan = o.value != o.value;
    const bool tie = (nan && other_nan) || o.value == value;
    const bool larger = (other_nan && !nan) || o.value > value;
    if (index < 0 || (tie ? o.index < index : larger)) *this = o;
  }
};

// log Σ exp(v) as the running maximum and Σ exp(v − maximum).
template <class A>
struct LogSumExpState {
  A maximum, sum;
  static EBB_FN LogSumExpState empty() { return {-A(INFINITY), A(0)}; }
  EBB_FN void add(A v, int64_t) {
    if (v == -A(INFINITY)) return;
    const A d = v == maximum ? A(0) : v - maximum;  // ∞ − ∞ is 0 here
    const A e = std::exp(-std::abs(d));
    sum = d > 0 ? sum * e + 1 : sum + e;
    if (d > 0) maximum = v;
  }
  EBB_FN void merge(const LogSumExpState& o) {
    const A d = o.maximum == maximum ? A(0) : o.maximum - maximum;
    const A e = std::exp(-std::abs(d));
    sum = d > 0 ? sum * e + o.sum : sum + o.sum * e;
    if (d > 0) maximum = o.maximum;
  }
  EBB_FN A value() const { return maximum + std::log(sum); }
};

}  // namespace ebb
