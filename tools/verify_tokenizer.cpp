#include "tools/verify_tokenizer.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/file.h"

namespace ebb::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

void for_each_line(const std::string& path, const std::function<void(const json&)>& fn) {
  std::ifstream in(path);
  check(bool(in), "{}: cannot be read", path);
  int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    json j;
    check(parse_json_line(line, &j) && j.is_object(), "{}:{}: not a JSON object", path, number);
    try {
      fn(j);
    } catch (const json::exception& e) {
      fail("{}:{}: {}", path, number, json_problem(e));
    }
  }
  check(number > 0, "{}: holds no line", path);
}

// A result that counts strings; remembers the first one that differs.
void count(VerifyResult* r, const std::string& name, bool equal) {
  ++r->total;
  if (equal) return;
  if (r->error == 0) r->note = "first " + name;
  r->error += 1;
}

std::string from_hex(const std::string& hex) {
  check(hex.size() % 2 == 0 && hex.find_first_not_of("0123456789abcdef") == std::string::npos,
        "'{}' is not hexadecimal", hex);
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2)
    bytes += char(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

// Not merely of another kind: files that claim to be readable, and are not.
bool is_damaged(const std::string& folder) {
  if (fs::exists(folder + "/tokenizer.model")) return true;
  const std::string file = folder + "/tokenizer.json";
  json ignored;
  return fs::exists(file) && !parse_json_line(read_file(file), &ignored);
}

}  // namespace

std::optional<Tokenizer> golden_tokenizer(const std::string& folder, const std::string& name,
                                          std::string* why) {
  const std::string own = folder + "/" + name;
  if (folder.empty()) {
    *why = "say where its files are with --tokenizers";
    return std::nullopt;
  }
  if (!fs::is_directory(own)) {
    *why = "there is no folder " + own;
    return std::nullopt;
  }
#ifndef EBB_WITH_SENTENCEPIECE
  if (fs::exists(own + "/tokenizer.model")) {
    *why = "this build has no SentencePiece";
    return std::nullopt;
  }
#endif
  try {
    return Tokenizer::load(own);
  } catch (const Error& e) {
    if (is_damaged(own)) throw;
    *why = e.what();
    return std::nullopt;
  }
}

std::vector<VerifyResult> verify_tokenizer(const std::string& jsonl, const Tokenizer& tokenizer) {
  VerifyResult ids{.name = "ids", .measure = "strings"}, text{.name = "text", .measure = "strings"},
      bytes{.name = "bytes", .measure = "strings"};
  for_each_line(jsonl, [&](const json& j) {
    const std::string& string = j.at("text").get_ref<const std::string&>();
    const auto want = j.at("ids").get<std::vector<int64_t>>();
    const std::string name = j.at("name");
    const bool back = j.at("roundtrip").get<bool>();
    count(&ids, name, tokenizer.encode(string) == want);
    count(&text, name,
          tokenizer.decode(want) == (back ? string : j.at("decoded").get<std::string>()));
  });
  std::vector<VerifyResult> results = {ids, text};
  const std::string decode = fs::path(jsonl).replace_extension().string() + ".decode.jsonl";
  if (!fs::exists(decode)) return results;
  for_each_line(decode, [&](const json& j) {
    std::string got;
    for (const int64_t id : j.at("ids").get<std::vector<int64_t>>())
      got += tokenizer.token_bytes(id);
    count(&bytes, j.at("name"), got == from_hex(j.at("bytes_hex")));
  });
  results.push_back(bytes);
  return results;
}

}  // namespace ebb::tools
