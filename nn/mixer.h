// Mixer: what stands between the norm and the residual add of a block, and the state it carries.
#pragma once
#include <optional>
#include <vector>

#include "nn/decay_init.h"
#include "nn/module.h"
#include "ops/seq_layout.h"

namespace ebb {

// The tensors a mixer needs to go on with a sequence, each [N, ...] with one row per sequence.
struct MixerState {
  std::vector<Tensor> tensors;
};

// The gate parameters DAMI and its controls set.
struct DecayGate {
  Parameter A_log;    // [H] f32
  Parameter dt_bias;  // [H·channels] f32
  int64_t heads = 0;
  int64_t channels = 1;  // per head: 1 for a scalar decay
  DecayResponse response = DecayResponse::softplus;
};

class Mixer : public Module {
 public:
  // x [B,T,d] -> [B,T,d]. `initial` (may be null: zeros) and `final` (may be null: not wanted)
  // hold one row per sequence of the layout.
  virtual Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                      MixerState* final) = 0;
  // One token of every sequence: x [N,d] -> [N,d], state updated.
  virtual Var step(const Var& x, MixerState& state) = 0;
  // The same where the mixers of a model share something: `shared`, undefined before the first
  // layer, is what that one leaves for those above it (RWKV-7: its values).
  virtual Var forward_sharing(const Var& x, Var* /*shared*/, const SeqLayout& layout,
                              const MixerState* initial, MixerState* final) {
    return forward(x, layout, initial, final);
  }
  virtual Var step_sharing(const Var& x, Var* /*shared*/, MixerState& state) {
    return step(x, state);
  }
  // State before the first token of n sequences.
  virtual MixerState zero_state(int64_t n, DType activations, Device device) const = 0;

  virtual std::optional<DecayGate> decay_gate_parameters() const { return std::nullopt; }
  // z, the gate's pre-activations before dt_bias is added: h [...,d] (after the block's norm)
  // -> f32 [tokens, heads·channels].
  virtual Tensor gate_preactivations(const Tensor& h) const;
  // The log decays g that the recurrence is given for h [B,T,d] (after the block's norm), each row
  // a sequence from its beginning: [B,T,...], a number per head or channel, f32 or f64. Undefined:
  // the mixer has none.
  virtual Tensor log_decays(const Var& /*h*/) const { return {}; }
  // RWKV-7: the decay gets a frozen scale per head, exp(A_log), where it had the native constant.
  virtual void use_decay_scales() {}
};

}  // namespace ebb
