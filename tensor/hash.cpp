#include "tensor/hash.h"

#define XXH_INLINE_ALL
#include <xxhash/xxhash.h>

#include "tensor/check.h"
#include "tensor/file.h"

namespace ebb {

uint64_t hash64(const void* data, size_t bytes) { return XXH64(data, bytes, 0); }

std::string file_hash(const std::string& path) {
  const auto file = MappedFile::open(path);
  return fmt::format("{:016x}", hash64(file->data(), file->size()));
}

}  // namespace ebb
