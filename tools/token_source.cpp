#include "tools/token_source.h"

#include <filesystem>
#include <fstream>
#include <optional>

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

// Whose ids the shards must hold: the named tokenizer's, or else the model's own, where it is one
// that ebb reads. A preset has none.
std::optional<uint64_t> wanted_vocabulary(const TokenSource& s, const std::string& model) {
  if (!s.tokenizer.empty()) return Tokenizer::load(s.tokenizer).vocab_hash();
  if (!fs::is_directory(model)) return std::nullopt;
  try {
    return Tokenizer::load(model).vocab_hash();
  } catch (const Error&) {
    return std::nullopt;
  }
}

Tensor from_shards(const TokenSource& s, int64_t vocab_size, const std::string& model) {
  const std::optional<uint64_t> wanted = wanted_vocabulary(s, model);
  std::vector<Shard> shards;
  int64_t tokens = 0;
  for (const std::string& path : expand_shards({s.file})) {
    const Shard& shard = shards.emplace_back(path);
    check_vocabulary(path, shard.info().vocab_size, vocab_size);
    check(!wanted || shard.info().vocab_hash == *wanted,
          "{} was made with another tokenizer than {}", path,
          s.tokenizer.empty() ? "that of " + model : s.tokenizer);
    if (tokens < s.sequences * s.length) shard.verify();  // the part that is read
    tokens += shard.info().tokens;
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

Tensor head_tokens(const TokenSource& s, int64_t vocab_size, const std::string& model) {
  constexpr int64_t kMost = int64_t(1) << 40;
  if (s.sequences < 1 || s.length < 1 || s.sequences > kMost / s.length)
    throw UsageError(
        fmt::format("--sequences {} --length {}: want at least 1, and {} tokens at most",
                    s.sequences, s.length, kMost));
  return is_text(s.file) ? from_text(s, vocab_size) : from_shards(s, vocab_size, model);
}

}  // namespace ebb::tools
