// Token shards: what `ebb tokenize` writes and the loader maps.
//
// Layout of a .bin file, little-endian:
//   64-byte header   magic "EBBSHARD", u32 version, u32 bytes per token (2 or 4), u64 vocabulary
//                    hash, u64 vocabulary size, u64 tokens, u64 documents, u64 xxh64 of the rest
//   tokens           u16 or u32, padded with zeros to 8 bytes
//   document index   u64 [documents + 1]: token offset where each document begins, then the end
// Every document ends with the separator token. 4-byte tokens hold ids above 65,535.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensor/file.h"

namespace ebb {

struct ShardInfo {
  uint64_t vocab_hash = 0;
  int64_t vocab_size = 0;
  int64_t tokens = 0;
  int64_t documents = 0;
  int bytes_per_token = 2;
};

// A memory-mapped shard. Throws, naming the file, when it is truncated, too long or not a shard.
class Shard {
 public:
  explicit Shard(const std::string& path);
  const std::string& path() const { return path_; }
  const ShardInfo& info() const { return info_; }
  int64_t token(int64_t i) const {
    return info_.bytes_per_token == 2 ? int64_t(small_[i]) : int64_t(large_[i]);
  }
  // Copies tokens [begin, begin + out.size()).
  void read(int64_t begin, std::span<int64_t> out) const;
  std::span<const uint64_t> documents() const { return {index_, size_t(info_.documents) + 1}; }
  // Reads everything once and throws when the checksum or a token id is wrong.
  void verify() const;

 private:
  std::string path_;
  ShardInfo info_;
  std::shared_ptr<MappedFile> file_;
  const uint16_t* small_ = nullptr;
  const uint32_t* large_ = nullptr;
  const uint64_t* index_ = nullptr;
  uint64_t checksum_ = 0;
};

// Verifies all of them, several at a time, and throws about the first that is not as it was
// written.
void verify_shards(std::span<const Shard> shards);

// Whether `name` is one that ShardWriter gives to the shards of `prefix` (both without folder).
bool is_shard_name(const std::string& name, const std::string& prefix);

// Writes shards PREFIX-00000.bin, PREFIX-00001.bin, ... of about `tokens_per_shard` tokens; a
// document is never cut. The folder is made; each appears whole or not at all.
class ShardWriter {
 public:
  ShardWriter(std::string prefix, uint64_t vocab_hash, int64_t vocab_size,
              int64_t tokens_per_shard = 100'000'000);
  // ids of one document, separator included.
  void add(std::span<const int64_t> ids);
  // Writes what is left; returns the paths of all shards.
  std::vector<std::string> finish();

 private:
  void flush();

  std::string prefix_;
  ShardInfo info_;
  int64_t limit_;
  std::vector<uint32_t> tokens_;
  std::vector<uint64_t> index_{0};
  std::vector<std::string> paths_;
};

}  // namespace ebb
