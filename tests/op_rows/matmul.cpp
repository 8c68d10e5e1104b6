// Rows of the matrix products.
#include "tests/reference/matmul.h"

#include "ops/matmul.h"
#include "tests/op_table.h"

namespace ebb::testing {
namespace {

OpCase product(Draw& draw, const char* name, const Shape& a, const Shape& b) {
  OpCase c;
  c.name = name;
  c.inputs = {{"a", draw.normal(a)}, {"b", draw.normal(b)}};
  c.run = [](std::span<const Var> in) { return std::vector{matmul(in[0], in[1])}; };
  c.reference = [](std::span<const Tensor> in) {
    return std::vector{reference::matmul(in[0], in[1])};
  };
  c.jacobian = a.numel() + b.numel() <= 80;
  return c;
}

OpCase layer(Draw& draw, const char* name, const Shape& x, int64_t out, bool bias) {
  OpCase c;
  c.name = name;
  c.inputs = {{"x", draw.normal(x)},
              {"w", draw.normal({out, x.back()}, 0.5)},
              {.name = "bias", .value = bias ? draw.normal({out}) : Tensor(), .parameter = true}};
  c.run = [](std::span<const Var> in) { return std::vector{linear(in[0], in[1], in[2])}; };
  c.reference = [](std::span<const Tensor> in) {
    return std::vector{reference::linear(in[0], in[1], in[2])};
  };
  c.jacobian = x.numel() + out * x.back() <= 80;
  return c;
}

OpRow matmul_row(Draw& draw) {
  OpRow row{.op = "matmul", .cases = {}, .errors = {}};
  row.cases = {
      product(draw, "square", {5, 5}, {5, 5}),
      product(draw, "one", {1, 1}, {1, 1}),
      product(draw, "odd", {130, 71}, {71, 33}),
      product(draw, "row", {1, 37}, {37, 19}),
      product(draw, "column", {19, 37}, {37, 1}),
      product(draw, "outer", {17, 1}, {1, 9}),
      product(draw, "tiles", {300, 64}, {64, 700}),
      product(draw, "long_k", {24, 8200}, {8200, 16}),
      product(draw, "batch", {2, 3, 4, 5}, {2, 3, 5, 6}),
      product(draw, "batch_of_a", {2, 3, 4, 5}, {5, 6}),
      product(draw, "batch_of_b", {4, 5}, {3, 5, 6}),
      product(draw, "batch_both", {2, 1, 4, 5}, {3, 5, 6}),
      product(draw, "batch_inner", {2, 3, 4, 5}, {2, 1, 5, 6}),
      product(draw, "batch_of_rows", {2, 3, 1, 5}, {5, 6}),
      product(draw, "batch_ones", {1, 1, 4, 5}, {1, 5, 6}),
      product(draw, "no_k", {3, 0}, {0, 4}),
      product(draw, "no_k_batch", {2, 3, 0}, {0, 4}),
      product(draw, "no_rows", {0, 4}, {4, 5}),
      product(draw, "no_columns", {3, 4}, {4, 0}),
      product(draw, "no_batch", {0, 3, 4}, {4, 5}),
      layer(draw, "linear", {2, 7, 5}, 3, false),
      layer(draw, "linear_bias", {2, 7, 5}, 3, true),
      layer(draw, "linear_vector", {6}, 4, true),
      layer(draw, "linear_wide", {3, 101, 130}, 70, true),
      layer(draw, "linear_many_rows", {2100, 24}, 9, true),
      layer(draw, "linear_one", {4, 1}, 1, true),
      layer(draw, "linear_no_rows", {2, 0, 5}, 3, true),
      layer(draw, "linear_no_inputs", {3, 0}, 4, true),
      layer(draw, "linear_no_outputs", {3, 4}, 0, true),
  };
  const auto zeros = [](const Shape& s, DType t = DType::f32) { return Tensor::zeros(s, t); };
  row.errors = {
      {"inner",
       [=] {
         matmul(zeros({2, 3}), zeros({4, 5}));
       },
       "^matmul: a is \\[2,3\\], b is \\[4,5\\]"},
      {"batch",
       [=] {
         matmul(zeros({2, 3, 4}), zeros({5, 4, 6}));
       },
       "^matmul: a is \\[2,3,4\\], b is \\[5,4,6\\]; their leading dimensions"},
      {"vector",
       [=] {
         matmul(zeros({3}), zeros({3, 2}));
       },
       "^matmul: a is \\[3\\], b is \\[3,2\\]"},
      {"dtypes",
       [=] {
         matmul(zeros({2, 3}), zeros({3, 2}, DType::f64));
       },
       "^matmul: a \\[2,3\\] is f32, b \\[3,2\\] is f64"},
      {"integers",
       [=] {
         matmul(zeros({2, 3}, DType::i64), zeros({3, 2}, DType::i64));
       },
       "^matmul: a \\[2,3\\] is i64"},
      {"output",
       [=] {
         matmul(zeros({2, 3}), zeros({3, 2}), {.output = DType::f64});
       },
       "^matmul: output dtype f64 from f32"},
      {"undefined",
       [=] {
         matmul(zeros({2, 3}), Var());
       },
       "^matmul: b is undefined"},
      {"linear",
       [=] {
         linear(zeros({2, 3}), zeros({5, 4}));
       },
       "^linear: x is \\[2,3\\], w is \\[5,4\\]"},
      {"bias",
       [=] {
         linear(zeros({2, 3}), zeros({5, 3}), zeros({4}));
       },
       "^linear: bias is \\[4\\], w is \\[5,3\\]; want bias = \\[5\\]"},
      {"bias_dtype",
       [=] {
         linear(zeros({2, 3}), zeros({5, 3}), zeros({5}, DType::i32));
       },
       "^linear: bias \\[5\\] is i32"},
  };
  return row;
}

}  // namespace

std::vector<OpRow> matmul_rows(Draw& draw) { return {matmul_row(draw)}; }

}  // namespace ebb::testing
