// Benchmark rows of matrix products.
#include <cmath>

#include "ops/matmul.h"
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

}  // namespace

std::vector<BenchRow> product_bench_rows() {
  return {
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
  };
}

}  // namespace ebb::tools
