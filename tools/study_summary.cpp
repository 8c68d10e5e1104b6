// What a study found, by recipe: mean and deviation over the seeds.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "eval/report.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/notice.h"
#include "tools/study.h"
#include "tools/version.h"

namespace ebb::tools {
namespace {

using nlohmann::json;

// The columns of the table, in their order; those of evaluations come after them.
struct Column {
  const char *key, *title, *format;
};
constexpr Column kColumns[] = {{"loss", "loss", "{:.4f}"},
                               {"validation_loss", "validation loss", "{:.4f}"},
                               {"perplexity", "perplexity", "{:.3f}"},
                               {"accuracy", "accuracy", "{:.4f}"},
                               {"tokens_per_gpu_per_second", "TGS", "{:.0f}"},
                               {"median_decay", "median decay", "{:.4f}"}};

using Numbers = std::map<std::string, double>;

void take(const json& value, const std::string& key, Numbers* out) {
  if (value.is_number() && std::isfinite(value.get<double>())) (*out)[key] = value.get<double>();
}

// The numbers of one run, as `ebb report` reads its folder.
Numbers numbers_of(const std::string& folder) {
  const json data = report_data({folder});
  Numbers out;
  for (const json& run : data["runs"]) {
    const json end = run.value("/training/summary"_json_pointer, json::object());
    for (const char* key : {"loss", "validation_loss", "accuracy"})
      if (end.contains(key)) take(end[key], key, &out);
    if (out.count("validation_loss") && !out.count("accuracy"))
      out["perplexity"] = std::exp(out["validation_loss"]);
    take(run.value("/speed/tokens_per_gpu_per_second"_json_pointer, json()),
         "tokens_per_gpu_per_second", &out);
    take(run.value("/decays/final/all/median"_json_pointer, json()), "median_decay", &out);
    for (const json& layer : run.value("/decays/final/layers"_json_pointer, json::array()))
      take(layer["median"], fmt::format("median_decay of layer {}", layer["layer"].get<int64_t>()),
           &out);
  }
  for (const json& m : data["means"]) take(m.value("accuracy", json()), "needles", &out);
  for (const json& p : data["perplexity"])
    take(p.value("perplexity", json()), "eval perplexity", &out);
  for (const json& c : data["choices"])
    for (const char* key : {"acc", "acc_norm"})
      take(c.value(key, json()), fmt::format("{} {}", c.value("task", ""), key), &out);
  return out;
}

struct Spread {
  double mean = 0, std = 0;  // of the sample; NaN of fewer than two
  std::vector<double> values = {};
};

Spread spread(const std::vector<double>& x) {
  Spread s{.values = x};
  for (const double v : x) s.mean += v / double(x.size());
  for (const double v : x) s.std += (v - s.mean) * (v - s.mean) / double(x.size() - 1);
  s.std = x.size() > 1 ? std::sqrt(s.std) : std::nan("");
  return s;
}

struct Row {
  std::string recipe;
  size_t runs = 0;
  std::vector<uint64_t> seeds = {};  // of those that are done
  std::map<std::string, Spread> spreads = {};
};

std::vector<Row> rows_of(const Study& study) {
  std::vector<Row> rows;
  std::map<std::string, std::map<std::string, std::vector<double>>> values;
  for (const StudyRun& r : study.runs) {
    auto row =
        std::find_if(rows.begin(), rows.end(), [&](const Row& x) { return x.recipe == r.recipe; });
    if (row == rows.end()) row = rows.insert(row, Row{.recipe = r.recipe});
    ++row->runs;
    if (!r.trained) continue;
    try {
      for (const auto& [key, x] : numbers_of(study.folder(r))) values[r.recipe][key].push_back(x);
      row->seeds.push_back(r.seed);
    } catch (const Error& e) {
      notice(fmt::format("ebb: warning: {} is left out: {}\n", r.name, e.what()));
    }
  }
  for (Row& row : rows)
    for (const auto& [key, x] : values[row.recipe]) row.spreads[key] = spread(x);
  return rows;
}

// Keys that some row has: the columns of the table, then what evaluations measured.
std::vector<Column> columns_of(const std::vector<Row>& rows, std::vector<std::string>* names) {
  std::vector<Column> out;
  for (const Column& c : kColumns)
    if (std::any_of(rows.begin(), rows.end(), [&](const Row& r) { return r.spreads.count(c.key); }))
      out.push_back(c);
  for (const Row& r : rows)
    for (const auto& [key, s] : r.spreads) {
      const bool known = std::any_of(std::begin(kColumns), std::end(kColumns),
                                     [&, k = &key](const Column& c) { return *k == c.key; }) ||
                         std::find(names->begin(), names->end(), key) != names->end() ||
                         key.starts_with("median_decay of");
      if (!known) names->push_back(key);
    }
  for (const std::string& name : *names) out.push_back({name.c_str(), name.c_str(), "{:.4f}"});
  return out;
}

std::string cell(const Row& row, const Column& c) {
  const auto it = row.spreads.find(c.key);
  if (it == row.spreads.end()) return "-";
  const auto text = [&](double x) { return fmt::format(fmt::runtime(c.format), x); };
  const Spread& s = it->second;
  return std::isfinite(s.std) ? text(s.mean) + " ± " + text(s.std) : text(s.mean);
}

std::string table(const std::vector<Row>& rows, const std::vector<Column>& columns) {
  std::vector<std::vector<std::string>> cells(1, {"recipe", "runs"});
  for (const Column& c : columns) cells[0].push_back(c.title);
  for (const Row& r : rows) {
    cells.push_back({r.recipe, fmt::format("{}/{}", r.seeds.size(), r.runs)});
    for (const Column& c : columns) cells.back().push_back(cell(r, c));
  }
  std::string out;
  std::vector<size_t> widths(cells[0].size(), 0);
  const auto width = [](const std::string& s) {  // ± is two bytes and one column
    return s.size() - (s.find("±") != std::string::npos);
  };
  for (const auto& row : cells)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  for (const auto& row : cells) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - width(row[i]), ' ');
      out += (i ? "  " : "") + (i ? pad + row[i] : row[i] + pad);
    }
    out += "\n";
  }
  return out;
}

std::string quoted(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

std::string csv(const std::vector<Row>& rows, const std::vector<Column>& columns) {
  std::string out = "recipe,runs,done";
  for (const Column& c : columns)
    out += fmt::format(",{},{}", quoted(c.key), quoted(std::string(c.key) + " std"));
  out += "\n";
  for (const Row& r : rows) {
    out += fmt::format("{},{},{}", quoted(r.recipe), r.runs, r.seeds.size());
    for (const Column& c : columns) {
      const auto it = r.spreads.find(c.key);
      const bool there = it != r.spreads.end();
      out += there ? fmt::format(",{}", it->second.mean) : ",";
      out += there && std::isfinite(it->second.std) ? fmt::format(",{}", it->second.std) : ",";
    }
    out += "\n";
  }
  return out;
}

json to_json(const std::vector<Row>& rows) {
  json list = json::array();
  for (const Row& r : rows) {
    json j = {{"recipe", r.recipe}, {"runs", r.runs}, {"seeds", r.seeds}};
    for (const auto& [key, s] : r.spreads)
      j["measured"][key] = {{"mean", s.mean},
                            {"std", std::isfinite(s.std) ? json(s.std) : json()},
                            {"values", s.values}};
    list.push_back(j);
  }
  return {{"command", "study"}, {"ebb", version_number()}, {"commit", commit()}, {"recipes", list}};
}

}  // namespace

void summarize(const Study& study) {
  const std::vector<Row> rows = rows_of(study);
  std::vector<std::string> names;
  const std::vector<Column> columns = columns_of(rows, &names);
  const std::string text = table(rows, columns);
  write_file_atomically(study.out() + "/summary.json", to_json(rows).dump(1) + "\n");
  write_file_atomically(study.out() + "/summary.csv", csv(rows, columns));
  write_file_atomically(study.out() + "/summary.txt", text);
  fmt::print("{}", text);
}

}  // namespace ebb::tools
