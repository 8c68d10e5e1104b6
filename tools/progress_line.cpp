#include "tools/progress_line.h"

#include <unistd.h>

#include "tensor/notice.h"

namespace ebb::tools {
namespace {

constexpr std::chrono::milliseconds kTerminal(200), kElsewhere(30'000);

}  // namespace

ProgressLine::ProgressLine() : terminal_(isatty(STDERR_FILENO) != 0), start_(Clock::now()) {
  due_ = start_ + (terminal_ ? kTerminal : kElsewhere);
}

ProgressLine::~ProgressLine() {
  if (!open_) return;
  notice("\r\x1b[K");
}

void ProgressLine::show(const std::function<std::string()>& text) {
  const Clock::time_point now = Clock::now();
  if (now < due_) return;
  due_ = now + (terminal_ ? kTerminal : kElsewhere);
  notice(terminal_ ? "\r\x1b[K" + text() : text() + "\n");
  open_ = terminal_;
}

double ProgressLine::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

}  // namespace ebb::tools
