// Needle prompts against those of the public generator. Its essays are not ours to give away, so
// the files are read from the folder $EBB_GOLDEN_EVAL: niah/*.jsonl, niah/step_fit_lengths.json,
// metrics/string_match_all.jsonl as the public programs wrote them (whitespace tokenizer), and
// pg_haystack.txt with pg_sentences.tsv beside niah/ or in $EBB_GOLDEN_EVAL/../../data/eval.
// Without it these tests skip.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "eval/niah.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tests/whitespace.h"

namespace ebb {
namespace {

using nlohmann::json;
using testing::whitespace_count;
using testing::whitespace_spans;

class EvalGolden : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("EBB_GOLDEN_EVAL");
    if (!folder) GTEST_SKIP() << "EBB_GOLDEN_EVAL names no folder with the public goldens";
    root_ = folder;
    std::string text = root_ + "/pg_haystack.txt";
    if (!std::filesystem::exists(text)) text = root_ + "/../../data/eval/pg_haystack.txt";
    const std::string spans =
        std::filesystem::path(text).parent_path().string() + "/pg_sentences.tsv";
    essay_ = std::make_unique<Essay>(Essay::load(text, spans));
  }
  std::vector<NiahSample> read(const std::string& name) const {
    std::ifstream in(root_ + "/" + name);
    check(bool(in), "no {}/{}", root_, name);
    std::vector<NiahSample> out;
    for (std::string line; std::getline(in, line);)
      out.push_back(NiahSample::from_json(json::parse(line), name, int64_t(out.size())));
    return out;
  }

  std::string root_;
  std::unique_ptr<Essay> essay_;
};

struct Needle {
  size_t begin, end;  // bytes of the input
  std::string key, value;
};

std::vector<Needle> needles_of(const std::string& input) {
  std::vector<Needle> out;
  const std::string head = "One of the special magic ", is = " is: ";
  for (size_t at = input.find(head); at != std::string::npos; at = input.find(head, at + 1)) {
    const size_t key = input.find(" for ", at) + 5, value = input.find(is, key) + is.size(),
                 end = input.find('.', value);
    out.push_back({at, end + 1, input.substr(key, value - is.size() - key),
                   input.substr(value, end - value)});
  }
  return out;
}

NiahDraw draw_of(const NiahSample& golden, const std::vector<Needle>& needles) {
  NiahDraw d;
  for (size_t i = 0; i < needles.size(); ++i) {
    d.keys.push_back(needles[i].key);
    d.values.push_back(needles[i].value);
    if (needles[i].key == golden.query) d.asked = int64_t(i);
  }
  return d;
}

// How many of `sentences` stand before each needle, or nothing when they are not the haystack.
std::vector<size_t> sentence_positions(const NiahSample& golden, const std::vector<Needle>& needles,
                                       const std::vector<std::string>& sentences) {
  std::vector<size_t> out;
  size_t at = size_t(golden.context_begin), n = 0;
  for (const Needle& needle : needles) {
    size_t text = needle.begin - 1 - at;  // without the blank before the needle
    for (bool first = true; text > 0; first = false) {
      const size_t size = n < sentences.size() ? sentences[n].size() + (first ? 0 : 1) : text + 1;
      if (size > text) return {};
      text -= size;
      ++n;
    }
    out.push_back(n);
    at = needle.end + 1;
  }
  return out;
}

const std::map<std::string, std::map<int64_t, int64_t>> kFitted = {
    {"niah_single_1", {{1024, 44}, {2048, 98}, {4096, 205}, {8192, 421}}},
    {"niah_single_2", {{1024, 838}, {2048, 1857}, {4096, 3899}, {8192, 7991}}},
    {"niah_single_3", {{1024, 838}, {2048, 1857}, {4096, 3899}, {8192, 7991}}},
    {"niah_multikey_1", {{1024, 808}, {2048, 1827}, {4096, 3869}, {8192, 7961}}}};

// The depth whose sentence position is `position` of n.
int64_t depth_for(size_t position, size_t n) {
  for (int64_t i = 0; i < 40; ++i) {
    const int64_t depth = int64_t(std::nearbyint(double(i) * 100 / 39));
    if (size_t(double(n) * (double(depth) / 100.0)) == position) return depth;
  }
  return -1;
}

TEST_F(EvalGolden, PromptsAreRebuiltByteEqual) {
  int rebuilt = 0;
  for (const auto& [task, lengths] : kFitted)
    for (const auto& [length, fitted] : lengths)
      for (const NiahSample& golden : read(fmt::format("niah/{}_{}.jsonl", task, length))) {
        const std::vector<Needle> needles = needles_of(golden.input);
        NiahDraw d = draw_of(golden, needles);
        int64_t H = 0;
        if (niah_task(task).haystack == HaystackKind::noise) {
          const auto lines = [&](size_t to) {
            return std::count(golden.input.begin(), golden.input.begin() + long(to), '\n');
          };
          d.places = {lines(needles[0].begin) - 1};  // the first line is the instruction
          H = lines(golden.input.size()) - 2;
        } else {
          // H is not in the file: H* or units of 500 words less, H* known to +-2.
          for (int64_t h = fitted + 2; h > 0 && d.places.empty();
               h -= (fitted + 2 - h) % 500 == 4 ? 496 : 1) {
            const auto sentences = essay_->sentences(h);
            const auto at = sentence_positions(golden, needles, sentences);
            if (at.empty()) continue;
            for (size_t p : at) d.places.push_back(depth_for(p, sentences.size()));
            H = h;
            if (std::count(d.places.begin(), d.places.end(), -1) ||
                build_niah(niah_task(task), essay_.get(), H, d).input != golden.input)
              d.places.clear();
          }
          ASSERT_FALSE(d.places.empty()) << task << " " << length << " " << golden.id;
        }
        const NiahSample mine = build_niah(niah_task(task), essay_.get(), H, d);
        ASSERT_EQ(mine.prompt(), golden.prompt()) << task << " " << length;
        EXPECT_EQ(mine.outputs, golden.outputs);
        // Offsets found in a foreign prompt are those of its construction.
        EXPECT_EQ(mine.query, golden.query);
        EXPECT_EQ(mine.context_begin, golden.context_begin);
        EXPECT_EQ(mine.context_end, golden.context_end);
        EXPECT_EQ(mine.needle_begin, golden.needle_begin);
        EXPECT_EQ(mine.value_begin, golden.value_begin);
        EXPECT_EQ(mine.question_begin, golden.question_begin);
        // The public file's own idea of where the value stands, in words.
        const auto spans = whitespace_spans(golden.prompt());
        const auto t = std::find_if(spans.begin(), spans.end(),
                                    [&](const auto& s) { return s.end > mine.value_begin; });
        EXPECT_EQ(t - spans.begin(), golden.other.at("token_position_answer").get<int64_t>());
        EXPECT_EQ(int64_t(spans.size()) + 128, golden.other.at("length").get<int64_t>());
        ASSERT_TRUE(needle_distance(mine, spans).has_value());
        ++rebuilt;
      }
  EXPECT_EQ(rebuilt, 80);
}

TEST_F(EvalGolden, HaystackSizesOfBothFits) {
  const Words words = builtin_words();
  const json steps = json::parse(read_file(root_ + "/niah/step_fit_lengths.json"));
  for (const auto& [task, lengths] : kFitted)
    for (const auto& [length, fitted] : lengths) {
      const NiahGenerator binary(niah_task(task), words, essay_.get(), whitespace_count,
                                 {.length = length});
      EXPECT_NEAR(double(binary.haystack()), double(fitted), 2) << task << " " << length;
      const NiahGenerator step(niah_task(task), words, essay_.get(), whitespace_count,
                               {.length = length, .fit = NiahFit::step});
      const json& want = steps.at(fmt::format("{}@{}", task, length));
      // Those lengths are without the answer prefix. A key with a blank is one word longer.
      int64_t i = 0;
      const auto blank = [](const std::string& key) { return key.find(' ') != std::string::npos; };
      while (std::ranges::any_of(step.sample(i).keys, blank)) ++i;
      const int64_t input = whitespace_count(step.sample(i).input) + 128;
      EXPECT_EQ(input, want.at("length_with_generation_min").get<int64_t>()) << task << length;
    }
}

TEST_F(EvalGolden, StringMatch) {
  std::ifstream in(root_ + "/metrics/string_match_all.jsonl");
  int rows = 0;
  for (std::string line; std::getline(in, line); ++rows) {
    const json j = json::parse(line);
    EXPECT_EQ(string_match_all(j.at("pred"), j.at("refs").get<std::vector<std::string>>()),
              j.at("score").get<double>())
        << line;
  }
  EXPECT_GE(rows, 9);
}

}  // namespace
}  // namespace ebb
