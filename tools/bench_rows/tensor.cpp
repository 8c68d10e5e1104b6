// Benchmark rows of the general operators: elementwise, reductions, scans, movement, indices.
#include <fmt/format.h>

#include "ops/cumsum.h"
#include "ops/elementwise.h"
#include "ops/indexing.h"
#include "ops/movement.h"
#include "ops/reduce.h"
#include "ops/softmax.h"
#include "tools/bench.h"

namespace ebb::tools {
namespace {

using Inputs = std::span<const Var>;
using Where = BenchRow::Where;

BenchCase mul_case(DType t, const Shape& x) {
  return {.inputs = {{.shape = x}, {.shape = x}},
          .run = [](Inputs in) { return std::vector{mul(in[0], in[1])}; },
          .cost = [=](Pass p) { return elementwise_cost(p, x, t, 2); }};
}

BenchCase silu_case(DType t, const Shape& x) {
  return {.inputs = {{.shape = x}},
          .run = [](Inputs in) { return std::vector{silu(in[0])}; },
          .cost = [=](Pass p) { return elementwise_cost(p, x, t, 1); }};
}

BenchCase sum_case(DType t, const Shape& x, int dim) {
  return {.inputs = {{.shape = x}},
          .run = [=](Inputs in) { return std::vector{sum(in[0], dim)}; },
          .cost = [=](Pass p) { return reduce_cost(p, x, t, x.numel() / x[dim]); },
          .backward = false};  // a view of the upstream gradient
}

BenchCase cumsum_case(DType t, const Shape& x) {
  return {.inputs = {{.shape = x}},
          .run = [](Inputs in) { return std::vector{cumsum(in[0], 1)}; },
          .cost = [=](Pass) { return cumsum_cost(x, t); }};
}

BenchCase softmax_case(DType t, const Shape& x) {
  return {.inputs = {{.shape = x}},
          .run = [](Inputs in) { return std::vector{softmax(in[0])}; },
          .cost = [=](Pass p) { return softmax_cost(p, x, t); }};
}

BenchCase transpose_case(DType t, const Shape& x) {
  return {.inputs = {{.shape = x}},
          .run = [](Inputs in) { return std::vector{contiguous(transpose(in[0], 1, 2))}; },
          .cost = [=](Pass) { return movement_cost(x.numel(), t, t); },
          .backward = false};
}

BenchCase index_select_case(DType t, const Shape& x, int64_t picked) {
  return {
      .inputs = {{.shape = x}, {.shape = {picked}, .role = Role::constant, .ids = x[0]}},
      .run = [](Inputs in) { return std::vector{index_select(in[0], 0, in[1].value())}; },
      .cost = [=](Pass p) { return indexing_cost(p, x, picked * x.numel() / x[0], picked, t); }};
}

}  // namespace

std::vector<BenchRow> tensor_bench_rows() {
  std::vector<BenchRow> rows;
  for (const bool gpu : {true, false}) {
    const int64_t b = gpu ? 8 : 1, time = gpu ? 4096 : 1024, n = b * time;
    const Where where = gpu ? Where::cuda : Where::cpu;
    const std::string flat = fmt::format("{}x512", n);
    const std::string batched = fmt::format("B{} T{} D512", b, time);
    rows.insert(rows.end(), {{"mul", flat,
                              [=](DType t) {
                                return mul_case(t, {n, 512});
                              },
                              where},
                             {"silu", flat,
                              [=](DType t) {
                                return silu_case(t, {n, 512});
                              },
                              where},
                             {"sum over rows", flat,
                              [=](DType t) {
                                return sum_case(t, {n, 512}, 0);
                              },
                              where},
                             {"sum over columns", flat,
                              [=](DType t) {
                                return sum_case(t, {n, 512}, 1);
                              },
                              where},
                             {"softmax", flat,
                              [=](DType t) {
                                return softmax_case(t, {n, 512});
                              },
                              where},
                             {"cumsum", batched,
                              [=](DType t) {
                                return cumsum_case(t, {b, time, 512});
                              },
                              where},
                             {"transpose", batched,
                              [=](DType t) {
                                return transpose_case(t, {b, time, 512});
                              },
                              where},
                             {"index_select", flat + " of 4096",
                              [=](DType t) {
                                return index_select_case(t, {4096, 512}, n);
                              },
                              where}});
  }
  return rows;
}

}  // namespace ebb::tools
