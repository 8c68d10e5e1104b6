// Rows of the optimizer: they work in place, so every run gets copies of its inputs.
#include "tests/reference/optimizer.h"
#include <fmt/format.h>

#include "ops/adamw.h"
#include "tests/op_table.h"

namespace ebb::testing {
namespace {

// Inputs come in groups of four: p, g, m, v of one tensor each.
constexpr double kDecay[] = {0.1, 0, 0.03};
constexpr double kLrScale[] = {1, 2, 0.5};
constexpr double kLr = 0.01, kMaxNorm = 2.5, kDivisor = 3;
constexpr int kStepsBefore = 4;

// How far the shadow is from the rounded master: all zeros, in every dtype. The shadow itself would
// tell f32 from f64 by a whole bf16 step wherever a value lies next to a rounding boundary.
Tensor shadow_error(const Tensor& shadow, const Tensor& master) {
  const std::vector<float> got = shadow.to_vector<float>();
  std::vector<float> error = master.to(DType::bf16).to_vector<float>();
  for (size_t i = 0; i < error.size(); ++i) error[i] = got[i] - error[i];
  return Tensor::from(error, master.shape());
}

std::vector<Var> run_adamw(std::span<const Var> in) {
  std::vector<AdamWTensor> tensors;
  std::vector<Tensor> grads;
  const Device device = in[0].device();
  for (size_t i = 0; i + 3 < in.size(); i += 4) {
    AdamWTensor t{in[i].value().clone(), in[i + 1].value().clone(), in[i + 2].value().clone(),
                  in[i + 3].value().clone()};
    const size_t k = i / 4;
    t.weight_decay = kDecay[k % 3];
    t.lr_scale = kLrScale[k % 3];
    if (k % 2 == 0) t.shadow = Tensor::empty(t.master.shape(), DType::bf16, device);
    grads.push_back(t.grad);
    tensors.push_back(std::move(t));
  }
  const Tensor scalars = adamw_scalars(
      {.lr = kLr, .max_norm = kMaxNorm, .grad_divisor = kDivisor, .step = double(kStepsBefore)},
      device);
  const Tensor squares = Tensor::empty({}, DType::f64, device);
  sum_of_squares(TensorList(grads), squares);
  adamw_begin(scalars, squares, {});
  adamw(AdamWList(tensors), scalars, {});
  std::vector<Var> out{scalars};
  for (const AdamWTensor& t : tensors)
    out.insert(out.end(),
               {t.master, t.m, t.v, t.shadow ? Var(shadow_error(t.shadow, t.master)) : Var()});
  return out;
}

std::vector<Tensor> reference_adamw(std::span<const Tensor> in) {
  std::vector<Tensor> grads;
  for (size_t i = 1; i < in.size(); i += 4) grads.push_back(in[i]);
  const double norm = std::sqrt(reference::sum_of_squares(grads)) / kDivisor;
  const double scale = reference::clip_scale(norm, kMaxNorm) / kDivisor;
  const int t = kStepsBefore + 1;
  std::vector<Tensor> out{
      Tensor::from(std::vector<double>{kLr, kMaxNorm, kDivisor, norm, scale, 0, double(t), 0,
                                       1 - std::pow(0.9, t), 1 - std::pow(0.95, t)},
                   {10})};
  for (size_t i = 0; i + 3 < in.size(); i += 4) {
    const size_t k = (i / 4) % 3;
    std::vector<double> p = in[i].to_vector<double>(), g = in[i + 1].to_vector<double>(),
                        m = in[i + 2].to_vector<double>(), v = in[i + 3].to_vector<double>();
    reference::adamw(p, g, m, v, t, {.lr = kLr * kLrScale[k], .weight_decay = kDecay[k]}, scale);
    for (const auto* values : {&p, &m, &v}) out.push_back(Tensor::from(*values, in[i].shape()));
    out.push_back((i / 4) % 2 == 0 ? Tensor::zeros(in[i].shape(), DType::f64) : Tensor());
  }
  return out;
}

OpCase adamw_case(Draw& draw, const std::string& name, std::initializer_list<Shape> shapes) {
  OpCase c;
  c.name = name;
  for (const Shape& s : shapes) {
    const size_t n = c.inputs.size() / 4;
    const auto add = [&](const char* what, Tensor t) {
      c.inputs.push_back(
          {.name = fmt::format("{}{}", what, n), .value = std::move(t), .parameter = true});
    };
    add("p", draw.normal(s));
    add("g", draw.normal(s));
    add("m", draw.normal(s, 0.1));
    add("v", draw.uniform(s, 0.01, 1));
  }
  c.run = run_adamw;
  c.reference = reference_adamw;
  c.gradients = false;
  return c;
}

OpRow adamw_row(Draw& draw) {
  OpRow row{.op = "adamw"};
  row.cases = {adamw_case(draw, "one_element", {{1}}),
               adamw_case(draw, "mixed", {{3, 5}, {}, {0, 4}, {257}, {2, 3, 4, 5}, {1}}),
               adamw_case(draw, "several_chunks", {{3, 8192}, {8191}, {8193}, {128, 129}})};
  const auto with = [](auto change) {
    return [change] {
      const Tensor t = Tensor::zeros({2, 3});
      AdamWTensor a{t, t.clone(), t.clone(), t.clone()};
      change(a);
      AdamWList(std::vector{a, a});
    };
  };
  row.errors = {
      {"grad_shape", with([](AdamWTensor& t) {
         t.grad = Tensor::zeros({3, 2});
       }),
       "^adamw: grad of tensor 0 is \\[3,2\\], the master is \\[2,3\\]"},
      {"grad_dtype", with([](AdamWTensor& t) { t.grad = t.grad.to(DType::bf16); }),
       "^adamw: grad of tensor 0 \\[2,3\\] is bf16, want f32"},
      {"master_dtype", with([](AdamWTensor& t) { t.master = t.master.to(DType::bf16); }),
       "^adamw: master of tensor 0 \\[2,3\\] is bf16"},
      {"shadow_dtype", with([](AdamWTensor& t) { t.shadow = t.grad; }),
       "^adamw: shadow of tensor 0 \\[2,3\\] is f32, want bf16"},
      {"no_moment", with([](AdamWTensor& t) { t.v = Tensor(); }),
       "^adamw: v of tensor 0 is undefined"},
      {"strides", with([](AdamWTensor& t) {
         t.m = Tensor::zeros({3, 2}).transpose(0, 1);
       }),
       "^adamw: m of tensor 0 \\[2,3\\] is not dense"},
      {"scalars",
       [] {
         const Tensor t = Tensor::zeros({2});
         adamw(AdamWList(std::vector{AdamWTensor{t, t, t, t}}), Tensor::zeros({4}), {});
       },
       "^adamw: scalars is \\[4\\], want \\[10\\]"},
      {"squares", [] { adamw_begin(adamw_scalars({}, Device::cpu()), Tensor::zeros({}), {}); },
       "^adamw_begin: squares are f32, want f64"},
  };
  return row;
}

OpCase list_case(Draw& draw, const std::string& name, std::initializer_list<Shape> shapes,
                 double scale = 1) {
  OpCase c;
  c.name = name;
  for (const Shape& s : shapes)
    c.inputs.push_back({fmt::format("x{}", c.inputs.size()), draw.normal(s, scale)});
  c.run = [](std::span<const Var> in) {
    std::vector<Tensor> tensors;
    for (const Var& v : in) tensors.push_back(v.value().clone());
    const Tensor squares = Tensor::empty({}, DType::f64, in[0].device());
    const TensorList list(tensors);
    sum_of_squares(list, squares);
    zero_all(list);
    std::vector<Var> out{squares};
    out.insert(out.end(), tensors.begin(), tensors.end());
    return out;
  };
  c.reference = [](std::span<const Tensor> in) {
    std::vector<Tensor> out{Tensor::full({}, reference::sum_of_squares(in), DType::f64)};
    for (const Tensor& t : in) out.push_back(Tensor::zeros_like(t));
    return out;
  };
  c.gradients = false;
  // Sums are f64 whatever the inputs are, so every dtype has the same limit.
  c.f64_limit = c.f32_output = c.bf16_output = 1e-12;
  return c;
}

OpRow multi_tensor_row(Draw& draw) {
  OpRow row{.op = "multi_tensor"};
  row.cases = {list_case(draw, "one_element", {{1}}),
               list_case(draw, "mixed", {{3, 5}, {}, {0, 4}, {257}, {1}}),
               list_case(draw, "several_chunks", {{3, 8192}, {8191}, {8193}, {129, 127}}),
               list_case(draw, "huge_values", {{100}}, 1e30),
               list_case(draw, "tiny_values", {{100}}, 1e-30),
               list_case(draw, "empty", {{0}})};
  row.errors = {
      {"undefined", [] { TensorList(std::vector<Tensor>(1)); },
       "^multi_tensor: tensor 0 is undefined"},
      {"integers", [] { TensorList(std::vector{Tensor::arange(3)}); },
       "^multi_tensor: tensor 0 \\[3\\] is i64"},
      {"mixed",
       [] {
         TensorList(std::vector{Tensor::zeros({2}), Tensor::zeros({2}, DType::f64)});
       },
       "^multi_tensor: tensor 1 \\[2\\] is f64 on cpu, tensor 0 is f32"},
      {"strides",
       [] {
         TensorList(std::vector{Tensor::zeros({2, 3}).transpose(0, 1)});
       },
       "^multi_tensor: tensor 0 \\[3,2\\] is not dense"},
      {"out", [] { sum_of_squares({}, Tensor::zeros({1}, DType::f64)); },
       "^sum_of_squares: out is \\[1\\], want \\[\\]"},
      {"out_dtype", [] { sum_of_squares({}, Tensor::zeros({})); },
       "^sum_of_squares: out is f32, want f64"},
  };
  return row;
}

}  // namespace

std::vector<OpRow> optimizer_rows(Draw& draw) { return {adamw_row(draw), multi_tensor_row(draw)}; }

}  // namespace ebb::testing
