// Multiple choice by likelihood: which continuation of a context a model finds most likely, as the
// public evaluation harness scores it.
//   ChoiceScores s = ask_choices(model, tokenizer, read_choices("arc_easy.jsonl"), {});
// With ll_i the log-likelihood of " " + choice i after the context, the answer is the choice of the
// largest ll_i (acc), or of the largest ll_i / characters of choice i (acc_norm); the first of
// equals. Context and continuation are made tokens together, blanks at the end of the context going
// to the continuation, and the tokens behind those of the context alone are scored, from f32
// logits. Choices are packed side by side, never padded: each is scored as if it were alone.
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "models/language_model.h"
#include "models/tokenizer.h"

namespace ebb {

struct ChoiceQuestion {
  std::vector<std::string>
      contexts;  // one, or one per choice (a sentence with the option filled in)
  std::vector<std::string> choices;  // texts, without the blank before them
  int64_t gold = 0;                  // which is right
};
// JSON lines with "context" (a string, or a list with one per choice), "choices" (at least two) and
// "gold" (0, 1, ...); other fields are ignored. Throws naming the line.
std::vector<ChoiceQuestion> read_choices(const std::string& file);

// Tokens of a context and of what follows it. `joined`: one token spans the join, so the
// continuation was made tokens alone. `shifted`: the context's tokens differ from those at the
// beginning of both together.
struct EncodedPair {
  std::vector<int64_t> context, continuation;
  bool joined = false, shifted = false;
};
// An empty context is the token that stands before a document (BOS, or else the separator).
EncodedPair encode_pair(const Tokenizer& tokenizer, std::string context, std::string continuation);

struct ChoiceOptions {
  bool add_bos = false;                        // contexts begin with the tokenizer's BOS
  int64_t window_tokens = 16384;               // packed tokens at a time
  int64_t logit_rows = 1024;                   // rows of f32 logits at a time
  std::function<void(int64_t)> progress = {};  // questions done
};
struct ChoiceAnswer {
  std::vector<double> likelihoods;  // ll_i, in nats
  int64_t chosen = 0, chosen_norm = 0;
};
struct ChoiceScores {
  std::vector<ChoiceAnswer> answers;  // as the questions
  int64_t right = 0, right_norm = 0;
  int64_t joined = 0, shifted = 0;  // pairs
  // count, right, accuracy with its 95 % Wilson interval, the same of acc_norm, the counters.
  nlohmann::json record() const;
};
// The answer of a question with these likelihoods.
ChoiceAnswer choose(const ChoiceQuestion& question, std::vector<double> likelihoods);
ChoiceScores ask_choices(const LanguageModel& model, const Tokenizer& tokenizer,
                         const std::vector<ChoiceQuestion>& questions,
                         const ChoiceOptions& options);

}  // namespace ebb
