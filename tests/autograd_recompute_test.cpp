// recompute(): the same numbers, the same gradients, less memory, and clear refusals.
#include <gtest/gtest.h>

#include "autograd/parameter.h"
#include "tests/tape_ops.h"

namespace ebb::testing {
namespace {

using Values = std::vector<double>;
using Vars = std::vector<Var>;

TEST(Recompute, SameValuesAndGradientsBitwise) {
  for (const DType t : {DType::f64, DType::f32, DType::bf16}) {
    Values grads[2][3], values[2];
    for (const bool checkpoint : {false, true}) {
      const Var x = leaf({0.3, -1.7, 2.9}, t), y = leaf({1.1, 0.2, -0.4}, t);
      const Parameter w(Tensor::from(Values{0.7, -0.9, 1.3}, {3}).to(accumulate_type(t)));
      if (t == DType::bf16) w.enable_shadow();
      const auto block = [w](std::span<const Var> in) {
        const Var h = mul(in[0], add(in[1], w.var()));
        return Vars{mul(h, h), mul(w.var(), in[0])};
      };
      const Vars in{scale(x, 1.5), y};
      const Vars out = checkpoint ? recompute(block, in) : block(in);
      values[checkpoint] = out[0].value().to_vector<double>();
      backward(add(sum(out[0]), sum(out[1])));
      grads[checkpoint][0] = grad_of(x);
      grads[checkpoint][1] = grad_of(y);
      grads[checkpoint][2] = w.grad().to_vector<double>();
    }
    EXPECT_EQ(values[0], values[1]) << name(t);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(grads[0][i], grads[1][i]) << name(t) << " input " << i;
  }
}

TEST(Recompute, SameRandomNumbersInTheSecondRun) {
  Values grads[2], after[2];
  for (const bool checkpoint : {false, true}) {
    random_state() = {.seed = 42, .next_purpose = 0};
    const Var x = leaf(Values(64, 1));
    const auto block = [](std::span<const Var> in) {
      return Vars{dropout(mul(dropout(in[0]), in[0]))};
    };
    const Var first = dropout(x);
    const Var h = (checkpoint ? recompute(block, {first}) : block(Vars{first}))[0];
    const Var y = dropout(h);  // drawn between the two runs
    backward(sum(y));
    grads[checkpoint] = grad_of(x);
    after[checkpoint] = dropout(x).value().to_vector<double>();  // backward drew nothing
  }
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_EQ(after[0], after[1]);
  EXPECT_GT(std::count(grads[0].begin(), grads[0].end(), 0.0), 0);
  EXPECT_LT(std::count(grads[0].begin(), grads[0].end(), 0.0), 64);
}

TEST(Recompute, KeepsOnlyItsInputs) {
  const Var x = leaf(Values(100, 1));
  const auto block = [](std::span<const Var> in) {
    Var h = in[0];
    for (int i = 0; i < 10; ++i) h = mul(h, h);
    return Vars{h};
  };
  const Var plain = sum(block(Vars{x})[0]), kept = sum(recompute(block, {x})[0]);
  EXPECT_EQ(saved_bytes(plain), 10 * 800);
  EXPECT_EQ(saved_bytes(kept), 800);
  EXPECT_EQ(saved_bytes(kept, std::vector{x.value()}), 0);
}

TEST(Recompute, Nested) {
  Values grads[3];
  for (int depth = 0; depth < 3; ++depth) {
    random_state() = {.seed = 7, .next_purpose = 0};
    const Var x = leaf({0.5, 0.25, 2, 1});
    const Parameter w(Tensor::from(Values{3, 5, 7, 9}, {4}));
    int completed = 0;
    w.slot()->after_accumulate.push_back([&](Slot&) { ++completed; });
    const auto inner = [w](std::span<const Var> in) { return Vars{dropout(mul(in[0], w.var()))}; };
    const auto outer = [&, w](std::span<const Var> in) {
      const Var h = mul(in[0], w.var());
      const Var a = (depth == 2 ? recompute(inner, {h}) : inner(Vars{h}))[0];
      return Vars{add(dropout(a), in[0])};
    };
    const Var h = scale(x, 2);
    backward(sum((depth ? recompute(outer, {h}) : outer(Vars{h}))[0]));
    grads[depth] = grad_of(x);
    const Values gw = w.grad().to_vector<double>();
    grads[depth].insert(grads[depth].end(), gw.begin(), gw.end());
    EXPECT_EQ(completed, 1) << depth;
  }
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_EQ(grads[0], grads[2]);
}

TEST(Recompute, OnlyCapturedParametersWantGradients) {
  const Parameter w(Tensor::full({2}, 3, DType::f64));
  const Var x(Tensor::full({2}, 2, DType::f64));
  const Var y = recompute([w](auto in) { return Vars{mul(in[0], w.var())}; }, {x})[0];
  EXPECT_TRUE(y.requires_grad());
  backward(sum(y));
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{2, 2}));
  // Nothing wants one: nothing is recorded.
  EXPECT_FALSE(recompute([](auto in) { return Vars{mul(in[0], in[0])}; }, {x})[0].requires_grad());
}

TEST(Recompute, CapturedLeavesCompleteWithTheOuterGraph) {
  // w is used inside twice and outside before and after; its callback must wait for all of it, and
  // its hook must see one complete gradient.
  for (const bool hooked : {false, true}) {
    const Var w = leaf({2});
    std::vector<double> complete, seen;
    w.slot()->after_accumulate.push_back([&](Slot& s) { complete.push_back(s.grad.item()); });
    if (hooked)
      w.register_hook([&](const Tensor& g) {
        seen.push_back(g.item());
        return Tensor();
      });
    const Var before = scale(w, 10);
    const auto block = [w](std::span<const Var> in) {
      return Vars{add(mul(in[0], w), scale(w, 100))};
    };
    const Var h = recompute(block, {before})[0];  // 10w·w + 100w
    const Var again = recompute(block, {h})[0];   // h·w + 100w
    backward(add(again, scale(w, 1000)));
    // d(10w³ + 100w² + 100w + 1000w)/dw at 2
    EXPECT_EQ(complete, (Values{120 + 400 + 100 + 1000})) << hooked;
    EXPECT_EQ(seen, hooked ? Values{1620} : Values{});
    EXPECT_EQ(grad_of(w), (Values{1620}));
  }
}

TEST(Recompute, AddsIntoAccumulatorsOfCapturedLeaves) {
  const Var w = Var::leaf(Tensor::full({1, 1}, 1, DType::f64));
  const Var x = Var::leaf(Tensor::full({1, 1}, 3, DType::f64));
  int accumulated = 0;
  const auto block = [w, &accumulated](std::span<const Var> in) {
    return Vars{matmul(in[0], w, &accumulated)};
  };
  for (int i = 0; i < 3; ++i) backward(recompute(block, {x})[0]);
  EXPECT_EQ(accumulated, 2);
  EXPECT_EQ(grad_of(w), (Values{9}));
}

TEST(Recompute, ResultsMayBeInputsLeavesOrIntegers) {
  const Var x = leaf({3}), w = leaf({5});
  const Vars out = recompute(
      [w](auto in) {
        return Vars{in[0], w, Tensor::arange(2), mul(in[0], in[0]), Var()};
      },
      {x});
  ASSERT_EQ(out.size(), 5u);
  EXPECT_EQ(out[2].value().to_vector<int64_t>(), (std::vector<int64_t>{0, 1}));
  EXPECT_FALSE(out[2].requires_grad());
  EXPECT_FALSE(out[4].defined());
  backward(std::vector{out[0], out[1], out[3]}, std::vector<Tensor>(3));
  EXPECT_EQ(grad_of(x), (Values{7}));
  EXPECT_EQ(grad_of(w), (Values{1}));
}

TEST(Recompute, OptionalRepeatedAndUnwantedInputs) {
  const Var x = leaf({3}), constant(Tensor::full({1}, 4, DType::f64));
  const auto block = [](std::span<const Var> in) {
    EXPECT_FALSE(in[1].defined());
    return Vars{mul(mul(in[0], in[2]), in[3])};
  };
  backward(recompute(block, {x, Var(), x, constant})[0]);
  EXPECT_EQ(grad_of(x), (Values{24}));
}

TEST(Recompute, UnderNoGradSimplyRuns) {
  const Var x = leaf({3});
  int runs = 0;
  const auto block = [&](std::span<const Var> in) {
    ++runs;
    return Vars{mul(in[0], in[0])};
  };
  const NoGrad off;
  EXPECT_FALSE(recompute(block, {x})[0].requires_grad());
  EXPECT_EQ(runs, 1);
}

TEST(Recompute, ACapturedResultIsRefusedAtOnce) {
  const Var x = leaf({3});
  const Var h = scale(x, 2);
  const auto block = [h](std::span<const Var> in) { return Vars{mul(in[0], h)}; };
  EXPECT_TRUE(contains(error_of([&] { recompute(block, {x}); }),
                       "recompute: mul uses a recorded Var of shape [1] captured from outside"));
  EXPECT_TRUE(contains(error_of([&] { recompute([h](auto) { return Vars{h}; }, {x}); }),
                       "recompute: a result uses a recorded Var"));
  const auto outer = [&](std::span<const Var> in) { return recompute(block, {in[0]}); };
  EXPECT_NE(error_of([&] { recompute(outer, {x}); }), "");
  // Its value alone is fine.
  const auto detached = [h](std::span<const Var> in) {
    const NoGrad off;
    const Var twice = add(h, h);
    return Vars{in[0], twice};
  };
  EXPECT_EQ(error_of([&] { backward(recompute(detached, {x})[0]); }), "");
  EXPECT_EQ(grad_of(x), (Values{1}));
  EXPECT_TRUE(grad_enabled());
}

TEST(Recompute, ASecondRunThatDiffersIsRefused) {
  const Var x = leaf({3}), w = leaf({5});
  int runs = 0;
  const auto unstable = [&, w](std::span<const Var> in) {
    return Vars{mul(in[0], ++runs == 1 ? in[0] : w)};
  };
  const Var y = recompute(unstable, {x})[0];
  EXPECT_TRUE(
      contains(error_of([&] { backward(y); }),
               "recompute: the second run uses a leaf of shape [1] that the first did not"));
  const Var h = scale(x, 2);
  runs = 0;
  const auto late = [&, h](std::span<const Var> in) {
    return Vars{mul(in[0], ++runs == 1 ? in[0] : h)};
  };
  const Var z = recompute(late, {x})[0];
  EXPECT_TRUE(contains(error_of([&] { backward(z); }), "captured from outside"));
}

TEST(Recompute, InPlaceChangesAreNoticed) {
  const Var x = leaf({3}), w = leaf({5});
  const auto block = [w](std::span<const Var> in) { return Vars{mul(in[0], w)}; };
  const Var y = recompute(block, {x})[0];
  x.value().fill_(1);
  EXPECT_TRUE(contains(error_of([&] { backward(y); }), "recompute: a tensor of shape [1]"));
  const Var z = recompute(block, {x})[0];
  w.value().fill_(1);  // an optimizer step between forward and backward
  EXPECT_TRUE(contains(error_of([&] { backward(z); }), "recompute: a tensor of shape [1]"));
}

TEST(Recompute, AnExceptionRestoresModesAndRandomState) {
  const Var x = leaf({3});
  int runs = 0, fail_at = 1;
  const auto block = [&](std::span<const Var> in) {
    const Var h = dropout(in[0]);
    check(++runs != fail_at, "block: out of luck");
    return Vars{h};
  };
  EXPECT_EQ(error_of([&] { recompute(block, {x}); }), "block: out of luck");
  EXPECT_TRUE(grad_enabled());
  fail_at = 3;
  const Var y = recompute(block, {x})[0];
  const uint64_t next = random_state().next_purpose;
  EXPECT_EQ(error_of([&] { backward(y); }), "block: out of luck");
  EXPECT_TRUE(grad_enabled());
  EXPECT_EQ(random_state().next_purpose, next);
}

TEST(Recompute, RetainRunsItAgain) {
  const Var x = leaf({3});
  int runs = 0;
  const Var y = recompute(
      [&](auto in) {
        ++runs;
        return Vars{mul(in[0], in[0])};
      },
      {x})[0];
  backward(y, {}, {.retain = true});
  backward(y);
  EXPECT_EQ(runs, 3);
  EXPECT_EQ(grad_of(x), (Values{12}));
}

}  // namespace
}  // namespace ebb::testing
