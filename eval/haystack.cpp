#include "eval/haystack.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <set>
#include <sstream>

#include "eval/embedded.h"
#include "models/tokenizer.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/hash.h"

namespace ebb {

namespace {

bool is_blank(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == '\f' || c == '\v';
}

// Distinct lines, in order.
std::vector<std::string> word_list(std::istream& in, const std::string& what) {
  std::vector<std::string> out;
  std::set<std::string> seen;
  for (std::string line; std::getline(in, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty() && seen.insert(line).second) out.push_back(line);
  }
  check(!out.empty(), "niah: word list {} is empty", what);
  return out;
}

}  // namespace

Essay::Essay(std::string text) {
  bool gap = false;
  for (char c : text) {
    if (is_blank(c)) {
      gap = !text_.empty();
      continue;
    }
    if (gap) text_ += ' ';
    gap = false;
    text_ += c;
  }
  check(!text_.empty(), "niah: the haystack text is empty");
  for (size_t i = 0; i <= text_.size(); ++i)
    if (i == text_.size() || text_[i] == ' ') word_ends_.push_back(int64_t(i));
  split_sentences();
}

Essay Essay::load(const std::string& text_file, const std::string& spans_file) {
  const std::string text = read_file(text_file);
  check(first_invalid_utf8(text) == std::string::npos, "niah: {} is not valid UTF-8", text_file);
  Essay essay(text);
  if (spans_file.empty()) return essay;
  std::ifstream spans(spans_file);
  check(bool(spans), "niah: cannot open sentence spans {}", spans_file);
  essay.sentences_.clear();
  int64_t start = 0, end = 0, last = 0, line = 0;
  while (spans >> start >> end) {
    ++line;
    check(start >= last && end > start && end <= int64_t(essay.text_.size()),
          "niah: {}:{}: span [{}, {}) does not fit the text", spans_file, line, start, end);
    essay.sentences_.emplace_back(start, end);
    last = end;
  }
  check(!essay.sentences_.empty() && spans.eof(), "niah: {}:{}: want two numbers a line",
        spans_file, line + 1);
  return essay;
}

// A sentence ends after a word that ends in . ! or ? (and closing quotes or brackets) when the next
// word begins (after opening ones) with a capital or a digit, unless the word is a known
// abbreviation or one letter before a full stop.
void Essay::split_sentences() {
  static const std::set<std::string> kAbbreviations = {
      "mr.", "mrs.", "ms.",  "dr.", "prof.", "st.",  "vs.",  "etc.", "e.g.", "i.e.", "jr.",
      "sr.", "inc.", "ltd.", "co.", "no.",   "fig.", "vol.", "cf.",  "u.s.", "a.m.", "p.m."};
  const auto closing = [](char c) { return c == '"' || c == '\'' || c == ')' || c == ']'; };
  const auto opening = [](char c) { return c == '"' || c == '\'' || c == '(' || c == '['; };
  int64_t start = 0;
  for (size_t w = 0; w < word_ends_.size(); ++w) {
    const int64_t begin = w ? word_ends_[w - 1] + 1 : 0, end = word_ends_[w];
    bool ends = w + 1 == word_ends_.size();
    if (!ends) {
      int64_t e = end;
      while (e > begin && closing(text_[size_t(e - 1)])) --e;
      const char mark = e > begin ? text_[size_t(e - 1)] : ' ';
      int64_t next = end + 1;
      while (next < word_ends_[w + 1] && opening(text_[size_t(next)])) ++next;
      const unsigned char first = static_cast<unsigned char>(text_[size_t(next)]);
      std::string word = text_.substr(size_t(begin), size_t(e - begin));
      std::transform(word.begin(), word.end(), word.begin(),
                     [](unsigned char c) { return char(std::tolower(c)); });
      ends =
          (mark == '.' || mark == '!' || mark == '?') &&
          (std::isupper(first) || std::isdigit(first)) && !kAbbreviations.count(word) &&
          !(mark == '.' && word.size() == 2 && std::isalpha(static_cast<unsigned char>(word[0])));
    }
    if (ends) {
      sentences_.emplace_back(start, end);
      start = end + 1;
    }
  }
}

std::vector<std::string> Essay::sentences(int64_t words) const {
  std::vector<std::string> out;
  while (words > 0) {
    const int64_t take = std::min<int64_t>(words, this->words());
    const int64_t stop = word_ends_[size_t(take - 1)];
    for (const auto& [start, end] : sentences_) {
      if (start >= stop) break;
      out.push_back(text_.substr(size_t(start), size_t(std::min(end, stop) - start)));
    }
    words -= take;
  }
  return out;
}

std::string Essay::sha256() const { return ebb::sha256(text_); }

Words load_words(const std::string& adjectives_file, const std::string& nouns_file) {
  const auto read = [](const std::string& file) {
    std::ifstream in(file);
    check(bool(in), "niah: cannot open word list {}", file);
    return word_list(in, file);
  };
  return {read(adjectives_file), read(nouns_file)};
}

Words builtin_words() {
  std::istringstream adjectives{std::string(embedded::adjectives())},
      nouns{std::string(embedded::nouns())};
  return {word_list(adjectives, "adjectives"), word_list(nouns, "nouns")};
}

}  // namespace ebb
