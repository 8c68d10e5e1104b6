// Gated linear attention and SSD on the CPU: the shared cases, f64, threads, cost.
#include <omp.h>

#include "tests/linear_attention_cases.h"
#include "tests/linear_attention_channel_cases.h"

namespace ebb::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, LinearAttention, ::testing::Values(Device::cpu()), device_name);

INSTANTIATE_TEST_SUITE_P(Cpu, ChannelLinearAttention, ::testing::Values(Device::cpu()),
                         device_name);

TEST(LinearAttentionCpu, F64EqualsTheRecurrence) {
  for (const int64_t memory : {0, 16, 90}) {
    GlaInputs in = gla_inputs(
        {.batch = 1, .time = 300, .groups = 2, .heads = 6, .key_dim = 13, .value_dim = 37}, 11,
        {0, 0, 150, 151, 300, 300}, memory);
    for (const int64_t chunk : {8, 32, 64, 128}) {
      in.chunk = chunk;
      expect_parity(run(in, DType::f64, {}), exact(in), 1e-12, 1e-12);
    }
  }
  GlaInputs bare = gla_inputs({.time = 37, .key_dim = 5, .value_dim = 7});
  bare.h0 = bare.weight = bare.skip = bare.dht = {};
  bare.chunk = 8;
  expect_parity(run(bare, DType::f64, {}), exact(bare), 1e-12, 1e-12);
}

TEST(LinearAttentionCpu, ChannelF64EqualsTheRecurrence) {
  for (const bool shared : {false, true}) {
    GlaInputs in = gla_inputs({.batch = 1,
                               .time = 300,
                               .groups = shared ? 6 : 2,
                               .heads = 6,
                               .key_dim = 13,
                               .value_dim = 37,
                               .by_channel = true},
                              11, {0, 0, 150, 151, 300, 300});
    if (shared) in.k = {};
    for (const int64_t chunk : {8, 20, 32, 64, 128}) {
      in.chunk = chunk;
      expect_parity(run(in, DType::f64, {}), exact(in), 1e-12, 1e-12);
    }
  }
  GlaInputs bare = gla_inputs({.time = 37, .key_dim = 5, .value_dim = 7, .by_channel = true});
  bare.h0 = bare.dht = {};
  bare.chunk = 8;
  expect_parity(run(bare, DType::f64, {}), exact(bare), 1e-12, 1e-12);
}

void expect_threads_do_not_change_a_bit(const GlaInputs& in) {
  const int before = omp_get_max_threads();
  std::vector<std::vector<Tensor>> results;
  for (const int threads : {1, 2, 7}) {
    omp_set_num_threads(threads);
    results.push_back(fields(run(in, DType::f32, {})));
  }
  omp_set_num_threads(before);
  for (size_t i = 0; i < results[0].size(); ++i)
    for (const size_t other : {1, 2})
      EXPECT_TRUE(bitwise_equal(results[0][i], results[other][i])) << kGlaNames[i];
}

TEST(LinearAttentionCpu, ThreadsDoNotChangeABit) {
  GlaShape s{.batch = 1, .time = 150, .groups = 1, .heads = 2, .key_dim = 64, .value_dim = 100};
  expect_threads_do_not_change_a_bit(gla_inputs(s, 3, {}, 80));
  s.by_channel = true;
  expect_threads_do_not_change_a_bit(gla_inputs(s));
}

// Where the decay is near zero its gradient is tiny; taken as a difference of sums it is noise.
TEST(LinearAttentionCpu, GradientOfTinyDecaysIsAccurate) {
  GlaInputs in = gla_inputs({.time = 70, .key_dim = 16, .value_dim = 32});
  for (int64_t t = 0; t < 70; ++t) in.g.data<double>()[t] = -20 - 0.1 * double(t % 5);
  EXPECT_LE(relative_error(run(in, DType::f32, {}).dg, exact(in, DType::f32).dg), 1e-5);
  in = gla_inputs({.time = 70, .key_dim = 16, .value_dim = 32, .by_channel = true});
  for (int64_t i = 0; i < in.g.numel(); ++i) in.g.data<double>()[i] = -20 - 0.1 * double(i % 5);
  EXPECT_LE(relative_error(run(in, DType::f32, {}).dg, exact(in, DType::f32).dg), 1e-5);
}

TEST(LinearAttentionCpu, CostOfTheReferenceShape) {
  const LinearAttentionSize s{.batch = 8, .time = 4096, .heads = 16, .key_dim = 128};
  EXPECT_NEAR(ssd_cost(Pass::forward, s, DType::bf16, false).bytes, 153e6, 2e6);
  EXPECT_NEAR(ssd_cost(Pass::backward, s, DType::bf16, false).bytes, 237e6, 2e6);
  // Decoding reads and writes an f32 state of 16x128x64: 1 MB per sequence.
  EXPECT_NEAR(ssd_step_cost({.batch = 64, .heads = 16, .key_dim = 128}, DType::bf16).bytes, 67.5e6,
              0.5e6);
}

}  // namespace
}  // namespace ebb::testing
