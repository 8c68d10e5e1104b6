#include "models/config_reader.h"

#include <algorithm>
#include <cmath>

#include "tensor/check.h"
#include "tensor/file.h"

namespace ebb {

using nlohmann::json;

json read_json(const std::string& file, Comments comments) {
  return parse_json(read_file(file), file, comments);
}

std::string closest(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& c : candidates) {
    std::vector<size_t> row(c.size() + 1);
    for (size_t j = 0; j <= c.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= word.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= c.size(); ++j) {
        const size_t up = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (word[i - 1] != c[j - 1])});
        diagonal = up;
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = c;
    }
  }
  return best;
}

ConfigReader::ConfigReader(const json& object, std::string path, Unknown unknown)
    : ConfigReader(object, std::move(path), unknown, std::make_shared<std::vector<std::string>>()) {
}

ConfigReader::ConfigReader(const json& object, std::string path, Unknown unknown,
                           std::shared_ptr<std::vector<std::string>> errors)
    : object_(object), path_(std::move(path)), unknown_(unknown), errors_(std::move(errors)) {
  if (!object_.is_object()) {
    errors_->push_back(fmt::format("{}: want an object, got {}", path_.empty() ? "/" : path_,
                                   object_.type_name()));
    object_ = json::object();
  }
}

bool ConfigReader::has(const std::string& key) const { return object_.contains(key); }

void ConfigReader::error(const std::string& key, const std::string& problem) {
  errors_->push_back(fmt::format("{}/{}: {}", path_, key, problem));
}

namespace {

template <class T, class Ok>
void take(ConfigReader* r, const json& object, std::set<std::string>* seen, const std::string& key,
          T* out, const char* want, Ok ok) {
  seen->insert(key);
  if (!object.contains(key)) return;
  const json& v = object.at(key);
  if (ok(v))
    *out = v.get<T>();
  else
    r->error(key, fmt::format("want {}, got {}", want, v.dump()));
}

}  // namespace

void ConfigReader::read(const std::string& key, int64_t* out) {
  // 1e3 and 1000.0 are whole numbers too.
  seen_.insert(key);
  if (!has(key)) return;
  const json& v = object_.at(key);
  const bool beyond = v.is_number_unsigned() && v.get<uint64_t>() > uint64_t(INT64_MAX);
  if (v.is_number_integer() && !beyond)
    *out = v.get<int64_t>();
  else if (v.is_number_float() && std::abs(v.get<double>()) <= 0x1p53 &&
           v.get<double>() == std::floor(v.get<double>()))
    *out = int64_t(v.get<double>());
  else
    error(key, fmt::format("want a whole number, got {}", v.dump()));
}

void ConfigReader::read(const std::string& key, uint64_t* out) {
  int64_t v = int64_t(*out);
  read(key, &v);
  if (v < 0) error(key, fmt::format("want a non-negative number, got {}", v));
  *out = uint64_t(v);
}

void ConfigReader::read(const std::string& key, double* out) {
  if (has(key) && object_.at(key).is_number() && !std::isfinite(object_.at(key).get<double>()))
    return error(key, "want a finite number");
  take(this, object_, &seen_, key, out, "a number", [](const json& v) { return v.is_number(); });
}

void ConfigReader::read(const std::string& key, bool* out) {
  take(this, object_, &seen_, key, out, "true or false",
       [](const json& v) { return v.is_boolean(); });
}

void ConfigReader::read(const std::string& key, std::string* out) {
  take(this, object_, &seen_, key, out, "a string", [](const json& v) { return v.is_string(); });
}

void ConfigReader::read(const std::string& key, std::vector<int64_t>* out) {
  take(this, object_, &seen_, key, out, "a list of whole numbers", [](const json& v) {
    return v.is_array() &&
           std::all_of(v.begin(), v.end(), [](const json& e) { return e.is_number_integer(); });
  });
}

void ConfigReader::read(const std::string& key, std::vector<std::string>* out) {
  take(this, object_, &seen_, key, out, "a list of strings", [](const json& v) {
    return v.is_array() &&
           std::all_of(v.begin(), v.end(), [](const json& e) { return e.is_string(); });
  });
}

void ConfigReader::choice(const std::string& key, const std::vector<std::string>& words, int* out) {
  std::string word;
  const size_t before = errors_->size();
  read(key, &word);
  if (!has(key) || errors_->size() != before) return;
  const auto it = std::find(words.begin(), words.end(), word);
  if (it != words.end()) {
    *out = int(it - words.begin());
    return;
  }
  std::string problem = fmt::format("\"{}\" is not one of ", word);
  for (size_t i = 0; i < words.size(); ++i) problem += (i ? ", " : "") + words[i];
  if (const std::string near = closest(word, words); !near.empty())
    problem += fmt::format("; did you mean {}?", near);
  error(key, problem);
}

ConfigReader ConfigReader::object(const std::string& key) {
  seen_.insert(key);
  const json sub = has(key) ? object_.at(key) : json::object();
  return ConfigReader(sub, path_ + "/" + key, unknown_, errors_);
}

json ConfigReader::raw(const std::string& key) {
  seen_.insert(key);
  return has(key) ? object_.at(key) : json();
}

void ConfigReader::close() {
  if (unknown_ == Unknown::keep) return;
  const std::vector<std::string> known(seen_.begin(), seen_.end());
  for (const auto& [key, value] : object_.items()) {
    if (seen_.count(key)) continue;
    const std::string near = closest(key, known);
    error(key, near.empty() ? "unknown" : fmt::format("unknown; did you mean {}?", near));
  }
}

void ConfigReader::finish(const std::string& what) {
  close();
  if (errors_->empty()) return;
  std::string message =
      fmt::format("{}: {} mistake{}", what, errors_->size(), errors_->size() == 1 ? "" : "s");
  for (const std::string& e : *errors_) message += "\n  " + e;
  throw Error(message);
}

}  // namespace ebb
