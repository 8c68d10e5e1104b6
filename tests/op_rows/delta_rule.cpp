// Rows of the delta family.
#include "ops/delta_rule.h"

#include <cmath>

#include "autograd/tape.h"
#include "ops/movement.h"
#include "tests/op_rows/delta_inputs.h"
#include "tests/reference/delta_rule.h"

namespace ebb::testing {
namespace {

OpCase gdn_case(Draw& draw, const DeltaCase& s) {
  OpCase c;
  c.name = s.name;
  const Shape qk{s.batch, s.time, s.heads, s.key_dim};
  const Shape v{s.batch, s.time, s.value_heads, s.value_dim};
  const int64_t n = s.cu.empty() ? s.batch : int64_t(s.cu.size()) - 1;
  const Shape state{n, s.value_heads, s.key_dim, s.value_dim};
  const double scale = 1 / std::sqrt(double(s.key_dim));
  const bool gated = s.decay != Decay::none;
  c.inputs = {
      {"q", unit_rows(draw.normal(qk))},
      {"k", unit_rows(draw.normal(qk))},
      {"v", draw.normal(v)},
      {.name = "beta", .value = draw.uniform(v.first(3), 0.05, s.erase_max), .parameter = true},
      {.name = "g",
       .value = gated ? log_decays(draw, v.first(3), s.decay) : Tensor(),
       .parameter = true},
      {.name = "h0", .value = s.h0 ? draw.normal(state) : Tensor(), .parameter = true}};
  c.run = [s](std::span<const Var> in) {
    // A decay of exactly 1 is a constant here: finite differences would make g positive.
    const Var g = in[4].defined() ? in[4] : Var(Tensor::zeros_like(in[3].value()));
    const DeltaRuleOutput r =
        gated_delta_rule(in[0], in[1], in[2], g, in[3], in[5], options_of(s, in[0].device()));
    return s.final_state ? std::vector{r.o, r.ht} : std::vector{r.o};
  };
  c.reference = [s, scale](std::span<const Tensor> in) {
    const Tensor g = in[4].defined() ? in[4] : Tensor::zeros_like(in[3]);
    const reference::GatedDeltaRule r(in[0], in[1], in[2], g, in[3], in[5], scale, s.cu);
    return s.final_state ? std::vector{r.o, r.ht} : std::vector{r.o};
  };
  c.jacobian = s.batch * s.time * s.value_heads * s.value_dim <= 12;
  return c;
}

// Normalisation, raw gate and sigmoid as options of the operator: against the same in f64 by hand.
// Six heads, since the gradients of A_log and dt_bias are sums over a head's tokens: of one or two
// heads they can nearly cancel, and an error relative to what is left says nothing.
struct RawCase {
  std::string name = {};
  int64_t heads = 6, key_dim = 16, value_dim = 24;
  std::vector<int64_t> cu = {};
  double beta_scale = 1, bound = 0;
  bool recompute = false;
  bool projection = false;  // q, k, v are columns of one matrix, the gates' logits of another
};
std::vector<RawCase> raw_cases() {
  return {{.name = "raw"},
          {.name = "raw_odd", .key_dim = 7, .value_dim = 5},
          {.name = "raw_gva_k128", .heads = 2, .key_dim = 128, .value_dim = 8},
          {.name = "raw_columns", .cu = {0, 30, 95, 95, 160}, .beta_scale = 2, .projection = true},
          {.name = "raw_bounded", .beta_scale = 2, .bound = -5, .recompute = true}};
}

OpCase raw_case(Draw& draw, const RawCase& s) {
  constexpr int64_t kValueHeads = 6, kBatch = 2, kTime = 80;
  const int64_t keys = s.heads * s.key_dim, values = kValueHeads * s.value_dim;
  const Shape qk{kBatch, kTime, s.heads, s.key_dim}, gates{kBatch, kTime, kValueHeads};
  const Shape v{kBatch, kTime, kValueHeads, s.value_dim};
  OpCase c;
  c.name = s.name;
  if (s.projection)
    c.inputs = {{"qkv", draw.normal({kBatch, kTime, 2 * keys + values})},
                {"zb", draw.normal({kBatch, kTime, 2 * kValueHeads})}};
  else
    c.inputs = {{"q", draw.normal(qk)},
                {"k", draw.normal(qk)},
                {"v", draw.normal(v)},
                {"z", draw.normal(gates)},
                {"b", draw.normal(gates)}};
  c.inputs.push_back(
      {.name = "A_log", .value = draw.uniform({kValueHeads}, -1, 0.5), .parameter = true});
  c.inputs.push_back({.name = "dt_bias", .value = draw.normal({kValueHeads}), .parameter = true});
  // q, k, v, z, b.
  const auto parts = [=](std::span<const Var> in) -> std::vector<Var> {
    if (!s.projection) return {in[0], in[1], in[2], in[3], in[4]};
    const std::vector<Var> qkv = split(in[0], -1, {keys, keys, values});
    const std::vector<Var> zb = split(in[1], -1, 2);
    return {reshape(qkv[0], qk), reshape(qkv[1], qk), reshape(qkv[2], v), zb[0], zb[1]};
  };
  c.run = [=](std::span<const Var> in) {
    const std::vector<Var> x = parts(in);
    DeltaRuleOptions options{.scale = 0.4, .want_final_state = true, .recompute = s.recompute};
    options.normalize_qk = options.sigmoid = true;
    options.beta_scale = s.beta_scale, options.lower_bound = s.bound;
    options.A_log = in[in.size() - 2], options.dt_bias = in[in.size() - 1];
    if (!s.cu.empty()) options.layout = SeqLayout::packed(s.cu, in[0].device());
    const DeltaRuleOutput r = gated_delta_rule(x[0], x[1], x[2], x[3], x[4], {}, options);
    return std::vector{r.o, r.ht};
  };
  c.reference = [=](std::span<const Tensor> in) {
    const NoGrad off;
    std::vector<Var> all(in.begin(), in.end());
    const std::vector<Var> x = parts(all);
    const auto dense = [&](int i) { return x[size_t(i)].value().contiguous(); };
    const Tensor g = decays_of_logits(dense(3), in[in.size() - 2], in[in.size() - 1], 1, s.bound);
    const reference::GatedDeltaRule r(normalized_rows(dense(0)), normalized_rows(dense(1)),
                                      dense(2), g, scaled_sigmoid(dense(4), s.beta_scale), {}, 0.4,
                                      s.cu);
    return std::vector{r.o, r.ht};
  };
  return c;
}

std::vector<OpCase> gdn_cases(Draw& draw) {
  std::vector<OpCase> cases;
  for (const DeltaCase& s : delta_cases()) cases.push_back(gdn_case(draw, s));
  for (const RawCase& s : raw_cases()) cases.push_back(raw_case(draw, s));
  return cases;
}

// One valid call with one thing changed.
struct Call {
  Tensor q = Tensor::zeros({1, 4, 2, 8}), k = Tensor::zeros({1, 4, 2, 8});
  Tensor v = Tensor::zeros({1, 4, 4, 6}), g = Tensor::zeros({1, 4, 4});
  Tensor beta = Tensor::zeros({1, 4, 4}), h0 = {};
  DeltaRuleOptions options = {};
  void operator()() const { gated_delta_rule(q, k, v, g, beta, h0, options); }
};

template <class F>
OpError error(const char* name, const char* pattern, F&& change) {
  return {name,
          [change] {
            Call call;
            change(call);
            call();
          },
          std::string("^gated_delta_rule: ") + pattern};
}

}  // namespace

std::vector<OpRow> delta_rule_rows(Draw& draw) {
  OpRow row{.op = "delta_rule", .cases = gdn_cases(draw)};
  row.errors = {
      error("k", "k is \\[1,4,2,7\\], want \\[1,4,2,8\\]",
            [](Call& c) {
              c.k = Tensor::zeros({1, 4, 2, 7});
            }),
      error("time", "v is \\[1,5,4,6\\], q is \\[1,4,2,8\\]",
            [](Call& c) {
              c.v = Tensor::zeros({1, 5, 4, 6});
            }),
      error("heads", "3 value heads over 2 q/k heads; want a multiple",
            [](Call& c) {
              c.v = Tensor::zeros({1, 4, 3, 6});
            }),
      error("width", "head size V is 257, want 1\\.\\.\\.256",
            [](Call& c) {
              c.v = Tensor::zeros({1, 4, 4, 257});
            }),
      error("dtype", "q is f32, k f64, v f32; want one dtype",
            [](Call& c) {
              c.k = Tensor::zeros({1, 4, 2, 8}, DType::f64);
            }),
      error("gate_shape", "g is \\[1,4,2\\], want \\[1,4,4\\]",
            [](Call& c) {
              c.g = Tensor::zeros({1, 4, 2});
            }),
      error("gate_dtype", "beta is bf16, want f32 beside f32 values",
            [](Call& c) {
              c.beta = Tensor::zeros({1, 4, 4}, DType::bf16);
            }),
      error("state", "h0 is \\[1,4,6,8\\], want \\[1,4,8,6\\]",
            [](Call& c) {
              c.h0 = Tensor::zeros({1, 4, 6, 8});
            }),
      error("undefined", "v is undefined", [](Call& c) { c.v = {}; }),
      error("chunk", "chunk is 48, want 16, 32, 64 or 128", [](Call& c) { c.options.chunk = 48; }),
      error("layout", "cu_seqlens ends at 3, the input has 1x4 tokens",
            [](Call& c) {
              c.options.layout = SeqLayout::packed({0, 3});
            }),
      error("positive", "g\\[0,2,3\\] = 0.5 is positive; want log decays <= 0",
            [](Call& c) { c.g.select(1, 2).select(1, 3).fill_(0.5); }),
  };
  row.errors.push_back({"step_state",
                        [] {
                          gated_delta_rule_step(Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 2, 8}),
                                                Tensor::zeros({1, 4, 6}), Tensor::zeros({1, 4}),
                                                Tensor::zeros({1, 4}), Tensor::zeros({1, 4, 6, 8}));
                        },
                        "^gated_delta_rule_step: state is \\[1,4,6,8\\], want \\[1,4,8,6\\]"});
  row.errors.push_back({"step_positive",
                        [] {
                          gated_delta_rule_step(Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 2, 8}),
                                                Tensor::zeros({1, 4, 6}), Tensor::full({1, 4}, 0.5),
                                                Tensor::zeros({1, 4}), Tensor::zeros({1, 4, 8, 6}));
                        },
                        "^gated_delta_rule_step: g\\[0,0\\] = 0.5 is positive"});
  return {row};
}

}  // namespace ebb::testing
