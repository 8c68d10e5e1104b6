// Needle tasks, distances and statistics against the public goldens and their own rules.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <set>

#include "eval/niah.h"
#include "eval/statistics.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tests/whitespace.h"

namespace ebb {
namespace {

using nlohmann::json;
const std::string kData = EBB_TEST_DATA;

Words test_words() { return {{"red", "blue", "green"}, {"fox", "ice cream", "tree", "sun"}}; }

// A public noise sample taken apart: lines, where the needle stands, key and value.
TEST(Niah, PublicNoisePromptsAreRebuiltByteEqual) {
  std::ifstream in(kData + "/eval/niah/niah_single_1_1024.jsonl");
  int samples = 0;
  for (std::string line; std::getline(in, line); ++samples) {
    const NiahSample golden = NiahSample::from_json(json::parse(line), "golden", samples);
    const std::string begin = "One of the special magic numbers for ";
    const size_t at = golden.input.find(begin), is = golden.input.find(" is: ", at);
    NiahDraw d;
    d.keys = {golden.input.substr(at + begin.size(), is - at - begin.size())};
    d.values = golden.outputs;
    const int64_t before = std::count(golden.input.begin(), golden.input.begin() + long(at), '\n');
    const int64_t all = std::count(golden.input.begin(), golden.input.end(), '\n');
    d.places = {before - 1};        // the first line is the instruction
    const int64_t H = all - 1 - 1;  // without the needle's line and the question's
    const NiahSample mine = build_niah(niah_task("niah_single_1"), nullptr, H, d);
    EXPECT_EQ(mine.input, golden.input);
    EXPECT_EQ(mine.answer_prefix, golden.answer_prefix);
    EXPECT_EQ(mine.input.substr(size_t(mine.value_begin), 7), golden.outputs[0]);
    EXPECT_EQ(mine.input.substr(size_t(mine.question_begin), 4), "What");
    EXPECT_EQ(mine.input[size_t(mine.context_end)], '\n');
  }
  EXPECT_EQ(samples, 2);
}

std::string long_text() {
  std::string text;
  for (int i = 0; i < 400; ++i)
    text += fmt::format("This is sentence {} of Mr. Smith's story. Was it long? It was! ", i);
  return text;
}

TEST(Niah, EssayPromptsFillTheLengthAndNothingElse) {
  const Essay essay{long_text()};
  const Tokenizer bytes = Tokenizer::bytes();
  const Words words = test_words();
  for (const NiahTask& task : niah_tasks()) {
    const NiahGenerator g(task, words, &essay, token_count(bytes), {.length = 4096, .seed = 3});
    std::map<int64_t, int> asked;
    for (int64_t i = 0; i < 40; ++i) {
      const NiahSample s = g.sample(i), again = g.sample(i);
      EXPECT_EQ(s.input, again.input);
      EXPECT_LE(s.tokens, 4096 - 128);
      EXPECT_EQ(s.tokens, int64_t(s.input.size() + s.answer_prefix.size()));
      const std::string value = s.outputs.at(0);
      EXPECT_EQ(s.input.substr(size_t(s.value_begin), value.size()), value);
      EXPECT_EQ(value.size(), task.value == NeedleValue::number ? 7u : 36u);
      if (task.value == NeedleValue::uuid) {
        EXPECT_EQ(value[14], '4');
        EXPECT_NE(std::string("89ab").find(value[19]), std::string::npos);
      }
      int64_t needles = 0;
      for (size_t p = s.input.find("One of the special magic"); p != std::string::npos;
           p = s.input.find("One of the special magic", p + 1))
        ++needles;
      EXPECT_EQ(needles, task.needles);
      EXPECT_TRUE(s.input.ends_with("?"));
      EXPECT_EQ(s.answer_prefix[0], ' ');
      EXPECT_EQ(string_match_all(" the answer is " + value + ".", s.outputs), 1);
      EXPECT_EQ(string_match_all("nothing", s.outputs), 0);
    }
  }
}

double chi_square(const std::map<int64_t, int>& counts, int64_t cells, double total) {
  double sum = 0;
  for (const auto& [cell, n] : counts) sum += std::pow(n - total / double(cells), 2);
  sum += double(cells - int64_t(counts.size())) * std::pow(total / double(cells), 2);
  return sum / (total / double(cells));
}

// What 500 samples of the public generator show (critical values at p = 0.001).
TEST(Niah, DrawsAreUniform) {
  const Essay essay{long_text()};
  const Words words = builtin_words();
  EXPECT_EQ(words.adjectives.size(), 910u);
  EXPECT_EQ(words.nouns.size(), 6782u);
  for (const NiahTask& task : niah_tasks()) {
    const NiahGenerator g(task, words, &essay, testing::whitespace_count,
                          {.length = 4096, .seed = 42});
    std::map<int64_t, int> places, ranks;
    std::set<std::string> keys;
    double mean = 0;
    for (int64_t i = 0; i < 500; ++i) {
      const NiahSample s = g.sample(i);
      keys.insert(s.keys.begin(), s.keys.end());
      std::set<std::string> distinct_places;
      for (int64_t p : s.places) distinct_places.insert(std::to_string(p)), ++places[p];
      EXPECT_EQ(int64_t(distinct_places.size()), task.needles);
      int64_t before = 0;
      for (const std::string& k : s.keys)
        before += s.input.find(" for " + k + " is: ") < size_t(s.needle_begin);
      ++ranks[before];
      if (task.value == NeedleValue::uuid) continue;
      const double value = std::stod(s.outputs[0]);
      EXPECT_TRUE(value >= 1e6 && value < 1e7);
      mean += value / 500;
    }
    EXPECT_GE(int64_t(keys.size()), 500 * task.needles - 3) << task.name;
    if (task.value == NeedleValue::number) {
      EXPECT_NEAR(mean, 5.5e6, 4 * 9e6 / std::sqrt(12.0 * 500)) << task.name;
    }
    if (task.needles == 4) {
      EXPECT_LT(chi_square(ranks, 4, 500), 16.27);
    }
    const double drawn = double(500 * task.needles);
    const bool noise = task.haystack == HaystackKind::noise;
    // 204 and 39 degrees of freedom.
    EXPECT_LT(chi_square(places, noise ? g.haystack() : 40, drawn), noise ? 272 : 72.06)
        << task.name;
  }
}

TEST(Niah, RecordsComeBackAsTheyWent) {
  const Essay essay{long_text()};
  const Words words = test_words();
  const NiahGenerator g(niah_task("niah_multikey_1"), words, &essay, testing::whitespace_count,
                        {.length = 2048});
  json j = g.sample(3).to_json();
  EXPECT_EQ(j.at("id"), 3);
  j["mine"] = "kept";
  EXPECT_EQ(NiahSample::from_json(j, "x", 0).to_json(), j);
  for (const char* field : {"input", "answer_prefix", "outputs"}) {
    json broken = j;
    broken.erase(field);
    EXPECT_THROW(
        {
          try {
            NiahSample::from_json(broken, "file.jsonl:7", 0);
          } catch (const Error& e) {
            EXPECT_EQ(std::string(e.what()),
                      fmt::format("file.jsonl:7: field '{}' is missing", field));
            throw;
          }
        },
        Error);
  }
  j["value_begin"] = 1'000'000;
  EXPECT_THROW(NiahSample::from_json(j, "x", 0), Error);
  j["value_begin"] = "5";
  EXPECT_THROW(NiahSample::from_json(j, "x", 0), Error);
}

TEST(Niah, DistanceIsCountedInTokens) {
  NiahSample s;  // b = 2, t = 5, q = 10 in words
  s.input = "head line\na b c 123. e f g h\nWhat is it?";
  s.answer_prefix = " It is";
  s.context_begin = 10, s.value_begin = 16, s.question_begin = 29;
  const auto d = needle_distance(s, testing::whitespace_spans(s.prompt()));
  ASSERT_TRUE(d.has_value());
  EXPECT_EQ(d->gap, 5);
  EXPECT_DOUBLE_EQ(d->relative, 5.0 / 8);
  s.value_begin = -1;
  EXPECT_FALSE(needle_distance(s, testing::whitespace_spans(s.prompt())).has_value());
}

TEST(Niah, TooShortALengthIsAnError) {
  const Words words = test_words();
  const Tokenizer bytes = Tokenizer::bytes();
  const NiahGenerator g(niah_task("niah_single_1"), words, nullptr, token_count(bytes),
                        {.length = 300});
  EXPECT_THROW(g.sample(0), Error);
  EXPECT_THROW(NiahGenerator(niah_task("niah_single_2"), words, nullptr, token_count(bytes), {}),
               Error);
  EXPECT_THROW(niah_task("niah_single_9"), Error);
}

TEST(Niah, ScoreIgnoresCaseAndControlCharacters) {
  EXPECT_EQ(string_match_all("xABCx", {"abc"}), 1);
  EXPECT_EQ(string_match_all("12345678", {"1234567"}), 1);
  EXPECT_EQ(string_match_all("abc", {"abc", "def"}), 0.5);
  EXPECT_EQ(string_match_all("a\x01z", {"a\nz"}), 1);
  EXPECT_EQ(string_match_all("", {"1"}), 0);
  EXPECT_EQ(string_match_all("1,234,567", {"1234567"}), 0);
}

TEST(Distance, ReproducesTheGoldens) {
  for (const char* name : {"full", "hole", "sparse"}) {
    const json j = json::parse(read_file(kData + "/eval/distance/" + name + ".json"));
    std::vector<DistanceTask> tasks;
    for (const auto& [key, samples] : j.at("samples").items()) {
      DistanceTask t{key, key.substr(0, key.find('/')), {}};
      for (const auto& s : samples) t.samples.push_back({s[0], s[1]});
      tasks.push_back(std::move(t));
    }
    const DistanceCurves c = distance_curves(tasks, j.at("bins"));
    const json& moved = j.at("moved_boundary");
    EXPECT_EQ(c.moved_boundary, moved.is_null() ? -1 : moved.get<int64_t>()) << name;
    for (size_t k = 0; k < c.edges.size(); ++k)
      EXPECT_NEAR(c.edges[k], j.at("edges")[k].get<double>(), 1e-12) << name << " edge " << k;
    for (const auto& [length, curve] : c.by_length)
      for (size_t b = 0; b < curve.size(); ++b) {
        const json& want = j.at("curves").at(length)[b];
        EXPECT_EQ(curve[b].tasks, want.at("tasks").get<int64_t>());
        EXPECT_NEAR(curve[b].center, want.at("center").get<double>(), 1e-12);
        if (want.at("accuracy").is_null())
          EXPECT_TRUE(std::isnan(curve[b].accuracy));
        else
          EXPECT_NEAR(curve[b].accuracy, want.at("accuracy").get<double>(), 1e-12);
      }
  }
}

TEST(Statistics, WilsonAndPearson) {
  const Interval i = wilson(45, 100);
  EXPECT_NEAR(i.low, 0.3561, 5e-5);
  EXPECT_NEAR(i.high, 0.5476, 5e-5);
  EXPECT_EQ(wilson(0, 10).low, 0);
  EXPECT_EQ(wilson(0, 0).high, 1);
  EXPECT_NEAR(pearson({1, 2, 3}, {2, 4, 6.5}), 0.99794, 1e-4);
  EXPECT_TRUE(std::isnan(pearson({1, 1}, {2, 3})));
  EXPECT_TRUE(std::isnan(pearson(std::vector<double>(6, 0.2), std::vector<double>(6, 0.3))));
  EXPECT_TRUE(std::isnan(pearson({}, {})));
}

}  // namespace
}  // namespace ebb
