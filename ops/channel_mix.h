// RWKV channel mix, the MLP of an RWKV layer (models.md 1.7):
//   z_t = x_t + (x_{t−1} − x_t) ⊙ x_k        y = value·relu(key·z)²
// Written in terms of token_shift_mix, linear and relu2; see there for what is saved.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/token_shift.h"

namespace ebb {

struct ChannelMix {
  Var y;     // [B,T,D]
  Var last;  // [N,D], the token each sequence ends with; undefined unless options.last
};

// x [B,T,D]; x_k of D values in any shape, f32 beside bf16; key [I,D], value [D,I]; last [N,D], the
// token before each sequence, or absent (zeros).
ChannelMix channel_mix(const Var& x, const Var& x_k, const Var& key, const Var& value,
                       const Var& last = {}, const TokenShiftOptions& options = {});

Cost channel_mix_cost(Pass pass, int64_t tokens, int64_t channels, int64_t inner, DType dtype);

}  // namespace ebb
