// Captured CUDA graphs.
#include "tensor/graph.h"

#include <gtest/gtest.h>

#include "tensor/check.h"
#include "tensor/tensor.h"

namespace ebb::testing {
namespace {

class Graph : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  const Device gpu_ = Device::cuda();
};

TEST_F(Graph, ReplaysWithNewInputValues) {
  const Tensor x = Tensor::full({1000}, 1, DType::f32, gpu_);
  Tensor y;
  GraphCapture graph(gpu_);
  const auto work = [&] { y = x.to(DType::bf16).to(DType::f32).clone(); };
  work();
  graph.capture(work);
  for (const double v : {2.0, -3.0}) {
    x.fill_(v);
    graph.replay();
    for (const float got : y.to_vector<float>()) ASSERT_EQ(got, float(v));
  }
  EXPECT_GT(graph.reserved(), 0);
  y = Tensor();  // lives in the graph's arena
}

TEST_F(Graph, CaptureDoesNotRun) {
  const Tensor x = Tensor::full({4}, 1, DType::f32, gpu_);
  GraphCapture graph(gpu_);
  graph.capture([&] { x.fill_(5); });
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 1));
  graph.replay();
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 5));
}

TEST_F(Graph, MemoryOfOthersStaysOutOfTheArena) {
  const Tensor x = Tensor::full({256}, 1, DType::f32, gpu_);
  Tensor y;
  GraphCapture graph(gpu_);
  graph.capture([&] { y = x.clone(); });
  graph.replay();
  std::vector<Tensor> others;  // would land on freed blocks of the capture, were they shared
  for (int i = 0; i < 64; ++i) others.push_back(Tensor::full({256}, 7, DType::f32, gpu_));
  graph.replay();
  for (const Tensor& o : others) ASSERT_EQ(o.to_vector<float>(), std::vector<float>(256, 7));
  EXPECT_EQ(y.to_vector<float>(), std::vector<float>(256, 1));
  y = Tensor();
}

TEST_F(Graph, FailureInCaptureLeavesTheStreamUsable) {
  const Tensor x = Tensor::full({4}, 1, DType::f32, gpu_);
  {
    GraphCapture graph(gpu_);
    EXPECT_THROW(graph.capture([&] {
      x.fill_(2);
      throw Error("stop");
    }),
                 Error);
    EXPECT_THROW(graph.replay(), Error);
  }
  x.fill_(3);
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 3));
}

TEST(GraphCpu, RefusesTheCpu) { EXPECT_THROW(GraphCapture(Device::cpu()), Error); }

}  // namespace
}  // namespace ebb::testing
