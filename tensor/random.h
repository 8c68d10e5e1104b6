// Philox4x32-10 counter-based random numbers, the same bits on CPU and GPU.
// Keyed by (seed, purpose); the counter is the logical element index, never a thread id, so launch
// shapes cannot matter.
//   uint4 r = philox({seed, purpose}, index)
#pragma once
#include <cstdint>

#include "tensor/tensor.h"

#if defined(__CUDACC__)
#define EBB_HD __host__ __device__ inline
#else
#define EBB_HD inline
#endif

namespace ebb {

struct RandomKey {
  uint64_t seed = 0;
  uint64_t purpose = 0;  // which stream of numbers: parameter index, dropout site, shuffle ...
};

struct Philox4 {
  uint32_t v[4];
};

// The bijection itself: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
EBB_HD Philox4 philox4x32_10(const uint32_t counter[4], const uint32_t key[2]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1), c3 = uint32_t(p0), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Four words for block `index` of the stream (seed, purpose).
EBB_HD Philox4 philox(RandomKey key, uint64_t index) {
  const uint32_t counter[4] = {uint32_t(index), uint32_t(index >> 32), uint32_t(key.purpose),
                               uint32_t(key.purpose >> 32)};
  const uint32_t k[2] = {uint32_t(key.seed), uint32_t(key.seed >> 32)};
  return philox4x32_10(counter, k);
}
// The word of element `index`: word index%4 of block index/4.
EBB_HD uint32_t random_word(RandomKey key, uint64_t index) {
  return philox(key, index >> 2).v[index & 3];
}
// Uniform in (0,1): the middles of 2^23 equal intervals, exact in float, never 0 or 1.
EBB_HD float uniform_open(uint32_t word) { return (float(word >> 9) + 0.5f) * 0x1p-23f; }

// x[i] ~ U(low, high) or N(mean, std²); element i uses counter i. Bits equal on every device for
// the uniform; the normal goes through log and cos, so initial weights are drawn on the CPU.
void fill_uniform(const Tensor& x, RandomKey key, double low = 0, double high = 1);
void fill_normal(const Tensor& x, RandomKey key, double mean = 0, double std = 1);
// A new tensor of N(0, 1).
Tensor random_normal(const Shape& shape, RandomKey key, DType dtype = DType::f32,
                     Device device = {});
// x[i] = raw 32-bit words (i64 tensors), for tests of cross-device equality.
void fill_words(const Tensor& x, RandomKey key);

// The thread's generator: recompute() rewinds it so that a replay draws the same numbers.
struct RandomState {
  uint64_t seed = 0;
  uint64_t next_purpose = 0;
};
RandomState& random_state();
// A key no one else gets until the state is rewound.
RandomKey next_random_key();

namespace gpu {
void fill_random(const Tensor& x, RandomKey key, int kind, double a, double b);
}

}  // namespace ebb
