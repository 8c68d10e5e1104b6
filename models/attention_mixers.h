// Mixers of linear attention with decays of their own kind (models.md 7.7-7.10) and of softmax
// attention (7.6), each in the file of its name. Names and shapes of their parameters are the
// public library's.
#pragma once
#include <memory>

#include "models/config.h"
#include "nn/mixer.h"

namespace ebb {

// q, k, v as projected; g = logsigmoid(z)/16 with z of rank 16; output norm per head, gated.
// State: S [N,H,K,V].
std::unique_ptr<Mixer> make_gla(const ModelConfig& config);

// q = silu(·), g = log f with f above the layer's lower bound, k = 1 − f; norm over the full width.
// lower_bounds [L,H·K], shared by the layers (undefined: none); layer 0 has bound 0.
// State: S [N,H,K,V].
std::unique_ptr<Mixer> make_hgrn2(const ModelConfig& config, int64_t layer,
                                  const Parameter& lower_bounds);

// q = silu(·), k and g from a running log-sum-exp; norm over the full width, gated in low rank.
// State: S [N,H,K,V], z [N,H·K].
std::unique_ptr<Mixer> make_lightnet(const ModelConfig& config);

// Rotary q and k, decay 1 − 2^{−5−h} of head h; output norm per head, gated.
// State: S [N,H,K,V]; position i64 [N], on the CPU.
std::unique_ptr<Mixer> make_retnet(const ModelConfig& config);

// A LLaMA-style Transformer's: projections, rotary embedding of q and k (after an optional norm per
// head), causal softmax attention, within a window where there is one. State: models/kv_cache.h.
std::unique_ptr<Mixer> make_softmax_attention(const ModelConfig& config);

}  // namespace ebb
