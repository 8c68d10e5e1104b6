#include "tensor/json_text.h"

#include <algorithm>
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
