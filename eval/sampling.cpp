#include "eval/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/reduce.h"
#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {
namespace {

// Uniform in [0,1) with 53 bits.
double draw(RandomKey key, int64_t position) {
  const Philox4 r = philox(key, uint64_t(position));
  return double((uint64_t(r.v[0]) << 21) ^ (uint64_t(r.v[1]) >> 11)) * 0x1p-53;
}

// The ids that top_k and top_p leave, in ascending order, and their weights.
struct Candidates {
  std::vector<int64_t> ids;
  std::vector<double> weights;
};

Candidates candidates_of(std::span<const float> row, const Sampling& s, float largest) {
  Candidates c;
  c.ids.resize(row.size());
  std::iota(c.ids.begin(), c.ids.end(), int64_t(0));
  // Larger first, the lower id among equals: a total order, so that the cut is unique.
  const auto before = [&](int64_t a, int64_t b) {
    return row[size_t(a)] != row[size_t(b)] ? row[size_t(a)] > row[size_t(b)] : a < b;
  };
  const auto weight = [&](int64_t id) {
    return std::exp((double(row[size_t(id)]) - double(largest)) / s.temperature);
  };
  if (s.top_k > 0 && size_t(s.top_k) < c.ids.size()) {
    std::nth_element(c.ids.begin(), c.ids.begin() + s.top_k, c.ids.end(), before);
    c.ids.resize(size_t(s.top_k));
  }
  if (s.top_p < 1) {
    std::sort(c.ids.begin(), c.ids.end(), before);
    double total = 0, sum = 0;
    for (const int64_t id : c.ids) total += weight(id);
    size_t n = 0;
    while (n < c.ids.size() && (n == 0 || sum < s.top_p * total)) sum += weight(c.ids[n++]);
    c.ids.resize(n);
  }
  std::sort(c.ids.begin(), c.ids.end());
  for (const int64_t id : c.ids) c.weights.push_back(weight(id));
  return c;
}

int64_t sample(std::span<const float> row, const Sampling& s, double u) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const float v : row) {
    check(!std::isnan(v), "generate: the model's logits hold NaN");
    largest = std::max(largest, v);
  }
  check(std::isfinite(largest), "generate: the model's largest logit is {}", largest);
  const Candidates c = candidates_of(row, s, largest);
  const double total = std::accumulate(c.weights.begin(), c.weights.end(), 0.0);
  double left = u * total;
  size_t last = 0;
  for (size_t i = 0; i < c.ids.size(); ++i) {
    if (c.weights[i] == 0) continue;
    last = i;  // where rounding leaves a little at the end
    left -= c.weights[i];
    if (left < 0) break;
  }
  return c.ids[last];
}

}  // namespace

void check_sampling(const Sampling& s) {
  check(s.temperature >= 0 && std::isfinite(s.temperature),
        "sampling: temperature {}: want 0 (greedy) or more", s.temperature);
  check(s.top_k >= 0, "sampling: top_k {}: want 0 (all tokens) or more", s.top_k);
  check(s.top_p > 0 && s.top_p <= 1, "sampling: top_p {}: want more than 0 and at most 1", s.top_p);
}

std::vector<int64_t> greedy_choice(const Tensor& logits) {
  return argmax(logits, {-1}).to_vector<int64_t>();
}

std::vector<int64_t> choose_tokens(const Tensor& logits, const Sampling& s,
                                   std::span<const int64_t> prompts, int64_t position) {
  check_sampling(s);
  check(logits.dim() == 2 && logits.size(0) == int64_t(prompts.size()) && logits.size(1) > 0,
        "sampling: logits are {} for {} prompts", logits.shape(), prompts.size());
  const size_t V = size_t(logits.size(1));
  if (s.temperature == 0) {
    const Tensor top = max(logits, {-1}).value();
    for (const float v : top.to_vector<float>())
      check(std::isfinite(v), "generate: the model's largest logit is {}", v);
    return greedy_choice(logits);
  }
  const std::vector<float> rows = logits.to_vector<float>();
  std::vector<int64_t> out(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i)
    out[i] = sample(std::span(rows).subspan(i * V, V), s,
                    draw({s.seed, uint64_t(prompts[i])}, position));
  return out;
}

}  // namespace ebb
