// Rows of the normalisations. Widths on both sides of every way a row is spread over GPU threads:
// one thread, parts of a warp, a warp, several warps, tiles; whole packs and odd sizes.
#include "tests/reference/norm.h"

#include <fmt/format.h>

#include "ops/gated_rms_norm.h"
#include "ops/l2_norm.h"
#include "ops/layer_norm.h"
#include "ops/rms_norm.h"
#include "tests/op_table.h"

namespace ebb::testing {
namespace {

using Inputs = std::span<const Var>;
using Values = std::span<const Tensor>;

const std::vector<Shape> kShapes = {{3, 5},    {4, 1},    {2, 7, 64}, {3, 3, 2, 128}, {131, 33},
                                    {133, 16}, {5, 520},  {3, 1000},  {8, 768},       {2, 2048},
                                    {1, 4096}, {2, 4104}, {1, 8193},  {0, 8},         {7}};

std::string shape_name(const Shape& s) {
  return fmt::format("n{}_d{}", s.first(s.size() - 1).numel(), s.back());
}

// In a row of one value, y is a sign but for eps, and so is the gradient eps's doing: a small eps
// would leave nothing but the rounding of 1 − y². Rows of one value get a large one.
float eps_for(const Shape& s) { return s.back() == 1 ? 0.5f : 1e-5f; }

OpInput weight(const char* name, const Tensor& value) {
  return {.name = name, .value = value, .parameter = true};
}

OpRow rms_norm_row(Draw& draw) {
  OpRow row{.op = "rms_norm"};
  for (const Shape& s : kShapes) {
    OpCase c;
    c.name = shape_name(s);
    c.inputs = {{"x", draw.normal(s)}, weight("w", draw.normal({s.back()}, 0.3, 1))};
    const float eps = eps_for(s);
    c.run = [eps](Inputs in) { return std::vector{rms_norm(in[0], in[1], eps)}; };
    c.reference = [eps](Values in) {
      return std::vector{reference::rms_norm(in[0], in[1], double(eps))};
    };
    c.jacobian = s.numel() <= 15;
    row.cases.push_back(c);
  }
  OpCase bare;
  bare.name = "no_weight";
  bare.inputs = {{"x", draw.normal({3, 24})}};
  bare.run = [](Inputs in) { return std::vector{rms_norm(in[0], {}, 1e-6f)}; };
  bare.reference = [](Values in) {
    return std::vector{reference::rms_norm(in[0], {}, double(1e-6f))};
  };
  row.cases.push_back(bare);
  for (const Shape& s : {Shape{2, 9, 24}, Shape{133, 512}, Shape{3, 7}, Shape{2, 4104}}) {
    for (const bool f32_stream : {false, true}) {
      OpCase c;
      c.name = (f32_stream ? "f32_residual_" : "residual_") + shape_name(s);
      c.inputs = {{"x", draw.normal(s)},
                  {.name = "residual", .value = draw.normal(s), .parameter = f32_stream},
                  weight("w", draw.normal({s.back()}, 0.3, 1))};
      c.run = [](Inputs in) {
        const AddRmsNorm r = add_rms_norm(in[0], in[1], in[2], 1e-6f);
        return std::vector{r.y, r.u};
      };
      c.reference = [](Values in) {
        const Tensor u = reference::add(in[0], in[1]);
        return std::vector{reference::rms_norm(u, in[2], double(1e-6f)), u};
      };
      row.cases.push_back(c);
    }
  }
  const auto zeros = [](const Shape& s, DType t = DType::f32) { return Tensor::zeros(s, t); };
  row.errors = {
      {"width",
       [=] {
         rms_norm(zeros({2, 3}), zeros({4}), 1e-5f);
       },
       "^rms_norm: w is \\[4\\], x is \\[2,3\\]"},
      {"dtype",
       [=] {
         rms_norm(zeros({2, 3}, DType::i64), zeros({3}), 1e-5f);
       },
       "^rms_norm: x \\[2,3\\] is i64"},
      {"scalar", [=] { rms_norm(zeros({}), {}, 1e-5f); }, "^rms_norm: x is a scalar"},
      {"residual",
       [=] {
         add_rms_norm(zeros({2, 3}), zeros({3, 2}), zeros({3}), 1e-5f);
       },
       "^add_rms_norm: residual is \\[3,2\\], x is \\[2,3\\]"},
      {"residual dtype",
       [=] {
         add_rms_norm(zeros({2, 3}), zeros({2, 3}, DType::f64), zeros({3}), 1e-5f);
       },
       "^add_rms_norm: residual is f64, x is f32"},
      {"no residual",
       [=] {
         add_rms_norm(zeros({2, 3}), {}, zeros({3}), 1e-5f);
       },
       "^add_rms_norm: residual is undefined"},
  };
  return row;
}

OpRow l2_norm_row(Draw& draw) {
  OpRow row{.op = "l2_norm"};
  for (const Shape& s : kShapes) {
    OpCase c;
    c.name = shape_name(s);
    c.inputs = {{"x", draw.normal(s)}};
    const float eps = s.back() == 1 ? eps_for(s) : 1e-6f;
    c.run = [eps](Inputs in) { return std::vector{l2_norm(in[0], eps)}; };
    c.reference = [eps](Values in) { return std::vector{reference::l2_norm(in[0], double(eps))}; };
    c.jacobian = s.numel() <= 15;
    row.cases.push_back(c);
  }
  row.errors = {
      {"dtype",
       [] {
         l2_norm(Tensor::zeros({2, 3}, DType::i32));
       },
       "^l2_norm: x \\[2,3\\] is i32"},
      {"undefined", [] { l2_norm({}); }, "^l2_norm: x is undefined"},
      {"scalar", [] { l2_norm(Tensor::zeros({})); }, "^l2_norm: x is a scalar"},
  };
  return row;
}

struct LayerCase {
  std::string name;
  Shape x;
  int64_t groups = 0;  // 0: layer_norm
  bool weight = true, bias = true;
};

OpCase layer_norm_case(Draw& draw, const LayerCase& k) {
  OpCase c;
  c.name = k.name;
  const Shape d{k.x.back()};
  c.inputs = {{"x", draw.normal(k.x, 1, 0.5)},
              weight("w", k.weight ? draw.normal(d, 0.3, 1) : Tensor()),
              weight("b", k.bias ? draw.normal(d, 0.3) : Tensor())};
  c.run = [groups = k.groups](Inputs in) {
    return std::vector{groups ? group_norm(in[0], in[1], in[2], groups, 1e-5f)
                              : layer_norm(in[0], in[1], in[2], 1e-5f)};
  };
  c.reference = [groups = k.groups](Values in) {
    return std::vector{
        reference::layer_norm(in[0], in[1], in[2], double(1e-5f), groups ? groups : 1)};
  };
  c.jacobian = k.x.numel() <= 15;
  return c;
}

OpRow layer_norm_row(Draw& draw) {
  OpRow row{.op = "layer_norm"};
  for (const Shape& s : kShapes)
    if (s.back() > 1)  // one channel has no variance: checked in norm_test.cpp
      row.cases.push_back(layer_norm_case(draw, {.name = shape_name(s), .x = s}));
  for (const LayerCase& k : std::vector<LayerCase>{
           {.name = "weight_only", .x = {5, 24}, .bias = false},
           {.name = "bias_only", .x = {5, 24}, .weight = false},
           {.name = "bare", .x = {5, 24}, .weight = false, .bias = false},
           {.name = "wide_bias_only", .x = {2, 4104}, .weight = false},
           {.name = "groups_rwkv", .x = {2, 21, 512}, .groups = 8},
           {.name = "groups_one", .x = {3, 16}, .groups = 1},
           {.name = "groups_odd", .x = {7, 33}, .groups = 3},
           {.name = "groups_six", .x = {2, 5, 768}, .groups = 6},
           {.name = "groups_wide", .x = {2, 9000}, .groups = 2},
           {.name = "groups_bare", .x = {4, 12}, .groups = 2, .weight = false, .bias = false},
           {.name = "groups_no_rows", .x = {0, 12}, .groups = 2},
       })
    row.cases.push_back(layer_norm_case(draw, k));
  const auto zeros = [](const Shape& s) { return Tensor::zeros(s); };
  row.errors = {
      {"weight",
       [=] {
         layer_norm(zeros({2, 3}), zeros({2}), {}, 1e-5f);
       },
       "^layer_norm: w is \\[2\\], x is \\[2,3\\]"},
      {"bias",
       [=] {
         layer_norm(zeros({2, 3}), {}, zeros({3, 1}), 1e-5f);
       },
       "^layer_norm: b is \\[3,1\\], x is \\[2,3\\]"},
      {"groups",
       [=] {
         group_norm(zeros({2, 6}), {}, {}, 4, 1e-5f);
       },
       "^group_norm: x is \\[2,6\\]; 4 groups do not divide 6 channels"},
      {"no groups",
       [=] {
         group_norm(zeros({2, 6}), {}, {}, 0, 1e-5f);
       },
       "^group_norm: x is \\[2,6\\]; 0 groups"},
  };
  return row;
}

struct GatedCase {
  std::string name;
  Shape x;
  GateOrder order = GateOrder::norm_first;
  GateAct act = GateAct::silu;
  int64_t groups = 1;
  bool weight = true;
};

OpCase gated_case(Draw& draw, const GatedCase& k) {
  OpCase c;
  c.name = k.name;
  c.inputs = {{"x", draw.normal(k.x)},
              {"gate", draw.normal(k.x, 2)},
              weight("w", k.weight ? draw.normal({k.x.back()}, 0.3, 1) : Tensor())};
  c.run = [k](Inputs in) {
    return std::vector{gated_rms_norm(
        in[0], in[1], in[2], {.eps = 1e-5f, .act = k.act, .order = k.order, .groups = k.groups})};
  };
  c.reference = [k](Values in) {
    return std::vector{reference::gated_rms_norm(in[0], in[1], in[2], k.act == GateAct::silu,
                                                 k.order == GateOrder::gate_first, double(1e-5f),
                                                 k.groups)};
  };
  c.jacobian = k.x.numel() <= 15;
  return c;
}

OpRow gated_rms_norm_row(Draw& draw) {
  OpRow row{.op = "gated_rms_norm"};
  for (const auto& [order, order_name] :
       {std::pair{GateOrder::norm_first, "norm_first"}, {GateOrder::gate_first, "gate_first"}})
    for (const auto& [act, act_name] :
         {std::pair{GateAct::silu, "silu"}, {GateAct::sigmoid, "sigmoid"}})
      for (const Shape& s : {Shape{3, 5}, Shape{2, 7, 6, 128}, Shape{131, 33}, Shape{2, 4104}})
        row.cases.push_back(
            gated_case(draw, {.name = fmt::format("{}_{}_{}", order_name, act_name, shape_name(s)),
                              .x = s,
                              .order = order,
                              .act = act}));
  for (const GatedCase& k : std::vector<GatedCase>{
           {.name = "no_weight", .x = {3, 24}, .weight = false},
           {.name = "no_rows", .x = {0, 24}},
           {.name = "mamba2", .x = {2, 9, 1024}, .order = GateOrder::gate_first},
           {.name = "two_groups", .x = {133, 64}, .order = GateOrder::gate_first, .groups = 2},
           {.name = "three_groups", .x = {5, 33}, .order = GateOrder::gate_first, .groups = 3},
           {.name = "norm_first_groups", .x = {5, 96}, .groups = 6},
           {.name = "wide_groups", .x = {2, 9000}, .order = GateOrder::gate_first, .groups = 2},
       })
    row.cases.push_back(gated_case(draw, k));
  const auto zeros = [](const Shape& s, DType t = DType::f32) { return Tensor::zeros(s, t); };
  row.errors = {
      {"gate shape",
       [=] {
         gated_rms_norm(zeros({2, 3, 4}), zeros({2, 12}), zeros({4}), {});
       },
       "^gated_rms_norm: gate is \\[2,12\\] f32, x is \\[2,3,4\\] f32"},
      {"gate dtype",
       [=] {
         gated_rms_norm(zeros({2, 4}), zeros({2, 4}, DType::f64), {}, {});
       },
       "^gated_rms_norm: gate is \\[2,4\\] f64, x is \\[2,4\\] f32"},
      {"weight",
       [=] {
         gated_rms_norm(zeros({2, 4}), zeros({2, 4}), zeros({2}), {});
       },
       "^gated_rms_norm: w is \\[2\\], x is \\[2,4\\]"},
      {"groups",
       [=] {
         gated_rms_norm(zeros({2, 4}), zeros({2, 4}), {}, {.groups = 3});
       },
       "^gated_rms_norm: x is \\[2,4\\]; 3 groups do not divide 4 channels"},
  };
  return row;
}

}  // namespace

std::vector<OpRow> norm_rows(Draw& draw) {
  return {rms_norm_row(draw), l2_norm_row(draw), layer_norm_row(draw), gated_rms_norm_row(draw)};
}

}  // namespace ebb::testing
