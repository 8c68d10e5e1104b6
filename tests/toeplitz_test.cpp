// Toeplitz position encoding against the plain recurrence, values and every gradient.
#include "models/toeplitz.h"

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/random.h"
#include "tests/reference/toeplitz.h"

namespace ebb {
namespace {

using testing::reference::Toeplitz;

Tensor random(const Shape& shape, uint64_t purpose) {
  Tensor t = Tensor::empty(shape, DType::f64);
  fill_normal(t, {17, purpose}, 0, 1);
  return t;
}

constexpr int64_t kHeads = 2, kWidth = 4, kModel = kHeads * kWidth;

Toeplitz random_weights() {
  return {random({kHeads, kWidth}, 1), random({kHeads, kWidth}, 2), random({kHeads}, 3),
          random({kModel}, 4), random({kModel, kModel}, 5)};
}
std::vector<std::pair<std::string, Tensor*>> fields(Toeplitz& w) {
  return {{"q", &w.q},
          {"k", &w.k},
          {"decay", &w.theta},
          {"norm.weight", &w.norm},
          {"o_proj.weight", &w.out}};
}

std::unique_ptr<ToeplitzEncoding> encoding(Toeplitz weights) {
  ModelConfig c;
  c.hidden_size = kModel, c.num_heads = kHeads, c.norm_eps = weights.eps;
  auto e = std::make_unique<ToeplitzEncoding>(c);
  for (const NamedParameter& p : e->named_parameters())
    for (const auto& [name, value] : fields(weights))
      if (p.name == name) p.parameter.set_master(value->clone());
  return e;
}

TEST(Toeplitz, IsTheRecurrence) {
  const NoGrad off;
  const Toeplitz w = random_weights();
  const auto e = encoding(w);
  const Tensor x = random({2, 70, kModel}, 6), row = x.slice(0, 0, 1);
  EXPECT_LE(relative_error(e->forward(x, {}, nullptr, nullptr).value(),
                           testing::reference::toeplitz(w, x, {0, 70, 140})),
            1e-12);
  EXPECT_LE(relative_error(
                e->forward(row, SeqLayout::packed({0, 1, 1, 66, 70}), nullptr, nullptr).value(),
                testing::reference::toeplitz(w, row, {0, 1, 1, 66, 70})),
            1e-12);
  EXPECT_EQ(e->forward(x.slice(1, 0, 0), {}, nullptr, nullptr).shape(), (Shape{2, 0, kModel}));
}

// Handed over after any token, by prefill or by steps.
TEST(Toeplitz, StateGoesOn) {
  const NoGrad off;
  const Toeplitz w = random_weights();
  const auto e = encoding(w);
  const Tensor x = random({2, 9, kModel}, 7), want = testing::reference::toeplitz(w, x, {0, 9, 18});
  for (const int64_t split : {0, 1, 5}) {
    MixerState state = e->zero_state(2, DType::f64, Device::cpu()), after;
    const Tensor first = e->forward(x.slice(1, 0, split), {}, &state, &after).value();
    if (split > 0) {
      EXPECT_LE(relative_error(first, want.slice(1, 0, split)), 1e-12);
    }
    for (int64_t t = split; t < 9; ++t)
      EXPECT_LE(relative_error(e->step(x.select(1, t), after).value(), want.select(1, t)), 1e-12)
          << split << " " << t;
  }
}

// Central differences of the plain recurrence, every element of the input and of every weight.
TEST(Toeplitz, GradientsAreThoseOfTheRecurrence) {
  Toeplitz w = random_weights();
  const auto e = encoding(w);
  const std::vector<int64_t> cu = {0, 3, 11};
  Tensor x = random({1, 11, kModel}, 8);
  const Tensor v = random(x.shape(), 9);
  const auto value = [&] {
    const Tensor y = testing::reference::toeplitz(w, x, cu);
    double s = 0;
    for (int64_t i = 0; i < y.numel(); ++i) s += y.data<double>()[i] * v.data<double>()[i];
    return s;
  };
  const auto slopes = [&](Tensor& t) {
    const Tensor out = Tensor::empty(t.shape(), DType::f64);
    const double h = 1e-3;
    for (int64_t i = 0; i < t.numel(); ++i) {
      double& at = t.data<double>()[i];
      const double before = at;
      const auto moved = [&](double by) {
        at = before + by;
        return value();
      };
      out.data<double>()[i] =
          (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h);
      at = before;
    }
    return out;
  };
  const Var input = Var::leaf(x.clone());
  backward(sum(mul(e->forward(input, SeqLayout::packed(cu), nullptr, nullptr), Var(v))));
  EXPECT_LE(relative_error(input.grad(), slopes(x)), 1e-8) << "x";
  auto parameters = e->named_parameters();
  ASSERT_EQ(parameters.size(), 5u);
  for (const auto& [name, t] : fields(w))
    for (const NamedParameter& p : parameters)
      if (p.name == name) {
        EXPECT_LE(relative_error(p.grad(), slopes(*t)), 1e-8) << name;
      }
}

}  // namespace
}  // namespace ebb
