// The token mixer of the decay study (models.md 11): one block, in which only the decay differs.
//   q = silu(h Wq)   v = h Wv   k = silu(h Wk)   u = decay logits   g = log decay of u
//   o = gated linear attention, scale 1    y = RMSNorm(o∘σ(h O1 O2)) Wo
// u is h F, one number per channel (in rank P) or per head; where the key is shared with the decay,
// u = h Wk and there is no F. Fixed decays (tnl, tnl_l) have no u. mixer = "dplr": the delta rule
// in place of linear attention, with keys of length 1 and β = 2σ(h Wβ).
//   mamba2, _noA, _noDelta, _noA_noDelta    g = −e^A softplus(u + dt_bias), parts left out
//   gla       logsigmoid(u)/16, or logsigmoid(u/16)          hgrn2   above a bound per layer
//   lightnet  running log-sum-exp of u, from e^0             lssp    of log softplus(u)
//   tnl       −(1 − l/(L−1) + 1e-5)/n_h, n_h from 2 to 256   tnl_l   the same, trained
//   simple    logsigmoid(u + δ), δ = ln(p/(1−p)) at the start and trained
// State: S [N,H,K,V]; z [N,·] of a running sum; position i64 [N], on the CPU, with rotary
// embedding.
#pragma once
#include "models/config.h"
#include "nn/mixer.h"

namespace ebb {

class LanguageModel;

class DecayStudy : public Mixer {
 public:
  // lower_bounds [L,·], shared by the layers, of hgrn2.
  DecayStudy(const ModelConfig& config, int64_t layer, const Parameter& lower_bounds);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  struct Decayed;
  Projected project(const Var& x) const;
  Decayed decay(const Projected& p, const Var& z0, const SeqLayout& layout, bool final) const;
  Var head_decays(const Shape& lead, DType activations, Device device) const;
  Var attend(const Projected& p, Decayed d, const Tensor& position, const Var& h0,
             const SeqLayout& layout, Tensor* ht) const;

  Var attend_halves(const Var& q, const Decayed& d, const Var& v, const Var& h0,
                    const SeqLayout& layout, Tensor* ht) const;

  bool running_sum() const;  // lightnet, lssp
  bool fixed() const;        // tnl, tnl_l

  DecayConfig decay_;
  bool delta_, rope_;
  int64_t layer_, heads_, width_, rank_;
  double eps_;
  std::vector<double> fixed_;  // [H], of tnl
  Parameter lower_bounds_;
  Parameter input_;            // rows q | k | v | first of the gate | first of F, or F | Wβ
  Parameter gate_, logits_;    // second matrices
  Parameter A_log_, dt_bias_;  // one per channel or head
  Parameter offset_;           // δ of simple, the decay itself of tnl_l
  Parameter norm_, output_;
};

// Truncated normal matrices, branches that begin at zero (Wo and the MLP's last matrix); with
// weight_init = fla the public rule. Decay parameters as in the table.
void init_decay_study_weights(LanguageModel& model, uint64_t seed);

}  // namespace ebb
