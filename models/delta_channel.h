// The mixers of Kimi delta attention (models.md 7.2) and Gated DeltaNet-2 (7.3): projections, short
// convolution, delta rule with a decay per channel, output norm with a low-rank sigmoid gate. They
// differ in how strongly a token erases and writes: KDA has one number per head, GDN2 a gate per
// channel of K and of V. Names and shapes of the parameters are the public library's.
#pragma once
#include "models/config.h"
#include "nn/mixer.h"
#include "ops/delta_rule_channel.h"

namespace ebb {

class ChannelDeltaNet : public Mixer {
 public:
  ChannelDeltaNet(const ModelConfig& config, DeltaGates gates);
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

  DeltaGates gates_;
  int64_t heads_, v_heads_, key_dim_, value_dim_;
  int64_t conv_width_;  // 0: no convolution, silu alone
  int64_t gate_heads_;  // of decay and erase gate: the value heads; GDN2: the q/k heads, shared by
                        // the value heads of each
  double eps_, erase_scale_, lower_bound_;
  // One product for everything the input is multiplied with: rows q | k | v | w | f | gate | b,
  // f and gate being the inner layers of the two low-rank products.
  Parameter input_;
  Parameter conv_;                      // [channels of q | k | v, W], undefined without
  Parameter decay_, gate_, gate_bias_;  // their outer layers
  Parameter A_log_, dt_bias_, o_norm_, output_;
};

}  // namespace ebb
