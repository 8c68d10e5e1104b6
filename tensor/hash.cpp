#include "tensor/hash.h"

#define XXH_INLINE_ALL
#include <xxhash/xxhash.h>

#include <array>
#include <bit>

#include "tensor/check.h"
#include "tensor/file.h"

namespace ebb {

uint64_t hash64(const void* data, size_t bytes) { return XXH64(data, bytes, 0); }

std::string file_hash(const std::string& path) {
  const auto file = MappedFile::open(path);
  return fmt::format("{:016x}", hash64(file->data(), file->size()));
}

namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using Digest = std::array<uint32_t, 8>;

// One block of 64 bytes.
void sha256_block(const uint8_t* block, Digest* h) {
  uint32_t w[64];
  for (int t = 0; t < 16; ++t)
    w[t] = uint32_t(block[4 * t]) << 24 | uint32_t(block[4 * t + 1]) << 16 |
           uint32_t(block[4 * t + 2]) << 8 | uint32_t(block[4 * t + 3]);
  for (int t = 16; t < 64; ++t) {
    const uint32_t a = w[t - 15], b = w[t - 2];
    w[t] = w[t - 16] + w[t - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
  }
  Digest s = *h;
  for (int t = 0; t < 64; ++t) {
    const uint32_t e = s[4], a = s[0];
    const uint32_t one = s[7] + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                         ((e & s[5]) ^ (~e & s[6])) + kRound[t] + w[t];
    const uint32_t two = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) +
                         ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
    s = {one + two, s[0], s[1], s[2], s[3] + one, s[4], s[5], s[6]};
  }
  for (size_t i = 0; i < 8; ++i) (*h)[i] += s[i];
}

}  // namespace

std::string sha256(std::string_view bytes) {
  Digest h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
              0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint8_t* data = reinterpret_cast<const uint8_t*>(bytes.data());
  const size_t whole = bytes.size() / 64 * 64;
  for (size_t at = 0; at < whole; at += 64) sha256_block(data + at, &h);
  // The rest, a one bit, zeros, and the length in bits, big-endian.
  std::string tail(bytes.substr(whole));
  tail += '\x80';
  tail.resize((tail.size() + 8 + 63) / 64 * 64 - 8, '\0');
  for (int shift = 56; shift >= 0; shift -= 8)
    tail += char(uint8_t(uint64_t(bytes.size()) * 8 >> shift));
  for (size_t at = 0; at < tail.size(); at += 64)
    sha256_block(reinterpret_cast<const uint8_t*>(tail.data()) + at, &h);
  std::string out;
  for (const uint32_t word : h) out += fmt::format("{:08x}", word);
  return out;
}

}  // namespace ebb
