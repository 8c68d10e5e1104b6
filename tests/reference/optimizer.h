// Plain f64 loops of the optimizer's operators: dense f64 CPU tensors.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

inline double sum_of_squares(std::span<const Tensor> tensors) {
  double sum = 0;
  for (const Tensor& t : tensors)
    for (double v : t.to_vector<double>()) sum += v * v;
  return sum;
}

// Min(1, max_norm / (norm + 1e-6)), as PyTorch's clip_grad_norm_.
inline double clip_scale(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

struct AdamWHyper {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
};

// One step, number t >= 1, in place.
inline void adamw(std::vector<double>& p, const std::vector<double>& g, std::vector<double>& m,
                  std::vector<double>& v, int64_t t, const AdamWHyper& h, double grad_scale = 1) {
  const double c1 = 1 - std::pow(h.beta1, double(t)), c2 = 1 - std::pow(h.beta2, double(t));
  for (size_t i = 0; i < p.size(); ++i) {
    const double gi = g[i] * grad_scale;
    m[i] = h.beta1 * m[i] + (1 - h.beta1) * gi;
    v[i] = h.beta2 * v[i] + (1 - h.beta2) * gi * gi;
    p[i] -= h.lr * h.weight_decay * p[i];
    p[i] -= h.lr * (m[i] / c1) / (std::sqrt(v[i] / c2) + h.eps);
  }
}

}  // namespace ebb::testing::reference
