// A tokenizer for tests of lengths and distances: every blank-separated word is one token.
#pragma once
#include <cctype>
#include <string>
#include <vector>

#include "models/tokenizer.h"

namespace ebb::testing {

inline std::vector<Tokenizer::Span> whitespace_spans(const std::string& text) {
  std::vector<Tokenizer::Span> out;
  bool inside = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool blank = std::isspace(static_cast<unsigned char>(text[i])) != 0;
    if (!blank && !inside) out.push_back({0, int64_t(i), 0});
    if (!blank) out.back().end = int64_t(i) + 1;
    inside = !blank;
  }
  return out;
}

inline int64_t whitespace_count(const std::string& text) {
  return int64_t(whitespace_spans(text).size());
}

}  // namespace ebb::testing
