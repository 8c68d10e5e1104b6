// `ebb generate` as a user meets it, and the sampling behind it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "eval/runner.h"
#include "tensor/file.h"
#include "tests/cli.h"
#include "tests/model_folder.h"
#include "train/resume.h"

namespace ebb::testing {
namespace {

using nlohmann::json;

class Generate : public ::testing::Test {
 protected:
  void SetUp() override { save_small_model(at("model")); }
  std::string at(const std::string& name) const { return scratch_.path() + "/" + name; }
  CliResult run(const std::string& arguments) const {
    return run_ebb("generate --model " + at("model") + " --device cpu " + arguments);
  }
  static std::vector<json> lines_of(const std::string& out) {
    std::vector<json> lines;
    std::istringstream in(out);
    for (std::string line; std::getline(in, line);) lines.push_back(json::parse(line));
    return lines;
  }
  static void expect_error(const CliResult& r, int code, const std::string& pattern) {
    EXPECT_EQ(r.code, code) << r.out << r.err;
    EXPECT_EQ(r.out, "");
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    EXPECT_TRUE(std::regex_search(r.err, std::regex(pattern))) << r.err << " against " << pattern;
  }

  ScratchFolder scratch_;
};

// Token after token by whole forward passes: what decoding with a state must come to.
std::string greedy_by_forward(const LanguageModel& model, std::vector<int64_t> ids, int64_t n) {
  const Tokenizer bytes = Tokenizer::bytes();
  std::string text;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t T = int64_t(ids.size());
    const Tensor h = model.hidden(Tensor::from(ids, {1, T})).value().select(1, T - 1);
    ids.push_back(greedy_choice(model.logits(h).value().slice(1, 0, 257))[0]);
    if (ids.back() == 256) break;
    text += bytes.token_bytes(ids.back());
  }
  return text;
}

// A model whose state grows: prompts that end beside and on the borders of its runs of 8 tokens,
// alone and side by side.
TEST_F(Generate, DartWhateverStandsBeside) {
  const auto model = small_model(9, "dart");
  const Tokenizer bytes = Tokenizer::bytes();
  save_model(at("model"), *model, &bytes);
  std::string prompts;
  std::vector<std::string> want;
  for (const size_t n : {1, 2, 3, 7, 8, 9, 16, 29}) {
    const std::string prompt = std::string("It was a dark and stormy night").substr(0, n);
    prompts += json({{"prompt", prompt}}).dump() + "\n";
    want.push_back(greedy_by_forward(*model, bytes.encode(prompt), 20));
  }
  write_file_atomically(at("p.jsonl"), prompts);
  for (const char* batch : {"1", "3", "32"}) {
    const CliResult r =
        run("--max-new-tokens 20 --prompt-file " + at("p.jsonl") + " --batch " + batch);
    ASSERT_EQ(r.code, 0) << r.err;
    const std::vector<json> lines = lines_of(r.out);
    ASSERT_EQ(lines.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      std::string text;
      for (const int64_t id : lines[i]["tokens"]) text += bytes.token_bytes(id);
      EXPECT_EQ(text, want[i]) << i << " of batches of " << batch;
    }
  }
  EXPECT_EQ(run("--max-new-tokens 5 --prompt a --set sma_chunk=3").code, 0);
  expect_error(run("--prompt a --set sma_chunk=0"), 1, "/sma_chunk: must lie in");
}

TEST_F(Generate, GreedyTextFromEveryKindOfPrompt) {
  const auto model = load_model(at("model"));
  for (const std::string prompt : {"a", "It", "It was a dark"}) {
    const std::string want =
        greedy_by_forward(*model, Tokenizer::bytes().encode(prompt), 20) + "\n";
    const CliResult r = run("--max-new-tokens 20 --prompt '" + prompt + "'");
    ASSERT_EQ(r.code, 0) << r.err;
    EXPECT_EQ(r.out, want) << prompt;
    EXPECT_EQ(r.err, "");
    write_file_atomically(at("prompt.txt"), prompt + "\n");
    EXPECT_EQ(run("--max-new-tokens 20 --prompt-file " + at("prompt.txt")).out, want);
    EXPECT_EQ(run("--max-new-tokens 20 < " + at("prompt.txt")).out, want);
    EXPECT_EQ(run("--max-new-tokens 20 --echo < " + at("prompt.txt")).out, prompt + want);
  }
}

TEST_F(Generate, SamplesAreReproducibleWhateverTheBatch) {
  write_file_atomically(
      at("p.jsonl"), "{\"prompt\": \"one\"}\n{\"prompt\": \"two more\"}\n{\"prompt\": \"one\"}\n");
  const std::string sampled =
      "--prompt-file " + at("p.jsonl") + " --max-new-tokens 24 --temperature 1.5 --seed ";
  const CliResult r = run(sampled + "7");
  ASSERT_EQ(r.code, 0) << r.err;
  const std::vector<json> lines = lines_of(r.out);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[1]["prompt"], "two more");
  EXPECT_NE(lines[0]["tokens"], lines[2]["tokens"]);  // one prompt twice: two draws
  for (const json& l : lines) EXPECT_TRUE(l["end"] == "end-of-text" || l["tokens"].size() == 24u);
  EXPECT_EQ(run(sampled + "7").out, r.out);
  EXPECT_EQ(run(sampled + "7 --batch 1").out, r.out);
  EXPECT_NE(run(sampled + "8").out, r.out);
  // The first prompt alone draws as it does among others.
  const std::string alone = "--max-new-tokens 24 --temperature 1.5 --seed 7 --prompt one";
  std::string text;
  for (const int64_t id : lines[0]["tokens"].get<std::vector<int64_t>>())
    text += Tokenizer::bytes().token_bytes(id);
  EXPECT_EQ(run(alone).out, text + "\n");
  // One candidate is the greedy choice.
  const std::string greedy = run("--max-new-tokens 24 --prompt one").out;
  for (const std::string one :
       {"--temperature 2 --top-k 1", "--temperature 2 --top-p 1e-9", "--temperature 1e-4"})
    EXPECT_EQ(run("--max-new-tokens 24 --prompt one " + one).out, greedy) << one;
}

TEST_F(Generate, RunFoldersAndEndOfText) {
  // A head that always says end-of-text.
  auto model = small_model();
  const Tokenizer bytes = Tokenizer::bytes();
  for (const NamedParameter& p : model->named_parameters())
    if (p.name == "lm_head.weight" || p.name == "model.norm.weight") p.value().fill_(0);
  for (const NamedParameter& p : model->named_parameters())
    if (p.name == "lm_head.weight") p.value().select(0, 256).fill_(1);
  save_checkpoint(at("run"), *model, &bytes, {}, {.step = 5}, 3);
  write_file_atomically(at("p.jsonl"), "{\"q\": \"one\"}\n");
  const CliResult r =
      run_ebb("generate --model " + at("run") + " --field q --prompt-file " + at("p.jsonl"));
  ASSERT_EQ(r.code, 0) << r.err;
  // All logits are equal, zero: the lowest id, never the end.
  EXPECT_EQ(lines_of(r.out)[0]["tokens"], std::vector<int64_t>(128, 0));
  for (const NamedParameter& p : model->named_parameters())
    if (p.name == "model.norm.weight") p.value().fill_(1);
  for (const NamedParameter& p : model->named_parameters())
    if (p.name == "model.embeddings.weight") p.value().fill_(1);
  for (const NamedParameter& p : model->named_parameters())
    if (p.name.find("o_proj") != std::string::npos || p.name.find("down_proj") != std::string::npos)
      p.value().fill_(0);
  save_model(at("run/final"), *model, &bytes);
  const CliResult end =
      run_ebb("generate --model " + at("run") + " --field q --prompt-file " + at("p.jsonl"));
  ASSERT_EQ(end.code, 0) << end.err;
  EXPECT_EQ(lines_of(end.out)[0]["end"], "end-of-text");
  EXPECT_EQ(lines_of(end.out)[0]["tokens"], json::array());
  EXPECT_EQ(run_ebb("generate --model " + at("run") + " --prompt x").out, "\n");
}

TEST_F(Generate, ErrorsAreOneLine) {
  expect_error(run("--prompt ''"), 1, "the prompt is empty");
  expect_error(run("< /dev/null"), 1, "the prompt is empty");
  write_file_atomically(at("empty.txt"), "");
  expect_error(run("--prompt-file " + at("empty.txt")), 1, "empty.txt is empty");
  write_file_atomically(at("newline.txt"), "\n");
  expect_error(run("--prompt-file " + at("newline.txt")), 1, "the prompt is empty");
  write_file_atomically(at("p.jsonl"), "{\"prompt\": \"a\"}\n{\"prompt\": \"\"}\n");
  expect_error(run("--prompt-file " + at("p.jsonl")), 1, "1 empty prompt");
  write_file_atomically(at("p.jsonl"), "{\"prompt\": \"a\"}\n{\"promt\": \"b\"}\n");
  expect_error(run("--prompt-file " + at("p.jsonl")), 1, "p.jsonl:2: field \"prompt\" is missing");
  expect_error(run("--prompt-file " + at("none")), 1, "none");
  expect_error(run("--prompt a --prompt-file " + at("p.jsonl")), 2, "--prompt");
  expect_error(run("--prompt a --max-new-tokens 0"), 2, "max-new-tokens");
  expect_error(run("--prompt a --seed 3"), 2, "temperature");
  expect_error(run("--prompt a --temperature -1"), 2, "temperature -1");
  expect_error(run("--prompt a --temperature 1 --top-p 0"), 2, "top_p 0");
  expect_error(run("--prompt a --temperature 1 --top-k -2"), 2, "top-k: want a whole number");
  expect_error(run("--prompt a --add-bos"), 1, "no BOS");
  expect_error(run("--prompt a --dtype bf16"), 2, "f32 on cpu");
  expect_error(run("--prompt a --set use_sma=false"), 1, "config.json: /use_sma: unknown");
  expect_error(run_ebb("generate --prompt a --model " + at("nowhere")), 1, "no folder .*nowhere");
  expect_error(run_ebb("generate --prompt a"), 2, "--model");
  save_model(at("bare"), *small_model());
  expect_error(run_ebb("generate --prompt a --model " + at("bare")), 1,
               "bare holds neither tokenizer.model nor tokenizer.json");
  EXPECT_EQ(run_ebb("generate --prompt a --tokenizer bytes --model " + at("bare")).code, 0);
  const std::string goldens = std::string(EBB_TEST_DATA) + "/models/gated_deltanet";
  expect_error(run_ebb("generate --prompt a --tokenizer bytes --model " + goldens), 1,
               "token ids, its tokenizer 257");
  auto broken = small_model();
  broken->named_parameters()[0].value().fill_(std::numeric_limits<double>::quiet_NaN());
  const Tokenizer bytes = Tokenizer::bytes();
  save_model(at("broken"), *broken, &bytes);
  for (const char* how : {"", " --temperature 1"})
    expect_error(run_ebb("generate --prompt a --model " + at("broken") + how), 1,
                 "logits? (hold NaN|is nan)");
}

// Frequencies of many draws against the probabilities they should have.
TEST(Sampling, DrawsFollowTheDistribution) {
  const std::vector<float> logits = {0.5f, -1.f, 2.f, 1.f, 2.f, -INFINITY};
  const int64_t n = 20000;
  const auto frequencies = [&](Sampling s) {
    std::vector<int64_t> prompts(n);
    for (int64_t i = 0; i < n; ++i) prompts[size_t(i)] = i;
    const Tensor rows = Tensor::from(logits, {1, 6}).expand({n, 6});
    std::map<int64_t, double> f;
    for (const int64_t id : choose_tokens(rows, s, prompts, 3)) f[id] += 1.0 / double(n);
    return f;
  };
  const auto expect = [&](Sampling s, std::vector<int64_t> allowed) {
    double total = 0;
    for (int64_t id : allowed) total += std::exp(double(logits[size_t(id)]) / s.temperature);
    auto f = frequencies(s);
    EXPECT_EQ(f.size(), allowed.size());
    for (int64_t id : allowed) {
      const double p = std::exp(double(logits[size_t(id)]) / s.temperature) / total;
      EXPECT_NEAR(f[id], p, 1e-9 + 4.5 * std::sqrt(p * (1 - p) / double(n))) << id;
    }
  };
  expect({.temperature = 1, .seed = 1}, {0, 1, 2, 3, 4});
  expect({.temperature = 3, .seed = 2}, {0, 1, 2, 3, 4});
  expect({.temperature = 1, .top_k = 3, .seed = 3}, {2, 3, 4});
  expect({.temperature = 1, .top_k = 1, .seed = 3}, {2});  // of equals, the lower id
  expect({.temperature = 1, .top_k = 99, .seed = 4}, {0, 1, 2, 3, 4});
  // Probabilities 0.378, 0.378, 0.139, 0.084, 0.019 in order: 0.8 needs the first three.
  expect({.temperature = 1, .top_p = 0.8, .seed = 5}, {2, 3, 4});
  expect({.temperature = 1, .top_p = 0.75, .seed = 5}, {2, 4});
  expect({.temperature = 1, .top_k = 3, .top_p = 0.8, .seed = 6}, {2, 4});  // of the three kept
}

}  // namespace
}  // namespace ebb::testing
