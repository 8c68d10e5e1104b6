// Properties generated from the op table, on the GPU: both passes against f64 on the CPU.
#include <gtest/gtest.h>

#include "tensor/check.h"
#include "tensor/device_flags.h"
#include "tests/op_harness.h"

namespace ebb::testing {
namespace {

class OpCuda : public ::testing::TestWithParam<NamedCase> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
    if (!c().cuda) GTEST_SKIP() << "CPU-only case";
  }
  void TearDown() override {
    if (cuda_device_count()) {
      EXPECT_NO_THROW(check_device_flags(gpu_));
    }
  }
  const OpCase& c() const { return GetParam().c; }
  const Device gpu_ = Device::cuda();
};

TEST_P(OpCuda, F32) {
  expect_close("cuda f32", run_case(c(), {.device = gpu_, .dtype = DType::f32}),
               exact_case(c(), DType::f32), c().f32_output, c().f32_gradient);
}

TEST_P(OpCuda, Bf16) {
  if (!c().bf16) GTEST_SKIP() << "f32-only case";
  expect_close("cuda bf16", run_case(c(), {.device = gpu_, .dtype = DType::bf16}),
               exact_case(c(), DType::bf16), c().bf16_output, c().bf16_gradient);
}

TEST_P(OpCuda, StridesDoNotMatter) {
  const RunOptions dense{.device = gpu_, .dtype = DType::f32};
  RunOptions strided = dense;
  strided.strided_inputs = strided.strided_upstream = true;
  expect_close("cuda strided", run_case(c(), strided), run_case(c(), dense), 1e-6, 1e-6);
}

TEST_P(OpCuda, WritesEverythingAndNothingElse) {
  const GuardedMemory guard(gpu_);
  for (const DType t : {DType::f32, DType::bf16}) {
    if (t == DType::bf16 && !c().bf16) continue;
    const bool f = t == DType::f32;
    expect_close("cuda poisoned", run_case(c(), {.device = gpu_, .dtype = t}), exact_case(c(), t),
                 f ? c().f32_output : c().bf16_output, f ? c().f32_gradient : c().bf16_gradient);
  }
}

TEST_P(OpCuda, RerunsBitwise) {
  for (const DType t : {DType::f32, DType::bf16}) {
    if (t == DType::bf16 && !c().bf16) continue;
    const RunOptions options{.device = gpu_, .dtype = t};
    expect_bitwise(name(t), run_case(c(), options), run_case(c(), options));
  }
}

TEST_P(OpCuda, AnySubsetOfGradients) {
  if (!c().gradients) return;
  const RunOptions options{.device = gpu_, .dtype = DType::f32};
  const RunResult all = run_case(c(), options);
  for (size_t i = 0; i < c().inputs.size(); ++i) {
    if (!all.gradients[i].defined()) continue;
    RunOptions one = options;
    one.wanted.assign(c().inputs.size(), false);
    one.wanted[i] = true;
    const RunResult r = run_case(c(), one);
    ASSERT_TRUE(r.gradients[i].defined()) << "input " << i;
    EXPECT_LE(relative_error(r.gradients[i], all.gradients[i]), 1e-6) << "input " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Table, OpCuda, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) { return case_name(info.param); });

}  // namespace
}  // namespace ebb::testing
