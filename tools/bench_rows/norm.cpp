// Benchmark rows of the normalisations.
#include "ops/gated_rms_norm.h"
#include "ops/l2_norm.h"
#include "ops/layer_norm.h"
#include "ops/rms_norm.h"
#include "tools/bench.h"

namespace ebb::tools {
namespace {

using Inputs = std::span<const Var>;
using Where = BenchRow::Where;

BenchInput norm_weight(int64_t d, double mean = 1) {
  return {.shape = {d}, .role = Role::parameter, .mean = mean, .std = 0.1};
}

BenchCase rms_norm_case(DType t, const Shape& x) {
  return {.inputs = {{.shape = x}, norm_weight(x.back())},
          .run = [](Inputs in) { return std::vector{rms_norm(in[0], in[1], 1e-6f)}; },
          .cost = [=](Pass p) { return rms_norm_cost(p, x, t); }};
}

BenchCase add_rms_norm_case(DType t, const Shape& x, bool f32_stream) {
  return {.inputs = {{.shape = x}, {.shape = x, .f32 = f32_stream}, norm_weight(x.back())},
          .run =
              [](Inputs in) {
                const AddRmsNorm r = add_rms_norm(in[0], in[1], in[2], 1e-6f);
                return std::vector{r.y, r.u};
              },
          .cost = [=](Pass p) { return add_rms_norm_cost(p, x, t, f32_stream ? DType::f32 : t); }};
}

BenchCase gated_rms_norm_case(DType t, const Shape& x, GatedRmsNormOptions options) {
  return {
      .inputs = {{.shape = x}, {.shape = x}, norm_weight(x.back())},
      .run = [=](Inputs in) { return std::vector{gated_rms_norm(in[0], in[1], in[2], options)}; },
      .cost = [=](Pass p) { return gated_rms_norm_cost(p, x, t, options.groups); }};
}

// groups 0: layer_norm.
BenchCase layer_norm_case(DType t, const Shape& x, int64_t groups) {
  return {.inputs = {{.shape = x}, norm_weight(x.back()), norm_weight(x.back(), 0)},
          .run =
              [=](Inputs in) {
                return std::vector{groups ? group_norm(in[0], in[1], in[2], groups, 6.4e-4f)
                                          : layer_norm(in[0], in[1], in[2], 1e-5f)};
              },
          .cost = [=](Pass p) { return layer_norm_cost(p, x, t, groups ? groups : 1); }};
}

BenchCase l2_norm_case(DType t, const Shape& x) {
  return {.inputs = {{.shape = x}},
          .run = [](Inputs in) { return std::vector{l2_norm(in[0])}; },
          .cost = [=](Pass p) { return l2_norm_cost(p, x, t); }};
}

}  // namespace

std::vector<BenchRow> norm_bench_rows() {
  return {
      {"rms_norm", "32768x512",
       [](DType t) {
         return rms_norm_case(t, {32768, 512});
       },
       Where::cuda},
      {"rms_norm", "32768x2048",
       [](DType t) {
         return rms_norm_case(t, {32768, 2048});
       },
       Where::cuda},
      {"rms_norm", "4096x512",
       [](DType t) {
         return rms_norm_case(t, {4096, 512});
       },
       Where::cpu},
      {"add_rms_norm", "32768x512",
       [](DType t) {
         return add_rms_norm_case(t, {32768, 512}, false);
       },
       Where::cuda},
      {"add_rms_norm",
       "32768x512 f32 stream",
       [](DType t) {
         return add_rms_norm_case(t, {32768, 512}, true);
       },
       Where::cuda,
       {DType::bf16}},
      {"gated_rms_norm", "32768 H6 V128",
       [](DType t) {
         return gated_rms_norm_case(t, {32768, 6, 128}, {});
       },
       Where::cuda},
      {"gated_rms_norm", "32768 H6 V128 sigmoid",
       [](DType t) {
         return gated_rms_norm_case(t, {32768, 6, 128}, {.act = GateAct::sigmoid});
       },
       Where::cuda},
      {"gated_rms_norm", "32768x1024 gate first",
       [](DType t) {
         return gated_rms_norm_case(t, {32768, 1024}, {.order = GateOrder::gate_first});
       },
       Where::cuda},
      {"gated_rms_norm", "4096 H6 V128",
       [](DType t) {
         return gated_rms_norm_case(t, {4096, 6, 128}, {});
       },
       Where::cpu},
      {"layer_norm", "32768x512",
       [](DType t) {
         return layer_norm_case(t, {32768, 512}, 0);
       },
       Where::cuda},
      {"group_norm", "32768x512 G8",
       [](DType t) {
         return layer_norm_case(t, {32768, 512}, 8);
       },
       Where::cuda},
      {"layer_norm", "4096x512",
       [](DType t) {
         return layer_norm_case(t, {4096, 512}, 0);
       },
       Where::cpu},
      {"l2_norm", "32768x512",
       [](DType t) {
         return l2_norm_case(t, {32768, 512});
       },
       Where::cuda},
      {"l2_norm", "32768 H8 K64",
       [](DType t) {
         return l2_norm_case(t, {32768, 8, 64});
       },
       Where::cuda},
      {"l2_norm", "4096 H8 K64",
       [](DType t) {
         return l2_norm_case(t, {4096, 8, 64});
       },
       Where::cpu},
  };
}

}  // namespace ebb::tools
