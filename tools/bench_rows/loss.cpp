// Benchmark rows of the losses and the embedding.
#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "ops/linear_cross_entropy.h"
#include "tools/bench.h"

namespace ebb::tools {
namespace {

using Inputs = std::span<const Var>;
using Where = BenchRow::Where;

BenchInput ids(int64_t n, int64_t below) {
  return {.shape = {n}, .role = Role::constant, .ids = below};
}

BenchCase cross_entropy_case(DType t, int64_t rows, int64_t v) {
  return {.inputs = {{.shape = {rows, v}, .std = 2}, ids(rows, v)},
          .run = [](Inputs in) { return std::vector{cross_entropy(in[0], in[1].value()).loss}; },
          .cost = [=](Pass p) { return cross_entropy_cost(p, rows, v, t); }};
}

// The forward pass forms the gradients, the backward pass scales them.
BenchCase linear_cross_entropy_case(DType t, int64_t rows, int64_t d, int64_t v) {
  return {.inputs = {{.shape = {rows, d}},
                     {.shape = {v, d}, .role = Role::weight, .std = 0.04},
                     ids(rows, v)},
          .run =
              [](Inputs in) {
                return std::vector{linear_cross_entropy(in[0], in[1], in[2].value()).loss};
              },
          .cost = [=](Pass p) { return linear_cross_entropy_cost(p, rows, d, v, t); }};
}

BenchCase embedding_case(DType t, int64_t tokens, int64_t v, int64_t d) {
  return {.inputs = {{.shape = {v, d}, .role = Role::weight, .std = 0.02}, ids(tokens, v)},
          .run = [](Inputs in) { return std::vector{embedding(in[0], in[1].value())}; },
          .cost = [=](Pass p) { return embedding_cost(p, tokens, d, t); }};
}

}  // namespace

std::vector<BenchRow> loss_bench_rows() {
  return {
      {"cross_entropy", "8192 V32000", [](DType t) { return cross_entropy_case(t, 8192, 32000); },
       Where::cuda},
      {"linear_cross_entropy", "32768x512 V32000",
       [](DType t) { return linear_cross_entropy_case(t, 32768, 512, 32000); }, Where::cuda},
      {"embedding", "32768 V32000 D512",
       [](DType t) { return embedding_case(t, 32768, 32000, 512); }, Where::cuda},
      {"linear_cross_entropy", "512x256 V8000",
       [](DType t) { return linear_cross_entropy_case(t, 512, 256, 8000); }, Where::cpu},
      {"embedding", "4096 V32000 D512", [](DType t) { return embedding_case(t, 4096, 32000, 512); },
       Where::cpu},
  };
}

}  // namespace ebb::tools
