// Short causal depthwise convolution along time, with its activation (models.md 1.4).
//   pre_t[c] = bias[c] + Σ_j w[c,j] x_{t−(W−1)+j}[c], j = 0..W−1      y = pre or silu(pre)
// The last tap multiplies the current token. Before a sequence's first token stands its initial
// state, or zeros: a prompt shorter than W is padded on the left.
//   CausalConv1d r = causal_conv1d(x, w, bias, {}, {.final_state = true, .layout = packed});
//   Tensor y = causal_conv1d_step(token, w, bias, state, ConvActivation::silu);   // decoding
// Backward: dpre = dy ⊙ silu'(pre), pre computed anew from x;
//   dx_t[c] = Σ_j w[c,j] dpre_{t+(W−1)−j}[c]   dw[c,j] = Σ_t dpre_t[c] x_{t−(W−1)+j}[c]
// Saves x (the view it was given), weight, bias, initial state. dw and dbias are ordered partial
// sums in f32 (f64 for f64).
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/rows.h"
#include "ops/sequence_cursor.h"

namespace ebb {

enum class ConvActivation { none, silu };

inline constexpr int64_t kMaxConvWidth = 8;

struct CausalConv1dOptions {
  ConvActivation activation = ConvActivation::silu;
  bool final_state = false;  // ask for CausalConv1d::final_state
  SeqLayout layout = {};     // packed sequences over the B·T tokens
};

// A state [N,D,W] holds the last W inputs of each of the N sequences, oldest first. Its first
// column has left the window: it is carried, but no output depends on it (gradient exactly 0).
struct CausalConv1d {
  Var y;            // [B,T,D] as x
  Var final_state;  // [N,D,W], dtype of the initial state or else of x; undefined unless asked for
};

// x [B,T,D] f32 f64 bf16; a channel slice of a wider projection is read in place. weight [D,W] or
// [D,1,W], W = 1..8; bias [D] or absent; initial_state [N,D,W] in x's dtype or f32, or absent.
// weight and bias may be f32 beside bf16; their gradients are f32. Any length, 0 included.
CausalConv1d causal_conv1d(const Var& x, const Var& weight, const Var& bias = {},
                           const Var& initial_state = {}, const CausalConv1dOptions& options = {});

// One token of every sequence: x [N,D] or [N,1,D] -> y of the same shape. `state` [N,D,W] (f32 or
// x's dtype; rows may lie apart, as slots of a larger pool do) is moved on in place. Not recorded.
Tensor causal_conv1d_step(const Tensor& x, const Tensor& weight, const Tensor& bias,
                          const Tensor& state, ConvActivation activation);

// tokens = B·T. States are left out: they do not grow with the length.
Cost causal_conv1d_cost(Pass pass, int64_t tokens, int64_t channels, int64_t width, DType dtype);

// What the kernels see. Weights, bias and states are dense and in x's accumulate type.
struct ConvArgs {
  Rows x = {};                // [B·T,D]
  Tensor w = {};              // [D,W]
  Tensor bias = {};           // [D] or undefined
  Tensor state = {};          // [N,D,W] or undefined: zeros
  SequenceCursor first = {};  // not yet placed
  bool silu = true;
};
// Gradients; an undefined one is not wanted. All are overwritten.
struct ConvGrads {
  Tensor dx = {};                          // [B·T,D] dense, x's dtype
  Tensor dw = {};                          // [D,W]
  Tensor dbias = {};                       // [D]
  Tensor dstate = {};                      // [N,D,W]
  bool add_dw = false, add_dbias = false;  // on the GPU: added to instead of overwritten
};
namespace cpu {
void causal_conv1d_fwd(const ConvArgs& a, const Tensor& y /*[B·T,D]*/);
void causal_conv1d_final(const ConvArgs& a, const Tensor& state /*[N,D,W]*/);
// dfinal [N,D,W]: gradient of the final state, may be undefined.
void causal_conv1d_bwd(const ConvArgs& a, const Rows& dy, const Tensor& dfinal, const ConvGrads& g);
void causal_conv1d_step(const Tensor& x, const Tensor& w, const Tensor& bias, bool silu,
                        const Tensor& state, const Tensor& y);
}  // namespace cpu
namespace gpu {
void causal_conv1d_fwd(const ConvArgs& a, const Tensor& y);
void causal_conv1d_final(const ConvArgs& a, const Tensor& state);
void causal_conv1d_bwd(const ConvArgs& a, const Rows& dy, const Tensor& dfinal, const ConvGrads& g);
void causal_conv1d_step(const Tensor& x, const Tensor& w, const Tensor& bias, bool silu,
                        const Tensor& state, const Tensor& y);
}  // namespace gpu

}  // namespace ebb
