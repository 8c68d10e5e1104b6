// Rows of the delta family.
#include "ops/delta_rule.h"

#include <cmath>

#include "tests/op_rows/delta_inputs.h"
#include "tests/reference/delta_rule.h"

namespace ebb::testing {
namespace {

struct GdnCase {
  std::string name = {};
  int64_t batch = 1, time = 1, heads = 1, value_heads = 1, key_dim = 8, value_dim = 8;
  std::vector<int64_t> cu = {};
  bool h0 = true, final_state = true;
  double beta_max = 1;
  Decay decay = Decay::usual;
  int64_t chunk = 64;
};

OpCase gdn_case(Draw& draw, const GdnCase& s) {
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
      {.name = "beta", .value = draw.uniform(v.first(3), 0.05, s.beta_max), .parameter = true},
      {.name = "g",
       .value = gated ? log_decays(draw, v.first(3), s.decay) : Tensor(),
       .parameter = true},
      {.name = "h0", .value = s.h0 ? draw.normal(state) : Tensor(), .parameter = true}};
  c.run = [s, scale](std::span<const Var> in) {
    // A decay of exactly 1 is a constant here: finite differences would make g positive.
    const Var g = in[4].defined() ? in[4] : Var(Tensor::zeros_like(in[3].value()));
    DeltaRuleOptions options{.scale = scale, .want_final_state = s.final_state, .chunk = s.chunk};
    if (!s.cu.empty()) options.layout = SeqLayout::packed(s.cu, in[0].device());
    const DeltaRuleOutput r = gated_delta_rule(in[0], in[1], in[2], g, in[3], in[5], options);
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

std::vector<OpCase> gdn_cases(Draw& draw) {
  const std::vector<GdnCase> list = {
      {.name = "t1",
       .batch = 2,
       .time = 1,
       .heads = 4,
       .value_heads = 8,
       .key_dim = 16,
       .value_dim = 32},
      {.name = "tiny", .time = 3, .key_dim = 2, .value_dim = 2},
      {.name = "t17_odd", .time = 17, .heads = 2, .value_heads = 2, .key_dim = 5, .value_dim = 7},
      {.name = "t63_nostate", .time = 63, .key_dim = 16, .h0 = false, .final_state = false},
      {.name = "t64", .batch = 2, .time = 64, .key_dim = 32, .value_dim = 16},
      {.name = "t65", .time = 65, .heads = 2, .value_heads = 2, .key_dim = 16, .value_dim = 32},
      {.name = "t97_noh0", .batch = 2, .time = 97, .key_dim = 16, .value_dim = 33, .h0 = false},
      {.name = "t130_nofinal", .time = 130, .key_dim = 24, .value_dim = 40, .final_state = false},
      {.name = "t200_k64_v128", .time = 200, .key_dim = 64, .value_dim = 128},
      {.name = "gva",
       .batch = 2,
       .time = 80,
       .heads = 2,
       .value_heads = 6,
       .key_dim = 16,
       .value_dim = 16},
      {.name = "packed",
       .batch = 1,
       .time = 200,
       .heads = 2,
       .value_heads = 2,
       .key_dim = 16,
       .value_dim = 24,
       .cu = {0, 0, 1, 66, 66, 130, 197, 200, 200}},
      {.name = "packed_gva",
       .batch = 2,
       .time = 70,
       .heads = 1,
       .value_heads = 2,
       .key_dim = 7,
       .value_dim = 5,
       .cu = {0, 65, 65, 140},
       .h0 = false},
      {.name = "neg_eigval", .time = 66, .key_dim = 16, .value_dim = 32, .beta_max = 2},
      {.name = "extreme", .time = 150, .key_dim = 16, .value_dim = 16, .decay = Decay::extreme},
      {.name = "ungated", .time = 100, .key_dim = 16, .value_dim = 16, .decay = Decay::none},
      {.name = "empty", .batch = 2, .time = 0, .heads = 2, .value_heads = 2},
      {.name = "chunk16", .time = 70, .key_dim = 16, .value_dim = 16, .chunk = 16},
      {.name = "chunk32", .time = 70, .key_dim = 16, .value_dim = 16, .chunk = 32},
      {.name = "chunk128", .time = 200, .key_dim = 16, .value_dim = 16, .chunk = 128},
      {.name = "k256_v256",
       .batch = 2,
       .time = 70,
       .key_dim = 256,
       .value_dim = 256,
       .cu = {0, 30, 35, 70, 140}},
  };
  std::vector<OpCase> cases;
  for (const GdnCase& s : list) cases.push_back(gdn_case(draw, s));
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
                                                Tensor::zeros({1, 4}), Tensor::zeros({1, 4, 6, 8}),
                                                1);
                        },
                        "^gated_delta_rule_step: state is \\[1,4,6,8\\], want \\[1,4,8,6\\]"});
  row.errors.push_back({"step_positive",
                        [] {
                          gated_delta_rule_step(Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 2, 8}),
                                                Tensor::zeros({1, 4, 6}), Tensor::full({1, 4}, 0.5),
                                                Tensor::zeros({1, 4}), Tensor::zeros({1, 4, 8, 6}),
                                                1);
                        },
                        "^gated_delta_rule_step: g\\[0,0\\] = 0.5 is positive"});
  return {row};
}

}  // namespace ebb::testing
