// A small model as a folder with the byte tokenizer, and text, for tests of the command line.
#pragma once
#include <string>

#include "models/checkpoint.h"
#include "tests/small_model.h"

namespace ebb::testing {

inline void save_small_model(const std::string& folder, uint64_t seed = 7) {
  const Tokenizer bytes = Tokenizer::bytes();
  save_model(folder, *small_model(seed), &bytes);
}

inline std::string some_text(size_t bytes) {
  std::string text;
  for (size_t i = 0; text.size() < bytes; ++i)
    text += "Line " + std::to_string(i * i % 997) + " of the log says nothing new.\n";
  text.resize(bytes);
  return text;
}

}  // namespace ebb::testing
