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
// `saved`, when not null, receives the bytes that the tape keeps for backward at its largest.
StepResult train_step(const LanguageModel& model, AdamW& optimizer, std::span<const Batch> batches,
                      double lr, int64_t* saved = nullptr);
inline StepResult train_step(const LanguageModel& model, AdamW& optimizer, const Batch& batch,
                             double lr) {
  return train_step(model, optimizer, std::span(&batch, 1), lr);
}

// Where the memory of training goes, in bytes.
struct TrainingMemory {
  int64_t weights = 0;    // fp32 masters and bf16 shadows
  int64_t gradients = 0;  // fp32
  int64_t optimizer = 0;  // moments
  int64_t saved = 0;      // kept by the tape for backward, at its largest
  int64_t workspace = 0;  // of the operator that needs most, its results included
  int64_t sum() const { return weights + gradients + optimizer + saved + workspace; }
};
// After a step: `saved` is what it reported; the workspace is the largest since
// reset_peak_memory().
TrainingMemory training_memory(const LanguageModel& model, const AdamW& optimizer, int64_t saved);

// Mean -log p per labelled token over batches, nothing recorded and no gradient touched.
double mean_loss(const LanguageModel& model, std::span<const Batch> batches);

int64_t labelled_tokens(const Batch& batch);

}  // namespace ebb
