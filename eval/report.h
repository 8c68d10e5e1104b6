// The report: one HTML file with everything about some runs, charts included, that opens anywhere.
//   write_file_atomically("report.html", report_page(report_data({"runs/random", "runs/dami"})));
//
// Read from each folder, whatever of it is there:
//   metrics.jsonl            a record a step: step, loss, lr, norm, tokens_per_second, and
//                            validation_loss where it was measured
//   recipe.json              what was trained
//   gates_initial.json, gates_final.json   [{layer, head, A_log, dt_bias, sensitivity, timescale}]
//   decays_initial.json, decays_final.json   of models/decays.h; decays.json: of `ebb inspect`
//   speed.json               tokens_per_gpu_per_second and what it was measured on
//   results.json, */results.json           of `ebb eval`
//   study.json               of `ebb study`: the folder stands for its runs
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ebb {

// All numbers of the page. Throws when a folder is missing, holds nothing of the above, or holds a
// file that cannot be read as what it should be; a broken last line of metrics.jsonl (a run that
// was killed) is left out and counted in "notes".
nlohmann::json report_data(const std::vector<std::string>& folders);

// Curves longer than this are averaged over as many neighbouring records as it takes.
inline constexpr size_t kReportPoints = 1500;

// `about`: one line under the title, e.g. the version.
std::string report_page(const nlohmann::json& data, const std::string& title,
                        const std::string& about);

}  // namespace ebb
