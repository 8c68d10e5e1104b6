// Rows of activations and gates: SwiGLU, log decays, sigmoid gates.
#include <fmt/format.h>

#include <cmath>

#include "ops/decay_gate.h"
#include "ops/sigmoid_gate.h"
#include "ops/swiglu.h"
#include "tests/op_table.h"
#include "tests/reference/gate.h"

namespace ebb::testing {
namespace {

OpRow swiglu_row(Draw& draw) {
  OpRow row{.op = "swiglu"};
  for (const Shape& s : {Shape{2, 3}, Shape{2, 23, 80}, Shape{5, 33}, Shape{0, 8}, Shape{7},
                         Shape{2, 3, 4, 40}, Shape{1031, 16}}) {
    OpCase c;
    c.name = fmt::format("pair_{}", s.numel());
    c.inputs = {{"gate", draw.normal(s, 2)}, {"up", draw.normal(s)}};
    c.run = [](std::span<const Var> in) { return std::vector{swiglu(in[0], in[1])}; };
    c.reference = [](std::span<const Tensor> in) {
      return std::vector{reference::swiglu(in[0], in[1])};
    };
    c.jacobian = s.numel() <= 12;
    row.cases.push_back(c);
    Shape both = s;
    both[s.size() - 1] *= 2;
    c.name = fmt::format("halves_{}", s.numel());
    c.inputs = {{"gate_up", draw.normal(both, 2)}};
    c.run = [](std::span<const Var> in) { return std::vector{swiglu(in[0])}; };
    c.reference = [](std::span<const Tensor> in) {
      const int64_t n = in[0].size(-1) / 2;
      return std::vector{reference::swiglu(in[0].slice(-1, 0, n).contiguous(),
                                           in[0].slice(-1, n, 2 * n).contiguous())};
    };
    row.cases.push_back(c);
  }
  row.errors = {
      {"shape",
       [] {
         swiglu(Tensor::zeros({2, 3}), Tensor::zeros({2, 4}));
       },
       "^swiglu: up is \\[2,4\\], want \\[2,3\\]"},
      {"odd",
       [] {
         swiglu(Tensor::zeros({2, 3}));
       },
       "^swiglu: gate_up is \\[2,3\\], want"},
      {"dtype", [] { swiglu(Tensor::zeros({2}), Tensor::zeros({2}, DType::f64)); },
       "^swiglu: gate is f32, up is f64"},
      {"integer", [] { swiglu(Tensor::zeros({2}, DType::i32)); },
       "^swiglu: gate_up \\[2\\] is i32"},
  };
  return row;
}

struct GateCase {
  std::string name = {};
  Shape a = {};
  int64_t heads = 1;
  Shape bias = {};  // empty: absent
  double lower_bound = 0;
  double log_mean = 0, bias_mean = 0;
  int64_t channels_per_head = 1;
};

OpCase gate_case(Draw& draw, const GateCase& k) {
  const bool bias = !k.bias.empty();
  const int64_t channels = bias ? k.bias.numel() : k.heads * k.channels_per_head;
  OpCase c;
  c.name = k.name;
  c.inputs = {
      {"a", draw.normal(k.a)},
      {.name = "A_log", .value = draw.normal({k.heads}, 0.5, k.log_mean), .parameter = true},
      {.name = "dt_bias",
       .value = bias ? draw.normal(k.bias, 1, k.bias_mean) : Tensor(),
       .parameter = true}};
  c.run = [k](std::span<const Var> in) {
    return std::vector{
        decay_gate(in[0], in[1], in[2],
                   {.lower_bound = k.lower_bound, .channels_per_head = k.channels_per_head})};
  };
  c.reference = [k, channels](std::span<const Tensor> in) {
    return std::vector{reference::decay_gate(in[0], in[1], in[2], channels, k.lower_bound)};
  };
  c.jacobian = k.a.numel() <= 16;
  return c;
}

std::vector<OpError> gate_errors() {
  const auto zeros = [](const Shape& s) { return Tensor::zeros(s); };
  return {
      {"shapes",
       [zeros] {
         decay_gate(zeros({2, 3, 5}), zeros({4}), zeros({4}));
       },
       "^decay_gate: a is \\[2,3,5\\], A_log \\[4\\], dt_bias \\[4\\]; want"},
      {"bias_shape",
       [zeros] {
         decay_gate(zeros({2, 3, 6}), zeros({2}), zeros({3, 2}));
       },
       "^decay_gate: a is \\[2,3,6\\], A_log \\[2\\], dt_bias \\[3,2\\]"},
      {"positive_bound",  // a positive log decay is refused
       [zeros] {
         decay_gate(zeros({2, 3}), zeros({3}), zeros({3}), {.lower_bound = 5});
       },
       "^decay_gate: lower_bound is 5; a log decay is negative"},
      {"bf16_parameter",
       [zeros] {
         decay_gate(zeros({2, 3}), Tensor::zeros({3}, DType::bf16), zeros({3}));
       },
       "^decay_gate: A_log \\[3\\] is bf16; gate parameters stay f32"},
      {"undefined",
       [zeros] {
         decay_gate(zeros({2, 3}), {});
       },
       "^decay_gate: A_log is undefined"},
  };
}

OpRow decay_row(Draw& draw) {
  OpRow row{.op = "decay_gate"};
  for (const GateCase& k : std::vector<GateCase>{
           {.name = "head", .a = {2, 23, 3}, .heads = 3, .bias = {3}},
           {.name = "head_small", .a = {4, 2}, .heads = 2, .bias = {2}},
           {.name = "head_wide", .a = {1, 300, 16}, .heads = 16, .bias = {16}},
           {.name = "head_no_bias", .a = {2, 9, 4}, .heads = 4},
           {.name = "no_tokens", .a = {2, 0, 3}, .heads = 3, .bias = {3}},
           {.name = "channel", .a = {2, 23, 3, 16}, .heads = 3, .bias = {48}},
           {.name = "channel_2d_bias", .a = {1, 65, 2, 8}, .heads = 2, .bias = {2, 8}},
           {.name = "channel_flat", .a = {1, 130, 24}, .heads = 2, .bias = {24}},
           {.name = "channel_odd", .a = {3, 11, 2, 5}, .heads = 2, .bias = {10}},
           {.name = "channel_straddle", .a = {2, 40, 6, 6}, .heads = 6, .bias = {6, 6}},
           {.name = "channel_no_bias", .a = {2, 9, 2, 4}, .heads = 2, .channels_per_head = 4},
           {.name = "one_head_one_channel", .a = {5, 1}, .heads = 1, .bias = {1}},
           {.name = "long", .a = {1, 2500, 6}, .heads = 6, .bias = {6}},
           // Far from zero on both sides, and past the switch to the linear branch.
           {.name = "saturated", .a = {2, 40, 4}, .heads = 4, .bias = {4}, .bias_mean = 21},
           {.name = "tiny_steps", .a = {2, 40, 4}, .heads = 4, .bias = {4}, .bias_mean = -12},
           // dt_bias far above 0 and a length beside every block border.
           {.name = "B20_bias5_ragged", .a = {1, 67, 4}, .heads = 4, .bias = {4}, .bias_mean = 5},
           {.name = "fast", .a = {1, 50, 4}, .heads = 4, .bias = {4}, .log_mean = 7},
           {.name = "bounded", .a = {2, 23, 3, 16}, .heads = 3, .bias = {48}, .lower_bound = -5},
           {.name = "bounded_small", .a = {4, 2}, .heads = 2, .bias = {2}, .lower_bound = -1.5},
           {.name = "bounded_steep",
           .a = {1, 200, 2, 8},
           .heads = 2,
           .bias = {16},
           .lower_bound = -5,
           .log_mean = 3},
       })
    row.cases.push_back(gate_case(draw, k));
  row.errors = gate_errors();
  return row;
}

OpRow sigmoid_row(Draw& draw) {
  OpRow row{.op = "sigmoid_gate"};
  struct Kind {
    Shape shape;
    double scale, spread;
  };
  for (const auto& [shape, scale, spread] :
       {Kind{{2, 3}, 1, 1}, Kind{{2, 23, 3}, 2, 1}, Kind{{3, 70, 24}, 1, 6}, Kind{{}, 2, 1},
        Kind{{0, 4}, 1, 1}, Kind{{1037}, -0.6065306597126334, 2}}) {
    OpCase c;
    c.name = fmt::format("n{}", shape.numel());
    c.inputs = {{"x", draw.normal(shape, spread)}};
    c.run = [scale = scale](std::span<const Var> in) {
      return std::vector{sigmoid_gate(in[0], scale)};
    };
    c.reference = [scale = scale](std::span<const Tensor> in) {
      return std::vector{reference::sigmoid_gate(in[0], scale)};
    };
    c.jacobian = shape.numel() <= 6;
    row.cases.push_back(c);
  }
  row.errors = {{"dtype", [] { sigmoid_gate(Tensor::zeros({2}, DType::u8)); },
                 "^sigmoid_gate: x \\[2\\] is u8"},
                {"scale", [] { sigmoid_gate(Tensor::zeros({2}), std::nan("")); },
                 "^sigmoid_gate: scale is nan"}};
  return row;
}

}  // namespace

std::vector<OpRow> gate_rows(Draw& draw) {
  return {swiglu_row(draw), decay_row(draw), sigmoid_row(draw)};
}

}  // namespace ebb::testing
