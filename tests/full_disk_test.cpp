// A disk that fills up, and a file size limit, in the middle of every command that writes: one
// clear line, nothing half-written left, what was there before intact, and a later run goes on.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "tensor/compare.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"
#include "tests/cli.h"
#include "tests/model_folder.h"
#include "train/resume.h"
#include "train/shards.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class FullDisk : public ::testing::Test {
 protected:
  void SetUp() override {
    save_small_model(at("model"));
    write_file_atomically(at("text.txt"), some_text(40000));
    ShardWriter bytes(at("text"), Tokenizer::bytes().vocab_hash(), 257);
    bytes.add(Tokenizer::bytes().encode_document(some_text(20000)));
    bytes.finish();
    json recipe = small_recipe(at("text"));
    recipe.update({{"steps", 8}, {"log_every", 1}, {"keep_last", 100}});
    write_file_atomically(at("recipe.json"), recipe.dump());
    fs::create_directories(disk());
  }
  void TearDown() override {
    if (mounted_) ::umount(disk().c_str());
  }

  // A file system of its own; false, with the reason said, where this user may not make one.
  bool mount_disk(const std::string& size) {
    mounted_ = ::mount("ebb_test", disk().c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0;
    if (!mounted_) reason_ = std::string("no tmpfs can be mounted here: ") + std::strerror(errno);
    return mounted_;
  }
  void resize_disk(const std::string& size) const {
    ASSERT_EQ(::mount("ebb_test", disk().c_str(), "tmpfs", MS_REMOUNT, ("size=" + size).c_str()),
              0);
  }
  // Takes all but `free` bytes of the disk.
  void fill_disk(int64_t free) const {
    const int64_t space = int64_t(fs::space(disk()).available);
    ASSERT_GT(space, free);
    std::ofstream(disk() + "/filler") << std::string(size_t(space - free), 'x');
  }

  std::string at(const std::string& name) const { return scratch_.path() + "/" + name; }
  std::string disk() const { return at("disk"); }
  std::string with_paths(std::string command) const {
    for (size_t i; (i = command.find('@')) != std::string::npos;)
      command.replace(i, 1, scratch_.path());
    return command;
  }
  CliResult run(const std::string& command) const { return run_ebb(with_paths(command)); }
  // No file may grow beyond `bytes`.
  CliResult run_limited(int64_t bytes, const std::string& command) const {
    const std::string limited = "ulimit -f " + std::to_string(bytes / 512) + "; exec \"" +
                                EBB_BINARY + "\" " + with_paths(command);
    return run_program("/bin/sh", "-c '" + limited + "'");
  }
  std::vector<std::string> listing() const {
    std::vector<std::string> out;
    for (const auto& e : fs::recursive_directory_iterator(disk()))
      if (e.is_regular_file() && e.path().filename() != "filler")
        out.push_back(e.path().string().substr(disk().size()));
    std::sort(out.begin(), out.end());
    return out;
  }
  static void expect_error(const CliResult& r, const std::string& pattern, const std::string& of) {
    EXPECT_EQ(r.code, 1) << of << r.out << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << of << "\n" << r.err;
    EXPECT_TRUE(std::regex_search(r.err, std::regex(pattern))) << of << "\n" << r.err;
  }
  void expect_equal_runs(const std::string& a, const std::string& b) const {
    const SafeTensors x(a + "/final/model.safetensors"), y(b + "/final/model.safetensors");
    for (const std::string& n : x.names()) EXPECT_TRUE(bitwise_equal(x.get(n), y.get(n))) << n;
    const auto losses = [](const std::string& run) {
      std::vector<double> out;
      std::ifstream in(run + "/metrics.jsonl");
      for (std::string line; std::getline(in, line);) out.push_back(json::parse(line)["loss"]);
      return out;
    };
    EXPECT_EQ(losses(a), losses(b));
    EXPECT_EQ(losses(a).size(), 8u);
  }

  ScratchFolder scratch_;
  bool mounted_ = false;
  std::string reason_;
};

struct Row {
  const char* command;
  int64_t free;            // bytes left on the disk, too few for what it writes
  const char* says;        // regular expression
  const char* whole = "";  // a file that was finished before, and stays
};

// Every command that writes files, each with room for a part of what it writes.
const Row kRows[] = {
    {"tokenize @/text.txt --tokenizer bytes --out @/disk/text", 40000,
     "disk/.*text-00000.bin: No space left on device; free some space"},
    {"init --model @/model --scheme post --out @/disk/m", 60000,
     "disk/.*model.safetensors: No space left on device"},
    {"inspect @/model --json @/disk/inspect.json", 0, "disk/inspect.json: No space left"},
    {"eval --model @/model --task niah_single_1 --lengths 1024 --samples 8 --max-new-tokens 4 "
     "--data @/disk/niah --out @/disk/eval",
     8192, "disk/niah/.*jsonl: No space left", "/niah/niah_single_1_1024.meta.json"},
    {"eval --model @/model --task perplexity --tokens @/text --out @/disk/eval", 0,
     "disk/eval.* No space left", "/eval/samples.jsonl"},
    {"report @/run --out @/disk/report.html", 100000, "disk/report.html: No space left"},
    {"verify @/cases --json @/disk/verify.json", 0, "disk/verify.json: No space left"},
    {"bench ops --filter '^linear 1024' --repeats 3 --json @/disk/bench.json", 0,
     "disk/bench.json: No space left"},
};

TEST_F(FullDisk, EveryWriterSaysSoLeavesNothingAndWorksLater) {
  if (!mount_disk("4m")) GTEST_SKIP() << reason_;
  ASSERT_EQ(run("train @/recipe.json --device cpu --quiet --set out=@/run --set steps=2").code, 0);
  const std::string cases = std::string(EBB_TEST_DATA) + "/ops/rms_norm";
  fs::create_directories(at("cases/ops"));
  fs::copy(cases, at("cases/ops/rms_norm"), fs::copy_options::recursive);
  for (const Row& row : kRows) {
    fill_disk(row.free);
    expect_error(run(row.command), row.says, row.command);
    for (const std::string& name : listing()) EXPECT_EQ(name, row.whole) << row.command;
    fs::remove(disk() + "/filler");
    const CliResult again = run(row.command);
    EXPECT_EQ(again.code, 0) << row.command << "\n" << again.err;
    EXPECT_NE(listing(), std::vector<std::string>{}) << row.command;
    for (const auto& e : fs::directory_iterator(disk())) fs::remove_all(e.path());
  }
}

TEST_F(FullDisk, TrainingKeepsItsCheckpointsAndResumes) {
  if (!mount_disk("1m")) GTEST_SKIP() << reason_;
  ASSERT_EQ(run("train @/recipe.json --device cpu --quiet --set out=@/whole").code, 0);
  const std::string train =
      "train @/recipe.json --device cpu --quiet --resume --set out=@/disk/run";
  expect_error(run(train), "disk/run/.*No space left on device", "train");
  const std::vector<std::string> kept = list_checkpoints(disk() + "/run");
  ASSERT_FALSE(kept.empty());
  ASSERT_LT(kept.size(), 8u);
  for (const std::string& c : kept) verify_checkpoint(c);
  for (const std::string& name : listing())
    EXPECT_TRUE(name.find("/.") == std::string::npos && name.find(".tmp-") == std::string::npos)
        << name;
  expect_error(run(train), "No space left on device", "again");  // still full: still the same
  EXPECT_EQ(list_checkpoints(disk() + "/run"), kept);
  for (const std::string& c : kept) verify_checkpoint(c);
  resize_disk("16m");
  const CliResult r = run(train);
  ASSERT_EQ(r.code, 0) << r.err;
  expect_equal_runs(disk() + "/run", at("whole"));
}

TEST_F(FullDisk, StandardOutput) {
  const char* commands[] = {"--version", "--help", "inspect @/model",
                            "generate --model @/model --prompt a",
                            "tokenize @/text.txt --tokenizer bytes --out @/printed"};
  for (const std::string command : commands) {
    const CliResult r = run_program("/bin/sh", "-c '\"" + std::string(EBB_BINARY) + "\" " +
                                                   with_paths(command) + " >/dev/full'");
    expect_error(r, "cannot write to standard output: No space left on device", command);
  }
}

// Progress and messages that nobody can read cost no work, and get into no file.
TEST_F(FullDisk, StandardErrorIsNotNeeded) {
  const std::string train = "train @/recipe.json --device cpu --set out=@/run-";
  const struct {
    std::string command;
    int code;
  } rows[] = {
      {train + "1 2>/dev/full", 0},  {train + "2 2>&-", 0},      {train + "3 <&- 2>&-", 0},
      {train + "4 <&- >&- 2>&-", 1},  // standard output is asked for
      {train + "5 2>&1 | true", 0},  {"inspect @/none 2>&-", 1}, {"inspect @/none 2>/dev/full", 1}};
  for (const auto& row : rows)
    EXPECT_EQ(run_program("/bin/sh", "-c '\"" + std::string(EBB_BINARY) + "\" " +
                                         with_paths(row.command) + "'")
                  .code,
              row.code)
        << row.command;
  for (const char* out : {"run-2", "run-3", "run-4", "run-5"}) {
    for (int i = 0; i < 500 && !fs::exists(at(out) + "/final/model.safetensors"); ++i)
      usleep(10'000);  // behind a pipe it may still be at work
    expect_equal_runs(at(out), at("run-1"));
    std::ifstream log(at(out) + "/metrics.jsonl");
    for (std::string line; std::getline(log, line);)
      EXPECT_TRUE(json::parse(line, nullptr, false).is_object()) << out << ": " << line;
  }
}

// The same in the middle of a file, without a file system of one's own.
TEST_F(FullDisk, AFileSizeLimitIsReportedToo) {
  const std::string train = "train @/recipe.json --device cpu --quiet --resume --set out=@/run";
  ASSERT_EQ(run("train @/recipe.json --device cpu --quiet --set out=@/whole").code, 0);
  expect_error(run_limited(40960, train), "was not written: .*File too large; the file size limit",
               "train");
  EXPECT_TRUE(list_checkpoints(at("run")).empty());
  const struct {
    const char* command;
    const char* says;
  } rows[] = {
      {"tokenize @/text.txt --tokenizer bytes --out @/disk/text", "text-00000.bin: File too large"},
      {"init --model @/model --scheme post --out @/disk/m", "model.safetensors: File too large"},
      {"report @/whole --out @/disk/report.html", "report.html: File too large"},
  };
  for (const auto& row : rows) {
    expect_error(run_limited(40960, row.command), row.says, row.command);
    EXPECT_EQ(listing(), std::vector<std::string>{}) << row.command;
  }
  const CliResult r = run(train);
  ASSERT_EQ(r.code, 0) << r.err;
  expect_equal_runs(at("run"), at("whole"));
}

}  // namespace
}  // namespace ebb::testing
