// Documents out of text files: plain text or JSON lines, bare or compressed with gzip or zstd
// (recognised by their first bytes, whatever the name).
//   read_documents("corpus.jsonl.zst", {}, [&](std::string_view text) { ... });
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace ebb {

enum class TextFormat { automatic, text, jsonl };  // automatic: .jsonl or .json in the name
enum class BadUtf8 { error, replace };             // stop, or U+FFFD for every broken part

struct ReadOptions {
  TextFormat format = TextFormat::automatic;
  std::string field = "text";  // of a JSON line
  BadUtf8 bad_utf8 = BadUtf8::error;
  // Told, piece by piece, how many bytes of the file (as it is, compressed or not) have been read.
  std::function<void(int64_t)> consumed = {};
};

struct ReadCounts {
  int64_t documents = 0;  // handed out
  int64_t empty = 0;      // left out because they had no text
  int64_t replaced = 0;   // broken UTF-8 parts replaced
  int64_t bytes = 0;      // of text handed out
};

// Calls `document` for each one, in order. A plain text file is one document. Throws naming file
// and line on: a file that cannot be read or decompressed, a line that is not JSON, a missing or
// non-string field, invalid UTF-8 under BadUtf8::error. `document` may throw to stop early.
ReadCounts read_documents(const std::string& path, const ReadOptions& options,
                          const std::function<void(std::string_view)>& document);

// Compressed or not, the decompressed bytes come in pieces of at most a few MB.
void read_bytes(const std::string& path, const std::function<void(std::string_view)>& piece,
                const std::function<void(int64_t)>& consumed = {});

}  // namespace ebb
