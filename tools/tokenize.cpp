// ebb tokenize: documents to token shards.
#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>

#include "models/tokenizer.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tools/commands.h"
#include "tools/progress_line.h"
#include "tools/temporary_folder.h"
#include "train/log.h"
#include "train/shards.h"
#include "train/text_reader.h"

namespace ebb::tools {
namespace {

namespace fs = std::filesystem;

volatile std::sig_atomic_t interrupted = 0;
void note_interrupt(int) { interrupted = 1; }
void stop_when_interrupted() {
  check(!interrupted, "tokenize: interrupted, and nothing was written");
}

struct Options {
  std::vector<std::string> inputs;
  std::string tokenizer, out, format = "auto", bad_utf8 = "error";
  std::string field = "text";
  int64_t shard_tokens = 100'000'000;
  bool overwrite = false;
};

struct Target {
  fs::path folder;
  std::string name;  // shards are folder/name-00000.bin, ...
};

Target target_of(const std::string& prefix) {
  const fs::path p(prefix);
  if (!p.has_filename())
    throw UsageError(
        fmt::format("--out {}: want a folder and the beginning of a name, like "
                    "data/train",
                    prefix));
  return {p.has_parent_path() ? p.parent_path() : fs::path("."), p.filename().string()};
}

std::vector<fs::path> shards_at(const Target& t) {
  std::vector<fs::path> found;
  if (fs::is_directory(t.folder))
    for (const auto& f : fs::directory_iterator(t.folder))
      if (is_shard_name(f.path().filename().string(), t.name)) found.push_back(f.path());
  return found;
}

// Moves the finished shards to their place.
std::vector<std::string> publish(const std::vector<std::string>& staged, const Target& t) {
  std::vector<std::string> paths;
  for (const std::string& s : staged) {
    const fs::path to = t.folder / fs::path(s).filename();
    fs::rename(s, to);
    paths.push_back(to.string());
  }
  for (const fs::path& shard : shards_at(t))  // of an earlier run that made more of them
    if (std::find(paths.begin(), paths.end(), shard.string()) == paths.end()) fs::remove(shard);
  sync_folder(t.folder.string());
  return paths;
}

// Encodes documents a few megabytes at a time, all cores at once, and writes them in order.
class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, ShardWriter& writer)
      : tokenizer_(tokenizer), writer_(writer) {}

  void add(std::string_view text) {
    waiting_.emplace_back(text);
    bytes_ += text.size();
    if (bytes_ >= kBatch) flush();
  }

  void flush() {
    const int64_t n = int64_t(waiting_.size());
    std::vector<std::vector<int64_t>> ids(waiting_.size());
    std::vector<std::exception_ptr> failures(waiting_.size());
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < n; ++i) {
      try {
        ids[size_t(i)] = tokenizer_.encode_document(waiting_[size_t(i)]);
      } catch (...) {
        failures[size_t(i)] = std::current_exception();
      }
    }
    for (const std::exception_ptr& e : failures)
      if (e) std::rethrow_exception(e);
    for (const std::vector<int64_t>& document : ids) {
      writer_.add(document);
      tokens_ += int64_t(document.size());
    }
    waiting_.clear();
    bytes_ = 0;
  }
  int64_t tokens() const { return tokens_; }  // separators included

 private:
  static constexpr size_t kBatch = 8 << 20;
  const Tokenizer& tokenizer_;
  ShardWriter& writer_;
  int64_t tokens_ = 0;
  std::vector<std::string> waiting_;
  size_t bytes_ = 0;
};

ReadOptions read_options(const Options& o) {
  const TextFormat format = o.format == "text"    ? TextFormat::text
                            : o.format == "jsonl" ? TextFormat::jsonl
                                                  : TextFormat::automatic;
  return {.format = format,
          .field = o.field,
          .bad_utf8 = o.bad_utf8 == "replace" ? BadUtf8::replace : BadUtf8::error};
}

ReadCounts read_all(const Options& o, Encoder& encoder) {
  int64_t size = 0, before = 0;  // of all inputs; of those already read
  for (const std::string& path : o.inputs) size += int64_t(fs::file_size(path));
  ReadCounts sum;
  ProgressLine progress;
  for (const std::string& path : o.inputs) {
    ReadOptions read = read_options(o);
    read.consumed = [&](int64_t bytes) {
      stop_when_interrupted();
      progress.show([&] {
        const double share = double(before + bytes) / double(std::max<int64_t>(size, 1));
        const double spent = progress.seconds();
        return fmt::format("{:.0f}% | {} tokens | {} tok/s | ETA {}", 100 * share,
                           short_count(double(encoder.tokens())),
                           short_count(double(encoder.tokens()) / spent),
                           short_time(spent / share * (1 - share)));
      });
    };
    const ReadCounts c = read_documents(path, read, [&](std::string_view text) {
      stop_when_interrupted();
      encoder.add(text);
    });
    sum.documents += c.documents;
    sum.empty += c.empty;
    sum.replaced += c.replaced;
    sum.bytes += c.bytes;
    before += int64_t(fs::file_size(path));
  }
  encoder.flush();
  stop_when_interrupted();
  return sum;
}

void print_summary(const ReadCounts& c, int64_t tokens, const std::vector<std::string>& paths) {
  fmt::print("documents  {}", grouped(c.documents));
  if (c.empty) fmt::print(", {} empty left out", grouped(c.empty));
  fmt::print("\ntokens     {}, one a document being its separator\n", grouped(tokens));
  fmt::print("text       {} bytes, {:.3f} per token\n", grouped(c.bytes),
             double(c.bytes) / double(std::max<int64_t>(tokens - c.documents, 1)));
  if (c.replaced) fmt::print("replaced   {} broken UTF-8 parts\n", grouped(c.replaced));
  int64_t size = 0;
  for (const std::string& p : paths) size += int64_t(fs::file_size(p));
  fmt::print("shards     {}{}, {} bytes\n", paths.front(),
             paths.size() > 1 ? fmt::format(" ... {} ({})", paths.back(), paths.size()) : "",
             grouped(size));
}

void run(const Options& o) {
  if (o.shard_tokens < 1)
    throw UsageError(fmt::format("--shard-tokens {}: want at least 1", o.shard_tokens));
  const Target target = target_of(o.out);
  for (const std::string& path : o.inputs) {
    check(fs::exists(path), "tokenize: {} does not exist", path);
    check(fs::is_regular_file(path), "tokenize: {} is not a file", path);
  }
  const std::vector<fs::path> old = shards_at(target);
  check(old.empty() || o.overwrite, "tokenize: {} exists already; --overwrite replaces it{}",
        old.empty() ? "" : old.front().string(),
        old.size() > 1 ? fmt::format(" and {} more", old.size() - 1) : "");
  const Tokenizer tokenizer = Tokenizer::load(o.tokenizer);

  std::signal(SIGINT, note_interrupt);
  std::signal(SIGTERM, note_interrupt);
  const TemporaryFolder staging(target.folder, target.name);
  ShardWriter writer((staging.path() / target.name).string(), tokenizer.vocab_hash(),
                     tokenizer.vocab_size(), o.shard_tokens);
  Encoder encoder(tokenizer, writer);
  const ReadCounts counts = read_all(o, encoder);
  check(counts.documents > 0, "tokenize: there is no text in the input{}",
        counts.empty ? fmt::format(" ({} empty documents)", counts.empty) : "");
  print_summary(counts, encoder.tokens(), publish(writer.finish(), target));
}

}  // namespace

void add_tokenize(CLI::App& app) {
  auto* c = add_command(
      app, "tokenize", "Turn text into the token shards that training reads",
      "ebb tokenize book.txt --tokenizer bytes --out data/book\n"
      "ebb tokenize corpus/*.jsonl.zst --tokenizer tokenizer.model --out data/train\n"
      "ebb tokenize dump.jsonl --field body --bad-utf8 replace --tokenizer model/ --out data/dump");
  auto o = std::make_shared<Options>();
  c->add_option("inputs", o->inputs,
                "Text files (one document each) or JSON lines; plain, gzip or zstd")
      ->required();
  c->add_option("--tokenizer", o->tokenizer,
                "bytes, a SentencePiece .model file, or a folder with a tokenizer")
      ->required();
  c->add_option("--out", o->out, "Prefix of the shards: PREFIX-00000.bin, ...")->required();
  c->add_option("--field", o->field, "The field of a JSON line that holds the text")
      ->capture_default_str();
  c->add_option("--format", o->format, "text, jsonl, or auto: by .json or .jsonl in the name")
      ->check(CLI::IsMember({"auto", "text", "jsonl"}))
      ->capture_default_str();
  c->add_option("--bad-utf8", o->bad_utf8, "error, or replace broken parts with U+FFFD")
      ->check(CLI::IsMember({"error", "replace"}))
      ->capture_default_str();
  c->add_option("--shard-tokens", o->shard_tokens, "Tokens per shard; no document is cut")
      ->capture_default_str();
  c->add_flag("--overwrite", o->overwrite, "Replace the shards of an earlier run");
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
