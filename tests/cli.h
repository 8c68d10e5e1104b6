// Runs the ebb binary.
#pragma once
#include <string>

namespace ebb::testing {

struct CliResult {
  int code = -1;  // exit status; 128 + n when killed by signal n
  std::string out, err;
};
// `arguments` go through the shell, so quote what needs it.
CliResult run_ebb(const std::string& arguments);
CliResult run_program(const std::string& path, const std::string& arguments);

// A file or folder that is gone at the end of the scope.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace ebb::testing
