// Multi-query associative recall: the public generator's examples and statistics, determinism, and
// the score against a model's own logits.
#include "eval/mqar.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "autograd/tape.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tests/small_model.h"

namespace ebb {
namespace {

using nlohmann::json;

json golden(const std::string& name) {
  return json::parse(read_file(EBB_TEST_DATA "/eval/mqar/" + name + ".json"));
}

MqarSpec spec_of(const json& j) {
  return {.vocab_size = j["vocab_size"],
          .length = j["input_seq_len"],
          .pairs = j.value("num_kv_pairs", int64_t(0)),
          .power = j["power_a"],
          .random_non_queries = j.value("random_non_queries", false)};
}

// Keys, values and slots as they stand in an example.
MqarDraw draw_of(const MqarSpec& s, const std::vector<int64_t>& inputs,
                 const std::vector<int64_t>& labels) {
  MqarDraw d;
  d.slots.assign(size_t(s.pairs), -1);
  std::map<int64_t, size_t> pair_of;
  for (int64_t j = 0; j < s.pairs; ++j) {
    d.keys.push_back(inputs[size_t(2 * j)]);
    d.values.push_back(inputs[size_t(2 * j + 1)]);
    pair_of[d.keys.back()] = size_t(j);
  }
  for (int64_t t = 2 * s.pairs; t < s.length; ++t)
    if (labels[size_t(t)] != -100) d.slots[pair_of.at(inputs[size_t(t)])] = (t - 2 * s.pairs) / 2;
  return d;
}

TEST(Mqar, ExamplesOfThePublicGenerator) {
  for (const char* name : {"mqar_V64_L32_kv8_zero", "mqar_V64_L48_kv4_random",
                           "mqar_V64_L62_kv15_random", "mqar_V64_L62_kv15_zero"}) {
    const json j = golden(name);
    const MqarSpec s = spec_of(j);
    ASSERT_EQ(j["inputs"].size(), j["num_examples"].get<size_t>());
    for (size_t i = 0; i < j["inputs"].size(); ++i) {
      const std::vector<int64_t> inputs = j["inputs"][i], labels = j["labels"][i];
      const MqarDraw d = draw_of(s, inputs, labels);
      MqarExample e = build_mqar(s, d);
      for (size_t t = 0; t < inputs.size(); ++t)  // what stands between is random
        if (s.random_non_queries && e.inputs[t] == 0) e.inputs[t] = inputs[t];
      EXPECT_EQ(e.inputs, inputs) << name << " " << i;
      EXPECT_EQ(e.labels, labels) << name << " " << i;
    }
  }
}

TEST(Mqar, EveryExampleIsWellFormed) {
  for (const MqarSpec& s : {MqarSpec{.vocab_size = 64, .length = 62, .pairs = 15},
                            MqarSpec{.vocab_size = 9, .length = 8, .pairs = 2},
                            MqarSpec{.vocab_size = 5, .length = 4, .pairs = 1, .power = 1},
                            MqarSpec{.length = 256, .pairs = 64, .random_non_queries = false},
                            MqarSpec{.length = 256, .pairs = 4}}) {
    const MqarGenerator g(s);
    for (int64_t i = 0; i < 50; ++i) {
      const MqarDraw d = g.draw(i);
      const MqarExample e = g.example(i);
      ASSERT_EQ(int64_t(e.inputs.size()), s.length);
      ASSERT_EQ(int64_t(d.keys.size()), s.pairs);
      for (const auto* list : {&d.keys, &d.values, &d.slots})
        EXPECT_EQ(std::set<int64_t>(list->begin(), list->end()).size(), size_t(s.pairs));
      int64_t labels = 0, zeros = 0;
      for (int64_t t = 0; t < s.length; ++t) {
        const int64_t x = e.inputs[size_t(t)];
        EXPECT_TRUE(x >= 0 && x < s.vocab_size);
        labels += e.labels[size_t(t)] != -100;
        zeros += x == 0;
      }
      EXPECT_EQ(labels, s.pairs);
      if (!s.random_non_queries) {
        EXPECT_EQ(zeros, s.length - 3 * s.pairs);
      }
      for (int64_t j = 0; j < s.pairs; ++j) {
        EXPECT_TRUE(d.keys[size_t(j)] >= 1 && d.keys[size_t(j)] < s.vocab_size / 2);
        EXPECT_TRUE(d.values[size_t(j)] >= s.vocab_size / 2 && d.values[size_t(j)] < s.vocab_size);
        const size_t at = size_t(2 * j + g.distance(d, j));
        EXPECT_EQ(e.inputs[at], d.keys[size_t(j)]);
        EXPECT_EQ(e.labels[at], d.values[size_t(j)]);
      }
      EXPECT_EQ(e.inputs, MqarGenerator(s).example(i).inputs);  // (spec, index) decide
    }
    EXPECT_NE(g.example(0).inputs, g.example(1).inputs);
    MqarSpec other = s;
    other.seed = mqar_test_seed(s.seed);
    EXPECT_NE(MqarGenerator(other).example(0).inputs, g.example(0).inputs);
  }
}

// |p − q| within 4.5 standard deviations of the difference of two shares of n and m draws.
void expect_share(double p, double n, double q, double m, const std::string& what) {
  const double both = (p * n + q * m) / (n + m);
  const double deviation = std::sqrt(both * (1 - both) * (1 / n + 1 / m));
  EXPECT_LE(std::abs(p - q), 4.5 * deviation + 1e-12) << what << ": " << p << ", public " << q;
}

struct Gaps {  // of one pair's slot over many examples
  explicit Gaps(const std::vector<double>& x) : n(double(x.size())) {
    share.assign(16, 0);
    for (const double g : x) {
      mean += g / n;
      if (g < 16) share[size_t(g)] += 1 / n;
    }
    for (const double g : x) variance += (g - mean) * (g - mean) / n;
  }
  double n, mean = 0, variance = 0;
  std::vector<double> share;
};

TEST(Mqar, StatisticsOfThePublicGenerator) {
  constexpr int64_t kExamples = 6000;
  for (const json& j : golden("mqar_statistics")) {
    MqarSpec s = spec_of(j);
    s.pairs = j["num_kv_pairs"];
    const std::string what = fmt::format("L {} n {}", s.length, s.pairs);
    const MqarGenerator g(s);
    const double theirs = j["examples"];
    std::vector<double> first, last;
    double all = 0, distance = 0;
    int64_t key_low = 1 << 30, key_high = 0, value_low = 1 << 30, value_high = 0, gap_high = 0;
    for (int64_t i = 0; i < kExamples; ++i) {
      const MqarDraw d = g.draw(i);
      first.push_back(double(d.slots.front()));
      last.push_back(double(d.slots.back()));
      for (int64_t p = 0; p < s.pairs; ++p) {
        const size_t at = size_t(p);
        all += double(d.slots[at]) / double(kExamples * s.pairs);
        distance += double(g.distance(d, p)) / double(kExamples * s.pairs);
        key_low = std::min(key_low, d.keys[at]), key_high = std::max(key_high, d.keys[at]);
        value_low = std::min(value_low, d.values[at]);
        value_high = std::max(value_high, d.values[at]);
        gap_high = std::max(gap_high, d.slots[at]);
      }
    }
    const Gaps f(first), l(last);
    for (size_t k = 0; k < j["first_draw_prob_theory"].size(); ++k) {  // 16 or all slots
      const std::string bin = fmt::format("{} gap {}", what, k);
      expect_share(f.share[k], f.n, j["first_slot_gap_freq"][k], theirs, "first " + bin);
      expect_share(l.share[k], l.n, j["last_slot_gap_freq"][k], theirs, "last " + bin);
      expect_share(f.share[k], f.n, j["first_draw_prob_theory"][k], 1e12, "theory " + bin);
    }
    const auto expect_mean = [&](const Gaps& x, const char* key) {
      EXPECT_NEAR(x.mean, j[key].get<double>(),
                  4.5 * std::sqrt(x.variance * (1 / x.n + 1 / theirs)))
          << what << " " << key;
    };
    expect_mean(f, "gap_mean_first_slot");
    expect_mean(l, "gap_mean_last_slot");
    // Means over all pairs: at least as sharp as one pair's alone would be.
    const double loose = 4.5 * std::sqrt(std::max(f.variance, l.variance) * (1 / f.n + 1 / theirs));
    EXPECT_NEAR(all, j["gap_mean_all"].get<double>(), loose) << what;
    EXPECT_NEAR(distance, j["key_to_query_distance_mean"].get<double>(), 2 * loose) << what;
    EXPECT_EQ(key_low, j["key_min"].get<int64_t>()) << what;
    EXPECT_EQ(key_high, j["key_max"].get<int64_t>()) << what;
    EXPECT_EQ(value_low, j["value_min"].get<int64_t>()) << what;
    EXPECT_EQ(value_high, j["value_max"].get<int64_t>()) << what;
    EXPECT_EQ(gap_high, j["gap_max"].get<int64_t>()) << what;
  }
}

TEST(Mqar, FillerIsUniform) {
  const MqarGenerator g({.vocab_size = 64, .length = 48, .pairs = 4});
  std::vector<double> count(64, 0);
  double n = 0;
  for (int64_t i = 0; i < 2000; ++i) {
    const MqarExample e = g.example(i);
    for (int64_t t = 8; t < 48; ++t)
      if (e.labels[size_t(t)] == -100) ++count[size_t(e.inputs[size_t(t)])], ++n;
  }
  double chi2 = 0;
  for (const double c : count) chi2 += (c - n / 64) * (c - n / 64) / (n / 64);
  EXPECT_LT(chi2, 63 + 4.5 * std::sqrt(2 * 63.0));
}

TEST(Mqar, ScoreIsThatOfTheLogits) {
  const auto model = testing::small_model(3);
  const MqarGenerator g({.vocab_size = 200, .length = 24, .pairs = 5});
  const MqarScore s = score_mqar(*model, g, 7, {.tokens = 50, .logit_rows = 3});
  const NoGrad off;
  double loss = 0, right = 0;
  for (int64_t i = 0; i < 7; ++i) {
    const MqarExample e = g.example(i);
    const Tensor logits = model->logits(model->hidden(Tensor::from(e.inputs, {1, 24}))).value();
    const std::vector<float> z = logits.to_vector<float>();
    const size_t V = size_t(logits.size(2));
    for (size_t t = 0; t < 24; ++t) {
      if (e.labels[t] == -100) continue;
      const float* row = z.data() + t * V;
      double sum = 0;
      for (size_t v = 0; v < V; ++v) sum += std::exp(double(row[v]));
      loss += std::log(sum) - double(row[e.labels[t]]);
      right += std::max_element(row, row + V) - row == e.labels[t];
    }
  }
  EXPECT_NEAR(s.loss, loss / 35, 1e-5 * loss / 35);
  EXPECT_NEAR(s.accuracy, right / 35, 1e-12);
  int64_t asked = 0;
  for (const MqarScore::Bin& b : s.by_distance) asked += b.asked;
  EXPECT_EQ(asked, 35);
  EXPECT_EQ(s.record()["examples"], 7);
}

TEST(Mqar, Mistakes) {
  const auto error = [](const MqarSpec& s) -> std::string {
    try {
      MqarGenerator g(s);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_NE(error({.length = 255}).find("length 255"), std::string::npos);
  EXPECT_NE(error({.length = 2, .pairs = 1}).find("length 2"), std::string::npos);
  EXPECT_NE(error({.length = 64, .pairs = 17}).find("want 1 ... 16"), std::string::npos);
  EXPECT_NE(error({.pairs = 0}).find("0 pairs"), std::string::npos);
  EXPECT_NE(error({.vocab_size = 256}).find("vocab_size 256"), std::string::npos);
  EXPECT_NE(error({.power = std::nan("")}).find("power nan"), std::string::npos);
  const auto model = testing::small_model(1);
  EXPECT_THROW(score_mqar(*model, MqarGenerator({.length = 32, .pairs = 2}), 1), Error);
}

}  // namespace
}  // namespace ebb
