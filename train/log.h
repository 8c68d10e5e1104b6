// The run's log: metrics.jsonl is the truth, metrics.csv and the progress line derive from it.
#pragma once
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

namespace ebb {

class RunLog {
 public:
  // Appends to FOLDER/metrics.jsonl. Lines from steps >= `from_step` (a run that went on past the
  // checkpoint it now resumes from) are dropped first.
  RunLog(const std::string& folder, int64_t from_step);
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;
  void write(const nlohmann::json& record);  // one line, flushed

 private:
  std::string path_;
  std::FILE* file_ = nullptr;
};

// step 120/5000 | loss 3.412 | norm 0.81 | lr 3.0e-4 | 412k tok/s | ETA 1h12m
// Redraws one line on a terminal, prints plain lines elsewhere.
class Progress {
 public:
  Progress(int64_t first_step, int64_t steps);
  void show(int64_t step, double loss, double norm, double lr, double tokens_per_second);
  void note(const std::string& text);  // a line of its own
  void finish();

 private:
  int64_t first_, steps_;
  bool terminal_, open_ = false;
  std::chrono::steady_clock::time_point start_;
};

std::string short_count(double n);       // 412k, 1.3M
std::string short_time(double seconds);  // 1h12m, 4m05s, 12s

// CSV beside it: one column per key that any record has.
void write_metrics_csv(const std::string& folder);

}  // namespace ebb
