// Benchmark rows of the optimizer.
#include <map>

#include "ops/adamw.h"
#include "ops/multi_tensor.h"
#include "tools/bench.h"

namespace ebb::tools {
namespace {

using Inputs = std::span<const Var>;
using Where = BenchRow::Where;

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

std::vector<BenchRow> optimizer_bench_rows() {
  return {
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
}

}  // namespace ebb::tools
