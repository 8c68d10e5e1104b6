// Hashes of bytes: 64-bit xxHash for checksums of files and identities of vocabularies (not
// cryptographic), SHA-256 where a result names its inputs for others to compare.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ebb {

uint64_t hash64(const void* data, size_t bytes);
std::string file_hash(const std::string& path);  // 16 hexadecimal digits of hash64 of the file
std::string sha256(std::string_view bytes);      // 64 hexadecimal digits (FIPS 180-4)

}  // namespace ebb
