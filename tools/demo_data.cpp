// ebb demo-data: the documents the demo trains on. Three kinds, mixed: short lists of numbers told
// once and then again and again (recall, densely), needle prompts with at most two lines of noise
// and the answer, and pieces of a text. Each document depends on (seed, its number) only.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "eval/niah.h"
#include "nn/module.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/random.h"
#include "tools/commands.h"

namespace ebb::tools {
namespace {

struct Options {
  std::string text, out;
  int64_t documents = 40000;
  uint64_t seed = 42;
};

class Draws {
 public:
  Draws(uint64_t seed, int64_t document) : key_{seed, name_hash("demo") + uint64_t(document)} {}
  int64_t below(int64_t n) { return int64_t(random_word(key_, next_++) % uint64_t(n)); }
  std::string number() { return std::to_string(1'000'000 + below(9'000'000)); }

 private:
  RandomKey key_;
  uint64_t next_ = 0;
};

std::string number_list(Draws& d) {
  const int64_t n = 1 + d.below(3);
  std::vector<std::pair<char, std::string>> pairs;
  std::string s;
  for (int64_t i = 0; i < n; ++i) {
    pairs.emplace_back(char('a' + (d.below(8) + 8 * i)), d.number());
    s += fmt::format("{} is: {}. ", pairs.back().first, pairs.back().second);
  }
  for (int64_t i = 4 + d.below(7); i > 0; --i) {
    const auto& [key, value] = pairs[size_t(d.below(n))];
    s += fmt::format("{} is {}. ", key, value);
  }
  return s;
}

std::string needle_prompt(Draws& d, const Words& words) {
  NiahDraw draw;
  draw.keys = {words.adjectives[size_t(d.below(int64_t(words.adjectives.size())))] + "-" +
               words.nouns[size_t(d.below(int64_t(words.nouns.size())))]};
  draw.values = {d.number()};
  const int64_t lines = d.below(3);
  draw.places = {d.below(lines + 1)};
  const NiahSample s = build_niah(niah_task("niah_single_1"), nullptr, lines, draw);
  return s.prompt() + " " + draw.values[0];
}

// About 300 bytes, cut between characters.
std::string piece_of(const std::string& text, Draws& d) {
  const int64_t length = std::min<int64_t>(300, int64_t(text.size()));
  size_t begin = size_t(d.below(int64_t(text.size()) - length + 1)), end = begin + size_t(length);
  const auto inside = [&](size_t i) { return i < text.size() && (text[i] & 0xC0) == 0x80; };
  while (inside(begin)) ++begin;
  while (inside(end)) ++end;
  return text.substr(begin, end - begin);
}

void run(const Options& o) {
  const std::string text = read_file(o.text);
  check(text.find_first_not_of(" \t\r\n") != std::string::npos, "demo-data: {} holds no text",
        o.text);
  const size_t broken = first_invalid_utf8(text);
  check(broken == std::string::npos, "demo-data: {}: byte {} is not UTF-8", o.text, broken);
  const Words words = builtin_words();
  write_file_atomically(o.out, [&](FileWriter& out) {
    for (int64_t i = 0; i < o.documents; ++i) {
      Draws d(o.seed, i);
      const int64_t kind = d.below(100);
      const std::string document = kind < 60   ? number_list(d)
                                   : kind < 93 ? needle_prompt(d, words)
                                               : piece_of(text, d);
      out.write(nlohmann::json{{"text", document}}.dump() + "\n");
    }
  });
  fmt::print("{} documents in {}\n", o.documents, o.out);
}

}  // namespace

void add_demo_data(CLI::App& app) {
  auto* c = add_command(app, "demo-data", "Write the documents that tools/demo.sh trains on",
                        "ebb demo-data --text examples/data/three_men_in_a_boat.txt --out d.jsonl");
  auto o = std::make_shared<Options>();
  c->add_option("--text", o->text, "Plain text to take pieces from")->required();
  c->add_option("--out", o->out, "JSON lines to write")->required();
  c->add_option("--documents", o->documents, "How many")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(1), int64_t(1) << 40));
  c->add_option("--seed", o->seed, "Of all random choices")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
