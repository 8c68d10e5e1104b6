// Needle-in-a-haystack tasks: keys and values hidden in noise or essay text, one of them asked for
// (the public RULER suite's niah_single_1/2/3 and niah_multikey_1; DAMI's primary measure).
//   Words words = load_words(adjectives_file, nouns_file);
//   NiahGenerator g(niah_task("niah_single_2"), words, &essay, tokenizer, 2048, /*seed=*/42);
//   NiahSample s = g.sample(17);          // depends on nothing but (seed, task, length, 17)
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/tokenizer.h"

namespace ebb {

enum class HaystackKind { noise, essay };
enum class NeedleValue { number, uuid };

struct NiahTask {
  std::string name;
  HaystackKind haystack = HaystackKind::noise;
  NeedleValue value = NeedleValue::number;
  int64_t needles = 1;  // keys in the text; one is asked
};
const std::vector<NiahTask>& niah_tasks();
const NiahTask& niah_task(const std::string& name);  // throws with the list of names

// Haystack text cut into words and sentences (byte spans).
class Essay {
 public:
  // White space runs become one blank. Sentence spans come from `spans_file` (lines "start\tend",
  // offsets into the normalised text) or, when empty, from ebb's own splitter.
  static Essay load(const std::string& text_file, const std::string& spans_file = "");
  explicit Essay(std::string text);
  // Sentences of the first `words` words; the list is repeated when there are fewer.
  std::vector<std::string> sentences(int64_t words) const;
  int64_t words() const { return int64_t(word_ends_.size()); }

 private:
  void split_sentences();
  std::string text_;
  std::vector<int64_t> word_ends_;                      // byte offset behind each word
  std::vector<std::pair<int64_t, int64_t>> sentences_;  // [start, end)
};

struct Words {
  std::vector<std::string> adjectives, nouns;  // distinct, in file order
};
Words load_words(const std::string& adjectives_file, const std::string& nouns_file);

// What is random in a sample.
struct NiahDraw {
  std::vector<std::string> keys, values;
  int64_t asked = 0;
  std::vector<int64_t> places;  // noise: line indices; essay: depths in percent; all different
};

struct NiahSample {
  int64_t index = 0;
  std::string input, answer_prefix;  // the model sees input + answer_prefix
  std::vector<std::string> outputs;
  int64_t haystack = 0;  // H: lines or words
  int64_t tokens = 0;    // of input + answer_prefix
  // Byte offsets into input; needle and value are those of the asked key.
  int64_t context_begin = 0, context_end = 0, needle_begin = 0, value_begin = 0, question_begin = 0;
  nlohmann::json to_json() const;
  static NiahSample from_json(const nlohmann::json& j, const std::string& where);
};

// The prompt for a draw with a haystack of H units. essay may be null for noise.
NiahSample build_niah(const NiahTask& task, const Essay* essay, int64_t H, const NiahDraw& draw);

enum class NiahFit { binary, step };  // today's public suite; the suite before mid-2025

struct NiahOptions {
  int64_t length = 4096;    // tokens, the answer's allowance included
  int64_t allowance = 128;  // tokens left for the answer
  uint64_t seed = 42;
  NiahFit fit = NiahFit::binary;
};

class NiahGenerator {
 public:
  // Decides the haystack size for the length. Throws when not even an empty one fits.
  NiahGenerator(const NiahTask& task, const Words& words, const Essay* essay,
                const Tokenizer& tokenizer, const NiahOptions& options);
  NiahSample sample(int64_t index) const;
  int64_t haystack() const { return haystack_; }  // H*

 private:
  NiahDraw draw(int64_t H, uint64_t stream) const;
  NiahSample fitted(int64_t H, uint64_t stream) const;  // .tokens filled in
  int64_t unit() const;

  NiahTask task_;
  const Words& words_;
  const Essay* essay_;
  const Tokenizer& tokenizer_;
  NiahOptions options_;
  int64_t haystack_ = 0;
};

// Fraction of `outputs` contained in the prediction, ignoring case; control characters become line
// feeds and the ends are stripped first.
double string_match_all(const std::string& prediction, const std::vector<std::string>& outputs);

}  // namespace ebb
