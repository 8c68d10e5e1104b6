// Plain f64 formulas of activations and gates: dense f64 CPU tensors in, a fresh tensor out.
#pragma once
#include <cmath>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

inline Tensor swiglu(const Tensor& gate, const Tensor& up) {
  const Tensor y = gate.clone();
  for (int64_t i = 0; i < y.numel(); ++i) {
    const double z = gate.data<double>()[i];
    y.data<double>()[i] = z * sigmoid(z) * up.data<double>()[i];
  }
  return y;
}

inline Tensor sigmoid_gate(const Tensor& x, double scale) {
  const Tensor y = x.clone();
  for (int64_t i = 0; i < y.numel(); ++i)
    y.data<double>()[i] = scale * sigmoid(x.data<double>()[i]);
  return y;
}

// a [...,H] or [...,H·K] or [...,H,K]: the innermost `channels` values go with `heads` decays.
inline Tensor decay_gate(const Tensor& a, const Tensor& A_log, const Tensor& dt_bias,
                         int64_t channels, double lower_bound) {
  const Tensor g = a.clone();
  for (int64_t i = 0; i < g.numel(); ++i) {
    const int64_t c = i % channels, h = c / (channels / A_log.numel());
    const double A = std::exp(A_log.data<double>()[h]);
    const double y = a.data<double>()[i] + (dt_bias.defined() ? dt_bias.data<double>()[c] : 0);
    g.data<double>()[i] = lower_bound < 0 ? lower_bound * sigmoid(A * y) : -A * softplus(y);
  }
  return g;
}

}  // namespace ebb::testing::reference
