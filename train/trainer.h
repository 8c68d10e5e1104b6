// The training loop: recipe -> run folder. tools/train.cpp hands in what training needs from
// elsewhere (batches, validation).
//
// RUN/recipe.json (resolved), metrics.jsonl, metrics.csv, memory.json, checkpoint-*/,
// gates_initial.json, gates_final.json, decays_initial.json, decays_final.json, speed.json, final/
// (a model folder).
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "models/calibrate.h"
#include "models/decays.h"
#include "models/tokenizer.h"
#include "train/config.h"
#include "train/loader.h"
#include "train/log.h"
#include "train/resume.h"
#include "train/step.h"

namespace ebb {

// The model a recipe starts from: built or loaded, initialised by its scheme (DAMI calibrates on
// the head of the training stream), on `device` in the recipe's dtype. `report`, when not null,
// receives the gates as initialised.
std::unique_ptr<LanguageModel> starting_model(const TrainConfig& config, Device device,
                                              const std::vector<Shard>& stream,
                                              std::vector<HeadReport>* report);
// The first sequences·length tokens of the shards, [sequences,length]; throws when there are fewer.
Tensor calibration_tokens(const std::vector<Shard>& stream, int64_t sequences, int64_t length);

struct TrainerInputs {
  TrainConfig config = {};
  Device device = {};
  std::optional<Tokenizer> tokenizer = {};  // of the run's models; tasks without text have none
  BatchSource batches = {};
  std::vector<Shard> stream = {};  // for calibration and the gate reports
  // Called every validate_every steps and at the end; its fields join the log. May be empty.
  std::function<nlohmann::json(const LanguageModel&)> validate = {};
  bool resume = false;              // go on from the newest checkpoint, if there is one
  bool quiet = false;               // no progress line
  std::function<bool()> stop = {};  // asked after every step: true writes a checkpoint and returns
};

// Steps of a process that its speed is the median of, from 1: kernels are warm by then.
inline constexpr std::pair<int64_t, int64_t> kTimedSteps = {21, 120};

struct TrainSummary {
  int64_t steps = 0, skipped = 0, tokens = 0;
  int64_t taken = 0;     // steps of this process; 0 when the run was complete already
  double loss = 0;       // of the last of them
  double seconds = 0;    // of this process's steps
  bool stopped = false;  // by `stop`, before the last step
  // Tokens per GPU per second: the median step of those that kTimedSteps names, all tokens of a
  // step counted, labelled or not. 0 where this process took fewer steps.
  double tokens_per_gpu_per_second = 0;
  int64_t first_timed = 0, last_timed = 0;  // steps of this process, from 1
  int64_t peak_bytes = 0;                   // of the device, as its allocator saw it
  TrainingMemory memory = {};
};

TrainSummary train(TrainerInputs in);

nlohmann::json gates_to_json(const std::vector<HeadReport>& gates);

}  // namespace ebb
