// Rearrangements by index: every result element names the element it comes from.
#pragma once
#include "tests/reference/elementwise.h"

namespace ebb::testing::reference {

// The k-th element of t in row-major order.
inline double nth(const Tensor& t, int64_t k) {
  Index at(size_t(t.dim()));
  for (int d = t.dim() - 1; d >= 0; --d) {
    at[size_t(d)] = k % t.size(d);
    k /= t.size(d);
  }
  return value_at(t, at);
}

inline Tensor reshape(const Tensor& t, const Shape& shape) {
  int64_t k = 0;
  return build(shape, [&](const Index&) { return nth(t, k++); });
}

// y[at] = t[source(at)].
inline Tensor move(const Tensor& t, const Shape& shape,
                   const std::function<Index(const Index&)>& source) {
  return build(shape, [&](const Index& at) { return value_at(t, source(at)); });
}

// Joins along dim.
inline Tensor concat(std::span<const Tensor> parts, int dim) {
  Shape shape = parts[0].shape();
  shape[dim] = 0;
  for (const Tensor& p : parts) shape[dim] += p.size(dim);
  return build(shape, [&](Index at) {
    size_t which = 0;
    while (at[size_t(dim)] >= parts[which].size(dim)) at[size_t(dim)] -= parts[which++].size(dim);
    return value_at(parts[which], at);
  });
}

}  // namespace ebb::testing::reference
