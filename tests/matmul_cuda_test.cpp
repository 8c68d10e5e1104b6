// Products on the GPU beyond what the op table generates: dtypes, the table of algorithms, the
// plain kernel, huge batches.
#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "ops/gemm.h"
#include "ops/matmul.h"
#include "tensor/compare.h"
#include "tests/op_harness.h"

namespace ebb::testing {
namespace {

class MatmulCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  void TearDown() override { set_matmul_autotune(false); }

  Tensor random(const Shape& s, DType t) { return draw_.normal(s).to(t, gpu_); }
  // The product of the values as they are, in f64 on the CPU.
  static Tensor exact(const Tensor& a, const Tensor& b) {
    return matmul(a.to(DType::f64, Device::cpu()), b.to(DType::f64, Device::cpu())).value();
  }
  Tensor product(const Tensor& a, const Tensor& b, DType t) {
    const Tensor c = Tensor::empty({a.size(0), b.size(1)}, t, gpu_);
    matmul_into(a, b, c);
    return c;
  }
  const Device gpu_ = Device::cuda();
  Draw draw_{123};
};

TEST_F(MatmulCuda, F32IsIeeeSingleNotTf32) {
  const Tensor a = random({257, 1024}, DType::f32), b = random({1024, 129}, DType::f32);
  EXPECT_LE(relative_error(product(a, b, DType::f32), exact(a, b)), 2e-6);
}

TEST_F(MatmulCuda, F32ResultsFromBf16OperandsAreNotRounded) {
  const Tensor a = random({96, 512}, DType::bf16), b = random({512, 80}, DType::bf16);
  EXPECT_LE(relative_error(product(a, b, DType::f32), exact(a, b)), 1e-5);
  const double rounded = relative_error(product(a, b, DType::bf16), exact(a, b));
  EXPECT_GT(rounded, 1e-4);
  EXPECT_LE(rounded, 4e-3);
  const Var y = linear(a, b.transpose(0, 1), {}, {.output = DType::f32});
  EXPECT_EQ(y.dtype(), DType::f32);
  EXPECT_LE(relative_error(y.value(), exact(a, b)), 1e-5);
}

TEST_F(MatmulCuda, TransposedViewsOddSizesAndAlignments) {
  for (const DType t : {DType::f32, DType::bf16})
    for (const int64_t n : {1, 7, 97, 128})
      for (const int64_t offset : {0, 1}) {
        const Tensor a = random({35, 61}, t).slice(1, offset, offset + 59);  // odd ld
        const Tensor at = random({61, 35}, t).slice(0, offset, offset + 59).transpose(0, 1);
        const Tensor b = random({59, n}, t), bt = random({n, 59}, t).transpose(0, 1);
        const double limit = t == DType::f32 ? 2e-6 : 4e-3;
        for (const Tensor& left : {a, at})
          for (const Tensor& right : {b, bt})
            EXPECT_LE(relative_error(product(left, right, t), exact(left, right)), limit)
                << name(t) << " n " << n << " offset " << offset;
      }
}

TEST_F(MatmulCuda, BatchesBeyondTheGridLimit) {
  const Tensor a = random({70000, 2, 3}, DType::f32), b = random({70000, 3, 2}, DType::f32);
  const Var c = matmul(Var::leaf(a), Var::leaf(b));
  EXPECT_LE(relative_error(c.value(), exact(a, b)), 1e-6);
  const Tensor shared = random({3, 2}, DType::bf16), x = random({70000, 2, 3}, DType::bf16);
  EXPECT_LE(relative_error(matmul(x, shared).value(), exact(x, shared)), 4e-3);
  const Tensor left = random({5, 2}, DType::bf16);  // shared on the left: stride 0
  EXPECT_LE(relative_error(matmul(left, x).value(), exact(left, x)), 4e-3);
}

TEST_F(MatmulCuda, PlainKernelAgreesInEveryLayout) {
  for (const DType t : {DType::f32, DType::bf16})
    for (const bool ta : {false, true})
      for (const bool tb : {false, true})
        for (const bool accumulate : {false, true}) {
          const int64_t batch = 3, m = 45, n = 70, k = 39;
          Tensor a = random(ta ? Shape{batch, k, m} : Shape{batch, m, k}, t);
          Tensor b = random(tb ? Shape{batch, n, k} : Shape{batch, k, n}, t);
          const Tensor c = Tensor::full({batch, m, n}, accumulate ? 0 : NAN, DType::f32, gpu_);
          Gemm g{.operands = t, .result = DType::f32, .batch = batch, .m = m, .n = n, .k = k};
          g.a = {a.raw(), a.size(2), a.stride(0), ta};
          g.b = {b.raw(), b.size(2), b.stride(0), tb};
          g.c = {c.raw(), n, m * n, false};
          g.accumulate = accumulate;
          if constexpr (kWithCuda)
            for (int i = 0; i < (accumulate ? 2 : 1); ++i) gpu::gemm_plain(g, gpu_);
          if (ta) a = a.transpose(1, 2);
          if (tb) b = b.transpose(1, 2);
          Tensor want = exact(a, b);
          if (accumulate)
            for (int64_t i = 0; i < want.numel(); ++i) want.data<double>()[i] *= 2;
          EXPECT_LE(relative_error(c, want), 1e-6);
        }
}

TEST_F(MatmulCuda, WeightGradientsOfBf16AccumulateInF32) {
  const Var w = Var::leaf(random({40, 24}, DType::bf16)),
            bias = Var::leaf(random({40}, DType::f32));
  const Tensor x1 = random({300, 24}, DType::bf16), x2 = random({70, 24}, DType::bf16);
  const Tensor dy1 = random({300, 40}, DType::bf16), dy2 = random({70, 40}, DType::bf16);
  backward(linear(x1, w, bias), dy1);
  EXPECT_EQ(w.grad().dtype(), DType::f32);
  EXPECT_LE(relative_error(w.grad(), exact(dy1.transpose(0, 1), x1)), 1e-5);
  const Tensor accumulator = w.grad();
  backward(linear(x2, w, bias), dy2);
  EXPECT_TRUE(w.grad().same_storage(accumulator));
  Tensor want = exact(dy1.transpose(0, 1), x1);
  const Tensor second = exact(dy2.transpose(0, 1), x2);
  for (int64_t i = 0; i < want.numel(); ++i) want.data<double>()[i] += second.data<double>()[i];
  EXPECT_LE(relative_error(w.grad(), want), 1e-5);
}

TEST_F(MatmulCuda, BiasGradientOfManyRowsIsBitwiseRepeatable) {
  const Var w = Var::leaf(random({70, 8}, DType::bf16)), bias = Var::leaf(random({70}, DType::f32));
  const Tensor x = random({100003, 8}, DType::bf16), dy = random({100003, 70}, DType::bf16);
  backward(linear(x, w, bias), dy);
  const Tensor first = bias.grad(), dw = w.grad();
  bias.zero_grad(), w.zero_grad();
  backward(linear(x, w, bias), dy);
  EXPECT_TRUE(bitwise_equal(first, bias.grad()));
  EXPECT_TRUE(bitwise_equal(dw, w.grad()));
  const Tensor ones = Tensor::full({1, 100003}, 1, DType::bf16, gpu_);
  EXPECT_LE(relative_error(first, exact(ones, dy).select(0, 0)), 1e-5);
}

TEST_F(MatmulCuda, StoredAlgorithmsComeBackAndRepeatBits) {
  const Tensor a = random({333, 512}, DType::bf16), b = random({512, 130}, DType::bf16);
  set_matmul_autotune(true);
  const Tensor tuned = product(a, b, DType::f32);
  set_matmul_autotune(false);
  EXPECT_LE(relative_error(tuned, exact(a, b)), 1e-5);
  const std::string text = matmul_algorithms_json();
  const LoadedAlgorithms loaded = load_matmul_algorithms(text);
  EXPECT_GT(loaded.loaded, 0);
  EXPECT_EQ(loaded.foreign, 0);
  EXPECT_EQ(matmul_algorithms_json(), text);
  EXPECT_TRUE(bitwise_equal(product(a, b, DType::f32), tuned));  // the loaded entry, checked now
  std::string other = text;
  const size_t at = other.find("\"cublaslt\": ") + 12;
  other.insert(at, 1, '9');
  EXPECT_EQ(load_matmul_algorithms(other).loaded, 0);
  EXPECT_GT(load_matmul_algorithms(other).foreign, 0);
}

TEST_F(MatmulCuda, TimingCandidatesLeavesTheAccumulatorAlone) {
  const Tensor a = random({72, 640}, DType::bf16), b = random({640, 56}, DType::bf16);
  const Tensor c = Tensor::full({72, 56}, 3, DType::f32, gpu_);
  set_matmul_autotune(true);
  matmul_into(a, b, c, Beta::one);
  Tensor want = exact(a, b);
  for (int64_t i = 0; i < want.numel(); ++i) want.data<double>()[i] += 3;
  EXPECT_LE(relative_error(c, want), 1e-5);
}

}  // namespace
}  // namespace ebb::testing
