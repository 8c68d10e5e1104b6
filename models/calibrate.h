// Decay initialisation of whole models: DAMI's walk over the layers, and its controls.
//   calibrate(*model, {.scheme = ..., ...}, tokens);
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "models/language_model.h"
#include "nn/decay_init.h"

namespace ebb {

// Per layer and head: what was asked for and what the gate now does on the sample.
struct HeadReport {
  int64_t layer = 0, head = 0;
  double target_sensitivity = 0, target_timescale = 0;  // 0: this scheme sets none
  double sensitivity = 0, timescale = 0;
  double A_log = 0, dt_bias = 0;
};

using LayerDone = std::function<void(int64_t layer)>;  // progress; may be empty

// DAMI, layer by layer: with the new gates of the layers below in place, the pre-activations z of
// layer l on `tokens` (i64 [B,T]) decide its dt_bias and A_log; with a decay per channel the means
// are over tokens and channels. All else keeps its values.
// Activations in f32; runs on the model's device. (DAMI section on layer-sequential calibration.)
std::vector<HeadReport> calibrate_dami(LanguageModel& model, const DamiOptions& options,
                                       const Tensor& tokens, const LayerDone& done = {});
// Mamba-2: DAMI without data, and so `tokens` may be undefined (then the report holds the static
// gate, z = 0). Native steps Δ0 = softplus(dt_bias) drawn from options.seed are scaled along depth,
// dt_bias = softplus⁻¹(m_l Δ0), m the profile of 18 layers stretched over the depth and divided by
// its geometric mean; A_log = −ln τ_h − ln Δ0. So a head's timescale is τ_h/m_l.
// RWKV-7: likewise without data. The biases of a head are shifted together so that their mean
// sigmoid is S*_l, and its frozen scale is A_log = −ln τ_h − ln S*_l
// (ModelConfig::frozen_decay_scale is set). PoST control: A_log of every layer linear in the head
// over ln(train_length); dt_bias is kept. RWKV-7: frozen scales that give its native biases
// timescales from train_length to 1.
void apply_post(LanguageModel& model, double train_length);
// Native rule: A_log and dt_bias drawn by (seed, name), as init_weights does.
void apply_random_gates(LanguageModel& model, uint64_t seed);

// Whether every layer has the gate parameters that the schemes set.
bool has_decay_gates(const LanguageModel& model);
// Sensitivities and timescales of the gates as they stand, on a sample; empty where there are none.
std::vector<HeadReport> measure_gates(LanguageModel& model, const Tensor& tokens,
                                      const LayerDone& done = {});

}  // namespace ebb
