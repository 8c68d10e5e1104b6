// What is said on standard error beside the work: progress, notes, warnings, the last error.
//   notice("step 3\n");
// A terminal that is gone or a full disk behind a redirection costs the line, not the work: nothing
// is thrown.
#pragma once
#include <cstdio>
#include <string_view>

namespace ebb {

inline void notice(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace ebb
