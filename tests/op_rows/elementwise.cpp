// Rows of the elementwise operators.
#include "ops/elementwise.h"

#include <cmath>

#include "tests/op_table.h"
#include "tests/reference/elementwise.h"

namespace ebb::testing {
namespace {

using Vars = std::span<const Var>;
using Values = std::span<const double>;

// Moves values that lie within `margin` of a kink away from it: central differences straddle it.
Tensor away_from(const Tensor& t, double kink, double margin = 0.05) {
  for (int64_t i = 0; i < t.numel(); ++i) {
    double& v = t.data<double>()[i];
    if (std::abs(v - kink) < margin) v = kink + (v < kink ? -2 : 2) * margin;
  }
  return t;
}

OpCase make(const std::string& name, std::vector<OpInput> inputs, std::function<Var(Vars)> run,
            std::function<double(Values)> formula) {
  OpCase c;
  c.name = name;
  c.inputs = std::move(inputs);
  int64_t n = 0;
  for (const OpInput& in : c.inputs) n += in.value.numel();
  c.jacobian = n <= 24;
  c.run = [run](Vars in) { return std::vector{run(in)}; };
  c.reference = [formula](std::span<const Tensor> in) {
    return std::vector{reference::apply(in, formula)};
  };
  return c;
}

struct Unary {
  const char* name;
  Var (*run)(const Var&);
  double (*formula)(double);
  double low, high;   // range of x
  bool kink = false;  // at 0
};

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

const Unary kUnary[] = {
    {"neg", neg, [](double x) { return -x; }, -3, 3},
    {"abs", abs, [](double x) { return std::fabs(x); }, -3, 3, true},
    {"exp", exp, [](double x) { return std::exp(x); }, -4, 3},
    {"log", log, [](double x) { return std::log(x); }, 0.2, 9},
    {"sqrt", sqrt, [](double x) { return std::sqrt(x); }, 0.2, 9},
    {"rsqrt", rsqrt, [](double x) { return 1 / std::sqrt(x); }, 0.2, 9},
    {"square", square, [](double x) { return x * x; }, -3, 3},
    {"relu", relu, [](double x) { return std::fmax(x, 0.); }, -3, 3, true},
    {"relu2", relu2, [](double x) { return std::fmax(x, 0.) * std::fmax(x, 0.); }, -3, 3},
    {"sigmoid", sigmoid, logistic, -9, 9},
    {"silu", silu, [](double x) { return x * logistic(x); }, -9, 9},
    {"tanh", tanh, [](double x) { return std::tanh(x); }, -4, 4},
    {"softplus", softplus, [](double x) { return std::log1p(std::exp(x)); }, -9, 9},
    {"softplus_linear", softplus, [](double x) { return x; }, 21, 99},
    {"softplus_low", softplus, [](double x) { return std::exp(x); }, -80, -40},
    {"pow_2_5", [](const Var& x) { return pow(x, 2.5); }, [](double x) { return std::pow(x, 2.5); },
     0.2, 4},
    {"pow_3", [](const Var& x) { return pow(x, 3); }, [](double x) { return x * x * x; }, -3, 3},
    {"pow_m1", [](const Var& x) { return pow(x, -1); }, [](double x) { return 1 / x; }, 0.4, 4},
    {"add_s", [](const Var& x) { return add(x, 2.5); }, [](double x) { return x + 2.5; }, -3, 3},
    {"sub_s", [](const Var& x) { return x - 0.75; }, [](double x) { return x - 0.75; }, -3, 3},
    {"mul_s", [](const Var& x) { return -1.5 * x; }, [](double x) { return -1.5 * x; }, -3, 3},
    {"div_s", [](const Var& x) { return x / 3; }, [](double x) { return x / 3; }, -3, 3},
    {"s_sub", [](const Var& x) { return 1 - x; }, [](double x) { return 1 - x; }, -3, 3},
    {"s_div", [](const Var& x) { return 2 / x; }, [](double x) { return 2 / x; }, 0.4, 4},
};

void add_unary(Draw& draw, OpRow& row) {
  for (const Unary& u : kUnary) {
    std::vector<Shape> shapes = {{3, 7}, {5, 3, 33}};
    if (u.run == &silu) shapes.insert(shapes.end(), {{}, {2, 0, 3}, {2050}});
    for (const Shape& s : shapes) {
      Tensor x = draw.uniform(s, u.low, u.high);
      if (u.kink) x = away_from(x, 0);
      row.cases.push_back(make(
          std::string(u.name) + "_n" + std::to_string(s.numel()), {{"x", x}},
          [u](Vars in) { return u.run(in[0]); }, [u](Values v) { return u.formula(v[0]); }));
    }
  }
  row.cases.push_back(make(
      "clamp", {{"x", away_from(away_from(draw.normal({4, 65}), -1), 0.5)}},
      [](Vars in) { return clamp(in[0], -1, 0.5); },
      [](Values v) { return std::fmin(std::fmax(v[0], -1), 0.5); }));
}

struct Binary {
  const char* name;
  Var (*run)(const Var&, const Var&);
  double (*formula)(double, double);
  bool kinked = false;    // where a = b
  bool thorough = false;  // all ways of broadcasting
};
const Binary kBinary[] = {
    {"add", add, [](double a, double b) { return a + b; }},
    {"sub", sub, [](double a, double b) { return a - b; }},
    {"mul", mul, [](double a, double b) { return a * b; }, false, true},
    {"div", div, [](double a, double b) { return a / b; }},
    {"maximum", maximum, [](double a, double b) { return std::fmax(a, b); }, true},
    {"minimum", minimum, [](double a, double b) { return std::fmin(a, b); }, true},
};
struct Broadcast {
  const char* name;
  Shape a, b;
  bool always = false;  // for every function, not only thorough ones
};
const Broadcast kBroadcast[] = {
    {"same", {2, 3, 5}, {2, 3, 5}, true},
    {"inner", {4, 3}, {3}, true},
    {"outer", {4, 3}, {4, 1}},
    {"both", {2, 1, 3}, {5, 1}},
    {"scalar_right", {2, 3}, {}},
    {"scalar_left", {}, {7}},
    {"scalars", {}, {}},
    {"empty", {0, 3}, {1, 3}},
    {"empty_sum", {3, 1}, {3, 0}, true},
    {"ones", {1, 1, 1}, {2, 3}},
    {"rows8", {70, 264}, {264}},
    {"rows33", {131, 33}, {33}},
    {"columns8", {70, 264}, {70, 1}},
    {"middle", {3, 1, 40}, {3, 29, 40}},
    {"heads", {2, 9, 4, 16}, {4, 1}},
    {"leading", {2, 3}, {1, 1, 2, 3}},
    {"all_dims", {2, 1, 3, 1}, {1, 4, 1, 5}, true},
};

// Values on a grid of 1/4, shifted: those of one shift are at least 1/8 from those of the other.
Tensor on_grid(const Tensor& t, double shift) {
  for (int64_t i = 0; i < t.numel(); ++i) {
    double& v = t.data<double>()[i];
    v = std::round(v * 4) / 4 + shift;
  }
  return t;
}

void add_binary(Draw& draw, OpRow& row) {
  for (const Binary& f : kBinary)
    for (const Broadcast& shapes : kBroadcast) {
      if (!f.thorough && !shapes.always) continue;
      const Tensor a = f.kinked ? on_grid(draw.normal(shapes.a), 0) : draw.normal(shapes.a);
      const Tensor b =
          f.kinked ? on_grid(draw.normal(shapes.b), 0.125) : draw.uniform(shapes.b, 0.5, 2);
      OpCase c = make(
          std::string(f.name) + "_" + shapes.name, {{"a", a}, {"b", b}},
          [f](Vars in) { return f.run(in[0], in[1]); },
          [f](Values v) { return f.formula(v[0], v[1]); });
      row.cases.push_back(c);
      if (!f.thorough || !shapes.always) continue;
      c.name += "_f32_right";  // f32 beside bf16
      c.inputs[1].parameter = true;
      row.cases.push_back(c);
      c.name = std::string(f.name) + "_" + shapes.name + "_f32_left";
      std::swap(c.inputs[0].parameter, c.inputs[1].parameter);
      row.cases.push_back(c);
    }
}

void add_masked(Draw& draw, OpRow& row) {
  const auto mask = [&](const Shape& s) { return draw.integers(s, 0, 2).to(DType::u8); };
  struct Case {
    const char* name;
    Shape mask, a, b;
  };
  for (const Case& s :
       {Case{"same", {3, 17}, {3, 17}, {3, 17}}, Case{"mask_rows", {5, 1}, {5, 8}, {8}},
        Case{"mask_inner", {64}, {6, 64}, {6, 1}}, Case{"mask_wider", {4, 3}, {3}, {}},
        Case{"empty", {0}, {0}, {1}}})
    row.cases.push_back(make(
        std::string("where_") + s.name,
        {{"mask", mask(s.mask)}, {"a", draw.normal(s.a)}, {"b", draw.normal(s.b)}},
        [](Vars in) { return where(in[0].value(), in[1], in[2]); },
        [](Values v) { return v[0] != 0 ? v[1] : v[2]; }));
  for (const Case& s : {Case{"same", {3, 17}, {3, 17}, {}},
                        Case{"causal", {8, 8}, {2, 3, 8, 8}, {}}, Case{"wider", {4, 3}, {3}, {}}})
    row.cases.push_back(make(
        std::string("masked_fill_") + s.name, {{"x", draw.normal(s.a)}, {"mask", mask(s.mask)}},
        [](Vars in) { return masked_fill(in[0], in[1].value(), -2.5); },
        [](Values v) { return v[1] != 0 ? -2.5 : v[0]; }));
}

constexpr bool (*kComparison[])(double, double) = {
    [](double a, double b) { return a == b; }, [](double a, double b) { return a != b; },
    [](double a, double b) { return a < b; },  [](double a, double b) { return a <= b; },
    [](double a, double b) { return a > b; },  [](double a, double b) { return a >= b; },
};

// All six at once.
OpCase comparisons(const std::string& name, std::vector<OpInput> inputs, double number) {
  OpCase c;
  c.name = "compare_" + name;
  const bool two = inputs.size() == 2;
  c.inputs = std::move(inputs);
  c.gradients = false;
  c.run = [two, s = number](Vars in) {
    const Var &x = in[0], &y = in[two];
    return two ? std::vector<Var>{eq(x, y), ne(x, y), lt(x, y), le(x, y), gt(x, y), ge(x, y)}
               : std::vector<Var>{eq(x, s), ne(x, s), lt(x, s), le(x, s), gt(x, s), ge(x, s)};
  };
  c.reference = [two, number](std::span<const Tensor> in) {
    std::vector<Tensor> out;
    for (const auto f : kComparison)
      out.push_back(
          reference::apply(in, [&](Values v) { return double(f(v[0], two ? v[1] : number)); }));
    return out;
  };
  return c;
}

void add_comparisons(Draw& draw, OpRow& row) {
  const auto integers = [&](const Shape& s) { return draw.integers(s, -2, 3); };
  const auto floats = [&](const Shape& s) { return integers(s).to(DType::f64); };
  row.cases.push_back(comparisons("floats", {{"a", floats({5, 33})}, {"b", floats({33})}}, 0));
  row.cases.push_back(
      comparisons("integers", {{"a", integers({5, 1})}, {"b", integers({8}).to(DType::i32)}}, 0));
  row.cases.push_back(comparisons("number", {{"a", floats({4, 9})}}, 1));
  row.cases.push_back(comparisons("integer_number", {{"a", integers({19})}}, -1));
}

std::vector<OpError> errors() {
  const auto f = [](const Shape& s) { return Tensor::zeros(s); };
  const Tensor ids = Tensor::zeros({3}, DType::i64), mask = Tensor::zeros({3}, DType::u8);
  return {
      {"shapes",
       [=] {
         add(f({2, 3}), f({4}));
       },
       "^add: shapes \\[2,3\\] and \\[4\\] do not"},
      {"shapes_mul", [=] { mul(f({2}), f({3})); }, "^mul: shapes \\[2\\] and \\[3\\] do not"},
      {"integers", [=] { mul(ids, f({3})); }, "^mul: a \\[3\\] is i64, want a float type"},
      {"integers_right", [=] { div(f({3}), ids); }, "^div: b \\[3\\] is i64"},
      {"unary_integers", [=] { silu(ids); }, "^silu: x \\[3\\] is i64, want a float type"},
      {"undefined", [] { sigmoid(Var()); }, "^sigmoid: x is undefined"},
      {"undefined_right", [=] { maximum(f({3}), Var()); }, "^maximum: b is undefined"},
      {"clamp", [=] { clamp(f({3}), 2, 1); }, "^clamp: the range \\[2, 1\\] is empty"},
      {"mask_dtype", [=] { where(f({3}), f({3}), f({3})); },
       "^where: mask \\[3\\] is f32, want u8"},
      {"mask_shape", [=] { masked_fill(f({2}), mask, 0); },
       "^masked_fill: shapes \\[2\\] and \\[3\\]"},
      {"mask_undefined", [=] { masked_fill(f({2}), {}, 0); }, "^masked_fill: mask is undefined"},
      {"compare_mixed", [=] { lt(f({3}), ids); }, "^lt: a is f32, b is i64; want two floats"},
      {"compare_fraction", [=] { eq(ids, 0.5); }, "^eq: x is i64, compared with 0.5"},
      {"compare_shapes", [=] { ge(f({3}), f({2})); }, "^ge: shapes \\[3\\] and \\[2\\]"},
  };
}

}  // namespace

std::vector<OpRow> elementwise_rows(Draw& draw) {
  OpRow row{.op = "elementwise", .cases = {}, .errors = errors()};
  add_unary(draw, row);
  add_binary(draw, row);
  add_masked(draw, row);
  add_comparisons(draw, row);
  return {row};
}

}  // namespace ebb::testing
