// A study: recipes x seeds, a training run each, in folders of their own below one folder. What
// became of each stands in OUT/study.json, which is replaced as a whole with every change, so that
// the same command goes on whatever ended it.
//   Study study(options.out);                          // with what earlier calls left there
//   const std::vector<size_t> mine = study.plan(options);   // checks everything first
//   run_study(study, mine, options);                   // tools/study_runner.cpp
//   summarize(study);                                  // tools/study_summary.cpp
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tensor/device.h"

namespace ebb::tools {

struct StudyOptions {
  std::vector<std::string> recipes = {}, set = {}, devices = {"auto"};
  std::vector<uint64_t> seeds = {42};
  std::string out = "";
  int64_t jobs = 0;                    // 0: one for each device
  double budget = 0;                   // seconds; 0: no end
  bool retry = false;                  // those that failed, too
  std::vector<std::string> eval = {};  // arguments of `ebb eval`, after training; {}: none
  bool eval_alone = false;  // one evaluation at a time: it makes files that the others read
};

enum class RunState {
  waiting,
  running,
  stopped,  // before its end, by a signal or the budget; goes on from its checkpoint
  done,
  failed,
};

struct StudyRun {
  std::string name;    // of its folder: RECIPE-sSEED
  std::string recipe;  // of the recipe in this study: its file's name, told apart where it must be
  std::string file;    // absolute
  uint64_t seed = 0;
  std::vector<std::string> set = {};
  RunState state = RunState::waiting;
  std::string error = "";                   // of a failed one
  bool trained = false;                     // what may be left is the evaluation
  std::vector<std::string> evaluated = {};  // with these arguments
  int64_t steps = 0;                        // that it trains
  int64_t attempts = 0;                     // processes that trained it
  double seconds = 0;                       // of all of them
  int64_t pid = 0;                          // of the process, while it is running
};

class Study {
 public:
  // Makes the folder. One process at a time: throws where another is at work there, and waits for
  // runs that one which was killed has left behind and that are writing their last checkpoint.
  explicit Study(std::string out);
  ~Study();
  Study(const Study&) = delete;
  Study& operator=(const Study&) = delete;

  // The runs of these options, all recipes with the first seed first; those that are new are added.
  // Throws, before anything is changed, with all that is wrong with any recipe.
  std::vector<size_t> plan(const StudyOptions& options);
  void save() const;

  const std::string& out() const { return out_; }
  std::string folder(const StudyRun& run) const { return out_ + "/" + run.name; }
  std::vector<StudyRun> runs;

 private:
  void lock();
  void load();

  std::string out_;
  int lock_ = -1;  // a descriptor that children inherit: it is free when all have ended
};

// The arguments of `ebb train` for a run.
std::vector<std::string> train_arguments(const Study& study, const StudyRun& run,
                                         const std::string& device);

// Runs what is not finished. Returns how many of `mine` failed.
int run_study(Study& study, const std::vector<size_t>& mine, const StudyOptions& options);

// Prints the table over seeds of what is done and writes OUT/summary.json, .csv and .txt.
void summarize(const Study& study);

const char* state_name(RunState state);

}  // namespace ebb::tools
