// Toeplitz position encoding, rpe "tpe" of the decay study (models.md 11.3): a decay per head, the
// same for every token, between the embedding and the first block. Per head h with its channels
// x_{t,h} of the embedding, vectors q_h and k_h and λ_h = σ(θ_h),
//   S_t = λ_h S_{t−1} + k_h x_{t,h}ᵀ      y_t = S_tᵀ q_h = (q_h·k_h) Σ_{s<=t} λ_h^{t−s} x_{s,h}
//   out = x + Linear(RMSNorm(concat_h y))
// S_t = k_h m_tᵀ with m_t = Σ λ^{t−s} x_s, so that m alone is kept: linear attention with the key 1
// and the query q_h·k_h. Over a sequence that has kKeys channels, the others 0: what tensor cores
// ask for. State: m [N,H,1,P], once for the model.
#pragma once
#include "models/config.h"
#include "nn/layers.h"
#include "nn/mixer.h"

namespace ebb {

class ToeplitzEncoding : public Module {
 public:
  explicit ToeplitzEncoding(const ModelConfig& config);
  // x [B,T,d] -> what is to be added to it. `initial`, `final`: as of a mixer, may be null.
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) const;
  Var step(const Var& x /*[N,d]*/, MixerState& state) const;
  MixerState zero_state(int64_t n, DType activations, Device device) const;

 private:
  static constexpr int64_t kKeys = 8;  // of a sequence's products

  int64_t heads_, width_;  // P
  Parameter q_, k_;        // [H,P]
  Parameter decay_;        // θ [H]
  Norm norm_;
  Linear output_;
};

}  // namespace ebb
