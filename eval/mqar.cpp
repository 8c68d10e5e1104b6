#include "eval/mqar.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "autograd/tape.h"
#include "nn/module.h"
#include "ops/cross_entropy.h"
#include "ops/indexing.h"
#include "ops/reduce.h"
#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {
namespace {

// The words of one example, one after the other.
class Draws {
 public:
  Draws(RandomKey key, uint64_t first) : key_(key), next_(first) {}
  // Uniform in 0 ... n−1, n < 2^32: the high half of a product, exact for powers of two.
  int64_t below(int64_t n) { return int64_t((uint64_t(word()) * uint64_t(n)) >> 32); }
  // Exponential with mean 1, from 53 bits.
  double exponential() {
    const uint64_t bits = (uint64_t(word()) << 21) ^ (uint64_t(word()) >> 11);
    return -std::log((double(bits) + 0.5) * 0x1p-53);
  }
  // n different numbers of 0 ... range−1 in the order drawn.
  std::vector<int64_t> distinct(int64_t n, int64_t range) {
    std::vector<bool> taken(size_t(range), false);
    std::vector<int64_t> out;
    while (int64_t(out.size()) < n) {
      const int64_t x = below(range);
      if (taken[size_t(x)]) continue;
      taken[size_t(x)] = true;
      out.push_back(x);
    }
    return out;
  }

 private:
  uint32_t word() {
    if (next_ % 4 == 0 || !have_) block_ = philox(key_, next_ / 4), have_ = true;
    return block_.v[next_++ % 4];
  }
  RandomKey key_;
  uint64_t next_;
  Philox4 block_ = {};
  bool have_ = false;
};

constexpr uint64_t kFiller = uint64_t(1) << 32;  // counters of the filler: apart from the rest

}  // namespace

void check_mqar(const MqarSpec& s) {
  check(s.length >= 4 && s.length % 2 == 0, "mqar: length {}: want an even number from 4",
        s.length);
  check(s.pairs >= 1 && 4 * s.pairs <= s.length,
        "mqar: {} pairs in a length of {}: want 1 ... {}, four positions a pair", s.pairs, s.length,
        s.length / 4);
  check(s.vocab_size > s.length && s.vocab_size < (int64_t(1) << 31),
        "mqar: vocab_size {}: want more than the length {}", s.vocab_size, s.length);
  check(std::isfinite(s.power) && std::abs(s.power) <= 16, "mqar: power {}: want -16 ... 16",
        s.power);
}

MqarExample build_mqar(const MqarSpec& s, const MqarDraw& draw) {
  MqarExample e{std::vector<int64_t>(size_t(s.length), 0),
                std::vector<int64_t>(size_t(s.length), -100)};
  for (int64_t j = 0; j < s.pairs; ++j) {
    e.inputs[size_t(2 * j)] = draw.keys[size_t(j)];
    e.inputs[size_t(2 * j + 1)] = draw.values[size_t(j)];
  }
  for (int64_t j = 0; j < s.pairs; ++j) {
    const size_t at = size_t(2 * (s.pairs + draw.slots[size_t(j)]));
    e.inputs[at] = draw.keys[size_t(j)];
    e.labels[at] = draw.values[size_t(j)];
  }
  return e;
}

MqarGenerator::MqarGenerator(const MqarSpec& spec) : spec_(spec) {
  check_mqar(spec);
  for (int64_t g = 0; g < (spec.length - 2 * spec.pairs) / 2; ++g)
    ease_.push_back(std::pow(double(g + 1), 1 - spec.power));
  stream_ = name_hash(fmt::format("mqar {} {} {}", spec.vocab_size, spec.length, spec.pairs));
}

MqarDraw MqarGenerator::draw(int64_t index) const {
  Draws random({spec_.seed, stream_ + uint64_t(index)}, 0);
  const int64_t half = spec_.vocab_size / 2, n = spec_.pairs;
  MqarDraw d{random.distinct(n, half - 1), random.distinct(n, spec_.vocab_size - half), {}};
  for (int64_t& k : d.keys) k += 1;
  for (int64_t& v : d.values) v += half;
  // Exponential clocks of rate p(g) ring in the order of successive draws without replacement.
  std::vector<double> rings;
  for (const double ease : ease_) rings.push_back(random.exponential() * ease);
  d.slots.resize(rings.size());
  std::iota(d.slots.begin(), d.slots.end(), int64_t(0));
  std::partial_sort(d.slots.begin(), d.slots.begin() + n, d.slots.end(), [&](int64_t a, int64_t b) {
    return rings[size_t(a)] != rings[size_t(b)] ? rings[size_t(a)] < rings[size_t(b)] : a < b;
  });
  d.slots.resize(size_t(n));
  return d;
}

MqarExample MqarGenerator::example(int64_t index) const {
  MqarExample e = build_mqar(spec_, draw(index));
  if (!spec_.random_non_queries) return e;
  Draws filler({spec_.seed, stream_ + uint64_t(index)}, kFiller);
  for (int64_t& x : e.inputs)  // keys and values are never 0
    if (x == 0) x = filler.below(spec_.vocab_size);
  return e;
}

int64_t MqarGenerator::distance(const MqarDraw& d, int64_t j) const {
  return 2 * (spec_.pairs + d.slots[size_t(j)] - j);
}

nlohmann::json MqarScore::record() const {
  nlohmann::json bins = nlohmann::json::array();
  for (const Bin& b : by_distance)
    if (b.asked)
      bins.push_back({{"from", b.from},
                      {"to", 2 * b.from - 1},
                      {"asked", b.asked},
                      {"accuracy", double(b.right) / double(b.asked)}});
  return {{"length", length},     {"pairs", pairs}, {"examples", examples},
          {"accuracy", accuracy}, {"loss", loss},   {"by_distance", bins}};
}

namespace {

// Examples [first, first + count) and where their labels are.
struct Questions {
  Questions(const MqarGenerator& g, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const MqarExample e = g.example(first + i);
      const MqarDraw d = g.draw(first + i);
      const int64_t L = g.spec().length, n = g.spec().pairs;
      inputs.insert(inputs.end(), e.inputs.begin(), e.inputs.end());
      for (int64_t j = 0; j < n; ++j) {
        rows.push_back(i * L + 2 * (n + d.slots[size_t(j)]));
        labels.push_back(d.values[size_t(j)]);
        distances.push_back(g.distance(d, j));
      }
    }
  }
  std::vector<int64_t> inputs;                   // [count·L]
  std::vector<int64_t> rows, labels, distances;  // [count·n]
};

// What the model says at rows [begin, end) of the questions' labels; adds their −log p.
std::vector<int64_t> answers(const LanguageModel& model, const Tensor& hidden /*[B·L,d]*/,
                             const Questions& q, int64_t begin, int64_t end, double* loss) {
  const auto part = [&](const std::vector<int64_t>& all) {
    return Tensor::from(std::vector<int64_t>(all.begin() + begin, all.begin() + end), {end - begin},
                        model.device());
  };
  std::optional<DType> wide;
  if (hidden.dtype() == DType::bf16) wide = DType::f32;
  const Var logits = model.logits(index_select(hidden, 0, part(q.rows)), wide);
  const Tensor losses =
      cross_entropy(logits, part(q.labels), {.reduction = Reduction::sum}).token_loss;
  for (const double x : losses.to(DType::f64).to_vector<double>()) *loss += x;
  return argmax(logits.value(), {-1}).to_vector<int64_t>();
}

}  // namespace

MqarScore score_mqar(const LanguageModel& model, const MqarGenerator& generator, int64_t examples,
                     const MqarScoring& options) {
  const MqarSpec& s = generator.spec();
  check(examples >= 1, "mqar: {} examples to score", examples);
  check(s.vocab_size <= model.config().vocab_size,
        "mqar: the task has {} tokens, the model's vocab_size is {}", s.vocab_size,
        model.config().vocab_size);
  const NoGrad off;
  MqarScore score{.length = s.length, .pairs = s.pairs, .examples = examples};
  for (int64_t from = 1; from < s.length; from *= 2) score.by_distance.push_back({.from = from});
  const int64_t batch = std::max<int64_t>(1, options.tokens / s.length);
  int64_t right = 0;
  for (int64_t first = 0; first < examples; first += batch) {
    const int64_t count = std::min(batch, examples - first);
    const Questions q(generator, first, count);
    const Tensor hidden = model.hidden(Tensor::from(q.inputs, {count, s.length}, model.device()))
                              .value()
                              .view({count * s.length, -1});
    const int64_t rows = int64_t(q.rows.size());
    for (int64_t begin = 0; begin < rows; begin += options.logit_rows) {
      const int64_t end = std::min(rows, begin + options.logit_rows);
      const std::vector<int64_t> said = answers(model, hidden, q, begin, end, &score.loss);
      for (int64_t i = begin; i < end; ++i) {
        const bool hit = said[size_t(i - begin)] == q.labels[size_t(i)];
        const int bin = std::bit_width(uint64_t(q.distances[size_t(i)])) - 1;
        ++score.by_distance[size_t(bin)].asked;
        score.by_distance[size_t(bin)].right += hit;
        right += hit;
      }
    }
    if (options.progress) options.progress(first + count);
  }
  score.accuracy = double(right) / double(examples * s.pairs);
  score.loss /= double(examples * s.pairs);
  return score;
}

}  // namespace ebb
