// Perplexity on tokenised documents, every token of every document predicted once.
//   PerplexityResult r = perplexity(model, tokenizer, next_document, {});
// Each document starts from a fresh state and is read behind the separator token: token t is
// predicted from the separator and tokens 0 ... t-1, however long ago; long documents go through in
// windows, the state carried over. The loss is taken from f32 logits.
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "models/language_model.h"
#include "models/tokenizer.h"

namespace ebb {

struct PerplexityOptions {
  int64_t window_tokens = 16384;               // packed tokens at a time
  int64_t documents = 64;                      // side by side
  int64_t logit_rows = 1024;                   // rows of f32 logits at a time
  std::function<void(int64_t)> progress = {};  // tokens done
};

struct PerplexityResult {
  double nll = 0;  // sum of -log p, in nats
  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t bytes = 0;         // of the documents' text
  double per_token() const;  // perplexities
  double per_byte() const;
  double bits_per_byte() const;
  nlohmann::json record() const;
};

// Ids of the next document, separator included as it stands in the shards; false at the end. An
// empty document counts nothing.
using DocumentSource = std::function<bool(std::vector<int64_t>*)>;

// Throws when a loss is not finite.
PerplexityResult perplexity(const LanguageModel& model, const Tokenizer& tokenizer,
                            const DocumentSource& next, const PerplexityOptions& options);

}  // namespace ebb
