// Plain f64 formulas of the normalisations: dense f64 CPU tensors in, a fresh tensor out.
#pragma once
#include <cmath>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

inline Tensor add(const Tensor& a, const Tensor& b) {
  const Tensor out = a.clone();
  for (int64_t i = 0; i < out.numel(); ++i) out.data<double>()[i] += b.data<double>()[i];
  return out;
}

inline Tensor rms_norm(const Tensor& x, const Tensor& w, double eps) {
  const Tensor y = x.clone();
  const int64_t d = w.numel(), n = x.numel() / d;
  for (int64_t i = 0; i < n; ++i) {
    double* row = y.data<double>() + i * d;
    double sum = 0;
    for (int64_t j = 0; j < d; ++j) sum += row[j] * row[j];
    const double r = 1 / std::sqrt(sum / double(d) + eps);
    for (int64_t j = 0; j < d; ++j) row[j] *= r * w.data<double>()[j];
  }
  return y;
}

}  // namespace ebb::testing::reference
