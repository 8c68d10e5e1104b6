// Plain f64 formulas of the normalisations: dense f64 CPU tensors in, a fresh tensor out. A row is
// a slice of the last axis, `groups` of them per token; weights and biases may be undefined.
#pragma once
#include <cmath>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

inline Tensor add(const Tensor& a, const Tensor& b) {
  const Tensor out = a.clone();
  for (int64_t i = 0; i < out.numel(); ++i) out.data<double>()[i] += b.data<double>()[i];
  return out;
}

// Multiplies by w (or 1) and adds b (or 0), both over the last axis.
inline void scale_and_shift(const Tensor& y, const Tensor& w, const Tensor& b) {
  const int64_t d = y.shape().back();
  for (int64_t i = 0; i < y.numel(); ++i) {
    double& v = y.data<double>()[i];
    if (w.defined()) v *= w.data<double>()[i % d];
    if (b.defined()) v += b.data<double>()[i % d];
  }
}

// Row by row: x·1/sqrt(Σx²/count + eps), count = 1 for the L2 norm.
inline void normalise(const Tensor& x, int64_t width, double count, double eps) {
  for (int64_t i = 0; width && i < x.numel() / width; ++i) {
    double* row = x.data<double>() + i * width;
    double sum = 0;
    for (int64_t j = 0; j < width; ++j) sum += row[j] * row[j];
    for (int64_t j = 0; j < width; ++j) row[j] /= std::sqrt(sum / count + eps);
  }
}

inline Tensor l2_norm(const Tensor& x, double eps) {
  const Tensor y = x.clone();
  normalise(y, x.shape().back(), 1, eps);
  return y;
}

inline Tensor rms_norm(const Tensor& x, const Tensor& w, double eps, int64_t groups = 1) {
  const Tensor y = x.clone();
  const int64_t width = x.shape().back() / groups;
  normalise(y, width, double(width), eps);
  scale_and_shift(y, w, {});
  return y;
}

inline Tensor layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                         int64_t groups = 1) {
  const Tensor y = x.clone();
  const int64_t width = x.shape().back() / groups;
  for (int64_t i = 0; width && i < x.numel() / width; ++i) {
    double* row = y.data<double>() + i * width;
    double mean = 0;
    for (int64_t j = 0; j < width; ++j) mean += row[j] / double(width);
    for (int64_t j = 0; j < width; ++j) row[j] -= mean;
  }
  normalise(y, width, double(width), eps);
  scale_and_shift(y, w, b);
  return y;
}

inline Tensor gate_value(const Tensor& z, bool silu) {
  const Tensor a = z.clone();
  for (int64_t i = 0; i < a.numel(); ++i) {
    double& v = a.data<double>()[i];
    v = (silu ? v : 1) / (1 + std::exp(-v));
  }
  return a;
}

inline Tensor multiply(const Tensor& a, const Tensor& b) {
  const Tensor out = a.clone();
  for (int64_t i = 0; i < out.numel(); ++i) out.data<double>()[i] *= b.data<double>()[i];
  return out;
}

inline Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& w, bool silu,
                             bool gate_first, double eps, int64_t groups) {
  const Tensor a = gate_value(gate, silu);
  if (gate_first) return rms_norm(multiply(x, a), w, eps, groups);
  return multiply(rms_norm(x, w, eps, groups), a);
}

}  // namespace ebb::testing::reference
