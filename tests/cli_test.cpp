// The command line as a user meets it: help, exit codes, one-line errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <sstream>

#include "tests/cli.h"

namespace ebb::testing {
namespace {

// Every subcommand, as `ebb --help` lists them.
std::vector<std::string> subcommands() {
  std::vector<std::string> out;
  std::istringstream lines(run_ebb("--help").out);
  bool listing = false;
  for (std::string line; std::getline(lines, line);) {
    if (line == "Subcommands:")
      listing = true;
    else if (listing && line.starts_with("  ") && line[2] != ' ')
      out.push_back(line.substr(2, line.find(' ', 2) - 2));
    else if (line.empty())
      listing = false;
  }
  return out;
}

void expect_one_line_error(const CliResult& r, int code, const std::string& pattern) {
  EXPECT_EQ(r.code, code) << r.err;
  EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
  EXPECT_TRUE(r.err.starts_with("ebb: error: ")) << r.err;
  EXPECT_TRUE(std::regex_search(r.err, std::regex(pattern))) << r.err << " against " << pattern;
}

TEST(Cli, HelpOfEverything) {
  const CliResult r = run_ebb("--help");
  EXPECT_EQ(r.code, 0);
  EXPECT_NE(r.out.find("Examples:"), std::string::npos);
  for (const std::string& name : subcommands()) {
    const CliResult h = run_ebb(name + " --help");
    EXPECT_EQ(h.code, 0) << name;
    EXPECT_NE(h.out.find("Usage: ebb " + name), std::string::npos) << h.out;
    EXPECT_NE(h.out.find("Examples:"), std::string::npos) << name << " shows no example";
    EXPECT_EQ(h.err, "") << name;
  }
}

TEST(Cli, Version) {
  const CliResult r = run_ebb("--version");
  EXPECT_EQ(r.code, 0);
  EXPECT_TRUE(std::regex_search(r.out, std::regex("^ebb [0-9]+\\.[0-9]+\\.[0-9]+ "))) << r.out;
  for (const char* what : {"CUDA", "BLAS", "found", "missing"})
    EXPECT_NE(r.out.find(what), std::string::npos) << what;
}

TEST(Cli, WrongUse) {
  expect_one_line_error(run_ebb(""), 2, "subcommand is required");
  expect_one_line_error(run_ebb("--nonsense"), 2, "--nonsense");
  expect_one_line_error(run_ebb("qwertyuiop"), 2, "unknown command 'qwertyuiop'; ");
  for (const std::string& name : subcommands())
    expect_one_line_error(run_ebb(name + " --no-such-flag"), 2, "--no-such-flag");
}

}  // namespace
}  // namespace ebb::testing
