// `ebb gradcheck`: the gradients of every operator against finite differences, in f64 on the CPU.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/op_table.h"

namespace ebb::tools {

struct GradcheckCommand {
  std::string filter = "";     // regular expression on "operator/case"; "": all
  uint64_t seed = 1;           // of inputs and directions
  double tolerance = 0;        // 0: each case's own
  int directions = 3;          // random directions per input
  bool jacobian = false;       // element by element wherever that is affordable
  bool failures_only = false;  // print only what fails
};

struct GradcheckSummary {
  int passed = 0, failed = 0;
  int skipped = 0;  // operators without a backward pass
  nlohmann::json cases = nlohmann::json::array();
};
// Prints one line per case with its worst relative error, and the closing line.
GradcheckSummary gradcheck_rows(const std::vector<testing::OpRow>& rows,
                                const GradcheckCommand& command);

// The whole table. Returns the exit code. Throws when no case matches the filter.
int run_gradcheck(const GradcheckCommand& command, nlohmann::json* cases = nullptr);

}  // namespace ebb::tools
