// Rows of gated linear attention and of SSD.
#include <cmath>

#include "ops/gated_linear_attention.h"
#include "ops/ssd.h"
#include "tests/op_rows/linear_attention_inputs.h"
#include "tests/reference/linear_attention.h"

namespace ebb::testing {
namespace {

using Case = LinearAttentionCase;

std::vector<Var> outputs(const Var& o, const Var& ht, const Var& contributions) {
  std::vector<Var> all{o};
  if (ht) all.push_back(ht);
  if (contributions) all.push_back(contributions);
  return all;
}
std::vector<Tensor> outputs(const reference::LinearAttention& r, const Case& s) {
  std::vector<Tensor> all{r.o};
  if (s.final_state) all.push_back(r.ht);
  if (s.memory) all.push_back(r.contributions);
  return all;
}

OpCase attention_case(Draw& draw, const Case& s) {
  OpCase c;
  c.name = s.name;
  const double scale = 1 / std::sqrt(double(s.key_dim));
  const Shape gates = s.gates();
  const auto when = [](bool on, Tensor t) { return on ? t : Tensor(); };
  c.inputs = {{"q", draw.normal(s.keys())},
              {"k", when(!s.shared, draw.normal(s.keys()))},
              {"v", draw.normal(s.values())},
              {.name = "g",
               .value = when(s.decay != Decay::none, log_decays(draw, gates, s.decay)),
               .parameter = true},
              {.name = "h0", .value = when(s.h0, draw.normal(s.state())), .parameter = true},
              {.name = "weight",
               .value = when(s.weight, draw.uniform(s.values().first(3), 0.1, 1)),
               .parameter = true},
              {.name = "skip", .value = when(s.skip, draw.normal({s.heads})), .parameter = true}};
  // A decay of exactly 1 is a constant here: finite differences would make g positive.
  c.run = [s, scale, gates](std::span<const Var> in) {
    const Var g =
        in[3] ? in[3] : Var(Tensor::zeros(gates, accumulate_type(in[0].dtype()), in[0].device()));
    const LinearAttentionOutput r = gated_linear_attention(in[0], in[1], in[2], g, in[4],
                                                           {.scale = scale,
                                                            .want_final_state = s.final_state,
                                                            .layout = s.layout(in[0].device()),
                                                            .chunk = s.chunk,
                                                            .memory_chunk = s.memory,
                                                            .weight = in[5],
                                                            .skip = in[6]});
    return outputs(r.o, r.ht, r.contributions);
  };
  c.reference = [s, scale, gates](std::span<const Tensor> in) {
    const Tensor g = in[3] ? in[3] : Tensor::zeros(gates, DType::f64);
    const Tensor k = in[1] ? in[1] : reference::shared_key(g);
    return outputs(reference::LinearAttention(
                       {in[0], k, in[2], g, in[4], in[5], in[6], scale, s.cu, s.memory}),
                   s);
  };
  c.jacobian = s.batch * s.time * s.heads * s.value_dim <= 12;
  return c;
}

// Δ and A Δ by the formula.
struct Steps {
  Steps(const Case& s, const Tensor& dt, const Tensor& A, const Tensor& bias)
      : step(dt.clone()), decay(dt.clone()) {
    for (int64_t i = 0; i < dt.numel(); ++i) {
      const int64_t h = i % s.heads;
      const double y = dt.data<double>()[i] + (bias ? bias.data<double>()[h] : 0);
      const double raw = s.softplus ? std::log1p(std::exp(-std::abs(y))) + std::max(y, 0.0) : y;
      const double a = A.data<double>()[h];
      step.data<double>()[i] = std::min(std::max(raw, s.dt_min), s.dt_max);
      decay.data<double>()[i] = (s.log_A ? -std::exp(a) : a) * step.data<double>()[i];
    }
  }
  Tensor step, decay;
};

OpCase ssd_case(Draw& draw, const Case& s) {
  OpCase c;
  c.name = s.name;
  const Shape gates = s.values().first(3);
  const auto when = [](bool on, Tensor t) { return on ? t : Tensor(); };
  c.inputs = {
      {"x", draw.normal(s.values())},
      {.name = "dt",
       .value = s.softplus ? draw.normal(gates, 1, s.dt_mean) : draw.uniform(gates, 0.01, 1),
       .parameter = true},
      {.name = "A",
       .value = s.log_A ? draw.uniform({s.heads}, -1, 2.7)
                        : draw.uniform({s.heads}, s.a_min, s.a_min / 60),
       .parameter = true},
      {"B", draw.normal(s.keys())},
      {"C", draw.normal(s.keys(), 1 / std::sqrt(double(s.key_dim)))},
      {.name = "h0", .value = when(s.h0, draw.normal(s.state())), .parameter = true},
      {.name = "D", .value = when(s.skip, draw.normal({s.heads})), .parameter = true},
      {.name = "dt_bias", .value = when(s.bias, draw.normal({s.heads}, 0.5)), .parameter = true}};
  c.run = [s](std::span<const Var> in) {
    const SsdOutput r = ssd(in[0], in[1], in[2], in[3], in[4], in[5],
                            {.D = in[6],
                             .dt_bias = in[7],
                             .softplus = s.softplus,
                             .dt_min = s.dt_min,
                             .dt_max = s.dt_max,
                             .log_A = s.log_A,
                             .want_final_state = s.final_state,
                             .layout = s.layout(in[0].device()),
                             .chunk = s.chunk,
                             .memory_chunk = s.memory});
    return outputs(r.y, r.ht, r.contributions);
  };
  c.reference = [s](std::span<const Tensor> in) {
    const Steps steps(s, in[1], in[2], in[7]);
    return outputs(reference::LinearAttention({in[4], in[3], in[0], steps.decay, in[5], steps.step,
                                               in[6], 1, s.cu, s.memory}),
                   s);
  };
  c.jacobian = s.batch * s.time * s.heads * s.value_dim <= 12;
  return c;
}

// One valid call with one thing changed.
struct Call {
  Tensor q = Tensor::zeros({1, 4, 2, 8}), k = Tensor::zeros({1, 4, 2, 8});
  Tensor v = Tensor::zeros({1, 4, 4, 6}), g = Tensor::zeros({1, 4, 4}), h0 = {};
  LinearAttentionOptions options = {};
  void operator()() const { gated_linear_attention(q, k, v, g, h0, options); }
};
struct SsdCall {
  Tensor x = Tensor::zeros({1, 4, 4, 6}), dt = Tensor::zeros({1, 4, 4});
  Tensor A = Tensor::full({4}, -1), B = Tensor::zeros({1, 4, 2, 8}),
         C = Tensor::zeros({1, 4, 2, 8});
  Tensor h0 = {};
  SsdOptions options = {};
  void operator()() const { ssd(x, dt, A, B, C, h0, options); }
};

template <class CallType>
OpError error(const std::string& op, const char* name, const char* pattern,
              std::function<void(CallType&)> change) {
  return {name,
          [change] {
            CallType call;
            change(call);
            call();
          },
          "^" + op + ": " + pattern};
}

std::vector<OpError> attention_errors() {
  const auto e = [](const char* name, const char* pattern, std::function<void(Call&)> change) {
    return error<Call>("gated_linear_attention", name, pattern, change);
  };
  return {
      e("k", "k is \\[1,4,2,7\\], want \\[1,4,2,8\\]",
        [](Call& c) {
          c.k = Tensor::zeros({1, 4, 2, 7});
        }),
      e("heads", "3 value heads over 2 q/k heads; want a multiple",
        [](Call& c) {
          c.v = Tensor::zeros({1, 4, 3, 6});
        }),
      e("width", "head size V is 257, want 1\\.\\.\\.256",
        [](Call& c) {
          c.v = Tensor::zeros({1, 4, 4, 257});
        }),
      e("gate_shape", "g is \\[1,4,2\\], want \\[1,4,4\\]",
        [](Call& c) {
          c.g = Tensor::zeros({1, 4, 2});
        }),
      e("weight_shape", "weight is \\[4,4\\], want \\[1,4,4\\]",
        [](Call& c) {
          c.options.weight = Tensor::zeros({4, 4});
        }),
      e("skip_dtype", "skip is bf16, want f32 beside f32 values",
        [](Call& c) { c.options.skip = Tensor::zeros({4}, DType::bf16); }),
      e("state", "h0 is \\[1,4,6,8\\], want \\[1,4,8,6\\]",
        [](Call& c) {
          c.h0 = Tensor::zeros({1, 4, 6, 8});
        }),
      e("undefined", "v is undefined", [](Call& c) { c.v = {}; }),
      e("chunk", "chunk is 0, want at least 1", [](Call& c) { c.options.chunk = 0; }),
      e("memory", "memory_chunk is -1, want 1\\.\\.\\.2\\^30, or 0 for none",
        [](Call& c) { c.options.memory_chunk = -1; }),
      e("layout", "cu_seqlens ends at 3, the input has 1x4 tokens",
        [](Call& c) {
          c.options.layout = SeqLayout::packed({0, 3});
        }),
      e("positive", "g\\[0,2,3\\] = 0.5 is positive; want log decays <= 0",
        [](Call& c) { c.g.select(1, 2).select(1, 3).fill_(0.5); }),
      e("channel_gate", "g is \\[1,4,4,7\\], want \\[1,4,4,8\\]",
        [](Call& c) {
          c.g = Tensor::zeros({1, 4, 4, 7});
        }),
      e("channel_weight", "weight, skip and memory_chunk belong to one decay per head",
        [](Call& c) {
          c.g = Tensor::zeros({1, 4, 4, 8});
          c.options.weight = Tensor::zeros({1, 4, 4});
        }),
      e("shared_heads", "k is shared with the decays of 4 heads, q has 2; want as many",
        [](Call& c) {
          c.g = Tensor::zeros({1, 4, 4, 8});
          c.k = {};
        }),
      e("channel_positive", "g\\[0,2,3,1\\] = 0.5 is positive; want log decays <= 0",
        [](Call& c) {
          c.g = Tensor::zeros({1, 4, 4, 8});
          c.g.select(1, 2).select(1, 3).select(1, 1).fill_(0.5);
        }),
      {"step_state",
       [] {
         gated_linear_attention_step(Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 2, 8}),
                                     Tensor::zeros({1, 4, 6}), Tensor::zeros({1, 4}),
                                     Tensor::zeros({1, 4, 6, 8}));
       },
       "^gated_linear_attention_step: state is \\[1,4,6,8\\], want \\[1,4,8,6\\]"},
      {"step_positive",
       [] {
         gated_linear_attention_step(Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 2, 8}),
                                     Tensor::zeros({1, 4, 6}), Tensor::full({1, 4}, 0.5),
                                     Tensor::zeros({1, 4, 8, 6}));
       },
       "^gated_linear_attention_step: g\\[0,0\\] = 0.5 is positive"},
  };
}

std::vector<OpError> ssd_errors() {
  const auto e = [](const char* name, const char* pattern, std::function<void(SsdCall&)> change) {
    return error<SsdCall>("ssd", name, pattern, change);
  };
  return {
      e("dt_shape", "dt is \\[1,4,2\\], want \\[1,4,4\\]",
        [](SsdCall& c) {
          c.dt = Tensor::zeros({1, 4, 2});
        }),
      e("dt_dtype", "dt is f64, want f32 or f32",
        [](SsdCall& c) {
          c.dt = Tensor::zeros({1, 4, 4}, DType::f64);
        }),
      e("A_shape", "A is \\[2\\], want \\[4\\]", [](SsdCall& c) { c.A = Tensor::full({2}, -1); }),
      e("A_dtype", "A is bf16, want f32 beside f32 values",
        [](SsdCall& c) { c.A = c.A.to(DType::bf16); }),
      e("A_positive", "A\\[2\\] = 0.5 is positive; want A <= 0",
        [](SsdCall& c) { c.A.select(0, 2).fill_(0.5); }),
      e("D", "D is \\[3\\], want \\[4\\]", [](SsdCall& c) { c.options.D = Tensor::zeros({3}); }),
      e("B", "B is \\[1,5,2,8\\], x is \\[1,4,4,6\\]; want the same sizes before the heads",
        [](SsdCall& c) {
          c.B = Tensor::zeros({1, 5, 2, 8});
        }),
      e("B_dtype", "B is f64, x f32; want one dtype",
        [](SsdCall& c) {
          c.B = Tensor::zeros({1, 4, 2, 8}, DType::f64);
        }),
      e("C", "B is \\[1,4,2,8\\], C \\[1,4,2,7\\]; want the same",
        [](SsdCall& c) {
          c.C = Tensor::zeros({1, 4, 2, 7});
        }),
      e("groups", "4 heads over 3 groups; want a multiple",
        [](SsdCall& c) {
          c.B = c.C = Tensor::zeros({1, 4, 3, 8});
        }),
      e("limits", "dt_min is 1, dt_max 0.5; want 0 <= dt_min <= dt_max",
        [](SsdCall& c) { c.options.dt_min = 1, c.options.dt_max = 0.5; }),
      {"step_dt",
       [] {
         ssd_step(Tensor::zeros({1, 4, 6}), Tensor::zeros({1, 3}), Tensor::full({4}, -1),
                  Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 2, 8}), Tensor::zeros({1, 4, 8, 6}));
       },
       "^ssd_step: dt is \\[1,3\\], want \\[1,4\\]"},
  };
}

}  // namespace

std::vector<OpRow> linear_attention_rows(Draw& draw) {
  OpRow attention{.op = "gated_linear_attention", .errors = attention_errors()};
  for (const Case& s : linear_attention_cases()) attention.cases.push_back(attention_case(draw, s));
  OpRow ssd_row{.op = "ssd", .errors = ssd_errors()};
  for (const Case& s : ssd_cases()) ssd_row.cases.push_back(ssd_case(draw, s));
  // Drawn last: the numbers of the other cases stay what they were.
  for (const Case& s : channel_attention_cases())
    attention.cases.push_back(attention_case(draw, s));
  return {attention, ssd_row};
}

}  // namespace ebb::testing
