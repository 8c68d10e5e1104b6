// Needle sample files: made once, written to disk, then only read, so that every model answers the
// same questions.
//   NiahData d = open_niah_data("data", {.task = "niah_single_2", .length = 2048}, words, &essay,
//                               tokenizer, ForeignData::refuse);
// FOLDER/niah_single_2_2048.jsonl holds one sample a line (id, task, length, input, answer_prefix,
// outputs, query, keys, values, places, haystack, tokens, byte offsets, seed, tokenizer_sha256);
// FOLDER/niah_single_2_2048.meta.json what they have in common: task, length, allowance, seed, fit,
// samples, haystack (H*), tokens {min, mean, max}, tokenizer, and the SHA-256 of the samples, the
// word lists and the haystack text.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "eval/niah.h"

namespace ebb {

struct NiahDataSpec {
  std::string task;
  int64_t length = 4096;
  int64_t samples = 500;
  uint64_t seed = 42;
  NiahFit fit = NiahFit::binary;
};

struct NiahData {
  std::string path = {};
  std::string task = {};
  int64_t length = 0;
  std::vector<NiahSample> samples = {};
  std::string sha256 = {};            // of the whole file
  std::string tokenizer_sha256 = {};  // lengths were counted with; "" when the file does not say
  std::string fit = {};               // "binary", "step" or "unknown"
  std::optional<uint64_t> seed = {};  // of the file
  bool made_now = false;
};

// Files of another tokenizer, or that do not name theirs: their lengths mean something else here.
enum class ForeignData { refuse, accept };

std::string niah_data_path(const std::string& folder, const std::string& task, int64_t length);
// Reads the file when there is one, checking that it is what is asked for, else makes it: both
// files appear whole or not at all, the samples last. Of a longer file the first spec.samples are
// taken. `essay` may be null for tasks without; `note` receives one line a file.
NiahData open_niah_data(const std::string& folder, const NiahDataSpec& spec, const Words& words,
                        const Essay* essay, const Tokenizer& tokenizer, ForeignData foreign,
                        const std::function<void(const std::string&)>& note = {});

}  // namespace ebb
