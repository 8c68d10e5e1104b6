// The processes of a study: so many side by side, each training run and evaluation one of its own.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/notice.h"
#include "tools/child.h"
#include "tools/progress_line.h"
#include "tools/study.h"
#include "train/log.h"

namespace ebb::tools {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t stop_requests = 0;
void request_stop(int) { stop_requests = stop_requests + 1; }

double since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

// The step in the last whole line of a log of training steps.
int64_t last_step(const std::string& metrics) {
  std::ifstream in(metrics, std::ios::binary | std::ios::ate);
  if (!in) return 0;
  const std::streamoff size = in.tellg(), from = std::max<std::streamoff>(0, size - 4096);
  in.seekg(from);
  int64_t step = 0;
  for (std::string line; std::getline(in, line);) {
    nlohmann::json j;
    if (parse_json_line(line, &j) && j.is_object() && j.contains("step") && j["step"].is_number())
      step = j["step"].get<int64_t>();
  }
  return step;
}

bool complete(const std::string& run) {
  return fs::exists(run + "/final/config.json") && fs::exists(run + "/final/model.safetensors");
}

struct Job {
  size_t run = 0;
  int64_t slot = 0;
  bool evaluation = false;
  std::unique_ptr<Child> child = nullptr;
  Clock::time_point start = Clock::now();
};

class Runner {
 public:
  Runner(Study& study, const std::vector<size_t>& mine, const StudyOptions& o)
      : study_(study), mine_(mine), o_(o) {
    slots_ = o.jobs > 0 ? o.jobs : int64_t(o.devices.size());
    for (int64_t s = 0; s < slots_; ++s) free_.push_back(slots_ - 1 - s);
    for (const size_t i : mine_) {
      StudyRun& r = study_.runs[i];
      if (r.trained && !complete(study_.folder(r))) r.trained = false, r.evaluated.clear();
      if (r.state == RunState::failed && !o_.retry) continue;
      if (nothing_left(r)) {
        r.state = RunState::done;
        continue;
      }
      if (r.state == RunState::done || r.state == RunState::failed) r.state = RunState::stopped;
      r.error.clear();
      queue_.push_back(i);
      if (r.trained) continue;
      counted_.push_back(i);
      total_steps_ += r.steps;
      before_ += last_step(study_.folder(r) + "/metrics.jsonl");
    }
  }

  int operator()() {
    study_.save();
    introduce();
    while (!queue_.empty() || !jobs_.empty()) {
      if (!stopping_ && (stop_requests > 0 || (o_.budget > 0 && since(start_) >= o_.budget)))
        stop();
      if (stopping_ && stop_requests > 1) signal_all(SIGKILL);  // asked twice
      while (!stopping_ && start_next()) {
      }
      if (jobs_.empty()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      collect();
      progress_.show([&] { return status(); });
    }
    int failed = 0;
    for (const size_t i : mine_) failed += study_.runs[i].state == RunState::failed;
    return failed;
  }

 private:
  bool nothing_left(const StudyRun& r) const {
    return r.trained && (o_.eval.empty() || r.evaluated == o_.eval);
  }
  void note(const std::string& text) const {
    notice(fmt::format("{}{}\n", isatty(STDERR_FILENO) ? "\r\x1b[K" : "", text));
  }

  size_t count(RunState state) const {
    size_t n = 0;
    for (const size_t i : mine_) n += study_.runs[i].state == state;
    return n;
  }

  void introduce() const {
    std::string rest;
    if (const size_t n = count(RunState::done)) rest += fmt::format(", {} done before", n);
    if (const size_t n = count(RunState::failed))
      rest += fmt::format(", {} failed before (--retry tries again)", n);
    const int64_t together = std::min<int64_t>(slots_, int64_t(queue_.size()));
    if (!queue_.empty()) rest += fmt::format(", {} to do", queue_.size());
    if (together > 1) rest += fmt::format(", {} side by side", together);
    note(fmt::format("{} run{}{}", mine_.size(), mine_.size() == 1 ? "" : "s", rest));
  }

  // False where nothing can be started now.
  bool start_next() {
    if (free_.empty()) return false;
    const auto next = std::find_if(queue_.begin(), queue_.end(), [&](size_t i) {
      const bool evaluation = study_.runs[i].trained;
      return !evaluation || !o_.eval_alone ||
             std::none_of(jobs_.begin(), jobs_.end(), [](const Job& j) { return j.evaluation; });
    });
    if (next == queue_.end()) return false;
    Job job{.run = *next, .slot = free_.back(), .evaluation = study_.runs[*next].trained};
    queue_.erase(next);
    StudyRun& r = study_.runs[job.run];
    try {
      job.child = start(r, job);
    } catch (const Error& e) {
      fail_run(r, e.what());
      return true;
    }
    free_.pop_back();
    r.state = RunState::running;
    r.pid = job.child->pid();
    jobs_.push_back(std::move(job));
    study_.save();
    return true;
  }

  std::unique_ptr<Child> start(StudyRun& r, const Job& job) const {
    const std::string folder = study_.folder(r);
    const std::string& device = o_.devices[size_t(job.slot) % o_.devices.size()];
    make_folders(folder);
    std::vector<std::string> arguments = train_arguments(study_, r, device), environment;
    if (job.evaluation) {
      arguments = {"eval",     "--model", folder + "/final", "--out", folder + "/eval",
                   "--device", device};
      arguments.insert(arguments.end(), o_.eval.begin(), o_.eval.end());
    } else {
      ++r.attempts;
    }
    if (!std::getenv("OMP_NUM_THREADS"))
      environment.push_back(
          fmt::format("OMP_NUM_THREADS={}",
                      std::max<int64_t>(1, std::thread::hardware_concurrency() / slots_)));
    if (slots_ > 1 && !std::getenv("OMP_WAIT_POLICY"))
      environment.push_back("OMP_WAIT_POLICY=passive");  // they share the cores
    return std::make_unique<Child>(arguments, environment,
                                   folder + (job.evaluation ? "/eval.log" : "/train.log"));
  }

  void fail_run(StudyRun& r, const std::string& error) {
    r.state = RunState::failed;
    r.error = error;
    study_.save();
    note(fmt::format("[{}/{}] {} failed: {}", finished(), mine_.size(), r.name, error));
  }

  size_t finished() const { return count(RunState::done) + count(RunState::failed); }

  void collect() {
    for (size_t i = 0; i < jobs_.size();) {
      if (!jobs_[i].child->ended()) {
        ++i;
        continue;
      }
      const Job job = std::move(jobs_[i]);
      jobs_.erase(jobs_.begin() + std::ptrdiff_t(i));
      free_.push_back(job.slot);
      finish(job);
    }
  }

  void finish(const Job& job) {
    StudyRun& r = study_.runs[job.run];
    const double seconds = since(job.start);
    if (!job.evaluation) r.seconds += seconds;
    const bool was_stopped = (stopping_ || stop_requests > 0) && job.child->signalled();
    if (!was_stopped && !job.child->ok()) {
      const std::string file = study_.folder(r) + (job.evaluation ? "/eval.log" : "/train.log");
      return fail_run(r, fmt::format("{}{}", job.child->problem(),
                                     job.child->signalled() ? "; see " + file : ""));
    }
    r.state = RunState::stopped;
    if (job.evaluation && !was_stopped) r.evaluated = o_.eval;
    if (!job.evaluation && !was_stopped) r.trained = complete(study_.folder(r));
    if (nothing_left(r)) {
      r.state = RunState::done;
    } else if (r.trained && !stopping_) {
      queue_.insert(queue_.begin(), job.run);  // its evaluation
    } else if (!stopping_ && stop_requests == 0) {
      note(fmt::format("{} was stopped by another; the same command goes on", r.name));
    }
    study_.save();
    if (r.state == RunState::done)
      note(fmt::format("[{}/{}] {} done in {}", finished(), mine_.size(), r.name,
                       short_time(r.seconds)));
  }

  void signal_all(int number) {
    for (const Job& j : jobs_) j.child->signal(number);
  }

  void stop() {
    stopping_ = true;
    queue_.clear();
    if (jobs_.empty()) return;
    note(fmt::format("{}: {} run{} a last checkpoint",
                     stop_requests > 0 ? "stopping" : "the time is over", jobs_.size(),
                     jobs_.size() == 1 ? " writes" : "s write"));
    signal_all(SIGTERM);
  }

  std::string status() const {
    int64_t steps = 0;
    std::string running;
    for (const size_t i : mine_) {
      const StudyRun& r = study_.runs[i];
      const bool now = r.state == RunState::running;
      if (!now && r.state != RunState::stopped && r.state != RunState::done) continue;
      if (now && r.trained) running += fmt::format(" | {} in evaluation", r.name);
      if (!in_total(i)) continue;
      const int64_t at = r.trained ? r.steps : last_step(study_.folder(r) + "/metrics.jsonl");
      steps += at;
      if (now && !r.trained) running += fmt::format(" | {} {}/{}", r.name, at, r.steps);
    }
    const double done = double(steps - before_), rate = done / std::max(since(start_), 1e-9);
    const std::string eta =
        done > 0 ? short_time(double(total_steps_ - steps) / rate) : std::string("-");
    return fmt::format("{}/{} runs{} | {:.3g} steps/s | ETA {}", finished(), mine_.size(), running,
                       rate, eta);
  }
  bool in_total(size_t i) const {
    return std::find(counted_.begin(), counted_.end(), i) != counted_.end();
  }

  Study& study_;
  const std::vector<size_t>& mine_;
  const StudyOptions& o_;
  int64_t slots_ = 1;
  std::vector<int64_t> free_;  // slots
  std::vector<size_t> queue_, counted_;
  std::vector<Job> jobs_;
  bool stopping_ = false;
  int64_t total_steps_ = 0, before_ = 0;  // of what is to be trained; of these done before
  Clock::time_point start_ = Clock::now();
  ProgressLine progress_;
};

}  // namespace

int run_study(Study& study, const std::vector<size_t>& mine, const StudyOptions& options) {
  for (const int number : {SIGINT, SIGTERM}) std::signal(number, request_stop);
  if (std::signal(SIGHUP, request_stop) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // nohup
  std::signal(SIGPIPE, SIG_IGN);  // who read the progress may go away
  return Runner(study, mine, options)();
}

}  // namespace ebb::tools
