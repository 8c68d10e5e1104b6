// Plain f64 formulas of embedding and losses: dense CPU tensors in, a fresh tensor out.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

inline Tensor embedding(const Tensor& table, const Tensor& ids) {
  Shape shape = ids.shape();
  shape.push_back(table.size(1));
  const Tensor y = Tensor::empty(shape, DType::f64);
  const std::vector<int64_t> id = ids.to_vector<int64_t>();
  for (size_t i = 0; i < id.size(); ++i)
    for (int64_t j = 0; j < table.size(1); ++j)
      y.data<double>()[int64_t(i) * table.size(1) + j] =
          table.data<double>()[id[i] * table.size(1) + j];
  return y;
}

struct Loss {
  Tensor loss, token_loss, lse;
};
// weights [...] or undefined. count: divisor of the sum; below 0: the number of kept labels;
// NAN: no division.
inline Loss cross_entropy(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                          double count, const Tensor& weights = {}) {
  const int64_t v = logits.shape().back();
  const std::vector<int64_t> label = labels.to_vector<int64_t>();
  const Tensor token_loss = Tensor::zeros(labels.shape(), DType::f64);
  const Tensor lse = Tensor::zeros(labels.shape(), DType::f64);
  double sum = 0, kept = 0;
  for (size_t n = 0; n < label.size(); ++n) {
    const double* z = logits.data<double>() + int64_t(n) * v;
    double max = z[0], total = 0;
    for (int64_t j = 1; j < v; ++j) max = std::fmax(max, z[j]);
    for (int64_t j = 0; j < v; ++j) total += std::exp(z[j] - max);
    lse.data<double>()[n] = max + std::log(total);
    if (label[n] == ignore_index) continue;
    token_loss.data<double>()[n] = lse.data<double>()[n] - z[label[n]];
    sum += token_loss.data<double>()[n] * (weights ? weights.data<double>()[n] : 1);
    ++kept;
  }
  const double divisor = std::isnan(count) ? 1 : count < 0 ? kept : count;
  return {Tensor::full({}, divisor == 0 ? 0 : sum / divisor, DType::f64), token_loss, lse};
}

}  // namespace ebb::testing::reference
