// The gradient check itself: it must pass what is right and catch, by name, what is wrong.
#include <gtest/gtest.h>

#include "autograd/gradcheck.h"
#include "tests/tape_ops.h"

namespace ebb::testing {
namespace {

using Vars = std::vector<Var>;

Tensor draw(const Shape& shape, uint64_t purpose, double mean = 0) {
  Tensor t = Tensor::empty(shape, DType::f64);
  fill_normal(t, {5, purpose}, mean);
  return t;
}

// x·w with a backward that may be wrong.
enum class Fault { none, scaled, transposed, missing_term, one_element, no_record };
Var product_with(Fault fault, const Var& x, const Var& w) {
  const Tensor y = gemm(x.value(), w.value());
  if (fault == Fault::no_record) return y;
  return record("product", {x, w}, {x.value(), w.value()}, {y}, [fault](BackwardContext& ctx) {
    const Tensor &x = ctx.saved(0), &w = ctx.saved(1), dy = ctx.dy(0);
    if (ctx.needs(0)) ctx.grad(0, gemm(dy, w.transpose(0, 1)));
    if (!ctx.needs(1)) return;
    Tensor dw = gemm(x.transpose(0, 1), dy);
    if (fault == Fault::scaled) dw = map(dw, [](double v, int64_t) { return v * 1.00001; });
    if (fault == Fault::transposed) dw = dw.transpose(0, 1).contiguous();
    if (fault == Fault::missing_term)  // the last row of x is forgotten
      dw = gemm(x.slice(0, 0, x.size(0) - 1).transpose(0, 1), dy.slice(0, 0, x.size(0) - 1));
    if (fault == Fault::one_element)
      dw = map(dw, [](double v, int64_t i) { return i == 5 ? -v : v; });
    ctx.grad(1, dw);
  })[0];
}
GradcheckResult check_product(Fault fault, bool jacobian = false) {
  return gradcheck([&](auto in) { return Vars{product_with(fault, in[0], in[1])}; },
                   std::vector{draw({4, 3}, 1), draw({3, 3}, 2)}, {.full_jacobian = jacobian});
}

TEST(Gradcheck, PassesARightGradient) {
  const GradcheckResult r = check_product(Fault::none, true);
  EXPECT_TRUE(r.ok) << r.message;
  EXPECT_LT(r.worst, 1e-9);
  EXPECT_GT(r.worst, 0);
  EXPECT_EQ(r.worst_input, -1);
}

TEST(Gradcheck, CatchesWrongOnes) {
  for (const Fault f : {Fault::scaled, Fault::transposed, Fault::missing_term, Fault::one_element})
    for (const bool jacobian : {false, true}) {
      const GradcheckResult r = check_product(f, jacobian);
      EXPECT_FALSE(r.ok) << int(f);
      EXPECT_GT(r.worst, 1e-6);
      EXPECT_EQ(r.worst_input, 1);
      EXPECT_TRUE(contains(r.message, "input 1")) << int(f);
      EXPECT_TRUE(contains(r.message, "analytic")) << int(f);
    }
  const GradcheckResult r = check_product(Fault::one_element);
  EXPECT_EQ(r.worst_element, 5);
  EXPECT_TRUE(contains(r.message, "furthest off at input 1[1,2]"));
  // A gradient that was never recorded counts as zero, which is wrong here.
  EXPECT_TRUE(contains(check_product(Fault::no_record).message, "input 0"));
}

TEST(Gradcheck, JacobianNamesOutputAndInputElement) {
  const auto cube = [](std::span<const Var> in) {
    return Vars{record("cube", {in[0]}, {in[0].value()},
                       {map(in[0].value(), [](double v, int64_t) { return v * v * v; })},
                       [](BackwardContext& ctx) {
                         const Tensor g = map(ctx.saved(0), [](double v, int64_t i) {
                           return i == 2 ? 0 : 3 * v * v;
                         });
                         ctx.grad(0, product(ctx.dy(0), g));
                       })[0]};
  };
  const std::vector in{Tensor::from(std::vector<double>{1, 2, 0.01, -1}, {2, 2})};
  const GradcheckResult r = gradcheck(cube, in, {.directions = 0, .full_jacobian = true});
  EXPECT_TRUE(contains(r.message, "d output 0[1,0] / d input 0[1,0]: analytic 0, numeric 0.0003"));
  EXPECT_EQ(r.worst_element, 2);
}

TEST(Gradcheck, EveryOutputAndEveryInputIsLookedAt) {
  for (int wrong = 0; wrong < 2; ++wrong) {
    const auto outputs = [wrong](std::span<const Var> in) {
      return Vars{scale(in[0], 2, wrong == 0 ? 0.5 : 1), scale(in[1], 3, wrong == 1 ? 0.5 : 1)};
    };
    const GradcheckResult r = gradcheck(outputs, std::vector{draw({3}, 1), draw({2}, 2)});
    EXPECT_FALSE(r.ok);
    EXPECT_EQ(r.worst_input, wrong);
  }
}

TEST(Gradcheck, RefusesOtherPrecisionsAndDevices) {
  const auto fn = [](std::span<const Var> in) { return Vars{scale(in[0], 2)}; };
  EXPECT_TRUE(contains(error_of([&] { gradcheck(fn, std::vector{Tensor::zeros({2})}); }),
                       "gradcheck: input 0 is f32, want f64"));
  const auto narrow = [](std::span<const Var> in) {
    return Vars{record("narrow", {in[0]}, {}, {in[0].value().to(DType::f32)},
                       [](BackwardContext& ctx) { ctx.grad(0, ctx.dy(0).to(DType::f64)); })[0]};
  };
  EXPECT_TRUE(contains(error_of([&] { gradcheck(narrow, std::vector{draw({2}, 1)}); }),
                       "gradcheck: output 0 is f32, want f64"));
}

TEST(Gradcheck, OptionalAndIntegerInputs) {
  const auto fn = [](std::span<const Var> in) {
    EXPECT_FALSE(in[1].defined());
    EXPECT_EQ(in[2].dtype(), DType::i64);
    const int64_t n = in[2].value().to_vector<int64_t>()[0];
    return Vars{scale(in[0], double(n)), Var(), Tensor::arange(n)};
  };
  const GradcheckResult r =
      gradcheck(fn, std::vector{draw({3}, 1), Tensor(), Tensor::full({1}, 4, DType::i64)},
                {.full_jacobian = true});
  EXPECT_TRUE(r.ok) << r.message;
}

TEST(Gradcheck, NothingToCheckIsNotOk) {
  const auto integers = [](std::span<const Var>) { return Vars{Tensor::arange(3)}; };
  EXPECT_TRUE(contains(gradcheck(integers, std::vector{draw({3}, 1)}).message, "no float output"));
  const auto constant = [](std::span<const Var> in) { return Vars{in[0].value().to(DType::f64)}; };
  const GradcheckResult r = gradcheck(constant, std::vector{Tensor::arange(3)});
  EXPECT_FALSE(r.ok);
  EXPECT_TRUE(contains(r.message, "no float input"));
}

TEST(Gradcheck, NanIsNotOk) {
  const auto fn = [](std::span<const Var> in) {
    return Vars{map(in[0].value(), [](double v, int64_t) { return v / 0.0 - v / 0.0; })};
  };
  const GradcheckResult r = gradcheck(fn, std::vector{draw({3}, 1)});
  EXPECT_FALSE(r.ok);
  EXPECT_TRUE(std::isinf(r.worst));
}

TEST(Gradcheck, KinksAreTheCallersBusiness) {
  const auto relu = [](std::span<const Var> in) {
    const auto f = [](double v, int64_t) { return v > 0 ? v : 0; };
    return Vars{
        record("relu", {in[0]}, {in[0].value()}, {map(in[0].value(), f)}, [](BackwardContext& ctx) {
          ctx.grad(0,
                   map(ctx.dy(0), ctx.saved(0), [](double g, double v) { return v > 0 ? g : 0; }));
        })[0]};
  };
  const auto at = [&](double v) {
    return gradcheck(relu, std::vector{Tensor::from(std::vector<double>{v, 1}, {2})},
                     {.full_jacobian = true})
        .ok;
  };
  EXPECT_TRUE(at(0.01));
  EXPECT_TRUE(at(-0.01));
  EXPECT_FALSE(at(0));
}

TEST(Gradcheck, EmptyAndStridedInputs) {
  const auto fn = [](std::span<const Var> in) { return Vars{mul(in[0], in[0]), scale(in[1], 2)}; };
  const Tensor strided = draw({3, 4}, 1).transpose(0, 1).slice(0, 0, 4, 2);
  const GradcheckResult r = gradcheck(fn, std::vector{strided, Tensor::zeros({0, 3}, DType::f64)},
                                      {.full_jacobian = true});
  EXPECT_TRUE(r.ok) << r.message;
}

}  // namespace
}  // namespace ebb::testing
