// Multi-query associative recall as a training task: batches made from the recipe's data.mqar, and
// the accuracy on test examples.
//   MqarTask task(config);                      // throws when the recipe does not fit the task
//   inputs.batches = task.source();             // borrows the task
//   inputs.validate = [&](const LanguageModel& m) { return task.validate(m); };
#pragma once
#include <future>

#include "eval/mqar.h"
#include "train/config.h"
#include "train/loader.h"

namespace ebb::tools {

class MqarTask {
 public:
  explicit MqarTask(const TrainConfig& config);
  // Batch `cursor` of the run, whatever was handed out before.
  Batch batch(int64_t cursor) const;
  BatchSource source();
  int64_t batches_per_epoch() const { return per_segment_ * int64_t(segments_.size()); }
  // {validation_loss, accuracy, accuracy_256x64, ...}: over all test segments, and of each.
  nlohmann::json validate(const LanguageModel& model) const;

 private:
  Batch next();

  TrainConfig config_;
  std::vector<MqarGenerator> segments_, tests_;
  int64_t per_segment_ = 0;  // batches
  int64_t cursor_ = 0;
  std::future<Batch> ahead_;  // batch `ahead_cursor_`, being built
  int64_t ahead_cursor_ = -1;
};

}  // namespace ebb::tools
