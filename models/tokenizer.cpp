#include "models/tokenizer.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/hash.h"

#ifdef EBB_WITH_SENTENCEPIECE
#include <sentencepiece_processor.h>
#endif

namespace ebb {

namespace fs = std::filesystem;

struct Tokenizer::Impl {
  std::string kind;
  int64_t vocab = 0;
  std::optional<int64_t> bos, eos;
  uint64_t hash = 0;
  std::string model;  // SentencePiece: the file's bytes
#ifdef EBB_WITH_SENTENCEPIECE
  sentencepiece::SentencePieceProcessor pieces;
#endif
};

namespace {

constexpr int64_t kByteEos = 256;
constexpr char kBytesName[] = "ebb bytes 257";

#ifndef EBB_WITH_SENTENCEPIECE
[[noreturn]] void lacks_sentencepiece() {
  fail(
      "tokenizer: this build has no SentencePiece, so it cannot turn text into tokens or back "
      "(install libsentencepiece-dev and configure again)");
}

struct PieceCounts {
  bool valid = true;
  int64_t pieces = 0, bos = 1, eos = 2;  // the format's defaults
};

// Walks the fields of a protobuf message: fn(field, varint value or length-delimited bytes).
template <class F>
bool walk_fields(std::string_view m, F fn) {
  const auto varint = [&](uint64_t* v) {
    *v = 0;
    for (int shift = 0; shift < 64 && !m.empty(); shift += 7) {
      const uint8_t b = uint8_t(m.front());
      m.remove_prefix(1);
      *v |= uint64_t(b & 0x7F) << shift;
      if (b < 0x80) return true;
    }
    return false;
  };
  while (!m.empty()) {
    uint64_t tag = 0, v = 0;
    if (!varint(&tag)) return false;
    std::string_view bytes;
    if ((tag & 7) == 0 || (tag & 7) == 2) {
      if (!varint(&v)) return false;
    }
    const uint64_t length = (tag & 7) == 2 ? v : (tag & 7) == 5 ? 4 : (tag & 7) == 1 ? 8 : 0;
    if ((tag & 7) == 3 || (tag & 7) == 4 || (tag & 7) > 5 || length > m.size()) return false;
    bytes = m.substr(0, length);
    m.remove_prefix(length);
    fn(tag >> 3, int64_t(v), bytes);
  }
  return true;
}

// sentencepiece_model.proto: pieces are field 1, the trainer's settings field 2 with bos_id 41 and
// eos_id 42.
PieceCounts count_pieces(std::string_view model) {
  PieceCounts c;
  c.valid = walk_fields(model, [&](uint64_t field, int64_t, std::string_view bytes) {
    c.pieces += field == 1;
    if (field == 2)
      walk_fields(bytes, [&](uint64_t f, int64_t value, std::string_view) {
        if (f == 41) c.bos = value;
        if (f == 42) c.eos = value;
      });
  });
  return c;
}
#endif

}  // namespace

Tokenizer Tokenizer::bytes() {
  auto impl = std::make_shared<Impl>();
  impl->kind = "bytes";
  impl->vocab = 257;
  impl->eos = kByteEos;
  impl->hash = hash64(kBytesName, sizeof kBytesName - 1);
  Tokenizer t;
  t.impl_ = std::move(impl);
  return t;
}

Tokenizer Tokenizer::load(const std::string& where) {
  if (where == "bytes") return bytes();
  std::string file = where;
  if (fs::is_directory(where)) {
    const std::string own = where + "/tokenizer.json";
    if (fs::exists(where + "/tokenizer.model")) {
      file = where + "/tokenizer.model";
    } else if (fs::exists(own)) {
      const nlohmann::json j = read_json(own);
      check(j.is_object() && j.contains("ebb_tokenizer") && j["ebb_tokenizer"] == "bytes",
            "tokenizer: {} is not one that ebb reads (want tokenizer.model or ebb's own bytes)",
            own);
      return bytes();
    } else {
      fail("tokenizer: {} holds neither tokenizer.model nor tokenizer.json", where);
    }
  }
  auto impl = std::make_shared<Impl>();
  impl->kind = "sentencepiece";
  impl->model = read_file(file);
  impl->hash = hash64(impl->model.data(), impl->model.size());
#ifdef EBB_WITH_SENTENCEPIECE
  const auto status = impl->pieces.LoadFromSerializedProto(impl->model);
  check(status.ok(), "tokenizer: {} is not a SentencePiece model: {}", file,
        std::string(status.message()));
  impl->vocab = impl->pieces.GetPieceSize();
  if (impl->pieces.bos_id() >= 0) impl->bos = impl->pieces.bos_id();
  if (impl->pieces.eos_id() >= 0) impl->eos = impl->pieces.eos_id();
#else
  // Enough to train on tokens made elsewhere: the size and the special ids.
  const PieceCounts counts = count_pieces(impl->model);
  check(counts.valid && counts.pieces > 0, "tokenizer: {} is not a SentencePiece model", file);
  impl->vocab = counts.pieces;
  if (counts.bos >= 0) impl->bos = counts.bos;
  if (counts.eos >= 0) impl->eos = counts.eos;
#endif
  Tokenizer t;
  t.impl_ = std::move(impl);
  return t;
}

std::vector<int64_t> Tokenizer::encode(std::string_view text) const {
  if (impl_->kind == "bytes") {
    std::vector<int64_t> ids;
    ids.reserve(text.size());
    for (char c : text) ids.push_back(int64_t(uint8_t(c)));
    return ids;
  }
  const size_t bad = first_invalid_utf8(text);
  check(bad == std::string_view::npos, "tokenizer: byte {} of the text is not valid UTF-8", bad);
#ifdef EBB_WITH_SENTENCEPIECE
  std::vector<int> ids;
  const auto status = impl_->pieces.Encode(text, &ids);
  check(status.ok(), "tokenizer: encoding failed: {}", std::string(status.message()));
  return {ids.begin(), ids.end()};
#else
  lacks_sentencepiece();
#endif
}

std::vector<Tokenizer::Span> Tokenizer::encode_spans(std::string_view text) const {
  std::vector<Span> out;
  if (impl_->kind == "bytes") {
    for (size_t i = 0; i < text.size(); ++i)
      out.push_back({int64_t(uint8_t(text[i])), int64_t(i), int64_t(i) + 1});
    return out;
  }
  const size_t bad = first_invalid_utf8(text);
  check(bad == std::string_view::npos, "tokenizer: byte {} of the text is not valid UTF-8", bad);
#ifdef EBB_WITH_SENTENCEPIECE
  const auto encoded = impl_->pieces.EncodeAsImmutableProto(text);  // owns the pieces
  for (const auto& piece : encoded.pieces())
    out.push_back({int64_t(piece.id()), int64_t(piece.begin()), int64_t(piece.end())});
#endif
  return out;
}

std::string Tokenizer::decode(std::span<const int64_t> ids) const {
  for (int64_t id : ids)
    check(id >= 0 && id < impl_->vocab, "tokenizer: id {} outside [0, {})", id, impl_->vocab);
  if (impl_->kind == "bytes") {
    std::string text;
    for (int64_t id : ids)
      if (id != kByteEos) text += char(uint8_t(id));
    return text;
  }
#ifdef EBB_WITH_SENTENCEPIECE
  std::string text;
  const auto status = impl_->pieces.Decode(std::vector<int>(ids.begin(), ids.end()), &text);
  check(status.ok(), "tokenizer: decoding failed: {}", std::string(status.message()));
  return text;
#else
  lacks_sentencepiece();
#endif
}

std::vector<int64_t> Tokenizer::encode_document(std::string_view text) const {
  std::vector<int64_t> ids = encode(text);
  ids.push_back(separator());
  return ids;
}

std::string Tokenizer::token_bytes(int64_t id) const {
  check(id >= 0 && id < impl_->vocab, "tokenizer: id {} outside [0, {})", id, impl_->vocab);
  if (impl_->kind == "bytes") return id == kByteEos ? "" : std::string(1, char(uint8_t(id)));
#ifdef EBB_WITH_SENTENCEPIECE
  const auto& p = impl_->pieces;
  if (p.IsControl(int(id)) || p.IsUnknown(int(id))) return "";
  const std::string& piece = p.IdToPiece(int(id));
  if (p.IsByte(int(id))) return std::string(1, char(std::stoi(piece.substr(3, 2), nullptr, 16)));
  std::string out;
  const std::string mark = "\xE2\x96\x81";  // U+2581 stands for a space
  for (size_t i = 0; i < piece.size();) {
    if (piece.compare(i, mark.size(), mark) == 0) {
      out += ' ';
      i += mark.size();
    } else {
      out += piece[i++];
    }
  }
  return out;
#else
  lacks_sentencepiece();
#endif
}

int64_t Tokenizer::vocab_size() const { return impl_->vocab; }
std::optional<int64_t> Tokenizer::bos() const { return impl_->bos; }
std::optional<int64_t> Tokenizer::eos() const { return impl_->eos; }
uint64_t Tokenizer::vocab_hash() const { return impl_->hash; }
std::string Tokenizer::kind() const { return impl_->kind; }
std::string Tokenizer::sha256() const {
  return ebb::sha256(impl_->kind == "bytes" ? kBytesName : impl_->model);
}

int64_t Tokenizer::separator() const {
  check(impl_->eos.has_value(), "tokenizer: the vocabulary has no end-of-text token");
  return *impl_->eos;
}

void Tokenizer::save(const std::string& folder) const {
  if (impl_->kind == "bytes") {
    const nlohmann::json j = {{"ebb_tokenizer", "bytes"}, {"vocab_size", impl_->vocab}};
    write_file_atomically(folder + "/tokenizer.json", j.dump(1) + "\n");
  } else {
    write_file_atomically(folder + "/tokenizer.model", impl_->model);
  }
}

namespace {

// Length of the valid UTF-8 character at text[i], or 0; `bad` receives how many bytes of a broken
// one belong together (the maximal subpart that Unicode's replacement practice asks for).
size_t character_at(std::string_view text, size_t i, size_t* bad) {
  const auto byte = [&](size_t k) { return k < text.size() ? uint8_t(text[k]) : 0; };
  const uint8_t b = byte(i);
  *bad = 1;
  if (b < 0x80) return 1;
  size_t length = 0;
  uint8_t low = 0x80, high = 0xBF;  // allowed range of the second byte
  if (b >= 0xC2 && b <= 0xDF)
    length = 2;
  else if (b >= 0xE0 && b <= 0xEF)
    length = 3;
  else if (b >= 0xF0 && b <= 0xF4)
    length = 4;
  else
    return 0;
  if (b == 0xE0)
    low = 0xA0;  // no overlong forms
  else if (b == 0xED)
    high = 0x9F;  // no surrogates
  else if (b == 0xF0)
    low = 0x90;
  else if (b == 0xF4)
    high = 0x8F;  // nothing above U+10FFFF
  for (size_t k = 1; k < length; ++k) {
    if (byte(i + k) < low || byte(i + k) > high) return 0;
    *bad = k + 1;
    low = 0x80, high = 0xBF;
  }
  return length;
}

}  // namespace

size_t first_invalid_utf8(std::string_view text) {
  for (size_t i = 0, bad = 0; i < text.size();) {
    const size_t n = character_at(text, i, &bad);
    if (n == 0) return i;
    i += n;
  }
  return std::string_view::npos;
}

std::string replace_invalid_utf8(std::string_view text, int64_t* replaced) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0, bad = 0; i < text.size();) {
    const size_t n = character_at(text, i, &bad);
    if (n) {
      out.append(text, i, n);
      i += n;
    } else {
      out += "\xEF\xBF\xBD";
      ++*replaced;
      i += bad;
    }
  }
  return out;
}

}  // namespace ebb
