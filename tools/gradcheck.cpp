#include "tools/gradcheck.h"

#include <fmt/format.h>

#include <chrono>
#include <regex>

#include "tensor/check.h"
#include "tools/commands.h"

namespace ebb::tools {
namespace {

using testing::OpCase;
using testing::OpRow;

// Evaluations a full Jacobian may take: 4 per input element, and a backward per output element.
constexpr int64_t kJacobianElements = 400;

bool affordable_jacobian(const OpCase& c) {
  int64_t elements = 0;
  for (const testing::OpInput& in : c.inputs)
    if (in.value.defined()) elements += in.value.numel();
  return elements <= kJacobianElements;
}

GradcheckResult check_case(const OpCase& c, const GradcheckCommand& command) {
  try {
    return testing::gradcheck_case(
        c, {.tolerance = command.tolerance > 0 ? command.tolerance : c.gradcheck_tolerance,
            .directions = command.directions,
            .full_jacobian = c.jacobian || (command.jacobian && affordable_jacobian(c)),
            .seed = command.seed});
  } catch (const Error& e) {
    GradcheckResult r;
    r.ok = false;
    r.worst = std::numeric_limits<double>::infinity();
    r.message = e.what();
    return r;
  }
}

// The message with "input 1" followed by its name: "input 1 (w)".
std::string with_input_name(const GradcheckResult& r, const OpCase& c) {
  if (r.worst_input < 0 || size_t(r.worst_input) >= c.inputs.size()) return r.message;
  return fmt::format("{} [input {} is {}]", r.message, r.worst_input,
                     c.inputs[size_t(r.worst_input)].name);
}

std::regex compile(const std::string& filter) {
  try {
    return std::regex(filter);
  } catch (const std::regex_error&) {
    throw UsageError(fmt::format("--filter '{}' is not a regular expression", filter));
  }
}

}  // namespace

GradcheckSummary gradcheck_rows(const std::vector<OpRow>& rows, const GradcheckCommand& command) {
  GradcheckSummary s;
  const std::regex pattern = compile(command.filter);
  for (const OpRow& row : rows)
    for (const OpCase& c : row.cases) {
      const std::string name = row.op + "/" + c.name;
      if (!command.filter.empty() && !std::regex_search(name, pattern)) continue;
      if (!c.gradients) {
        ++s.skipped;
        if (!command.failures_only) fmt::print("skip  {:<48} no backward pass\n", name);
        continue;
      }
      const auto start = std::chrono::steady_clock::now();
      const GradcheckResult r = check_case(c, command);
      const double ms =
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
              .count();
      (r.ok ? s.passed : s.failed) += 1;
      const std::string message = r.ok ? "" : with_input_name(r, c);
      s.cases.push_back({{"case", name}, {"ok", r.ok}, {"worst", r.worst}, {"message", message}});
      if (!r.ok || !command.failures_only)
        fmt::print("{}  {:<48} worst {:.2e}  {:.0f} ms\n", r.ok ? "ok  " : "FAIL", name, r.worst,
                   ms);
      if (!r.ok) fmt::print("      {}\n", message);
      std::fflush(stdout);
    }
  if (s.passed + s.failed + s.skipped > 0)
    fmt::print("{} passed, {} failed{}\n", s.passed, s.failed,
               s.skipped ? fmt::format(", {} without a backward pass", s.skipped) : "");
  return s;
}

int run_gradcheck(const GradcheckCommand& command, nlohmann::json* cases) {
  compile(command.filter);  // before the work of drawing the table
  const GradcheckSummary s = gradcheck_rows(testing::op_table(command.seed), command);
  check(s.passed + s.failed + s.skipped > 0, "no case of the operator table matches --filter");
  if (cases) *cases = s.cases;
  return s.failed ? kExitFailure : 0;
}

}  // namespace ebb::tools
