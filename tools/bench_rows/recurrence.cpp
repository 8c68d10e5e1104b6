// Benchmark rows of the recurrences.
#include <cmath>

#include "ops/delta_rule.h"
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
      {"gated_delta_rule", "B8 T4096 H16 K128 V128",
       [](DType t) { return delta_rule_case(t, delta_size(8, 4096, 16, 128, 128)); }, Where::cuda},
      {"gated_delta_rule", "B1 T1024 H6 K64 V128",
       [](DType t) { return delta_rule_case(t, delta_size(1, 1024, 6, 64, 128)); }, Where::cpu},
  };
}

}  // namespace ebb::tools
