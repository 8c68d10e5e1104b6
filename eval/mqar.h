// Multi-query associative recall (MQAR): pairs k v k v ..., then each key once more, and the model
// is to say its value (Zoology's generator, with the settings of Mamba-2 and DART).
//   MqarGenerator g({.length = 256, .pairs = 64, .seed = 42});
//   MqarExample e = g.example(17);                    // depends on nothing but the spec and 17
//   MqarScore s = score_mqar(*model, g, 3000, {});    // accuracy, loss, accuracy by distance
//
// With V tokens, length L and n pairs: n different keys of 1 ... V/2−1 and n different values of
// V/2 ... V−1, uniform; positions 0 ... 2n−1 hold k_0 v_0 k_1 v_1 ...; slot g = 0 ... (L−2n)/2−1 is
// position 2n + 2g. n different slots are drawn one after the other, each with probability
// proportional to (g+1)^(power−1) among those left; the j-th holds k_j and is labelled v_j. Every
// other label is −100, every other input 0 or, with random_non_queries, uniform in 0 ... V−1.
// Labels stand where the value is to be predicted: they are not to be shifted again.
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "models/language_model.h"

namespace ebb {

struct MqarSpec {
  int64_t vocab_size = 8192;  // V
  int64_t length = 256;       // L, even, less than V
  int64_t pairs = 16;         // n, at most L/4
  double power = 0.01;
  bool random_non_queries = true;
  uint64_t seed = 42;
};
// Throws naming what is wrong.
void check_mqar(const MqarSpec& s);

// Training draws from seeds below 2^31; their test examples from this one, beyond it.
inline uint64_t mqar_test_seed(uint64_t seed) { return seed + (uint64_t(1) << 31); }

struct MqarDraw {
  std::vector<int64_t> keys, values, slots;  // [n] in the order of the pairs
};
struct MqarExample {
  std::vector<int64_t> inputs, labels;  // [L]
};

// The example of a draw, with 0 between.
MqarExample build_mqar(const MqarSpec& s, const MqarDraw& draw);

class MqarGenerator {
 public:
  explicit MqarGenerator(const MqarSpec& spec);  // throws as check_mqar
  const MqarSpec& spec() const { return spec_; }
  MqarDraw draw(int64_t index) const;
  MqarExample example(int64_t index) const;
  // Positions from pair j's key to the key asked again.
  int64_t distance(const MqarDraw& d, int64_t j) const;

 private:
  MqarSpec spec_;
  std::vector<double> ease_;  // [slots]: 1 / weight
  uint64_t stream_ = 0;
};

struct MqarScore {
  int64_t length = 0, pairs = 0, examples = 0;
  double accuracy = 0;  // labels at the largest logit of all, mean over the examples
  double loss = 0;      // mean −log p of the labels
  struct Bin {          // distances [from, 2·from)
    int64_t from = 1, asked = 0, right = 0;
  };
  std::vector<Bin> by_distance = {};
  nlohmann::json record() const;
};

struct MqarScoring {
  int64_t tokens = 65536;                      // of a batch, about
  int64_t logit_rows = 4096;                   // rows of f32 logits at a time
  std::function<void(int64_t)> progress = {};  // examples done
};
// The generator's first `examples` examples. Throws when the model has fewer tokens than they.
MqarScore score_mqar(const LanguageModel& model, const MqarGenerator& generator, int64_t examples,
                     const MqarScoring& options = {});

}  // namespace ebb
