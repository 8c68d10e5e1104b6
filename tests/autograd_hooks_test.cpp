// Gradient hooks and after_accumulate callbacks: what they see, how often, and when.
#include <gtest/gtest.h>

#include "tests/tape_ops.h"

namespace ebb::testing {
namespace {

using Values = std::vector<double>;

void on_complete(const Var& leaf, std::function<void(Slot&)> fn) {
  leaf.slot()->after_accumulate.push_back(std::move(fn));
}
// An operator that passes its gradient on and appends `name` to the log when its backward runs.
Var logged(const Var& x, std::vector<std::string>* log, const std::string& name) {
  return record("logged", {x}, {}, {x.value().clone()}, [log, name](BackwardContext& ctx) {
    log->push_back(name);
    ctx.grad(0, ctx.dy(0));
  })[0];
}

TEST(Hooks, LeafHookSeesTheCompleteGradientOfOnePass) {
  const Var x = leaf({1, 2});
  std::vector<Values> seen;
  x.register_hook([&](const Tensor& g) {
    seen.push_back(g.to_vector<double>());
    return Tensor();
  });
  for (int pass = 0; pass < 2; ++pass) backward(sum(add(mul(x, x), scale(x, 10))));
  EXPECT_EQ(seen, (std::vector<Values>{{12, 14}, {12, 14}}));
  EXPECT_EQ(grad_of(x), (Values{24, 28}));
}

TEST(Hooks, ResultHookSeesTheCompleteGradientOnce) {
  const Var x = leaf({3});
  const Var h = scale(x, 2);
  std::vector<double> seen;
  h.register_hook([&](const Tensor& g) {
    seen.push_back(g.item());
    return Tensor();
  });
  backward(add(add(mul(h, h), h), scale(h, 5)));
  EXPECT_EQ(seen, (Values{12 + 1 + 5}));
  EXPECT_EQ(grad_of(x), (Values{36}));
}

TEST(Hooks, ReplacedGradientsTravelOn) {
  const Var x = leaf({3}), y = leaf({3});
  const Var h = scale(x, 2);
  h.register_hook([](const Tensor&) { return Tensor::full({1}, 100, DType::f64); });
  y.register_hook([](const Tensor& g) { return map(g, [](double v, int64_t) { return -v; }); });
  backward(add(h, y));
  EXPECT_EQ(grad_of(x), (Values{200}));
  EXPECT_EQ(grad_of(y), (Values{-1}));
}

TEST(Hooks, RunInOrderEachOnThePreviousResult) {
  const Var x = leaf({1});
  std::vector<double> seen;
  for (int i = 0; i < 3; ++i)
    x.register_hook([&](const Tensor& g) {
      seen.push_back(g.item());
      return map(g, [](double v, int64_t) { return 2 * v + 1; });
    });
  backward(scale(x, 1));
  EXPECT_EQ(seen, (Values{1, 3, 7}));
  EXPECT_EQ(grad_of(x), (Values{15}));
}

TEST(Hooks, ReplacementsAreConvertedOrRefused) {
  const Var x = leaf({1, 2}, DType::bf16);
  const Var h = scale(x, 1);
  h.register_hook([](const Tensor&) { return Tensor::full({2}, 3, DType::f64); });
  backward(sum(h));
  EXPECT_EQ(grad_of(x), (Values{3, 3}));
  const Var bad = scale(x, 1);
  bad.register_hook([](const Tensor&) { return Tensor::zeros({3}); });
  EXPECT_TRUE(
      contains(error_of([&] { backward(sum(bad)); }), "gradient hook: returned [3], want [2]"));
  EXPECT_THROW(Var(Tensor::zeros({1})).register_hook({}), Error);
  EXPECT_THROW(Var(Tensor::zeros({1})).retain_grad(), Error);
}

TEST(Hooks, AStoredGradientIsNotChangedLater) {
  const Var x = leaf({1}), y = leaf({1});
  const Var h = identity(x);
  Tensor kept_h, kept_y;
  h.register_hook([&](const Tensor& g) { return kept_h = g, Tensor(); });
  y.register_hook([&](const Tensor& g) { return kept_y = g, Tensor(); });
  for (int i = 0; i < 3; ++i) backward(add(h, y), {}, {.retain = true});
  EXPECT_EQ(kept_h.item(), 1);
  EXPECT_EQ(kept_y.item(), 1);
  EXPECT_EQ(grad_of(x), (Values{3}));
  EXPECT_EQ(grad_of(y), (Values{3}));
}

TEST(Hooks, RetainedGradientsOfResults) {
  const Var x = leaf({2});
  const Var h = scale(x, 3), unasked = scale(h, 1);
  h.retain_grad();
  h.register_hook([](const Tensor& g) { return map(g, [](double v, int64_t) { return 10 * v; }); });
  const Var y = mul(unasked, h);
  backward(y, {}, {.retain = true});
  EXPECT_EQ(grad_of(h), (Values{120}));  // after hooks
  EXPECT_FALSE(unasked.grad().defined());
  backward(y);
  EXPECT_EQ(grad_of(h), (Values{240}));  // accumulates
  h.zero_grad();
  EXPECT_FALSE(h.grad().defined());
}

TEST(AfterAccumulate, OncePerBackwardWithTheSumComplete) {
  const Var x = leaf({2});
  std::vector<double> seen;
  on_complete(x, [&](Slot& s) { seen.push_back(s.grad.item()); });
  const auto graph = [&] {
    Var total = mul(x, x);
    for (int i = 0; i < 4; ++i) total = add(total, scale(x, 1));
    return total;
  };
  backward(graph());
  EXPECT_EQ(seen, (Values{8}));
  backward(graph());
  EXPECT_EQ(seen, (Values{8, 16}));
  backward(x);  // a leaf as root
  EXPECT_EQ(seen, (Values{8, 16, 17}));
}

TEST(AfterAccumulate, AsEarlyAsTheLastConsumerAllows) {
  // Layers a, b, c with one weight each and one weight shared by a and c.
  std::vector<std::string> log;
  const Var wa = leaf({1}), wb = leaf({1}), wc = leaf({1}), shared = leaf({1});
  const std::pair<const Var*, const char*> leaves[] = {
      {&wa, "wa"}, {&wb, "wb"}, {&wc, "wc"}, {&shared, "shared"}};
  for (const auto& [v, name] : leaves)
    on_complete(*v, [&log, n = std::string(name)](Slot&) { log.push_back(n); });
  Var h(Tensor::full({1}, 2, DType::f64));
  h = logged(mul(mul(h, wa), shared), &log, "a");
  h = logged(mul(h, wb), &log, "b");
  h = logged(mul(mul(h, wc), shared), &log, "c");
  backward(h);
  EXPECT_EQ(log, (std::vector<std::string>{"c", "wc", "b", "wb", "a", "shared", "wa"}));
}

TEST(AfterAccumulate, AfterTheHooksOfTheLeaf) {
  std::vector<std::string> log;
  const Var x = leaf({1}), y = leaf({1});
  x.register_hook([&](const Tensor& g) {
    log.push_back("hook");
    return map(g, [](double, int64_t) { return 7.0; });
  });
  on_complete(x, [&](Slot& s) { log.push_back(s.grad.item() == 7 ? "complete" : "early"); });
  const Var first = logged(y, &log, "earlier");
  backward(add(first, logged(x, &log, "later")));
  EXPECT_EQ(log, (std::vector<std::string>{"later", "hook", "complete", "earlier"}));
}

TEST(AfterAccumulate, BranchesWithoutGradientDoNotDelayOrReport) {
  // `dead` lies behind an operator that sends nothing back; `half` is used there and elsewhere.
  const Var dead = leaf({1}), half = leaf({1}), x = leaf({1});
  std::vector<std::string> log;
  on_complete(dead, [&](Slot&) { log.push_back("dead"); });
  on_complete(half, [&](Slot& s) { log.push_back(s.grad.item() == 3 ? "half" : "wrong"); });
  const Var early = logged(x, &log, "x");
  const Var behind = mul(dead, half);
  const Var stop =
      record("stop", {behind}, {}, {behind.value().clone()}, [](BackwardContext&) {})[0];
  backward(add(add(early, stop), scale(half, 3)));
  EXPECT_EQ(log, (std::vector<std::string>{"half", "x"}));
  EXPECT_FALSE(dead.grad().defined());
}

TEST(AfterAccumulate, CallbacksMayAddCallbacks) {
  const Var x = leaf({1});
  int first = 0, second = 0;
  on_complete(x, [&](Slot& s) {
    if (++first == 1) s.after_accumulate.push_back([&](Slot&) { ++second; });
  });
  backward(scale(x, 1));
  EXPECT_EQ(second, 0);
  backward(scale(x, 1));
  EXPECT_EQ(first, 2);
  EXPECT_EQ(second, 1);
}

TEST(AfterAccumulate, CountsAccumulatorsToo) {
  const Var x(Tensor::full({1, 1}, 2, DType::f64));
  const Var w = Var::leaf(Tensor::full({1, 1}, 1, DType::f64));
  std::vector<double> seen;
  on_complete(w, [&](Slot& s) { seen.push_back(s.grad.item()); });
  int accumulated = 0;
  for (int i = 0; i < 2; ++i) backward(add(matmul(x, w, &accumulated), matmul(x, w, &accumulated)));
  EXPECT_EQ(accumulated, 3);
  EXPECT_EQ(seen, (Values{4, 8}));
}

}  // namespace
}  // namespace ebb::testing
