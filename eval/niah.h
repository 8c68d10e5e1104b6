// Needle-in-a-haystack tasks: keys and values hidden in noise or essay text, one of them asked for
// (the public RULER suite's niah_single_1/2/3 and niah_multikey_1; DAMI's primary measure).
//   NiahGenerator g(niah_task("niah_single_2"), words, &essay, token_count(tokenizer),
//                   {.length = 2048, .seed = 42});
//   NiahSample s = g.sample(17);          // depends on nothing but (seed, task, length, 17)
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "eval/haystack.h"
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

// What is random in a sample.
struct NiahDraw {
  std::vector<std::string> keys, values;
  int64_t asked = 0;
  // All different. Noise: the line (0...H) the needle stands before; essay: depths in percent.
  std::vector<int64_t> places;
};

struct NiahSample {
  nlohmann::json id;                 // a string or an integer, unique in its file
  std::string input, answer_prefix;  // the model sees input + answer_prefix
  std::vector<std::string> outputs;
  std::string query;                      // the asked key
  std::vector<std::string> keys, values;  // of all needles; empty in files of other programs
  std::vector<int64_t> places;            // of the needles, as drawn; see NiahDraw
  int64_t haystack = 0;                   // H: lines or words
  int64_t tokens = 0;                     // of input + answer_prefix
  // Byte offsets into input, -1 where unknown; needle and value are those of the asked key.
  int64_t context_begin = -1, context_end = -1;
  int64_t needle_begin = -1, value_begin = -1, question_begin = -1;
  nlohmann::json other = nlohmann::json::object();  // further fields of the record, kept

  std::string prompt() const { return input + answer_prefix; }
  nlohmann::json to_json() const;
  // `where` opens the messages: file and line. Offsets and the query of a file that has none are
  // found in the text; a record without id gets `number`.
  static NiahSample from_json(const nlohmann::json& j, const std::string& where, int64_t number);
};

// The prompt for a draw with a haystack of H units. essay may be null for noise.
NiahSample build_niah(const NiahTask& task, const Essay* essay, int64_t H, const NiahDraw& draw);

// How the haystack is made to fit the length. binary: today's public suite, the longest that fits
// with the answer prefix and the allowance. step: as lm-evaluation-harness grows it, by 500 words
// or 5 (25) lines, counting the prompt without the answer prefix; it fills less, but may pass
// length - allowance by the prefix.
enum class NiahFit { binary, step };
const char* name(NiahFit fit);
NiahFit parse_niah_fit(const std::string& word);

struct NiahOptions {
  int64_t length = 4096;    // tokens, the answer's allowance included
  int64_t allowance = 128;  // tokens left for the answer
  uint64_t seed = 42;
  NiahFit fit = NiahFit::binary;
};

using TokenCount = std::function<int64_t(const std::string&)>;
TokenCount token_count(const Tokenizer& tokenizer);

class NiahGenerator {
 public:
  // Decides the haystack size for the length. Borrows words and essay.
  NiahGenerator(const NiahTask& task, const Words& words, const Essay* essay, TokenCount count,
                const NiahOptions& options);
  NiahSample sample(int64_t index) const;         // throws when not even an empty haystack fits
  int64_t haystack() const { return haystack_; }  // H*

 private:
  NiahDraw draw(int64_t H, uint64_t stream) const;
  NiahSample fitted(int64_t H, uint64_t stream) const;  // .tokens filled in
  enum class Sizing { haystack, sample };
  bool fits(const NiahSample& s, Sizing what) const;
  int64_t unit() const;

  NiahTask task_;
  const Words& words_;
  const Essay* essay_;
  TokenCount count_;
  NiahOptions options_;
  int64_t haystack_ = 0;
};

// Fraction of `outputs` contained in the prediction, ignoring case; the ends are stripped and
// control characters become line feeds first.
double string_match_all(const std::string& prediction, const std::vector<std::string>& outputs);

// Where the asked value stands: d = (q - t) / (q - b) in tokens of the prompt, b the first of the
// context, t the first that overlaps the asked needle's value, q the first of the question line.
// Near 1: far back; near 0: close to the question.
struct NeedleDistance {
  double relative = 0;  // d, (0,1]
  int64_t gap = 0;      // q - t
};
// nullopt when the sample has no offsets. `spans` are those of sample.prompt().
std::optional<NeedleDistance> needle_distance(const NiahSample& sample,
                                              const std::vector<Tokenizer::Span>& spans);

}  // namespace ebb
