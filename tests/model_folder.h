// A small model as a folder with the byte tokenizer, and text, for tests of the command line.
#pragma once
#include <nlohmann/json.hpp>
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

// A recipe that trains on these shards of bytes in a moment, a checkpoint each step.
inline nlohmann::json small_recipe(const std::string& shards) {
  return {{"model",
           {{"model_type", "gated_deltanet"},
            {"vocab_size", 257},
            {"hidden_size", 32},
            {"num_hidden_layers", 1},
            {"num_heads", 2},
            {"head_dim", 8},
            {"intermediate_size", 48}}},
          {"init", {{"calibration_sequences", 1}, {"calibration_length", 64}}},
          {"data", {{"train", {shards}}}},
          {"steps", 3},
          {"sequences", 2},
          {"length", 32},
          {"dtype", "f32"},
          {"checkpoint_every", 1}};
}

}  // namespace ebb::testing
