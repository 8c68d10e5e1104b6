// Mamba-2's mixer (models.md 7.4): one projection to z | x | B | C | dt, short convolution over x,
// B and C, SSD, gate-then-norm, output projection. Names and shapes of its parameters are the
// public library's.
#pragma once
#include "models/config.h"
#include "nn/mixer.h"

namespace ebb {

class LanguageModel;

class Mamba2 : public Mixer {
 public:
  explicit Mamba2(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  std::optional<DecayGate> decay_gate_parameters() const override;
  Tensor gate_preactivations(const Tensor& h) const override;

 private:
  struct Projected;
  Projected project(const Var& x) const;
  struct SsdInputs;
  SsdInputs cut(const Var& conv, const Shape& lead) const;
  Var finish(const Var& y, const Var& z, const Shape& lead) const;

  int64_t heads_, head_dim_, groups_, state_size_, inner_, conv_width_;
  double eps_, dt_min_, dt_max_;
  Parameter input_;             // rows z | x | B | C | dt
  Parameter conv_, conv_bias_;  // [channels of x | B | C, W]; the bias may be absent
  Parameter A_log_, D_, dt_bias_, norm_, output_;
};

// Weights by config().weight_init, everything but A_log and dt_bias, drawn by (seed, name):
//   fla        N(0, initializer_range²); convolution biases 0
//   mamba_ssm  N(0, initializer_range²) for embedding and head; U(±1/√d) for the projection,
//              U(±1/√W) for convolution kernels and biases
// and in both, with rescale_prenorm_residual, U(±1/√inner)/√layers for the output projection.
void init_mamba2_weights(LanguageModel& model, uint64_t seed);

}  // namespace ebb
