// `ebb gradcheck` must notice a wrong gradient, and say so with its exit code.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tensor/file.h"
#include "tests/cli.h"
#include "tests/tape_ops.h"
#include "tools/gradcheck.h"

namespace ebb::testing {
namespace {

// Rows that double their input; `wrong` is a factor on the gradient.
OpRow doubling(const std::string& name, double wrong, bool gradients = true) {
  OpRow row{.op = "doubling"};
  OpCase c;
  c.name = name;
  c.inputs = {{"x", Tensor::from(std::vector<double>{1, -2, 3}, {3})},
              {"unused", Tensor::from(std::vector<double>{1}, {1})}};
  c.run = [wrong](std::span<const Var> in) { return std::vector{scale(in[0], 2, wrong)}; };
  c.gradients = gradients;
  row.cases = {c};
  return row;
}
std::string printed(const std::vector<OpRow>& rows, const tools::GradcheckCommand& command,
                    tools::GradcheckSummary* summary) {
  ::testing::internal::CaptureStdout();
  *summary = tools::gradcheck_rows(rows, command);
  return ::testing::internal::GetCapturedStdout();
}

TEST(GradcheckCommand, CountsPrintsAndNamesTheInput) {
  tools::GradcheckSummary s;
  const std::vector<OpRow> rows{doubling("right", 1), doubling("wrong", 1.001),
                                doubling("forward_only", 1, false)};
  const std::string out = printed(rows, {}, &s);
  EXPECT_EQ(s.passed, 1);
  EXPECT_EQ(s.failed, 1);
  EXPECT_EQ(s.skipped, 1);
  EXPECT_TRUE(contains(out, "ok    doubling/right"));
  EXPECT_TRUE(contains(out, "FAIL  doubling/wrong"));
  EXPECT_TRUE(contains(out, "[input 0 is x]"));
  EXPECT_TRUE(contains(out, "skip  doubling/forward_only"));
  EXPECT_TRUE(contains(out, "\n1 passed, 1 failed, 1 without a backward pass\n"));
  EXPECT_EQ(s.cases[1]["case"], "doubling/wrong");
  EXPECT_EQ(s.cases[1]["ok"], false);
}

TEST(GradcheckCommand, FilterToleranceAndFailuresOnly) {
  tools::GradcheckSummary s;
  const std::vector<OpRow> rows{doubling("right", 1), doubling("wrong", 1.001)};
  printed(rows, {.filter = "/right$"}, &s);
  EXPECT_EQ(s.passed + s.failed, 1);
  printed(rows, {.tolerance = 0.01}, &s);
  EXPECT_EQ(s.failed, 0);
  const std::string out = printed(rows, {.failures_only = true}, &s);
  EXPECT_FALSE(contains(out, "doubling/right"));
  EXPECT_TRUE(contains(out, "doubling/wrong"));
}

TEST(GradcheckCommand, InputsMarkedAsConstantsAreHeldFixed) {
  OpRow row{.op = "weighted"};
  OpCase c;
  c.name = "case";
  const Tensor values = Tensor::from(std::vector<double>{1, -2, 3}, {3});
  c.inputs = {{"x", values}, {.name = "weights", .value = values, .differentiable = false}};
  c.run = [](std::span<const Var> in) { return std::vector{mul(in[0], in[1].detach())}; };
  row.cases = {c};
  tools::GradcheckSummary s;
  printed({row}, {}, &s);
  EXPECT_EQ(s.passed, 1);
  row.cases[0].inputs[1].differentiable = true;  // unmarked, the missing gradient is an error
  EXPECT_TRUE(contains(printed({row}, {}, &s), "[input 1 is weights]"));
  EXPECT_EQ(s.failed, 1);
}

TEST(GradcheckCommand, AnExceptionIsAFailureOfItsCase) {
  OpRow row = doubling("throws", 1);
  row.cases[0].run = [](std::span<const Var>) -> std::vector<Var> { fail("doubling: no luck"); };
  tools::GradcheckSummary s;
  const std::string out = printed({row, doubling("right", 1)}, {}, &s);
  EXPECT_EQ(s.failed, 1);
  EXPECT_EQ(s.passed, 1);
  EXPECT_TRUE(contains(out, "doubling: no luck"));
}

TEST(GradcheckCommand, CommandLine) {
  const CliResult ok = run_ebb("gradcheck --filter '^rms_norm/' --jacobian");
  EXPECT_EQ(ok.code, 0) << ok.err;
  EXPECT_TRUE(contains(ok.out, "ok    rms_norm/"));
  EXPECT_TRUE(contains(ok.out, " passed, 0 failed\n"));
  const CliResult failed = run_ebb("gradcheck --filter '^rms_norm/' --tolerance 1e-17");
  EXPECT_EQ(failed.code, 1);
  EXPECT_TRUE(contains(failed.out, "FAIL  rms_norm/"));
  const CliResult none = run_ebb("gradcheck --filter nothing_is_called_this");
  EXPECT_EQ(none.code, 1);
  EXPECT_TRUE(contains(none.err, "ebb: error: no case of the operator table matches --filter"));
  const CliResult bad = run_ebb("gradcheck --filter '('");
  EXPECT_EQ(bad.code, 2);
  EXPECT_TRUE(contains(bad.err, "is not a regular expression"));
  for (const char* value : {"nan", "0", "-1", "1", "x"}) {
    const CliResult r = run_ebb(std::string("gradcheck --tolerance ") + value);
    EXPECT_EQ(r.code, 2) << value;
    EXPECT_TRUE(contains(r.err, "--tolerance")) << r.err;
  }
  const ScratchFolder scratch;
  const std::string file = scratch.path() + "/gradcheck.json";
  EXPECT_EQ(run_ebb("gradcheck --filter '^rms_norm/' --json " + file).code, 0);
  const nlohmann::json result = nlohmann::json::parse(read_file(file));
  EXPECT_EQ(result["command"], "gradcheck");
  EXPECT_FALSE(result["cases"].empty());
}

}  // namespace
}  // namespace ebb::testing
