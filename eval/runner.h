// Running a model: batched generation. Every result is what the prompt would get alone: sequences
// are packed, never padded, and sampling draws by (seed, prompt, position).
//   Generation g = generate(model, tokenizer, "Once upon", {.max_new_tokens = 64});
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "eval/sampling.h"
#include "models/language_model.h"
#include "models/tokenizer.h"

namespace ebb {

struct GenerateOptions {
  int64_t max_new_tokens = 128;
  int64_t batch = 32;              // sequences decoded together
  int64_t prefill_tokens = 16384;  // tokens of the packed prefill at a time
  std::vector<std::string> stop = {};
  Sampling sampling = {};  // greedy unless a temperature is given
  // Called with every new token, as it is chosen (before a stop string is looked for).
  std::function<void(int64_t prompt, int64_t id)> on_token = {};
  // Called after each batch with the number of finished prompts.
  std::function<void(int64_t)> progress = {};
};

struct Generation {
  std::vector<int64_t> ids;  // new tokens, EOS not included
  std::string text;          // cut before the earliest stop string
  bool reached_eos = false;
};

// Chooses among the tokenizer's ids (a model's table may be padded); stops at max_new_tokens, EOS
// or a stop string. Throws on an empty prompt, on token ids the model does not have and on logits
// that are not finite.
std::vector<Generation> generate(const LanguageModel& model, const Tokenizer& tokenizer,
                                 const std::vector<std::vector<int64_t>>& prompts,
                                 const GenerateOptions& options);
Generation generate(const LanguageModel& model, const Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options);

// Logits [N,V] after the last token of each prompt, and the states: chunks of at most
// `prefill_tokens` packed tokens at a time, so that long prompts need little memory.
Tensor chunked_prefill(const LanguageModel& model, const std::vector<std::vector<int64_t>>& prompts,
                       int64_t prefill_tokens, DecodeState* state);

// −log p of labels [n] at hidden [n,d], from f32 logits, `rows` of them at a time.
std::vector<double> token_losses(const LanguageModel& model, const Tensor& hidden,
                                 const std::vector<int64_t>& labels, int64_t rows);

// Tokens of each of n sequences in one packed window: whole chunks of the recurrence where there is
// room, so that a sequence is cut alike whatever stands beside it.
int64_t window_share(int64_t window_tokens, int64_t n);

}  // namespace ebb
