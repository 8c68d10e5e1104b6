// One line of what `ebb verify` found out.
#pragma once
#include <cstdint>
#include <string>

namespace ebb::tools {

// A compared tensor, or a count of things that differ.
struct VerifyResult {
  std::string name;
  double error = 0;
  double limit = 0;
  std::string measure = "relative";  // what error and limit are
  double golden_error = -1;          // bf16: distance from the golden tensor, for information
  int64_t total = 0;                 // > 0: error counts how many of these differ
  std::string note = {};             // which ones
  bool informative = false;          // reported, never failed
  bool passed() const { return informative || error <= limit; }  // false for NaN
};

}  // namespace ebb::tools
