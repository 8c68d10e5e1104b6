// Benchmark rows of the convolution, gates and activations.
#include "ops/causal_conv1d.h"
#include "ops/channel_mix.h"
#include "ops/decay_gate.h"
#include "ops/forget_gate.h"
#include "ops/sigmoid_gate.h"
#include "ops/swiglu.h"
#include "ops/token_shift.h"
#include "tools/bench.h"

namespace ebb::tools {
namespace {

using Inputs = std::span<const Var>;
using Where = BenchRow::Where;

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

// Simple Decay's gate, with an offset per channel, or HGRN2's, with a bound.
BenchCase forget_gate_case(DType t, int64_t tokens, int64_t channels, bool bound) {
  return {.inputs = {{.shape = {tokens, channels}},
                     {.shape = {channels}, .role = Role::parameter, .low = 0.1, .high = 0.9}},
          .run =
              [=](Inputs in) {
                return std::vector{bound ? forget_gate(in[0], {.lower_bound = in[1]})
                                         : forget_gate(in[0], {.bias = in[1]})};
              },
          .cost = [=](Pass p) { return forget_gate_cost(p, tokens * channels, t); }};
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

BenchCase channel_mix_case(DType t, int64_t batch, int64_t time, int64_t d, int64_t inner) {
  return {.inputs = {{.shape = {batch, time, d}},
                     {.shape = {d}, .role = Role::parameter, .low = 0, .high = 1},
                     {.shape = {inner, d}, .role = Role::weight, .std = 0.02},
                     {.shape = {d, inner}, .role = Role::weight, .std = 0.02}},
          .run = [](Inputs in) { return std::vector{channel_mix(in[0], in[1], in[2], in[3]).y}; },
          .cost = [=](Pass p) { return channel_mix_cost(p, batch * time, d, inner, t); }};
}

}  // namespace

std::vector<BenchRow> gate_bench_rows() {
  return {
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
      {"forget_gate", "32768 C768 offset",
       [](DType t) { return forget_gate_case(t, 32768, 768, false); }, Where::cuda},
      {"forget_gate", "32768 C768 bound",
       [](DType t) { return forget_gate_case(t, 32768, 768, true); }, Where::cuda},
      {"forget_gate", "1024 C768 offset",
       [](DType t) { return forget_gate_case(t, 1024, 768, false); }, Where::cpu},
      {"sigmoid_gate", "32768 H6", [](DType t) { return sigmoid_gate_case(t, 32768, 6); },
       Where::cuda},
      {"token_shift_mix", "B8 T4096 D512 M6",
       [](DType t) { return token_shift_mix_case(t, 8, 4096, 512); }, Where::cuda},
      {"token_shift_mix", "B1 T1024 D512 M6",
       [](DType t) { return token_shift_mix_case(t, 1, 1024, 512); }, Where::cpu},
      {"channel_mix", "B8 T4096 D512 W2048",
       [](DType t) { return channel_mix_case(t, 8, 4096, 512, 2048); }, Where::cuda},
      {"channel_mix", "B1 T1024 D512 W2048",
       [](DType t) { return channel_mix_case(t, 1, 1024, 512, 2048); }, Where::cpu},
  };
}

}  // namespace ebb::tools
