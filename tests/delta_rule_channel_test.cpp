// The delta rule with a decay per channel on the CPU: the shared cases, f64, threads, cost.
#include <omp.h>

#include "tests/delta_rule_channel_cases.h"

namespace ebb::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, ChannelDeltaRule,
                         ::testing::Values(ChannelParam{Device::cpu(), DeltaGates::kda},
                                           ChannelParam{Device::cpu(), DeltaGates::gdn2}),
                         channel_param_name);

TEST(ChannelDeltaRuleCpu, F64EqualsTheRecurrence) {
  for (const DeltaGates gates : {DeltaGates::kda, DeltaGates::gdn2}) {
    ChannelInputs in = channel_inputs(
        gates,
        {.batch = 1, .time = 300, .heads = 2, .value_heads = 6, .key_dim = 13, .value_dim = 37}, 11,
        {0, 0, 150, 151, 300, 300});
    for (const int64_t chunk : {16, 32, 64, 128}) {
      in.chunk = chunk;
      expect_channel_parity(run_channel(in, DType::f64, {}), exact_channel(in), 1e-12, 1e-12);
    }
  }
}

TEST(ChannelDeltaRuleCpu, ThreadsDoNotChangeABit) {
  const ChannelInputs in = channel_inputs(
      DeltaGates::gdn2,
      {.batch = 1, .time = 150, .heads = 1, .value_heads = 2, .key_dim = 32, .value_dim = 200});
  const int before = omp_get_max_threads();
  std::vector<ChannelResult> results;
  for (const int threads : {1, 2, 7}) {
    omp_set_num_threads(threads);
    results.push_back(run_channel(in, DType::f32, {}));
  }
  omp_set_num_threads(before);
  for (size_t i = 0; i < results[0].size(); ++i)
    for (const size_t other : {1, 2})
      EXPECT_TRUE(bitwise_equal(results[0][i], results[other][i])) << kChannelNames[i];
}

TEST(ChannelDeltaRuleCpu, CostOfTheReferenceShape) {
  const DeltaRuleSize s{
      .batch = 8, .time = 4096, .heads = 6, .value_heads = 6, .key_dim = 64, .value_dim = 128};
  // 153 MB of the scalar member; f32 gates: g 50 MB, b 50 MB, w 101 MB.
  EXPECT_NEAR(channel_delta_rule_cost(Pass::forward, s, DeltaGates::kda, DType::bf16, false).bytes,
              203e6, 1e6);
  EXPECT_NEAR(channel_delta_rule_cost(Pass::forward, s, DeltaGates::gdn2, DType::bf16, false).bytes,
              353e6, 1e6);
  DeltaRuleSize one = s;
  one.batch = one.heads = one.value_heads = 1;
  EXPECT_NEAR(channel_delta_rule_step_cost(one, DeltaGates::kda, DType::bf16).bytes, 65536, 1200);
}

}  // namespace
}  // namespace ebb::testing
