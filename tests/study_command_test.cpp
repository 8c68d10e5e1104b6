// `ebb study`: a grid of recipes and seeds, in whatever way it is ended and begun again.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tensor/compare.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"
#include "tests/cli.h"
#include "tests/model_folder.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class StudyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("OMP_NUM_THREADS", "1", 1);  // several runs at once, beside other tests
    write_file_atomically(at("text.txt"), some_text(4000));
    ASSERT_EQ(run_ebb("tokenize " + at("text.txt") + " --tokenizer bytes --out " + at("text")).code,
              0);
    json recipe = small_recipe(at("text"));
    recipe["data"]["validation"] = {at("text")};
    recipe.update({{"steps", 6}, {"log_every", 1}});
    write_recipe("a/small.json", recipe);
    recipe["model"]["num_hidden_layers"] = 2;
    write_recipe("b/small.json", recipe);
    recipe["steps"] = 200;
    recipe["checkpoint_every"] = 10;
    write_recipe("long.json", recipe);
  }
  std::string at(const std::string& name) const { return temporary_.file(name); }
  void write_recipe(const std::string& name, const json& recipe) const {
    fs::create_directories(fs::path(at(name)).parent_path());
    write_file_atomically(at(name), recipe.dump());
  }
  CliResult study(const std::string& arguments) const {
    return run_ebb("study --device cpu --out " + at("s") + " " + arguments);
  }
  json state() const { return json::parse(read_file(at("s/study.json")))["runs"]; }
  json state_of(const std::string& name) const {
    for (const json& r : state())
      if (r["name"] == name) return r;
    return {};
  }
  // As a process of its own, to be killed.
  pid_t start(const std::vector<std::string>& more) const {
    std::vector<std::string> words = {"ebb", "study", "--device", "cpu", "--out", at("s")};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
      if (!freopen(at("out.log").c_str(), "w", stdout) ||
          !freopen(at("err.log").c_str(), "w", stderr))
        _exit(126);
      execv(EBB_BINARY, argv.data());
      _exit(127);
    }
    return pid;
  }
  static int finish(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return status;
  }
  // Waits until the run has done some steps; its process.
  pid_t underway(const std::string& name) const {
    for (int i = 0; i < 6000; ++i, usleep(10'000)) {
      if (!fs::exists(at("s/study.json"))) continue;
      const json r = state_of(name);
      if (r.is_object() && r["state"] == "running" && !checkpoints(name).empty())
        return r["pid"].get<pid_t>();
    }
    ADD_FAILURE() << name << " never began: " << read_file(at("err.log"));
    return -1;
  }
  // No such process, or one that its new parent has not yet asked for its exit status.
  static bool ended(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    const std::string stat{std::istreambuf_iterator<char>(file), {}};
    const size_t name_end = stat.rfind(')');
    return name_end == std::string::npos || stat.substr(name_end + 2, 1) == "Z";
  }
  std::vector<std::string> checkpoints(const std::string& name) const {
    std::vector<std::string> out;
    if (fs::exists(at("s/" + name)))
      for (const auto& e : fs::directory_iterator(at("s/" + name)))
        if (e.path().filename().string().starts_with("checkpoint-")) out.push_back(e.path());
    return out;
  }
  // The run equals what `ebb train` makes of the recipe when nobody disturbs it.
  void expect_undisturbed(const std::string& recipe, const std::string& name, int seed) const {
    const std::string alone = at("alone-" + name), s = std::to_string(seed);
    ASSERT_EQ(run_ebb("train " + at(recipe) + " --device cpu --quiet --set out=" + alone +
                      " --set seed=" + s + " --set init.seed=" + s)
                  .code,
              0);
    const SafeTensors a(alone + "/final/model.safetensors"),
        b(at("s/" + name) + "/final/model.safetensors");
    EXPECT_EQ(a.names(), b.names());
    for (const std::string& n : a.names()) EXPECT_TRUE(bitwise_equal(a.get(n), b.get(n))) << n;
  }
  // The last loss that a run logged, and the log's number of lines.
  std::vector<double> numbers(const std::string& name, const char* key) const {
    std::ifstream in(at("s/" + name + "/metrics.jsonl"));
    std::vector<double> out;
    for (std::string line; std::getline(in, line);)
      if (const json j = json::parse(line); j.contains(key)) out.push_back(j[key]);
    return out;
  }

  TemporaryFolder temporary_;
};

TEST_F(StudyTest, TrainsTheGridAndComparesIt) {
  const std::string both = at("a/small.json") + " " + at("b/small.json") + " --seeds 1,2 --jobs 2";
  CliResult r = study(both);
  ASSERT_EQ(r.code, 0) << r.err;
  // Two recipes of one file name are told apart; each run has a folder.
  const std::vector<std::string> names = {"a-small-s1", "b-small-s1", "a-small-s2", "b-small-s2"};
  ASSERT_EQ(state().size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const json run = state()[i];
    EXPECT_EQ(run["name"], names[i]);
    EXPECT_EQ(run["state"], "done");
    EXPECT_EQ(run["attempts"], 1);
    const json recipe = json::parse(read_file(at("s/" + names[i] + "/recipe.json")));
    EXPECT_EQ(recipe["seed"], run["seed"]);
    EXPECT_EQ(recipe["init"]["seed"], run["seed"]);
    EXPECT_EQ(recipe["model"]["num_hidden_layers"], names[i][0] == 'a' ? 1 : 2);
  }
  expect_undisturbed("b/small.json", "b-small-s2", 2);

  const json rows = json::parse(read_file(at("s/summary.json")))["recipes"];
  ASSERT_EQ(rows.size(), 2u);
  for (const json& row : rows) {
    const std::string recipe = row["recipe"];
    const double x = numbers(recipe + "-s1", "loss").back(),
                 y = numbers(recipe + "-s2", "loss").back();
    EXPECT_EQ(row["seeds"], json({1, 2}));
    EXPECT_NEAR(row["measured"]["loss"]["mean"].get<double>(), (x + y) / 2, 1e-12);
    EXPECT_NEAR(row["measured"]["loss"]["std"].get<double>(), std::abs(x - y) / std::sqrt(2.),
                1e-12);
    const double v = numbers(recipe + "-s1", "validation_loss").back();
    EXPECT_NEAR(row["measured"]["perplexity"]["values"][0].get<double>(), std::exp(v), 1e-9);
    EXPECT_TRUE(row["measured"].contains("median_decay"));
    EXPECT_TRUE(row["measured"].contains("median_decay of layer 0"));
    const double mean = row["measured"]["loss"]["mean"], std = row["measured"]["loss"]["std"];
    char cell[64];
    std::snprintf(cell, sizeof cell, "%.4f ± %.4f", mean, std);
    EXPECT_NE(r.out.find(cell), std::string::npos) << r.out;
  }
  EXPECT_TRUE(r.out.starts_with(read_file(at("s/summary.txt"))));
  std::ifstream table(at("s/summary.csv"));
  std::string head, first;
  std::getline(table, head);
  std::getline(table, first);
  EXPECT_TRUE(head.starts_with("recipe,runs,done,loss,loss std,")) << head;
  EXPECT_TRUE(first.starts_with("a-small,2,2,")) << first;

  // Again: nothing is left to do. One more seed of one recipe keeps its name and trains that one.
  r = study(both);
  EXPECT_EQ(r.code, 0) << r.err;
  for (const json& run : state()) EXPECT_EQ(run["attempts"], 1);
  r = study(at("b/small.json") + " --seeds 3");
  EXPECT_EQ(r.code, 0) << r.err;
  ASSERT_EQ(state().size(), 5u);
  EXPECT_EQ(state()[4]["name"], "b-small-s3");
  EXPECT_NE(r.out.find("3/3"), std::string::npos) << r.out;
  EXPECT_EQ(run_ebb("study --table --out " + at("s")).out, read_file(at("s/summary.txt")));

  r = run_ebb("report " + at("s") + " --out " + at("r.html"));
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("5 runs"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("b-small-s3 "), std::string::npos) << r.out;
}

TEST_F(StudyTest, EvaluatesWhatIsTrained) {
  const std::string one = at("a/small.json") + " --seeds 1";
  ASSERT_EQ(study(one).code, 0);
  const CliResult r = study(one + " --eval perplexity --tokens " + at("text"));
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(state()[0]["attempts"], 1);  // trained once
  const json result = json::parse(read_file(at("s/small-s1/eval/results.json")));
  EXPECT_EQ(result["complete"], true);
  const json row = json::parse(read_file(at("s/summary.json")))["recipes"][0]["measured"];
  EXPECT_EQ(row["eval perplexity"]["mean"], result["perplexity"][0]["perplexity"]);
  EXPECT_NE(r.out.find("eval perplexity"), std::string::npos) << r.out;
  const auto written = fs::last_write_time(at("s/small-s1/eval/results.json"));
  ASSERT_EQ(study(one + " --eval perplexity --tokens " + at("text")).code, 0);
  EXPECT_EQ(fs::last_write_time(at("s/small-s1/eval/results.json")), written);
}

// kill -9: its runs write a checkpoint and end, and the same command goes on.
TEST_F(StudyTest, KilledItGoesOn) {
  const std::vector<std::string> command = {at("long.json"), "--seeds", "1,2", "--jobs", "2"};
  pid_t pid = start(command);
  const pid_t child = underway("long-s1");
  ASSERT_GT(child, 0);
  kill(pid, SIGKILL);
  finish(pid);
  EXPECT_EQ(state_of("long-s1")["state"], "running");
  pid = start(command);  // waits for what is still ending
  EXPECT_EQ(finish(pid), 0) << read_file(at("err.log"));
  EXPECT_TRUE(ended(child));
  for (const char* name : {"long-s1", "long-s2"}) {
    EXPECT_EQ(state_of(name)["state"], "done");
    EXPECT_EQ(state_of(name)["attempts"], 2) << name;
  }
  EXPECT_EQ(numbers("long-s1", "step").size(), 200u);
  expect_undisturbed("long.json", "long-s1", 1);
}

TEST_F(StudyTest, AKilledRunCostsOnlyItself) {
  const std::vector<std::string> command = {
      at("long.json"), at("a/small.json"), "--seeds", "1", "--jobs", "2"};
  const pid_t pid = start(command);
  const pid_t child = underway("long-s1");
  ASSERT_GT(child, 0);  // -1 would be everybody
  kill(child, SIGKILL);
  const int status = finish(pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
  EXPECT_EQ(state_of("small-s1")["state"], "done");
  EXPECT_EQ(state_of("long-s1")["state"], "failed");
  const std::string error = state_of("long-s1")["error"], shown = read_file(at("err.log"));
  EXPECT_TRUE(error.starts_with("ended by signal 9 (Killed)")) << error;
  EXPECT_NE(shown.find("ebb: error: long-s1 failed: ended by signal 9"), std::string::npos)
      << shown;
  const std::string again = at("long.json") + " " + at("a/small.json") + " --seeds 1";
  CliResult r = study(again);
  EXPECT_EQ(r.code, 1) << r.err;
  EXPECT_NE(r.err.find("1 failed before (--retry tries again)"), std::string::npos) << r.err;
  EXPECT_EQ(state_of("long-s1")["attempts"], 1);
  r = study(again + " --retry");
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(state_of("long-s1")["state"], "done");
  EXPECT_FALSE(state_of("long-s1").contains("error"));
  expect_undisturbed("long.json", "long-s1", 1);
}

TEST_F(StudyTest, StopsWithCheckpoints) {
  const std::vector<std::string> command = {at("long.json"), "--seeds", "1,2"};
  for (const int number : {SIGINT, SIGTERM}) {
    const pid_t pid = start(command);
    const pid_t child = underway("long-s1");
    ASSERT_GT(child, 0);
    EXPECT_EQ(run_ebb("study " + at("long.json") + " --device cpu --out " + at("s")).code, 1);
    kill(pid, number);
    EXPECT_EQ(finish(pid), 0) << read_file(at("err.log"));
    EXPECT_NE(kill(child, 0), 0);                       // gone before its parent
    if (state_of("long-s1")["state"] == "done") break;  // a fast machine
    EXPECT_EQ(state_of("long-s1")["state"], "stopped");
    EXPECT_EQ(state_of("long-s2")["state"], "waiting");
    EXPECT_FALSE(checkpoints("long-s1").empty());
    EXPECT_NE(read_file(at("out.log")).find("2 of 2 runs are not finished"), std::string::npos);
  }
  const CliResult r = study(at("long.json") + " --seeds 1,2 --budget 0.01");
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("are not finished; the same command goes on"), std::string::npos) << r.out;
  ASSERT_EQ(study(at("long.json") + " --seeds 1,2").code, 0);
  expect_undisturbed("long.json", "long-s1", 1);
}

// What a run says itself is what the study says of it.
TEST_F(StudyTest, ErrorOfARun) {
  json recipe = json::parse(read_file(at("a/small.json")));
  recipe["init"] = {{"scheme", "dami"}, {"calibration_length", 1 << 20}};
  write_recipe("dami.json", recipe);
  const CliResult r = study(at("dami.json") + " " + at("a/small.json"));
  EXPECT_EQ(r.code, 1);
  EXPECT_NE(r.err.find("ebb: error: dami-s42 failed: calibration: the stream has"),
            std::string::npos)
      << r.err;
  EXPECT_EQ(state_of("small-s42")["state"], "done");
}

TEST_F(StudyTest, WhatIsWrongIsSaidBeforeAnythingStarts) {
  const auto expect = [&](const std::string& arguments, int code,
                          const std::vector<std::string>& says) {
    const CliResult r = study(arguments);
    EXPECT_EQ(r.code, code) << arguments << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    for (const std::string& s : says) EXPECT_NE(r.err.find(s), std::string::npos) << s << r.err;
    EXPECT_FALSE(fs::exists(at("s"))) << arguments;
  };
  json bad = json::parse(read_file(at("a/small.json")));
  bad["stepps"] = 1;
  write_recipe("bad.json", bad);
  bad.erase("stepps");
  bad["data"]["train"] = {at("none")};
  write_recipe("worse.json", bad);
  const std::string good = at("a/small.json");
  expect(good + " " + at("bad.json") + " " + at("worse.json"), 1,
         {"/stepps: unknown", "worse.json: data: no shard "});
  expect(at("none.json"), 1, {"no recipe"});
  expect(good + " --set dtype=bf16", 1, {"bf16 needs a GPU"});
  expect(good + " --set seed=3", 2, {"--set seed=3: ebb study sets this itself"});
  expect(good + " --seeds 1,1", 2, {"--seeds names one twice"});
  expect(good + " --seeds x", 2, {"--seeds"});
  expect("", 2, {"no recipes"});
  expect("--table", 1, {"holds no study.json"});
  expect(good + " --eval perplexity", 2, {"wants --tokens"});
  expect(good + " --eval nonsense", 2, {"unknown task 'nonsense'"});
  expect(good + " --tokens " + at("text"), 2, {"for --eval"});
  expect(good + " --jobs -1", 2, {"--jobs"});
  const CliResult r = study("--seeds 1,2 " + good + " --dry-run " + at("b/small.json"));
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.out,
            "waiting  a-small-s1\nwaiting  b-small-s1\nwaiting  a-small-s2\nwaiting  b-small-s2\n");
  EXPECT_FALSE(fs::exists(at("s")));

  ASSERT_EQ(study(good).code, 0);
  const CliResult other = study(good + " --set optim.lr=1e-2");
  EXPECT_EQ(other.code, 1);
  EXPECT_NE(other.err.find("made with other settings (different: optim)"), std::string::npos)
      << other.err;
  write_file_atomically(at("s/study.json"), "{}");
  EXPECT_NE(study(good).err.find("was not written by `ebb study`"), std::string::npos);
}

}  // namespace
}  // namespace ebb::testing
