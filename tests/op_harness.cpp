#include "tests/op_harness.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

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

Tensor far_copy(const Tensor& t) {
  constexpr int64_t kFar = (int64_t(1) << 31) + 1000;
  const int split = t.dim() > 1 ? t.dim() - 1 : 0;  // one dimension: its elements are the rows
  const int64_t rows = t.shape().first(t.dim() > 1 ? split : t.dim()).numel();
  if (t.numel() == 0 || rows < 2) return t;
  const int64_t width = t.numel() / rows, apart = (kFar / (rows - 1) / 16 + 1) * 16 + width;
  Shape strides = dense_strides(t.shape());
  for (int d = 0; d < t.dim(); ++d)
    if (d < split || t.dim() == 1) strides[d] = strides[d] / width * apart;
  const size_t bytes = size_t(((rows - 1) * apart + width) * item_size(t.dtype()));
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return {};
  const auto owner = std::shared_ptr<void>(p, [bytes](void* q) { ::munmap(q, bytes); });
  const Tensor far = Tensor::wrap(borrow(p, bytes, owner), t.dtype(), t.shape(), strides, 0);
  const Tensor dense = t.contiguous();  // written by hand: what copies is under test
  const size_t row_bytes = size_t(width * item_size(t.dtype()));
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(static_cast<char*>(p) + size_t(i * apart * item_size(t.dtype())),
                static_cast<const char*>(dense.raw()) + size_t(i) * row_bytes, row_bytes);
  return far;
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
    if (options.far_rows) t = far_copy(t);
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
    if (options.far_rows) d = far_copy(d);
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
