// Benchmark rows of the recurrences.
#include <cmath>

#include "ops/delta_rule.h"
#include "ops/delta_rule_channel.h"
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

DeltaRuleSize delta_size(int64_t batch, int64_t time, int64_t heads, int64_t k, int64_t v) {
  return {.batch = batch,
          .time = time,
          .heads = heads,
          .value_heads = heads,
          .key_dim = k,
          .value_dim = v};
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
      {"kda", "B8 T4096 H6 K64 V128",
       [](DType t) { return channel_case(t, delta_size(8, 4096, 6, 64, 128), DeltaGates::kda); },
       Where::cuda},
      {"kda", "B1 T32768 H6 K64 V128",
       [](DType t) { return channel_case(t, delta_size(1, 32768, 6, 64, 128), DeltaGates::kda); },
       Where::cuda},
      {"gdn2", "B8 T4096 H6 K64 V128",
       [](DType t) { return channel_case(t, delta_size(8, 4096, 6, 64, 128), DeltaGates::gdn2); },
       Where::cuda},
      {"gated_delta_rule", "B1 T1024 H6 K64 V128",
       [](DType t) { return delta_rule_case(t, delta_size(1, 1024, 6, 64, 128)); }, Where::cpu},
      {"kda", "B1 T1024 H6 K64 V128",
       [](DType t) { return channel_case(t, delta_size(1, 1024, 6, 64, 128), DeltaGates::kda); },
       Where::cpu},
  };
}

}  // namespace ebb::tools
