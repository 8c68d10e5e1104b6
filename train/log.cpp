#include "train/log.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <vector>

#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/json_text.h"
#include "tensor/notice.h"

namespace ebb {

using nlohmann::json;

RunLog::RunLog(const std::string& folder, int64_t from_step) : path_(folder + "/metrics.jsonl") {
  std::string kept;
  if (std::ifstream in(path_); in) {
    for (std::string line; std::getline(in, line);) {
      json j;
      if (!parse_json_line(line, &j) || !j.is_object()) continue;
      const auto step = j.find("step");
      if (step == j.end() || !step->is_number() || step->get<double>() < double(from_step))
        kept += line + "\n";
    }
    write_file_atomically(path_, kept);
  }
  file_ = std::fopen(path_.c_str(), "ab");
  check(file_ != nullptr, "log: cannot write {}: {}", path_, std::strerror(errno));
}

RunLog::~RunLog() {
  if (file_) std::fclose(file_);
}

void RunLog::write(const json& record) {
  const std::string line = record.dump() + "\n";
  const bool ok =
      std::fwrite(line.data(), 1, line.size(), file_) == line.size() && std::fflush(file_) == 0;
  check(ok, "log: cannot write {}: {}", path_, std::strerror(errno));
}

std::string short_count(double n) {
  if (n >= 1e9) return fmt::format("{:.2f}G", n / 1e9);
  if (n >= 1e6) return fmt::format("{:.2f}M", n / 1e6);
  if (n >= 1e4) return fmt::format("{:.0f}k", n / 1e3);
  if (n >= 1e3) return fmt::format("{:.1f}k", n / 1e3);
  return fmt::format("{:.0f}", n);
}

std::string short_time(double seconds) {
  const int64_t s = int64_t(std::max(0.0, std::round(seconds)));
  if (s >= 3600) return fmt::format("{}h{:02}m", s / 3600, s / 60 % 60);
  if (s >= 60) return fmt::format("{}m{:02}s", s / 60, s % 60);
  return fmt::format("{}s", s);
}

Progress::Progress(int64_t first_step, int64_t steps)
    : first_(first_step),
      steps_(steps),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()) {}

void Progress::show(int64_t step, double loss, double norm, double lr, double tokens_per_second) {
  const double spent =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double done = double(step - first_);
  const double left = done > 0 ? spent / done * double(steps_ - step) : 0;
  const std::string line =
      fmt::format("step {}/{} | loss {:.4f} | norm {:.2f} | lr {:.1e} | {} tok/s | ETA {}", step,
                  steps_, loss, norm, lr, short_count(tokens_per_second), short_time(left));
  notice(terminal_ ? "\r\x1b[K" + line : line + "\n");
  open_ = terminal_;
}

void Progress::note(const std::string& text) {
  notice(fmt::format("{}{}\n", open_ ? "\n" : "", text));
  open_ = false;
}

void Progress::finish() {
  if (open_) notice("\n");
  open_ = false;
}

void write_metrics_csv(const std::string& folder) {
  std::ifstream in(folder + "/metrics.jsonl");
  std::vector<json> records;
  std::vector<std::string> columns;
  for (std::string line; std::getline(in, line);) {
    json j;
    if (!parse_json_line(line, &j) || !j.is_object()) continue;
    for (const auto& [key, value] : j.items())
      if (std::find(columns.begin(), columns.end(), key) == columns.end()) columns.push_back(key);
    records.push_back(std::move(j));
  }
  std::string out;
  for (size_t i = 0; i < columns.size(); ++i) out += (i ? "," : "") + columns[i];
  out += "\n";
  for (const json& j : records) {
    for (size_t i = 0; i < columns.size(); ++i) {
      if (i) out += ",";
      if (j.contains(columns[i])) out += j[columns[i]].dump();
    }
    out += "\n";
  }
  write_file_atomically(folder + "/metrics.csv", out);
}

}  // namespace ebb
