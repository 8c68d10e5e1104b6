// Reads JSON objects strictly and reports every mistake at once:
//   ConfigReader r(json, "/model");
//   r.read("num_heads", &heads);              // optional: keeps the default when absent
//   r.require("vocab_size", &vocab);
//   r.finish();                               // throws, listing path, problem and suggestion
// Nested objects share one list of errors: ConfigReader sub = r.object("optim").
#pragma once
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tensor/json_text.h"

namespace ebb {

class ConfigReader {
 public:
  enum class Unknown { error, keep };  // strict recipe; lenient foreign config
  ConfigReader(const nlohmann::json& object, std::string path, Unknown unknown = Unknown::error);

  bool has(const std::string& key) const;
  void read(const std::string& key, int64_t* out);
  void read(const std::string& key, uint64_t* out);
  void read(const std::string& key, double* out);
  void read(const std::string& key, bool* out);
  void read(const std::string& key, std::string* out);
  void read(const std::string& key, std::vector<int64_t>* out);
  void read(const std::string& key, std::vector<std::string>* out);
  template <class T>
  void read(const std::string& key, std::optional<T>* out) {
    if (!has(key) || object_.at(key).is_null()) {
      seen_.insert(key);
      return;
    }
    T value{};
    read(key, &value);
    *out = value;
  }
  template <class T>
  void require(const std::string& key, T* out) {
    if (!has(key)) error(key, "is missing");
    read(key, out);
  }
  // One of several words; `out` receives its index.
  void choice(const std::string& key, const std::vector<std::string>& words, int* out);
  // A nested object; an empty one when absent.
  ConfigReader object(const std::string& key);
  nlohmann::json raw(const std::string& key);  // null when absent; marks it as known
  void ignore(const std::string& key) { seen_.insert(key); }
  void error(const std::string& key, const std::string& problem);

  // Adds the unknown keys of this object to the errors; call on every nested reader.
  void close();
  // close(), then throws ebb::Error when anything was wrong. `what` names the file or recipe.
  void finish(const std::string& what);

 private:
  ConfigReader(const nlohmann::json& object, std::string path, Unknown unknown,
               std::shared_ptr<std::vector<std::string>> errors);

  nlohmann::json object_;
  std::string path_;
  Unknown unknown_;
  std::set<std::string> seen_;
  std::shared_ptr<std::vector<std::string>> errors_;
};

// A JSON file. Throws naming the file and, where it is not JSON, line and column.
nlohmann::json read_json(const std::string& file, Comments comments = Comments::refuse);

// The candidate closest to `word` by edit distance, empty when none is near.
std::string closest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace ebb
