// Rotary position embedding (models.md 1.9, 11.3). A token at position t of its sequence, with
// θ_j = base^{−2j/P} for j < P/2,
//   rotate   y_j = x_j cos tθ_j − x_{j+P/2} sin tθ_j
//            y_{j+P/2} = x_{j+P/2} cos tθ_j + x_j sin tθ_j
//   cosine   y = [x∘cos tθ, x∘sin tθ], width 2P, θ_j = 0 for j >= P/2: with q and k both so,
//            q'·k' = Σ_j q_j k_j cos((t−s)θ_j), which a decay per channel leaves as it is
//
//   Var q = rotary(x);                                      // positions 0, 1, ... in each sequence
//   Var q = rotary(x, {.start = start, .layout = packed});  // from start[n] on
//
// x [B,T,H,P] f32, f64 (CPU) or bf16 (CUDA), any strides, P even; y as x. Angles in f64, taken
// modulo 2π before they are rounded. Backward: the opposite rotation, or the sum of both halves'
// parts. Saves `start` only.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/rows.h"
#include "ops/sequence_cursor.h"

namespace ebb {

enum class RotaryForm { rotate, cosine };

inline constexpr int64_t kMaxRotaryWidth = 512;

struct RotaryOptions {
  double base = 10000;
  RotaryForm form = RotaryForm::rotate;
  int64_t offset = 0;     // added to every position
  Tensor start = {};      // [N] i64 on x's device: each sequence's first position; undefined: 0
  SeqLayout layout = {};  // N sequences; dense: N = B
};
Var rotary(const Var& x, const RotaryOptions& options = {});

Cost rotary_cost(Pass pass, int64_t elements, RotaryForm form, DType dtype);  // elements of x

struct RotaryProblem {
  Rows x = {};                   // B·T rows of H·P; in the backward pass of dy
  int64_t heads = 1, width = 1;  // H, P
  double base = 10000;
  RotaryForm form = RotaryForm::rotate;
  int64_t offset = 0;
  Tensor start = {};
  SequenceCursor first = {};  // not yet placed
};
// y [B·T,H,P] or, in cosine form, [B·T,H,2P], dense; dx [B·T,H,P].
namespace cpu {
void rotary_fwd(const RotaryProblem& p, const Tensor& y);
void rotary_bwd(const RotaryProblem& p, const Tensor& dx);
}  // namespace cpu
namespace gpu {
void rotary_fwd(const RotaryProblem& p, const Tensor& y);
void rotary_bwd(const RotaryProblem& p, const Tensor& dx);
}  // namespace gpu

}  // namespace ebb
