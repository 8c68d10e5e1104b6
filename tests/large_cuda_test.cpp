// More than 2^31 elements, where a 32-bit offset wraps. Each tensor is about 4.3 GB of bf16.
#include "autograd/tape.h"
#include "ops/cumsum.h"
#include "ops/elementwise.h"
#include "ops/indexing.h"
#include "ops/movement.h"
#include "ops/reduce.h"
#include "ops/softmax.h"
#include "tests/cuda_fixture.h"

namespace ebb::testing {
namespace {

constexpr int64_t kRows = (int64_t(1) << 31) / 24 + 5, kWidth = 24;
constexpr int64_t kItems = kRows * kWidth;  // 2^31 + 112
static_assert(kItems > int64_t(1) << 31);

class Large : public CudaTest {
 protected:
  // Zeros with 1, 2, 3 ... in the last places: what a wrapped offset would not find.
  Tensor tail() const {
    const Tensor x = Tensor::zeros({kItems}, DType::bf16, gpu_);
    x.slice(0, kItems - 100, kItems).copy_(Tensor::arange(100, DType::f32).to(gpu_));
    return x;
  }
  static std::vector<double> end_of(const Var& y, int64_t n) {
    const Tensor flat = y.value().view({y.numel()});
    return flat.slice(0, y.numel() - n, y.numel()).to_vector<double>();
  }
};

TEST_F(Large, Elementwise) {
  if (!has_memory(4 * 2 * kItems)) GTEST_SKIP() << "needs " << 8 * kItems << " bytes";
  const Tensor x = tail();
  EXPECT_EQ(end_of(add(x, 1), 2), (std::vector<double>{99, 100}));
  EXPECT_EQ(end_of(mul(x, x), 2), (std::vector<double>{9600, 9792}));  // 9604, 9801 in bf16
  // Unaligned and strided operands take the scalar path.
  EXPECT_EQ(end_of(neg(x.slice(0, 1, kItems)), 2), (std::vector<double>{-98, -99}));
  const Tensor columns = x.view({kRows, kWidth});
  EXPECT_EQ(end_of(neg(columns.slice(1, 1, kWidth)), 2), (std::vector<double>{-98, -99}));
  // Broadcasting along rows and along columns.
  const Tensor row = Tensor::full({kWidth}, 2, DType::bf16, gpu_);
  EXPECT_EQ(end_of(mul(columns, row), 2), (std::vector<double>{196, 198}));
  const Tensor column = Tensor::full({kRows, 1}, 2, DType::bf16, gpu_);
  EXPECT_EQ(end_of(mul(columns, column), 2), (std::vector<double>{196, 198}));
  const Tensor mask = gt(x, 98);
  EXPECT_EQ(mask.slice(0, kItems - 2, kItems).to_vector<double>(), (std::vector<double>{0, 1}));
}

TEST_F(Large, Reductions) {
  if (!has_memory(4 * 2 * kItems)) GTEST_SKIP() << "needs " << 8 * kItems << " bytes";
  const Tensor x = tail(), rows = x.view({kRows, kWidth});
  EXPECT_EQ(sum(cast(x.slice(0, kItems - 100, kItems), DType::f32)).value().item(), 4950);
  EXPECT_EQ(argmax(x).item(), double(kItems - 1));
  EXPECT_EQ(max(x).value().item(), 99);
  EXPECT_EQ(argmax(rows, 0).to_vector<int64_t>(), std::vector<int64_t>(kWidth, kRows - 1));
  EXPECT_EQ(end_of(max(rows, 1), 2), (std::vector<double>{75, 99}));
  // Counts of ones are exact in f32 partial sums and 2^31 + 112 rounds to 2^31 in bf16.
  const Tensor ones = Tensor::full({kItems}, 1, DType::bf16, gpu_);
  EXPECT_EQ(sum(ones).value().item(), double(int64_t(1) << 31));
  EXPECT_EQ(mean(ones).value().item(), 1);
  EXPECT_EQ(end_of(sum(ones.view({kRows, kWidth}), 1), 1)[0], kWidth);
  EXPECT_NEAR(end_of(sum(ones.view({kRows, kWidth}), 0), 1)[0], double(kRows), kRows / 256.);
  EXPECT_NEAR(end_of(softmax(rows), 1)[0], 0.63, 0.01);
}

TEST_F(Large, ScansAndIndices) {
  if (!has_memory(6 * 2 * kItems)) GTEST_SKIP() << "needs " << 12 * kItems << " bytes";
  const Tensor x = tail();
  EXPECT_EQ(end_of(cumsum(x, 0), 1)[0], 4960);  // 4950 in bf16
  EXPECT_EQ(end_of(cumsum(x.view({kRows, kWidth}), 0), 1)[0], 99 + 75 + 51 + 27 + 3);
  EXPECT_EQ(cumsum(x, 0, ScanOrder::backward).value().slice(0, 0, 1).item(), 4960);
  const Tensor last = Tensor::from(std::vector<int64_t>{kRows - 1, 0}, {2}).to(gpu_);
  EXPECT_EQ(end_of(index_select(x.view({kRows, kWidth}), 0, last), 25)[0], 99);
  EXPECT_EQ(end_of(concat({x.slice(0, 0, 3), x}, 0), 1)[0], 99);
}

TEST_F(Large, Gradients) {
  if (!has_memory(10 * 2 * kItems)) GTEST_SKIP() << "needs " << 20 * kItems << " bytes";
  const Var x = Var(tail().view({kRows, kWidth}));
  const Var w = Var::leaf(Tensor::full({kWidth}, 2, DType::bf16, gpu_));
  const Var c = Var::leaf(Tensor::full({kRows, 1}, 2, DType::bf16, gpu_));
  backward(mul(mul(x, w), c), Tensor::full({kRows, kWidth}, 0.5, DType::bf16, gpu_));
  // The last column holds 3, 27, 51, 75, 99 and the row of 24 below holds 76 ... 99.
  EXPECT_EQ(w.grad().to_vector<double>().back(), 3 + 27 + 51 + 75 + 99);
  double row = 0;
  for (int i = 76; i < 100; ++i) row += 2 * i * 0.5;
  EXPECT_EQ(c.grad().view({kRows}).slice(0, kRows - 1, kRows).item(), row);
}

}  // namespace
}  // namespace ebb::testing
