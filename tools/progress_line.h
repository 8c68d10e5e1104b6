// One line about long work, on standard error: redrawn on a terminal, a plain line now and then
// elsewhere.
//   ProgressLine progress;
//   progress.show([&] { return fmt::format("{} documents", n); });   // asked only when it is due
#pragma once
#include <chrono>
#include <functional>
#include <string>

namespace ebb::tools {

class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();  // clears the line of a terminal
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  void show(const std::function<std::string()>& text);
  double seconds() const;  // since it was made

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_, open_ = false;
  Clock::time_point start_, due_;
};

}  // namespace ebb::tools
