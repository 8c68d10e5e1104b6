// DAMI's solver against the specification's reference numbers, and the ladder, profile and control
// rules of every ablation.
#include "nn/decay_init.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tensor/check.h"

namespace ebb {
namespace {

// Inverse of the normal distribution function by bisection on erfc.
double normal_quantile(double p) {
  double low = -10, high = 10;
  for (int i = 0; i < 200; ++i) {
    const double m = 0.5 * (low + high);
    (0.5 * std::erfc(-m / std::sqrt(2.0)) < p ? low : high) = m;
  }
  return 0.5 * (low + high);
}

std::vector<double> fixed_sample() {
  std::vector<double> z;
  for (int i = 0; i < 1000; ++i) z.push_back(0.45 * normal_quantile((i + 0.5) / 1000));
  return z;
}

struct Known {
  size_t layer;
  double target, bias, mean_softplus, A_log[6];
};
const Known kKnown[] = {
    {0, 0.25, -1.147424, 0.294093, {-7.09391, -5.43035, -3.76680, -2.10325, -0.43969, 1.22386}},
    {4, 0.586848, 0.367756, 0.917757, {-8.23194, -6.56839, -4.90484, -3.24128, -1.57773, 0.08582}},
    {8, 0.747867, 1.135655, 1.432703, {-8.67733, -7.01378, -5.35022, -3.68667, -2.02312, -0.35956}},
};

TEST(Dami, SolverReproducesTheFixedSample) {
  const std::vector<double> z = fixed_sample(), profile = sensitivity_profile({}, 18),
                            tau = timescale_ladder({}, 6);
  for (const Known& k : kKnown) {
    EXPECT_NEAR(profile[k.layer], k.target, 1e-6);
    for (size_t h = 0; h < 6; ++h) {
      const HeadGate g = solve_head(z, {}, profile[k.layer], tau[h]);
      EXPECT_NEAR(g.dt_bias, k.bias, 1e-5);
      EXPECT_NEAR(g.A_log, k.A_log[h], 1e-5);
      EXPECT_NEAR(1 / (g.timescale * std::exp(g.A_log)), k.mean_softplus, 1e-5);
      EXPECT_NEAR(g.sensitivity, k.target, 1e-5);
      EXPECT_NEAR(g.timescale / tau[h], 1, 1e-4);
    }
  }
}

TEST(Dami, ChannelOffsetsKeepTheHeadMean) {
  std::vector<double> z, offsets = {0.03, -0.05, 0.02};
  for (double v : fixed_sample())
    for (int c = 0; c < 3; ++c) z.push_back(0.2 * v + 0.1 * c);
  const HeadGate g = solve_head(z, offsets, 0.4, 100);
  double mean = 0;
  for (size_t i = 0; i < z.size(); ++i)
    mean += 1 / (1 + std::exp(-(z[i] + g.dt_bias + offsets[i % 3])));
  EXPECT_NEAR(mean / double(z.size()), 0.4, 1e-6);
}

TEST(Dami, LaddersAndProfilesOfTheAblations) {
  const auto near = [](const std::vector<double>& got, const std::vector<double>& want,
                       double tol) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tol) << i;
  };
  near(timescale_ladder({}, 6), {4096, 776.05, 147.03, 27.86, 5.28, 1}, 5e-3);
  near(timescale_ladder({.tau_max = 2048}, 6), {2048, 445.72, 97.01, 21.11, 4.59, 1}, 5e-3);
  near(timescale_ladder({.tau_max = 1024}, 6), {1024, 256, 64, 16, 4, 1}, 1e-9);
  near(timescale_ladder({.ladder = TimescaleLadder::linear}, 6), {4096, 3277, 2458, 1639, 820, 1},
       1e-9);
  const auto profile = [](DamiOptions o) { return sensitivity_profile(o, 18); };
  const std::vector<double> half = profile({});
  near({half.begin(), half.begin() + 9},
       {0.25, 0.3419, 0.4306, 0.5132, 0.5868, 0.6490, 0.6976, 0.7309, 0.7479}, 5e-5);
  for (size_t l = 0; l < 18; ++l) EXPECT_NEAR(half[l], half[17 - l], 1e-12);
  EXPECT_NEAR(profile({.shape = SensitivityShape::parabola})[8], 0.74827, 5e-6);
  EXPECT_NEAR(profile({.shape = SensitivityShape::low_high})[17], 0.75, 1e-12);
  EXPECT_NEAR(profile({.shape = SensitivityShape::high_low})[0], 0.75, 1e-12);
  EXPECT_NEAR(profile({.shape = SensitivityShape::high_low_high})[8], 0.252133, 1e-5);
  EXPECT_NEAR(profile({.shift = 0.2})[8], 0.947867, 1e-6);
  EXPECT_NEAR(profile({.shift = -0.2})[0], 0.05, 1e-12);
  EXPECT_NEAR(profile({.peak_layer = 4.0})[4], 0.75, 1e-12);
  EXPECT_NEAR(profile({.peak_layer = 13.0})[17], 0.25, 1e-12);
  EXPECT_THROW(profile({.shift = 0.3}), Error);
  EXPECT_THROW(timescale_ladder({.tau_max = 0.5}, 6), Error);
}

TEST(Dami, ControlsFollowTheirRules) {
  const std::vector<float> post = post_A_log(6);
  const float want[] = {0, 1.6636f, 3.3271f, 4.9907f, 6.6542f, 8.3178f};
  for (size_t h = 0; h < 6; ++h) EXPECT_NEAR(post[h], want[h], 1e-4);
  for (float a : native_A_log(7, 3, 10000)) EXPECT_LT(a, std::log(16.f) + 1e-6f);
  double mean = 0;
  for (float b : native_dt_bias(7, 4, 10000)) {
    const double dt = softplus(b);
    EXPECT_GE(dt, 0.001 * 0.999);
    EXPECT_LE(dt, 0.1 * 1.001);
    mean += std::log(dt) / 10000;
  }
  EXPECT_NEAR(mean, 0.5 * (std::log(0.001) + std::log(0.1)), 0.05);
}

TEST(Dami, BadInputIsNamed) {
  EXPECT_THROW(solve_head({}, {}, 0.5, 10), Error);
  const std::vector<double> z = {0.0, NAN};
  EXPECT_THROW(solve_head(z, {}, 0.5, 10), Error);
  EXPECT_THROW(solve_head(std::vector<double>{0.1}, {}, 1.0, 10), Error);
}

}  // namespace
}  // namespace ebb
