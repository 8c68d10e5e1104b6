// The command line of `ebb report`.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "eval/report.h"
#include "tensor/file.h"
#include "tensor/notice.h"
#include "tools/commands.h"
#include "tools/version.h"

namespace ebb::tools {
namespace {

struct ReportOptions {
  std::vector<std::string> folders;
  std::string out = "report.html", title = "ebb report";
};

using nlohmann::json;

std::string cell(const json& value, const char* format) {
  return value.is_number() ? fmt::format(fmt::runtime(format), value.get<double>()) : "-";
}

// The mean over the settings of ebb eval, in percent, when one model of the run was evaluated.
json mean_accuracy(const json& data, const std::string& run) {
  std::vector<json> found;
  for (const json& m : data["models"])
    if (m.value("run", "") == run)
      for (const json& mean : data["means"])
        if (mean["model"] == m["name"]) found.push_back(100 * mean["accuracy"].get<double>());
  return found.size() == 1 ? found[0] : json();
}

// Of all layers, as late as it was measured.
json median_decay(const json& run) {
  json found;
  for (const char* moment : {"initial", "final", "measured"})
    found = run.value(json::json_pointer(fmt::format("/decays/{}/all/median", moment)), found);
  return found;
}

// A line per run: how far it came, how fast, how much of its state it keeps from token to token,
// what it retrieves, and how much of the decay gates' parameters training kept (Pearson's r over
// all heads, before against after).
void print_runs(const json& data) {
  if (data["runs"].empty()) return;
  size_t width = 3;
  for (const json& r : data["runs"]) width = std::max(width, r["name"].get<std::string>().size());
  fmt::print("{:<{}}  {:>7} {:>10} {:>10} {:>9} {:>12} {:>10} {:>9} {:>10}\n", "run", width,
             "steps", "loss", "validation", "TGS", "median decay", "needles, %", "r(A_log)",
             "r(dt_bias)");
  for (const json& r : data["runs"]) {
    const json end = r.value("/training/summary"_json_pointer, json::object()),
               kept = r.value("/gates/correlation"_json_pointer, json::object());
    const auto correlation = [&](const char* key) {
      return cell(kept.contains(key) ? kept[key]["all"] : json(), "{:.4f}");
    };
    fmt::print("{:<{}}  {:>7} {:>10} {:>10} {:>9} {:>12} {:>10} {:>9} {:>10}\n",
               r["name"].get<std::string>(), width, cell(end.value("steps", json()), "{:.0f}"),
               cell(end.value("loss", json()), "{:.4f}"),
               cell(end.value("validation_loss", json()), "{:.4f}"),
               cell(r.value("/speed/tokens_per_gpu_per_second"_json_pointer, json()), "{:.0f}"),
               cell(median_decay(r), "{:.4f}"), cell(mean_accuracy(data, r["name"]), "{:.2f}"),
               correlation("A_log"), correlation("dt_bias"));
  }
  fmt::print("\n");
}

void run_report(const ReportOptions& o) {
  const json data = report_data(o.folders);
  const std::string about = fmt::format("ebb {} ({})", version_number(), commit());
  make_folders(folder_of(o.out));
  write_file_atomically(o.out, report_page(data, o.title, about));
  for (const json& note : data["notes"])
    notice(fmt::format("ebb: note: {}\n", note.get<std::string>()));
  print_runs(data);
  fmt::print("wrote {}: {} run{}, {} evaluated model{}\n", o.out, data["runs"].size(),
             data["runs"].size() == 1 ? "" : "s", data["models"].size(),
             data["models"].size() == 1 ? "" : "s");
}

}  // namespace

void add_report(CLI::App& app) {
  CLI::App* c = add_command(app, "report", "Draw runs and evaluations as one HTML page",
                            "ebb report runs/random runs/post runs/dami --out report.html\n"
                            "ebb report runs/* runs/eval --title 'Three starts' --out report.html");
  auto o = std::make_shared<ReportOptions>();
  c->add_option("folders", o->folders,
                "Run folders and folders of ebb eval; what of them is there is drawn")
      ->required();
  c->add_option("--out", o->out, "The page")->capture_default_str();
  c->add_option("--title", o->title, "Its heading")->capture_default_str();
  c->callback([o] { run_report(*o); });
}

}  // namespace ebb::tools
