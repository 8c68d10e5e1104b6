// A process that runs this binary again, with other arguments: what crashes there, or runs out of
// memory, ends there.
//   Child c({"train", "recipe.json"}, {"OMP_NUM_THREADS=2"}, "runs/a/train.log");
//   while (!c.ended()) ...;
//   if (!c.ok()) fmt::print("{}\n", c.problem());
// A child is told to end (SIGTERM) when this process ends, in whatever way. It inherits the open
// files of this process that are not marked to be closed, and so the locks on them.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace ebb::tools {

class Child {
 public:
  // `environment`: NAME=VALUE, beside that of this process. Output and errors are appended to
  // `log`. Throws when no process can be started.
  Child(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
        const std::string& log);
  ~Child();  // SIGTERM, and waits
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  bool ended();  // does not wait
  void wait();
  void signal(int number);  // nothing when it has ended
  pid_t pid() const { return pid_; }

  // Once it has ended:
  bool ok() const;
  int signalled() const;        // the signal that ended it, or 0
  std::string problem() const;  // its error line, or else how it ended

 private:
  pid_t pid_ = -1;
  bool ended_ = false;
  int status_ = 0;
  std::string log_;
  size_t log_begin_ = 0;  // bytes of the log that others wrote before
};

}  // namespace ebb::tools
