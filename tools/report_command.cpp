// The command line of `ebb report`.
#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "eval/report.h"
#include "tensor/file.h"
#include "tools/commands.h"
#include "tools/version.h"

namespace ebb::tools {
namespace {

struct ReportOptions {
  std::vector<std::string> folders;
  std::string out = "report.html", title = "ebb report";
};

void run_report(const ReportOptions& o) {
  const nlohmann::json data = report_data(o.folders);
  const std::string about = fmt::format("ebb {} ({})", version_number(), commit());
  const std::filesystem::path folder = std::filesystem::path(o.out).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder);
  write_file_atomically(o.out, report_page(data, o.title, about));
  for (const nlohmann::json& note : data["notes"])
    fmt::print(stderr, "ebb: note: {}\n", note.get<std::string>());
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
