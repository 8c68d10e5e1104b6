// Tokenizer: text <-> token ids. Two kinds: raw bytes (256 values and an end-of-text id) and
// SentencePiece models (text needs libsentencepiece; without it sizes, special ids and the hash
// are still known, so that tokens made elsewhere can be trained on).
//   Tokenizer t = Tokenizer::load("bytes");             // or a .model file, or a model folder
//   std::vector<int64_t> ids = t.encode("Hello");       // no BOS, no EOS added
//   std::string text = t.decode(ids);                   // exact inverse, no clean-up
// Special tokens written in the text are ordinary text.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ebb {

class Tokenizer {
 public:
  // "bytes"; a SentencePiece .model file; or a folder that holds tokenizer.model or a
  // tokenizer.json written by save() for bytes.
  static Tokenizer load(const std::string& where);
  static Tokenizer bytes();

  // text must be valid UTF-8 (for SentencePiece); throws naming the byte offset otherwise.
  std::vector<int64_t> encode(std::string_view text) const;
  std::vector<int64_t> encode_document(std::string_view text) const;  // and the separator
  // The same ids and the bytes of the text each was made from. Of several tokens for one character
  // (byte fallback), the last has its bytes and the others none.
  struct Span {
    int64_t id = 0;
    int64_t begin = 0, end = 0;  // bytes [begin, end)
  };
  std::vector<Span> encode_spans(std::string_view text) const;
  std::string decode(std::span<const int64_t> ids) const;
  // The bytes one token stands for inside a text (streaming decoders concatenate them; a leading
  // space is kept). Ids outside the vocabulary throw.
  std::string token_bytes(int64_t id) const;

  int64_t vocab_size() const;
  std::optional<int64_t> bos() const;
  std::optional<int64_t> eos() const;
  // End of text where documents are joined: EOS. Throws when the vocabulary has none.
  int64_t separator() const;
  uint64_t vocab_hash() const;  // of everything that decides ids; equal hashes, equal encodings
  std::string kind() const;     // "bytes" or "sentencepiece"
  std::string sha256() const;   // of the model file; of the words "ebb bytes 257" for bytes
  // Writes the files that load() needs into a model folder.
  void save(const std::string& folder) const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

// Offset of the first byte that is not valid UTF-8 (overlong forms and surrogates included), or
// npos when all of it is.
size_t first_invalid_utf8(std::string_view text);
// Every maximal invalid part becomes U+FFFD; counts them.
std::string replace_invalid_utf8(std::string_view text, int64_t* replaced);

}  // namespace ebb
