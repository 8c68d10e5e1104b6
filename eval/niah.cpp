#include "eval/niah.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <set>

#include "nn/module.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/random.h"

namespace ebb {

using nlohmann::json;

namespace {

constexpr char kNoise[] =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

// Independent uniform draws of one sample.
class Draws {
 public:
  explicit Draws(uint64_t seed, uint64_t stream) : key_{seed, stream} {}
  // Uniform in [0, n), without bias (Lemire's rejection).
  uint64_t below(uint64_t n) {
    for (;;) {
      const unsigned __int128 m = static_cast<unsigned __int128>(word64()) * n;
      if (uint64_t(m) >= -n % n) return uint64_t(m >> 64);
    }
  }
  uint64_t word64() {
    const Philox4 r = philox(key_, next_++);
    return uint64_t(r.v[0]) << 32 | r.v[1];
  }
  // k different numbers of [0, n), in the order drawn.
  std::vector<int64_t> distinct(int64_t k, int64_t n) {
    std::vector<int64_t> out;
    while (int64_t(out.size()) < k) {
      const int64_t v = int64_t(below(uint64_t(n)));
      if (std::find(out.begin(), out.end(), v) == out.end()) out.push_back(v);
    }
    return out;
  }

 private:
  RandomKey key_;
  uint64_t next_ = 0;
};

// 40 even steps from 0 to 100, rounded half to even.
std::vector<int64_t> depth_steps() {
  std::vector<int64_t> out;
  for (int i = 0; i < 40; ++i) out.push_back(int64_t(std::nearbyint(double(i) * 100 / 39)));
  return out;
}

const char* type_name(NeedleValue v) { return v == NeedleValue::number ? "number" : "uuid"; }

std::string needle(const NiahTask& t, const std::string& key, const std::string& value) {
  return fmt::format("One of the special magic {}s for {} is: {}.", type_name(t.value), key, value);
}

std::string join(const std::vector<std::string>& parts, const char* glue) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i) out += glue;
    out += parts[i];
  }
  return out;
}

std::string noise_context(const NiahTask& t, int64_t H, const NiahDraw& d) {
  std::vector<std::string> lines(size_t(H), kNoise);
  std::vector<int64_t> places = d.places;
  // From the back, so that earlier line numbers stay valid.
  std::sort(places.begin(), places.end(), std::greater<>());
  for (size_t i = 0; i < places.size(); ++i) {
    check(places[i] >= 0 && places[i] < H, "niah: needle before line {} of {}", places[i], H);
    lines.insert(lines.begin() + places[i], needle(t, d.keys[i], d.values[i]));
  }
  return join(lines, "\n");
}

std::string essay_context(const NiahTask& t, const Essay& essay, int64_t H, const NiahDraw& d) {
  const std::vector<std::string> sentences = essay.sentences(H);
  const double n = double(sentences.size());
  std::vector<int64_t> at;
  for (int64_t depth : d.places) at.push_back(int64_t(n * (double(depth) / 100.0)));
  std::sort(at.begin(), at.end());
  const auto piece = [&](int64_t from, int64_t to) {
    return join({sentences.begin() + from, sentences.begin() + to}, " ");
  };
  // Empty pieces take part, so depth 0 begins the context with a blank.
  std::vector<std::string> parts;
  int64_t from = 0;
  for (size_t i = 0; i < at.size(); ++i) {
    parts.push_back(piece(from, at[i]));
    parts.push_back(needle(t, d.keys[i], d.values[i]));
    from = at[i];
  }
  parts.push_back(piece(from, int64_t(sentences.size())));
  return join(parts, " ");
}

bool is_blank(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == '\f' || c == '\v';
}

}  // namespace

const std::vector<NiahTask>& niah_tasks() {
  static const std::vector<NiahTask> tasks = {
      {"niah_single_1", HaystackKind::noise, NeedleValue::number, 1},
      {"niah_single_2", HaystackKind::essay, NeedleValue::number, 1},
      {"niah_single_3", HaystackKind::essay, NeedleValue::uuid, 1},
      {"niah_multikey_1", HaystackKind::essay, NeedleValue::number, 4},
  };
  return tasks;
}

const NiahTask& niah_task(const std::string& name) {
  std::string names;
  for (const NiahTask& t : niah_tasks()) {
    if (t.name == name) return t;
    names += (names.empty() ? "" : ", ") + t.name;
  }
  fail("niah: no task '{}'; there are {}", name, names);
}

Essay::Essay(std::string text) {
  bool gap = false;
  for (char c : text) {
    if (is_blank(c)) {
      gap = !text_.empty();
      continue;
    }
    if (gap) text_ += ' ';
    gap = false;
    text_ += c;
  }
  check(!text_.empty(), "niah: the haystack text is empty");
  for (size_t i = 0; i <= text_.size(); ++i)
    if (i == text_.size() || text_[i] == ' ') word_ends_.push_back(int64_t(i));
  split_sentences();
}

Essay Essay::load(const std::string& text_file, const std::string& spans_file) {
  const std::string text = read_file(text_file);
  check(first_invalid_utf8(text) == std::string::npos, "niah: {} is not valid UTF-8", text_file);
  Essay essay(text);
  if (spans_file.empty()) return essay;
  std::ifstream spans(spans_file);
  check(bool(spans), "niah: cannot open sentence spans {}", spans_file);
  essay.sentences_.clear();
  int64_t start = 0, end = 0, last = 0, line = 0;
  while (spans >> start >> end) {
    ++line;
    check(start >= last && end > start && end <= int64_t(essay.text_.size()),
          "niah: {}:{}: span [{}, {}) does not fit the text", spans_file, line, start, end);
    essay.sentences_.emplace_back(start, end);
    last = end;
  }
  check(!essay.sentences_.empty() && spans.eof(), "niah: {}:{}: want two numbers a line",
        spans_file, line + 1);
  return essay;
}

// A sentence ends after a word that ends in . ! or ? (and closing quotes or brackets) when the next
// word begins (after opening ones) with a capital or a digit, unless the word is a known
// abbreviation or one letter before a full stop.
void Essay::split_sentences() {
  static const std::set<std::string> kAbbreviations = {
      "mr.", "mrs.", "ms.",  "dr.", "prof.", "st.",  "vs.",  "etc.", "e.g.", "i.e.", "jr.",
      "sr.", "inc.", "ltd.", "co.", "no.",   "fig.", "vol.", "cf.",  "u.s.", "a.m.", "p.m."};
  const auto closing = [](char c) { return c == '"' || c == '\'' || c == ')' || c == ']'; };
  const auto opening = [](char c) { return c == '"' || c == '\'' || c == '(' || c == '['; };
  int64_t start = 0;
  for (size_t w = 0; w < word_ends_.size(); ++w) {
    const int64_t begin = w ? word_ends_[w - 1] + 1 : 0, end = word_ends_[w];
    bool ends = w + 1 == word_ends_.size();
    if (!ends) {
      int64_t e = end;
      while (e > begin && closing(text_[size_t(e - 1)])) --e;
      const char mark = e > begin ? text_[size_t(e - 1)] : ' ';
      int64_t next = end + 1;
      while (next < word_ends_[w + 1] && opening(text_[size_t(next)])) ++next;
      const unsigned char first = static_cast<unsigned char>(text_[size_t(next)]);
      std::string word = text_.substr(size_t(begin), size_t(e - begin));
      std::transform(word.begin(), word.end(), word.begin(),
                     [](unsigned char c) { return char(std::tolower(c)); });
      ends =
          (mark == '.' || mark == '!' || mark == '?') &&
          (std::isupper(first) || std::isdigit(first)) && !kAbbreviations.count(word) &&
          !(mark == '.' && word.size() == 2 && std::isalpha(static_cast<unsigned char>(word[0])));
    }
    if (ends) {
      sentences_.emplace_back(start, end);
      start = end + 1;
    }
  }
}

std::vector<std::string> Essay::sentences(int64_t words) const {
  std::vector<std::string> out;
  while (words > 0) {
    const int64_t take = std::min<int64_t>(words, this->words());
    const int64_t stop = word_ends_[size_t(take - 1)];
    for (const auto& [start, end] : sentences_) {
      if (start >= stop) break;
      out.push_back(text_.substr(size_t(start), size_t(std::min(end, stop) - start)));
    }
    words -= take;
  }
  return out;
}

Words load_words(const std::string& adjectives_file, const std::string& nouns_file) {
  const auto read = [](const std::string& file) {
    std::ifstream in(file);
    check(bool(in), "niah: cannot open word list {}", file);
    std::vector<std::string> out;
    std::set<std::string> seen;
    for (std::string line; std::getline(in, line);) {
      if (!line.empty() && line.back() == '\r') line.pop_back();
      if (!line.empty() && seen.insert(line).second) out.push_back(line);
    }
    check(!out.empty(), "niah: word list {} is empty", file);
    return out;
  };
  return {read(adjectives_file), read(nouns_file)};
}

NiahSample build_niah(const NiahTask& task, const Essay* essay, int64_t H, const NiahDraw& draw) {
  const std::string type = type_name(task.value), key = draw.keys.at(size_t(draw.asked)),
                    value = draw.values.at(size_t(draw.asked));
  NiahSample s;
  s.haystack = H;
  s.outputs = {value};
  const std::string head = fmt::format(
      "A special magic {} is hidden within the following text. Make sure to memorize it. I will "
      "quiz you about the {} afterwards.\n",
      type, type);
  std::string context;
  if (task.haystack == HaystackKind::noise) {
    context = noise_context(task, H, draw);
  } else {
    check(essay != nullptr, "niah: {} needs a haystack text (--haystack FILE)", task.name);
    context = essay_context(task, *essay, H, draw);
  }
  const std::string sentence = needle(task, key, value);
  s.context_begin = int64_t(head.size());
  s.context_end = s.context_begin + int64_t(context.size());
  s.needle_begin = s.context_begin + int64_t(context.find(sentence));
  s.value_begin = s.needle_begin + int64_t(sentence.size() - value.size() - 1);
  s.question_begin = s.context_end + 1;
  s.input = head + context +
            fmt::format("\nWhat is the special magic {} for {} mentioned in the provided text?",
                        type, key);
  s.answer_prefix =
      fmt::format(" The special magic {} for {} mentioned in the provided text is", type, key);
  return s;
}

json NiahSample::to_json() const {
  return {{"index", index},
          {"input", input},
          {"answer_prefix", answer_prefix},
          {"outputs", outputs},
          {"haystack", haystack},
          {"tokens", tokens},
          {"context_begin", context_begin},
          {"context_end", context_end},
          {"needle_begin", needle_begin},
          {"value_begin", value_begin},
          {"question_begin", question_begin}};
}

NiahSample NiahSample::from_json(const json& j, const std::string& where) {
  NiahSample s;
  try {
    s.input = j.at("input");
    s.answer_prefix = j.at("answer_prefix");
    s.outputs = j.at("outputs").get<std::vector<std::string>>();
    s.index = j.value("index", int64_t(0));
    s.haystack = j.value("haystack", int64_t(0));
    s.tokens = j.value("tokens", int64_t(0));
    s.context_begin = j.value("context_begin", int64_t(-1));
    s.context_end = j.value("context_end", int64_t(-1));
    s.needle_begin = j.value("needle_begin", int64_t(-1));
    s.value_begin = j.value("value_begin", int64_t(-1));
    s.question_begin = j.value("question_begin", int64_t(-1));
  } catch (const json::exception& e) {
    fail("{}: not a needle sample: {}", where, e.what());
  }
  check(!s.outputs.empty(), "{}: no outputs", where);
  return s;
}

NiahGenerator::NiahGenerator(const NiahTask& task, const Words& words, const Essay* essay,
                             const Tokenizer& tokenizer, const NiahOptions& options)
    : task_(task), words_(words), essay_(essay), tokenizer_(tokenizer), options_(options) {
  check(task.haystack == HaystackKind::noise || essay,
        "niah: {} needs a haystack text (--haystack FILE)", task.name);
  const int64_t room = options_.length - options_.allowance, u = unit();
  // Probes use streams far from the samples'.
  uint64_t probe = uint64_t(1) << 40;
  const auto fits = [&](int64_t H) { return fitted(H, probe++).tokens <= room; };
  if (options_.fit == NiahFit::step) {
    int64_t H = u;
    while (fits(H)) H += u;
    haystack_ = std::max(u, H - u);
    return;
  }
  const double per_unit = double(fitted(u, probe++).tokens) / double(u);
  int64_t low = u, high = std::max(int64_t(3 * double(options_.length) / per_unit), 2 * u);
  haystack_ = u;
  while (low <= high) {
    const int64_t middle = (low + high) / 2;
    if (fits(middle)) {
      haystack_ = middle;
      low = middle + 1;
    } else {
      high = middle - 1;
    }
  }
}

int64_t NiahGenerator::unit() const {
  if (task_.haystack == HaystackKind::essay) return 500;
  return options_.length < 4096 ? 5 : 25;
}

NiahDraw NiahGenerator::draw(int64_t H, uint64_t stream) const {
  const uint64_t purpose = name_hash(fmt::format("{}/{}/{}", task_.name, options_.length, stream));
  Draws r(options_.seed, purpose);
  NiahDraw d;
  for (int64_t i = 0; i < task_.needles; ++i) {
    const std::string& a = words_.adjectives[r.below(words_.adjectives.size())];
    d.keys.push_back(a + "-" + words_.nouns[r.below(words_.nouns.size())]);
    if (task_.value == NeedleValue::number) {
      d.values.push_back(std::to_string(1'000'000 + r.below(9'000'000)));
    } else {
      const uint64_t a64 = (r.word64() & ~0xF000ull) | 0x4000ull;
      const uint64_t b64 = (r.word64() & ~(3ull << 62)) | (2ull << 62);
      d.values.push_back(fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", a64 >> 32,
                                     a64 >> 16 & 0xFFFF, a64 & 0xFFFF, b64 >> 48,
                                     b64 & 0xFFFFFFFFFFFFull));
    }
  }
  d.asked = int64_t(r.below(uint64_t(task_.needles)));
  if (task_.haystack == HaystackKind::noise) {
    d.places = r.distinct(task_.needles, H);
  } else {
    static const std::vector<int64_t> kDepths = depth_steps();
    for (int64_t i : r.distinct(task_.needles, int64_t(kDepths.size())))
      d.places.push_back(kDepths[size_t(i)]);
  }
  return d;
}

NiahSample NiahGenerator::fitted(int64_t H, uint64_t stream) const {
  NiahSample s = build_niah(task_, essay_, H, draw(H, stream));
  s.tokens = int64_t(tokenizer_.encode(s.input + s.answer_prefix).size());
  return s;
}

NiahSample NiahGenerator::sample(int64_t index) const {
  const int64_t u = unit(), room = options_.length - options_.allowance;
  int64_t H = haystack_;
  for (uint64_t attempt = 0; H >= task_.needles; ++attempt) {
    NiahSample s = fitted(H, uint64_t(index) + (attempt << 32));
    if (s.tokens <= room) {
      s.index = index;
      return s;
    }
    H = H > u ? H - u : H / 2;
  }
  fail("niah: {} does not fit {} tokens with this tokenizer, not even with an empty haystack",
       task_.name, options_.length);
}

double string_match_all(const std::string& prediction, const std::vector<std::string>& outputs) {
  const auto lower = [](std::string s) {
    for (char& c : s)
      c = static_cast<unsigned char>(c) < 0x20 ? '\n'
                                               : char(std::tolower(static_cast<unsigned char>(c)));
    return s;
  };
  const std::string text = lower(prediction);
  double found = 0;
  for (const std::string& o : outputs) found += text.find(lower(o)) != std::string::npos;
  return outputs.empty() ? 0 : found / double(outputs.size());
}

}  // namespace ebb
