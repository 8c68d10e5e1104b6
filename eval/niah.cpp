#include "eval/niah.h"

#include <algorithm>
#include <cctype>

#include "tensor/check.h"

namespace ebb {

using nlohmann::json;

namespace {

constexpr char kNoise[] =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

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
    check(places[i] >= 0 && places[i] <= H, "niah: needle before line {} of {}", places[i], H);
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

NiahSample build_niah(const NiahTask& task, const Essay* essay, int64_t H, const NiahDraw& draw) {
  const std::string type = type_name(task.value), key = draw.keys.at(size_t(draw.asked)),
                    value = draw.values.at(size_t(draw.asked));
  NiahSample s;
  s.haystack = H;
  s.outputs = {value};
  s.query = key;
  s.keys = draw.keys;
  s.values = draw.values;
  s.places = draw.places;
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
  json j = other;
  j.update({{"id", id},
            {"input", input},
            {"answer_prefix", answer_prefix},
            {"outputs", outputs},
            {"query", query},
            {"keys", keys},
            {"values", values},
            {"places", places},
            {"haystack", haystack},
            {"tokens", tokens},
            {"context_begin", context_begin},
            {"context_end", context_end},
            {"needle_begin", needle_begin},
            {"value_begin", value_begin},
            {"question_begin", question_begin}});
  return j;
}

namespace {

// "" where the text is not ours.
std::string between(const std::string& text, const std::string& begin, const std::string& end) {
  const size_t from = text.find(begin);
  if (from == std::string::npos) return "";
  const size_t to = text.find(end, from + begin.size());
  if (to == std::string::npos) return "";
  return text.substr(from + begin.size(), to - from - begin.size());
}

// Finds query and offsets in a prompt of the public form; leaves them unknown in any other.
void locate(NiahSample* s) {
  const size_t head = s->input.find('\n'), question = s->input.rfind("\nWhat");
  if (s->query.empty())
    s->query = between(s->answer_prefix, " for ", " mentioned in the provided text");
  if (head == std::string::npos || question == std::string::npos || question <= head) return;
  const size_t needle = s->input.find(" for " + s->query + " is: ", head);
  const size_t value = needle == std::string::npos
                           ? std::string::npos
                           : s->input.find(s->outputs[0], needle + s->query.size() + 10);
  if (s->query.empty() || value == std::string::npos || value > question) return;
  s->context_begin = int64_t(head) + 1;
  s->context_end = int64_t(question);
  s->question_begin = int64_t(question) + 1;
  s->value_begin = int64_t(value);
  s->needle_begin = int64_t(s->input.rfind("One of the special magic", needle));
}

template <class T>
void required(const json& j, const char* field, const std::string& where, T* out) {
  check(j.contains(field), "{}: field '{}' is missing", where, field);
  try {
    *out = j.at(field).get<T>();
  } catch (const json::exception&) {
    fail("{}: field '{}' has the wrong type", where, field);
  }
}

template <class T>
void optional(const json& j, const char* field, const std::string& where, T* out) {
  if (j.contains(field) && !j.at(field).is_null()) required(j, field, where, out);
}

}  // namespace

NiahSample NiahSample::from_json(const json& j, const std::string& where, int64_t number) {
  check(j.is_object(), "{}: not a JSON object", where);
  NiahSample s;
  required(j, "input", where, &s.input);
  required(j, "answer_prefix", where, &s.answer_prefix);
  required(j, "outputs", where, &s.outputs);
  check(!s.outputs.empty() && !s.outputs[0].empty(), "{}: field 'outputs' is empty", where);
  s.id = j.value("id", json(number));
  check(s.id.is_string() || s.id.is_number_integer(), "{}: field 'id' has the wrong type", where);
  optional(j, "query", where, &s.query);
  optional(j, "keys", where, &s.keys);
  optional(j, "values", where, &s.values);
  optional(j, "places", where, &s.places);
  optional(j, "haystack", where, &s.haystack);
  optional(j, "tokens", where, &s.tokens);
  const std::pair<const char*, int64_t*> offsets[] = {{"context_begin", &s.context_begin},
                                                      {"context_end", &s.context_end},
                                                      {"needle_begin", &s.needle_begin},
                                                      {"value_begin", &s.value_begin},
                                                      {"question_begin", &s.question_begin}};
  for (const auto& [field, at] : offsets) {
    optional(j, field, where, at);
    check(*at >= -1 && *at <= int64_t(s.input.size()), "{}: field '{}' is outside the input", where,
          field);
  }
  if (s.value_begin < 0) locate(&s);
  const json known = s.to_json();
  for (const auto& [key, value] : j.items())
    if (!known.contains(key)) s.other[key] = value;
  return s;
}

const char* name(NiahFit fit) { return fit == NiahFit::binary ? "binary" : "step"; }

NiahFit parse_niah_fit(const std::string& word) {
  check(word == "binary" || word == "step", "niah: fit '{}', want binary or step", word);
  return word == "binary" ? NiahFit::binary : NiahFit::step;
}

TokenCount token_count(const Tokenizer& tokenizer) {
  return [tokenizer](const std::string& text) { return int64_t(tokenizer.encode(text).size()); };
}

double string_match_all(const std::string& prediction, const std::vector<std::string>& outputs) {
  const auto plain = [](std::string_view s) {
    const std::string_view blanks = " \t\n\v\f\r";
    const size_t first = s.find_first_not_of(blanks), last = s.find_last_not_of(blanks);
    std::string out(first == std::string_view::npos ? "" : s.substr(first, last - first + 1));
    for (char& c : out) {
      const unsigned char u = static_cast<unsigned char>(c);
      c = u < 0x20 ? '\n' : char(std::tolower(u));
    }
    return out;
  };
  const std::string text = plain(prediction);
  double found = 0;
  for (const std::string& o : outputs) found += text.find(plain(o)) != std::string::npos;
  return outputs.empty() ? 0 : found / double(outputs.size());
}

std::optional<NeedleDistance> needle_distance(const NiahSample& sample,
                                              const std::vector<Tokenizer::Span>& spans) {
  if (sample.value_begin < 0 || sample.context_begin < 0 || sample.question_begin < 0) return {};
  // The first token with a byte at or behind the offset.
  const auto token_at = [&](int64_t offset) {
    return std::find_if(spans.begin(), spans.end(),
                        [&](const Tokenizer::Span& s) { return s.end > offset; }) -
           spans.begin();
  };
  const int64_t b = token_at(sample.context_begin), t = token_at(sample.value_begin),
                q = token_at(sample.question_begin);
  if (!(b <= t && t < q)) return {};
  return NeedleDistance{double(q - t) / double(q - b), q - t};
}

}  // namespace ebb
