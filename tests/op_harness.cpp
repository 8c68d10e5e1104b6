#include "tests/op_harness.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "autograd/tape.h"
#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb::testing {
namespace {

DType input_dtype(const OpInput& in, DType dtype) {
  if (!is_float(in.value.dtype())) return in.value.dtype();
  return in.parameter && dtype == DType::bf16 ? DType::f32 : dtype;
}

Tensor upstream_for(const Tensor& y, uint64_t seed, size_t i) {
  Tensor dy = Tensor::empty(y.shape(), DType::f64);
  fill_normal(dy, {seed, i});
  // Rounded to bf16 always, so that runs in every dtype receive the same upstream gradient.
  return dy.to(DType::bf16).to(DType::f64);
}

}  // namespace

Tensor strided_copy(const Tensor& t) {
  Shape big = t.shape();
  for (int i = 0; i < big.size(); ++i) big[i] = 2 * big[i] + 1;
  std::vector<int> reversed;
  Shape stored;
  for (int i = big.size() - 1; i >= 0; --i) {
    reversed.push_back(i);
    stored.push_back(big[i]);
  }
  // Values a stride mistake would pick up are conspicuous.
  Tensor buffer = Tensor::full(stored, is_float(t.dtype()) ? 777 : 0, t.dtype(), t.device());
  Tensor view = buffer.permute(reversed);
  for (int i = 0; i < view.dim(); ++i) view = view.slice(i, 1, view.size(i), 2);
  view.copy_(t);
  return view;
}

std::vector<Tensor> rounded_inputs(const OpCase& c, DType dtype) {
  std::vector<Tensor> out;
  for (const OpInput& in : c.inputs) {
    if (!in.value.defined() || !is_float(in.value.dtype()))
      out.push_back(in.value);
    else
      out.push_back(in.value.to(input_dtype(in, dtype)).to(DType::f64));
  }
  return out;
}

RunResult run_case(const OpCase& c, const RunOptions& options) {
  std::vector<Var> in;
  const std::vector<Tensor> values = rounded_inputs(c, options.dtype);
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    if (!values[i].defined()) {
      in.emplace_back();
      continue;
    }
    Tensor t = values[i].to(input_dtype(c.inputs[i], options.dtype), options.device);
    if (options.strided_inputs) t = strided_copy(t);
    const bool want = c.gradients && c.inputs[i].differentiable && is_float(t.dtype()) &&
                      (options.wanted.empty() || options.wanted[i]);
    in.push_back(want ? Var::leaf(t) : Var(t));
  }
  const std::vector<Var> out = c.run(in);
  RunResult result;
  std::vector<Var> roots;
  std::vector<Tensor> dy;
  for (size_t i = 0; i < out.size(); ++i) {
    result.outputs.push_back(out[i].defined() ? out[i].value().cpu() : Tensor());
    if (!out[i].requires_grad()) continue;
    Tensor d =
        upstream_for(out[i].value(), options.upstream_seed, i).to(out[i].dtype(), options.device);
    if (options.strided_upstream) d = strided_copy(d);
    roots.push_back(out[i]);
    dy.push_back(d);
  }
  if (!roots.empty()) backward(roots, dy);
  for (const Var& v : in)
    result.gradients.push_back(v.grad().defined() ? v.grad().cpu() : Tensor());
  return result;
}

RunResult exact_case(const OpCase& c, DType rounding) {
  OpCase rounded = c;
  const std::vector<Tensor> values = rounded_inputs(c, rounding);
  for (size_t i = 0; i < values.size(); ++i) rounded.inputs[i].value = values[i];
  return run_case(rounded, {.dtype = DType::f64});
}

void expect_close(const std::string& what, const RunResult& got, const RunResult& want,
                  double output_limit, double gradient_limit) {
  ASSERT_EQ(got.outputs.size(), want.outputs.size()) << what;
  for (size_t i = 0; i < got.outputs.size(); ++i) {
    if (!want.outputs[i].defined() || !got.outputs[i].defined()) continue;
    EXPECT_LE(relative_error(got.outputs[i], want.outputs[i]), output_limit)
        << what << ": output " << i << " got " << got.outputs[i].str() << " want "
        << want.outputs[i].str();
  }
  for (size_t i = 0; i < want.gradients.size(); ++i) {
    if (!want.gradients[i].defined() || i >= got.gradients.size()) continue;
    ASSERT_TRUE(got.gradients[i].defined()) << what << ": no gradient of input " << i;
    EXPECT_LE(relative_error(got.gradients[i], want.gradients[i]), gradient_limit)
        << what << ": gradient of input " << i << " got " << got.gradients[i].str() << " want "
        << want.gradients[i].str();
  }
}

void expect_bitwise(const std::string& what, const RunResult& a, const RunResult& b) {
  ASSERT_EQ(a.outputs.size(), b.outputs.size());
  for (size_t i = 0; i < a.outputs.size(); ++i)
    EXPECT_TRUE(bitwise_equal(a.outputs[i], b.outputs[i])) << what << ": output " << i;
  for (size_t i = 0; i < a.gradients.size(); ++i)
    EXPECT_TRUE(bitwise_equal(a.gradients[i], b.gradients[i])) << what << ": gradient " << i;
}

uint64_t test_seed() {
  const char* text = std::getenv("EBB_TEST_SEED");
  return text ? std::strtoull(text, nullptr, 10) : 1;
}

const std::vector<NamedCase>& all_cases() {
  static const std::vector<NamedCase> cases = [] {
    std::vector<NamedCase> out;
    for (OpRow& row : op_table(test_seed()))
      for (OpCase& c : row.cases) out.push_back({row.op, std::move(c)});
    return out;
  }();
  return cases;
}

std::string case_name(const NamedCase& n) { return n.op + "_" + n.c.name; }

void PrintTo(const NamedCase& n, std::ostream* out) { *out << case_name(n); }

GuardedMemory::GuardedMemory(Device device) : device_(device) {
  set_poison(true);
  set_red_zones(true);
}

GuardedMemory::~GuardedMemory() {
  EXPECT_NO_THROW(check_red_zones(device_));
  set_poison(false);
  set_red_zones(false);
}

}  // namespace ebb::testing
