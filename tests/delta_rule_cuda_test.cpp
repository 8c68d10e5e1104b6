// The gated delta rule on the GPU: the shared cases, device flags, more than 2³¹ elements.
#include "tensor/device_flags.h"
#include "tests/delta_rule_cases.h"

namespace ebb::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cuda, GatedDeltaRule, ::testing::Values(Device::cuda()),
                         [](const auto&) { return "cuda"; });

class GatedDeltaRuleCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  const Device gpu_ = Device::cuda();
};

TEST_F(GatedDeltaRuleCuda, PositiveDecayRaisesTheFlag) {
  GdnInputs in = gdn_inputs({.time = 70, .key_dim = 16, .value_dim = 16});
  run(in, DType::f32, gpu_);
  EXPECT_EQ(read_and_clear_device_flags(gpu_), 0u);
  in.g.data<double>()[67] = 0.25;
  run(in, DType::f32, gpu_);
  EXPECT_EQ(read_and_clear_device_flags(gpu_), 1u << int(DeviceFlag::positive_decay));
}

// The bf16 tensor-core kernels: every kind of tile edge, grouped heads, empty and one-token
// sequences, betas of 0 and 2, a cleared state.
TEST_F(GatedDeltaRuleCuda, TensorCoreTiles) {
  const int64_t sizes[][2] = {{8, 8},     {64, 128},  {48, 72},  {72, 64},
                              {128, 128}, {104, 200}, {128, 256}};
  uint64_t seed = 11;
  for (const auto& [k, v] : sizes)
    for (const int64_t time : {1, 63, 64, 65, 200}) {
      GdnInputs in = gdn_inputs({.batch = 2,
                                 .time = time,
                                 .heads = 2,
                                 .value_heads = time == 65 ? 4 : 2,
                                 .key_dim = k,
                                 .value_dim = v},
                                ++seed);
      for (int64_t i = 0; i < in.beta.numel(); i += 7) in.beta.data<double>()[i] = i % 2 ? 0 : 2;
      if (time == 200) in.g.data<double>()[300] = -std::numeric_limits<double>::infinity();
      expect_parity(
          run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2,
          "K " + std::to_string(k) + " V " + std::to_string(v) + " T " + std::to_string(time));
    }
  GdnInputs in =
      gdn_inputs({.time = 300, .heads = 2, .value_heads = 2, .key_dim = 64, .value_dim = 128}, 5,
                 {0, 0, 1, 64, 64, 193, 300, 300});
  expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2, "packed");
  in.h0 = in.dht = {};
  expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2, "no states");
}

// Few sequences are cut into segments, whose states follow from each other.
TEST_F(GatedDeltaRuleCuda, TensorCoreSegments) {
  const int64_t sizes[][3] = {
      {64, 128, 2500}, {128, 72, 3000}, {40, 64, 1999}, {136, 40, 1999}, {256, 72, 2500}};
  for (const auto& [k, v, time] : sizes) {
    GdnInputs in = gdn_inputs({.time = time, .key_dim = k, .value_dim = v}, 21);
    for (int64_t i = 0; i < time; ++i) in.g.data<double>()[i] *= 1e-2;
    expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2,
                  "K " + std::to_string(k));
    in.h0 = in.dht = {};
    expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2,
                  "without states, K " + std::to_string(k));
  }
  GdnInputs in = gdn_inputs({.time = 7000, .key_dim = 64, .value_dim = 64}, 5, {0, 0, 6990, 7000});
  for (int64_t i = 0; i < 7000; ++i) in.g.data<double>()[i] *= 1e-2;
  expect_parity(run(in, DType::bf16, gpu_), exact(in, DType::bf16), 8e-3, 1.5e-2, "packed");
}

TEST_F(GatedDeltaRuleCuda, TensorCoreRunsAreBitwiseEqual) {
  const GdnInputs in = gdn_inputs(
      {.batch = 2, .time = 500, .heads = 3, .value_heads = 3, .key_dim = 64, .value_dim = 128});
  const auto first = fields(run(in, DType::bf16, gpu_));
  for (int i = 0; i < 100; ++i) {
    const auto again = fields(run(in, DType::bf16, gpu_));
    for (size_t j = 0; j < first.size(); ++j)
      ASSERT_TRUE(bitwise_equal(first[j], again[j])) << kGdnNames[j] << " run " << i;
  }
}

// FLA#1080, #1082: 32-bit offsets wrapped once B·T·H·K passed 2³¹. The second row of the batch lies
// behind that mark; it must equal the same row run alone.
TEST_F(GatedDeltaRuleCuda, B10LargeOffsets) {
  const int64_t batch = 2, time = 262145, heads = 32, k = 128, v = 16, last = 200;
  const auto draw = [&](const Shape& shape, DType dtype, uint64_t purpose, double low,
                        double high) {
    const Tensor t = Tensor::empty(shape, dtype, gpu_);
    fill_uniform(t, {17, purpose}, low, high);
    return t;
  };
  struct Result {
    Tensor o, dq, dv, dg;
  };
  try {
    const Tensor q = draw({batch, time, heads, k}, DType::bf16, 0, -0.15, 0.15);
    const Tensor key = draw({batch, time, heads, k}, DType::bf16, 1, -0.15, 0.15);
    const Tensor value = draw({batch, time, heads, v}, DType::bf16, 2, -1, 1);
    const Tensor g = draw({batch, time, heads}, DType::f32, 3, -1, -0.01);
    const Tensor beta = draw({batch, time, heads}, DType::f32, 4, 0, 1);
    const Tensor d_o = draw({batch, time, heads, v}, DType::bf16, 5, -1, 1);
    ASSERT_GT(q.numel(), int64_t(1) << 31);
    const auto rows = [&](int64_t first) {
      const auto part = [&](const Tensor& t) { return t.slice(0, first, batch); };
      const Var vq = Var::leaf(part(q)), vv = Var::leaf(part(value)), vg = Var::leaf(part(g));
      const Var o = gated_delta_rule(vq, part(key), vv, vg, part(beta), {}, {.scale = 0.1}).o;
      backward(o, part(d_o));
      const auto tail = [&](const Tensor& t) {
        return t.select(0, t.size(0) - 1).slice(0, time - last, time).cpu();
      };
      return Result{tail(o.value()), tail(vq.grad()), tail(vv.grad()), tail(vg.grad())};
    };
    const Result both = rows(0), alone = rows(1);
    EXPECT_TRUE(bitwise_equal(both.o, alone.o));
    EXPECT_TRUE(bitwise_equal(both.dq, alone.dq));
    EXPECT_TRUE(bitwise_equal(both.dv, alone.dv));
    EXPECT_TRUE(bitwise_equal(both.dg, alone.dg));
    EXPECT_GT(relative_error(Tensor::zeros_like(both.o), both.o), 0.5);  // not all zero
  } catch (const Error& e) {
    if (std::string(e.what()).find("out of memory") == std::string::npos) throw;
    GTEST_SKIP() << "needs about 60 GB of GPU memory: " << e.what();
  }
}

}  // namespace
}  // namespace ebb::testing
