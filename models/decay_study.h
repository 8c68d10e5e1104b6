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
// Rotary embedding turns q and k; in its cosine form it doubles their channels (ops/rotary.h),
// which decays per channel need. State: S [N,H,K,V]; z [N,·] of a running sum; position i64 [N], on
// the CPU, with rotary embedding.
#pragma once
#include <memory>

#include "models/config.h"
#include "nn/mixer.h"

namespace ebb {

class LanguageModel;

// lower_bounds [L,·], shared by the layers, of hgrn2.
std::unique_ptr<Mixer> make_decay_study(const ModelConfig& config, int64_t layer,
                                        const Parameter& lower_bounds);

// TNL's log decays of a layer: slower from head to head, and faster in early layers.
std::vector<double> tnl_decays(int64_t layer, int64_t layers, int64_t heads);

// Truncated normal matrices, branches that begin at zero (Wo and the MLP's last matrix); with
// weight_init = fla the public rule. Decay parameters as in the table.
void init_decay_study_weights(LanguageModel& model, uint64_t seed);

}  // namespace ebb
