#include "tests/norm_properties.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "ops/gated_rms_norm.h"
#include "ops/l2_norm.h"
#include "ops/layer_norm.h"
#include "ops/rms_norm.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tests/op_harness.h"

namespace ebb::testing {
namespace {

using Inputs = std::span<const Var>;

std::vector<Var> run_norm(const std::string& name, float eps, Inputs in) {
  if (name == "rms_norm") return {rms_norm(in[0], in[1], eps)};
  if (name == "add_rms_norm") {
    const AddRmsNorm r = add_rms_norm(in[0], in[2], in[1], eps);
    return {r.y, r.u};
  }
  if (name == "l2_norm") return {l2_norm(in[0], eps)};
  if (name == "layer_norm") return {layer_norm(in[0], in[1], in[2], eps)};
  if (name == "group_norm") return {group_norm(in[0], in[1], in[2], 2, eps)};
  if (name == "gated_norm_first") return {gated_rms_norm(in[0], in[2], in[1], {.eps = eps})};
  check(name == "gated_gate_first", "no normalisation {}", name);
  return {gated_rms_norm(
      in[0], in[2], in[1],
      {.eps = eps, .act = GateAct::sigmoid, .order = GateOrder::gate_first, .groups = 2})};
}

// Leaves with the case's values, f32 on the device.
std::vector<Var> leaves(const OpCase& c, Device device) {
  std::vector<Var> out;
  for (const OpInput& in : c.inputs) out.push_back(Var::leaf(in.value.to(DType::f32, device)));
  return out;
}

// Gradients of the first output, for an upstream gradient of any strides.
std::vector<Tensor> gradients(const OpCase& c, Device device, const Tensor& dy) {
  const std::vector<Var> in = leaves(c, device);
  const Var y = c.run(in)[0];
  backward(y, dy);
  std::vector<Tensor> out;
  for (const Var& v : in) out.push_back(v.grad());
  return out;
}

void expect_equal(const std::string& what, const std::vector<Tensor>& a,
                  const std::vector<Tensor>& b, double limit) {
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << what << ": gradient " << i;
    if (a[i].defined()) {
      EXPECT_LE(relative_error(a[i], b[i]), limit) << what << ": gradient " << i;
    }
  }
}

bool all_nan(const Tensor& t) {
  for (const double v : t.to_vector<double>())
    if (!std::isnan(v)) return false;
  return true;
}

}  // namespace

const std::vector<std::string>& norm_names() {
  static const std::vector<std::string> names = {
      "rms_norm",   "add_rms_norm",     "l2_norm",         "layer_norm",
      "group_norm", "gated_norm_first", "gated_gate_first"};
  return names;
}

OpCase norm_case(const std::string& name, const Shape& shape, double scale, float eps) {
  Draw draw(test_seed() + 17);
  OpCase c;
  c.name = name;
  const Shape d{shape.back()};
  c.inputs = {{"x", draw.normal(shape, scale)}};
  const bool second_row = name == "add_rms_norm" || name.starts_with("gated");
  if (name != "l2_norm")
    c.inputs.push_back({.name = "w", .value = draw.normal(d, 0.3, 1), .parameter = true});
  if (second_row)
    c.inputs.push_back({"second", draw.normal(shape, name == "add_rms_norm" ? scale : 1)});
  else if (name != "l2_norm" && name != "rms_norm")
    c.inputs.push_back({.name = "b", .value = draw.normal(d, 0.3), .parameter = true});
  c.run = [name, eps](Inputs in) { return run_norm(name, eps, in); };
  return c;
}

void check_row_counts(Device device, std::initializer_list<int64_t> rows, int64_t width) {
  const GuardedMemory guard(device);  // partial sums nobody wrote would be NaN
  for (const std::string& name : norm_names())
    for (const int64_t n : rows) {
      const OpCase c = norm_case(name, {n, width});
      for (const DType t : {DType::f32, DType::bf16}) {
        if (t == DType::bf16 && !device.is_cuda()) continue;
        const bool f = t == DType::f32;
        expect_close(name + " " + std::to_string(n) + " rows " + ebb::name(t),
                     run_case(c, {.device = device, .dtype = t}), exact_case(c, t),
                     f ? c.f32_output : c.bf16_output, f ? c.f32_gradient : c.bf16_gradient);
      }
    }
}

void check_groups_are_separate(Device device) {
  const int64_t n = 37, half = 40;
  for (const std::string name : {"gated_gate_first", "group_norm"}) {
    OpCase both = norm_case(name, {n, 2 * half});
    const Tensor x = both.inputs[0].value;
    x.slice(1, half, 2 * half).copy_(x.slice(1, half, 2 * half).clone().fill_(0));
    Draw draw(test_seed() + 3);
    x.slice(1, half, 2 * half).copy_(draw.normal({n, half}, 100));
    const Tensor dy = draw.normal({n, 2 * half}).to(DType::f32, device);
    const std::vector<Tensor> got = gradients(both, device, dy);
    for (const int64_t at : {int64_t(0), half}) {
      OpCase one = both;
      for (OpInput& in : one.inputs)
        in.value = in.value.slice(in.value.dim() - 1, at, at + half).clone();
      one.run = [&](Inputs in) -> std::vector<Var> {
        if (name == "group_norm") return {layer_norm(in[0], in[1], in[2], 1e-6f)};
        return {gated_rms_norm(in[0], in[2], in[1],
                               {.act = GateAct::sigmoid, .order = GateOrder::gate_first})};
      };
      const std::vector<Tensor> want = gradients(one, device, dy.slice(1, at, at + half));
      for (size_t i = 0; i < want.size(); ++i) {
        const Tensor part = got[i].slice(got[i].dim() - 1, at, at + half);
        EXPECT_LE(relative_error(part, want[i]), 2e-6)
            << name << ": gradient of " << both.inputs[i].name << ", channels from " << at;
      }
    }
  }
}

void check_upstream_views(Device device) {
  const int64_t n = 12, d = 24;
  Draw draw(test_seed() + 5);
  const auto random = [&](const Shape& s) { return draw.normal(s).to(DType::f32, device); };
  const std::vector<std::pair<std::string, Tensor>> views = {
      {"transposed", random({d, n}).transpose(0, 1)},
      {"channel slice", random({n, 3 * d}).slice(1, d, 2 * d)},
      {"expanded scalar", Tensor::full({1, 1}, 0.75, DType::f32, device).expand({n, d})},
      {"expanded row", random({1, d}).expand({n, d})},
      {"every second row", random({2 * n, d}).slice(0, 0, 2 * n, 2)},
  };
  for (const std::string& name : norm_names())
    for (const auto& [view, dy] : views) {
      const OpCase c = norm_case(name, {n, d});
      // The dense copy may take wider accesses, and so another order of sums.
      expect_equal(name + ", dy " + view, gradients(c, device, dy),
                   gradients(c, device, dy.clone()), 1e-6);
    }
}

void check_slices(Device device) {
  const int64_t batch = 2, time = 9, heads = 3, width = 16;
  for (const std::string& name : norm_names())
    for (const int64_t offset : {0, 8, 3}) {  // of the slice in the projection; 3 is not aligned
      const OpCase c = norm_case(name, {batch, time, heads, width});
      const Tensor dy = norm_case("l2_norm", {batch, time, heads, width}, 2)
                            .inputs[0]
                            .value.to(DType::f32, device);
      std::vector<Var> in;
      for (const OpInput& i : c.inputs) {
        Tensor t = i.value.to(DType::f32, device);
        if (t.dim() == 4) {  // a slice of [batch, time, 2·heads·width + 16]
          const Tensor wide =
              Tensor::full({batch, time, 2 * heads * width + 16}, 777, DType::f32, device);
          const Tensor slice = wide.slice(2, offset, offset + heads * width);
          const Tensor view =
              Tensor::wrap(slice.storage(), slice.dtype(), t.shape(),
                           {slice.stride(0), slice.stride(1), width, 1}, slice.offset());
          view.copy_(t);
          t = view;
        }
        in.push_back(Var::leaf(t));
      }
      const std::vector<Var> dense = leaves(c, device);
      const Var y = c.run(in)[0], want = c.run(dense)[0];
      EXPECT_LE(relative_error(y.value(), want.value()), 1e-6) << name << " offset " << offset;
      backward(y, dy);
      backward(want, dy);
      for (size_t i = 0; i < in.size(); ++i)
        EXPECT_LE(relative_error(in[i].grad(), dense[i].grad()), 1e-6)
            << name << " offset " << offset << ": gradient of " << c.inputs[i].name;
    }
}

void check_tiny_rows(Device device) {
  // RMS 2e-4 under eps 1e-6: the gain is 1/sqrt(4e-8 + 1e-6), not 1/2e-4.
  const Shape shape{64, 128};
  for (const std::string& name : norm_names()) {
    const OpCase c = norm_case(name, shape, 2e-4);
    expect_close(name + " tiny rows", run_case(c, {.device = device, .dtype = DType::f32}),
                 exact_case(c, DType::f32), c.f32_output, c.f32_gradient);
  }
  OpCase plain = norm_case("rms_norm", shape, 2e-4);
  const Tensor y = rms_norm(plain.inputs[0].value.to(DType::f32, device), {}, 1e-6f).value();
  const double gain = euclidean_norm(y) / euclidean_norm(plain.inputs[0].value);
  EXPECT_NEAR(gain, 1 / std::sqrt(4e-8 + 1e-6), 5);

  const Var zero = Var::leaf(Tensor::zeros({3, 64}, DType::f32, device));
  const Var unit = l2_norm(zero, 1e-6f);
  EXPECT_EQ(euclidean_norm(unit.value()), 0);
  backward(unit, Tensor::full({3, 64}, 1, DType::f32, device));
  EXPECT_LE(relative_error(zero.grad(), Tensor::full({3, 64}, 1e3)), 1e-6);
}

void check_not_finite(Device device) {
  const int64_t n = 5, d = 512;
  for (const std::string& name : norm_names()) {
    const OpCase c = norm_case(name, {n, d});
    const Tensor clean = c.run(leaves(c, device))[0].value();
    for (const double bad : {std::nan(""), HUGE_VAL}) {
      const std::vector<Var> in = leaves(c, device);
      in[0].value().slice(0, 2, 3).slice(1, 7, 8).fill_(bad);
      const Tensor y = c.run(in)[0].value();
      // group_norm and gated_gate_first have two groups: the other half of the row is fine.
      const bool halves = name == "group_norm" || name == "gated_gate_first";
      EXPECT_TRUE(all_nan(y.slice(0, 2, 3).slice(1, 0, halves ? d / 2 : d))) << name << " " << bad;
      for (const auto& [from, to] : {std::pair<int64_t, int64_t>{0, 2}, {3, n}})
        EXPECT_TRUE(bitwise_equal(y.slice(0, from, to), clean.slice(0, from, to)))
            << name << " " << bad;
    }
    // 1e15 is in the range of f32 statistics, 1e18 over 512 channels is not.
    const OpCase big = norm_case(name, {n, d}, 1e15);
    expect_close(name + " 1e15", run_case(big, {.device = device, .dtype = DType::f32}),
                 exact_case(big, DType::f32), 2e-5, 2e-5);
    const OpCase huge = norm_case(name, {n, d}, 3e18);
    const Tensor y = huge.run(leaves(huge, device))[0].value();
    if (device.is_cuda())
      EXPECT_TRUE(all_nan(y)) << name << " 3e18: " << y.str();
    else
      EXPECT_LE(relative_error(y, exact_case(huge, DType::f32).outputs[0]), 2e-5)
          << name << " 3e18";
  }
}

void check_one_channel(Device device) {
  OpCase c = norm_case("layer_norm", {9, 1});
  const std::vector<Var> in = leaves(c, device);
  const Var y = c.run(in)[0];
  EXPECT_TRUE(bitwise_equal(y.value(), in[2].value().unsqueeze(0).expand({9, 1})));
  backward(y, Tensor::full({9, 1}, 1, DType::f32, device));
  EXPECT_EQ(euclidean_norm(in[0].grad()), 0);
  EXPECT_EQ(euclidean_norm(in[1].grad()), 0);
  EXPECT_EQ(in[2].grad().item(), 9);
}

}  // namespace ebb::testing
