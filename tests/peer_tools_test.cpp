// The scripts for GPU machines, as far as they go without one: rows of peers are rows of ours,
// failures cost one row, the sanitizers' share of time, skips and bad arguments.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tensor/file.h"
#include "tests/cli.h"

namespace ebb::testing {
namespace {

using nlohmann::json;
const std::string kTools = EBB_TEST_DATA "/../../tools/";

class PeerTools : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::system("python3 -c '' > /dev/null 2>&1") != 0) GTEST_SKIP() << "there is no python3";
  }
  std::string at(const std::string& name) const { return scratch_.path() + "/" + name; }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(at(name)) << text;
  }
  CliResult python(const std::string& arguments) const { return run_program("python3", arguments); }
  const ScratchFolder scratch_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(PeerTools, EveryPeerIsOfARowThatIsMeasured) {
  const CliResult rows = run_ebb("bench ops --list --device cuda");
  ASSERT_EQ(rows.code, 0) << rows.err;
  std::set<std::string> known;
  std::istringstream lines(rows.out);
  for (std::string line; std::getline(lines, line);) known.insert(line);
  EXPECT_GT(known.size(), 40u);
  const CliResult peers = python("-c 'import sys; sys.path.insert(0, \"" + kTools +
                                 "\"); import peer_rows; [print(p.row) for p in "
                                 "peer_rows.peers()]'");
  ASSERT_EQ(peers.code, 0) << peers.err;
  std::istringstream peer_lines(peers.out);
  int count = 0;
  for (std::string line; std::getline(peer_lines, line); ++count)
    EXPECT_TRUE(known.contains(line)) << line;
  EXPECT_GT(count, 30);
}

TEST_F(PeerTools, NamesOfPeersAreDistinctAndListed) {
  const CliResult r = python(kTools + "bench_peers.py --list --filter 'kda B8|attention B8 T4096'");
  ASSERT_EQ(r.code, 0) << r.err;
  for (const char* name : {"kda B8 T4096 H6 K64 V128 ", "[bounded gate]", "[cuDNN]", "[FA2]"})
    EXPECT_TRUE(has(r.out, name)) << name << " in\n" << r.out;
  const CliResult none = python(kTools + "bench_peers.py --list --filter no_such_row");
  EXPECT_EQ(none.code, 1);
  EXPECT_TRUE(has(none.err, "no row matches 'no_such_row'")) << none.err;
}

TEST_F(PeerTools, ComparesAFileOfPeersWithOurs) {
  write("peers.json",
        R"({"gpu": "x", "results": [
          {"name": "kda B8 T4096 H6 K64 V128 [bounded gate]", "row": "kda B8 T4096 H6 K64 V128",
           "fwd_eager_ms": 1, "fwd_graph_ms": 0.5, "fwd_bwd_eager_ms": 3, "fwd_bwd_graph_ms": 2,
           "extra_bytes": 900000000},
          {"name": "gdn2 B8 T4096 H6 K64 V128", "error": "it crashed"}]})");
  write("ours.json",
        R"({"rows": [{"op": "kda", "shape": "B8 T4096 H6 K64 V128", "forward": {"ms": 0.2},
           "backward": {"ms": 0.3}, "memory": {"peak_bytes": 700000000, "given_bytes": 400000000}},
           {"op": "gdn2", "shape": "B8 T4096 H6 K64 V128", "error": "failed"}]})");
  const CliResult r = python(kTools + "bench_peers.py --compare --json " + at("peers.json") +
                             " --merge " + at("ours.json"));
  ASSERT_EQ(r.code, 0) << r.err;
  for (const char* text : {"fwd 0.5000 (eager 1.0000) ms, ebb 0.2000: x2.50",
                           "fwd+bwd 2.0000 (eager 3.0000) ms, ebb 0.5000: x4.00",
                           "extra 900 MB, ebb 300: x3.00", "ERROR it crashed"})
    EXPECT_TRUE(has(r.out, text)) << text << " in\n" << r.out;
  const json kept = json::parse(read_file(at("peers.json")));
  EXPECT_EQ(kept["gpu"], "x");
  EXPECT_DOUBLE_EQ(kept["results"][0]["ratio_fwd_graph_ms"], 2.5);
  EXPECT_EQ(kept["results"][1]["error"], "it crashed");
}

// Errors of peers that are known are set beside newer ones of ours, operator by operator in turn.
TEST_F(PeerTools, ErrorsMeasuredBeforeAreTakenAgain) {
  std::string items;
  for (const char* name : {"kda/a", "kda/b", "kda/unknown", "gla/a", "gla/b"}) {
    const std::filesystem::path path = at(std::string("goldens/") + name + ".safetensors");
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << "not read";
    items += std::string(items.empty() ? "" : ",") + R"({"name": ")" + name +
             R"(", "tensors": [{"name": "out.o", "error": 0.004}]})";
  }
  write("ours.json", R"({"commit": "abc", "items": [)" + items + "]}");
  write("errors.json", R"({"gpu": "x", "configurations": "first", "limit": 1.5,
          "peer_failed": {"gla/b": "it crashed"}, "rows": [
          {"case": "kda/a", "tensor": "out.o", "ebb": 1, "peer": 0.0032, "judged": true},
          {"case": "kda/b", "tensor": "out.o", "ebb": 1, "peer": 0.002, "judged": true},
          {"case": "gla/a", "tensor": "out.o", "ebb": 1, "peer": 0.0001, "judged": false}]})");
  const auto again = [&](const std::string& more) {
    return python(kTools + "peer_errors.py " + at("goldens") + " " + at("ours.json") +
                  " --no-run --json " + at("errors.json") + more);
  };
  const CliResult r = again(" --again " + at("errors.json"));
  EXPECT_EQ(r.code, 1) << r.err;
  size_t last = 0;
  for (const char* text :
       {"kda/a ", "ratio 1.25", "gla/a ", "ratio 40.00  (not judged)", "kda/b ", "ratio 2.00",
        "gla/b ", "the peer: it crashed", "kda ", "2 tensors, worst ratio 2.00 (kda/b out.o)",
        "1 above 1.5; the peer failed in 1 of 4 cases"}) {
    const size_t found = r.out.find(text, last);
    ASSERT_NE(found, std::string::npos) << text << " in\n" << r.out;
    last = found + 1;
  }
  const json kept = json::parse(read_file(at("errors.json")));
  EXPECT_EQ(kept["gpu"], "x");
  EXPECT_EQ(kept["commit"], "abc");
  EXPECT_EQ(kept["peer_failed"], json({{"gla/b", "it crashed"}}));
  ASSERT_EQ(kept["rows"].size(), 3u);
  EXPECT_EQ(kept["rows"][0]["case"], "gla/a");
  EXPECT_EQ(kept["rows"][0]["judged"], false);
  EXPECT_EQ(kept["rows"][1]["ebb"], 0.004);
  EXPECT_EQ(again(" --again " + at("errors.json")).out, r.out);
  EXPECT_EQ(again(" --op kda --filter a --again " + at("errors.json")).code, 0);
  EXPECT_EQ(again("").code, 2);
}

// A task that raises, one that never ends, one whose process dies: the others keep their results.
TEST_F(PeerTools, AFailureCostsItsOwnTaskOnly) {
  write("tasks.py",
        "import json, os, sys, time\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from peer_worker import run_all\n"
        "def run(task, report):\n"
        "    report({'value': task})\n"
        "    if task == 1: raise ValueError('bad\\nmore')\n"
        "    if task == 2: time.sleep(60)\n"
        "    if task == 3: os.abort()\n"
        "    report({'end': True})\n"
        "print(json.dumps([dict(run_all(range(5), run, processes=n, limit=2)) for n in (1, 3)]))\n"
        "print(json.dumps(dict(run_all(range(5), run, budget=0))))\n");
  const CliResult r = python(at("tasks.py") + " " + kTools);
  ASSERT_EQ(r.code, 0) << r.err;
  std::istringstream lines(r.out);
  std::string first, second;
  std::getline(lines, first), std::getline(lines, second);
  const json ends = json::parse(first);
  for (const json& results : ends) {
    ASSERT_EQ(results.size(), 5u);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(results[std::to_string(i)]["value"], i);
    for (const char* fine : {"0", "4"}) {
      EXPECT_EQ(results[fine]["end"], true);
      EXPECT_FALSE(results[fine].contains("error"));
    }
    EXPECT_EQ(results["1"]["error"], "ValueError: bad");
    EXPECT_EQ(results["2"]["error"], "stopped after 2 s");
    EXPECT_EQ(results["3"]["error"], "the process ended (SIGABRT)");
  }
  const json late = json::parse(second);
  EXPECT_EQ(late.size(), 5u);
  for (const auto& [task, result] : late.items())
    EXPECT_EQ(result["error"], "not reached within the time given") << task;
}

// With stand-ins for the test binary and the sanitizer: one case is reported, and a process is not
// given cases of two operators.
TEST_F(PeerTools, SanitizerStepSaysWhatItReached) {
  write("cuda_tests",
        "#!/bin/bash\necho Table/OpCuda.\nfor i in {1..15}; do\n"
        "  echo \"  F32/rotary_$i  # GetParam() = x\"; echo \"  F32/swiglu_$i\"; done\n");
  write(
      "compute-sanitizer",
      "#!/bin/bash\n[[ \"$1\" == --version ]] && { echo \"Version ${YEAR:-2025}.3.1.0\"; exit; }\n"
      "[[ \"$*\" == *rotary* && \"$*\" == *swiglu* ]] && { echo '== two kinds'; exit 9; }\n"
      "[[ \"$*\" == *swiglu_${BAD:-none}* ]] && { echo '== bad read'; exit 9; }\nexit 0\n");
  for (const char* name : {"cuda_tests", "compute-sanitizer"})
    std::filesystem::permissions(at(name), std::filesystem::perms::owner_all);
  const auto run = [&](const std::string& set, int seconds) {
    return run_program("env", set + " PATH=" + scratch_.path() + ":$PATH bash " + kTools +
                                  "gpu_sanitize.sh memcheck " + at("cuda_tests") + " " +
                                  scratch_.path() + " " + std::to_string(seconds) + " 2");
  };
  CliResult r = run("", 20);
  EXPECT_EQ(r.code, 0) << r.out << r.err;
  EXPECT_TRUE(has(r.out, "checked 30 of 30 cases, nothing reported")) << r.out;
  EXPECT_TRUE(has(read_file(at("memcheck.cases")), "Table/OpCuda.F32/rotary_14\n"));
  r = run("BAD=13", 20);
  EXPECT_EQ(r.code, 1) << r.out;
  EXPECT_TRUE(has(r.out, "== bad read")) << r.out;
  EXPECT_TRUE(has(r.out, "cases without a report; 1 groups of up to 64 with one")) << r.out;
  r = run("", 0);  // no time for a single group
  EXPECT_EQ(r.code, 1) << r.out;
  EXPECT_TRUE(has(r.out, "checked 0 of 30 cases")) << r.out;
  std::filesystem::rename(at("compute-sanitizer"), at("another"));
  r = run("BAD=13 COMPUTE_SANITIZER=" + at("another"), 20);
  EXPECT_TRUE(has(r.out, "1 groups of up to 64 with one")) << r.out;
}

TEST_F(PeerTools, GpuCheckSaysWhenThereIsNoGpuAndWhatIsWrong) {
  const auto check = [&](const std::string& arguments) {
    return run_program("env", "PATH=/usr/bin:/bin bash " + kTools + "gpu_check.sh " + arguments);
  };
  EXPECT_TRUE(has(check("--help").out, "--minutes N"));
  EXPECT_TRUE(has(check("--minutes none").err, "wants a number above 0, not none"));
  EXPECT_TRUE(has(check("--unknown").err, "unknown option --unknown"));
  EXPECT_TRUE(has(check("/no/such/folder").err, "/no/such/folder does not exist"));
  if (std::system("nvidia-smi -L > /dev/null 2>&1") == 0) return;
  const CliResult r = check("");
  EXPECT_EQ(r.code, 0);
  EXPECT_TRUE(has(r.out, "SKIPPED, no GPU here")) << r.out;
}

}  // namespace
}  // namespace ebb::testing
