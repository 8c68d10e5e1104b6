// RWKV-7's mixer (models.md 7.5): token shift into six mixes, projections, low-rank products for
// decay, learning rate, value residual and output gate, the diagonal-plus-low-rank recurrence
// (ops/dplr.h), GroupNorm, a bonus for the current token, gate, output projection.
//   w = −κ_h σ(ω)     a = −k̂     b = k̂∘rate     k̃ = k∘(1 + (rate − 1)∘k_a)     k̂ = unit(k∘k_k)
// κ is e^{-1/2} for every head, or (ModelConfig::frozen_decay_scale) a frozen exp(A_log) per head:
// −1/2 everywhere is the native model. Layers above the first blend their values with the first
// layer's. Names and shapes of its parameters are the public library's.
#pragma once
#include "models/config.h"
#include "nn/mixer.h"

namespace ebb {

class LanguageModel;

class Rwkv7 : public Mixer {
 public:
  Rwkv7(const ModelConfig& config, int64_t layer);
  // Of the first layer alone; the others need what it shares.
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  Var forward_sharing(const Var& x, Var* shared, const SeqLayout& layout, const MixerState* initial,
                      MixerState* final) override;
  Var step_sharing(const Var& x, Var* shared, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  std::optional<DecayGate> decay_gate_parameters() const override;
  Tensor gate_preactivations(const Tensor& h) const override;
  Tensor log_decays(const Var& h) const override;
  void use_decay_scales() override;

 private:
  struct LowRank {
    Parameter inner, outer, bias;  // [r,d], [d,r], [d] or undefined
  };
  struct Inputs;
  LowRank register_low_rank(const std::string& name, int64_t rank, bool bias,
                            double bias_lr_factor = 1);
  Inputs inputs(const Var& x, Var* shared, const Var& last, const SeqLayout& layout,
                bool want_last) const;
  Var log_decay(const Var& mixed) const;
  Var values(const Var& mixed, Var* shared) const;
  Var finish(const Var& o, const Inputs& in) const;
  double strongest_decay();       // a bound on |w|
  Var heads(const Var& x) const;  // [...,d] -> [...,H,P]
  Var flat(const Var& x) const;   // and back

  int64_t layer_, hidden_, heads_, head_dim_;
  double eps_;
  std::vector<Parameter> mixes_;  // r, w, k, v, a, g
  Parameter key_scale_, rate_scale_, bonus_;
  Parameter receptance_, key_, value_, output_;
  LowRank decay_, rate_, residual_, gate_;
  Parameter norm_, norm_bias_;
  Parameter A_log_;      // [H]: frozen; of the native model −1/2, and no part of the state
  bool scaled_ = false;  // A_log_ is part of the state
  // Exp of the largest A_log, and what it was read from: asking the device each time would wait.
  double bound_;
  Tensor bound_of_;
  uint64_t bound_version_ = 0;
};

// The position-dependent native rule: orthogonal projections, mixes and biases that depend on layer
// and channel, zeros where a residual branch ends; tensors are drawn by (seed, name).
void init_rwkv7_weights(LanguageModel& model, uint64_t seed);
// The decay biases of a layer by that rule, [H·P].
std::vector<float> native_rwkv7_decay_bias(int64_t layer, int64_t layers, int64_t channels,
                                           int64_t head_dim);

}  // namespace ebb
