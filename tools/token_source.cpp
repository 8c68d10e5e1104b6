#include "tools/token_source.h"

#include <filesystem>
#include <fstream>

#include "models/tokenizer.h"
#include "tensor/check.h"
#include "tools/commands.h"
#include "train/config.h"
#include "train/text_reader.h"
#include "train/trainer.h"

namespace ebb::tools {
namespace {

namespace fs = std::filesystem;

bool is_text(const std::string& file) {
  if (!fs::is_regular_file(file)) return false;
  char magic[8] = {};
  std::ifstream(file, std::ios::binary).read(magic, sizeof magic);
  return std::string_view(magic, sizeof magic) != "EBBSHARD";
}

void check_vocabulary(const std::string& file, int64_t tokens, int64_t model) {
  check(tokens <= model, "{}: tokens of a vocabulary of {}, and the model's has {}", file, tokens,
        model);
}

Tensor from_shards(const TokenSource& s, int64_t vocab_size) {
  std::vector<Shard> shards;
  for (const std::string& path : expand_shards({s.file})) {
    shards.emplace_back(path);
    check_vocabulary(path, shards.back().info().vocab_size, vocab_size);
    if (!s.tokenizer.empty())
      check(shards.back().info().vocab_hash == Tokenizer::load(s.tokenizer).vocab_hash(),
            "{} was made with another tokenizer than {}", path, s.tokenizer);
  }
  return calibration_tokens(shards, s.sequences, s.length);
}

Tensor from_text(const TokenSource& s, int64_t vocab_size) {
  if (s.tokenizer.empty())
    throw UsageError(
        fmt::format("--tokens {} is text: say how it becomes tokens with --tokenizer", s.file));
  const Tokenizer tokenizer = Tokenizer::load(s.tokenizer);
  check_vocabulary(s.file, tokenizer.vocab_size(), vocab_size);
  const size_t want = size_t(s.sequences * s.length);
  std::vector<int64_t> ids;
  struct Enough {};
  try {
    read_documents(s.file, {.field = s.field}, [&](std::string_view text) {
      const std::vector<int64_t> document = tokenizer.encode_document(text);
      ids.insert(ids.end(), document.begin(), document.end());
      if (ids.size() >= want) throw Enough();
    });
  } catch (const Enough&) {
  }
  check(ids.size() >= want, "{} gives {} tokens, {} x {} are asked for", s.file, ids.size(),
        s.sequences, s.length);
  ids.resize(want);
  return Tensor::from(ids, {s.sequences, s.length});
}

}  // namespace

void add_token_options(CLI::App* command, TokenSource* source, const std::string& purpose) {
  command->add_option("--tokens", source->file,
                      purpose + ": a shard, the prefix of shards, or text with --tokenizer");
  command->add_option("--tokenizer", source->tokenizer,
                      "For text: bytes, a SentencePiece .model file, or a folder with a tokenizer");
  command->add_option("--field", source->field, "For JSON lines: the field that holds the text")
      ->capture_default_str();
  command->add_option("--sequences", source->sequences, "Sequences taken from the head")
      ->capture_default_str();
  command->add_option("--length", source->length, "Tokens of each sequence")->capture_default_str();
}

Tensor head_tokens(const TokenSource& s, int64_t vocab_size) {
  if (s.sequences < 1 || s.length < 1)
    throw UsageError(
        fmt::format("--sequences {} --length {}: want at least 1", s.sequences, s.length));
  return is_text(s.file) ? from_text(s, vocab_size) : from_shards(s, vocab_size);
}

}  // namespace ebb::tools
