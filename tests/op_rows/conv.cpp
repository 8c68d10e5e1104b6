// Rows of the operators that look a few tokens back: short convolution, token shift, channel mix.
#include <fmt/format.h>

#include <cmath>

#include "ops/causal_conv1d.h"
#include "ops/channel_mix.h"
#include "ops/token_shift.h"
#include "tests/op_table.h"
#include "tests/reference/conv.h"

namespace ebb::testing {
namespace {

struct ConvCase {
  std::string name = {};
  Shape x = {};  // [B,T,D]
  int64_t width = 4;
  bool bias = false, silu = true, state = false;
  std::vector<int64_t> cu = {};  // empty: dense
  bool f32_state = false;        // beside bf16 x
};

OpCase conv_case(Draw& draw, const ConvCase& k) {
  const int64_t d = k.x[2], n = k.cu.empty() ? k.x[0] : int64_t(k.cu.size()) - 1;
  OpCase c;
  c.name = k.name;
  c.inputs = {
      {"x", draw.normal(k.x)},
      {.name = "weight", .value = draw.normal({d, k.width}, 0.5), .parameter = true},
      {.name = "bias", .value = k.bias ? draw.normal({d}, 0.3) : Tensor(), .parameter = true},
      {.name = "state",
       .value = k.state ? draw.normal({n, d, k.width}) : Tensor(),
       .parameter = k.f32_state}};
  c.run = [k](std::span<const Var> in) {
    CausalConv1dOptions o{.activation = k.silu ? ConvActivation::silu : ConvActivation::none,
                          .final_state = true};
    if (!k.cu.empty()) o.layout = SeqLayout::packed(k.cu, in[0].device());
    const CausalConv1d r = causal_conv1d(in[0], in[1], in[2], in[3], o);
    return std::vector{r.y, r.final_state};
  };
  c.reference = [k](std::span<const Tensor> in) {
    return reference::causal_conv1d(in[0], in[1], in[2], in[3], k.silu, k.cu);
  };
  c.jacobian = k.x.numel() <= 24;
  return c;
}

OpRow conv_row(Draw& draw) {
  OpRow row{.op = "causal_conv1d"};
  for (const ConvCase& k : std::vector<ConvCase>{
           {.name = "plain", .x = {2, 9, 5}},
           {.name = "bias", .x = {1, 70, 32}, .bias = true},
           {.name = "linear", .x = {1, 33, 32}, .silu = false},
           {.name = "everything", .x = {2, 37, 40}, .bias = true, .state = true},
           {.name = "state_only", .x = {2, 3, 8}, .state = true},  // shorter than the window
           {.name = "one_token", .x = {3, 1, 4}, .bias = true, .state = true},
           {.name = "one_token_fresh", .x = {1, 1, 3}},
           {.name = "no_tokens", .x = {2, 0, 4}, .bias = true, .state = true},
           {.name = "no_batch", .x = {0, 5, 4}, .bias = true},
           {.name = "long_even", .x = {2, 256, 64}, .bias = true, .state = true},
           {.name = "long_ragged", .x = {1, 1031, 36}, .bias = true},
           {.name = "odd_channels", .x = {2, 131, 33}, .bias = true, .state = true},
           {.name = "wide", .x = {1, 67, 520}, .bias = true},
           {.name = "f32_state", .x = {2, 2, 8}, .state = true, .f32_state = true},
           {.name = "packed",
           .x = {1, 70, 16},
           .bias = true,
           .state = true,
           .cu = {0, 1, 3, 3, 6, 10, 15, 15, 15, 69, 70, 70}},
           {.name = "packed_rows", .x = {3, 50, 12}, .bias = true, .cu = {0, 0, 47, 50, 52, 150}},
           {.name = "packed_long",
           .x = {2, 300, 8},
           .state = true,
           .cu = {0, 61, 122, 124, 190, 255, 256, 320, 600}},
           {.name = "packed_single", .x = {1, 6, 4}, .state = true, .cu = {0, 1, 2, 3, 4, 5, 6}},
       })
    row.cases.push_back(conv_case(draw, k));
  for (int64_t width = 1; width <= 8; ++width)
    row.cases.push_back(conv_case(draw, {.name = fmt::format("width{}", width),
                                         .x = {2, 75, width % 2 ? 7 : 12},
                                         .width = width,
                                         .bias = true,
                                         .state = true,
                                         .cu = {0, 3, 80, 80, 150}}));
  const auto zeros = [](const Shape& s) { return Tensor::zeros(s); };
  row.errors = {
      {"rank",
       [zeros] {
         causal_conv1d(zeros({2, 3}), zeros({3, 4}));
       },
       "^causal_conv1d: x is \\[2,3\\], want \\[B,T,D\\]"},
      {"weight",
       [zeros] {
         causal_conv1d(zeros({1, 2, 3}), zeros({2, 4}));
       },
       "^causal_conv1d: weight is \\[2,4\\], x is \\[1,2,3\\]; want \\[3,W\\]"},
      {"width",
       [zeros] {
         causal_conv1d(zeros({1, 2, 3}), zeros({3, 9}));
       },
       "^causal_conv1d: weight is \\[3,9\\].*W = 1..8"},
      {"bias",
       [zeros] {
         causal_conv1d(zeros({1, 2, 3}), zeros({3, 4}), zeros({4}));
       },
       "^causal_conv1d: bias is \\[4\\], want \\[3\\]"},
      {"state",
       [zeros] {
         causal_conv1d(zeros({1, 2, 3}), zeros({3, 4}), {}, zeros({1, 3, 3}));
       },
       "^causal_conv1d: state is \\[1,3,3\\], want \\[1,3,4\\]"},
      {"packed_states",
       [zeros] {
         causal_conv1d(zeros({2, 2, 3}), zeros({3, 4}), {}, zeros({2, 3, 4}),
                       {.layout = SeqLayout::packed({0, 1, 2, 4})});
       },
       "^causal_conv1d: state is \\[2,3,4\\], want \\[3,3,4\\]"},
      {"cover",
       [zeros] {
         causal_conv1d(zeros({1, 4, 3}), zeros({3, 4}), {}, {},
                       {.layout = SeqLayout::packed({0, 3})});
       },
       "^causal_conv1d: cu_seqlens ends at 3"},
      {"dtype",
       [] {
         causal_conv1d(Tensor::zeros({1, 2, 3}, DType::bf16), Tensor::zeros({3, 4}));
       },
       "^causal_conv1d: x \\[1,2,3\\] is bf16"},
      {"undefined", [] { causal_conv1d({}, {}); }, "^causal_conv1d: x is undefined"},
      {"step_state",
       [zeros] {
         causal_conv1d_step(zeros({2, 3}), zeros({3, 4}), {}, zeros({2, 3, 3}),
                            ConvActivation::silu);
       },
       "^causal_conv1d_step: state is \\[2,3,3\\], want \\[2,3,4\\]"},
      {"step_rows",
       [zeros] {
         causal_conv1d_step(zeros({2, 3}), zeros({3, 4}), {}, zeros({2, 4, 3}).transpose(1, 2),
                            ConvActivation::silu);
       },
       "^causal_conv1d_step: the state's rows \\[3,4\\] must be dense"},
  };
  return row;
}

struct ShiftCase {
  std::string name = {};
  Shape x = {};       // [B,T,D]
  int64_t mixes = 0;  // 0: δ alone
  bool last = false;
  bool separate = false;  // one tensor per mix
  std::vector<int64_t> cu = {};
  bool f32_last = false;
};

OpCase shift_case(Draw& draw, const ShiftCase& k) {
  const int64_t d = k.x[2], n = k.cu.empty() ? k.x[0] : int64_t(k.cu.size()) - 1;
  OpCase c;
  c.name = k.name;
  c.inputs = {
      {"x", draw.normal(k.x)},
      {.name = "last", .value = k.last ? draw.normal({n, d}) : Tensor(), .parameter = k.f32_last}};
  for (int64_t m = 0; m < (k.separate ? k.mixes : k.mixes ? 1 : 0); ++m)
    c.inputs.push_back(
        {.name = fmt::format("mu{}", m),
         .value = draw.uniform(k.separate ? Shape{1, 1, d} : Shape{k.mixes, d}, 0, 1),
         .parameter = true});
  c.run = [k](std::span<const Var> in) {
    TokenShiftOptions o{.last = true};
    if (!k.cu.empty()) o.layout = SeqLayout::packed(k.cu, in[0].device());
    if (k.mixes == 0) {
      const TokenShift r = token_shift(in[0], in[1], o);
      return std::vector{r.delta, r.last};
    }
    TokenShiftMix r =
        k.separate ? token_shift_mix(in[0], std::vector<Var>(in.begin() + 2, in.end()), in[1], o)
                   : token_shift_mix(in[0], in[2], in[1], o);
    r.out.push_back(r.last);
    return r.out;
  };
  c.reference = [k, d](std::span<const Tensor> in) {
    Tensor mu = Tensor::full({std::max<int64_t>(k.mixes, 1), d}, 1, DType::f64);
    for (size_t i = 2; i < in.size(); ++i)
      k.separate ? void(mu.select(0, int64_t(i) - 2).copy_(in[i].view({d}))) : void(mu = in[i]);
    const auto r = reference::token_shift(in[0], mu, in[1], k.mixes ? 1 : 0, k.cu);
    std::vector<Tensor> out;
    for (int64_t m = 0; m < mu.size(0); ++m) out.push_back(r[0].select(0, m));
    out.push_back(r[1]);
    return out;
  };
  c.jacobian = k.x.numel() <= 12;
  return c;
}

OpRow shift_row(Draw& draw) {
  OpRow row{.op = "token_shift"};
  const std::vector<int64_t> cu{0, 0, 1, 3, 40, 40, 41, 77, 78, 100};
  for (const ShiftCase& k : std::vector<ShiftCase>{
           {.name = "delta", .x = {2, 3, 2}},
           {.name = "delta_last", .x = {2, 23, 48}, .last = true},
           {.name = "delta_odd", .x = {3, 41, 7}, .last = true, .f32_last = true},
           {.name = "delta_long", .x = {1, 1031, 8}},
           {.name = "delta_packed", .x = {2, 50, 12}, .last = true, .cu = cu},
           {.name = "delta_one", .x = {2, 1, 4}, .last = true},
           {.name = "delta_no_tokens", .x = {2, 0, 4}, .last = true},
           {.name = "one_mix", .x = {2, 23, 48}, .mixes = 1, .last = true},
           {.name = "six", .x = {2, 37, 16}, .mixes = 6, .separate = true},
           {.name = "six_last", .x = {2, 130, 8}, .mixes = 6, .last = true, .separate = true},
           {.name = "six_odd", .x = {2, 33, 5}, .mixes = 6, .last = true},
           {.name = "three_packed", .x = {1, 100, 8}, .mixes = 3, .last = true, .cu = cu},
           {.name = "eight_packed", .x = {4, 25, 4}, .mixes = 8, .cu = cu},
           {.name = "two_small", .x = {1, 3, 2}, .mixes = 2, .last = true},
           {.name = "mix_no_tokens", .x = {1, 0, 4}, .mixes = 2, .last = true},
           {.name = "mix_one_token", .x = {3, 1, 4}, .mixes = 2},
       })
    row.cases.push_back(shift_case(draw, k));
  const auto zeros = [](const Shape& s) { return Tensor::zeros(s); };
  row.errors = {
      {"rank",
       [zeros] {
         token_shift(zeros({2, 3}));
       },
       "^token_shift: x is \\[2,3\\], want"},
      {"last",
       [zeros] {
         token_shift(zeros({2, 3, 4}), zeros({3, 4}));
       },
       "^token_shift: last is \\[3,4\\], want \\[2,4\\]"},
      {"mu",
       [zeros] {
         token_shift_mix(zeros({2, 3, 4}), zeros({2, 5}));
       },
       "^token_shift_mix: mu is \\[2,5\\], x is \\[2,3,4\\]"},
      {"separate_mu",
       [zeros] {
         token_shift_mix(zeros({2, 3, 4}), std::vector<Var>{zeros({1, 1, 3})});
       },
       "^token_shift_mix: mu is \\[1,1,3\\].* want 4 values"},
      {"too_many",
       [zeros] {
         token_shift_mix(zeros({2, 3, 4}), zeros({9, 4}));
       },
       "^token_shift_mix: 9 mixes, want 1..8"},
      {"cover",
       [zeros] {
         token_shift(zeros({2, 3, 4}), {}, {.layout = SeqLayout::packed({0, 5})});
       },
       "^token_shift: cu_seqlens ends at 5"},
  };
  return row;
}

// relu² has no second derivative at 0, where finite differences lose their digits. So tokens are
// positive and every second row of key negative: half of the units are well on, half well off.
OpCase mix_case(Draw& draw, const std::string& name, const Shape& x, int64_t inner, bool last,
                const std::vector<int64_t>& cu = {}) {
  const int64_t d = x[2], n = cu.empty() ? x[0] : int64_t(cu.size()) - 1;
  const Tensor key = draw.uniform({inner, d}, 0.2 / std::sqrt(double(d)), 1 / std::sqrt(double(d)));
  for (int64_t i = d; i < key.numel(); i += 2 * d)
    for (int64_t c = 0; c < d; ++c) key.data<double>()[i + c] *= -1;
  OpCase c;
  c.name = name;
  c.inputs = {{"x", draw.uniform(x, 0.5, 1.5)},
              {.name = "x_k", .value = draw.uniform({d}, 0, 0.8), .parameter = true},
              {"key", key},
              {"value", draw.normal({d, inner}, 1 / std::sqrt(double(inner)))},
              {"last", last ? draw.uniform({n, d}, 0.5, 1.5) : Tensor()}};
  c.run = [cu](std::span<const Var> in) {
    TokenShiftOptions o{.last = true};
    if (!cu.empty()) o.layout = SeqLayout::packed(cu, in[0].device());
    const ChannelMix r = channel_mix(in[0], in[1], in[2], in[3], in[4], o);
    return std::vector{r.y, r.last};
  };
  c.reference = [cu](std::span<const Tensor> in) {
    return reference::channel_mix(in[0], in[1], in[2], in[3], in[4], cu);
  };
  return c;
}

OpRow mix_row(Draw& draw) {
  OpRow row{.op = "channel_mix"};
  row.cases = {mix_case(draw, "plain", {2, 23, 16}, 40, false),
               mix_case(draw, "last", {2, 5, 7}, 9, true),
               mix_case(draw, "one_token", {3, 1, 8}, 16, true),
               mix_case(draw, "packed", {2, 20, 8}, 24, true, {0, 0, 13, 14, 31, 40})};
  const auto zeros = [](const Shape& s) { return Tensor::zeros(s); };
  row.errors = {
      {"key",
       [zeros] {
         channel_mix(zeros({2, 3, 4}), zeros({4}), zeros({8, 5}), zeros({4, 8}));
       },
       "^channel_mix: key is \\[8,5\\], x is \\[2,3,4\\]; want \\[I,4\\]"},
      {"value",
       [zeros] {
         channel_mix(zeros({2, 3, 4}), zeros({4}), zeros({8, 4}), zeros({8, 4}));
       },
       "^channel_mix: value is \\[8,4\\], want \\[4,8\\]"},
      {"x_k",
       [zeros] {
         channel_mix(zeros({2, 3, 4}), zeros({5}), zeros({8, 4}), zeros({4, 8}));
       },
       "^channel_mix: x_k is \\[5\\], x is"},
  };
  return row;
}

}  // namespace

std::vector<OpRow> conv_rows(Draw& draw) {
  return {conv_row(draw), shift_row(draw), mix_row(draw)};
}

}  // namespace ebb::testing
