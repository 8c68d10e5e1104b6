// Inputs of the delta family's rows.
#pragma once
#include <cmath>

#include "tests/op_table.h"

namespace ebb::testing {

enum class Decay { usual, extreme, none };

// Rows of unit length over the last axis, as the models normalise q and k.
inline Tensor unit_rows(const Tensor& x) {
  const int64_t width = x.shape().back();
  for (int64_t i = 0; i < x.numel() / std::max<int64_t>(1, width); ++i) {
    double* row = x.data<double>() + i * width;
    double sum = 0;
    for (int64_t j = 0; j < width; ++j) sum += row[j] * row[j];
    for (int64_t j = 0; j < width; ++j) row[j] /= std::sqrt(sum);
  }
  return x;
}

// Log decays below −0.01, so that finite differences stay on the allowed side of 0.
inline Tensor log_decays(Draw& draw, const Shape& shape, Decay kind) {
  const Tensor g = draw.uniform(shape, -1.5, -0.01);
  if (kind != Decay::extreme) return g;
  const Tensor choice = draw.uniform(shape, 0, 1);
  for (int64_t i = 0; i < g.numel(); ++i) {
    double& x = g.data<double>()[i];
    const double c = choice.data<double>()[i];
    x = c < 0.1 ? -200 : c < 0.2 ? -20000 : c < 0.4 ? -20 : c < 0.7 ? -0.01 + 0.001 * x : x;
  }
  // The first tokens see h0: were they cut off by e^-200, dh0 would be below the range of f32.
  g.slice(1, 0, std::min<int64_t>(2, g.size(1))).fill_(-0.5);
  return g;
}

}  // namespace ebb::testing
