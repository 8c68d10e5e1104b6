// One training step: micro-batches -> loss -> gradients -> clip -> AdamW -> StepResult.
#pragma once
#include <span>

#include "models/language_model.h"
#include "train/loader.h"
#include "train/optimizer.h"

namespace ebb {

struct StepResult {
  double loss = 0;  // sum of -log p over the labelled tokens of all micro-batches / their number
  double grad_norm = 0;  // before clipping
  int64_t tokens = 0;    // labelled
  bool skipped = false;  // a gradient was not finite: weights and moments are as before
};

// Normalised by the labelled tokens of the whole step, not per micro-batch. Ends with the step's
// only synchronisation, where data-dependent errors (ids out of range ...) surface by operator.
StepResult train_step(const LanguageModel& model, AdamW& optimizer, std::span<const Batch> batches,
                      double lr);

// Mean -log p per labelled token over batches, nothing recorded and no gradient touched.
double mean_loss(const LanguageModel& model, std::span<const Batch> batches);

int64_t labelled_tokens(const Batch& batch);

}  // namespace ebb
