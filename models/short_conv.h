// The short convolution of mixers that may go without one (use_short_conv): its state is the second
// tensor of theirs.
#pragma once
#include "nn/mixer.h"
#include "ops/causal_conv1d.h"
#include "ops/elementwise.h"

namespace ebb {

// silu(conv(x)), or silu(x) where there are no kernels [channels, W]. x [B,T,channels].
inline CausalConv1d conv_or_silu(const Var& x, const Parameter& kernels, const MixerState* initial,
                                 const MixerState* final, const SeqLayout& layout) {
  if (!kernels.defined()) return {silu(x), {}};
  return causal_conv1d(x, kernels.var(), {}, initial ? Var(initial->tensors.at(1)) : Var(),
                       {.final_state = final != nullptr, .layout = layout});
}

// One token of every sequence, x [N,channels]; the convolution's state is updated.
inline Tensor conv_or_silu_step(const Tensor& x, const Parameter& kernels,
                                const MixerState& state) {
  if (!kernels.defined()) return silu(x).value();
  return causal_conv1d_step(x, kernels.master(), {}, state.tensors.at(1), ConvActivation::silu);
}

// The same without an activation, x itself where there are no kernels; `at`: the state's place.
inline CausalConv1d conv_if_any(const Var& x, const Parameter& kernels, const MixerState* initial,
                                size_t at, const MixerState* final, const SeqLayout& layout) {
  if (!kernels.defined()) return {x, {}};
  return causal_conv1d(
      x, kernels.var(), {}, initial ? Var(initial->tensors.at(at)) : Var(),
      {.activation = ConvActivation::none, .final_state = final != nullptr, .layout = layout});
}
inline Tensor conv_if_any_step(const Tensor& x, const Parameter& kernels, const MixerState& state,
                               size_t at) {
  if (!kernels.defined()) return x;
  return causal_conv1d_step(x, kernels.master(), {}, state.tensors.at(at), ConvActivation::none);
}

// The tensors of a state: the recurrence's and, where there is a convolution, its own.
inline std::vector<Tensor> with_conv_state(const Tensor& recurrence, const CausalConv1d& conv) {
  std::vector<Tensor> tensors = {recurrence};
  if (conv.final_state.defined()) tensors.push_back(conv.final_state.value());
  return tensors;
}

}  // namespace ebb
