#include "eval/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "eval/statistics.h"
#include "models/config_reader.h"
#include "tensor/check.h"

namespace ebb {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

json finite(double x) { return std::isfinite(x) ? json(x) : json(); }

double number(const json& record, const char* key) {
  const auto it = record.find(key);
  return it != record.end() && it->is_number() ? it->get<double>() : std::nan("");
}

// ---- training curves ----

std::vector<json> read_metrics(const std::string& file, json* notes) {
  std::ifstream in(file);
  check(bool(in), "report: cannot read {}", file);
  std::vector<json> out;
  int64_t broken = 0, last_broken = 0, lines = 0;
  for (std::string line; std::getline(in, line);) {
    ++lines;
    json j;
    if (parse_json_line(line, &j) && j.is_object() && j.contains("step") && j["step"].is_number()) {
      out.push_back(std::move(j));
    } else if (!line.empty()) {
      ++broken;
      last_broken = lines;
    }
  }
  check(broken <= 1 && (broken == 0 || last_broken == lines), "report: {}:{}: not a record", file,
        last_broken);
  if (broken) notes->push_back(fmt::format("{}: the last line is broken off and left out", file));
  return out;
}

// Means over `bucket` neighbouring records; gaps where none of them has the number.
json averaged(const std::vector<json>& records, const char* key, size_t bucket) {
  json out = json::array();
  for (size_t begin = 0; begin < records.size(); begin += bucket) {
    double sum = 0;
    int n = 0;
    for (size_t i = begin; i < std::min(records.size(), begin + bucket); ++i) {
      const double x = number(records[i], key);
      if (!std::isfinite(x)) continue;
      sum += x;
      ++n;
    }
    out.push_back(n ? json(sum / n) : json());
  }
  return out;
}

json training(const std::vector<json>& records) {
  const size_t bucket = (records.size() + kReportPoints - 1) / kReportPoints;
  json out = {{"bucket", bucket}, {"validation", json::array()}};
  for (const char* key : {"step", "loss", "lr", "norm", "tokens_per_second"})
    out[key] = averaged(records, key, bucket);
  for (const json& r : records)
    if (std::isfinite(number(r, "validation_loss")))
      out["validation"].push_back({r["step"], r["validation_loss"]});
  // The loss of the last twentieth: one record says little.
  const size_t few = std::max<size_t>(1, records.size() / 20);
  const json end =
      averaged(std::vector<json>(records.end() - std::ptrdiff_t(few), records.end()), "loss", few);
  const json& last = records.back();
  out["summary"] = {{"steps", last["step"]},
                    {"tokens", finite(number(last, "tokens"))},
                    {"skipped", finite(number(last, "skipped"))},
                    {"loss", end[0]},
                    {"loss_records", few}};
  if (!out["validation"].empty()) out["summary"]["validation_loss"] = out["validation"].back()[1];
  for (const json& r : records)  // of associative recall
    if (std::isfinite(number(r, "accuracy"))) out["summary"]["accuracy"] = r["accuracy"];
  return out;
}

// ---- decay gates ----

using Gates = std::map<std::pair<int64_t, int64_t>, json>;  // by layer and head

Gates read_gates(const std::string& file) {
  Gates out;
  const json j = read_json(file);
  check(j.is_array(), "report: {} is not an array", file);
  for (const json& g : j) {
    for (const char* key : {"layer", "head"})
      check(g.is_object() && g.contains(key) && g[key].is_number_integer(),
            "report: {}: a gate without the number {}", file, key);
    for (const char* key : {"A_log", "dt_bias", "sensitivity", "timescale"})  // null: not finite
      check(g.contains(key) && (g[key].is_number() || g[key].is_null()),
            "report: {}: a gate without the number {}", file, key);
    out[{g["layer"].get<int64_t>(), g["head"].get<int64_t>()}] = g;
  }
  return out;
}

json gate_list(const Gates& gates) {
  json out = json::array();
  for (const auto& [where, g] : gates) out.push_back(g);
  return out;
}

// Pearson's r of a number before and after, over the heads of `layer` (-1: of all layers).
json correlation(const Gates& a, const Gates& b, const char* key, int64_t layer) {
  std::vector<double> x, y;
  for (const auto& [where, g] : a) {
    const auto other = b.find(where);
    if (other == b.end() || (layer >= 0 && where.first != layer)) continue;
    double from = number(g, key), to = number(other->second, key);
    if (std::string(key) == "timescale") from = std::log(from), to = std::log(to);
    if (!std::isfinite(from) || !std::isfinite(to)) continue;
    x.push_back(from);
    y.push_back(to);
  }
  return finite(pearson(x, y));
}

json correlations(const Gates& a, const Gates& b) {
  json out = json::object();
  std::set<int64_t> layers;
  for (const auto& [where, g] : a) layers.insert(where.first);
  for (const char* key : {"A_log", "dt_bias", "timescale", "sensitivity"}) {
    out[key] = {{"all", correlation(a, b, key, -1)}, {"by_layer", json::array()}};
    for (int64_t l : layers) out[key]["by_layer"].push_back({l, correlation(a, b, key, l)});
  }
  return out;
}

json gates_of(const std::string& folder) {
  json out = json::object();
  Gates initial, final;
  if (const std::string f = folder + "/gates_initial.json"; fs::exists(f)) {
    initial = read_gates(f);
    out["initial"] = gate_list(initial);
  }
  if (const std::string f = folder + "/gates_final.json"; fs::exists(f)) {
    final = read_gates(f);
    out["final"] = gate_list(final);
  }
  if (!initial.empty() && !final.empty()) out["correlation"] = correlations(initial, final);
  return out;
}

// ---- decays in use ----

// What models/decays.h writes, or the same within a record of `ebb inspect`.
json read_decays(const std::string& file) {
  json j = read_json(file);
  if (j.is_object() && j.contains("decays")) j = json(j["decays"]);
  const auto spread = [&](const json& s) {
    for (const char* key : {"median", "lower_quartile", "upper_quartile"})  // null: not finite
      check(s.is_object() && s.contains(key) && (s[key].is_number() || s[key].is_null()),
            "report: {}: a layer without the number {}", file, key);
  };
  check(j.is_object() && j.contains("layers") && j["layers"].is_array() && j.contains("all") &&
            j.contains("tokens") && j["tokens"].is_number(),
        "report: {} does not hold the decays of a model", file);
  for (const json& layer : j["layers"]) {
    spread(layer);
    check(layer.contains("layer") && layer["layer"].is_number_integer(),
          "report: {}: a layer without the number layer", file);
  }
  spread(j["all"]);
  return j;
}

json decays_of(const std::string& folder) {
  json out = json::object();
  for (const auto& [key, file] : {std::pair{"initial", "/decays_initial.json"},
                                  {"final", "/decays_final.json"},
                                  {"measured", "/decays.json"}})
    if (fs::exists(folder + file)) out[key] = read_decays(folder + file);
  return out;
}

// ---- speed ----

json read_speed(const std::string& file) {
  const json j = read_json(file);
  check(j.is_object() && std::isfinite(number(j, "tokens_per_gpu_per_second")),
        "report: {}: no number tokens_per_gpu_per_second", file);
  return j;
}

// ---- results of ebb eval ----

std::vector<std::string> result_files(const std::string& folder) {
  std::vector<std::string> out;
  if (fs::exists(folder + "/results.json")) out.push_back(folder + "/results.json");
  std::vector<std::string> below;
  for (const auto& e : fs::directory_iterator(folder))
    if (e.is_directory() && fs::exists(e.path() / "results.json"))
      below.push_back((e.path() / "results.json").string());
  std::sort(below.begin(), below.end());
  out.insert(out.end(), below.begin(), below.end());
  std::erase_if(out, [](const std::string& f) {
    const json j = read_json(f);
    return !j.is_object() || !j.contains("command") || j["command"] != "eval";
  });
  return out;
}

fs::path whole_path(const std::string& path) {
  const fs::path p = fs::weakly_canonical(path);
  return p.has_filename() ? p : p.parent_path();  // without a trailing slash
}

// The run a model came from: the one whose folder holds the model's, or else, where folders have
// moved, the one whose name the model's begins with. "" when there is none.
std::string run_of(const json& model, const json& runs) {
  if (const std::string folder = model.value("folder", ""); fs::exists(folder)) {
    const fs::path at = whole_path(folder);
    for (const json& r : runs)
      if (const fs::path f = whole_path(r.at("folder")); f == at || f == at.parent_path())
        return r.at("name");
    return "";
  }
  const std::string name = model.at("name");
  for (const json& r : runs)
    if (const std::string n = r.at("name"); name == n || name.starts_with(n + "/")) return n;
  return "";
}

// Adds the tables of one file. Names that are taken, by a model of another file or by a run that
// the model is not of, are told apart by the file's folder.
void add_results(const std::string& file, json* data) {
  const json j = read_json(file);
  std::set<std::string> models, runs;
  for (const json& m : data->at("models")) models.insert(m.at("name"));
  for (const json& r : data->at("runs")) runs.insert(r.at("name"));
  std::map<std::string, std::string> labels;
  try {
    for (json m : j.at("models")) {
      const std::string name = m.at("name"), run = run_of(m, data->at("runs"));
      const bool taken = models.count(name) || (run != name && runs.count(name));
      labels[name] = taken ? name + " (" + fs::path(file).parent_path().string() + ")" : name;
      m["name"] = labels[name];
      if (!run.empty()) m["run"] = run;
      data->at("models").push_back(m);
    }
    for (const char* table : {"scores", "means", "distance", "perplexity", "choices"})
      for (json row : j.value(table, json::array())) {
        row["model"] = labels.at(row.at("model"));
        data->at(table).push_back(row);
      }
  } catch (const json::exception& e) {
    fail("report: {} is not a result of ebb eval: {}", file, json_problem(e));
  } catch (const std::out_of_range&) {
    fail("report: {} is not a result of ebb eval: a table names a model that is not there", file);
  }
  if (j.contains("complete") && j["complete"] == false)
    data->at("notes").push_back(file + ": the evaluation was not finished");
}

std::string run_name(const std::string& folder) {
  const fs::path p = (fs::absolute(folder) / "").lexically_normal().parent_path();
  return p.filename().string();
}

// A folder of `ebb study` stands for those of its runs that have begun, and for itself where an
// evaluation lies in it.
std::vector<std::string> with_study_runs(const std::vector<std::string>& given, json* notes) {
  std::vector<std::string> out;
  for (const std::string& folder : given) {
    const std::string file = folder + "/study.json";
    if (!fs::exists(file)) {
      out.push_back(folder);
      continue;
    }
    const json j = read_json(file);
    size_t waiting = 0;
    try {
      for (const json& r : j.at("runs")) {
        const std::string run = folder + "/" + r.at("name").get<std::string>();
        const bool begun = fs::exists(run + "/recipe.json");
        if (begun) out.push_back(run);
        waiting += !begun;
        if (r.at("state") == "failed")
          notes->push_back(fmt::format("{} failed: {}", run, r.value("error", "")));
      }
    } catch (const json::exception& e) {
      fail("report: {} was not written by ebb study: {}", file, json_problem(e));
    }
    if (waiting) notes->push_back(fmt::format("{}: {} runs have not begun", folder, waiting));
    if (fs::exists(folder + "/results.json")) out.push_back(folder);
    check(waiting < j["runs"].size() || fs::exists(folder + "/results.json"),
          "report: no run of the study {} has begun", folder);
  }
  return out;
}

}  // namespace

json report_data(const std::vector<std::string>& folders_and_studies) {
  check(!folders_and_studies.empty(), "report: no folders");
  json data = {{"runs", json::array()},     {"models", json::array()},
               {"scores", json::array()},   {"means", json::array()},
               {"distance", json::array()}, {"perplexity", json::array()},
               {"choices", json::array()},  {"notes", json::array()}};
  const std::vector<std::string> given = with_study_runs(folders_and_studies, &data["notes"]);
  std::vector<std::string> folders;
  std::map<std::string, int> names;
  std::set<std::string> seen;
  for (const std::string& f : given) {
    check(fs::is_directory(f), "report: there is no folder {}", f);
    if (!seen.insert(whole_path(f).string()).second) continue;
    folders.push_back(f);
    ++names[run_name(f)];
  }
  std::vector<std::string> results;
  for (const std::string& folder : folders) {
    json run = {{"name", names[run_name(folder)] > 1 ? folder : run_name(folder)},
                {"folder", folder}};
    if (const std::string f = folder + "/metrics.jsonl"; fs::exists(f)) {
      const std::vector<json> records = read_metrics(f, &data["notes"]);
      if (records.empty())
        data["notes"].push_back(f + ": no records yet");
      else
        run["training"] = training(records);
    }
    if (const std::string f = folder + "/recipe.json"; fs::exists(f)) run["recipe"] = read_json(f);
    if (const json gates = gates_of(folder); !gates.empty()) run["gates"] = gates;
    if (const json decays = decays_of(folder); !decays.empty()) run["decays"] = decays;
    if (const std::string f = folder + "/speed.json"; fs::exists(f)) run["speed"] = read_speed(f);
    const std::vector<std::string> files = result_files(folder);
    check(run.size() > 2 || !files.empty() || fs::exists(folder + "/metrics.jsonl"),
          "report: {} holds none of metrics.jsonl, recipe.json, gates_initial.json, "
          "gates_final.json, decays_initial.json, decays_final.json, decays.json, speed.json, "
          "results.json",
          folder);
    if (run.size() > 2) data["runs"].push_back(run);
    for (const std::string& f : files)
      if (seen.insert(whole_path(f).string()).second) results.push_back(f);
  }
  for (const std::string& f : results) add_results(f, &data);  // when every run is known
  return data;
}

}  // namespace ebb
