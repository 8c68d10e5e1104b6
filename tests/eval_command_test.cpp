// `ebb eval` as a user meets it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "models/checkpoint.h"
#include "tensor/file.h"
#include "tests/cli.h"
#include "tests/small_model.h"
#include "train/resume.h"
#include "train/shards.h"

namespace ebb::testing {
namespace {

using nlohmann::json;

class EvalCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    const Tokenizer bytes = Tokenizer::bytes();
    save_model(at("a"), *small_model(1), &bytes);
    save_checkpoint(at("run"), *small_model(2), &bytes, {}, {.step = 5}, 3);
  }
  std::string at(const std::string& name) const { return scratch_.path() + "/" + name; }
  CliResult eval(const std::string& arguments) const { return run_ebb("eval " + arguments); }
  std::string needles(const std::string& more) const {
    return "--task niah_single_1 --lengths 1024 --samples 6 --max-new-tokens 8 --data " +
           at("data") + " " + more;
  }
  void expect_error(const std::string& arguments, int code, const std::string& pattern) const {
    const CliResult r = eval(arguments);
    EXPECT_EQ(r.code, code) << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    EXPECT_TRUE(std::regex_search(r.err, std::regex(pattern))) << r.err << " against " << pattern;
  }

  ScratchFolder scratch_;
};

TEST_F(EvalCommand, WritesScoresSamplesAndSaysWhatItDid) {
  const std::string arguments = needles("--model " + at("a") + ",second=" + at("run"));
  const CliResult r = eval(arguments + " --out " + at("out"));
  ASSERT_EQ(r.code, 0) << r.err;
  const json result = json::parse(read_file(at("out/results.json")));
  EXPECT_EQ(result["complete"], true);
  ASSERT_EQ(result["scores"].size(), 2u);
  EXPECT_EQ(result["models"][0]["name"], "a");
  EXPECT_EQ(result["models"][1]["name"], "second");
  EXPECT_EQ(result["models"][1]["folder"], at("run/checkpoint-000005"));
  EXPECT_NE(result["models"][0]["checkpoint"], result["models"][1]["checkpoint"]);
  const json& s = result["scores"][0];
  for (const char* field :
       {"task", "protocol", "count", "data_sha256", "tokenizer_sha256", "max_length", "seed",
        "truncated", "fit", "prompt_tokens", "accuracy", "low", "high", "stderr", "right"})
    EXPECT_TRUE(s.contains(field)) << field;
  EXPECT_EQ(s["truncated"], 0);
  EXPECT_EQ(s["max_length"], 1024);
  EXPECT_EQ(result["dtype"], "f32");
  EXPECT_FALSE(result["commit"].get<std::string>().empty());
  EXPECT_EQ(result["distance"][0]["lengths"][0]["bins"].size(), 16u);
  std::istringstream lines(read_file(at("out/samples.jsonl")));
  double right = 0;
  int rows = 0;
  for (std::string line; std::getline(lines, line); ++rows) {
    const json j = json::parse(line);
    if (j["model"] == "a") right += j["score"].get<double>();
    EXPECT_TRUE(j.contains("text") && j.contains("prompt_sha256") && j.contains("distance"));
  }
  EXPECT_EQ(rows, 12);
  EXPECT_EQ(right, s["right"].get<double>());
  EXPECT_NE(r.out.find("accuracy by distance"), std::string::npos);

  // The same inputs give the same bytes, whatever the batch; the data file stays as it is.
  const std::string data = read_file(at("data/niah_single_1_1024.jsonl"));
  ASSERT_EQ(eval(arguments + " --batch 4 --out " + at("again")).code, 0);
  EXPECT_EQ(read_file(at("again/samples.jsonl")), read_file(at("out/samples.jsonl")));
  ASSERT_EQ(eval(arguments + " --out " + at("third")).code, 0);
  EXPECT_EQ(read_file(at("third/results.json")), read_file(at("out/results.json")));
  EXPECT_EQ(read_file(at("data/niah_single_1_1024.jsonl")), data);
}

TEST_F(EvalCommand, OfARunTheFinalModelIsTaken) {
  const Tokenizer bytes = Tokenizer::bytes();
  save_model(at("run/final"), *small_model(3), &bytes);
  const CliResult r = eval(
      needles("--model " + at("run") + "," + at("run/checkpoint-000005") + " --out " + at("out")));
  ASSERT_EQ(r.code, 0) << r.err;
  const json models = json::parse(read_file(at("out/results.json")))["models"];
  EXPECT_EQ(models[0]["folder"], at("run/final"));
  EXPECT_EQ(models[0]["name"], "run");
  EXPECT_EQ(models[1]["name"], "run/checkpoint-000005");
}

TEST_F(EvalCommand, PromptsAreNeverCut) {
  // More new tokens than the length leaves room for: the limit is raised and that is recorded.
  const CliResult r = eval(
      "--task niah_single_1 --lengths 1024 --samples 2 --max-new-tokens 400 "
      "--model " +
      at("a") + " --data " + at("data") + " --out " + at("out"));
  ASSERT_EQ(r.code, 0) << r.err;
  const json s = json::parse(read_file(at("out/results.json")))["scores"][0];
  EXPECT_EQ(s["max_length_raised"], true);
  EXPECT_EQ(s["max_length"].get<int64_t>(), s["prompt_tokens"]["max"].get<int64_t>() + 400);
}

TEST_F(EvalCommand, Perplexity) {
  const Tokenizer bytes = Tokenizer::bytes();
  ShardWriter writer(at("shards"), bytes.vocab_hash(), bytes.vocab_size());
  for (const char* text : {"one document", "and another one", ""}) {
    std::vector<int64_t> ids = bytes.encode(text);
    ids.push_back(bytes.separator());
    writer.add(ids);
  }
  writer.finish();
  const std::string base = "--task perplexity --model " + at("a") + " --tokens " + at("shards");
  const CliResult r = eval(base + " --out " + at("out"));
  ASSERT_EQ(r.code, 0) << r.err;
  const json p = json::parse(read_file(at("out/results.json")))["perplexity"][0];
  EXPECT_EQ(p["tokens"], 30);
  EXPECT_EQ(p["bytes"], 27);
  EXPECT_EQ(p["documents"], 3);
  EXPECT_NEAR(std::log(p["perplexity"].get<double>()) * 30, p["nll"].get<double>(), 1e-9);
  ASSERT_EQ(eval(base + " --max-tokens 5 --out " + at("out")).code, 0);
  EXPECT_EQ(json::parse(read_file(at("out/results.json")))["perplexity"][0]["tokens"], 13);

  ShardWriter foreign(at("foreign"), 12345, 257);
  foreign.add(std::vector<int64_t>{1, 2});
  foreign.finish();
  const std::string model = "--model " + at("a") + " --out " + at("out") + " --task perplexity";
  expect_error(model + " --tokens " + at("foreign"), 1, "made with another tokenizer");
  expect_error(model + " --tokens " + at("nothing"), 1, "nothing");
  expect_error(model, 2, "wants --tokens");
}

TEST_F(EvalCommand, MultipleChoice) {
  write_file_atomically(at("sums.jsonl"),
                        "{\"context\": \"One and one is\", \"choices\": [\"two\", \"ten\"], "
                        "\"gold\": 0}\n{\"context\": \"Two and one is\", \"choices\": "
                        "[\"seven\", \"three\", \"3.5\"], \"gold\": 1}\n");
  const std::string base = "--task multiple_choice --model " + at("a") + " --out " + at("out");
  const CliResult r = eval(base + " --questions " + at("sums.jsonl"));
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("2 questions: acc "), std::string::npos) << r.out;
  const json c = json::parse(read_file(at("out/results.json")))["choices"][0];
  EXPECT_EQ(c["task"], "sums");
  EXPECT_EQ(c["count"], 2);
  std::istringstream lines(read_file(at("out/samples.jsonl")));
  int64_t right = 0, rows = 0;
  for (std::string line; std::getline(lines, line); ++rows) {
    const json j = json::parse(line);
    right += j["chosen"] == j["gold"];
    EXPECT_EQ(j["likelihoods"].size(), rows == 0 ? 2u : 3u);
  }
  EXPECT_EQ(rows, 2);
  EXPECT_EQ(c["acc"]["right"], right);
  expect_error(base, 2, "belong together");
  expect_error(base + " --questions " + at("none.jsonl"), 1, "cannot read .*none.jsonl");
}

TEST_F(EvalCommand, SamplesOfOnesOwnNeedThreeFields) {
  std::filesystem::create_directories(at("own"));
  write_file_atomically(at("own/niah_single_1_1024.jsonl"),
                        "{\"input\": \"One is 1.\", \"answer_prefix\": \" One is\", "
                        "\"outputs\": [\"1\"], \"from\": \"me\"}\n");
  const CliResult r = eval("--model " + at("a") + " --task niah_single_1 --lengths 1024 " +
                           "--samples 1 --max-new-tokens 2 --force --data " + at("own") +
                           " --out " + at("out_own"));
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(json::parse(read_file(at("out_own/results.json")))["complete"], true);
}

TEST_F(EvalCommand, Mistakes) {
  const std::string model = "--model " + at("a") + " --out " + at("out") + " ";
  expect_error("", 2, "required");
  expect_error(model + "--task niah_singel_1 --lengths 1024 --data " + at("data"), 2,
               "did you mean niah_single_1");
  expect_error(model + "--task niah_single_1 --data " + at("data"), 2, "--lengths");
  expect_error(model + "--task niah_single_1 --lengths 1024", 2, "--data");
  expect_error(model + "--task niah_single_1 --lengths 1024,x --data " + at("data"), 2, "lengths");
  expect_error(model + "--task niah_single_2 --lengths 2048 --data " + at("data"), 1,
               "needs a haystack text");
  expect_error(model + "--task niah_single_1 --lengths 200 --samples 2 --data " + at("data"), 1,
               "does not fit 200 tokens");
  expect_error(model + needles("--dtype bf16"), 2, "f32 on cpu");
  expect_error(model + needles("--fit loose"), 2, "loose");
  expect_error(model + needles("--tokenizer /nowhere"), 1, "/nowhere");
  expect_error(needles("--out " + at("out") + " --model " + at("none")), 1, "no folder .*none");
  std::filesystem::create_directories(at("empty"));
  expect_error(needles("--out " + at("out") + " --model " + at("empty")), 1, "holds neither");
  expect_error(needles("--out " + at("out") + " --model x=" + at("a") + ",x=" + at("run")), 1,
               "two models are called x");
  expect_error(needles("--model " + at("a") + " --out /proc/nothing"), 1, "/proc/nothing");
  // A damaged checkpoint.
  write_file_atomically(at("run/checkpoint-000005/model.safetensors"), "damaged");
  expect_error(needles("--out " + at("out") + " --model " + at("run")), 1,
               "no checkpoint of .* is intact");
  for (const char* folder : {"out", "data"})
    EXPECT_FALSE(std::filesystem::exists(at(folder))) << "a failure left " << folder;
  // A data file for another tokenizer, and the same by force.
  ASSERT_EQ(eval(model + needles("")).code, 0);
  const std::string file = at("data/niah_single_1_1024.jsonl");
  std::string text = read_file(file);
  const std::string sha = Tokenizer::bytes().sha256();
  for (size_t p; (p = text.find(sha)) != std::string::npos;) text.replace(p, 4, "0000");
  write_file_atomically(file, text);
  std::filesystem::remove(at("data/niah_single_1_1024.meta.json"));
  expect_error(model + needles(""), 1, "made for another tokenizer");
  EXPECT_EQ(eval(model + needles("--force")).code, 0);
}

}  // namespace
}  // namespace ebb::testing
