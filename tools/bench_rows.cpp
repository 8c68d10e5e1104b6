// What `ebb bench ops` measures: one line per operator and shape. 32768 tokens (8 × 4096) are a
// training batch of the 100M models; the CPU gets shapes it can afford.
#include <cmath>
#include <map>

#include "ops/adamw.h"
#include "ops/causal_conv1d.h"
#include "ops/decay_gate.h"
#include "ops/delta_rule.h"
#include "ops/matmul.h"
#include "ops/multi_tensor.h"
#include "ops/sigmoid_gate.h"
#include "ops/swiglu.h"
#include "ops/token_shift.h"
#include "tools/bench.h"

namespace ebb::tools {
namespace {

using Inputs = std::span<const Var>;
using Where = BenchRow::Where;

BenchCase linear_case(DType t, int64_t tokens, int64_t in, int64_t out) {
  return {.inputs = {{.shape = {tokens, in}},
                     {.shape = {out, in}, .role = Role::weight, .std = 1 / std::sqrt(double(in))}},
          .run = [](Inputs x) { return std::vector{linear(x[0], x[1])}; },
          .cost = [=](Pass p) { return linear_cost(p, tokens, in, out, t); }};
}

BenchCase conv_case(DType t, int64_t batch, int64_t time, int64_t channels) {
  return {.inputs = {{.shape = {batch, time, channels}},
                     {.shape = {channels, 4}, .role = Role::parameter, .std = 0.5}},
          .run = [](Inputs in) { return std::vector{causal_conv1d(in[0], in[1]).y}; },
          .cost = [=](Pass p) { return causal_conv1d_cost(p, batch * time, channels, 4, t); }};
}

BenchCase swiglu_case(DType t, int64_t tokens, int64_t inner) {
  return {.inputs = {{.shape = {tokens, inner}}, {.shape = {tokens, inner}}},
          .run = [](Inputs in) { return std::vector{swiglu(in[0], in[1])}; },
          .cost = [=](Pass p) { return swiglu_cost(p, tokens * inner, t); }};
}

BenchCase decay_gate_case(DType t, int64_t tokens, int64_t heads, int64_t channels) {
  return {.inputs = {{.shape = {tokens, heads * channels}},
                     {.shape = {heads}, .role = Role::parameter, .low = 0, .high = 2.7},
                     {.shape = {heads * channels}, .role = Role::parameter, .low = -7, .high = -2}},
          .run = [](Inputs in) { return std::vector{decay_gate(in[0], in[1], in[2])}; },
          .cost = [=](Pass p) { return decay_gate_cost(p, tokens * heads * channels, t); }};
}

BenchCase sigmoid_gate_case(DType t, int64_t tokens, int64_t heads) {
  return {.inputs = {{.shape = {tokens, heads}}},
          .run = [](Inputs in) { return std::vector{sigmoid_gate(in[0])}; },
          .cost = [=](Pass p) { return sigmoid_gate_cost(p, tokens * heads, t); }};
}

BenchCase token_shift_mix_case(DType t, int64_t batch, int64_t time, int64_t d) {
  return {.inputs = {{.shape = {batch, time, d}},
                     {.shape = {6, d}, .role = Role::parameter, .low = 0, .high = 1}},
          .run = [](Inputs in) { return token_shift_mix(in[0], in[1]).out; },
          .cost = [=](Pass p) { return token_shift_cost(p, batch * time, d, 6, t); }};
}

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

std::vector<Tensor> matrices(const Tensor& stacked) {
  std::vector<Tensor> out;
  for (int64_t i = 0; i < stacked.size(0); ++i) out.push_back(stacked.select(0, i));
  return out;
}

// One optimizer step over `count` matrices, without the norm. What a step keeps from call to call
// is kept here per copy of the inputs.
BenchCase adamw_case(int64_t count, int64_t rows, int64_t columns) {
  struct Kept {
    Tensor scalars;
    AdamWList list;
  };
  const Shape shape{count, rows, columns};
  const BenchInput values{.shape = shape, .role = Role::constant, .std = 0.02, .f32 = true};
  BenchInput squares = values;
  squares.low = 1e-6, squares.high = 1e-4;
  const auto kept = std::make_shared<std::map<const void*, Kept>>();
  return {
      .inputs = {values, values, values, squares},
      .run =
          [kept](Inputs in) {
            Kept& k = (*kept)[in[0].value().raw()];
            if (!k.scalars) {
              k.scalars =
                  adamw_scalars({.lr = 1e-4, .step = 10, .correction1 = 0.65, .correction2 = 0.4},
                                in[0].device());
              const auto p = matrices(in[0].value()), g = matrices(in[1].value()),
                         m = matrices(in[2].value()), v = matrices(in[3].value());
              std::vector<AdamWTensor> tensors;
              for (size_t i = 0; i < p.size(); ++i)
                tensors.push_back({p[i], g[i], m[i], v[i],
                                   Tensor::empty(p[i].shape(), DType::bf16, p[i].device()), 0.1});
              k.list.set(std::move(tensors));
            }
            adamw(k.list, k.scalars, {});
            return std::vector<Var>{};
          },
      .cost = [=](Pass) { return adamw_cost(shape.numel(), true); },
      .backward = false};
}

BenchCase sum_of_squares_case(DType t, int64_t count, int64_t rows, int64_t columns) {
  const Shape shape{count, rows, columns};
  const auto kept = std::make_shared<std::map<const void*, std::pair<TensorList, Tensor>>>();
  return {.inputs = {{.shape = shape, .role = Role::constant}},
          .run =
              [kept](Inputs in) {
                auto& [list, out] = (*kept)[in[0].value().raw()];
                if (!out) {
                  list.set(matrices(in[0].value()));
                  out = Tensor::empty({}, DType::f64, in[0].device());
                }
                sum_of_squares(list, out);
                return std::vector<Var>{};
              },
          .cost = [=](Pass) { return sum_of_squares_cost(shape.numel(), t); },
          .backward = false};
}

}  // namespace

const std::vector<BenchRow>& bench_rows() {
  static const std::vector<BenchRow> rows = {
      // ---- products ----
      {"linear", "32768x512 -> 512", [](DType t) { return linear_case(t, 32768, 512, 512); },
       Where::cuda},
      {"linear", "32768x512 -> 1536", [](DType t) { return linear_case(t, 32768, 512, 1536); },
       Where::cuda},
      {"linear", "32768x512 -> 3072", [](DType t) { return linear_case(t, 32768, 512, 3072); },
       Where::cuda},
      {"linear", "32768x1536 -> 512", [](DType t) { return linear_case(t, 32768, 1536, 512); },
       Where::cuda},
      {"linear", "8192x512 -> 32000", [](DType t) { return linear_case(t, 8192, 512, 32000); },
       Where::cuda},
      {"linear", "8192x8192 -> 8192", [](DType t) { return linear_case(t, 8192, 8192, 8192); },
       Where::cuda},
      {"linear", "1024x512 -> 1536", [](DType t) { return linear_case(t, 1024, 512, 1536); },
       Where::cpu},
      // ---- convolution, gates ----
      {"causal_conv1d", "B8 T4096 D1536 W4", [](DType t) { return conv_case(t, 8, 4096, 1536); },
       Where::cuda},
      {"causal_conv1d", "B1 T1024 D1536 W4", [](DType t) { return conv_case(t, 1, 1024, 1536); },
       Where::cpu},
      {"swiglu", "32768x1536", [](DType t) { return swiglu_case(t, 32768, 1536); }, Where::cuda},
      {"swiglu", "1024x1536", [](DType t) { return swiglu_case(t, 1024, 1536); }, Where::cpu},
      {"decay_gate", "32768 H6", [](DType t) { return decay_gate_case(t, 32768, 6, 1); },
       Where::cuda},
      {"decay_gate", "32768 H6 K64", [](DType t) { return decay_gate_case(t, 32768, 6, 64); },
       Where::cuda},
      {"sigmoid_gate", "32768 H6", [](DType t) { return sigmoid_gate_case(t, 32768, 6); },
       Where::cuda},
      {"token_shift_mix", "B8 T4096 D512 M6",
       [](DType t) { return token_shift_mix_case(t, 8, 4096, 512); }, Where::cuda},
      // ---- recurrences ----
      {"gated_delta_rule", "B8 T4096 H6 K64 V128",
       [](DType t) { return delta_rule_case(t, delta_size(8, 4096, 6, 64, 128)); }, Where::cuda},
      {"gated_delta_rule", "B1 T32768 H6 K64 V128",
       [](DType t) { return delta_rule_case(t, delta_size(1, 32768, 6, 64, 128)); }, Where::cuda},
      {"gated_delta_rule", "B8 T4096 H16 K128 V128",
       [](DType t) { return delta_rule_case(t, delta_size(8, 4096, 16, 128, 128)); }, Where::cuda},
      {"gated_delta_rule", "B1 T1024 H6 K64 V128",
       [](DType t) { return delta_rule_case(t, delta_size(1, 1024, 6, 64, 128)); }, Where::cpu},
      // ---- optimizer ----
      {"adamw",
       "200 x 1000x500",
       [](DType) { return adamw_case(200, 1000, 500); },
       Where::cuda,
       {DType::f32}},
      {"adamw",
       "20 x 500x500",
       [](DType) { return adamw_case(20, 500, 500); },
       Where::cpu,
       {DType::f32}},
      {"sum_of_squares", "200 x 1000x500",
       [](DType t) { return sum_of_squares_case(t, 200, 1000, 500); }, Where::cuda},
      {"sum_of_squares", "20 x 500x500",
       [](DType t) { return sum_of_squares_case(t, 20, 500, 500); }, Where::cpu},
  };
  return rows;
}

}  // namespace ebb::tools
