#include "tools/eval_tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace ebb::tools {

using nlohmann::json;

void print_score_heading() {
  fmt::print("\n{:<20} {:<16} {:>6} {:>8} {:>7} {:>9}   95% interval\n", "model", "task", "length",
             "samples", "right", "accuracy");
}

void print_score(const std::string& model, const json& s) {
  fmt::print("{:<20} {:<16} {:>6} {:>8} {:>7} {:>9.2f}   {:>6.2f} ... {:.2f}\n", model,
             s["task"].get<std::string>(), s["length"].get<int64_t>(), s["count"].get<int64_t>(),
             s["right"].get<double>(), 100 * s["accuracy"].get<double>(),
             100 * s["low"].get<double>(), 100 * s["high"].get<double>());
  std::fflush(stdout);
}

void print_choices(const std::string& model, const std::string& task, const json& r) {
  const auto cell = [](const json& a) {
    return fmt::format("{:.2f} ({:.2f} ... {:.2f})", 100 * a["accuracy"].get<double>(),
                       100 * a["low"].get<double>(), 100 * a["high"].get<double>());
  };
  fmt::print("{:<20} {:<16} {} questions: acc {}, acc_norm {} %\n", model, task,
             r["count"].get<int64_t>(), cell(r["acc"]), cell(r["acc_norm"]));
  std::fflush(stdout);
}

namespace {

constexpr int kCell = 21;      // "100.0 (94.0 - 100.0)"
constexpr size_t kModels = 3;  // side by side

using Setting = std::pair<std::string, int64_t>;  // task, length

std::string accuracy_cell(const json& scores, const std::string& model, const Setting& setting) {
  for (const json& s : scores)
    if (s["model"] == model && s["task"] == setting.first && s["length"] == setting.second)
      return fmt::format("{:.1f} ({:.1f} - {:.1f})", 100 * s["accuracy"].get<double>(),
                         100 * s["low"].get<double>(), 100 * s["high"].get<double>());
  return "-";
}

std::string mean_cell(const json& means, const std::string& model) {
  for (const json& m : means)
    if (m["model"] == model) return fmt::format("{:.1f}", 100 * m["accuracy"].get<double>());
  return "-";
}

}  // namespace

void print_accuracies(const json& result) {
  std::vector<std::string> models;
  std::vector<Setting> settings;
  for (const json& s : result["scores"]) {
    const Setting setting{s["task"], s["length"]};
    if (std::find(settings.begin(), settings.end(), setting) == settings.end())
      settings.push_back(setting);
    if (std::find(models.begin(), models.end(), s["model"].get<std::string>()) == models.end())
      models.push_back(s["model"]);
  }
  if (settings.size() < 2) return;
  fmt::print("\naccuracy, % (95% interval)\n");
  for (size_t begin = 0; begin < models.size(); begin += kModels) {
    const std::vector<std::string> shown(
        models.begin() + std::ptrdiff_t(begin),
        models.begin() + std::ptrdiff_t(std::min(models.size(), begin + kModels)));
    const auto row = [&](const std::string& task, const std::string& length, auto cell) {
      std::string line = fmt::format("{:<16} {:>6}", task, length);
      for (const std::string& m : shown) line += fmt::format(" {:>{}}", cell(m), kCell);
      fmt::print("{}\n", line);
    };
    row("task", "length", [](const std::string& m) { return m; });
    for (const Setting& s : settings)
      row(s.first, std::to_string(s.second),
          [&](const std::string& m) { return accuracy_cell(result["scores"], m, s); });
    row("mean", "", [&](const std::string& m) { return mean_cell(result["means"], m); });
  }
}

void print_distances(const json& result) {
  if (result["distance"].empty()) return;
  fmt::print("\naccuracy by distance, % (left: value close to the question; right: far back)\n");
  for (const json& d : result["distance"])
    for (const json& l : d["lengths"]) {
      std::string row;
      for (const json& b : l["bins"])
        row += b["accuracy"].is_null() ? "    -"
                                       : fmt::format("{:>5.0f}", 100 * b["accuracy"].get<double>());
      fmt::print("{:<20} {:>6} {}\n", d["model"].get<std::string>(), l["length"].get<int64_t>(),
                 row);
    }
}

}  // namespace ebb::tools
