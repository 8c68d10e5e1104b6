// Products on the CPU beyond what the op table generates.
#include "ops/matmul.h"

#include <gtest/gtest.h>
#include <omp.h>

#include "autograd/gradcheck.h"
#include "autograd/tape.h"
#include "ops/gemm.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tests/op_harness.h"
#include "tests/reference/matmul.h"

namespace ebb::testing {
namespace {

Tensor random(const Shape& s, DType t = DType::f64) {
  static Draw draw(77);
  return draw.normal(s).to(t);
}

Tensor expected(const Tensor& a, const Tensor& b) {
  return reference::matmul(a.to(DType::f64).contiguous(), b.to(DType::f64).contiguous());
}

int64_t allocations_of(const std::function<void()>& run) {
  const int64_t before = memory_stats(Device::cpu()).allocations;
  run();
  return memory_stats(Device::cpu()).allocations - before;
}

TEST(MatmulInto, TransposedAndSlicedOperandsAreReadWhereTheyLie) {
  const Tensor a = random({9, 11}), at = random({11, 9}).transpose(0, 1);
  const Tensor b = random({11, 7}), bt = random({7, 11}).transpose(0, 1);
  const Tensor part = random({20, 30}).slice(0, 3, 12).slice(1, 5, 16);  // [9,11], ld 30
  for (const Tensor& left : {a, at, part})
    for (const Tensor& right : {b, bt}) {
      const Tensor c = Tensor::empty({9, 7}, DType::f64);
      EXPECT_EQ(allocations_of([&] { matmul_into(left, right, c); }), 0);
      EXPECT_LE(relative_error(c, expected(left, right)), 1e-14);
    }
}

TEST(MatmulInto, BroadcastOperandsAreNotMaterialised) {
  const Tensor a = random({6, 5, 4}), b = random({4, 3}), wide = random({2, 6, 5, 4});
  const Tensor c = Tensor::empty({6, 5, 3}, DType::f64), d = Tensor::empty({6, 3, 3}, DType::f64);
  EXPECT_EQ(allocations_of([&] { matmul_into(a, b, c); }), 0);
  EXPECT_LE(relative_error(c, expected(a, b)), 1e-14);
  const Tensor one = random({3, 5}), e = Tensor::empty({2, 6, 3, 4}, DType::f64);
  EXPECT_EQ(allocations_of([&] { matmul_into(one, wide, e); }), 0);
  EXPECT_LE(relative_error(e, expected(one, wide)), 1e-14);
}

TEST(MatmulInto, ResultsMayLieTransposedStridedAndInsideOthers) {
  const Tensor a = random({2, 5, 4}), b = random({2, 4, 3}), want = expected(a, b);
  const Tensor transposed = Tensor::full({2, 3, 5}, 777, DType::f64).transpose(1, 2);
  const Tensor inside = Tensor::full({2, 9, 8}, 777, DType::f64);
  const Tensor strided = strided_copy(Tensor::zeros({2, 5, 3}, DType::f64));
  for (const Tensor& c : {transposed, inside.slice(1, 2, 7).slice(2, 1, 4), strided}) {
    matmul_into(a, b, c);
    EXPECT_LE(relative_error(c, want), 1e-14);
    matmul_into(a, b, c, Beta::one);
    const Tensor twice = Tensor::empty_like(want);
    for (int64_t i = 0; i < want.numel(); ++i) twice.data<double>()[i] = 2 * want.data<double>()[i];
    EXPECT_LE(relative_error(c, twice), 1e-14);
  }
  EXPECT_EQ(inside.to_vector<double>()[0], 777);
  EXPECT_EQ(inside.to_vector<double>().back(), 777);
}

TEST(MatmulInto, BatchesThatDoNotMergeAndVeryManyOfThem) {
  const Tensor a = random({70, 66, 2, 3}).transpose(0, 1), b = random({66, 70, 3, 2});
  const Tensor c = Tensor::empty({66, 70, 2, 2}, DType::f64);
  matmul_into(a, b, c);  // 66 calls' worth: the operands are copied into one batch
  EXPECT_LE(relative_error(c, expected(a, b)), 1e-14);
  const Tensor few = random({5, 8, 2, 3}).transpose(0, 1), other = random({8, 5, 3, 2});
  const Tensor d = Tensor::empty({8, 5, 2, 2}, DType::f64);
  EXPECT_EQ(allocations_of([&] { matmul_into(few, other, d); }), 0);
  EXPECT_LE(relative_error(d, expected(few, other)), 1e-14);
  const Tensor many = random({70000, 2, 3}), w = random({70000, 3, 1});
  const Tensor e = Tensor::empty({70000, 2, 1}, DType::f64);
  matmul_into(many, w, e);
  EXPECT_LE(relative_error(e, expected(many, w)), 1e-14);
}

TEST(MatmulInto, ZeroBetaNeverReadsTheResult) {
  for (const Shape& s : {Shape{40, 50}, Shape{1, 50}, Shape{40, 1}}) {
    const Tensor a = random({s[0], 6}, DType::f32), b = random({6, s[1]}, DType::f32);
    const Tensor c = Tensor::full(s, NAN);
    matmul_into(a, b, c);
    EXPECT_LE(relative_error(c, expected(a, b)), 1e-6);
  }
}

// Rows further apart than BLAS's 32-bit leading dimensions can say.
TEST(MatmulInto, LeadingDimensionsBeyond32Bits) {
  Draw draw(3);
  const Tensor a = draw.normal({2, 3}), b = draw.normal({3, 4}), wide = draw.normal({2, 4});
  const Tensor far_a = far_copy(a), far_wide = far_copy(wide);
  if (!far_a || !far_wide) GTEST_SKIP() << "no 32 GB of address space";
  const auto product = [](const Tensor& x, const Tensor& y) {
    const Tensor c = Tensor::empty({x.size(0), y.size(1)}, DType::f64);
    matmul_into(x, y, c);
    return c;
  };
  EXPECT_TRUE(bitwise_equal(product(far_a, b), product(a, b)));
  EXPECT_TRUE(bitwise_equal(product(b.transpose(0, 1), far_a.transpose(0, 1)),
                            product(b.transpose(0, 1), a.transpose(0, 1))));
  EXPECT_TRUE(
      bitwise_equal(product(a.transpose(0, 1), far_wide), product(a.transpose(0, 1), wide)));
}

// The thread setter of an OpenBLAS built on OpenMP is OpenMP's own: the first product must not set
// the whole process to one thread.
const int kThreadsAtStart = omp_get_max_threads();

TEST(MatmulInto, LeavesTheNumberOfThreadsAlone) {
  for (const int64_t n : {1, 8, 700}) {
    const Tensor a = Tensor::full({n, n}, 1), c = Tensor::zeros({n, n});
    matmul_into(a, a, c);
    matmul_into(a, a.slice(1, 0, 1), c.slice(1, 0, 1));
    EXPECT_EQ(omp_get_max_threads(), kThreadsAtStart) << n;
  }
}

TEST(MatmulInto, ThreadCountDoesNotChangeBits) {
  const int threads = omp_get_max_threads();
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{600, 700, 130},
                                {40, 30, 9000},
                                {1, 3000, 80},
                                {3000, 1, 80},
                                {512, 512, 512}}) {
    const Tensor a = random({m, k}, DType::f32), b = random({k, n}, DType::f32);
    const Tensor one = Tensor::empty({m, n}), three = Tensor::empty({m, n});
    omp_set_num_threads(1);
    matmul_into(a, b, one);
    omp_set_num_threads(3);
    matmul_into(a, b, three);
    omp_set_num_threads(threads);
    EXPECT_TRUE(bitwise_equal(one, three)) << m << "x" << n << "x" << k;
  }
}

TEST(Linear, SecondBackwardAddsIntoTheSameAccumulators) {
  const Var w = Var::leaf(random({6, 5})), bias = Var::leaf(random({6}));
  const Tensor x1 = random({4, 5}), x2 = random({3, 5}), dy1 = random({4, 6}), dy2 = random({3, 6});
  backward(linear(x1, w, bias), dy1);
  const Tensor dw = w.grad(), db = bias.grad();
  backward(linear(x2, w, bias), dy2);
  EXPECT_TRUE(w.grad().same_storage(dw));
  EXPECT_TRUE(bias.grad().same_storage(db));
  Tensor want = expected(dy1.transpose(0, 1), x1);
  const Tensor second = expected(dy2.transpose(0, 1), x2);
  for (int64_t i = 0; i < want.numel(); ++i) want.data<double>()[i] += second.data<double>()[i];
  EXPECT_LE(relative_error(w.grad(), want), 1e-14);
  const auto got = bias.grad().to_vector<double>();
  for (int64_t j = 0; j < 6; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < 4; ++i) sum += dy1.select(0, i).select(0, j).item();
    for (int64_t i = 0; i < 3; ++i) sum += dy2.select(0, i).select(0, j).item();
    EXPECT_NEAR(got[size_t(j)], sum, 1e-12);
  }
}

TEST(Matmul, SecondBackwardAddsIntoTheSameAccumulators) {
  const Var a = Var::leaf(random({2, 1, 4, 5})), b = Var::leaf(random({3, 5, 6}));
  const Tensor dy = random({2, 3, 4, 6});
  backward(matmul(a, b), dy);
  const Tensor da = a.grad(), db = b.grad(), da1 = da.clone(), db1 = db.clone();
  backward(matmul(a, b), dy);
  EXPECT_TRUE(a.grad().same_storage(da));
  EXPECT_TRUE(b.grad().same_storage(db));
  for (const auto& [sum, first] : {std::pair{da, da1}, {db, db1}})
    for (int64_t i = 0; i < first.numel(); ++i)
      EXPECT_NEAR(sum.to_vector<double>()[size_t(i)], 2 * first.to_vector<double>()[size_t(i)],
                  1e-12);
}

TEST(Matmul, OneVarOnBothSides) {
  const GradcheckResult r = gradcheck([](auto in) { return std::vector{matmul(in[0], in[0])}; },
                                      std::vector{random({3, 3})}, {.full_jacobian = true});
  EXPECT_TRUE(r.ok) << r.message;
}

TEST(Matmul, SavesOnlyWhatTheOtherGradientNeeds) {
  const Tensor a = random({8, 8}), b = random({8, 8});
  EXPECT_EQ(saved_bytes(matmul(Var::leaf(a), b)), b.nbytes());
  EXPECT_EQ(saved_bytes(matmul(a, Var::leaf(b))), a.nbytes());
}

TEST(MatmulAlgorithms, TextIsCheckedOnEveryBuild) {
  const std::string text = matmul_algorithms_json();
  EXPECT_NE(text.find("\"cublaslt\""), std::string::npos);
  EXPECT_NO_THROW(load_matmul_algorithms(text));
  EXPECT_THROW(load_matmul_algorithms("{"), Error);
  EXPECT_THROW(load_matmul_algorithms("{\"format\": \"something else\"}"), Error);
}

TEST(MatmulCost, CountsProductsAndBytes) {
  const Cost forward = linear_cost(Pass::forward, 10, 3, 4, DType::bf16);
  EXPECT_EQ(forward.flops, 2 * 10 * 3 * 4);
  EXPECT_EQ(forward.bytes, 2 * (10 * 3 + 3 * 4 + 10 * 4));
  EXPECT_EQ(linear_cost(Pass::backward, 10, 3, 4, DType::bf16).flops, 2 * forward.flops);
}

}  // namespace
}  // namespace ebb::testing
