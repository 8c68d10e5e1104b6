// Rows of the delta rule with a decay per channel: KDA and GDN2.
#include "ops/delta_rule_channel.h"

#include <cmath>

#include "autograd/tape.h"
#include "ops/movement.h"
#include "tests/op_rows/delta_inputs.h"
#include "tests/reference/delta_rule.h"

namespace ebb::testing {
namespace {

// A gate [...,HV] or [...,HV,K] over `width` channels.
Tensor over_channels(const Tensor& gate, const Shape& shape) {
  return gate.dim() == shape.size() ? gate : gate.unsqueeze(-1).expand(shape).contiguous();
}

OpCase channel_case(Draw& draw, const DeltaCase& s, DeltaGates gates) {
  const bool kimi = gates == DeltaGates::kda;
  OpCase c;
  c.name = (kimi ? "kda_" : "gdn2_") + s.name;
  const Shape qk{s.batch, s.time, s.heads, s.key_dim};
  const Shape v{s.batch, s.time, s.value_heads, s.value_dim};
  const Shape wide{s.batch, s.time, s.value_heads, s.key_dim};
  const int64_t n = s.cu.empty() ? s.batch : int64_t(s.cu.size()) - 1;
  const Shape state{n, s.value_heads, s.key_dim, s.value_dim};
  const bool gated = s.decay != Decay::none;
  c.inputs = {
      {"q", unit_rows(draw.normal(qk))},
      {"k", unit_rows(draw.normal(qk))},
      {"v", draw.normal(v)},
      {.name = kimi ? "beta" : "b",
       .value = draw.uniform(kimi ? v.first(3) : wide, 0.05, s.erase_max),
       .parameter = true},
      {.name = "w", .value = kimi ? Tensor() : draw.uniform(v, 0.05, 1), .parameter = true},
      {.name = "g", .value = gated ? log_decays(draw, wide, s.decay) : Tensor(), .parameter = true},
      {.name = "h0", .value = s.h0 ? draw.normal(state) : Tensor(), .parameter = true}};
  c.run = [s, kimi, wide](std::span<const Var> in) {
    // A decay of exactly 1 is a constant here: finite differences would make g positive.
    const Var g = in[5].defined()
                      ? in[5]
                      : Var(Tensor::zeros(wide, in[3].value().dtype(), in[3].value().device()));
    const DeltaRuleOptions options = options_of(s, in[0].device());
    const DeltaRuleOutput r = kimi ? kda(in[0], in[1], in[2], g, in[3], in[6], options)
                                   : gdn2(in[0], in[1], in[2], g, in[3], in[4], in[6], options);
    return s.final_state ? std::vector{r.o, r.ht} : std::vector{r.o};
  };
  c.reference = [s, kimi, wide, v](std::span<const Tensor> in) {
    const Tensor g = in[5].defined() ? in[5] : Tensor::zeros(wide, DType::f64);
    const reference::DeltaRule r({in[0], in[1], in[2], g, over_channels(in[3], wide),
                                  kimi ? over_channels(in[3], v) : in[4], in[6],
                                  1 / std::sqrt(double(s.key_dim)), s.cu});
    return s.final_state ? std::vector{r.o, r.ht} : std::vector{r.o};
  };
  c.jacobian = s.batch * s.time * s.value_heads * s.value_dim <= 12;
  return c;
}

std::vector<OpCase> channel_cases(Draw& draw, DeltaGates gates) {
  std::vector<OpCase> cases;
  for (const DeltaCase& s : delta_cases()) cases.push_back(channel_case(draw, s, gates));
  return cases;
}

// Normalisation, raw gate and sigmoid as options of the operator: against the same in f64 by hand.
// Several heads, since the gradient of A_log is a sum over a head's tokens and channels: of one or
// two heads it can nearly cancel, and an error relative to what is left says nothing.
struct RawCase {
  std::string name = {};
  int64_t batch = 2, time = 80, heads = 6, key_dim = 16, value_dim = 24;
  std::vector<int64_t> cu = {};
  double beta_scale = 2, bound = 0;
  double spread = 1, mean = 0;  // of the logits of decays
  bool normalize = true, raw_decay = true, sigmoid = true, bias = true;
  bool h0 = false, recompute = false;
  bool projection = false;  // q, k, v are columns of one matrix, the gates' logits of another
};
std::vector<RawCase> raw_cases() {
  return {
      {.name = "raw", .heads = 3, .key_dim = 6, .value_dim = 5},
      {.name = "raw_bounded", .heads = 3, .key_dim = 6, .value_dim = 5, .bound = -5},
      {.name = "raw_t1", .batch = 3, .time = 1, .key_dim = 64, .value_dim = 64, .h0 = true},
      {.name = "raw_t129", .batch = 1, .time = 129, .key_dim = 64, .value_dim = 72, .h0 = true},
      {.name = "raw_k128", .time = 67, .key_dim = 128, .value_dim = 8, .h0 = true},
      {.name = "raw_k136", .batch = 1, .time = 66, .key_dim = 136, .value_dim = 8},
      {.name = "raw_gva", .heads = 2, .key_dim = 32, .h0 = true},
      {.name = "raw_columns", .key_dim = 64, .cu = {0, 30, 95, 95, 160}, .projection = true},
      {.name = "raw_columns_t99", .time = 99, .bound = -3, .recompute = true, .projection = true},
      {.name = "raw_steep", .spread = 6, .mean = 20},
      {.name = "raw_weak", .key_dim = 64, .mean = -7, .h0 = true},
      {.name = "raw_norm", .raw_decay = false, .sigmoid = false},
      {.name = "raw_decay", .normalize = false, .sigmoid = false, .bias = false},
      {.name = "raw_sigmoid", .normalize = false, .raw_decay = false}};
}

OpCase raw_case(Draw& draw, DeltaGates gates, const RawCase& s) {
  const bool kimi = gates == DeltaGates::kda;
  constexpr int64_t kValueHeads = 6;
  const int64_t keys = s.heads * s.key_dim, values = kValueHeads * s.value_dim;
  const int64_t channels = kValueHeads * s.key_dim, strengths = kimi ? kValueHeads : channels;
  const int64_t n = s.cu.empty() ? s.batch : int64_t(s.cu.size()) - 1;
  const Shape qk{s.batch, s.time, s.heads, s.key_dim};
  const Shape v{s.batch, s.time, kValueHeads, s.value_dim};
  const Shape wide{s.batch, s.time, kValueHeads, s.key_dim};
  const Shape erase = kimi ? v.first(3) : wide;
  const auto strength = [&](const Shape& shape) {
    return s.sigmoid ? draw.normal(shape, 3) : draw.uniform(shape, 0.1, 0.9);
  };
  OpCase c;
  c.name = (kimi ? "kda_" : "gdn2_") + s.name;
  if (s.projection) {
    c.inputs = {
        {"qkv", draw.normal({s.batch, s.time, 2 * keys + values})},
        {"zbw", draw.normal({s.batch, s.time, channels + strengths + (kimi ? 0 : values)})}};
  } else {
    const auto rows = [&] { return s.normalize ? draw.normal(qk) : unit_rows(draw.normal(qk)); };
    c.inputs = {{"q", rows()},
                {"k", rows()},
                {"v", draw.normal(v)},
                {.name = "z",
                 .value = s.raw_decay ? draw.normal(wide, s.spread, s.mean)
                                      : log_decays(draw, wide, Decay::usual),
                 .parameter = !s.raw_decay},
                {.name = "b", .value = strength(erase), .parameter = !s.sigmoid},
                {.name = "w", .value = kimi ? Tensor() : strength(v), .parameter = !s.sigmoid}};
  }
  const auto parameter = [&](const char* name, bool on, auto&& value) {
    c.inputs.push_back({.name = name, .value = on ? value() : Tensor(), .parameter = true});
  };
  parameter("A_log", s.raw_decay, [&] { return draw.uniform({kValueHeads}, -1, 0.5); });
  parameter("dt_bias", s.raw_decay && s.bias, [&] {
    return draw.normal({kValueHeads, s.key_dim});
  });
  parameter("h0", s.h0, [&] { return draw.normal({n, kValueHeads, s.key_dim, s.value_dim}); });
  // q, k, v, z, b, w.
  const auto parts = [=](std::span<const Var> in) -> std::vector<Var> {
    if (!s.projection) return {in[0], in[1], in[2], in[3], in[4], in[5]};
    const std::vector<Var> x = split(in[0], -1, {keys, keys, values});
    std::vector<int64_t> widths{channels, strengths};
    if (!kimi) widths.push_back(values);
    const std::vector<Var> y = split(in[1], -1, widths);
    return {reshape(x[0], qk),   reshape(x[1], qk),    reshape(x[2], v),
            reshape(y[0], wide), reshape(y[1], erase), kimi ? Var() : reshape(y[2], v)};
  };
  const auto last = [](const auto& in, size_t i) { return in[in.size() - 3 + i]; };
  c.run = [=](std::span<const Var> in) {
    const std::vector<Var> x = parts(in);
    DeltaRuleOptions options{.scale = 0.4, .want_final_state = true, .recompute = s.recompute};
    options.normalize_qk = s.normalize, options.sigmoid = s.sigmoid;
    if (s.sigmoid) options.beta_scale = s.beta_scale;
    options.A_log = last(in, 0), options.dt_bias = last(in, 1), options.lower_bound = s.bound;
    if (!s.cu.empty()) options.layout = SeqLayout::packed(s.cu, in[0].device());
    const DeltaRuleOutput r = kimi ? kda(x[0], x[1], x[2], x[3], x[4], last(in, 2), options)
                                   : gdn2(x[0], x[1], x[2], x[3], x[4], x[5], last(in, 2), options);
    return std::vector{r.o, r.ht};
  };
  c.reference = [=](std::span<const Tensor> in) {
    const NoGrad off;
    const std::vector<Var> all(in.begin(), in.end());
    const std::vector<Var> x = parts(all);
    const auto dense = [&](size_t i) { return x[i].value().contiguous(); };
    const auto rows = [&](size_t i) { return s.normalize ? normalized_rows(dense(i)) : dense(i); };
    const auto made = [&](size_t i, double scale) {
      return s.sigmoid ? scaled_sigmoid(dense(i), scale) : dense(i);
    };
    const Tensor bias = last(in, 1) ? last(in, 1) : Tensor::zeros({1}, DType::f64);
    const Tensor g =
        s.raw_decay ? decays_of_logits(dense(3), last(in, 0), bias, s.key_dim, s.bound) : dense(3);
    const Tensor b = made(4, s.beta_scale);
    const reference::DeltaRule r({rows(0), rows(1), dense(2), g, over_channels(b, wide),
                                  kimi ? over_channels(b, v) : made(5, 1), last(in, 2), 0.4, s.cu});
    return std::vector{r.o, r.ht};
  };
  return c;
}

// One valid call with one thing changed.
struct Call {
  Tensor q = Tensor::zeros({1, 4, 2, 8}), k = Tensor::zeros({1, 4, 2, 8});
  Tensor v = Tensor::zeros({1, 4, 4, 6}), g = Tensor::zeros({1, 4, 4, 8});
  Tensor beta = Tensor::zeros({1, 4, 4}), h0 = {};
  Tensor b = Tensor::zeros({1, 4, 4, 8}), w = Tensor::zeros({1, 4, 4, 6});
  DeltaRuleOptions options = {};
};

template <class F>
OpError kda_error(const char* name, const char* pattern, F&& change) {
  return {name,
          [change] {
            Call c;
            change(c);
            kda(c.q, c.k, c.v, c.g, c.beta, c.h0, c.options);
          },
          std::string("^kda: ") + pattern};
}
template <class F>
OpError gdn2_error(const char* name, const char* pattern, F&& change) {
  return {name,
          [change] {
            Call c;
            change(c);
            gdn2(c.q, c.k, c.v, c.g, c.b, c.w, c.h0, c.options);
          },
          std::string("^gdn2: ") + pattern};
}

}  // namespace

std::vector<OpRow> delta_rule_channel_rows(Draw& draw) {
  OpRow row{.op = "delta_rule_channel"};
  for (const DeltaGates gates : {DeltaGates::kda, DeltaGates::gdn2}) {
    for (OpCase& c : channel_cases(draw, gates)) row.cases.push_back(std::move(c));
    for (const RawCase& s : raw_cases()) row.cases.push_back(raw_case(draw, gates, s));
  }
  row.errors = {
      kda_error("heads", "3 value heads over 2 q/k heads; want a multiple",
                [](Call& c) {
                  c.v = Tensor::zeros({1, 4, 3, 6});
                }),
      kda_error("scalar_decay", "g is \\[1,4,4\\], want \\[1,4,4,8\\]",
                [](Call& c) {
                  c.g = Tensor::zeros({1, 4, 4});
                }),
      kda_error("beta", "beta is \\[1,4,4,8\\], want \\[1,4,4\\]", [](Call& c) { c.beta = c.b; }),
      kda_error("gate_dtype", "beta is bf16, want f32 beside f32 values",
                [](Call& c) {
                  c.beta = Tensor::zeros({1, 4, 4}, DType::bf16);
                }),
      kda_error("undefined", "beta is undefined", [](Call& c) { c.beta = {}; }),
      kda_error("state", "h0 is \\[1,4,6,8\\], want \\[1,4,8,6\\]",
                [](Call& c) {
                  c.h0 = Tensor::zeros({1, 4, 6, 8});
                }),
      kda_error("positive", "g\\[0,2,3,5\\] = 0.5 is positive; want log decays <= 0",
                [](Call& c) { c.g.select(1, 2).select(1, 3).select(1, 5).fill_(0.5); }),
      kda_error("bound", "dt_bias and lower_bound belong to a raw gate; A_log is undefined",
                [](Call& c) { c.options.lower_bound = -5; }),
      kda_error("beta_scale", "beta_scale is 2; it belongs to sigmoid = true",
                [](Call& c) { c.options.beta_scale = 2; }),
      gdn2_error("erase", "b is \\[1,4,4\\], want \\[1,4,4,8\\]", [](Call& c) { c.b = c.beta; }),
      gdn2_error("write", "w is \\[1,4,4,8\\], want \\[1,4,4,6\\]", [](Call& c) { c.w = c.b; }),
      gdn2_error("no_write", "w is undefined", [](Call& c) { c.w = {}; }),
      gdn2_error("layout", "cu_seqlens ends at 3, the input has 1x4 tokens",
                 [](Call& c) {
                   c.options.layout = SeqLayout::packed({0, 3});
                 }),
  };
  row.errors.push_back({"step_state",
                        [] {
                          kda_step(Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 2, 8}),
                                   Tensor::zeros({1, 4, 6}), Tensor::zeros({1, 4, 8}),
                                   Tensor::zeros({1, 4}), Tensor::zeros({1, 4, 6, 8}));
                        },
                        "^kda_step: state is \\[1,4,6,8\\], want \\[1,4,8,6\\]"});
  row.errors.push_back({"step_positive",
                        [] {
                          kda_step(Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 2, 8}),
                                   Tensor::zeros({1, 4, 6}), Tensor::full({1, 4, 8}, 0.5),
                                   Tensor::zeros({1, 4}), Tensor::zeros({1, 4, 8, 6}));
                        },
                        "^kda_step: g\\[0,0,0\\] = 0.5 is positive"});
  return {row};
}

}  // namespace ebb::testing
