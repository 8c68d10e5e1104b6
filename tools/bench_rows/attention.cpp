// Benchmark rows of linear attention, softmax attention and what stands around them.
#include <cmath>

#include "ops/attention.h"
#include "ops/gated_linear_attention.h"
#include "ops/log_cumsum_exp.h"
#include "ops/rotary.h"
#include "tools/bench.h"

namespace ebb::tools {
namespace {

using Inputs = std::span<const Var>;
using Where = BenchRow::Where;
enum class Key { own, shared };

// Decays as gates give them; without a key of its own k is 1 − e^g.
BenchCase linear_attention_case(DType t, LinearAttentionSize s, Key key = Key::own) {
  const bool shared = key == Key::shared;
  const LinearAttentionOptions options{.scale = 1 / std::sqrt(double(s.key_dim))};
  const Shape qk{s.batch, s.time, s.groups, s.key_dim};
  const Shape gates{s.batch, s.time, s.heads};
  BenchCase c;
  c.inputs = {{.shape = qk},
              {.shape = {s.batch, s.time, s.heads, s.value_dim}},
              {.shape = s.by_channel ? Shape{s.batch, s.time, s.heads, s.key_dim} : gates,
               .low = -0.2,
               .high = -0.001,
               .f32 = true}};
  if (!shared) c.inputs.push_back({.shape = qk});
  c.run = [options, shared](Inputs in) {
    return std::vector{
        gated_linear_attention(in[0], shared ? Var() : in[3], in[1], in[2], {}, options).o};
  };
  c.cost = [=](Pass p) {
    Cost cost = gated_linear_attention_cost(p, s, t);  // counts k, and dk in the backward pass
    if (shared) cost.bytes -= double(qk.numel() * item_size(t) * (p == Pass::forward ? 1 : 2));
    return cost;
  };
  return c;
}

// One token for each of `batch` sequences; the state is f32 and updated in place.
BenchCase linear_attention_step_case(DType t, LinearAttentionSize s) {
  const auto constant = [](const Shape& shape) {
    return BenchInput{.shape = shape, .role = Role::constant};
  };
  const Shape keys{s.batch, s.groups, s.key_dim};
  BenchInput decay =
      constant(s.by_channel ? Shape{s.batch, s.heads, s.key_dim} : Shape{s.batch, s.heads});
  BenchInput state = constant({s.batch, s.heads, s.key_dim, s.value_dim});
  decay.low = -0.2, decay.high = -0.001, decay.f32 = state.f32 = true;
  return {.inputs = {constant(keys), constant(keys), constant({s.batch, s.heads, s.value_dim}),
                     decay, state},
          .run =
              [](Inputs in) {
                return std::vector{Var(gated_linear_attention_step(
                    in[0].value(), in[1].value(), in[2].value(), in[3].value(), in[4].value()))};
              },
          .cost = [=](Pass) { return gated_linear_attention_step_cost(s, t); },
          .backward = false};
}

BenchCase attention_case(DType t, AttentionSize s) {
  const Shape keys{s.batch, s.time, s.key_heads, s.head_dim};
  return {.inputs = {{.shape = {s.batch, s.time, s.heads, s.head_dim}},
                     {.shape = keys},
                     {.shape = keys}},
          .run =
              [s](Inputs in) {
                return std::vector{attention(in[0], in[1], in[2], {.window = s.window}).o};
              },
          .cost = [=](Pass p) { return attention_cost(p, s, t); }};
}

// One token of each sequence against a full cache of s.time tokens.
BenchCase attention_step_case(DType t, AttentionSize s) {
  const auto fixed = [](Shape shape) {
    return BenchInput{.shape = std::move(shape), .role = Role::constant};
  };
  const Shape cache{s.batch, s.time, s.key_heads, s.head_dim};
  return {
      .inputs = {fixed({s.batch, s.heads, s.head_dim}), fixed({s.batch, s.key_heads, s.head_dim}),
                 fixed({s.batch, s.key_heads, s.head_dim}), fixed(cache), fixed(cache)},
      .run =
          [s](Inputs in) {
            const Tensor last =
                Tensor::full({s.batch}, double(s.time - 1), DType::i64, in[0].value().device());
            return std::vector<Var>{attention_step(in[0].value(), in[1].value(), in[2].value(),
                                                   in[3].value(), in[4].value(), last)};
          },
      .cost = [=](Pass) { return attention_step_cost(s, t); },
      .backward = false};
}

BenchCase rotary_case(DType t, Shape x, RotaryForm form = RotaryForm::rotate) {
  return {.inputs = {{.shape = x}},
          .run = [form](Inputs in) { return std::vector{rotary(in[0], {.form = form})}; },
          .cost = [=](Pass p) { return rotary_cost(p, x.numel(), form, t); }};
}

BenchCase log_cumsum_exp_case(DType t, Shape u) {
  return {.inputs = {{.shape = u}},
          .run =
              [](Inputs in) {
                const LogCumsumExp r = log_cumsum_exp(in[0], {});
                return std::vector{r.k, r.g};
              },
          .cost = [=](Pass p) { return log_cumsum_exp_cost(p, u.numel(), t); }};
}

// The decay study's heads at 160M parameters.
LinearAttentionSize study_size(bool by_channel = false) {
  return {.batch = 8,
          .time = 4096,
          .groups = 6,
          .heads = 6,
          .key_dim = 128,
          .value_dim = 128,
          .by_channel = by_channel};
}

}  // namespace

std::vector<BenchRow> attention_bench_rows() {
  return {
      {"gated_linear_attention", "B8 T4096 H6 K64 V128",
       [](DType t) {
         return linear_attention_case(
             t,
             {.batch = 8, .time = 4096, .groups = 6, .heads = 6, .key_dim = 64, .value_dim = 128});
       },
       Where::cuda},
      {"gated_linear_attention", "B8 T4096 H16 K128 V64",
       [](DType t) {
         return linear_attention_case(t, {.batch = 8,
                                          .time = 4096,
                                          .groups = 16,
                                          .heads = 16,
                                          .key_dim = 128,
                                          .value_dim = 64});
       },
       Where::cuda},
      {"gated_linear_attention", "B8 T4096 H8 K64 V64 by channel",
       [](DType t) {
         return linear_attention_case(
             t, {.batch = 8, .time = 4096, .groups = 8, .heads = 8, .by_channel = true});
       },
       Where::cuda},
      {"gated_linear_attention", "B8 T4096 H8 K64 V64 by channel, shared key",
       [](DType t) {
         return linear_attention_case(
             t, {.batch = 8, .time = 4096, .groups = 8, .heads = 8, .by_channel = true},
             Key::shared);
       },
       Where::cuda},
      {"gated_linear_attention", "B8 T4096 H6 K128 V128",
       [](DType t) { return linear_attention_case(t, study_size()); }, Where::cuda},
      {"gated_linear_attention", "B8 T4096 H6 K128 V128 by channel",
       [](DType t) { return linear_attention_case(t, study_size(true)); }, Where::cuda},
      {"gated_linear_attention_step", "B64 H8 K64 V64 by channel",
       [](DType t) {
         return linear_attention_step_case(
             t, {.batch = 64, .groups = 8, .heads = 8, .by_channel = true});
       },
       Where::cuda},
      {"gated_linear_attention_step", "B64 H16 K128 V64",
       [](DType t) {
         return linear_attention_step_case(
             t, {.batch = 64, .groups = 16, .heads = 16, .key_dim = 128});
       },
       Where::cuda},
      {"attention", "B8 T4096 H8 D64",
       [](DType t) {
         return attention_case(t, {.batch = 8, .time = 4096, .heads = 8, .key_heads = 8});
       },
       Where::cuda},
      {"attention", "B8 T4096 H16 D32",
       [](DType t) {
         return attention_case(
             t, {.batch = 8, .time = 4096, .heads = 16, .key_heads = 16, .head_dim = 32});
       },
       Where::cuda},
      {"attention", "B8 T4096 H6 D128",
       [](DType t) {
         return attention_case(
             t, {.batch = 8, .time = 4096, .heads = 6, .key_heads = 6, .head_dim = 128});
       },
       Where::cuda},
      {"attention", "B8 T4096 H8 D64 window 512",
       [](DType t) {
         return attention_case(
             t, {.batch = 8, .time = 4096, .heads = 8, .key_heads = 8, .window = 512});
       },
       Where::cuda},
      {"attention", "B1 T1024 H8 D64",
       [](DType t) {
         return attention_case(t, {.batch = 1, .time = 1024, .heads = 8, .key_heads = 8});
       },
       Where::cpu},
      {"attention_step", "B64 T2048 H8 D64",
       [](DType t) {
         return attention_step_case(t, {.batch = 64, .time = 2048, .heads = 8, .key_heads = 8});
       },
       Where::cuda},
      {"rotary", "8x4096x8x64",
       [](DType t) {
         return rotary_case(t, {8, 4096, 8, 64});
       },
       Where::cuda},
      {"rotary", "8x4096x6x128 cosine",
       [](DType t) {
         return rotary_case(t, {8, 4096, 6, 128}, RotaryForm::cosine);
       },
       Where::cuda},
      {"rotary", "1x1024x8x64",
       [](DType t) {
         return rotary_case(t, {1, 1024, 8, 64});
       },
       Where::cpu},
      {"log_cumsum_exp", "8x4096x6",
       [](DType t) {
         return log_cumsum_exp_case(t, {8, 4096, 6});
       },
       Where::cuda},
      {"log_cumsum_exp", "1x1024x512",
       [](DType t) {
         return log_cumsum_exp_case(t, {1, 1024, 512});
       },
       Where::cpu},
      {"log_cumsum_exp", "8x4096x512",
       [](DType t) {
         return log_cumsum_exp_case(t, {8, 4096, 512});
       },
       Where::cuda},
      {"gated_linear_attention", "B1 T1024 H8 K64 V64 by channel",
       [](DType t) {
         return linear_attention_case(
             t, {.batch = 1, .time = 1024, .groups = 8, .heads = 8, .by_channel = true});
       },
       Where::cpu},
  };
}

}  // namespace ebb::tools
