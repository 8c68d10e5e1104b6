// Plain element-by-element evaluation with broadcasting: CPU tensors in (f64, or integers read as
// f64), a fresh f64 tensor out.
#pragma once
#include <functional>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

using Index = std::vector<int64_t>;

// A fresh tensor from a formula of the index.
inline Tensor build(const Shape& shape, const std::function<double(const Index&)>& value) {
  const Tensor y = Tensor::empty(shape, DType::f64);
  Index at(size_t(shape.size()), 0);
  for (int64_t i = 0; i < y.numel(); ++i) {
    y.data<double>()[i] = value(at);
    for (int d = shape.size() - 1; d >= 0 && ++at[size_t(d)] == shape[d]; --d) at[size_t(d)] = 0;
  }
  return y;
}

// t at an index of a shape it broadcasts to.
inline double value_at(const Tensor& t, const Index& at) {
  int64_t offset = 0;
  const size_t lead = at.size() - size_t(t.dim());
  for (int d = 0; d < t.dim(); ++d)
    offset += (t.size(d) == 1 ? 0 : at[lead + size_t(d)]) * t.stride(d);
  return visit_any(t.dtype(), [&]<class T>() { return double(t.data<T>()[offset]); });
}

// fn of the broadcast elements.
inline Tensor apply(std::span<const Tensor> in,
                    const std::function<double(std::span<const double>)>& fn) {
  int rank = 0;
  for (const Tensor& t : in) rank = std::max(rank, t.dim());
  Shape shape;
  for (int d = 0; d < rank; ++d) {
    int64_t n = 1;
    for (const Tensor& t : in)
      if (const int own = d - rank + t.dim(); own >= 0 && t.size(own) != 1) n = t.size(own);
    shape.push_back(n);
  }
  return build(shape, [&](const Index& at) {
    std::vector<double> v;
    for (const Tensor& t : in) v.push_back(value_at(t, at));
    return fn(v);
  });
}

}  // namespace ebb::testing::reference
