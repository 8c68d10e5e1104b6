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
    const NiahSample golden = NiahSample::from_json(json::parse(line), "golden");
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
    const NiahGenerator g(task, words, &essay, bytes, {.length = 4096, .seed = 3});
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

TEST(Niah, DrawsAreUniform) {
  const Essay essay{long_text()};
  const Words words = test_words();
  const Tokenizer bytes = Tokenizer::bytes();
  const NiahGenerator g(niah_task("niah_multikey_1"), words, &essay, bytes, {.length = 8192});
  double mean = 0;
  std::set<std::string> values;
  for (int64_t i = 0; i < 300; ++i) {
    const std::string v = g.sample(i).outputs[0];
    values.insert(v);
    mean += std::stod(v) / 300;
  }
  EXPECT_EQ(values.size(), 300u);
  EXPECT_NEAR(mean, 5.5e6, 4 * 9e6 / std::sqrt(12.0 * 300));
}

TEST(Niah, TooShortALengthIsAnError) {
  const Words words = test_words();
  const Tokenizer bytes = Tokenizer::bytes();
  const NiahGenerator g(niah_task("niah_single_1"), words, nullptr, bytes, {.length = 300});
  EXPECT_THROW(g.sample(0), Error);
  EXPECT_THROW(NiahGenerator(niah_task("niah_single_2"), words, nullptr, bytes, {}), Error);
  EXPECT_THROW(niah_task("niah_single_9"), Error);
}

TEST(Niah, ScoreIgnoresCaseAndControlCharacters) {
  EXPECT_EQ(string_match_all("xABCx", {"abc"}), 1);
  EXPECT_EQ(string_match_all("12345678", {"1234567"}), 1);
  EXPECT_EQ(string_match_all("abc", {"abc", "def"}), 0.5);
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
}

}  // namespace
}  // namespace ebb
