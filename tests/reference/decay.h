// Forget gate and running log-sum-exp, formula by formula in f64. Dense f64 CPU tensors.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

inline double log_add_exp(double a, double b) {
  const double top = std::max(a, b);
  return top == -INFINITY ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
}

// log(l + (1−l) σ(z + bias)) / divisor; bias and l repeat over the last `channels` elements.
inline Tensor forget_gate(const Tensor& z, const Tensor& bias, const Tensor& lower, double divisor,
                          int64_t channels) {
  const Tensor g = Tensor::empty(z.shape(), DType::f64);
  for (int64_t i = 0; i < z.numel(); ++i) {
    const int64_t c = i % channels;
    const double y = z.data<double>()[i] + (bias ? bias.data<double>()[c] : 0);
    const double log_sigmoid = y < 0 ? y - std::log1p(std::exp(y)) : -std::log1p(std::exp(-y));
    const double l = lower ? lower.data<double>()[c] : 0;
    g.data<double>()[i] = log_add_exp(std::log(l), std::log1p(-l) + log_sigmoid) / divisor;
  }
  return g;
}

// {k, g, z} of u [B,T,C].
inline std::vector<Tensor> log_cumsum_exp(const Tensor& u, const Tensor& z0,
                                          std::vector<int64_t> cu) {
  const int64_t B = u.size(0), T = u.size(1), C = u.size(2);
  if (cu.empty())
    for (int64_t n = 0; n <= B; ++n) cu.push_back(n * T);
  const int64_t N = int64_t(cu.size()) - 1;
  const Tensor k = Tensor::zeros(u.shape(), DType::f64), g = Tensor::zeros(u.shape(), DType::f64);
  const Tensor z = Tensor::zeros({N, C}, DType::f64);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t c = 0; c < C; ++c) {
      double before = z0 ? z0.data<double>()[n * C + c] : -INFINITY;
      for (int64_t t = cu[size_t(n)]; t < cu[size_t(n) + 1]; ++t) {
        const double x = u.data<double>()[t * C + c], now = log_add_exp(before, x);
        k.data<double>()[t * C + c] = std::exp(x - now);
        g.data<double>()[t * C + c] = before == -INFINITY ? 0 : before - now;
        before = now;
      }
      z.data<double>()[n * C + c] = before;
    }
  return {k, g, z};
}

}  // namespace ebb::testing::reference
