#include "nn/decay_init.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {
namespace {

constexpr uint64_t kOffsetPurpose = 0x64616d69ull << 32;

double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

// Mean over tokens and channels of f(z + offset + bias).
template <class F>
double mean_over(std::span<const double> z, std::span<const double> offsets, double bias, F f) {
  const size_t channels = offsets.empty() ? 1 : offsets.size();
  double sum = 0;
  for (size_t i = 0; i < z.size(); ++i)
    sum += f(z[i] + bias + (offsets.empty() ? 0.0 : offsets[i % channels]));
  return sum / double(z.size());
}

double shape_at(const DamiOptions& o, double x) {  // x: depth in [0,1]
  switch (o.shape) {
    case SensitivityShape::half_sine:
      return std::sin(std::numbers::pi * x);
    case SensitivityShape::parabola:
      return 1 - (2 * x - 1) * (2 * x - 1);
    case SensitivityShape::low_high:
      return x;
    case SensitivityShape::high_low:
      return 1 - x;
    case SensitivityShape::high_low_high:
      return 1 - std::sin(std::numbers::pi * x);
  }
  return 0;
}

}  // namespace

double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
double inverse_softplus(double y) { return y + std::log(-std::expm1(-y)); }

std::vector<double> timescale_ladder(const DamiOptions& o, int64_t heads) {
  check(heads >= 1, "dami: {} heads", heads);
  check(o.tau_min > 0 && o.tau_max >= o.tau_min, "dami: timescales from {} to {}", o.tau_max,
        o.tau_min);
  std::vector<double> tau;
  for (int64_t h = 0; h < heads; ++h) {
    const double x = heads > 1 ? double(h) / double(heads - 1) : 0;
    tau.push_back(o.ladder == TimescaleLadder::linear
                      ? o.tau_max + (o.tau_min - o.tau_max) * x
                      : o.tau_max * std::pow(o.tau_min / o.tau_max, x));
  }
  return tau;
}

std::vector<double> sensitivity_profile(const DamiOptions& o, int64_t layers) {
  check(layers >= 1, "dami: {} layers", layers);
  const double last = double(layers - 1);
  std::vector<double> profile;
  for (int64_t l = 0; l < layers; ++l) {
    double rise = shape_at(o, last > 0 ? double(l) / last : 0.5);
    if (o.peak_layer) {
      const double p = *o.peak_layer;
      check(p > 0 && p < last, "dami: peak layer {} outside (0, {})", p, last);
      const double quarter = double(l) <= p ? double(l) / p : (last - double(l)) / (last - p);
      rise = std::sin(std::numbers::pi / 2 * quarter);
    }
    const double s = o.low + (o.high - o.low) * rise + o.shift;
    check(s > 0 && s < 1, "dami: sensitivity {} of layer {} lies outside (0,1)", s, l);
    profile.push_back(s);
  }
  return profile;
}

namespace {

double mean_response(std::span<const double> z, std::span<const double> offsets, double dt_bias,
                     DecayResponse response) {
  return mean_over(z, offsets, dt_bias, response == DecayResponse::softplus ? softplus : sigmoid);
}

}  // namespace

HeadGate measure_head(std::span<const double> z, std::span<const double> offsets, double dt_bias,
                      double A_log, DecayResponse response) {
  check(!z.empty(), "dami: no calibration tokens");
  HeadGate gate{.dt_bias = dt_bias, .A_log = A_log};
  gate.sensitivity = mean_over(z, offsets, dt_bias, sigmoid);
  gate.timescale = 1 / (std::exp(A_log) * mean_response(z, offsets, dt_bias, response));
  return gate;
}

HeadGate solve_head(std::span<const double> z, std::span<const double> offsets, double sensitivity,
                    double timescale, DecayResponse response) {
  check(!z.empty(), "dami: no calibration tokens");
  check(sensitivity > 0 && sensitivity < 1, "dami: sensitivity {} outside (0,1)", sensitivity);
  check(timescale > 0, "dami: timescale {} must be positive", timescale);
  for (double v : z) check(std::isfinite(v), "dami: a gate pre-activation is not finite");
  const auto [z_low, z_high] = std::minmax_element(z.begin(), z.end());
  double o_low = 0, o_high = 0;
  if (!offsets.empty()) {
    o_low = *std::min_element(offsets.begin(), offsets.end());
    o_high = *std::max_element(offsets.begin(), offsets.end());
  }
  // sigmoid is increasing: at these ends every term lies on one side of the target.
  const double logit = std::log(sensitivity / (1 - sensitivity));
  double low = logit - *z_high - o_high, high = logit - *z_low - o_low;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    const double residual = mean_over(z, offsets, middle, sigmoid) - sensitivity;
    if (std::abs(residual) < 1e-12) {
      low = high = middle;
      break;
    }
    (residual < 0 ? low : high) = middle;
  }
  const float bias = float(0.5 * (low + high));
  const double mean = mean_response(z, offsets, double(bias), response);
  const float A_log = float(-std::log(timescale) - std::log(mean));
  const HeadGate gate = measure_head(z, offsets, double(bias), double(A_log), response);
  check(std::abs(gate.sensitivity - sensitivity) < 1e-5 &&
            std::abs(gate.timescale / timescale - 1) < 1e-4,
        "dami: reached sensitivity {} for {} and timescale {} for {}", gate.sensitivity,
        sensitivity, gate.timescale, timescale);
  return gate;
}

std::vector<float> native_A_log(uint64_t seed, uint64_t purpose, int64_t heads, double low) {
  std::vector<float> out;
  for (int64_t h = 0; h < heads; ++h)
    out.push_back(float(
        std::log(low + (16.0 - low) * uniform_open(random_word({seed, purpose}, uint64_t(h))))));
  return out;
}

std::vector<double> channel_offsets(uint64_t seed, int64_t layer, int64_t head, int64_t channels) {
  check(channels >= 1, "dami: {} channels", channels);
  const Tensor draw = Tensor::empty({channels}, DType::f64);
  fill_normal(draw, {seed, kOffsetPurpose + uint64_t(layer << 16 | head)}, 0, 0.03);
  std::vector<double> out = draw.to_vector<double>();
  double mean = 0;
  for (double x : out) mean += x / double(channels);
  for (double& x : out) x -= mean;
  return out;
}

std::vector<float> native_dt_bias(uint64_t seed, uint64_t purpose, int64_t count) {
  const double low = std::log(0.001), high = std::log(0.1);
  std::vector<float> out;
  for (int64_t i = 0; i < count; ++i) {
    const double u = uniform_open(random_word({seed, purpose}, uint64_t(i)));
    out.push_back(float(inverse_softplus(std::max(std::exp(low + u * (high - low)), 1e-4))));
  }
  return out;
}

std::vector<float> post_A_log(int64_t heads, double train_length) {
  check(heads >= 1 && train_length >= 1, "post: {} heads, training length {}", heads, train_length);
  std::vector<float> out;
  for (int64_t h = 0; h < heads; ++h)
    out.push_back(float(heads > 1 ? std::log(train_length) * double(h) / double(heads - 1) : 0.0));
  return out;
}

}  // namespace ebb
