// Mamba-2's mixer (models.md 7.4): one projection to z | x | B | C | dt, short convolution over x,
// B and C, SSD, gate-then-norm, output projection. Names and shapes of its parameters are the
// public library's. With n_groups > 1, head h reads B and C of group h // (H/G), as mamba_ssm and
// the public library's kernels have it, and each group's channels are normalised apart.
#pragma once
#include "models/config.h"
#include "nn/mixer.h"
#include "ops/ssd.h"

namespace ebb {

class LanguageModel;

class Mamba2 : public Mixer {
 public:
  // `reads`: read vectors C beside B that the projection gives and the convolution covers.
  explicit Mamba2(const ModelConfig& config, int64_t reads = 1);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  std::optional<DecayGate> decay_gate_parameters() const override;
  Tensor gate_preactivations(const Tensor& h) const override;
  Tensor log_decays(const Var& h) const override;

 protected:
  struct Inputs {  // of the scan, with the output's gate
    Var x, dt;     // [...,H,P], [...,H]
    Var B, C;      // [...,G,N]
    Var read;      // [...,G,N]: the second C, if there is one
    Var z;         // [...,inner]
  };
  // x [B,T,d] or, one token of every sequence, [N,d], whose convolution's state is updated.
  Inputs inputs(const Var& x, const SeqLayout& layout, const Tensor& conv_state,
                Tensor* final_conv_state) const;
  Inputs step_inputs(const Var& x, const Tensor& conv_state) const;
  Var finish(const Var& y, const Inputs& in) const;
  SsdOptions ssd_options() const;

  int64_t heads_, head_dim_, groups_, state_size_, reads_, inner_, conv_width_;
  double eps_, dt_min_, dt_max_;
  bool norm_first_;               // norm_before_gate
  Parameter input_, input_bias_;  // rows z | x | B | C | dt
  Parameter conv_, conv_bias_;    // [channels of x | B | C, W]
  Parameter A_log_, D_, dt_bias_;
  Parameter norm_, output_, output_bias_;  // biases and norm may be absent

 private:
  int64_t columns() const { return inner_ + channels() + heads_; }
  int64_t channels() const { return inner_ + (1 + reads_) * groups_ * state_size_; }
  struct Projected;
  Projected project(const Var& x) const;
  Inputs cut(const Projected& p, const Var& conv, const Shape& lead) const;
};

// Weights by config().weight_init, everything but A_log and dt_bias, drawn by (seed, name):
//   fla        N(0, initializer_range²); convolution biases 0
//   mamba_ssm  N(0, initializer_range²) for embedding and head; U(±1/√d) for the projection,
//              U(±1/√W) for convolution kernels and biases
// and in both, with rescale_prenorm_residual, U(±1/√inner)/√layers for the output projection.
// DART's q_proj and e_proj are drawn as the projection; its gate g_proj is 0.
void init_mamba2_weights(LanguageModel& model, uint64_t seed);

}  // namespace ebb
