// The tape on a GPU: sums, dtypes, hooks and what it holds, with operators that only move data.
#include <gtest/gtest.h>

#include "autograd/parameter.h"
#include "tensor/compare.h"
#include "tests/tape_ops.h"

namespace ebb::testing {
namespace {

using Values = std::vector<double>;

class TapeCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  Var leaf_of(double value, int64_t n, DType t = DType::f32) const {
    return Var::leaf(Tensor::full({n}, value, t, gpu_));
  }
  const Device gpu_ = Device::cuda();
};

TEST_F(TapeCuda, FanOutOfLeavesAndResults) {
  for (const int64_t n : {1, 1000, 100001}) {
    const Var x = leaf_of(1, n);
    const Var h = identity(x);
    std::vector<Var> roots;
    std::vector<Tensor> dy;
    for (int i = 1; i <= 5; ++i) {
      roots.push_back(identity(i % 2 ? x : h));
      dy.push_back(Tensor::full({n}, i, DType::f32, gpu_));
    }
    backward(roots, dy);
    EXPECT_EQ(grad_of(x), Values(size_t(n), 15));
    for (int i = 1; i <= 5; ++i) EXPECT_EQ(dy[size_t(i - 1)].to_vector<double>()[0], i);
  }
}

TEST_F(TapeCuda, Bf16AccumulatesInF32) {
  const Var x = leaf_of(1, 257, DType::bf16), y = leaf_of(1, 257, DType::bf16);
  const Var h = identity(y);
  std::vector<Var> roots;
  for (int i = 0; i < 400; ++i) roots.push_back(identity(i % 2 ? x : h));
  const Tensor one = Tensor::full({257}, 3, DType::bf16, gpu_);
  backward(roots, std::vector<Tensor>(roots.size(), one));
  EXPECT_EQ(x.grad().dtype(), DType::f32);
  EXPECT_EQ(grad_of(x), Values(257, 600));  // a bf16 sum would stop at 512
  EXPECT_EQ(grad_of(y), Values(257, 600));
}

TEST_F(TapeCuda, StridedAndForeignGradients) {
  // An expanded upstream gradient, one from the CPU, and a leaf whose gradient is a transposed
  // view.
  const Var x = leaf_of(1, 6);
  backward(identity(x), Tensor::full({1}, 2, DType::f32, gpu_).expand({6}));
  backward(identity(x), Tensor::arange(6, DType::f64));
  EXPECT_EQ(grad_of(x), (Values{2, 3, 4, 5, 6, 7}));
  const Var w = Var::leaf(Tensor::zeros({2, 3}, DType::f32, gpu_));
  w.slot()->grad = Tensor::arange(6, DType::f32, gpu_).view({3, 2}).transpose(0, 1);
  backward(identity(w), Tensor::full({2, 3}, 10, DType::f32, gpu_));
  EXPECT_EQ(grad_of(w), (Values{10, 12, 14, 11, 13, 15}));
}

TEST_F(TapeCuda, HooksAndAnomalies) {
  const Var x = leaf_of(1, 4);
  // What a hook returns may lie elsewhere: this one comes back from the CPU.
  x.register_hook([](const Tensor& g) { return map(g, [](double v, int64_t) { return 2 * v; }); });
  for (int i = 0; i < 2; ++i) backward(identity(x), Tensor::full({4}, 1, DType::f32, gpu_));
  EXPECT_EQ(grad_of(x), Values(4, 4));
  const AnomalyMode on;
  EXPECT_TRUE(contains(error_of([&] { identity(Var(Tensor::full({3}, NAN, DType::f32, gpu_))); }),
                       "anomaly: identity forward"));
}

TEST_F(TapeCuda, RecomputeAndReleasedMemory) {
  constexpr int64_t kItems = 1 << 20;
  const auto chain = [](std::span<const Var> in) {
    Var h = in[0];
    for (int i = 0; i < 8; ++i)
      h = record("keep", {h}, {h.value()}, {h.value().clone()},
                 [](BackwardContext& ctx) { ctx.grad(0, ctx.dy(0)); })[0];
    return std::vector{h};
  };
  Values grads[2];
  for (const bool again : {false, true}) {
    const Var x = leaf_of(1, kItems);
    const int64_t before = memory_stats(gpu_).current;
    const Var y = (again ? recompute(chain, {x}) : chain(std::vector{x}))[0];
    const int64_t kept = memory_stats(gpu_).current - before;
    EXPECT_EQ(kept >= 8 * kItems * 4, !again);
    backward(y, Tensor::full({kItems}, 1, DType::f32, gpu_));
    grads[again] = grad_of(x);
    EXPECT_LT(memory_stats(gpu_).current - before, 3 * kItems * 4);  // y and the gradient
  }
  EXPECT_EQ(grads[0], grads[1]);
}

}  // namespace
}  // namespace ebb::testing
