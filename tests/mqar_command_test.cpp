// Multi-query associative recall through the real binary: files of examples, a small training run,
// its scores.
#include <gtest/gtest.h>

#include <cstdlib>
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
           " --set optim.lr=5e-3 --set log_every=1 --set validate_every=0 --set steps=600"
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

// The Transformer finds it, as one that keeps every token must.
TEST_F(MqarCommand, TransformerTakesTheTask) {
  ok("train " EBB_TEST_DATA
     "/../../recipes/mqar/transformer-256.json --quiet --device cpu"
     " --set data.mqar.vocab_size=32 --set model.vocab_size=32 --set 'data.mqar.pairs=[2]'"
     " --set 'data.mqar.test_pairs=[2]' --set data.mqar.examples=4096"
     " --set data.mqar.test_examples=200 --set length=12 --set sequences=32 --set optim.lr=1e-2"
     " --set steps=120 --set log_every=40 --set validate_every=0 --set out=" +
     at("transformer"));
  const json last = lines("transformer/metrics.jsonl").back();
  EXPECT_GT(last["accuracy"].get<double>(), 0.35) << last;  // chance: 1/16
  EXPECT_LT(last["validation_loss"].get<double>(), 2) << last;
}

// The recipe of DART, small; the same weights scored with and without what memories hold.
TEST_F(MqarCommand, DartTakesTheTask) {
  ok("train " EBB_TEST_DATA
     "/../../recipes/mqar/dart-256.json --quiet --device cpu"
     " --set data.mqar.vocab_size=32 --set model.vocab_size=32 --set model.hidden_size=32"
     " --set model.sma_chunk=4 --set 'data.mqar.pairs=[2]' --set 'data.mqar.test_pairs=[2]'"
     " --set data.mqar.examples=4096 --set data.mqar.test_examples=200 --set length=12"
     " --set sequences=32 --set optim.lr=1e-2 --set steps=120 --set log_every=40"
     " --set validate_every=0 --set out=" +
     at("dart"));
  const json last = lines("dart/metrics.jsonl").back();
  EXPECT_GT(last["accuracy"].get<double>(), 0.2) << last;  // chance: 1/16
  const std::string score = "mqar eval --model " + at("dart") +
                            " --length 12 --vocab-size 32 --pairs 2 --examples 200 --device cpu ";
  const auto accuracy = [&](const std::string& changes) {
    ok(score + changes + " --out " + at("s.json"));
    return json::parse(read_file(at("s.json")))["scores"][0]["loss"].get<double>();
  };
  const double as_trained = accuracy("");
  EXPECT_EQ(accuracy("--set sma_chunk=4"), as_trained);
  EXPECT_NE(accuracy("--set use_sma=false"), as_trained);
  EXPECT_NE(accuracy("--set sma_chunk=2"), as_trained);
  EXPECT_EQ(json::parse(read_file(at("s.json")))["changes"], json({{"sma_chunk", 2}}));
  const auto refused = [&](const std::string& changes, const std::string& text) {
    const CliResult r = run_ebb(score + changes);
    EXPECT_EQ(r.code, 1) << r.out;
    EXPECT_NE(r.err.find(text), std::string::npos) << r.err;
  };
  refused("--set sma_chnk=2", "/sma_chnk: unknown; did you mean sma_chunk?");
  refused("--set sma_chunk=0", "/sma_chunk: must lie in 1 ...");
  refused("--set use_sma", "want path=value");
  refused("--set state_size=8", "q_proj.weight is [16,32], want [8,32]");
}

// The whole grid in miniature: broken off, gone on with, not done twice.
TEST_F(MqarCommand, GridOfRunsGoesOn) {
  if (std::system("python3 -c '' > /dev/null 2>&1") != 0) GTEST_SKIP() << "there is no python3";
  const std::string grid = "python3 " EBB_TEST_DATA "/../../tools/mqar_grid.py --ebb " EBB_BINARY
                           " --device cpu --jobs 2"
                           " --lengths 32 --widths 32 --states 4,8 --lrs 0.01 --vocab-size 64"
                           " --examples 64 --epochs 1 --batch 32 --chunk 4 --test-examples 20"
                           " --out " +
                           at("grid");
  const auto run = [&](const std::string& more) {
    return std::system((grid + more + " > " + at("out.txt") + " 2>&1").c_str());
  };
  const auto said = [&](const char* text) {
    EXPECT_NE(read_file(at("out.txt")).find(text), std::string::npos) << "want " << text << "\n"
                                                                      << read_file(at("out.txt"));
  };
  ASSERT_EQ(run(" --models dart,mamba2 --states 4"), 0) << read_file(at("out.txt"));
  said("2 of 2 runs done, 0 failed");
  ASSERT_EQ(run(""), 0) << read_file(at("out.txt"));
  said("4 runs to do");
  said("DART N 4 without SMA");
  said("DART N 4, own read ");
  said("Their learning rates\n");
  said("\nTransformer  ");
  const json results = json::parse(read_file(at("grid/results.json")));
  ASSERT_EQ(results["runs"].size(), 6u);
  EXPECT_TRUE(results["runs"].contains("transformer-L32-d32-lr0.01-s42"));
  for (const auto& [name, r] : results["runs"].items()) {
    EXPECT_EQ(r["steps"], 8) << name;
    EXPECT_EQ(r["accuracy"].size(), 4u) << name;
    EXPECT_EQ(r.contains("accuracy_without_sma"), r["model"] == "dart") << name;
  }
  ASSERT_EQ(run(" --budget 0.001"), 0);
  said("0 runs to do");

  // A list of runs, in its order, with what the runs so far let expect of them.
  const auto listed = [&](const char* names) {
    write_file_atomically(at("list.txt"), names);
    return run(" --widths 64 --dry-run --list " + at("list.txt"));
  };
  ASSERT_EQ(listed("mamba2-L32-d64-N8-lr0.01-s42\n\ndart-L32-d64-N4-lr0.01-s42   7 s\n"), 0);
  const std::string list = read_file(at("out.txt"));
  EXPECT_EQ(list.find("mamba2-L32-d64-N8-lr0.01-s42 "), 0u) << list;
  EXPECT_LT(list.find("\ndart-L32-d64-N4-lr0.01-s42 "), list.size()) << list;
  EXPECT_LT(list.find("\n2 runs of 8 steps, "), list.size()) << list;
  EXPECT_NE(listed("dart-L32-d32-N5-lr0.01-s42\n"), 0);
  said("dart-L32-d32-N5-lr0.01-s42 is no run of this grid");
  ASSERT_EQ(run(" --lengths 64 --budget 0.001"), 0);
  said("0 of 6 runs done");
  EXPECT_NE(run(" --epochs 2"), 0);
  said("give another --results");
  EXPECT_NE(run(" --models darts"), 0);
  said("darts is none of mamba2, dart, dart-unshared, transformer");
  EXPECT_NE(run(" --widths 48"), 0);
  said("--widths: want multiples of 32");

  // Broken off by the budget in the middle of a run, which goes on from its checkpoint.
  const std::string longer =
      " --models mamba2 --states 4 --examples 32000 --epochs 50 --budget 2 --results " +
      at("longer.json");
  const auto newest = [&] {
    int64_t step = 0;
    for (const auto& e : fs::directory_iterator(at("grid/mamba2-L32-d32-N4-lr0.01-s42"))) {
      const std::string name = e.path().filename().string();
      if (name.starts_with("checkpoint-"))
        step = std::max(step, int64_t(std::stoll(name.substr(11))));
    }
    return step;
  };
  fs::remove_all(at("grid/mamba2-L32-d32-N4-lr0.01-s42"));
  ASSERT_EQ(run(longer), 0) << read_file(at("out.txt"));
  said("0 of 1 runs done");
  const int64_t first = newest();
  EXPECT_GT(first, 0);
  ASSERT_EQ(run(longer), 0);
  EXPECT_GT(newest(), first);
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
