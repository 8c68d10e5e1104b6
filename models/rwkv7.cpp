#include "models/rwkv7.h"

#include <algorithm>
#include <cmath>

#include "autograd/tape.h"
#include "models/rwkv_channel_mix.h"
#include "ops/channel_mix.h"
#include "ops/decay_gate.h"
#include "ops/dplr.h"
#include "ops/elementwise.h"
#include "ops/l2_norm.h"
#include "ops/layer_norm.h"
#include "ops/matmul.h"
#include "ops/movement.h"
#include "ops/reduce.h"
#include "ops/token_shift.h"
#include "tensor/check.h"

namespace ebb {

RwkvChannelMix::RwkvChannelMix(int64_t dim, int64_t width) {
  mix_ = register_parameter("x_k", Tensor::zeros({dim}), WeightDecay::off);
  key_ = register_parameter("key.weight", Tensor::zeros({width, dim}));
  value_ = register_parameter("value.weight", Tensor::zeros({dim, width}));
}

Var RwkvChannelMix::forward(const Var& x, const SeqLayout& layout, const Tensor& last,
                            Tensor* end) const {
  const ChannelMix r =
      channel_mix(x, mix_.var(), key_.var(), value_.var(), last.defined() ? Var(last) : Var(),
                  {.last = end != nullptr, .layout = layout});
  if (end) *end = r.last.value();
  return r.y;
}

Var RwkvChannelMix::step(const Var& x, const Tensor& last) const {
  const NoGrad off;
  Tensor end;
  const Var y = forward(reshape(x, {x.size(0), 1, x.size(1)}), {}, last, &end);
  last.copy_(end);
  return reshape(y, x.shape());
}

Rwkv7::LowRank Rwkv7::register_low_rank(const std::string& name, int64_t rank, bool bias,
                                        double bias_lr_factor) {
  LowRank p;
  p.inner =
      register_parameter(name + ".lora.0.weight", Tensor::zeros({rank, hidden_}), WeightDecay::off);
  p.outer =
      register_parameter(name + ".lora.2.weight", Tensor::zeros({hidden_, rank}), WeightDecay::off);
  if (bias)
    p.bias = register_parameter(name + ".lora.2.bias", Tensor::zeros({hidden_}), WeightDecay::off,
                                bias_lr_factor);
  return p;
}

Rwkv7::Rwkv7(const ModelConfig& c, int64_t layer)
    : layer_(layer),
      hidden_(c.hidden_size),
      heads_(c.num_heads),
      head_dim_(c.head_dim),
      eps_(double(c.head_dim) * c.norm_eps),
      A_log_(Tensor::full({c.num_heads}, -0.5)),
      bound_(std::exp(-0.5)) {
  const int64_t d = hidden_;
  const auto vector = [&](const char* name, const Shape& shape) {
    Parameter p = register_parameter(name, Tensor::zeros(shape), WeightDecay::off);
    p.keep_f32();
    return p;
  };
  for (const char* name : {"x_r", "x_w", "x_k", "x_v", "x_a", "x_g"})
    mixes_.push_back(vector(name, {1, 1, d}));
  key_scale_ = vector("k_k", {d});
  rate_scale_ = vector("k_a", {d});
  bonus_ = vector("r_k", {heads_, head_dim_});
  receptance_ = register_parameter("r_proj.weight", Tensor::zeros({d, d}));
  key_ = register_parameter("k_proj.weight", Tensor::zeros({d, d}));
  value_ = register_parameter("v_proj.weight", Tensor::zeros({d, d}));
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, d}));
  decay_ = register_low_rank("w_lora", c.decay_low_rank_dim, true, 2);  // as its authors train it
  if (layer > 0) residual_ = register_low_rank("v_lora", c.v_low_rank_dim, true);
  rate_ = register_low_rank("a_lora", c.a_low_rank_dim, true);
  gate_ = register_low_rank("g_lora", c.gate_low_rank_dim, false);
  norm_ = register_parameter("g_norm.weight", Tensor::full({d}, 1), WeightDecay::off);
  norm_bias_ = register_parameter("g_norm.bias", Tensor::zeros({d}), WeightDecay::off);
  if (c.frozen_decay_scale) use_decay_scales();
}

void Rwkv7::use_decay_scales() {
  if (scaled_) return;
  scaled_ = true;
  A_log_ = register_buffer("A_log",
                           Tensor::full({heads_}, -0.5, DType::f32, receptance_.master().device()));
}

double Rwkv7::strongest_decay() {
  const Tensor& a = A_log_.master();
  const bool known = bound_of_ && a.raw() == bound_of_.raw() && a.version() == bound_version_;
  if (!scaled_ || known) return bound_;
  bound_of_ = a, bound_version_ = a.version();
  const std::vector<double> values = a.to_vector<double>();
  return bound_ = std::exp(*std::max_element(values.begin(), values.end()));
}

Var Rwkv7::heads(const Var& x) const {
  Shape shape = x.shape().first(x.dim() - 1);
  shape.push_back(heads_);
  shape.push_back(head_dim_);
  return reshape(x, shape);
}
Var Rwkv7::flat(const Var& x) const {
  Shape shape = x.shape().first(x.dim() - 2);
  shape.push_back(hidden_);
  return reshape(x, shape);
}

// What the recurrence and the output are given.
struct Rwkv7::Inputs {
  Var r, w, k, v, a, b;  // [B,T,H,P], w f32
  Var gate;              // [B,T,d]
  Tensor last = {};      // [N,d]
};

// w = −κ σ(ω), in f32.
Var Rwkv7::log_decay(const Var& mixed) const {
  const Var z = linear(tanh(linear(mixed, decay_.inner.var())), decay_.outer.var());
  const DType dtype = decay_.bias.master().dtype();
  const Var one(Tensor::zeros({heads_}, dtype, mixed.device()));  // A_log of 1
  // The native constant is a plain bound; scales multiply a bound of 1.
  const Var g =
      decay_gate(z, one, decay_.bias.var(), {.lower_bound = scaled_ ? -1 : -std::exp(-0.5)});
  if (!scaled_) return heads(g);
  const Var scale = exp(Var(A_log_.master().to(dtype)));
  return mul(heads(g), reshape(scale, {heads_, 1}));
}

// v, above the first layer blended with that layer's.
Var Rwkv7::values(const Var& mixed, Var* shared) const {
  const Var v = linear(mixed, value_.var());
  if (layer_ == 0) return *shared = v;
  check(shared->defined(), "rwkv7: layer {} needs the values of the first one", layer_);
  const Var weight = sigmoid(
      linear(linear(mixed, residual_.inner.var()), residual_.outer.var(), residual_.bias.var()));
  return add(v, mul(sub(*shared, v), weight));
}

Rwkv7::Inputs Rwkv7::inputs(const Var& x, Var* shared, const Var& last, const SeqLayout& layout,
                            bool want_last) const {
  std::vector<Var> mu;
  for (const Parameter& p : mixes_) mu.push_back(p.var());
  const TokenShiftMix m = token_shift_mix(x, mu, last, {.last = want_last, .layout = layout});
  const DType dtype = x.dtype();
  const auto as_input = [&](const Var& t) { return cast(t, dtype); };
  const Var k = linear(m.out[2], key_.var());
  const Var rate =
      sigmoid(linear(linear(m.out[4], rate_.inner.var()), rate_.outer.var(), rate_.bias.var()));
  const Var unit = as_input(l2_norm(heads(mul(k, key_scale_.var()))));  // normalised in f32
  const Var key = mul(k, add(mul(sub(rate, 1), rate_scale_.var()), 1));
  Inputs in{.r = heads(linear(m.out[0], receptance_.var())),
            .w = log_decay(m.out[1]),
            .k = heads(as_input(key)),
            .v = heads(values(m.out[3], shared)),
            .a = neg(unit),
            .b = mul(unit, heads(rate)),
            .gate = linear(sigmoid(linear(m.out[5], gate_.inner.var())), gate_.outer.var())};
  if (want_last) in.last = m.last.value();
  return in;
}

// GroupNorm of o, (Σ r k r_k) v for the current token, gate, output projection.
Var Rwkv7::finish(const Var& o, const Inputs& in) const {
  const Var normed = group_norm(flat(o), norm_.var(), norm_bias_.var(), heads_, float(eps_));
  const Var own = sum(mul(mul(in.r, in.k), bonus_.var()), -1, KeepDim::yes);
  const Var y = add(normed, flat(mul(cast(own, in.v.dtype()), in.v)));
  return linear(mul(y, in.gate), output_.var());
}

Var Rwkv7::forward_sharing(const Var& x, Var* shared, const SeqLayout& layout,
                           const MixerState* initial, MixerState* final) {
  check(x.dim() == 3, "rwkv7: x is {}, want [B,T,d]", x.shape());
  const bool want = final != nullptr;
  const Inputs in = inputs(x, shared, initial ? Var(initial->tensors.at(1)) : Var(), layout, want);
  const DplrOutput r = dplr(
      in.r, in.w, in.k, in.v, in.a, in.b, initial ? Var(initial->tensors.at(0)) : Var(),
      {.want_final_state = want, .layout = layout, .lower_bound = -strongest_decay() * (1 + 1e-5)});
  if (final) final->tensors = {r.ht.value(), in.last};
  return finish(r.o, in);
}

Var Rwkv7::step_sharing(const Var& x, Var* shared, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "rwkv7: x is {}, want [N,d]", x.shape());
  const Tensor &s = state.tensors.at(0), &last = state.tensors.at(1);
  const Inputs in = inputs(reshape(x, {x.size(0), 1, hidden_}), shared, Var(last), {}, true);
  const auto token = [](const Var& v) { return v.value().select(1, 0); };
  const Tensor o =
      dplr_step(token(in.r), token(in.w), token(in.k), token(in.v), token(in.a), token(in.b), s);
  last.copy_(in.last);
  return reshape(finish(Var(o.unsqueeze(1)), in), x.shape());
}

Var Rwkv7::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                   MixerState* final) {
  Var shared;
  return forward_sharing(x, &shared, layout, initial, final);
}
Var Rwkv7::step(const Var& x, MixerState& state) {
  Var shared;
  return step_sharing(x, &shared, state);
}

MixerState Rwkv7::zero_state(int64_t n, DType activations, Device device) const {
  return {{Tensor::zeros({n, heads_, head_dim_, head_dim_}, accumulate_type(activations), device),
           Tensor::zeros({n, hidden_}, activations, device)}};
}

std::optional<DecayGate> Rwkv7::decay_gate_parameters() const {
  return DecayGate{A_log_, decay_.bias, heads_, head_dim_, DecayResponse::sigmoid};
}

Tensor Rwkv7::gate_preactivations(const Tensor& h) const {
  const NoGrad off;
  check(h.dim() == 3, "rwkv7: gates are measured on [B,T,d], h is {}", h.shape());
  const Tensor inner = decay_.inner.master();
  const Var mixed = token_shift_mix(h.to(inner.dtype()), std::vector{mixes_[1].var()}).out[0];
  const Var z = linear(tanh(linear(mixed, inner)), decay_.outer.master());
  return reshape(z, {-1, hidden_}).value();
}

Tensor Rwkv7::log_decays(const Var& h) const {
  const NoGrad off;
  check(h.dim() == 3, "rwkv7: decays are measured on [B,T,d], h is {}", h.shape());
  return log_decay(token_shift_mix(h, std::vector{mixes_[1].var()}).out[0]).value();
}

}  // namespace ebb
