// The command line as a user meets it: help, exit codes, one-line errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "tensor/file.h"
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

TEST(Cli, BenchGemm) {
  const ScratchFolder scratch;
  const std::string json = scratch.path() + "/gemm.json";
  const CliResult r = run_ebb("bench gemm --pairs 3 --json " + json);
  ASSERT_EQ(r.code, 0) << r.err;
  const auto result = nlohmann::json::parse(read_file(json));
  EXPECT_GE(result["rows"].size(), 10u);
  for (const auto& row : result["rows"]) EXPECT_GT(row["speed_ratio"].get<double>(), 0.1) << row;
  expect_one_line_error(run_ebb("bench gemm --pairs 2"), 2, "pairs");
  expect_one_line_error(run_ebb("bench gemm --filter nothing"), 1, "--filter 'nothing'");
}

TEST(Cli, BenchOps) {
  const ScratchFolder scratch;
  const std::string json = scratch.path() + "/results/ops.json";
  const CliResult r = run_ebb("bench ops --filter '^linear 1024' --repeats 3 --json " + json);
  ASSERT_EQ(r.code, 0) << r.err;
  const auto result = nlohmann::json::parse(read_file(json));
  EXPECT_EQ(result["command"], "bench ops");
  EXPECT_FALSE(result["device"]["name"].get<std::string>().empty());
  EXPECT_GT(result["ceilings"]["bytes_per_second"].get<double>(), 1e8);
  ASSERT_EQ(result["rows"].size(), 1u);
  for (const char* pass : {"forward", "backward"}) {
    const auto& p = result["rows"][0][pass];
    const double ms = p["ms"].get<double>();
    EXPECT_GT(ms, 0) << pass;
    EXPECT_NEAR(p["gb_per_s"].get<double>(), p["bytes"].get<double>() / ms * 1e-6, 1e-6) << pass;
    EXPECT_NEAR(p["share_of_floor"].get<double>(), p["floor_ms"].get<double>() / ms, 1e-9) << pass;
  }
  // x, w, y, dy, dx, dw are all there is when dw is made.
  const auto& memory = result["rows"][0]["memory"];
  EXPECT_EQ(memory["tensor_bytes"], 4 * 2 * (1024 * 512 + 512 * 1536 + 1024 * 1536));
  EXPECT_GE(memory["peak_bytes"], memory["tensor_bytes"]);
  EXPECT_LE(memory["peak_bytes"].get<double>(), 1.5 * memory["tensor_bytes"].get<double>());
  // Twice the multiplications in backward: dx and dw.
  EXPECT_NEAR(result["rows"][0]["backward"]["flops"].get<double>() /
                  result["rows"][0]["forward"]["flops"].get<double>(),
              2, 0.1);
  expect_one_line_error(run_ebb("bench ops --filter no_such_row"), 1, "no benchmark matches");
  expect_one_line_error(run_ebb("bench ops --filter '('"), 2, "regular expression");
  expect_one_line_error(run_ebb("bench ops --dtype bf16"), 2, "f32 on cpu");
  expect_one_line_error(run_ebb("bench ops --repeats 0"), 2, "repeats");
  expect_one_line_error(run_ebb("bench opps"), 2, "opps");
}

TEST(Cli, BenchModels) {
  const ScratchFolder scratch;
  const std::string
      json = scratch.path() + "/models.json",
      small =
          " --set model.hidden_size=32 --set model.num_heads=2 --set model.num_hidden_layers=2"
          " --set model.vocab_size=64 --set model.intermediate_size=32";
  const std::string recipe = EBB_TEST_DATA "/../../recipes/decay/tpe-vector-lightnet.json";
  const CliResult r = run_ebb("bench models dlt-160m " + recipe + small +
                              " --batch 2 --length 24 --repeats 3 --warmup 1 --json " + json);
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("training steps on 2 x 24 tokens"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("over the fastest"), std::string::npos) << r.out;
  const auto result = nlohmann::json::parse(read_file(json));
  EXPECT_EQ(result["command"], "bench models");
  EXPECT_EQ(result["settings"]["length"], 24);
  ASSERT_EQ(result["rows"].size(), 2u);
  EXPECT_EQ(result["rows"][0]["model"], "dlt-160m");
  EXPECT_EQ(result["rows"][1]["model"], "tpe-vector-lightnet");
  EXPECT_EQ(result["rows"][1]["config"]["rpe"], "tpe");
  for (const auto& row : result["rows"]) {
    const double ms = row["ms"].get<double>();
    EXPECT_LE(row["ms_lower_quartile"].get<double>(), ms);
    EXPECT_LE(ms, row["ms_upper_quartile"].get<double>());
    EXPECT_NEAR(row["tokens_per_second"].get<double>() * ms, 48e3, 1e-3);
    // Masters, gradients and two moments at least.
    EXPECT_GE(row["peak_bytes"].get<double>(), 16 * row["parameters"].get<double>());
    EXPECT_NEAR(row["loss"].get<double>(), std::log(64), 0.5);
  }
  const CliResult list = run_ebb("bench models --list");
  for (const char* name : {"gdn-100m\n", "rwkv7-100m\n", "llama-100m\n", "dlt-160m\n"})
    EXPECT_NE(list.out.find(name), std::string::npos) << list.out;
  expect_one_line_error(run_ebb("bench models gdn-10m"), 1, "did you mean gdn-100m");
  expect_one_line_error(run_ebb("bench models gdn-100m --set model.hiden_size=3"), 1,
                        "hiden_size.*did you mean hidden_size");
  expect_one_line_error(run_ebb("bench models --batch 0"), 2, "batch");
  expect_one_line_error(run_ebb("bench models --dtype bf16"), 2, "f32 on cpu");
}

}  // namespace
}  // namespace ebb::testing
