#include "train/shards.h"

#include <cstring>
#include <exception>
#include <filesystem>

#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/hash.h"

namespace ebb {
namespace {

constexpr char kMagic[8] = {'E', 'B', 'B', 'S', 'H', 'A', 'R', 'D'};
constexpr uint32_t kVersion = 1;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t bytes_per_token;
  uint64_t vocab_hash, vocab_size, tokens, documents, checksum;
  char reserved[8];
};
static_assert(sizeof(Header) == 64);

int64_t padded(int64_t bytes) { return (bytes + 7) / 8 * 8; }

}  // namespace

Shard::Shard(const std::string& path) : path_(path), file_(MappedFile::open(path)) {
  const char* base = file_->data();
  const int64_t bytes = int64_t(file_->size());
  Header h;
  check(bytes >= int64_t(sizeof h), "shard: {} has {} bytes, less than a header", path, bytes);
  std::memcpy(&h, base, sizeof h);
  check(std::memcmp(h.magic, kMagic, 8) == 0, "shard: {} is not a token shard", path);
  check(h.version == kVersion, "shard: {} has version {}, this ebb reads {}", path, h.version,
        kVersion);
  check(h.bytes_per_token == 2 || h.bytes_per_token == 4, "shard: {} has {} bytes per token", path,
        h.bytes_per_token);
  check(h.vocab_size >= 1 && h.vocab_size <= (1ull << 32), "shard: {} is of a vocabulary of {}",
        path, h.vocab_size);
  check(h.tokens < (1ull << 56) && h.documents <= h.tokens + 1, "shard: {} has a broken header",
        path);
  const int64_t token_bytes = padded(int64_t(h.tokens) * h.bytes_per_token);
  const int64_t want = int64_t(sizeof h) + token_bytes + 8 * (int64_t(h.documents) + 1);
  check(bytes == want, "shard: {} has {} bytes, its header promises {}: truncated or damaged", path,
        bytes, want);
  info_ = {h.vocab_hash, int64_t(h.vocab_size), int64_t(h.tokens), int64_t(h.documents),
           int(h.bytes_per_token)};
  checksum_ = h.checksum;
  small_ = reinterpret_cast<const uint16_t*>(base + sizeof h);
  large_ = reinterpret_cast<const uint32_t*>(base + sizeof h);
  index_ = reinterpret_cast<const uint64_t*>(base + sizeof h + token_bytes);
  check(index_[0] == 0 && index_[h.documents] == h.tokens, "shard: {} has a broken document index",
        path);
}

void Shard::read(int64_t begin, std::span<int64_t> out) const {
  check(begin >= 0 && begin + int64_t(out.size()) <= info_.tokens,
        "shard: tokens [{}, {}) of {} in {}", begin, begin + int64_t(out.size()), info_.tokens,
        path_);
  for (size_t i = 0; i < out.size(); ++i) out[i] = token(begin + int64_t(i));
}

void Shard::verify() const {
  const uint64_t sum =
      hash64(file_->data() + sizeof(Header), size_t(file_->size()) - sizeof(Header));
  check(sum == checksum_, "shard: {} is damaged (checksum differs)", path_);
  for (int64_t d = 0; d < info_.documents; ++d)
    check(index_[d] <= index_[d + 1], "shard: {} has a broken document index", path_);
  for (int64_t i = 0; i < info_.tokens; ++i)
    check(token(i) < info_.vocab_size, "shard: {} holds token id {} of a vocabulary of {}", path_,
          token(i), info_.vocab_size);
}

void verify_shards(std::span<const Shard> shards) {
  std::vector<std::exception_ptr> failures(shards.size());
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < shards.size(); ++i) {
    try {
      shards[i].verify();
    } catch (...) {
      failures[i] = std::current_exception();
    }
  }
  for (const std::exception_ptr& e : failures)
    if (e) std::rethrow_exception(e);
}

bool is_shard_name(const std::string& name, const std::string& prefix) {
  const std::string begin = prefix + "-", end = ".bin";
  if (name.size() < begin.size() + 5 + end.size() || !name.starts_with(begin) ||
      !name.ends_with(end))
    return false;
  const std::string digits = name.substr(begin.size(), name.size() - begin.size() - end.size());
  return digits.find_first_not_of("0123456789") == std::string::npos;
}

ShardWriter::ShardWriter(std::string prefix, uint64_t vocab_hash, int64_t vocab_size,
                         int64_t tokens_per_shard)
    : prefix_(std::move(prefix)), limit_(tokens_per_shard) {
  check(tokens_per_shard >= 1, "shard: {} tokens per shard", tokens_per_shard);
  info_.vocab_hash = vocab_hash;
  info_.vocab_size = vocab_size;
  info_.bytes_per_token = vocab_size <= 65536 ? 2 : 4;
}

void ShardWriter::add(std::span<const int64_t> ids) {
  if (!tokens_.empty() && int64_t(tokens_.size() + ids.size()) > limit_) flush();
  for (int64_t id : ids) {
    check(id >= 0 && id < info_.vocab_size, "shard: token id {} of a vocabulary of {}", id,
          info_.vocab_size);
    tokens_.push_back(uint32_t(id));
  }
  index_.push_back(tokens_.size());
}

void ShardWriter::flush() {
  Header h{};
  std::memcpy(h.magic, kMagic, 8);
  h.version = kVersion;
  h.bytes_per_token = uint32_t(info_.bytes_per_token);
  h.vocab_hash = info_.vocab_hash;
  h.vocab_size = uint64_t(info_.vocab_size);
  h.tokens = tokens_.size();
  h.documents = index_.size() - 1;
  const size_t token_bytes = size_t(padded(int64_t(tokens_.size()) * info_.bytes_per_token));
  std::string out(sizeof h + token_bytes + 8 * index_.size(), '\0');
  char* body = out.data() + sizeof h;
  if (info_.bytes_per_token == 2) {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const uint16_t t = uint16_t(tokens_[i]);
      std::memcpy(body + 2 * i, &t, 2);
    }
  } else if (!tokens_.empty()) {
    std::memcpy(body, tokens_.data(), 4 * tokens_.size());
  }
  std::memcpy(body + token_bytes, index_.data(), 8 * index_.size());
  h.checksum = hash64(body, out.size() - sizeof h);
  std::memcpy(out.data(), &h, sizeof h);
  const std::string path = fmt::format("{}-{:05}.bin", prefix_, paths_.size());
  make_folders(folder_of(path));
  write_file_atomically(path, out);
  paths_.push_back(path);
  tokens_.clear();
  index_.assign(1, 0);
}

std::vector<std::string> ShardWriter::finish() {
  if (index_.size() > 1 || paths_.empty()) flush();
  return paths_;
}

}  // namespace ebb
