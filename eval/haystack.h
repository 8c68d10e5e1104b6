// What needles are hidden in and made of: essay text cut into words and sentences, and word lists.
//   Essay essay = Essay::load("essays.txt", "sentences.tsv");
//   essay.sentences(1024);             // of the first 1,024 words
//   Words words = builtin_words();     // 910 adjectives, 6,782 nouns
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ebb {

class Essay {
 public:
  // White space runs become one blank. Sentence spans come from `spans_file` (lines "start\tend",
  // offsets into the normalised text) or, when empty, from ebb's own splitter.
  static Essay load(const std::string& text_file, const std::string& spans_file = "");
  explicit Essay(std::string text);
  // Sentences of the first `words` words; the list is repeated when there are fewer.
  std::vector<std::string> sentences(int64_t words) const;
  int64_t words() const { return int64_t(word_ends_.size()); }
  std::string sha256() const;  // of the normalised text

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
Words builtin_words();  // the lists of the public suite, inside the binary

}  // namespace ebb
