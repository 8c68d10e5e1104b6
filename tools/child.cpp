#include "tools/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "tensor/check.h"

extern char** environ;

namespace ebb::tools {
namespace {

// What this process has, but for the names that are given.
std::vector<std::string> environment_with(const std::vector<std::string>& given) {
  std::vector<std::string> out = given;
  for (char** e = environ; *e; ++e) {
    const std::string entry = *e, name = entry.substr(0, entry.find('=') + 1);
    bool replaced = false;
    for (const std::string& g : given) replaced |= g.starts_with(name);
    if (!replaced) out.push_back(entry);
  }
  return out;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (std::string& t : texts) out.push_back(t.data());
  out.push_back(nullptr);
  return out;
}

// After fork(): nothing here may allocate.
[[noreturn]] void become(pid_t parent, int log, char* const* arguments, char* const* environment) {
  setpgid(0, 0);  // Ctrl-C is for the parent, which tells its children
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(1);  // it has ended already
  const int nothing = open("/dev/null", O_RDONLY);
  dup2(nothing, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execve("/proc/self/exe", arguments, environment);
  _exit(127);
}

}  // namespace

Child::Child(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
             const std::string& log)
    : log_(log) {
  std::vector<std::string> words = {"ebb"}, variables = environment_with(environment);
  words.insert(words.end(), arguments.begin(), arguments.end());
  const std::vector<char*> argv = pointers(words), envp = pointers(variables);
  const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  check(file >= 0, "cannot write {}: {}", log, std::strerror(errno));
  log_begin_ = size_t(lseek(file, 0, SEEK_END));
  const pid_t parent = getpid();
  pid_ = fork();
  const int error = errno;
  if (pid_ == 0) become(parent, file, argv.data(), envp.data());
  close(file);
  check(pid_ > 0, "cannot start a process: {}", std::strerror(error));
}

Child::~Child() {
  if (ended_) return;
  signal(SIGTERM);
  wait();
}

bool Child::ended() {
  if (!ended_) ended_ = waitpid(pid_, &status_, WNOHANG) == pid_;
  return ended_;
}

void Child::wait() {
  while (!ended_) {
    const pid_t got = waitpid(pid_, &status_, 0);
    ended_ = got == pid_ || (got < 0 && errno != EINTR);
  }
}

void Child::signal(int number) {
  if (!ended()) kill(pid_, number);
}

bool Child::ok() const { return WIFEXITED(status_) && WEXITSTATUS(status_) == 0; }
int Child::signalled() const { return WIFSIGNALED(status_) ? WTERMSIG(status_) : 0; }

std::string Child::problem() const {
  if (const int n = signalled()) return fmt::format("ended by signal {} ({})", n, strsignal(n));
  const std::string mark = "ebb: error: ";
  std::ifstream in(log_);
  in.seekg(std::streamoff(log_begin_));
  std::string found;
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(mark)) found = line.substr(mark.size());
  return found.empty() ? fmt::format("ended with exit code {}", WEXITSTATUS(status_)) : found;
}

}  // namespace ebb::tools
