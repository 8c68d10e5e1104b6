// Token shift (models.md 1.8): δ_t = x_{t−1} − x_t, and the mixes x + δ ⊙ μ_m made from it in one
// pass (RWKV-7: six of them from one read of x).
//   TokenShift s = token_shift(x, last, {.layout = packed});
//   TokenShiftMix m = token_shift_mix(x, {x_r, x_w, x_k, x_v, x_a, x_g});
// Before a sequence's first token stands `last` (the token the previous call ended with), or zero.
// Backward: dx_t = Σ_m [(1−μ_m) ⊙ d^m_t + μ_m ⊙ d^m_{t+1}], dμ_m = Σ_t δ_t ⊙ d^m_t (ordered partial
// sums, f32; f64 for f64); for δ itself dx_t = d_{t+1} − d_t. Saves x, μ, last.
#pragma once
#include <vector>

#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/rows.h"
#include "ops/sequence_cursor.h"

namespace ebb {

inline constexpr int kMaxMixes = 8;

struct TokenShiftOptions {
  bool last = false;      // ask for the token each sequence ends with
  SeqLayout layout = {};  // packed sequences over the B·T tokens
};

struct TokenShift {
  Var delta;  // [B,T,D] as x
  Var last;   // [N,D], dtype of `last` or else of x; undefined unless asked for
};
// x [B,T,D] f32 f64 bf16, channel slices read in place; last [N,D] in x's dtype or f32, or absent.
// The last token of an empty sequence is `last` itself.
TokenShift token_shift(const Var& x, const Var& last = {}, const TokenShiftOptions& options = {});

struct TokenShiftMix {
  std::vector<Var> out;  // M of [B,T,D] as x
  Var last;              // as above
};
// mu: either one [M,D], or M tensors of D values each in any shape ([D], [1,1,D]); f32 beside bf16
// x, with f32 gradients. M = 1..8.
TokenShiftMix token_shift_mix(const Var& x, const Var& mu, const Var& last = {},
                              const TokenShiftOptions& options = {});
TokenShiftMix token_shift_mix(const Var& x, const std::vector<Var>& mu, const Var& last = {},
                              const TokenShiftOptions& options = {});

// mixes = 0: δ alone.
Cost token_shift_cost(Pass pass, int64_t tokens, int64_t channels, int64_t mixes, DType dtype);

struct TokenShiftArgs {
  Rows x = {};                // [B·T,D]
  std::vector<Tensor> mu{};   // M of [D], accumulate type, dense; empty: δ alone
  Tensor last = {};           // [N,D], accumulate type, or undefined: zeros
  SequenceCursor first = {};  // not yet placed
};
// Gradients; an undefined one is not wanted.
struct TokenShiftGrads {
  Tensor dx = {};             // [B·T,D]
  std::vector<Tensor> dmu{};  // M of [D], or empty
  Tensor dlast = {};          // [N,D], accumulate type
};
namespace cpu {
// out: one dense [B·T,D] per mix, or the one for δ.
void token_shift_fwd(const TokenShiftArgs& a, const std::vector<Tensor>& out);
void token_shift_last(const TokenShiftArgs& a, const Tensor& out /*[N,D] accumulate type*/);
// dy: as out, dense. dfinal [N,D]: gradient of the last tokens, may be undefined.
void token_shift_bwd(const TokenShiftArgs& a, const std::vector<Tensor>& dy, const Tensor& dfinal,
                     const TokenShiftGrads& g);
}  // namespace cpu
namespace gpu {
void token_shift_fwd(const TokenShiftArgs& a, const std::vector<Tensor>& out);
void token_shift_last(const TokenShiftArgs& a, const Tensor& out);
void token_shift_bwd(const TokenShiftArgs& a, const std::vector<Tensor>& dy, const Tensor& dfinal,
                     const TokenShiftGrads& g);
}  // namespace gpu

}  // namespace ebb
