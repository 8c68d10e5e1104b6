#include "models/toeplitz.h"

#include "autograd/tape.h"
#include "models/heads.h"
#include "ops/elementwise.h"
#include "ops/forget_gate.h"
#include "ops/gated_linear_attention.h"
#include "ops/reduce.h"
#include "tensor/check.h"

namespace ebb {

ToeplitzEncoding::ToeplitzEncoding(const ModelConfig& c)
    : heads_(c.num_heads),
      width_(c.hidden_size / c.num_heads),
      norm_(c.hidden_size, c.norm_eps),
      output_(c.hidden_size, c.hidden_size) {
  q_ = register_parameter("q", Tensor::full({heads_, width_}, 1), WeightDecay::off);
  k_ = register_parameter("k", Tensor::full({heads_, width_}, 1), WeightDecay::off);
  q_.keep_f32(), k_.keep_f32();
  decay_ = register_parameter("decay", Tensor::zeros({heads_}), WeightDecay::off);
  register_module("norm", norm_);
  register_module("o_proj", output_);
}

Var ToeplitzEncoding::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                              MixerState* final) const {
  check(x.dim() == 3, "tpe: x is {}, want [B,T,d]", x.shape());
  const int64_t B = x.size(0), T = x.size(1);
  const DType wide = q_.master().dtype();
  const Tensor one = Tensor::zeros({kKeys}, wide, x.value().device());
  one.slice(0, 0, 1).fill_(1);
  const Shape all{B, T, heads_, kKeys};
  const Var read = sum(mul(q_.var(), k_.var()), 1, KeepDim::yes);  // [H,1]
  const Var q = cast(expand(mul(read, one), all), x.dtype());
  const Var k(one.to(x.dtype()).expand(all));
  const Var g = expand(forget_gate(decay_.var()), {B, T, heads_});
  Var h0;
  if (initial) {
    const Tensor& m = initial->tensors.at(0);
    const Tensor whole = Tensor::zeros({m.size(0), heads_, kKeys, width_}, m.dtype(), m.device());
    whole.slice(2, 0, 1).copy_(m);
    h0 = Var(whole);
  }
  const LinearAttentionOutput r = gated_linear_attention(
      q, k, in_heads(x, heads_), g, h0, {.want_final_state = final != nullptr, .layout = layout});
  if (final) final->tensors = {r.ht.value().slice(2, 0, 1).clone()};
  return output_.forward(norm_.forward(from_heads(r.o)));
}

Var ToeplitzEncoding::step(const Var& x, MixerState& state) const {
  const NoGrad off;
  check(x.dim() == 2, "tpe: x is {}, want [N,d]", x.shape());
  const Var read = sum(mul(q_.var(), k_.var()), 1, KeepDim::yes);  // [H,1]
  const Shape one{x.size(0), heads_, 1};
  const Tensor q = cast(expand(read, one), x.dtype()).value();
  const Tensor k = Tensor::full({1}, 1, x.dtype(), x.value().device()).expand(one);
  const Var g = expand(forget_gate(decay_.var()), {x.size(0), heads_});
  const Tensor y = gated_linear_attention_step(q, k, in_heads(x, heads_).value(), g.value(),
                                               state.tensors.at(0));
  return output_.forward(norm_.forward(from_heads(Var(y))));
}

MixerState ToeplitzEncoding::zero_state(int64_t n, DType activations, Device device) const {
  return {{Tensor::zeros({n, heads_, 1, width_}, accumulate_type(activations), device)}};
}

}  // namespace ebb
