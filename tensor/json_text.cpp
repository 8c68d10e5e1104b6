#include "tensor/json_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "tensor/check.h"

namespace ebb {

using nlohmann::json;

namespace {

// "line 3, column 7" of a byte of the text.
std::string place(std::string_view text, size_t byte) {
  const std::string_view before = text.substr(0, std::min(text.size(), byte));
  const auto line = std::count(before.begin(), before.end(), '\n');
  return fmt::format("line {}, column {}", line + 1,
                     before.size() - (before.rfind('\n') + 1) + 1);  // npos + 1 is 0
}

// Refuses what the parser itself lets pass.
class Watch {
 public:
  Watch(const std::string& what, int max_depth) : what_(what), max_depth_(max_depth) {}
  bool operator()(int depth, json::parse_event_t event, json& value) {
    check(depth <= max_depth_, "{} is nested too deeply: more than {} levels", what_, max_depth_);
    if (event == json::parse_event_t::object_start) open_.emplace_back();
    if (event == json::parse_event_t::object_end) open_.pop_back();
    if (event == json::parse_event_t::key)
      check(open_.back().insert(value.get<std::string>()).second,
            "{}: the key \"{}\" appears twice in one object", what_, value.get<std::string>());
    return true;
  }

 private:
  const std::string& what_;
  int max_depth_;
  std::vector<std::set<std::string>> open_;
};

}  // namespace

json parse_json(std::string_view text, const std::string& what, Comments comments, int max_depth) {
  const size_t zero = text.find('\0');
  check(zero == std::string_view::npos, "{} is not valid JSON: {}: a byte 0", what,
        place(text, zero));
  try {
    return json::parse(text.begin(), text.end(), Watch(what, max_depth), true,
                       comments == Comments::allow);
  } catch (const json::parse_error& e) {
    // Counted here: the parser says column 0 where a number ends a line.
    const std::string problem = json_problem(e);  // "parse error at line 3, column 5: ..."
    const size_t at = problem.find(": ");
    fail("{} is not valid JSON: {}: {}", what, place(text, std::max<size_t>(e.byte, 1) - 1),
         at == std::string::npos ? problem : problem.substr(at + 2));
  } catch (const json::exception& e) {
    fail("{} is not valid JSON: {}", what, json_problem(e));
  }
}

namespace {

struct Word {
  std::string_view text;
  double value;
};
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::array<Word, 3> kWords = {Word{"-Infinity", -kInfinity}, Word{"Infinity", kInfinity},
                                        Word{"NaN", std::numeric_limits<double>::quiet_NaN()}};
const std::string kMark = "number of Python:";  // begins the strings that stand for such words

// The words outside strings as marked strings.
std::string with_marks(std::string_view text) {
  std::string out;
  bool inside = false;
  for (size_t i = 0; i < text.size();) {
    const auto word = std::find_if(kWords.begin(), kWords.end(), [&](const Word& w) {
      return text.substr(i).starts_with(w.text);
    });
    if (!inside && word != kWords.end()) {
      out += '"' + kMark + std::string(word->text) + '"';
      i += word->text.size();
      continue;
    }
    if (text[i] == '"') inside = !inside;
    if (inside && text[i] == '\\' && i + 1 < text.size()) out += text[i++];
    out += text[i++];
  }
  return out;
}

// f(every value below that is no container).
template <class F>
void visit_values(json& value, F&& f) {
  if (!value.is_structured()) return f(value);
  for (json& element : value) visit_values(element, f);
}

}  // namespace

json parse_python_json(std::string_view text, const std::string& what) {
  const bool has_words = std::any_of(kWords.begin(), kWords.end(), [&](const Word& w) {
    return text.find(w.text) != std::string_view::npos;
  });
  if (!has_words) return parse_json(text, what);
  json out = parse_json(with_marks(text), what);
  visit_values(out, [](json& v) {
    for (const Word& w : kWords)
      if (v == json(kMark + std::string(w.text))) v = w.value;
  });
  return out;
}

std::string dump_python_json(json value) {
  visit_values(value, [](json& v) {
    if (!v.is_number_float() || std::isfinite(v.get<double>())) return;
    const double x = v;
    v = kMark + std::string(kWords[std::isnan(x) ? 2 : x > 0 ? 1 : 0].text);
  });
  std::string text = value.dump(1);
  for (const Word& w : kWords) {
    const std::string marked = '"' + kMark + std::string(w.text) + '"';
    for (size_t at = text.find(marked); at != std::string::npos; at = text.find(marked, at))
      text.replace(at, marked.size(), w.text);
  }
  return text;
}

bool parse_json_line(std::string_view line, json* out) {
  try {
    *out = parse_json(line, "");
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::string json_problem(const json::exception& e) {
  const std::string what = e.what();
  const size_t end = what.find("] ");
  return what.starts_with("[json.exception") && end != std::string::npos ? what.substr(end + 2)
                                                                         : what;
}

}  // namespace ebb
