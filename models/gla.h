// Mixers of gated linear attention with a decay per channel (models.md 7.7-7.9) and of fixed
// decays (7.10): GLA, HGRN2, LightNet, RetNet. Names and shapes of their parameters are the public
// library's.
#pragma once
#include "models/config.h"
#include "nn/mixer.h"

namespace ebb {

// q, k, v as projected; g = logsigmoid(z)/16 with z of rank 16; output norm per head, gated.
// State: S [N,H,K,V].
class Gla : public Mixer {
 public:
  explicit Gla(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  Projected project(const Var& x) const;
  Var finish(const Var& o, const Var& gate) const;

  int64_t heads_, key_dim_, value_dim_, rank_;
  double eps_, divisor_;
  Parameter input_;  // rows q | k | v | gate | first matrix of z
  Parameter decay_, decay_bias_, o_norm_, output_;
};

// q = silu(·), g = log f with f above the layer's lower bound, k = 1 − f; norm over the full width.
// State: S [N,H,K,V].
class Hgrn2 : public Mixer {
 public:
  // lower_bounds [L,H·K], shared by the layers (undefined: none); layer 0 has bound 0.
  Hgrn2(const ModelConfig& config, int64_t layer, const Parameter& lower_bounds);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  Projected project(const Var& x) const;
  Var finish(const Var& o, const Shape& lead) const;

  int64_t layer_, heads_, key_dim_, value_dim_;
  Parameter lower_bounds_;
  Parameter input_;  // rows q | f | i
  Parameter norm_, output_;
};

// q = silu(·), k and g from a running log-sum-exp; norm over the full width, gated in low rank.
// State: S [N,H,K,V], z [N,H·K].
class LightNet : public Mixer {
 public:
  explicit LightNet(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  Projected project(const Var& x) const;
  Var finish(const Var& o, const Var& gate, const Shape& lead) const;

  int64_t heads_, key_dim_, value_dim_, rank_;
  Parameter input_;  // rows q | k | v | first matrix of the gate
  Parameter gate_, norm_, output_;
};

// Rotary q and k, decay 1 − 2^{−5−h} of head h; output norm per head, gated.
// State: S [N,H,K,V]; position i64 [N], on the CPU.
class RetNet : public Mixer {
 public:
  explicit RetNet(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  Projected project(const Var& x) const;
  Var finish(const Var& o, const Var& gate) const;
  Tensor decays(const Shape& lead, DType activations, Device device) const;

  int64_t heads_, key_dim_, value_dim_;
  double eps_;
  Parameter input_;  // rows q | k | v | gate
  Parameter o_norm_, output_;
};

}  // namespace ebb
