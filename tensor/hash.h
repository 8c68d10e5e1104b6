// 64-bit xxHash of bytes: checksums of files and identities of vocabularies. Not cryptographic.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace ebb {

uint64_t hash64(const void* data, size_t bytes);
std::string file_hash(const std::string& path);  // 16 hexadecimal digits of hash64 of the file

}  // namespace ebb
