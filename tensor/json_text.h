// JSON texts, read strictly: what is wrong with one is said in one line.
//   const nlohmann::json j = parse_json(text, "recipe.json");
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ebb {

enum class Comments { refuse, allow };

// Copying and printing a value recurse, so nothing deeper is taken in.
inline constexpr int kMaxJsonDepth = 100;

// Throws "WHAT is not valid JSON: line 3, column 7: ..." for what is not JSON, and also for a key
// that stands twice in an object, a byte 0 (the parser would end there) and numbers beyond f64.
nlohmann::json parse_json(std::string_view text, const std::string& what,
                          Comments comments = Comments::refuse, int max_depth = kMaxJsonDepth);

// The same for a line of many: false instead of an exception.
bool parse_json_line(std::string_view line, nlohmann::json* out);

// JSON as Python's library writes and reads it: Infinity, -Infinity and NaN stand where numbers
// may, which the standard does not have; the public library's config.json files hold them. Dumped
// with an indent of 1.
nlohmann::json parse_python_json(std::string_view text, const std::string& what);
std::string dump_python_json(nlohmann::json value);

// What a JSON exception says, without the library's own prefix.
std::string json_problem(const nlohmann::json::exception& e);

}  // namespace ebb
