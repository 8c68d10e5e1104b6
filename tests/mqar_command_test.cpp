// Multi-query associative recall through the real binary: files of examples, a small training run,
// its scores.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "eval/mqar.h"
#include "tensor/file.h"
#include "tests/cli.h"

namespace ebb::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class MqarCommand : public ::testing::Test {
 protected:
  std::string at(const std::string& name) const { return scratch_.path() + "/" + name; }
  CliResult ok(const std::string& arguments) const {
    const CliResult r = run_ebb(arguments);
    EXPECT_EQ(r.code, 0) << arguments << "\n" << r.err;
    return r;
  }
  std::vector<json> lines(const std::string& name) const {
    std::vector<json> out;
    std::ifstream in(at(name));
    for (std::string line; std::getline(in, line);) out.push_back(json::parse(line));
    return out;
  }
  // The recipe of recipes/mqar, made small enough for seconds.
  std::string train(const std::string& out, const std::string& more = "") const {
    return "train " EBB_TEST_DATA
           "/../../recipes/mqar/gdn-256.json --quiet --device cpu"
           " --set model.vocab_size=32 --set model.hidden_size=32 --set model.head_dim=16"
           " --set model.intermediate_size=32 --set model.initializer_range=0.1"
           " --set data.mqar.vocab_size=32 --set 'data.mqar.pairs=[2,3]'"
           " --set 'data.mqar.test_pairs=[2,3]' --set data.mqar.examples=4096"
           " --set data.mqar.test_examples=200 --set length=16 --set sequences=32"
           " --set optim.lr=1e-2 --set log_every=1 --set validate_every=0 --set steps=600"
           " --set out=" +
           at(out) + " " + more;
  }

  ScratchFolder scratch_;
};

TEST_F(MqarCommand, FilesHoldTheExamples) {
  const std::string task = "mqar generate --length 24 --vocab-size 64 --pairs 2,6 --examples 5 ";
  ok(task + "--out " + at("train.jsonl"));
  ok(task + "--test --zeros --seed 7 --out " + at("test.jsonl"));
  const std::vector<json> train = lines("train.jsonl"), test = lines("test.jsonl");
  ASSERT_EQ(train.size(), 10u);
  ASSERT_EQ(test.size(), 10u);
  for (size_t i = 0; i < 10; ++i) {
    MqarSpec s{.vocab_size = 64, .length = 24, .pairs = i < 5 ? 2 : 6};
    const MqarExample a = MqarGenerator(s).example(int64_t(i % 5));
    EXPECT_EQ(train[i]["inputs"], json(a.inputs));
    EXPECT_EQ(train[i]["labels"], json(a.labels));
    EXPECT_EQ(train[i]["pairs"], s.pairs);
    s.random_non_queries = false, s.seed = mqar_test_seed(7);
    EXPECT_EQ(test[i]["inputs"], json(MqarGenerator(s).example(int64_t(i % 5)).inputs));
  }
  ok(task + "--out " + at("again.jsonl"));
  EXPECT_EQ(read_file(at("again.jsonl")), read_file(at("train.jsonl")));
}

TEST_F(MqarCommand, ASmallModelLearnsToRecall) {
  ok(train("run"));
  const std::vector<json> log = lines("run/metrics.jsonl");
  ASSERT_EQ(log.size(), 600u);
  const json& last = log.back();
  // An epoch is 128 batches of 2 pairs, then 128 of 3.
  EXPECT_EQ(last["tokens"], 32 * (2 * (128 * 2 + 128 * 3) + 88 * 2));
  EXPECT_GT(last["accuracy"].get<double>(), 0.8) << last;  // chance: 1/16
  EXPECT_LT(last["validation_loss"].get<double>(), log.front()["loss"].get<double>() - 1.5);
  EXPECT_NEAR((last["accuracy_16x2"].get<double>() + last["accuracy_16x3"].get<double>()) / 2,
              last["accuracy"].get<double>(), 1e-12);
  for (const char* file : {"recipe.json", "metrics.csv", "final/config.json"})
    EXPECT_TRUE(fs::exists(at(std::string("run/") + file))) << file;
  EXPECT_FALSE(fs::exists(at("run/final/tokenizer.json")));
  const json recipe = json::parse(read_file(at("run/recipe.json")));
  EXPECT_EQ(recipe["data"]["kind"], "mqar");
  EXPECT_EQ(recipe["data"]["mqar"]["pairs"], json({2, 3}));

  const std::string task = " --length 16 --vocab-size 32 --pairs 2,3 --examples 200 --device cpu ";
  const CliResult r = ok("mqar eval --model a=" + at("run") + task + "--out " + at("scores.json"));
  EXPECT_NE(r.out.find("right, %"), std::string::npos) << r.out;
  const json scores = json::parse(read_file(at("scores.json")))["scores"];
  ASSERT_EQ(scores.size(), 2u);
  EXPECT_EQ(scores[0]["model"], "a");
  EXPECT_EQ(scores[0]["accuracy"], last["accuracy_16x2"]);
  EXPECT_EQ(scores[1]["accuracy"], last["accuracy_16x3"]);
  int64_t asked = 0;
  for (const json& bin : scores[1]["by_distance"]) asked += bin["asked"].get<int64_t>();
  EXPECT_EQ(asked, 600);
  EXPECT_EQ(ok("report " + at("run") + " --out " + at("report.html")).err, "");
}

// The recipe's model but for the vocabulary; it soon knows which values there are, at least.
TEST_F(MqarCommand, Mamba2TakesTheTask) {
  ok("train " EBB_TEST_DATA
     "/../../recipes/mqar/mamba2-256.json --quiet --device cpu"
     " --set data.mqar.vocab_size=32 --set model.vocab_size=32 --set 'data.mqar.pairs=[2]'"
     " --set 'data.mqar.test_pairs=[2]' --set data.mqar.examples=4096"
     " --set data.mqar.test_examples=200 --set length=12 --set sequences=32 --set optim.lr=1e-2"
     " --set steps=120 --set log_every=40 --set validate_every=0 --set out=" +
     at("mamba2"));
  const json last = lines("mamba2/metrics.jsonl").back();
  EXPECT_EQ(last["tokens"], 120 * 32 * 2);
  EXPECT_GT(last["accuracy"].get<double>(), 0.35) << last;  // chance: 1/16
  EXPECT_LT(last["validation_loss"].get<double>(), 2) << last;
}

TEST_F(MqarCommand, ResumedRunsAreThatOfOneGo) {
  const std::string few =
      "--set checkpoint_every=3 --set keep_last=3 --set data.mqar.order=mixed --set steps=7 ";
  ok(train("whole", few));
  const std::string weights = read_file(at("whole/final/model.safetensors"));
  fs::remove_all(at("whole/checkpoint-000007"));
  fs::remove_all(at("whole/checkpoint-000006"));
  fs::remove_all(at("whole/final"));
  ok(train("whole", few + "--resume"));
  EXPECT_EQ(read_file(at("whole/final/model.safetensors")), weights);
}

}  // namespace
}  // namespace ebb::testing
