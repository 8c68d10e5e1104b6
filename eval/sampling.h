// How the next token is chosen from logits.
//   Sampling s{.temperature = 0.8, .top_p = 0.95, .seed = 7};
//   std::vector<int64_t> ids = choose_tokens(logits, s, prompts, position);
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace ebb {

struct Sampling {
  double temperature = 0;  // logits are divided by it; 0: the largest logit, ties to the lowest id
  int64_t top_k = 0;       // only the k largest logits; 0: all
  double top_p = 1;        // then only the most likely tokens that together reach this probability
  uint64_t seed = 0;
};

// Throws naming the field that is out of range.
void check_sampling(const Sampling& s);

// One id per row of logits [N,V]. Row i draws number `position` of the stream that belongs to
// (seed, prompts[i]), in f64 on the host: the choice depends on nothing else than its row. Throws
// when a row holds NaN or +inf, or nothing but -inf. Synchronises.
std::vector<int64_t> choose_tokens(const Tensor& logits, const Sampling& s,
                                   std::span<const int64_t> prompts, int64_t position);

// Index of the largest value of each row, the lowest among equals: [N,V] -> N.
std::vector<int64_t> greedy_choice(const Tensor& logits);

}  // namespace ebb
