// Multiple choice: how texts become tokens, what wins, and that no choice sees another.
#include "eval/multiple_choice.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tests/small_model.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

// Log-likelihoods, lengths of the choices and the right one, as the public harness judges them.
TEST(MultipleChoice, WhatWins) {
  struct Case {
    std::vector<double> scores;
    std::vector<size_t> lengths;
    int64_t chosen, chosen_norm;
  };
  for (const Case& c : std::vector<Case>{{{-10, -12, -9, -20}, {5, 12, 3, 10}, 2, 1},
                                         {{-4, -4, -6}, {2, 4, 3}, 0, 1},
                                         {{-3, -8}, {1, 8}, 0, 1},
                                         {{-7, -7, -7}, {7, 7, 7}, 0, 0},
                                         {{-30, -31, -29, -35, -40}, {30, 40, 20, 35, 80}, 2, 4}}) {
    ChoiceQuestion q{.contexts = {"x"}, .choices = {}};
    for (const size_t n : c.lengths) q.choices.push_back(std::string(n, 'a'));
    const ChoiceAnswer a = choose(q, c.scores);
    EXPECT_EQ(a.chosen, c.chosen);
    EXPECT_EQ(a.chosen_norm, c.chosen_norm);
  }
  // Characters, not bytes: 4 against 5.
  EXPECT_EQ(choose({.contexts = {"x"}, .choices = {"café", "coffee"}}, {-4.5, -6}).chosen_norm, 1);
}

TEST(MultipleChoice, BlanksGoToTheContinuation) {
  const Tokenizer bytes = Tokenizer::bytes();
  const auto text = [&](const std::vector<int64_t>& ids) { return bytes.decode(ids); };
  EncodedPair p = encode_pair(bytes, "Question: x\nAnswer:", " dog");
  EXPECT_EQ(text(p.context), "Question: x\nAnswer:");
  EXPECT_EQ(text(p.continuation), " dog");
  p = encode_pair(bytes, "The \t\u00a0\u2003", "cat");
  EXPECT_EQ(text(p.context), "The");
  EXPECT_EQ(text(p.continuation), " \t\u00a0\u2003cat");
  EXPECT_FALSE(p.joined || p.shifted);
  p = encode_pair(bytes, "", "cat");
  EXPECT_EQ(p.context, std::vector<int64_t>{bytes.separator()});
  EXPECT_THROW(encode_pair(bytes, "a", ""), Error);
}

// Σ log p, each choice alone and token by token.
double likelihood(const LanguageModel& model, const EncodedPair& p) {
  const NoGrad off;
  std::vector<int64_t> ids = p.context;
  double sum = 0;
  for (const int64_t next : p.continuation) {
    const Tensor h = model.hidden(Tensor::from(ids, {1, int64_t(ids.size())})).value().select(0, 0);
    const std::vector<double> z =
        model.logits(Var(h.slice(0, h.size(0) - 1, h.size(0)))).value().to_vector<double>();
    double most = z[0], total = 0;
    for (const double x : z) most = std::max(most, x);
    for (const double x : z) total += std::exp(x - most);
    sum += z[size_t(next)] - most - std::log(total);
    ids.push_back(next);
  }
  return sum;
}

TEST(MultipleChoice, LikelihoodsAreThoseOfEachChoiceAlone) {
  const auto model = small_model(3);
  const Tokenizer bytes = Tokenizer::bytes();
  const std::vector<ChoiceQuestion> questions = {
      {.contexts = {"One and one is"}, .choices = {"two", "twenty-two", "2"}, .gold = 1},
      {.contexts = {"The cat sat ", "The dog sat"}, .choices = {"down.", "down."}, .gold = 0},
      {.contexts = {""}, .choices = {"a", "b", "c", "d", "e"}, .gold = 4}};
  for (const int64_t window : {1, 40, 16384}) {
    const ChoiceScores s =
        ask_choices(*model, bytes, questions, {.window_tokens = window, .logit_rows = 7});
    ASSERT_EQ(s.answers.size(), 3u);
    int64_t right = 0;
    for (size_t q = 0; q < 3; ++q) {
      ASSERT_EQ(s.answers[q].likelihoods.size(), questions[q].choices.size());
      for (size_t i = 0; i < questions[q].choices.size(); ++i) {
        const auto& contexts = questions[q].contexts;
        const double want =
            likelihood(*model, encode_pair(bytes, contexts[contexts.size() > 1 ? i : 0],
                                           " " + questions[q].choices[i]));
        EXPECT_NEAR(s.answers[q].likelihoods[i], want, 2e-6 * std::abs(want)) << window;
      }
      right += s.answers[q].chosen == questions[q].gold;
    }
    EXPECT_EQ(s.right, right);
    EXPECT_EQ(s.record()["count"], 3);
  }
}

// Of equal logits everywhere the shortest choice in tokens is the likeliest.
TEST(MultipleChoice, UniformLogitsCountTokens) {
  const auto model = small_model(3);
  for (const NamedParameter& p : model->named_parameters())
    if (p.name == "lm_head.weight") p.value().fill_(0);
  const ChoiceScores s =
      ask_choices(*model, Tokenizer::bytes(),
                  {{.contexts = {"x"}, .choices = {"four", "one", "three"}, .gold = 1}}, {});
  EXPECT_EQ(s.right, 1);
  const double per_token = std::log(double(model->config().vocab_size));
  EXPECT_NEAR(s.answers[0].likelihoods[0], -5 * per_token, 1e-4);
  EXPECT_NEAR(s.answers[0].likelihoods[1], -4 * per_token, 1e-4);
}

TEST(MultipleChoice, FilesAndTheirMistakes) {
  const TemporaryFolder temporary;
  const std::string file = temporary.path() + "/q.jsonl";
  write_file_atomically(
      file,
      "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"gold\": 1, \"id\": 7}\n\n"
      "{\"context\": [\"a\", \"b\"], \"choices\": [\"c\", \"d\"], \"gold\": 0}\n");
  const std::vector<ChoiceQuestion> q = read_choices(file);
  ASSERT_EQ(q.size(), 2u);
  EXPECT_EQ(q[0].gold, 1);
  EXPECT_EQ(q[1].contexts.size(), 2u);
  for (const auto& [line, want] : std::vector<std::pair<std::string, std::string>>{
           {"{\"context\": \"a\", \"choices\": [\"b\", \"c\"]}", "q.jsonl:1: no field gold"},
           {"{\"context\": \"a\", \"choices\": [\"b\"], \"gold\": 0}",
            "1 choices, want at least 2"},
           {"{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"gold\": 2}", "gold is 2"},
           {"{\"context\": \"a\", \"choices\": [\"b\", 3], \"gold\": 0}", "not a string"},
           {"{\"context\": \"a\", \"choices\": [\"b\", \"\"], \"gold\": 0}", "a choice is empty"},
           {"{\"context\": [\"a\"], \"choices\": \"b\", \"gold\": 0}", "choices is not a list"},
           {"{\"context\": [\"a\", \"b\", \"c\"], \"choices\": [\"d\", \"e\"], \"gold\": 0}",
            "3 contexts, 2 choices"},
           {"[1]", "not a JSON object"},
           {"", "holds no questions"}}) {
    write_file_atomically(file, line + "\n");
    try {
      read_choices(file);
      ADD_FAILURE() << line;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(want), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace ebb::testing
