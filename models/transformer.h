// The mixer of a LLaMA-style Transformer (models.md 7.6): projections, rotary embedding of q and k
// (after an optional norm per head), causal softmax attention, within a window where there is one.
// Names and shapes of its parameters are the public library's. State: models/kv_cache.h.
#pragma once
#include "models/config.h"
#include "models/kv_cache.h"
#include "nn/mixer.h"

namespace ebb {

class SoftmaxAttention : public Mixer {
 public:
  explicit SoftmaxAttention(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;

 private:
  struct Projected;
  // start: the first position of every sequence (undefined: 0), on x's device.
  Projected project(const Var& x /*[B,T,d]*/, const Tensor& start, const SeqLayout& layout) const;

  int64_t heads_, key_heads_, head_dim_, window_;
  double rope_base_;
  KvCache cache_;
  Parameter input_, bias_;     // rows q | k | v
  Parameter q_norm_, k_norm_;  // [P]; undefined: none
  Parameter output_;
};

}  // namespace ebb
