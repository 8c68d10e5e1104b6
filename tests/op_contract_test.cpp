// Properties generated from the op table, on the CPU.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>

#include "tensor/check.h"
#include "tensor/file.h"
#include "tests/op_harness.h"

namespace ebb::testing {
namespace {

class OpContract : public ::testing::TestWithParam<NamedCase> {
 protected:
  const OpCase& c() const { return GetParam().c; }
};

TEST_P(OpContract, MatchesReference) {
  const std::vector<Tensor> want = c().reference(rounded_inputs(c(), DType::f64));
  expect_close("f64", run_case(c(), {}), {want, {}}, c().f64_limit, 0);
}

TEST_P(OpContract, F32MatchesF64) {
  expect_close("f32", run_case(c(), {.dtype = DType::f32}), exact_case(c(), DType::f32),
               c().f32_output, c().f32_gradient);
}

TEST_P(OpContract, GradientCheck) {
  if (!c().gradients) return;
  const GradcheckResult r =
      gradcheck_case(c(), {.tolerance = c().gradcheck_tolerance, .full_jacobian = c().jacobian});
  EXPECT_TRUE(r.ok) << r.message;
}

TEST_P(OpContract, StridesDoNotMatter) {
  const RunResult dense = run_case(c(), {});
  expect_close("strided", run_case(c(), {.strided_inputs = true, .strided_upstream = true}), dense,
               1e-12, 1e-12);
}

TEST_P(OpContract, OffsetsBeyond32BitsDoNotMatter) {
  int64_t rows = 1;
  for (const OpInput& in : c().inputs)
    if (in.value.defined() && in.value.dim() > 1)
      rows = std::max(rows, in.value.numel() / std::max<int64_t>(1, in.value.shape().back()));
  if (rows > 20'000) return;  // a page of memory each
  if (!far_copy(Tensor::zeros({2, 1}, DType::f64)).defined())
    GTEST_SKIP() << "no 16 GB of address space";
  expect_close("far rows", run_case(c(), {.far_rows = true}), run_case(c(), {}), 1e-12, 1e-12);
}

TEST_P(OpContract, AnySubsetOfGradients) {
  if (!c().gradients) return;
  const RunResult all = run_case(c(), {});
  for (size_t i = 0; i < c().inputs.size(); ++i) {
    if (!all.gradients[i].defined()) continue;
    std::vector<bool> only(c().inputs.size(), false);
    only[i] = true;
    const RunResult one = run_case(c(), {.wanted = only});
    for (size_t j = 0; j < c().inputs.size(); ++j)
      EXPECT_EQ(one.gradients[j].defined(), j == i) << "input " << j;
    ASSERT_TRUE(one.gradients[i].defined()) << "input " << i;
    EXPECT_LE(relative_error(one.gradients[i], all.gradients[i]), 1e-12) << "input " << i;
  }
}

TEST_P(OpContract, WritesEverythingAndNothingElse) {
  const GuardedMemory guard(Device::cpu());
  expect_close("poisoned", run_case(c(), {.dtype = DType::f32}), exact_case(c(), DType::f32),
               c().f32_output, c().f32_gradient);
}

TEST_P(OpContract, RerunsBitwise) {
  const RunOptions options{.dtype = DType::f32};
  expect_bitwise("rerun", run_case(c(), options), run_case(c(), options));
}

INSTANTIATE_TEST_SUITE_P(Table, OpContract, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) { return case_name(info.param); });

TEST(OpTable, ErrorsNameOpAndReason) {
  for (const OpRow& row : op_table(test_seed())) {
    EXPECT_FALSE(row.errors.empty()) << row.op << " states no error case";
    for (const OpError& e : row.errors) {
      try {
        e.run();
        ADD_FAILURE() << row.op << "/" << e.name << " did not throw";
      } catch (const Error& error) {
        EXPECT_TRUE(std::regex_search(error.what(), std::regex(e.pattern)))
            << row.op << "/" << e.name << ": \"" << error.what() << "\" does not match "
            << e.pattern;
      }
    }
  }
}

TEST(OpTable, EveryOpStatesItsCost) {
  std::stringstream listed(EBB_OP_LIST);
  for (std::string op; listed >> op;)
    EXPECT_NE(read_file(EBB_OPS_FOLDER "/" + op + ".h").find("_cost("), std::string::npos)
        << op << ": bytes and FLOPs belong into its header";
}

TEST(OpTable, EveryOpHasARow) {
  std::set<std::string> rows;
  for (const OpRow& row : op_table(test_seed())) rows.insert(row.op);
  std::stringstream listed(EBB_OP_LIST);  // space separated, from cmake/ops.cmake
  for (std::string op; listed >> op;)
    EXPECT_TRUE(rows.count(op)) << op << " is in cmake/ops.cmake but has no row in the table";
}

}  // namespace
}  // namespace ebb::testing
