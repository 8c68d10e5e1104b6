// What random inputs do not reach: NaN, infinities, ties, nothing to reduce, indices out of range,
// thread counts, upstream gradients of stride 0, anomaly mode.
#include <omp.h>

#include <cmath>

#include "autograd/tape.h"
#include "ops/cumsum.h"
#include "ops/elementwise.h"
#include "ops/indexing.h"
#include "ops/movement.h"
#include "ops/reduce.h"
#include "ops/softmax.h"
#include "tensor/compare.h"
#include "tensor/device_flags.h"
#include "tests/device_param.h"
#include "tests/op_harness.h"

namespace ebb::testing {
namespace {

class Reduce : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, Reduce, every_device(), device_name);

std::vector<double> host(const Var& v) { return v.value().to_vector<double>(); }
std::vector<double> host(const Tensor& t) { return t.to_vector<double>(); }

TEST_P(Reduce, NanPropagates) {
  for (const DType t : dtypes())
    for (const int64_t n : {3, 300, 5001}) {  // a few lanes, a warp, a block
      for (const int64_t inner : {1, 3}) {
        std::vector<double> v(size_t(n * inner), 0.25);
        const int64_t at = n - 2;  // in column 0
        v[size_t(at * inner)] = NAN;
        v[size_t((n - 1) * inner)] = NAN;  // a later one
        v[0] = 8;
        const Tensor x = values(v, {n, inner}, t);
        for (const Var& y : {sum(x, 0), mean(x, 0), norm2(x, 0), max(x, 0), min(x, 0),
                             logsumexp(x, 0), variance(x, 0)}) {
          EXPECT_TRUE(std::isnan(host(y)[0])) << n << " " << inner;
          EXPECT_EQ(std::isnan(host(y).back()), inner == 1) << n << " " << inner;
        }
        EXPECT_EQ(host(argmax(x, 0))[0], double(at));
        EXPECT_EQ(host(argmin(x, 0))[0], double(at));
        const auto scan = host(cumsum(x, 0));
        EXPECT_FALSE(std::isnan(scan[size_t((at - 1) * inner)]));
        EXPECT_TRUE(std::isnan(scan[size_t(at * inner)]));
        EXPECT_EQ(std::isnan(scan.back()), inner == 1);
        const Var rows = transpose(x, 0, 1);
        for (const Var& y : {softmax(rows), log_softmax(rows)}) {
          EXPECT_TRUE(std::isnan(host(y)[size_t(n - 1)]));
          EXPECT_EQ(std::isnan(host(y).back()), inner == 1);
        }
      }
    }
}

TEST_P(Reduce, InfinitiesAndMasks) {
  const Tensor x =
      values({-INFINITY, 1, 1, -INFINITY, -INFINITY, -INFINITY, INFINITY, 0, 1}, {3, 3});
  const auto lse = host(logsumexp(x, 1));
  EXPECT_NEAR(lse[0], 1 + std::log(2), 1e-6);
  EXPECT_EQ(lse[1], -INFINITY);
  EXPECT_EQ(lse[2], INFINITY);
  const auto p = host(softmax(x));
  EXPECT_EQ(p[0], 0);
  EXPECT_NEAR(p[1], 0.5, 1e-6);
  EXPECT_TRUE(std::isnan(p[3]));
  EXPECT_EQ(host(max(x, 1)), (std::vector<double>{1, -INFINITY, INFINITY}));
  EXPECT_EQ(host(argmax(x, 1)), (std::vector<double>{1, 0, 0}));
  EXPECT_EQ(host(argmin(x, 1)), (std::vector<double>{0, 0, 1}));
  // Masked entries get no gradient and spoil none.
  const Var v = Var::leaf(x.slice(0, 0, 1));
  for (const auto f : {softmax, log_softmax}) {
    v.zero_grad();
    backward(f(v), values({0, 1, 0}, {1, 3}));
    for (const double g : host(v.grad())) EXPECT_FALSE(std::isnan(g));
    EXPECT_EQ(host(v.grad())[0], 0);
  }
  v.zero_grad();
  backward(sum(logsumexp(v, 1)));
  EXPECT_EQ(host(v.grad())[0], 0);
  EXPECT_NEAR(host(v.grad())[1], 0.5, 1e-6);
}

// exp of anything but a difference would overflow.
TEST_P(Reduce, LargeLogits) {
  const Tensor x = values({10000, 10001, 9000}, {1, 3});
  EXPECT_NEAR(host(logsumexp(x, 1))[0], 10001 + std::log1p(std::exp(-1)), 1e-3);
  EXPECT_NEAR(host(softmax(x))[1], 1 / (1 + std::exp(-1)), 1e-6);
  EXPECT_NEAR(host(log_softmax(x))[0], -1 - std::log1p(std::exp(-1)), 1e-6);
  const Var v = Var::leaf(x);
  backward(log_softmax(v), values({1, 0, 0}, {1, 3}));
  EXPECT_NEAR(host(v.grad())[1], -1 / (1 + std::exp(-1)), 1e-6);
}

TEST_P(Reduce, FirstOfEqualMaximaWins) {
  for (const DType t : dtypes())
    for (const int64_t n : {2, 40, 1025, 100003}) {
      for (const int64_t inner : {1, 2, 9}) {
        const Tensor x = Tensor::full({n, inner}, 3, t, device());
        for (const double at : host(argmax(x, 0))) ASSERT_EQ(at, 0) << n << " " << inner;
        x.slice(0, n / 2, n).fill_(4);
        for (const double at : host(argmax(x, 0))) ASSERT_EQ(at, double(n / 2)) << n;
        const Var v = Var::leaf(x);
        backward(sum(max(v, 0)));
        EXPECT_EQ(host(sum(v.grad()))[0], double(inner));
        EXPECT_EQ(host(v.grad())[size_t(n / 2 * inner)], 1);
      }
    }
}

TEST_P(Reduce, OfNothing) {
  const Tensor x = Tensor::zeros({0, 2}, DType::f32, device());
  EXPECT_EQ(host(sum(x, 0)), (std::vector<double>{0, 0}));
  EXPECT_EQ(host(sum(x)), std::vector<double>{0});
  EXPECT_EQ(host(norm2(x)), std::vector<double>{0});
  EXPECT_TRUE(std::isnan(host(mean(x))[0]));
  EXPECT_EQ(host(logsumexp(x, 0))[1], -INFINITY);
  EXPECT_EQ(sum(x, 1).shape(), Shape{0});
  EXPECT_EQ(max(x, 1).shape(), Shape{0});
  const Var v = Var::leaf(x);
  backward(sum(v));
  EXPECT_EQ(v.grad().shape(), (Shape{0, 2}));
}

TEST_P(Reduce, LongSumsKeepTheirDigits) {
  // 0.1 is not a binary fraction: a running f32 sum of ten million is off by 1 %.
  const int64_t n = 10000019;
  const Tensor x = Tensor::full({n}, 0.1, DType::f32, device());
  const double exact = double(n) * double(0.1f);
  EXPECT_NEAR(host(sum(x))[0], exact, 1e-6 * exact);
  EXPECT_NEAR(host(sum(x.slice(0, 0, n - 2).view({(n - 2) / 3, 3}), 0))[2], exact / 3,
              1e-6 * exact);
  EXPECT_NEAR(host(cumsum(x, 0)).back(), exact, 1e-5 * exact);
}

TEST_P(Reduce, NormOfZeroHasNoGradient) {
  const Var v = Var::leaf(values({0, 0, 3, 4}, {2, 2}));
  backward(sum(norm2(v, 1)));
  const auto g = host(v.grad());
  EXPECT_EQ(g[0], 0);
  EXPECT_NEAR(g[2], 0.6, 1e-6);
}

TEST_P(Reduce, PackedScansDoNotLeak) {
  std::vector<double> v(600, 1);
  v[299] = NAN;
  for (const Shape& s : {Shape{1, 600}, Shape{2, 300}})
    for (const ScanOrder order : {ScanOrder::forward, ScanOrder::backward}) {
      const auto y =
          host(cumsum(values(v, s), SeqLayout::packed({0, 299, 299, 300, 600}, device()), order));
      for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isnan(y[i]), i == 299) << i;
      EXPECT_EQ(y[order == ScanOrder::forward ? 599 : 300], 300);
    }
}

TEST_P(Reduce, IndexOutOfRange) {
  const Tensor x = values({1, 2, 3});
  const Tensor bad = Tensor::from(std::vector<int64_t>{2, 3, -1}, {3}).to(device());
  if (!device().is_cuda()) {
    expect_error("index_select: index 3 at position 1", [&] { index_select(x, 0, bad); });
    expect_error("gather: index 3 at position 1", [&] { gather(x, 0, bad); });
    return;
  }
  for (const auto& pick : {index_select, gather}) {
    const Var v = Var::leaf(x);
    const Var y = pick(v, 0, bad);
    EXPECT_EQ(host(y), (std::vector<double>{3, 0, 0}));
    backward(y, values({5, 6, 7}));
    EXPECT_EQ(host(v.grad()), (std::vector<double>{0, 0, 5}));
    expect_error("an index lies outside", [&] { check_device_flags(device()); });
    EXPECT_NO_THROW(check_device_flags(device()));  // cleared
  }
}

TEST_P(Reduce, IntegersCanBePicked) {
  const Tensor x = Tensor::arange(12).view({4, 3}).to(device());
  const Tensor ids = Tensor::from(std::vector<int32_t>{3, 0}, {2}).to(device());
  EXPECT_EQ(host(index_select(x, 0, ids)), (std::vector<double>{9, 10, 11, 0, 1, 2}));
  EXPECT_EQ(host(index_select(x.to(DType::u8), 1, ids.slice(0, 1, 2))),
            (std::vector<double>{0, 3, 6, 9}));
}

// An upstream gradient that is one expanded number: every stride 0.
TEST_P(Reduce, EveryOperatorTakesAnExpandedUpstream) {
  const DType t = device().is_cuda() ? DType::f32 : DType::f64;
  for (const NamedCase& n : all_cases()) {
    if (!n.c.gradients || (device().is_cuda() && !n.c.cuda)) continue;
    const auto run = [&](bool expanded) {
      std::vector<Var> in, roots;
      std::vector<Tensor> dy, grads;
      for (const OpInput& i : n.c.inputs) {
        if (!i.value.defined()) {
          in.emplace_back();
          continue;
        }
        const bool is_number = is_float(i.value.dtype());
        const Tensor x = i.value.to(is_number ? t : i.value.dtype(), device());
        in.push_back(is_number && i.differentiable ? Var::leaf(x) : Var(x));
      }
      for (const Var& y : n.c.run(in)) {
        if (!y.requires_grad()) continue;
        const Tensor one = Tensor::full({}, 0.5, y.dtype(), device()).expand(y.shape());
        roots.push_back(y);
        dy.push_back(expanded ? one : one.contiguous());
      }
      if (!roots.empty()) backward(roots, dy);
      for (const Var& v : in) grads.push_back(v.grad());
      return grads;
    };
    const auto got = run(true), want = run(false);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i].defined(), want[i].defined()) << case_name(n);
      if (!got[i].defined()) continue;
      EXPECT_LE(relative_error(got[i].cpu(), want[i].cpu()), t == DType::f64 ? 1e-12 : 1e-5)
          << case_name(n) << ": input " << i;
    }
  }
}

TEST(ReduceCpu, ThreadCountDoesNotMatter) {
  const int before = omp_get_max_threads();
  for (const NamedCase& n : all_cases()) {
    if (n.op != "elementwise" && n.op != "reduce" && n.op != "indexing" && n.op != "cumsum" &&
        n.op != "softmax" && n.op != "movement")
      continue;
    omp_set_num_threads(1);
    const RunResult one = run_case(n.c, {.dtype = DType::f32});
    omp_set_num_threads(3);
    expect_bitwise(case_name(n), run_case(n.c, {.dtype = DType::f32}), one);
  }
  omp_set_num_threads(before);
}

// Anomaly mode sees one bad value wherever it is, and no finite one as bad.
TEST_P(Reduce, AnomalyModeFindsNonFiniteValues) {
  const AnomalyMode anomaly;
  for (const DType t : dtypes()) {
    const double largest = t == DType::bf16 ? 3.3895313892515355e38 : 3.4028234663852886e38;
    for (const int64_t n : {1, 7, 8, 4099, 100001}) {
      const Tensor x = Tensor::full({n + 1}, -largest, t, device()).slice(0, 1, n + 1);
      EXPECT_NO_THROW(neg(x));
      for (const int64_t at : {int64_t(0), n / 2, n - 1})
        for (const double bad : {INFINITY, -INFINITY, NAN}) {
          const Tensor y = x.clone();
          y.slice(0, at, at + 1).fill_(bad);
          expect_error("anomaly: neg forward produced a non-finite value in output 0",
                       [&] { neg(y); });
        }
    }
  }
  const Var x = Var::leaf(values({0, 1}));
  const Var y = sqrt(x);
  expect_error("anomaly: sqrt backward", [&] { backward(sum(y)); });
  EXPECT_NO_THROW(expand(values({1, 2}), {100, 2}));
  expect_error("anomaly: expand", [&] { expand(values({1, NAN}), {100, 2}); });
  expect_error("anomaly: transpose", [&] {
    transpose(values({1, 2, 3, 4, 5, INFINITY}, {2, 3}), 0, 1);
  });
}

}  // namespace
}  // namespace ebb::testing
