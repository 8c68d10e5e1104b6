// The gated delta rule on the CPU: the shared cases, f64, threads, cost.
#include <omp.h>

#include "tests/delta_rule_cases.h"

namespace ebb::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, GatedDeltaRule, ::testing::Values(Device::cpu()),
                         [](const auto&) { return "cpu"; });

TEST(GatedDeltaRuleCpu, F64EqualsTheRecurrence) {
  GdnInputs in = gdn_inputs(
      {.batch = 1, .time = 300, .heads = 2, .value_heads = 6, .key_dim = 13, .value_dim = 37}, 11,
      {0, 0, 150, 151, 300, 300});
  for (const int64_t chunk : {16, 32, 64, 128}) {
    in.chunk = chunk;
    expect_parity(run(in, DType::f64, {}), exact(in), 1e-12, 1e-12);
  }
}

TEST(GatedDeltaRuleCpu, ThreadsDoNotChangeABit) {
  const GdnInputs in = gdn_inputs(
      {.batch = 1, .time = 150, .heads = 1, .value_heads = 2, .key_dim = 32, .value_dim = 200});
  const int before = omp_get_max_threads();
  std::vector<std::vector<Tensor>> results;
  for (const int threads : {1, 2, 7}) {
    omp_set_num_threads(threads);
    results.push_back(fields(run(in, DType::f32, {})));
  }
  omp_set_num_threads(before);
  for (size_t i = 0; i < results[0].size(); ++i)
    for (const size_t other : {1, 2})
      EXPECT_TRUE(bitwise_equal(results[0][i], results[other][i])) << kGdnNames[i];
}

// Where the decay is near zero its gradient is tiny; taken as a difference of sums it is noise.
TEST(GatedDeltaRuleCpu, GradientOfTinyDecaysIsAccurate) {
  GdnInputs in = gdn_inputs({.time = 70, .key_dim = 16, .value_dim = 32});
  for (int64_t t = 0; t < 70; ++t) in.g.data<double>()[t] = -20 - 0.1 * double(t % 5);
  EXPECT_LE(relative_error(run(in, DType::f32, {}).dg, exact(in, DType::f32).dg), 1e-5);
}

TEST(GatedDeltaRuleCpu, RecomputeKeepsTheInputsOnly) {
  const auto leaf = [](Shape shape) { return Var::leaf(Tensor::zeros(std::move(shape))); };
  const Var q = leaf({1, 128, 1, 8}), k = leaf({1, 128, 1, 8}), v = leaf({1, 128, 1, 16});
  const Var g = leaf({1, 128, 1}), beta = leaf({1, 128, 1});
  const auto kept = [&](bool recompute) {
    return saved_bytes(gated_delta_rule(q, k, v, g, beta, {}, {.recompute = recompute}).o);
  };
  EXPECT_EQ(kept(true), 4 * 128 * (8 + 8 + 16 + 1 + 1));
  EXPECT_EQ(kept(false) - kept(true), 4 * (128 * 64 + 2 * 8 * 16 + 128 * 16));  // A, states, V'
}

TEST(GatedDeltaRuleCpu, CostOfTheReferenceShape) {
  const DeltaRuleSize s{.batch = 8, .time = 4096, .heads = 6, .value_heads = 6};
  DeltaRuleSize wide = s;
  wide.value_dim = 128;
  const Cost f = gated_delta_rule_cost(Pass::forward, wide, DType::bf16, false);
  EXPECT_NEAR(f.bytes, 153e6, 1e6);
  EXPECT_NEAR(f.flops, 19.9e9, 0.1e9);
  EXPECT_NEAR(gated_delta_rule_cost(Pass::forward, wide, DType::bf16).bytes, 228e6, 1e6);
  const Cost b = gated_delta_rule_cost(Pass::backward, wide, DType::bf16);
  EXPECT_NEAR(b.bytes, 330e6, 1e6);
  EXPECT_NEAR(b.flops, 48.3e9, 0.1e9);
  // Decoding reads and writes an f32 state: 64 KB per head of 64x128.
  DeltaRuleSize one = wide;
  one.batch = one.heads = one.value_heads = 1;
  EXPECT_NEAR(gated_delta_rule_step_cost(one, DType::bf16).bytes, 65536, 1024);
}

}  // namespace
}  // namespace ebb::testing
