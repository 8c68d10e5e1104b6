// What random inputs do not reach: far ends, NaN, infinities, ties, mixed types.
#include <cmath>

#include "autograd/tape.h"
#include "ops/elementwise.h"
#include "ops/movement.h"
#include "ops/reduce.h"
#include "tests/device_param.h"
#include "tests/op_harness.h"

namespace ebb::testing {
namespace {

class Elementwise : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, Elementwise, every_device(), device_name);

std::vector<double> host(const Var& v) { return v.value().to_vector<double>(); }
std::vector<double> host(const Tensor& t) { return t.to_vector<double>(); }

// Gradient of the sum of run(x).
std::vector<double> gradient(const std::function<Var(const Var&)>& run, const Tensor& x) {
  const Var v = Var::leaf(x);
  const Var y = run(v);
  backward(y, Tensor::full({}, 1, y.dtype(), y.device()).expand(y.shape()));
  return host(v.grad());
}

TEST_P(Elementwise, GatesFarFromZero) {
  const std::vector<double> at = {-1000, -100, -80, -30, 30, 80, 100, 1000};
  const Tensor x = values(at);
  const auto s = host(sigmoid(x)), p = host(softplus(x)), u = host(silu(x)), t = host(tanh(x));
  const auto ds = gradient(sigmoid, x), dp = gradient(softplus, x), du = gradient(silu, x),
             dt = gradient(tanh, x);
  for (size_t i = 0; i < at.size(); ++i) {
    // e^-100 is subnormal in f32: within two steps of 1.4e-45.
    const double tiny = std::exp(-std::fabs(at[i])), slack = 3e-6 * tiny + 3e-45;
    const bool low = at[i] < 0;
    EXPECT_NEAR(s[i], low ? tiny : 1, low ? slack : 1e-7) << at[i];
    EXPECT_NEAR(p[i], low ? tiny : at[i], low ? slack : 0) << at[i];
    EXPECT_NEAR(u[i], low ? at[i] * tiny : at[i], low ? slack * 1000 : 1e-5) << at[i];
    EXPECT_EQ(t[i], low ? -1 : 1) << at[i];
    EXPECT_NEAR(ds[i], tiny, slack) << at[i];
    EXPECT_NEAR(dp[i], low ? tiny : 1, low ? slack : 0) << at[i];
    EXPECT_NEAR(du[i], low ? (1 + at[i]) * tiny : 1, low ? slack * 1000 : 1e-6) << at[i];
    EXPECT_NEAR(dt[i], 4 * tiny * tiny, 1e-5 * tiny * tiny + 3e-45) << at[i];
  }
}

TEST_P(Elementwise, InfinitiesHaveTheirLimits) {
  const Tensor x = values({-INFINITY, INFINITY});
  EXPECT_EQ(host(sigmoid(x)), (std::vector<double>{0, 1}));
  EXPECT_EQ(host(softplus(x)), (std::vector<double>{0, INFINITY}));
  EXPECT_EQ(host(tanh(x)), (std::vector<double>{-1, 1}));
  EXPECT_EQ(host(relu(x)), (std::vector<double>{0, INFINITY}));
  EXPECT_EQ(host(exp(x)), (std::vector<double>{0, INFINITY}));
  EXPECT_EQ(host(clamp(x, -2, 3)), (std::vector<double>{-2, 3}));
  EXPECT_EQ(gradient(sigmoid, x), (std::vector<double>{0, 0}));
  EXPECT_EQ(gradient(tanh, x), (std::vector<double>{0, 0}));
  EXPECT_EQ(gradient(softplus, x), (std::vector<double>{0, 1}));
}

// Odd and even positions, so that vector and scalar paths both meet a NaN.
TEST_P(Elementwise, NanPropagates) {
  for (const DType t : dtypes()) {
    std::vector<double> at(37, 0.5);
    for (const size_t i : {0, 7, 35, 36}) at[i] = NAN;
    const Tensor x = values(at, t), one = Tensor::full({37}, 1, t, device());
    const std::vector<Var> results = {
        neg(x),          abs(x),          exp(x),          log(x),         sqrt(x),
        rsqrt(x),        square(x),       relu(x),         relu2(x),       sigmoid(x),
        silu(x),         tanh(x),         softplus(x),     pow(x, 1.5),    clamp(x, -1, 1),
        add(x, 1),       div(2, x),       add(x, one),     mul(one, x),    div(x, one),
        maximum(x, one), maximum(one, x), minimum(x, one), minimum(one, x)};
    for (size_t r = 0; r < results.size(); ++r) {
      const auto y = host(results[r]);
      for (size_t i = 0; i < at.size(); ++i)
        EXPECT_EQ(std::isnan(y[i]), std::isnan(at[i])) << "result " << r << " element " << i;
    }
    for (const auto& compare : {eq(x, x), lt(x, one), ge(x, one)}) EXPECT_EQ(host(compare)[0], 0);
    EXPECT_EQ(host(ne(x, x))[0], 1);
    // Selections do not hide it from backward by handing out a 0.
    EXPECT_EQ(gradient(relu, x)[0], 1);
    EXPECT_EQ(gradient([](const Var& v) { return clamp(v, -1, 1); }, x)[0], 1);
    EXPECT_EQ(gradient([&](const Var& v) { return maximum(v, one); }, x)[0], 1);
    EXPECT_EQ(gradient([&](const Var& v) { return minimum(one, v); }, x)[0], 1);
    EXPECT_TRUE(std::isnan(gradient(abs, x)[0]));
    EXPECT_TRUE(std::isnan(gradient(relu2, x)[0]));
  }
}

TEST_P(Elementwise, MaskedInfinitiesDoNoHarm) {
  const Tensor x = values({INFINITY, 2, -INFINITY, NAN});
  const Tensor mask = Tensor::from(std::vector<uint8_t>{1, 0, 1, 1}, {4}).to(device());
  EXPECT_EQ(host(masked_fill(x, mask, 0)), (std::vector<double>{0, 2, 0, 0}));
  EXPECT_EQ(gradient([&](const Var& v) { return masked_fill(v, mask, 0); }, x),
            (std::vector<double>{0, 1, 0, 0}));
  const Var a = Var::leaf(x), b = Var::leaf(values({1, 2, 3, 4}));
  const Var y = where(mask, b, a);
  EXPECT_EQ(host(y), (std::vector<double>{1, 2, 3, 4}));
  backward(y, values({INFINITY, NAN, 5, 6}));  // what comes back passes on one side only
  EXPECT_EQ(host(b.grad())[0], INFINITY);
  EXPECT_EQ(host(b.grad())[1], 0);
  EXPECT_EQ(host(a.grad())[0], 0);
  EXPECT_TRUE(std::isnan(host(a.grad())[1]));
}

TEST_P(Elementwise, TiesAndKinks) {
  const Tensor x = values({-1, 0, 1});
  EXPECT_EQ(gradient(abs, x), (std::vector<double>{-1, 0, 1}));
  EXPECT_EQ(gradient(relu, x), (std::vector<double>{0, 0, 1}));
  EXPECT_EQ(gradient([](const Var& v) { return clamp(v, -1, 1); }, x),
            (std::vector<double>{1, 1, 1}));  // the ends belong to the range
  EXPECT_EQ(gradient([](const Var& v) { return pow(v, 0); }, x), (std::vector<double>{0, 0, 0}));
  for (const auto f : {maximum, minimum}) {
    const Var a = Var::leaf(x), b = Var::leaf(values({-1, 2, -2}));
    backward(sum(f(a, b)));
    const double largest = f == maximum, smallest = 1 - largest;
    EXPECT_EQ(host(a.grad()), (std::vector<double>{0.5, smallest, largest}));
    EXPECT_EQ(host(b.grad()), (std::vector<double>{0.5, largest, smallest}));
  }
}

TEST_P(Elementwise, TypesPromote) {
  const DType wide = device().is_cuda() ? DType::f32 : DType::f64;
  const DType narrow = device().is_cuda() ? DType::bf16 : DType::f32;
  const auto tensor = [&](const Shape& s, DType t) { return Tensor::full(s, 1.5, t, device()); };
  EXPECT_EQ(add(tensor({2}, narrow), tensor({2}, narrow)).dtype(), narrow);
  EXPECT_EQ(add(tensor({2}, narrow), tensor({2}, wide)).dtype(), wide);
  EXPECT_EQ(mul(tensor({2}, wide), tensor({1, 1}, narrow)).dtype(), wide);
  EXPECT_EQ(mul(tensor({2}, narrow), tensor({}, wide)).dtype(), narrow);
  EXPECT_EQ(mul(tensor({}, narrow), tensor({}, wide)).dtype(), wide);
  EXPECT_EQ(mul(tensor({}, wide), tensor({2}, wide)).dtype(), wide);
  const Tensor mask = Tensor::zeros({2}, DType::u8, device());
  EXPECT_EQ(where(mask, tensor({2}, narrow), tensor({2}, wide)).dtype(), wide);
  EXPECT_EQ(add(tensor({2}, narrow), 1e-9).dtype(), narrow);
  EXPECT_EQ(add(tensor({2}, DType::bf16), tensor({2}, DType::f32)).dtype(), DType::f32);

  // Gradients come back in each input's type: an operator further up sees what it produced.
  for (const Shape& s : {Shape{3, 2}, Shape{2}}) {
    const Var a = Var::leaf(tensor({3, 2}, narrow)), b = Var::leaf(tensor(s, narrow));
    DType seen = wide;
    const Var low = mul(b, 2);
    low.register_hook([&](const Tensor& g) {
      seen = g.dtype();
      return Tensor();
    });
    backward(sum(mul(cast(a, wide), low)));
    EXPECT_EQ(seen, narrow) << s.str();
    EXPECT_EQ(host(a.grad())[0], 3) << s.str();
    EXPECT_EQ(host(b.grad())[0], s.size() == 2 ? 3 : 9) << s.str();
  }
}

// A bias gradient over many rows of bf16 must not be summed or rounded in bf16 (256 + 1 = 256).
TEST_P(Elementwise, BroadcastGradientsAreWide) {
  const int64_t rows = 10001;
  const Var x = Var::leaf(Tensor::full({rows, 3}, 1, DType::bf16, device()));
  const Var bias = Var::leaf(Tensor::full({3}, 0.5, DType::bf16, device()));
  const Var y = mul(x, bias);
  backward(y, Tensor::full({rows, 3}, 1, DType::bf16, device()));
  EXPECT_EQ(bias.grad().dtype(), DType::f32);
  EXPECT_EQ(host(bias.grad()), (std::vector<double>{10001, 10001, 10001}));
}

TEST_P(Elementwise, SavesWhatBackwardNeedsOnly) {
  const Tensor big = Tensor::full({1000}, 1, DType::f32, device());
  EXPECT_EQ(saved_bytes(add(Var::leaf(big), 2)), 0);
  EXPECT_EQ(saved_bytes(add(Var::leaf(big), Var::leaf(big))), 0);
  EXPECT_EQ(saved_bytes(mul(Var::leaf(big), Var(big.clone()))), 4000);
  EXPECT_EQ(saved_bytes(silu(Var::leaf(big))), 4000);
  EXPECT_EQ(saved_bytes(sum(reshape(Var::leaf(big), {10, 100}), 0)), 0);
}

TEST_P(Elementwise, IntegersCompareExactly) {
  const int64_t big = (int64_t(1) << 53) + 1;  // not a double
  const Tensor a = Tensor::from(std::vector<int64_t>{big, big}, {2}).to(device());
  const Tensor b = Tensor::from(std::vector<int64_t>{big, big - 1}, {2}).to(device());
  EXPECT_EQ(host(eq(a, b)), (std::vector<double>{1, 0}));
  EXPECT_EQ(host(gt(a, b)), (std::vector<double>{0, 1}));
}

TEST_P(Elementwise, MoreThanEightMergedDimensions) {
  // Eight dimensions that cannot be merged: every other one is broadcast.
  const Shape s = {2, 3, 2, 3, 2, 3, 2, 3}, half = {2, 1, 2, 1, 2, 1, 2, 1};
  const Tensor x = Tensor::full(s, 2, DType::f32, device());
  const Tensor y = Tensor::arange(16, DType::f32).view(half).to(device());
  const auto got = host(sum(mul(x, y), {1, 3, 5, 7}));
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], 2 * 81 * double(i));
}

TEST_P(Elementwise, CastAndDeviceMovesPassGradients) {
  const Var x = Var::leaf(values({1.001, 2, 3}));
  const Var y = cast(cast(x, DType::bf16), DType::f32);
  EXPECT_EQ(host(y)[0], double(float(bf16(1.001f))));
  backward(y, values({1.00390625, 2, 1.001}));  // travels through bf16
  EXPECT_EQ(x.grad().dtype(), DType::f32);
  EXPECT_EQ(host(x.grad()), (std::vector<double>{1, 2, double(float(bf16(1.001f)))}));
  EXPECT_FALSE(cast(x, DType::i64).requires_grad());

  const Var here = Var::leaf(values({1, 2}));
  const Var there = mul(to_device(here, Device::cpu()), 3);
  EXPECT_EQ(there.device(), Device::cpu());
  backward(sum(to_device(there, device())));
  EXPECT_EQ(here.grad().device(), device());
  EXPECT_EQ(host(here.grad()), (std::vector<double>{3, 3}));
}

TEST_P(Elementwise, DevicesDoNotMix) {
  if (!device().is_cuda()) GTEST_SKIP() << "needs a second device";
  const Tensor a = values({1, 2}), b = values({1, 2}).cpu();
  expect_error("add: inputs [2] on cuda:0 and [2] on cpu", [&] { add(a, b); });
  expect_error("eq: inputs", [&] { eq(a, b); });
  expect_error("concat: inputs", [&] { concat({a, b}, 0); });
  expect_error("mul: a [2] is f64 on cuda:0", [&] { mul(a.to(DType::f64), a); });
}

}  // namespace
}  // namespace ebb::testing
