// Cases and inputs that the rows of the delta family share.
#pragma once
#include <cmath>

#include "ops/delta_rule.h"
#include "tests/op_table.h"

namespace ebb::testing {

enum class Decay { usual, extreme, none };

struct DeltaCase {
  std::string name = {};
  int64_t batch = 1, time = 1, heads = 1, value_heads = 1, key_dim = 8, value_dim = 8;
  std::vector<int64_t> cu = {};
  bool h0 = true, final_state = true;
  double erase_max = 1;  // of beta, or of the erase gate
  Decay decay = Decay::usual;
  int64_t chunk = 64;
};

inline std::vector<DeltaCase> delta_cases() {
  return {
      {.name = "t1",
       .batch = 2,
       .time = 1,
       .heads = 4,
       .value_heads = 8,
       .key_dim = 16,
       .value_dim = 32},
      {.name = "tiny", .time = 3, .key_dim = 2, .value_dim = 2},
      {.name = "t17_odd", .time = 17, .heads = 2, .value_heads = 2, .key_dim = 5, .value_dim = 7},
      {.name = "t63_nostate", .time = 63, .key_dim = 16, .h0 = false, .final_state = false},
      {.name = "t64", .batch = 2, .time = 64, .key_dim = 32, .value_dim = 16},
      {.name = "t65", .time = 65, .heads = 2, .value_heads = 2, .key_dim = 16, .value_dim = 32},
      {.name = "t97_noh0", .batch = 2, .time = 97, .key_dim = 16, .value_dim = 33, .h0 = false},
      {.name = "t130_nofinal", .time = 130, .key_dim = 24, .value_dim = 40, .final_state = false},
      {.name = "t200_k64_v128", .time = 200, .key_dim = 64, .value_dim = 128},
      {.name = "gva",
       .batch = 2,
       .time = 80,
       .heads = 2,
       .value_heads = 6,
       .key_dim = 16,
       .value_dim = 16},
      {.name = "packed",
       .batch = 1,
       .time = 200,
       .heads = 2,
       .value_heads = 2,
       .key_dim = 16,
       .value_dim = 24,
       .cu = {0, 0, 1, 66, 66, 130, 197, 200, 200}},
      {.name = "packed_gva",
       .batch = 2,
       .time = 70,
       .heads = 1,
       .value_heads = 2,
       .key_dim = 7,
       .value_dim = 5,
       .cu = {0, 65, 65, 140},
       .h0 = false},
      {.name = "neg_eigval", .time = 66, .key_dim = 16, .value_dim = 32, .erase_max = 2},
      {.name = "extreme", .time = 150, .key_dim = 16, .value_dim = 16, .decay = Decay::extreme},
      {.name = "ungated", .time = 100, .key_dim = 16, .value_dim = 16, .decay = Decay::none},
      {.name = "empty", .batch = 2, .time = 0, .heads = 2, .value_heads = 2},
      {.name = "chunk16", .time = 70, .key_dim = 16, .value_dim = 16, .chunk = 16},
      {.name = "chunk32", .time = 70, .key_dim = 16, .value_dim = 16, .chunk = 32},
      {.name = "chunk128", .time = 200, .key_dim = 16, .value_dim = 16, .chunk = 128},
      {.name = "k256_v256",
       .batch = 2,
       .time = 70,
       .key_dim = 256,
       .value_dim = 256,
       .cu = {0, 30, 35, 70, 140}},
      {.name = "k96_v40", .time = 67, .key_dim = 96, .value_dim = 40},
      {.name = "k136_v24",
       .batch = 2,
       .time = 65,
       .heads = 2,
       .value_heads = 2,
       .key_dim = 136,
       .value_dim = 24},
      {.name = "k160_v80_gva",
       .time = 131,
       .heads = 1,
       .value_heads = 2,
       .key_dim = 160,
       .value_dim = 80},
      {.name = "k192_v72_packed",
       .time = 200,
       .heads = 1,
       .value_heads = 2,
       .key_dim = 192,
       .value_dim = 72,
       .cu = {0, 0, 1, 66, 130, 199, 200}},
      {.name = "k200_nostate",
       .time = 129,
       .key_dim = 200,
       .value_dim = 8,
       .h0 = false,
       .final_state = false},
      {.name = "k256_extreme",
       .time = 150,
       .key_dim = 256,
       .value_dim = 16,
       .decay = Decay::extreme},
  };
}

inline DeltaRuleOptions options_of(const DeltaCase& s, Device device) {
  DeltaRuleOptions options{.scale = 1 / std::sqrt(double(s.key_dim)),
                           .want_final_state = s.final_state,
                           .chunk = s.chunk};
  if (!s.cu.empty()) options.layout = SeqLayout::packed(s.cu, device);
  return options;
}

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

// What the options of the operators make of logits, value by value.
template <class F>
Tensor each_value(const Tensor& t, F&& f) {
  const Tensor out = t.contiguous().clone();
  for (int64_t i = 0; i < t.numel(); ++i) out.data<double>()[i] = f(i, out.data<double>()[i]);
  return out;
}
inline double logistic(double x) { return 1 / (1 + std::exp(-x)); }
inline Tensor scaled_sigmoid(const Tensor& x, double scale) {
  return each_value(x, [scale](int64_t, double y) { return scale * logistic(y); });
}
// z [...,H] or [...,H,K], `channels` = 1 or K; A_log [H], dt_bias of H·channels values.
inline Tensor decays_of_logits(const Tensor& z, const Tensor& A_log, const Tensor& dt_bias,
                               int64_t channels, double bound) {
  return each_value(z, [&](int64_t i, double x) {
    const double a = std::exp(A_log.data<double>()[i / channels % A_log.numel()]);
    const double y = x + dt_bias.data<double>()[i % dt_bias.numel()];
    return bound < 0 ? bound * logistic(a * y) : -a * std::log1p(std::exp(y));
  });
}
// Rows of the last axis divided by sqrt(Σx² + 1e-6).
inline Tensor normalized_rows(const Tensor& x) {
  const int64_t width = x.shape().back();
  const Tensor rows = x.contiguous();
  return each_value(x, [&](int64_t i, double y) {
    double sum = 1e-6;
    for (int64_t j = 0; j < width; ++j)
      sum += std::pow(rows.data<double>()[i / width * width + j], 2);
    return y / std::sqrt(sum);
  });
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
