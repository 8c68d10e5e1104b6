// AdamW as training uses it: groups, clipping, skipped steps, many tensors.
#include <cmath>
#include <map>

#include "tensor/check.h"
#include "tests/optimizer_inputs.h"
#include "tests/reference/optimizer.h"
#include "tests/tape_ops.h"

namespace ebb::testing {
namespace {

using Values = std::vector<double>;

TEST(AdamW, OneStepByHand) {
  const NamedParameter p = named("p", Tensor::from(Values{1, -2}, {2}));
  AdamW optimizer(one_group({p}, 0.01), {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999});
  p.parameter.set_grad(Tensor::from(Values{0.5, -4}, {2}));
  optimizer.step();
  // The first step moves by lr against the sign: m̂/√v̂ = ±1 up to eps.
  const Values got = p.parameter.master().to_vector<double>();
  EXPECT_NEAR(got[0], 1 * (1 - 0.001) - 0.1 * 0.5 / (0.5 + 1e-8), 1e-15);
  EXPECT_NEAR(got[1], -2 * (1 - 0.001) + 0.1 * 4 / (4 + 1e-8), 1e-15);
  const AdamWScalars s = optimizer.read();
  EXPECT_EQ(s.step, 1);
  EXPECT_EQ(s.grad_scale, 1);
  EXPECT_NEAR(s.grad_norm, std::sqrt(0.25 + 16), 1e-15);
}

TEST(AdamW, TenStepsMatchAPlainLoop) {
  for (const DType t : {DType::f64, DType::f32}) {
    const Shape shapes[] = {{7, 5}, {1}, {300, 41}, {64}};
    std::vector<NamedParameter> all;
    std::vector<Values> p, m, v;
    for (const Shape& s : shapes) {
      all.push_back(named(fmt::format("p{}", all.size()), draw(s, all.size(), t),
                          s.size() > 1 ? WeightDecay::on : WeightDecay::off));
      p.push_back(all.back().parameter.master().to_vector<double>());
      m.emplace_back(p.back().size());
      v.emplace_back(p.back().size());
    }
    AdamW optimizer(decay_groups(all, 0.1), {.lr = 1, .clip = 1.5});
    for (int step = 1; step <= 10; ++step) {
      const double lr = 1e-2 / step, scale = step == 4 ? 1e-3 : 1;  // step 4 is not clipped
      std::vector<Tensor> grads;
      for (size_t i = 0; i < all.size(); ++i) {
        grads.push_back(draw(all[i].shape, 100 * uint64_t(step) + i, t, scale * 0.02));
        all[i].parameter.set_grad(grads.back().clone());
      }
      optimizer.set_lr(lr);
      optimizer.step();
      const double norm = std::sqrt(reference::sum_of_squares(grads));
      const double clip = reference::clip_scale(norm, 1.5);
      EXPECT_EQ(clip < 1, step != 4);
      EXPECT_NEAR(optimizer.read().grad_norm, norm, 1e-12 * norm);
      EXPECT_NEAR(optimizer.read().grad_scale, clip, 1e-12);
      for (size_t i = 0; i < all.size(); ++i)
        reference::adamw(p[i], grads[i].to_vector<double>(), m[i], v[i], step,
                         {.lr = lr, .weight_decay = all[i].shape.size() > 1 ? 0.1 : 0}, clip);
    }
    const StateDict dict = optimizer.state_dict();
    const std::map<std::string, Tensor> state(dict.begin(), dict.end());
    for (size_t i = 0; i < all.size(); ++i) {
      const double limit = t == DType::f64 ? 1e-14 : 5e-7;
      const Shape& s = all[i].shape;
      EXPECT_LE(relative_error(all[i].parameter.master(), Tensor::from(p[i], s)), limit) << i;
      EXPECT_LE(relative_error(state.at(all[i].name + ".exp_avg"), Tensor::from(m[i], s)), limit)
          << i;
      EXPECT_LE(relative_error(state.at(all[i].name + ".exp_avg_sq"), Tensor::from(v[i], s)), limit)
          << i;
    }
  }
}

TEST(AdamW, OnlyMarkedTensorsDecay) {
  const std::vector<NamedParameter> all{named("q_proj.weight", draw({6, 4}, 1)),
                                        named("conv.weight", draw({6, 1, 4}, 2)),
                                        named("A_log", draw({6}, 3), WeightDecay::off),
                                        named("dt_bias", draw({6}, 4), WeightDecay::off),
                                        named("D", draw({6}, 5), WeightDecay::off),
                                        named("norm.weight", draw({4}, 6), WeightDecay::off),
                                        named("x_r", draw({1, 1, 4}, 7), WeightDecay::off)};
  for (const bool decay_all : {false, true}) {
    std::vector<Tensor> before;
    for (const NamedParameter& p : all) {
      before.push_back(p.parameter.master().clone());
      p.parameter.set_grad(Tensor::zeros(p.shape));
    }
    AdamW optimizer(decay_groups(all, 0.1, decay_all), {.lr = 1});
    optimizer.step();
    for (size_t i = 0; i < all.size(); ++i) {
      const Tensor& now = all[i].parameter.master();
      if (all[i].decay == WeightDecay::off && !decay_all) {
        EXPECT_TRUE(bitwise_equal(now, before[i])) << all[i].name;
        continue;
      }
      const std::vector<float> b = before[i].to_vector<float>(), a = now.to_vector<float>();
      for (size_t e = 0; e < a.size(); ++e) EXPECT_FLOAT_EQ(a[e], 0.9f * b[e]) << all[i].name;
    }
  }
}

TEST(AdamW, GatesMoveInF32) {
  // The bf16 spacing at 2.7707 is 0.0156: a step of 1e-3 would be lost there.
  const NamedParameter a_log = named("A_log", Tensor::full({1}, 2.7707), WeightDecay::off);
  AdamW optimizer(decay_groups({a_log}, 0.1), {.lr = 1e-3});
  a_log.parameter.set_grad(Tensor::full({1}, 1));
  optimizer.step();
  EXPECT_EQ(a_log.parameter.master().dtype(), DType::f32);
  EXPECT_NEAR(a_log.parameter.master().item(), 2.7697, 3e-7);
  for (const auto& [name, t] : optimizer.state_dict())
    EXPECT_EQ(t.dtype(), name.starts_with("A_log") ? DType::f32 : DType::i64) << name;
}

TEST(AdamW, LearningRateScaleOfAGroup) {
  const NamedParameter a = named("a", Tensor::zeros({3})), b = named("b", Tensor::zeros({3}));
  AdamW optimizer({{.parameters = {a}}, {.parameters = {b}, .lr_scale = 2}}, {.lr = 0.25});
  for (const NamedParameter& p : {a, b}) p.parameter.set_grad(Tensor::full({3}, -1));
  optimizer.step();
  EXPECT_NEAR(a.parameter.master().to_vector<double>()[0], 0.25, 1e-7);
  EXPECT_NEAR(b.parameter.master().to_vector<double>()[0], 0.5, 1e-7);
}

// A group for each pair of decay and rate that occurs, and none that is empty.
TEST(AdamW, GroupsByDecayAndRate) {
  NamedParameter w = named("w", draw({2, 2}, 1)),
                 norm = named("norm", draw({2}, 2), WeightDecay::off),
                 bias = named("bias", draw({2}, 3), WeightDecay::off);
  bias.lr_factor = 2;
  struct Want {
    double decay, scale;
    std::vector<std::string> names;
  };
  const auto expect = [&](const std::vector<ParamGroup>& got, const std::vector<Want>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].weight_decay, want[i].decay);
      EXPECT_EQ(got[i].lr_scale, want[i].scale);
      std::vector<std::string> names;
      for (const NamedParameter& p : got[i].parameters) names.push_back(p.name);
      EXPECT_EQ(names, want[i].names);
    }
  };
  const std::vector<NamedParameter> all{norm, w, bias};
  expect(decay_groups(all, 0.1), {{0, 1, {"norm", "bias"}}, {0.1, 1, {"w"}}});
  expect(decay_groups(all, 0.1, true), {{0.1, 1, {"norm", "w", "bias"}}});
  expect(decay_groups(all, 0.1, false, LearningRates::by_model),
         {{0, 1, {"norm"}}, {0.1, 1, {"w"}}, {0, 2, {"bias"}}});
  expect(decay_groups(all, 0.1, true, LearningRates::by_model),
         {{0.1, 1, {"norm", "w"}}, {0.1, 2, {"bias"}}});
  expect(decay_groups({}, 0.1), {});
}

TEST(AdamW, TensorsWithoutGradientAreLeftAlone) {
  const NamedParameter a = named("a", draw({3, 3}, 1)), b = named("b", draw({3, 3}, 2));
  AdamW optimizer(one_group({a, b}, 0.1), {.lr = 0.1});
  const Tensor before = b.parameter.master().clone();
  a.parameter.set_grad(Tensor::full({3, 3}, 1));
  optimizer.step();
  EXPECT_TRUE(bitwise_equal(b.parameter.master(), before));
  EXPECT_EQ(optimizer.read().grad_norm, 3);
  b.parameter.set_grad(Tensor::full({3, 3}, 1));  // joins later
  optimizer.step();
  EXPECT_FALSE(bitwise_equal(b.parameter.master(), before));
  EXPECT_NEAR(optimizer.read().grad_norm, std::sqrt(18.0), 1e-12);
}

TEST(AdamW, ANonFiniteGradientSkipsTheStepBitwise) {
  std::vector<NamedParameter> all{named("a", draw({40, 30}, 1)), named("b", draw({1}, 2)),
                                  named("c", draw({9000}, 3))};
  all[0].parameter.enable_shadow();
  AdamW optimizer(one_group(all, 0.1), {.lr = 0.1, .clip = 1});
  const auto set_gradients = [&] {
    for (const NamedParameter& p : all) p.parameter.set_grad(draw(p.shape, 9));
  };
  set_gradients();
  optimizer.step();
  const float bad[] = {NAN, INFINITY, -INFINITY};
  const std::pair<int, int64_t> places[] = {{0, 0}, {1, 0}, {2, 8999}};
  int skipped = 0;
  for (const float value : bad)
    for (const auto& [tensor, element] : places) {
      set_gradients();
      all[size_t(tensor)].parameter.grad().data<float>()[element] = value;
      const std::vector<Tensor> before = copies(all, optimizer);
      optimizer.step();
      expect_same(copies(all, optimizer), before);
      const AdamWScalars s = optimizer.read();
      EXPECT_EQ(s.skip, 1);
      EXPECT_EQ(s.skipped, ++skipped);
      EXPECT_EQ(s.step, 1);
      EXPECT_FALSE(std::isfinite(s.grad_norm));
    }
  // As if nothing had happened: the next good step is step 2.
  set_gradients();
  optimizer.step();
  EXPECT_EQ(optimizer.read().step, 2);
  EXPECT_EQ(optimizer.read().skip, 0);
  EXPECT_EQ(optimizer.read().skipped, skipped);
}

TEST(AdamW, HugeFiniteGradients) {
  // Clipped they are harmless; unclipped their squares would leave f32 and freeze the moments.
  for (const double clip : {1.0, 0.0}) {
    const NamedParameter p = named("p", draw({8}, 1));
    AdamW optimizer(one_group({p}), {.lr = 0.1, .clip = clip});
    p.parameter.set_grad(Tensor::full({8}, 1e30));
    optimizer.step();
    EXPECT_NEAR(optimizer.read().grad_norm / (1e30 * std::sqrt(8.0)), 1, 1e-6);
    EXPECT_EQ(optimizer.read().skipped, clip > 0 ? 0 : 1);
    EXPECT_TRUE(all_finite(p.parameter.master()));
    for (const auto& [name, t] : optimizer.state_dict()) EXPECT_TRUE(all_finite(t)) << name;
  }
}

TEST(AdamW, ShadowIsTheMasterRoundedToNearestEven) {
  Tensor values = draw({3, 10000}, 1);
  // Ties between neighbours: to the even one. And values no f32-to-bf16 shortcut gets right.
  const float special[] = {1.00390625f, 1.01171875f, -1.00390625f, 0.f, -0.f, 1e-40f, 3.4e38f};
  std::copy(std::begin(special), std::end(special), values.data<float>());
  const NamedParameter p = named("p", values);
  p.parameter.enable_shadow();
  AdamW optimizer(one_group({p}), {.lr = 0});
  p.parameter.set_grad(draw(values.shape(), 2, DType::f32, 1e-3));
  p.parameter.shadow().fill_(77);
  optimizer.step();
  EXPECT_TRUE(bitwise_equal(p.parameter.shadow(), p.parameter.master().to(DType::bf16)));
  const std::vector<float> s = p.parameter.shadow().to_vector<float>();
  EXPECT_EQ(s[0], 1.f);
  EXPECT_EQ(s[1], 1.015625f);
  EXPECT_EQ(s[2], -1.f);
  optimizer.set_lr(0.1);
  optimizer.step();
  EXPECT_TRUE(bitwise_equal(p.parameter.shadow(), p.parameter.master().to(DType::bf16)));
}

TEST(AdamW, StaleGraphsAreNoticed) {
  const NamedParameter p = named("p", draw({2}, 1));
  AdamW optimizer(one_group({p}));
  const Var old = sum(mul(p.parameter.var(), p.parameter.var()));
  backward(sum(p.parameter.var()));
  optimizer.step();
  EXPECT_TRUE(contains(error_of([&] { backward(old); }), "mul: a tensor of shape [2] saved"));
}

TEST(AdamW, ZeroGradKeepsAddressesAndAbsentOnes) {
  const NamedParameter a = named("a", draw({5}, 1)), b = named("b", draw({5}, 2));
  AdamW optimizer(one_group({a, b}));
  backward(sum(a.parameter.var()));
  const Tensor g = a.parameter.grad();
  optimizer.zero_grad();
  EXPECT_TRUE(a.parameter.grad().same_storage(g));
  EXPECT_EQ(g.to_vector<double>(), Values(5, 0));
  EXPECT_FALSE(b.parameter.grad().defined());
  backward(sum(a.parameter.var()));
  EXPECT_TRUE(a.parameter.grad().same_storage(g));
  EXPECT_EQ(g.to_vector<double>(), Values(5, 1));
}

// A loss of its own shape for micro-batches: Σ over tokens of (x·w)²/2.
Var token_losses(const Tensor& x, const NamedParameter& w) {
  const Var y = matmul(Var(x), w.parameter.var());
  return scale(sum(mul(y, y)), 0.5);
}

TEST(AdamW, AccumulationIsOneBigBatch) {
  // Micro-batches of 1 and of 99 tokens: sums, divided once by the number of all tokens.
  const Tensor x = draw({100, 4}, 1, DType::f64), start = draw({4, 3}, 2, DType::f64);
  Tensor results[2];
  double norms[2];
  for (const bool split : {false, true}) {
    const NamedParameter w = named("w", start.clone());
    AdamW optimizer(one_group({w}, 0.1), {.lr = 0.1, .clip = 1});
    optimizer.grad_divisor().copy_(Tensor::full({}, 100, DType::i64));
    optimizer.zero_grad();
    if (split) {
      backward(token_losses(x.slice(0, 0, 1), w));
      backward(token_losses(x.slice(0, 1, 100), w));
    } else {
      backward(token_losses(x, w));
    }
    optimizer.step();
    results[split] = w.parameter.master();
    norms[split] = optimizer.read().grad_norm;
  }
  EXPECT_LE(relative_error(results[1], results[0]), 1e-13);
  EXPECT_NEAR(norms[1], norms[0], 1e-13 * norms[0]);
  EXPECT_GT(norms[0], 1);  // so that clipping is part of it
}

TEST(AdamW, NoValidTokenSkipsTheStep) {
  const NamedParameter p = named("p", draw({4}, 1));
  const Tensor before = p.parameter.master().clone();
  AdamW optimizer(one_group({p}, 0.1), {.lr = 0.1, .clip = 1});
  optimizer.grad_divisor().copy_(Tensor::zeros({}, DType::f64));
  p.parameter.set_grad(Tensor::zeros({4}));
  optimizer.step();
  EXPECT_EQ(optimizer.read().skipped, 1);
  EXPECT_TRUE(bitwise_equal(p.parameter.master(), before));
}

TEST(AdamW, EvaluationInBetweenChangesNothing) {
  const Tensor x = draw({10, 4}, 1), start = draw({4, 3}, 2);
  Tensor results[2];
  for (const bool evaluate : {false, true}) {
    const NamedParameter w = named("w", start.clone());
    AdamW optimizer(one_group({w}, 0.1), {.lr = 0.1, .clip = 1});
    const auto look = [&] {
      if (!evaluate) return;
      const NoGrad off;
      token_losses(x, w);
      if (w.parameter.grad().defined()) optimizer.gradient_squares();  // logging the norm
    };
    for (int step = 0; step < 3; ++step) {
      look();
      optimizer.zero_grad();
      look();
      for (int micro = 0; micro < 2; ++micro) {
        backward(token_losses(x.slice(0, 5 * micro, 5 * micro + 5), w));
        look();
      }
      optimizer.step();
    }
    results[evaluate] = w.parameter.master();
  }
  EXPECT_TRUE(bitwise_equal(results[0], results[1]));
}

TEST(AdamW, RefusesWhatCannotWork) {
  const NamedParameter p = named("p", draw({4}, 1));
  EXPECT_TRUE(contains(error_of([&] { AdamW({}); }), "AdamW: no parameters"));
  EXPECT_TRUE(contains(error_of([&] { AdamW(one_group({p}), {.beta2 = 1}); }), "AdamW: betas"));
  EXPECT_TRUE(contains(error_of([&] { AdamW(one_group({p}), {.eps = 0}); }), "AdamW: eps"));
  EXPECT_TRUE(contains(error_of([&] { AdamW(one_group({p}), {.clip = -1}); }), "AdamW: clip"));
  AdamW optimizer(one_group({p}));
  p.parameter.set_master(p.parameter.master().to(DType::f64));
  EXPECT_TRUE(contains(error_of([&] { optimizer.step(); }),
                       "AdamW: p is f64 [4] on cpu, its moments are f32"));
}

}  // namespace
}  // namespace ebb::testing
