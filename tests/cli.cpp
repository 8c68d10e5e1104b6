#include "tests/cli.h"

#include <stdlib.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "tensor/file.h"

namespace ebb::testing {

CliResult run_ebb(const std::string& arguments) { return run_program(EBB_BINARY, arguments); }

CliResult run_program(const std::string& path, const std::string& arguments) {
  const ScratchFolder scratch;
  const std::string out = scratch.path() + "/out", err = scratch.path() + "/err";
  const std::string command = "\"" + path + "\" " + arguments + " >" + out + " 2>" + err;
  const int status = std::system(command.c_str());
  CliResult r;
  r.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  r.out = read_file(out);
  r.err = read_file(err);
  return r;
}

ScratchFolder::ScratchFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "ebb_test_XXXXXX").string();
  if (!mkdtemp(name.data())) throw std::runtime_error("cannot make " + name);
  path_ = name;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace ebb::testing
