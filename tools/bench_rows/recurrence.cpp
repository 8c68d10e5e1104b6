// Benchmark rows of the delta rules, dplr, SSD and state-memory attention.
#include <cmath>

#include "ops/delta_rule.h"
#include "ops/delta_rule_channel.h"
#include "ops/dplr.h"
#include "ops/movement.h"
#include "ops/ssd.h"
#include "ops/state_memory_attention.h"
#include "tools/bench.h"

namespace ebb::tools {
namespace {

using Inputs = std::span<const Var>;
using Where = BenchRow::Where;

// Inputs as a model gives them: keys and queries of length 1, decays and betas from gates.
BenchCase delta_rule_case(DType t, DeltaRuleSize s) {
  const double unit = 1 / std::sqrt(double(s.key_dim));
  const Shape qk{s.batch, s.time, s.heads, s.key_dim};
  const Shape gates{s.batch, s.time, s.value_heads};
  return {.inputs = {{.shape = qk, .std = unit},
                     {.shape = qk, .std = unit},
                     {.shape = {s.batch, s.time, s.value_heads, s.value_dim}},
                     {.shape = gates, .low = -0.2, .high = -0.001, .f32 = true},
                     {.shape = gates, .low = 0.05, .high = 0.95, .f32 = true}},
          .run =
              [unit](Inputs in) {
                return std::vector{
                    gated_delta_rule(in[0], in[1], in[2], in[3], in[4], {}, {.scale = unit}).o};
              },
          .cost = [=](Pass p) { return gated_delta_rule_cost(p, s, t); }};
}

BenchCase channel_case(DType t, DeltaRuleSize s, DeltaGates kind) {
  const double unit = 1 / std::sqrt(double(s.key_dim));
  const bool kimi = kind == DeltaGates::kda;
  const Shape qk{s.batch, s.time, s.heads, s.key_dim}, heads{s.batch, s.time, s.value_heads};
  const Shape wide{s.batch, s.time, s.value_heads, s.key_dim};
  const Shape values{s.batch, s.time, s.value_heads, s.value_dim};
  BenchCase c;
  c.inputs = {{.shape = qk, .std = unit},
              {.shape = qk, .std = unit},
              {.shape = values},
              {.shape = wide, .low = -0.2, .high = -0.001, .f32 = true},
              {.shape = kimi ? heads : wide, .low = 0.05, .high = 0.95, .f32 = true}};
  if (!kimi) c.inputs.push_back({.shape = values, .low = 0.05, .high = 0.95, .f32 = true});
  c.run = [unit, kimi](Inputs in) {
    const DeltaRuleOptions options{.scale = unit};
    return std::vector{kimi ? kda(in[0], in[1], in[2], in[3], in[4], {}, options).o
                            : gdn2(in[0], in[1], in[2], in[3], in[4], in[5], {}, options).o};
  };
  c.cost = [=](Pass p) { return channel_delta_rule_cost(p, s, kind, t); };
  return c;
}

// One token for each of `batch` sequences; the state is f32 and updated in place.
BenchCase step_case(DType t, DeltaRuleSize s, bool by_channel) {
  const double unit = 1 / std::sqrt(double(s.key_dim));
  const auto fixed = [](Shape shape, double std) {
    return BenchInput{.shape = std::move(shape), .role = Role::constant, .std = std};
  };
  const auto gate = [](Shape shape, double low, double high) {
    return BenchInput{
        .shape = std::move(shape), .role = Role::constant, .low = low, .high = high, .f32 = true};
  };
  BenchInput state = fixed({s.batch, s.value_heads, s.key_dim, s.value_dim}, 1);
  state.f32 = true;
  const Shape heads{s.batch, s.value_heads}, qk{s.batch, s.heads, s.key_dim};
  return {
      .inputs = {fixed(qk, unit), fixed(qk, unit), fixed({s.batch, s.value_heads, s.value_dim}, 1),
                 gate(by_channel ? Shape{s.batch, s.value_heads, s.key_dim} : heads, -0.2, -0.001),
                 gate(heads, 0.05, 0.95), state},
      .run =
          [unit, by_channel](Inputs in) {
            const auto step = by_channel ? kda_step : gated_delta_rule_step;
            return std::vector{Var(step(in[0].value(), in[1].value(), in[2].value(), in[3].value(),
                                        in[4].value(), in[5].value(), {.scale = unit}))};
          },
      .cost =
          [=](Pass) {
            return by_channel ? channel_delta_rule_step_cost(s, DeltaGates::kda, t)
                              : gated_delta_rule_step_cost(s, t);
          },
      .backward = false};
}

// As a mixer calls it: q, k and v are columns of one matrix, and lengths, decays and strengths are
// the operator's own work. The floor is that of finished inputs.
enum class LogitsOf { gated_delta_rule, kda, gdn2 };
BenchCase logits_case(DType t, DeltaRuleSize s, LogitsOf rule) {
  const bool by_channel = rule != LogitsOf::gated_delta_rule, wide = rule == LogitsOf::gdn2;
  const int64_t keys = s.heads * s.key_dim, values = s.value_heads * s.value_dim;
  const int64_t channels = s.value_heads * (by_channel ? s.key_dim : 1);
  const Shape qk{s.batch, s.time, s.heads, s.key_dim};
  const Shape v{s.batch, s.time, s.value_heads, s.value_dim}, heads = v.first(3);
  const Shape z = by_channel ? Shape{s.batch, s.time, s.value_heads, s.key_dim} : heads;
  BenchCase c;
  c.inputs = {{.shape = {s.batch, s.time, 2 * keys + values}},
              {.shape = z},
              {.shape = wide ? z : heads},
              {.shape = {s.value_heads}, .role = Role::parameter, .std = 0.1},
              {.shape = {channels}, .role = Role::parameter, .mean = -4, .std = 0.1}};
  if (wide) c.inputs.push_back({.shape = v});
  c.run = [=](Inputs in) {
    const std::vector<Var> x = split(in[0], -1, {keys, keys, values});
    const Var q = reshape(x[0], qk), k = reshape(x[1], qk), value = reshape(x[2], v);
    DeltaRuleOptions options{.scale = 1 / std::sqrt(double(s.key_dim))};
    options.normalize_qk = options.sigmoid = true;
    options.A_log = in[3], options.dt_bias = in[4];
    if (wide) return std::vector{gdn2(q, k, value, in[1], in[2], in[5], {}, options).o};
    return std::vector{
        (by_channel ? kda : gated_delta_rule)(q, k, value, in[1], in[2], {}, options).o};
  };
  c.cost = [=](Pass p) {
    return by_channel ? channel_delta_rule_cost(p, s, wide ? DeltaGates::gdn2 : DeltaGates::kda, t)
                      : gated_delta_rule_cost(p, s, t);
  };
  return c;
}

DeltaRuleSize delta_size(int64_t batch, int64_t time, int64_t heads, int64_t k, int64_t v) {
  return {.batch = batch,
          .time = time,
          .heads = heads,
          .value_heads = heads,
          .key_dim = k,
          .value_dim = v};
}

// RWKV-7's: a and b of length 1 at most, decays within the bound of its gate.
BenchCase dplr_case(DType t, DplrSize s, double lower_bound = -0.6066) {
  const double unit = 1 / std::sqrt(double(s.key_dim));
  const Shape keys{s.batch, s.time, s.heads, s.key_dim};
  return {
      .inputs = {{.shape = keys},
                 {.shape = keys, .low = -0.6, .high = -0.01, .f32 = true},
                 {.shape = keys, .std = unit},
                 {.shape = {s.batch, s.time, s.heads, s.value_dim}},
                 {.shape = keys, .std = unit},
                 {.shape = keys, .std = 0.5 * unit}},
      .run =
          [lower_bound](Inputs in) {
            return std::vector{
                dplr(in[0], in[1], in[2], in[3], in[4], in[5], {}, {.lower_bound = lower_bound}).o};
          },
      .cost = [=](Pass p) { return dplr_cost(p, s, t); }};
}

DplrSize wide_dplr(int64_t heads, int64_t key_dim) {
  return {.batch = 2, .time = 8192, .heads = heads, .key_dim = key_dim, .value_dim = 128};
}

BenchCase dplr_step_case(DType t, DplrSize s) {
  const double unit = 1 / std::sqrt(double(s.key_dim));
  const Shape keys{s.batch, s.heads, s.key_dim};
  const auto constant = [](const Shape& shape, double std) {
    return BenchInput{.shape = shape, .role = Role::constant, .std = std};
  };
  BenchInput decay = constant(keys, 1),
             state = constant({s.batch, s.heads, s.key_dim, s.value_dim}, 1);
  decay.low = -0.6, decay.high = -0.01, decay.f32 = state.f32 = true;
  return {.inputs = {constant(keys, 1), decay, constant(keys, unit),
                     constant({s.batch, s.heads, s.value_dim}, 1), constant(keys, unit),
                     constant(keys, 0.5 * unit), state},
          .run =
              [](Inputs in) {
                return std::vector{
                    Var(dplr_step(in[0].value(), in[1].value(), in[2].value(), in[3].value(),
                                  in[4].value(), in[5].value(), in[6].value()))};
              },
          .cost = [=](Pass) { return dplr_step_cost(s, t); },
          .backward = false};
}

// Steps of about 0.05, A_log as a model draws it; contributions in f32, as DART trains with them.
BenchCase ssd_case(DType t, LinearAttentionSize s, int64_t memory = 0) {
  const Shape keys{s.batch, s.time, s.groups, s.key_dim};
  const Shape heads{s.heads};
  return {.inputs = {{.shape = {s.batch, s.time, s.heads, s.value_dim}},
                     {.shape = {s.batch, s.time, s.heads}, .mean = -3},
                     {.shape = heads, .role = Role::parameter, .low = 0, .high = 2.7},
                     {.shape = keys},
                     {.shape = keys},
                     {.shape = heads, .role = Role::parameter},
                     {.shape = heads, .role = Role::parameter, .std = 0.1}},
          .run =
              [memory](Inputs in) {
                const SsdOutput r = ssd(in[0], in[1], in[2], in[3], in[4], {},
                                        {.D = in[5],
                                         .dt_bias = in[6],
                                         .log_A = true,
                                         .memory_chunk = memory,
                                         .wide_contributions = true});
                return memory ? std::vector{r.y, r.contributions} : std::vector{r.y};
              },
          .cost =
              [=](Pass p) {
                Cost c = ssd_cost(p, s, t);
                if (memory)  // written, or their gradient read
                  c.bytes += double(s.batch * ((s.time + memory - 1) / memory) * s.heads) *
                             double(s.key_dim * s.value_dim) * double(item_size(DType::f32));
                return c;
              }};
}

BenchCase ssd_step_case(DType t, LinearAttentionSize s) {
  const Shape keys{s.batch, s.groups, s.key_dim}, heads{s.heads};
  const auto constant = [](const Shape& shape, double mean, bool f32) {
    return BenchInput{.shape = shape, .role = Role::constant, .mean = mean, .f32 = f32};
  };
  return {.inputs = {constant({s.batch, s.heads, s.value_dim}, 0, false),
                     constant({s.batch, s.heads}, -3, false), constant(heads, 1, true),
                     constant(keys, 0, false), constant(keys, 0, false), constant(heads, 1, true),
                     constant(heads, 0, true),
                     constant({s.batch, s.heads, s.key_dim, s.value_dim}, 0, true)},
          .run =
              [](Inputs in) {
                return std::vector<Var>{ssd_step(in[0].value(), in[1].value(), in[2].value(),
                                                 in[3].value(), in[4].value(), in[7].value(),
                                                 {.D = in[5], .dt_bias = in[6], .log_A = true})};
              },
          .cost = [=](Pass) { return ssd_step_cost(s, t); },
          .backward = false};
}

// As DART trains it: shared vectors, a gate per token, the scan's read-out as base, contributions
// in f32.
BenchCase state_memory_case(DType t, StateMemorySize s) {
  const int64_t runs = (s.time + s.memory_chunk - 1) / s.memory_chunk;
  s.wide_contributions = true;
  return {
      .inputs = {{.shape = {s.batch, s.time, 1, s.state_dim}},
                 {.shape = {s.batch, s.time, 1, s.value_dim}},
                 {.shape = {s.batch, s.time, 1, s.state_dim}},
                 {.shape = {s.batch * runs, s.heads, s.state_dim, s.value_dim},
                  .std = 0.05,
                  .f32 = true},
                 {.shape = {s.batch, s.time, 1}},
                 {.shape = {s.batch, s.time, s.heads, s.value_dim}}},
      .run =
          [s](Inputs in) {
            return std::vector{state_memory_attention(in[0], in[1], in[2], in[3], s.memory_chunk,
                                                      {.gate = in[4], .base = in[5]})
                                   .o};
          },
      .cost = [=](Pass p) { return state_memory_attention_cost(p, s, t); }};
}

LinearAttentionSize mamba2_size(int64_t batch, int64_t time, int64_t heads) {
  return {.batch = batch, .time = time, .heads = heads, .key_dim = 128, .value_dim = 64};
}
// As the grid of associative recall trains them: width 64.
LinearAttentionSize recall_size(int64_t state) {
  return {.batch = 128, .time = 256, .heads = 2, .key_dim = state, .value_dim = 64};
}

}  // namespace

std::vector<BenchRow> recurrence_bench_rows() {
  return {
      {"gated_delta_rule", "B8 T4096 H6 K64 V128",
       [](DType t) { return delta_rule_case(t, delta_size(8, 4096, 6, 64, 128)); }, Where::cuda},
      {"gated_delta_rule", "B1 T32768 H6 K64 V128",
       [](DType t) { return delta_rule_case(t, delta_size(1, 32768, 6, 64, 128)); }, Where::cuda},
      {"gated_delta_rule", "B2 T8192 H16 K128 V128",
       [](DType t) { return delta_rule_case(t, delta_size(2, 8192, 16, 128, 128)); }, Where::cuda},
      {"gated_delta_rule", "B2 T8192 H8 K256 V256",
       [](DType t) { return delta_rule_case(t, delta_size(2, 8192, 8, 256, 256)); }, Where::cuda},
      {"gated_delta_rule", "B1 T32768 H4 K256 V128",
       [](DType t) { return delta_rule_case(t, delta_size(1, 32768, 4, 256, 128)); }, Where::cuda},
      {"gated_delta_rule_of_logits", "B8 T4096 H6 K64 V128",
       [](DType t) {
         return logits_case(t, delta_size(8, 4096, 6, 64, 128), LogitsOf::gated_delta_rule);
       },
       Where::cuda},
      {"kda_of_logits", "B8 T4096 H6 K64 V128",
       [](DType t) { return logits_case(t, delta_size(8, 4096, 6, 64, 128), LogitsOf::kda); },
       Where::cuda},
      {"gdn2_of_logits", "B8 T4096 H6 K64 V128",
       [](DType t) { return logits_case(t, delta_size(8, 4096, 6, 64, 128), LogitsOf::gdn2); },
       Where::cuda},
      {"kda", "B8 T4096 H6 K64 V128",
       [](DType t) { return channel_case(t, delta_size(8, 4096, 6, 64, 128), DeltaGates::kda); },
       Where::cuda},
      {"kda", "B1 T32768 H6 K64 V128",
       [](DType t) { return channel_case(t, delta_size(1, 32768, 6, 64, 128), DeltaGates::kda); },
       Where::cuda},
      {"kda", "B2 T8192 H16 K128 V128",
       [](DType t) { return channel_case(t, delta_size(2, 8192, 16, 128, 128), DeltaGates::kda); },
       Where::cuda},
      {"kda", "B2 T8192 H8 K256 V128",
       [](DType t) { return channel_case(t, delta_size(2, 8192, 8, 256, 128), DeltaGates::kda); },
       Where::cuda},
      {"kda", "B1 T32768 H4 K256 V128",
       [](DType t) { return channel_case(t, delta_size(1, 32768, 4, 256, 128), DeltaGates::kda); },
       Where::cuda},
      {"gdn2", "B8 T4096 H6 K64 V128",
       [](DType t) { return channel_case(t, delta_size(8, 4096, 6, 64, 128), DeltaGates::gdn2); },
       Where::cuda},
      {"gdn2", "B2 T8192 H16 K128 V128",
       [](DType t) { return channel_case(t, delta_size(2, 8192, 16, 128, 128), DeltaGates::gdn2); },
       Where::cuda},
      {"gdn2", "B2 T8192 H8 K256 V128",
       [](DType t) { return channel_case(t, delta_size(2, 8192, 8, 256, 128), DeltaGates::gdn2); },
       Where::cuda},
      {"dplr", "B8 T4096 H8 K64 V64",
       [](DType t) { return dplr_case(t, {.batch = 8, .time = 4096, .heads = 8}); }, Where::cuda},
      {"dplr", "B8 T4096 H8 K64 V64 bound -4",
       [](DType t) { return dplr_case(t, {.batch = 8, .time = 4096, .heads = 8}, -4); },
       Where::cuda},
      {"dplr", "B8 T4096 H8 K64 V64 no bound",
       [](DType t) { return dplr_case(t, {.batch = 8, .time = 4096, .heads = 8}, 0); },
       Where::cuda},
      {"dplr", "B2 T8192 H32 K64 V64",
       [](DType t) { return dplr_case(t, {.batch = 2, .time = 8192, .heads = 32}); }, Where::cuda},
      {"dplr", "B2 T8192 H16 K128 V128", [](DType t) { return dplr_case(t, wide_dplr(16, 128)); },
       Where::cuda},
      {"dplr", "B2 T8192 H16 K128 V128 no bound",
       [](DType t) { return dplr_case(t, wide_dplr(16, 128), 0); }, Where::cuda},
      {"dplr", "B2 T8192 H8 K256 V128", [](DType t) { return dplr_case(t, wide_dplr(8, 256)); },
       Where::cuda},
      {"dplr_step", "B64 H8 K64 V64",
       [](DType t) { return dplr_step_case(t, {.batch = 64, .heads = 8}); }, Where::cuda},
      {"dplr", "B1 T1024 H8 K64 V64",
       [](DType t) { return dplr_case(t, {.batch = 1, .time = 1024, .heads = 8}); }, Where::cpu},
      {"ssd", "B8 T4096 H16 P64 N128",
       [](DType t) { return ssd_case(t, mamba2_size(8, 4096, 16)); }, Where::cuda},
      {"ssd", "B2 T8192 H64 P64 N128",
       [](DType t) { return ssd_case(t, mamba2_size(2, 8192, 64)); }, Where::cuda},
      {"ssd", "B8 T4096 H16 P64 N128 S256",
       [](DType t) { return ssd_case(t, mamba2_size(8, 4096, 16), 256); }, Where::cuda},
      {"ssd", "B8 T4096 H16 P64 N128 S64",
       [](DType t) { return ssd_case(t, mamba2_size(8, 4096, 16), 64); }, Where::cuda},
      {"ssd", "B8 T4096 H16 P64 N128 S32",
       [](DType t) { return ssd_case(t, mamba2_size(8, 4096, 16), 32); }, Where::cuda},
      {"ssd", "B128 T256 H2 P64 N16", [](DType t) { return ssd_case(t, recall_size(16)); },
       Where::cuda},
      {"ssd", "B128 T256 H2 P64 N16 S16", [](DType t) { return ssd_case(t, recall_size(16), 16); },
       Where::cuda},
      {"ssd", "B128 T256 H2 P64 N64 S16", [](DType t) { return ssd_case(t, recall_size(64), 16); },
       Where::cuda},
      {"ssd_step", "B64 H16 P64 N128",
       [](DType t) { return ssd_step_case(t, mamba2_size(64, 1, 16)); }, Where::cuda},
      {"ssd_step", "B256 H16 P64 N128",
       [](DType t) { return ssd_step_case(t, mamba2_size(256, 1, 16)); }, Where::cuda},
      {"ssd", "B1 T1024 H16 P64 N128",
       [](DType t) { return ssd_case(t, mamba2_size(1, 1024, 16)); }, Where::cpu},
      {"gated_delta_rule_step", "B64 H6 K64 V128",
       [](DType t) { return step_case(t, delta_size(64, 1, 6, 64, 128), false); }, Where::cuda},
      {"gated_delta_rule_step", "B256 H6 K64 V128",
       [](DType t) { return step_case(t, delta_size(256, 1, 6, 64, 128), false); }, Where::cuda},
      {"kda_step", "B64 H6 K64 V128",
       [](DType t) { return step_case(t, delta_size(64, 1, 6, 64, 128), true); }, Where::cuda},
      {"kda_step", "B256 H6 K64 V128",
       [](DType t) { return step_case(t, delta_size(256, 1, 6, 64, 128), true); }, Where::cuda},
      {"state_memory_attention", "B8 T4096 H16 N128 P64 S256",
       [](DType t) { return state_memory_case(t, {.batch = 8, .time = 4096, .heads = 16}); },
       Where::cuda},
      {"state_memory_attention", "B8 T1024 H16 N64 P64 S16",
       [](DType t) {
         return state_memory_case(
             t, {.batch = 8, .time = 1024, .heads = 16, .state_dim = 64, .memory_chunk = 16});
       },
       Where::cuda},
      {"state_memory_attention", "B1 T1024 H16 N128 P64 S64",
       [](DType t) {
         return state_memory_case(t, {.batch = 1, .time = 1024, .heads = 16, .memory_chunk = 64});
       },
       Where::cpu},
      {"gated_delta_rule", "B1 T1024 H6 K64 V128",
       [](DType t) { return delta_rule_case(t, delta_size(1, 1024, 6, 64, 128)); }, Where::cpu},
      {"kda", "B1 T1024 H6 K64 V128",
       [](DType t) { return channel_case(t, delta_size(1, 1024, 6, 64, 128), DeltaGates::kda); },
       Where::cpu},
  };
}

}  // namespace ebb::tools
