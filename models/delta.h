// Gated DeltaNet's mixer (models.md 7.1): projections, short convolution, gated delta rule, gated
// output norm. Names and shapes of its parameters are the public library's.
#pragma once
#include "models/config.h"
#include "nn/mixer.h"
#include "ops/delta_rule.h"

namespace ebb {

class GatedDeltaNet : public Mixer {
 public:
  explicit GatedDeltaNet(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  std::optional<DecayGate> decay_gate_parameters() const override;
  Tensor gate_preactivations(const Tensor& h) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  Projected project(const Var& x) const;
  Var finish(const Var& o, const Var& gate, const Shape& lead) const;
  DeltaRuleOptions rule_options() const;

  int64_t heads_, v_heads_, key_dim_, value_dim_;
  int64_t conv_width_;  // 0: no convolution, silu alone
  int64_t gates_;       // columns of the output's gate, 0 where there is none
  double eps_, beta_scale_;
  // One product for everything the input is multiplied with: rows q | k | v | gate | a | b.
  Parameter input_;
  Parameter conv_;  // [channels of q | k | v, W], undefined without
  Parameter A_log_, dt_bias_, o_norm_, output_;
};

}  // namespace ebb
