// The walk: what is accumulated where, which gradients are computed, what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "autograd/parameter.h"
#include "tests/tape_ops.h"

namespace ebb::testing {
namespace {

using Values = std::vector<double>;

TEST(Tape, DiamondAddsBothPaths) {
  const Var x = leaf({2, 3});
  const Var a = scale(x, 2), b = mul(x, x);
  backward(sum(mul(a, b)));  // 2x·x² = 2x³
  EXPECT_EQ(grad_of(x), (Values{24, 54}));
}

TEST(Tape, FanOutOfResultsAndLeaves) {
  const Var x = leaf({1, -2});
  const Var h = scale(x, 3);
  Var total = add(h, h);
  for (int i = 0; i < 5; ++i) total = add(total, h);
  backward(sum(add(total, x)));
  EXPECT_EQ(grad_of(x), (Values{22, 22}));  // 7·3 + 1
  const Var y = leaf({3});
  backward(sum(mul(y, y)));  // one operator, the same leaf twice
  EXPECT_EQ(grad_of(y), (Values{6}));
}

TEST(Tape, PassedThroughGradientsAreNotSharedOrChanged) {
  // add hands one tensor to both inputs; identity hands on what it got. Nobody may add into it.
  const Var x = leaf({1}), y = leaf({1});
  const Var hx = identity(x), hy = identity(y);
  const Var s = add(hx, hy);
  const Tensor upstream = Tensor::full({1}, 1, DType::f64);
  const std::vector<Var> roots{add(s, hx), s};
  const std::vector<Tensor> dy{upstream, upstream};
  backward(roots, dy);
  EXPECT_EQ(grad_of(x), (Values{3}));
  EXPECT_EQ(grad_of(y), (Values{2}));
  EXPECT_EQ(upstream.item(), 1);
  EXPECT_FALSE(x.grad().same_storage(y.grad()));
  EXPECT_FALSE(x.grad().same_storage(upstream));
}

TEST(Tape, BackwardsAccumulateUntilZeroed) {
  const Var x = leaf({1, 2});
  for (int pass = 1; pass <= 3; ++pass) {
    backward(sum(mul(x, x)));
    EXPECT_EQ(grad_of(x), (Values{2.0 * pass, 4.0 * pass}));
  }
  x.zero_grad();
  EXPECT_FALSE(x.grad().defined());
  backward(sum(x));
  EXPECT_EQ(grad_of(x), (Values{1, 1}));
}

TEST(Tape, GradientsOnlyWhereNeeded) {
  bool needs[3] = {};
  const Var x = leaf({1}), y = Var(Tensor::full({1}, 2, DType::f64)), absent;
  const Var z = record("probe", {x, y, absent}, {}, {x.value().clone()}, [&](BackwardContext& ctx) {
    for (int i = 0; i < 3; ++i) needs[i] = ctx.needs(i);
    EXPECT_EQ(ctx.inputs(), 3);
    EXPECT_TRUE(contains(error_of([&] { ctx.grad(1, ctx.dy(0)); }),
                         "probe: gradient handed over for input 1"));
    ctx.grad(0, ctx.dy(0));
  })[0];
  backward(z);
  EXPECT_TRUE(needs[0]);
  EXPECT_FALSE(needs[1]);
  EXPECT_FALSE(needs[2]);
  EXPECT_FALSE(y.grad().defined());
}

TEST(Tape, NothingIsRecordedOfConstants) {
  const Var x(Tensor::full({2}, 1, DType::f64));
  const Var y = mul(x, x);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(saved_bytes(y), 0);
  EXPECT_TRUE(contains(error_of([&] { backward(sum(y)); }), "root 0 does not depend on anything"));
}

TEST(Tape, SeveralResultsAndUnusedOnes) {
  const Var x = leaf({5});
  const std::vector<Var> both = pair(x);
  backward(std::vector{both[0], both[1]}, std::vector<Tensor>(2));
  EXPECT_EQ(grad_of(x), (Values{3}));
  x.zero_grad();
  backward(pair(x)[1]);  // the first result's gradient is zero
  EXPECT_EQ(grad_of(x), (Values{2}));
}

TEST(Tape, RootsMayShareNodesRepeatAndBeLeaves) {
  const Var x = leaf({3});
  const Var h = mul(x, x);
  const Var r0 = scale(h, 2), r1 = scale(h, 5);
  backward(std::vector{r0, r1, r1, x}, std::vector<Tensor>(4));
  EXPECT_EQ(grad_of(x), (Values{6 * (2 + 5 + 5) + 1}));
}

TEST(Tape, UpstreamGradients) {
  const Var x = leaf({1, 2, 3});
  backward(mul(x, x), Tensor::from(Values{1, 10, 100}, {3}));
  EXPECT_EQ(grad_of(x), (Values{2, 40, 600}));
  x.zero_grad();
  // Another dtype and an expanded layout are fine.
  backward(mul(x, x), Tensor::full({1}, 2, DType::f32).expand({3}));
  EXPECT_EQ(grad_of(x), (Values{4, 8, 12}));

  EXPECT_TRUE(contains(error_of([&] { backward(mul(x, x)); }),
                       "root 0 has shape [3]; give an upstream gradient"));
  EXPECT_TRUE(contains(error_of([&] { backward(mul(x, x), Tensor::zeros({2}, DType::f64)); }),
                       "upstream gradient [2] for a root of shape [3]"));
  EXPECT_TRUE(contains(error_of([&] { backward(std::vector{x}, std::vector<Tensor>{}); }),
                       "1 roots, 0 upstream gradients"));
}

TEST(Tape, ABadRootChangesNothing) {
  const Var x = leaf({1, 2});
  const std::vector<Var> roots{x, mul(x, x)};
  const std::vector<Tensor> dy{Tensor::full({2}, 1, DType::f64), Tensor::zeros({3}, DType::f64)};
  EXPECT_NE(error_of([&] { backward(roots, dy); }), "");
  EXPECT_FALSE(x.grad().defined());
}

TEST(Tape, ASecondBackwardIsRefusedByName) {
  const Var x = leaf({2});
  const Var h = mul(x, x), y = sum(h);
  backward(y);
  EXPECT_TRUE(contains(error_of([&] { backward(y); }),
                       "backward: the graph through sum was already consumed; pass retain"));
  // New work on top of a consumed part is refused too, before any gradient is touched.
  const Var z = add(scale(h, 2), x);
  EXPECT_TRUE(contains(error_of([&] { backward(z); }), "through mul was already consumed"));
  EXPECT_EQ(grad_of(x), (Values{4}));
}

TEST(Tape, RetainAllowsAnother) {
  const Var x = leaf({2});
  const Var y = sum(mul(x, x));
  backward(y, {}, {.retain = true});
  backward(y, {}, {.retain = true});
  backward(y);
  EXPECT_EQ(grad_of(x), (Values{12}));
  EXPECT_NE(error_of([&] { backward(y); }), "");
}

TEST(Tape, NoGradAndDetach) {
  const Var x = leaf({2});
  EXPECT_TRUE(grad_enabled());
  {
    const NoGrad off;
    EXPECT_FALSE(grad_enabled());
    EXPECT_FALSE(mul(x, x).requires_grad());
    {
      const NoGrad inner;
      EXPECT_FALSE(will_record({x}));
    }
    EXPECT_FALSE(grad_enabled());
  }
  EXPECT_TRUE(will_record({x}));
  const Var h = mul(x, x), stopped = h.detach();
  EXPECT_TRUE(stopped.value().same_storage(h.value()));
  backward(mul(stopped, x));
  EXPECT_EQ(grad_of(x), (Values{4}));
}

TEST(Tape, IntegerResultsCarryNoGradient) {
  const Var x = leaf({1, 2});
  const std::vector<Var> out = record("argmax", {x}, {}, {x.value().clone(), Tensor::arange(1)},
                                      [](BackwardContext& ctx) { ctx.grad(0, ctx.dy(0)); });
  EXPECT_TRUE(out[0].requires_grad());
  EXPECT_FALSE(out[1].requires_grad());
  EXPECT_THROW(Var::leaf(Tensor::arange(3)), Error);
  EXPECT_THROW(Var::leaf(Tensor()), Error);
}

TEST(Tape, WrongGradientsAreRefusedByName) {
  const auto hand_over = [](const std::function<Tensor(const Tensor&)>& f, int times = 1) {
    const Var x = leaf({1, 2});
    const Var y = record("bad", {x}, {}, {x.value().clone()}, [&](BackwardContext& ctx) {
      for (int i = 0; i < times; ++i) ctx.grad(0, f(ctx.dy(0)));
    })[0];
    return error_of([&] { backward(y, Tensor::full({2}, 1, DType::f64)); });
  };
  EXPECT_TRUE(contains(hand_over([](const Tensor& dy) { return dy.slice(0, 0, 1); }),
                       "bad: gradient of input 0 is [1], the input is [2]"));
  EXPECT_TRUE(contains(hand_over([](const Tensor& dy) { return dy.to(DType::f32); }),
                       "bad: gradient of input 0 is f32, the input is f64"));
  EXPECT_TRUE(contains(hand_over([](const Tensor& dy) { return dy; }, 2),
                       "bad: gradient of input 0 handed over twice"));
  EXPECT_EQ(hand_over([](const Tensor&) { return Tensor(); }), "");  // zero
}

TEST(Tape, InPlaceChangeOfASavedTensorNamesTheOp) {
  const Var x = leaf({1, 2}), y = leaf({3, 4});
  const Var z = sum(mul(x, y));
  y.value().slice(0, 1, 2).fill_(9);  // through a view
  EXPECT_TRUE(contains(error_of([&] { backward(z); }),
                       "mul: a tensor of shape [2] saved for backward was changed in place"));
  // Only what backward reads counts: add saves nothing.
  const Var s = sum(add(x, y));
  y.value().fill_(0);
  backward(s);
  EXPECT_EQ(grad_of(x), (Values{1, 1}));
}

TEST(Tape, AccumulatingChangesTheGradientInPlaceAndSaysSo) {
  const Var x = leaf({1, 2}), y = leaf({3, 4});
  backward(sum(mul(x, x)));
  const Var z = sum(mul(y, Var(x.grad())));  // a gradient used as a constant
  backward(sum(mul(x, x)));
  EXPECT_TRUE(contains(error_of([&] { backward(z); }), "mul: a tensor of shape [2] saved"));
}

TEST(Tape, AccumulatorsAreAddedToInPlace) {
  int accumulated = 0;
  const Var x(Tensor::from(Values{1, 2}, {1, 2}));
  const Var w = Var::leaf(Tensor::from(Values{1, 1}, {2, 1}));
  backward(matmul(x, w, &accumulated));
  EXPECT_EQ(accumulated, 0);  // no accumulator yet
  const Tensor first = w.grad();
  const uint64_t version = first.version();
  backward(matmul(x, w, &accumulated));
  EXPECT_EQ(accumulated, 1);
  EXPECT_TRUE(w.grad().same_storage(first));
  EXPECT_GT(first.version(), version);
  EXPECT_EQ(grad_of(w), (Values{2, 4}));
  // Within one graph: the operator that runs first leaves a gradient, the other adds to it.
  w.zero_grad();
  backward(add(matmul(x, w, &accumulated), matmul(x, w, &accumulated)));
  EXPECT_EQ(accumulated, 2);
  EXPECT_EQ(grad_of(w), (Values{2, 4}));
}

TEST(Tape, NoAccumulatorForHooksResultsOrForeignLayouts) {
  int accumulated = 0;
  const Var x(Tensor::from(Values{1, 2}, {1, 2}));
  const auto once = [&](const Var& w) {
    backward(matmul(x, w, &accumulated));
    return accumulated;
  };
  const Var hooked = Var::leaf(Tensor::zeros({2, 2}, DType::f64));
  hooked.register_hook([](const Tensor&) { return Tensor(); });
  const Tensor ones = Tensor::full({1, 2}, 1, DType::f64);
  for (int i = 0; i < 2; ++i) backward(matmul(x, hooked, &accumulated), ones);
  EXPECT_EQ(accumulated, 0);
  EXPECT_EQ(grad_of(hooked), (Values{2, 2, 4, 4}));

  const Var w = Var::leaf(Tensor::from(Values{1, 1}, {2, 1}));
  EXPECT_EQ(once(scale(w, 1)), 0);
  EXPECT_EQ(once(scale(w, 1)), 0);

  // A gradient the user set, transposed: summed correctly and dense from then on.
  const Var square = Var::leaf(Tensor::zeros({2, 2}, DType::f64));
  square.slot()->grad = Tensor::from(Values{1, 2, 3, 4}, {2, 2}).transpose(0, 1);
  backward(matmul(x, square, &accumulated), ones);
  EXPECT_EQ(accumulated, 0);
  EXPECT_EQ(grad_of(square), (Values{2, 4, 4, 6}));
  EXPECT_TRUE(square.grad().is_contiguous());
}

TEST(Tape, Bf16LeavesAccumulateInF32) {
  const Var x = leaf({1}, DType::bf16);
  for (int i = 0; i < 1000; ++i) backward(scale(x, 1));  // in bf16 the sum would stop at 256
  EXPECT_EQ(x.grad().dtype(), DType::f32);
  EXPECT_EQ(grad_of(x), (Values{1000}));
  // The same where a hook waits for the sum over one graph, and for a result of many consumers.
  const Var h = leaf({1}, DType::bf16);
  h.register_hook([](const Tensor& g) {
    EXPECT_EQ(g.dtype(), DType::f32);
    return Tensor();
  });
  const Var y = scale(x, 1);
  std::vector<Var> roots;
  for (int i = 0; i < 1000; ++i) roots.push_back(scale(h, 1));
  for (int i = 0; i < 1024; ++i) roots.push_back(scale(y, 1));
  x.zero_grad();
  backward(roots, std::vector<Tensor>(roots.size()));
  EXPECT_EQ(grad_of(h), (Values{1000}));
  EXPECT_EQ(grad_of(x), (Values{1024}));
}

TEST(Tape, F32GradientsOfBf16ValuesStayUnrounded) {
  const Var x = leaf({1}, DType::bf16);
  const float exact = 1.0009765625f;  // not a bf16
  const Var y = record("wide", {x}, {}, {x.value().clone()}, [&](BackwardContext& ctx) {
    ctx.grad(0, Tensor::full({1}, exact, DType::f32));
  })[0];
  backward(y);
  EXPECT_EQ(grad_of(x), (Values{exact}));
  // Through a bf16 result the operator before it sees bf16, rounded once.
  const Var z = leaf({1}, DType::bf16);
  DType seen = DType::f64;
  const Var h = record("probe", {z}, {}, {z.value().clone()}, [&](BackwardContext& ctx) {
    seen = ctx.dy(0).dtype();
    ctx.grad(0, ctx.dy(0));
  })[0];
  backward(record("wide", {h}, {}, {h.value().clone()}, [&](BackwardContext& ctx) {
    ctx.grad(0, Tensor::full({1}, exact, DType::f32));
  })[0]);
  EXPECT_EQ(seen, DType::bf16);
  EXPECT_EQ(z.grad().dtype(), DType::f32);
}

TEST(Tape, ExceptionsLeaveTheTapeUsable) {
  const Var x = leaf({2});
  bool fail_now = true;
  const auto fragile = [&](const Var& v) {
    return record("fragile", {v}, {}, {v.value().clone()}, [&](BackwardContext& ctx) {
      check(!fail_now, "fragile: out of luck");
      ctx.grad(0, ctx.dy(0));
    })[0];
  };
  const Var y = sum(fragile(mul(x, x)));
  const std::string outside = current_op();
  EXPECT_EQ(error_of([&] { backward(y); }), "fragile: out of luck");
  EXPECT_TRUE(grad_enabled());
  EXPECT_EQ(std::string(current_op()), outside);
  EXPECT_NE(error_of([&] { backward(y); }), "");  // sum is gone already
  fail_now = false;
  backward(sum(fragile(mul(x, x))));
  EXPECT_EQ(grad_of(x), (Values{4}));
}

TEST(Tape, AFailingOpRecordsNothing) {
  const Var x = leaf({1, 2});
  const Var h = mul(x, x);
  const long users = h.slot().use_count();
  EXPECT_NE(error_of([&] { mul(h, leaf({1, 2, 3})); }), "");
  {
    const AnomalyMode on;
    EXPECT_NE(error_of([&] { scale(h, INFINITY); }), "");
  }
  EXPECT_EQ(h.slot().use_count(), users);
  backward(sum(h));
  EXPECT_EQ(grad_of(x), (Values{2, 4}));
}

TEST(Tape, AnomalyModeNamesTheFirstOpForward) {
  const Var x = leaf({0, 1});
  const auto log_of = [](const Var& v) {
    return record("log", {v}, {v.value()},
                  {map(v.value(), [](double a, int64_t) { return std::log(a); })},
                  [](BackwardContext& ctx) { ctx.grad(0, ctx.dy(0)); })[0];
  };
  const auto run = [&] { return sum(scale(log_of(x), 2)); };
  EXPECT_EQ(error_of([&] { run(); }), "");
  const AnomalyMode on;
  EXPECT_TRUE(contains(error_of([&] { run(); }),
                       "anomaly: log forward produced a non-finite value in output 0"));
  const NoGrad off;  // also where nothing is recorded
  EXPECT_TRUE(contains(error_of([&] { run(); }), "anomaly: log forward"));
}

TEST(Tape, AnomalyModeNamesTheFirstOpBackward) {
  const Var x = leaf({1, 2});
  const auto graph = [&] {
    const Var bad = record("sqrt", {identity(x)}, {}, {x.value().clone()}, [](BackwardContext& c) {
      c.grad(0, Tensor::from(Values{1, NAN}, {2}));
    })[0];
    return sum(scale(bad, 3));
  };
  backward(graph());
  EXPECT_TRUE(std::isnan(grad_of(x)[1]));
  {
    const AnomalyMode on;
    EXPECT_TRUE(contains(error_of([&] { backward(graph()); }),
                         "anomaly: sqrt backward produced a non-finite value in the gradient of "
                         "input 0 of shape [2]"));
    EXPECT_TRUE(
        contains(error_of([&] { backward(scale(x, 1), Tensor::full({2}, NAN, DType::f64)); }),
                 "anomaly: backward"));
    // What an operator adds to an accumulator by itself is looked at as well.
    const Var w = leaf({1, 2});
    w.slot()->grad = Tensor::zeros({2}, DType::f64);
    const Var y = record("gemm", {w}, {}, {w.value().clone()}, [](BackwardContext& ctx) {
      ctx.accumulator(0).data<double>()[1] += NAN;
      ctx.grad_accumulated(0);
    })[0];
    EXPECT_TRUE(contains(error_of([&] { backward(sum(y)); }), "anomaly: gemm backward"));
  }
  EXPECT_EQ(error_of([&] { backward(graph()); }), "");
}

TEST(Tape, ThreadsBuildSeparateGraphs) {
  std::vector<Values> grads(4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t, &grads] {
      const Var x = leaf({double(t + 1)});
      for (int round = 0; round < 50; ++round) {
        if (t == 3) {  // a mode of one thread is not another's
          const NoGrad off;
          EXPECT_FALSE(mul(x, x).requires_grad());
        }
        Var y = x;
        for (int i = 0; i < 20; ++i) y = scale(y, i % 2 ? 0.5 : 2);
        backward(sum(mul(y, x)));
      }
      grads[size_t(t)] = grad_of(x);
    });
  for (std::thread& t : threads) t.join();
  for (int t = 0; t < 4; ++t) EXPECT_EQ(grads[size_t(t)], (Values{50 * 2.0 * (t + 1)}));
}

TEST(Parameter, GradientsGoToTheMasterThroughTheShadow) {
  const Parameter p(Tensor::from(std::vector<float>{1.001f, -2}, {2, 1}));
  EXPECT_FALSE(p.shadow().defined());
  p.enable_shadow();
  EXPECT_EQ(p.var().dtype(), DType::bf16);
  const Var x(Tensor::full({1, 2}, 3, DType::bf16));
  for (int i = 0; i < 2; ++i) backward(matmul(x, p.var()));
  EXPECT_EQ(p.grad().dtype(), DType::f32);
  EXPECT_EQ(p.grad().to_vector<double>(), (Values{6, 6}));
  EXPECT_EQ(p.master().dtype(), DType::f32);
  p.master().fill_(0.3);
  p.refresh_shadow();
  EXPECT_EQ(p.shadow().to_vector<float>()[0], float(bf16(0.3f)));
  EXPECT_THROW(Parameter(Tensor::zeros({2}, DType::bf16)), Error);
}

TEST(Parameter, ReplacingTheMasterKeepsHooks) {
  const Parameter p(Tensor::zeros({2}));
  int calls = 0;
  p.slot()->after_accumulate.push_back([&](Slot&) { ++calls; });
  backward(sum(p.var()));
  p.set_master(Tensor::full({2}, 1, DType::f64));
  EXPECT_FALSE(p.grad().defined());
  backward(sum(p.var()));
  EXPECT_EQ(p.grad().dtype(), DType::f64);
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace ebb::testing
