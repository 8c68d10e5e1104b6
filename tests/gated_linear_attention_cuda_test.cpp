// Gated linear attention and SSD on the GPU: the shared cases, device flags, reruns, more than 2³¹
// elements.
#include <array>

#include "tensor/device_flags.h"
#include "tensor/random.h"
#include "tests/cuda_fixture.h"
#include "tests/linear_attention_cases.h"
#include "tests/linear_attention_channel_cases.h"

namespace ebb::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cuda, LinearAttention, ::testing::Values(Device::cuda()), device_name);
INSTANTIATE_TEST_SUITE_P(Cuda, ChannelLinearAttention, ::testing::Values(Device::cuda()),
                         device_name);

class LinearAttentionCuda : public CudaTest {};

TEST_F(LinearAttentionCuda, PositiveDecayRaisesTheFlag) {
  GlaInputs in = gla_inputs({.time = 70});
  run(in, DType::f32, gpu_);
  EXPECT_EQ(read_and_clear_device_flags(gpu_), 0u);
  in.g.data<double>()[67] = 0.25;
  run(in, DType::f32, gpu_);
  EXPECT_EQ(read_and_clear_device_flags(gpu_), 1u << int(DeviceFlag::positive_decay));
  SsdInputs ssd = ssd_inputs({.time = 70, .heads = 2}, 0);
  ssd.A.data<double>()[1] = 0.5;
  run_ssd(ssd, DType::f32, gpu_);
  EXPECT_EQ(read_and_clear_device_flags(gpu_), 1u << int(DeviceFlag::positive_decay));
}

// The shapes of models: heads that share keys, in one group and in several.
TEST_F(LinearAttentionCuda, ShapesOfModels) {
  for (const int64_t time : {64, 200, 1000}) {
    const GlaInputs in = gla_inputs(
        {.batch = 2, .time = time, .groups = 1, .heads = 16, .key_dim = 128, .value_dim = 64}, 17,
        {}, time == 200 ? 128 : 0);
    expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2,
                  "T " + std::to_string(time));
  }
  const GlaInputs in =
      gla_inputs({.time = 700, .groups = 2, .heads = 8, .key_dim = 128, .value_dim = 64}, 18,
                 {0, 0, 1, 64, 300, 300, 700});
  expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2, "packed");
}

// Enough chunks that a block has all heads of a group; several heads and one, odd widths.
TEST_F(LinearAttentionCuda, HeadsOfAGroupInOneBlock) {
  for (const int64_t heads : {1, 2, 5}) {
    const GlaInputs in = gla_inputs(
        {.batch = 8, .time = 4096, .groups = 1, .heads = heads, .key_dim = 24, .value_dim = 8}, 23);
    expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2,
                  std::to_string(heads));
  }
}

// Few heads and long sequences: a scan starts in several places at once, at the beginnings of runs.
TEST_F(LinearAttentionCuda, SequencesInSegments) {
  const auto expect = [&](GlaInputs in, const std::string& what) {
    for (int64_t i = 0; i < in.g.numel(); ++i) in.g.data<double>()[i] *= 0.02;  // far reaching
    expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2, what);
  };
  for (const int64_t memory : {0, 192, 4096})
    expect(gla_inputs({.time = 4330, .groups = 1, .heads = 2, .key_dim = 128, .value_dim = 64}, 41,
                      {}, memory),
           "memory " + std::to_string(memory));
  expect(gla_inputs({.batch = 2, .time = 5000, .groups = 1, .heads = 1, .key_dim = 24}, 42,
                    {0, 0, 70, 6400, 6500, 10000}),
         "packed");
  GlaInputs bare =
      gla_inputs({.time = 3300, .groups = 2, .heads = 2, .key_dim = 64, .value_dim = 136}, 43);
  bare.h0 = {}, bare.dht = {};
  expect(bare, "no states");
}

// More than 64 columns of values, with and without keys that heads share.
TEST_F(LinearAttentionCuda, WideValues) {
  for (const auto [groups, heads, k, v] :
       {std::array{6, 6, 64, 128}, {2, 2, 128, 200}, {1, 3, 128, 256}, {1, 4, 40, 72}}) {
    const GlaInputs in = gla_inputs(
        {.batch = 2, .time = 700, .groups = groups, .heads = heads, .key_dim = k, .value_dim = v},
        44, {}, heads == 3 ? 128 : 0);
    expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2,
                  std::to_string(k) + " x " + std::to_string(v));
  }
}

// Every head with keys of its own, more chunks than multiprocessors.
TEST_F(LinearAttentionCuda, KeysOfEveryHead) {
  for (const int64_t k : {40, 128}) {
    const GlaInputs in = gla_inputs(
        {.batch = 2, .time = 1500, .groups = 8, .heads = 8, .key_dim = k, .value_dim = 64}, 45);
    expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2,
                  std::to_string(k));
  }
}

// Runs that are shorter than a chunk, several or one in a block; ragged and packed too.
TEST_F(LinearAttentionCuda, ShortRuns) {
  for (const auto [memory, k, v] :
       {std::array{16, 16, 64}, {32, 64, 64}, {48, 128, 200}, {5, 72, 24}, {24, 128, 64}}) {
    const std::string what = std::to_string(memory);
    const GlaInputs in =
        gla_inputs({.batch = 3, .time = 500, .groups = 2, .heads = 4, .key_dim = k, .value_dim = v},
                   46, {}, memory);
    expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2, what);
    const GlaInputs packed =
        gla_inputs({.batch = 2, .time = 300, .groups = 1, .heads = 2, .key_dim = k, .value_dim = v},
                   47, {0, 0, 1, 90, 90, 410, 600}, memory);
    expect_parity(run(packed, DType::bf16, gpu_), exact(packed, DType::bf16), 8e-3, 1.5e-2,
                  what + " packed");
  }
}

// By the fused scan and, where the runs are not whole chunks of it, the general one.
TEST_F(LinearAttentionCuda, WideContributions) {
  for (const int64_t memory : {128, 48, 100}) {
    GlaInputs in = gla_inputs(
        {.batch = 2, .time = 300, .groups = 1, .heads = 3, .key_dim = 128, .value_dim = 64}, 3, {},
        memory);
    in.wide = true;
    const GlaResult got = run(in, DType::bf16, gpu_), want = exact(in, DType::bf16);
    expect_parity(got, want, 8e-3, 1.5e-2, std::to_string(memory));
    const Tensor& c = got.contributions;
    EXPECT_FALSE(bitwise_equal(c, c.to(DType::bf16).to(DType::f64))) << memory;
  }
}

TEST_F(LinearAttentionCuda, RunsAreBitwiseEqual) {
  for (const int64_t memory : {0, 128, 16}) {
    const GlaInputs in = gla_inputs(
        {.batch = 2, .time = 500, .groups = 1, .heads = 16, .key_dim = 128, .value_dim = 64}, 3, {},
        memory);
    const auto first = fields(run(in, DType::bf16, gpu_));
    for (int i = 0; i < 50; ++i) {
      const auto again = fields(run(in, DType::bf16, gpu_));
      for (size_t j = 0; j < first.size(); ++j)
        if (first[j].defined()) {
          ASSERT_TRUE(bitwise_equal(first[j], again[j])) << kGlaNames[j] << " run " << i;
        }
    }
  }
}

// FLA#1080, #1082: 32-bit offsets wrapped once B·T·H·V passed 2³¹. The second row of the batch lies
// behind that mark; it must equal the same row run alone.
TEST_F(LinearAttentionCuda, B10LargeOffsets) {
  const int64_t batch = 2, time = 262145, heads = 64, k = 16, v = 64, last = 200;
  if (!has_memory(int64_t(90) << 30)) GTEST_SKIP() << "wants 90 GB of GPU memory";
  const auto draw = [&](const Shape& shape, DType dtype, uint64_t purpose, double low,
                        double high) {
    const Tensor t = Tensor::empty(shape, dtype, gpu_);
    fill_uniform(t, {17, purpose}, low, high);
    return t;
  };
  const Tensor q = draw({batch, time, 1, k}, DType::bf16, 0, -0.15, 0.15);
  const Tensor key = draw({batch, time, 1, k}, DType::bf16, 1, -0.15, 0.15);
  const Tensor value = draw({batch, time, heads, v}, DType::bf16, 2, -1, 1);
  const Tensor g = draw({batch, time, heads}, DType::f32, 3, -1, -0.01);
  const Tensor d_o = draw({batch, time, heads, v}, DType::bf16, 5, -1, 1);
  ASSERT_GT(value.numel(), int64_t(1) << 31);
  const auto rows = [&](int64_t first) {
    const auto part = [&](const Tensor& t) { return t.slice(0, first, batch); };
    const Var vq = Var::leaf(part(q)), vv = Var::leaf(part(value)), vg = Var::leaf(part(g));
    const Var o = gated_linear_attention(vq, part(key), vv, vg, {}, {.scale = 0.1}).o;
    backward(o, part(d_o));
    const auto tail = [&](const Tensor& t) {
      return t.select(0, t.size(0) - 1).slice(0, time - last, time).cpu();
    };
    return std::vector{tail(o.value()), tail(vq.grad()), tail(vv.grad()), tail(vg.grad())};
  };
  const auto both = rows(0), alone = rows(1);
  for (size_t i = 0; i < both.size(); ++i) EXPECT_TRUE(bitwise_equal(both[i], alone[i])) << i;
  EXPECT_GT(relative_error(Tensor::zeros_like(both[0]), both[0]), 0.5);  // not all zero
}

}  // namespace
}  // namespace ebb::testing
