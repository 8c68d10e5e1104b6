// The delta rule with a decay per channel on the GPU: the shared cases, device flags, more than 2³¹
// elements.
#include "tensor/device_flags.h"
#include "tests/delta_rule_channel_cases.h"

namespace ebb::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cuda, ChannelDeltaRule,
                         ::testing::Values(ChannelParam{Device::cuda(), DeltaGates::kda},
                                           ChannelParam{Device::cuda(), DeltaGates::gdn2}),
                         channel_param_name);

class ChannelDeltaRuleCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  const Device gpu_ = Device::cuda();
};

TEST_F(ChannelDeltaRuleCuda, PositiveDecayRaisesTheFlag) {
  ChannelInputs in = channel_inputs(DeltaGates::kda, {.time = 70, .key_dim = 80, .value_dim = 16});
  run_channel(in, DType::f32, gpu_);
  EXPECT_EQ(read_and_clear_device_flags(gpu_), 0u);
  in.g.data<double>()[67 * 80 + 71] = 0.25;
  run_channel(in, DType::f32, gpu_);
  EXPECT_EQ(read_and_clear_device_flags(gpu_), 1u << int(DeviceFlag::positive_decay));
}

TEST_F(ChannelDeltaRuleCuda, RerunsAreBitwiseEqual) {
  for (const DeltaGates gates : {DeltaGates::kda, DeltaGates::gdn2})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const ChannelInputs in = channel_inputs(
          gates,
          {.batch = 4, .time = 300, .heads = 3, .value_heads = 6, .key_dim = 96, .value_dim = 128});
      const ChannelResult first = run_channel(in, dtype, gpu_);
      for (int run = 0; run < 10; ++run) {
        const ChannelResult again = run_channel(in, dtype, gpu_);
        for (size_t i = 0; i < first.size(); ++i)
          if (first[i].defined()) {
            EXPECT_TRUE(bitwise_equal(first[i], again[i])) << kChannelNames[i];
          }
      }
    }
}

// Heads of more than 128 channels have scans of their own, whose operands go through a ring of
// places: enough chunks to go round it several times, and a ragged one at either end of a walk.
TEST_F(ChannelDeltaRuleCuda, WideHeads) {
  struct Size {
    int64_t key_dim, value_dim, time;
  };
  for (const DeltaGates gates : {DeltaGates::kda, DeltaGates::gdn2})
    for (const Size& s : {Size{136, 8, 330}, {144, 136, 512}, {192, 80, 449}, {256, 128, 961}}) {
      ChannelInputs in = channel_inputs(gates, {.batch = 2,
                                                .time = s.time,
                                                .heads = 1,
                                                .value_heads = 2,
                                                .key_dim = s.key_dim,
                                                .value_dim = s.value_dim});
      for (int64_t i = 0; i < in.g.numel(); ++i) in.g.data<double>()[i] *= 0.05;
      const ChannelResult want = exact_channel(in, DType::bf16);
      const ChannelResult first = run_channel(in, DType::bf16, gpu_);
      expect_channel_parity(first, want, 8e-3, 1.5e-2, std::to_string(s.key_dim));
      for (int run = 0; run < 5; ++run) {
        const ChannelResult again = run_channel(in, DType::bf16, gpu_);
        for (size_t i = 0; i < first.size(); ++i)
          if (first[i].defined()) {
            EXPECT_TRUE(bitwise_equal(first[i], again[i])) << kChannelNames[i];
          }
      }
    }
}

// Dense views that begin at no 16-byte boundary: wide copies must not be tried on them.
TEST_F(ChannelDeltaRuleCuda, AnyAlignment) {
  for (const DeltaGates gates : {DeltaGates::kda, DeltaGates::gdn2}) {
    const ChannelInputs in = channel_inputs(gates, {.time = 130, .key_dim = 64, .value_dim = 64});
    const ChannelResult want = exact_channel(in, DType::bf16);
    for (const bool upstream : {false, true}) {
      ChannelInputs moved = in;
      for (Tensor* t : {upstream ? &moved.d_o : &moved.v, upstream ? &moved.dht : &moved.q}) {
        const DType to = t == &moved.dht ? DType::f32 : DType::bf16;
        const Tensor view =
            Tensor::zeros({t->numel() + 1}, to, gpu_).slice(0, 1, t->numel() + 1).view(t->shape());
        view.copy_(t->to(to, gpu_));
        *t = view;
      }
      expect_channel_parity(run_channel(moved, DType::bf16, gpu_), want, 8e-3, 1.5e-2,
                            upstream ? "upstream" : "inputs");
    }
  }
}

// Few and long sequences are cut into segments that run side by side; decays are weak, so that what
// a segment starts from reaches its end.
TEST_F(ChannelDeltaRuleCuda, LongSequencesAreExact) {
  for (const DeltaGates gates : {DeltaGates::kda, DeltaGates::gdn2})
    for (const auto& [width, values] : {std::pair{64, 64}, {96, 96}, {136, 24}, {256, 72}}) {
      ChannelInputs in = channel_inputs(
          gates, {.batch = 1, .time = 4100, .heads = 1, .key_dim = width, .value_dim = values}, 6,
          {0, 4000, 4100});
      for (int64_t i = 0; i < in.g.numel(); ++i) in.g.data<double>()[i] *= 4e-3;
      expect_channel_parity(run_channel(in, DType::bf16, gpu_), exact_channel(in, DType::bf16),
                            8e-3, 1.5e-2, std::to_string(width));
      expect_channel_parity(run_channel(in, DType::f32, gpu_), exact_channel(in, DType::f32), 2e-5,
                            2e-5, "f32 " + std::to_string(width));
    }
}

// FLA#1080, #1082: 32-bit offsets wrapped once B·T·H·K passed 2³¹. The second row of the batch lies
// behind that mark; it must equal the same row run alone.
TEST_F(ChannelDeltaRuleCuda, B10LargeOffsets) {
  const int64_t batch = 2, time = 262145, heads = 32, k = 128, v = 16, last = 200;
  const auto draw = [&](const Shape& shape, DType dtype, uint64_t purpose, double low,
                        double high) {
    const Tensor t = Tensor::empty(shape, dtype, gpu_);
    fill_uniform(t, {17, purpose}, low, high);
    return t;
  };
  struct Result {
    Tensor o, dq, dg;
  };
  try {
    const Tensor q = draw({batch, time, heads, k}, DType::bf16, 0, -0.15, 0.15);
    const Tensor key = draw({batch, time, heads, k}, DType::bf16, 1, -0.15, 0.15);
    const Tensor value = draw({batch, time, heads, v}, DType::bf16, 2, -1, 1);
    const Tensor g = draw({batch, time, heads, k}, DType::f32, 3, -1, -0.01);
    const Tensor beta = draw({batch, time, heads}, DType::f32, 4, 0, 1);
    const Tensor d_o = draw({batch, time, heads, v}, DType::bf16, 5, -1, 1);
    ASSERT_GT(q.numel(), int64_t(1) << 31);
    const auto rows = [&](int64_t first) {
      const auto part = [&](const Tensor& t) { return t.slice(0, first, batch); };
      const Var vq = Var::leaf(part(q)), vg = Var::leaf(part(g));
      const Var o = kda(vq, part(key), part(value), vg, part(beta), {}, {.scale = 0.1}).o;
      backward(o, part(d_o));
      const auto tail = [&](const Tensor& t) {
        return t.select(0, t.size(0) - 1).slice(0, time - last, time).cpu();
      };
      return Result{tail(o.value()), tail(vq.grad()), tail(vg.grad())};
    };
    const Result both = rows(0), alone = rows(1);
    EXPECT_TRUE(bitwise_equal(both.o, alone.o));
    EXPECT_TRUE(bitwise_equal(both.dq, alone.dq));
    EXPECT_TRUE(bitwise_equal(both.dg, alone.dg));
    EXPECT_GT(relative_error(Tensor::zeros_like(both.o), both.o), 0.5);  // not all zero
  } catch (const Error& e) {
    if (std::string(e.what()).find("out of memory") == std::string::npos) throw;
    GTEST_SKIP() << "needs about 80 GB of GPU memory: " << e.what();
  }
}

}  // namespace
}  // namespace ebb::testing
