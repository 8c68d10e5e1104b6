// The first tokens of a data set, to calibrate or measure a model on.
//   TokenSource s{.file = "data/train", .sequences = 8, .length = 4096};
//   Tensor tokens = head_tokens(s, model.config().vocab_size, "folder");   // i64 [8,4096]
#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "tensor/tensor.h"

namespace ebb::tools {

struct TokenSource {
  std::string file;       // a shard, the prefix of shards, or text
  std::string tokenizer;  // for text: bytes, a file or a folder
  std::string field = "text";
  int64_t sequences = 8, length = 4096;
};
// --tokens, --tokenizer, --field, --sequences and --length.
void add_token_options(CLI::App* command, TokenSource* source, const std::string& purpose);

// The head of the stream, documents joined as `ebb tokenize` does, so that a text and its shards
// give the same tokens. Throws when there are too few or when the vocabulary is larger than the
// model's, when shards are damaged or come from another tokenizer than the named one (else the one
// in the folder `model`, where ebb reads it); a text without a tokenizer is a UsageError.
Tensor head_tokens(const TokenSource& source, int64_t vocab_size, const std::string& model);

}  // namespace ebb::tools
