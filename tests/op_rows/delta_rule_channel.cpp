// Rows of the delta rule with a decay per channel: KDA and GDN2.
#include "ops/delta_rule_channel.h"

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
OpCase raw_case(Draw& draw, DeltaGates gates, double bound) {
  const bool kimi = gates == DeltaGates::kda;
  constexpr int64_t kHeads = 6;
  const Shape qk{2, 21, 3, 6}, v{2, 21, kHeads, 5}, wide{2, 21, kHeads, 6};
  OpCase c;
  c.name = std::string(kimi ? "kda_raw" : "gdn2_raw") + (bound < 0 ? "_bounded" : "");
  c.inputs = {{"q", draw.normal(qk)},
              {"k", draw.normal(qk)},
              {"v", draw.normal(v)},
              {"z", draw.normal(wide)},
              {"b", draw.normal(kimi ? v.first(3) : wide)},
              {"w", kimi ? Tensor() : draw.normal(v)},
              {.name = "A_log", .value = draw.uniform({kHeads}, -1, 0.5), .parameter = true},
              {.name = "dt_bias", .value = draw.normal({kHeads, 6}), .parameter = true}};
  c.run = [kimi, bound](std::span<const Var> in) {
    const DeltaRuleOptions options{.scale = 0.4,
                                   .want_final_state = true,
                                   .normalize_qk = true,
                                   .sigmoid = true,
                                   .beta_scale = 2,
                                   .A_log = in[6],
                                   .dt_bias = in[7],
                                   .lower_bound = bound};
    const DeltaRuleOutput r = kimi ? kda(in[0], in[1], in[2], in[3], in[4], {}, options)
                                   : gdn2(in[0], in[1], in[2], in[3], in[4], in[5], {}, options);
    return std::vector{r.o, r.ht};
  };
  c.reference = [kimi, bound, wide, v](std::span<const Tensor> in) {
    const Tensor g = decays_of_logits(in[3], in[6], in[7], 6, bound);
    const Tensor erase = scaled_sigmoid(in[4], 2);
    const Tensor write = kimi ? over_channels(erase, v) : scaled_sigmoid(in[5], 1);
    const reference::DeltaRule r({normalized_rows(in[0]),
                                  normalized_rows(in[1]),
                                  in[2],
                                  g,
                                  over_channels(erase, wide),
                                  write,
                                  {},
                                  0.4});
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
    for (const double bound : {0.0, -5.0}) row.cases.push_back(raw_case(draw, gates, bound));
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
