// Checkpoints of a run: RUN/checkpoint-000500/ holds a model folder, the optimizer's moments and
// the loop's counters, with a checksum per file. A checkpoint appears whole or not at all: it is
// written beside, fsynced and renamed.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/language_model.h"
#include "models/tokenizer.h"

namespace ebb {

struct LoopState {
  int64_t step = 0;     // steps done
  int64_t cursor = 0;   // batches handed out by the loader
  int64_t skipped = 0;  // steps left out because a gradient was not finite
  int64_t tokens = 0;   // labelled tokens seen
  nlohmann::json extra = nlohmann::json::object();  // e.g. the GEMM algorithms in use
};

// Writes the checkpoint of state.step and removes the oldest beyond `keep_last`. Disk full or any
// other failure: one error, no partial checkpoint, older ones intact. `tokenizer` may be null.
std::string save_checkpoint(const std::string& run, const LanguageModel& model,
                            const Tokenizer* tokenizer, const StateDict& optimizer,
                            const LoopState& state, int64_t keep_last);

// Checkpoint folders of a run, newest first.
std::vector<std::string> list_checkpoints(const std::string& run);
// Throws naming the first file that is missing or differs from its checksum.
void verify_checkpoint(const std::string& folder);
// The newest checkpoint that verifies; damaged ones are reported through `note` and passed over.
std::optional<std::string> newest_checkpoint(const std::string& run, std::string* note);

// The moments and counters of a checkpoint, without its weights.
LoopState load_training_state(const std::string& folder, StateDict* optimizer);
// Reads what save_checkpoint wrote; the model must have the same architecture.
LoopState load_checkpoint(const std::string& folder, LanguageModel& model, StateDict* optimizer);

}  // namespace ebb
