// DART's mixer (models.md 10): Mamba-2 with state-memory attention. What each run of sma_chunk
// tokens writes into the state is kept; tokens of later runs attend to it, each with a query q, a
// verifier e and the scan's own read vector C, and what they find joins the scan's output behind a
// scalar gate:
//   Q = U W_Q [N]   E = U W_E [P]   G = silu(U W_G)      U the mixer's input, all heads alike
//   o_t = C_t H_t + G_t R_t,   R of ops/state_memory_attention.h;   D-skip, norm, output: Mamba-2's
// W_G begins at zero, where the block is Mamba-2 bit for bit in f32.
//
// Variants by config, the same weights but for the last: use_sma (false: R left out), sma_chunk,
// sma_normalize, sma_shared_read (false: R reads with a vector of its own, N more columns of
// in_proj that pass the convolution too, between C and dt).
//
// State: Mamba-2's two tensors, the complete runs [n,C,H,N,P], the open run, the position
// (ops/state_memory_cache.h). Going on from a state is for decoding: nothing may be recorded.
#pragma once
#include "models/mamba2.h"
#include "ops/state_memory_cache.h"

namespace ebb {

class Dart : public Mamba2 {
 public:
  explicit Dart(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;

 private:
  struct Queries {
    Var q, e, gate;  // [...,1,N], [...,1,P], [...,1]
  };
  Queries queries(const Var& x) const;
  Var read(const Inputs& in) const { return in.read.defined() ? in.read : in.C; }
  StateMemoryStep step_options(const Queries& s, const Tensor& base) const;
  Var go_on(const Var& x, const SeqLayout& layout, const MixerState& initial, MixerState* final);

  bool on_, normalize_;
  int64_t chunk_;
  double sma_eps_, eps_row_;
  Parameter queries_;  // rows q | e
  Parameter gate_;     // g, and rows of zeros
};

}  // namespace ebb
