#include "models/delta_channel.h"

#include <cmath>

#include "autograd/tape.h"
#include "models/heads.h"
#include "models/short_conv.h"
#include "ops/decay_gate.h"
#include "ops/gated_rms_norm.h"
#include "ops/matmul.h"
#include "ops/movement.h"
#include "tensor/check.h"

namespace ebb {

ChannelDeltaNet::ChannelDeltaNet(const ModelConfig& c, DeltaGates gates)
    : gates_(gates),
      heads_(c.num_heads),
      v_heads_(c.v_heads()),
      key_dim_(c.head_dim),
      value_dim_(c.v_dim()),
      conv_width_(c.use_short_conv ? c.conv_size : 0),
      gate_heads_(gates == DeltaGates::gdn2 ? c.num_heads : c.v_heads()),
      eps_(c.norm_eps),
      erase_scale_(c.allow_neg_eigval ? 2 : 1),
      lower_bound_(c.lower_bound.value_or(0)) {
  const int64_t d = c.hidden_size, keys = heads_ * key_dim_, values = v_heads_ * value_dim_;
  const int64_t channels = gate_heads_ * key_dim_;  // of the decay
  std::vector<FusedPart> rows = {
      {"q_proj.weight", {keys, d}}, {"k_proj.weight", {keys, d}}, {"v_proj.weight", {values, d}}};
  if (gates_ == DeltaGates::gdn2) rows.push_back({"w_proj.weight", {values, d}});
  rows.push_back({"f_proj.0.weight", {value_dim_, d}});
  rows.push_back({"g_proj.0.weight", {value_dim_, d}});
  rows.push_back({"b_proj.weight", {gates_ == DeltaGates::gdn2 ? channels : v_heads_, d}});
  // Eight rows at a time, so that every row of the product starts at a 16-byte boundary.
  input_ = register_fused(rows, 8);
  if (conv_width_) {
    conv_ = register_fused({{"q_conv1d.weight", {keys, 1, conv_width_}},
                            {"k_conv1d.weight", {keys, 1, conv_width_}},
                            {"v_conv1d.weight", {values, 1, conv_width_}}});
    conv_.keep_f32();
  }
  decay_ = register_parameter("f_proj.1.weight", Tensor::zeros({channels, value_dim_}));
  gate_ = register_parameter("g_proj.1.weight", Tensor::zeros({values, value_dim_}));
  gate_bias_ = register_parameter("g_proj.1.bias", Tensor::zeros({values}), WeightDecay::off);
  A_log_ = register_parameter("A_log", Tensor::zeros({gate_heads_}), WeightDecay::off);
  dt_bias_ = register_parameter("dt_bias", Tensor::zeros({channels}), WeightDecay::off);
  o_norm_ = register_parameter("o_norm.weight", Tensor::full({value_dim_}, 1), WeightDecay::off);
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, values}));
}

// What the input becomes before anything looks along time.
struct ChannelDeltaNet::Projected {
  Var qkv;   // [...,2·H·K + HV·V]
  Var z;     // [...,HV,K] logits of the decays
  Var b;     // [...,HV] or [...,HV,K], logits too
  Var w;     // [...,HV,V], GDN2
  Var gate;  // [...,HV·V] of the output
};

ChannelDeltaNet::Projected ChannelDeltaNet::project(const Var& x) const {
  const int64_t values = v_heads_ * value_dim_, qkv = 2 * heads_ * key_dim_ + values;
  const bool wide = gates_ == DeltaGates::gdn2;
  const int64_t erase = wide ? gate_heads_ * key_dim_ : v_heads_, write = wide ? values : 0;
  const Var all = linear(x, input_.var());
  std::vector<int64_t> sizes = {qkv, write, value_dim_, value_dim_, erase};
  const int64_t rest = all.shape().back() - qkv - write - 2 * value_dim_ - erase;
  if (rest > 0) sizes.push_back(rest);
  const std::vector<Var> parts = split(all, -1, sizes);

  const auto heads = [&](const Var& t, int64_t count) {
    const Var apart = in_heads(t, count);
    return count == v_heads_ ? apart : repeat_interleave(apart, apart.dim() - 2, v_heads_ / count);
  };
  return {parts[0], heads(linear(parts[2], decay_.var()), gate_heads_),
          wide ? heads(parts[4], gate_heads_) : parts[4], wide ? heads(parts[1], v_heads_) : Var(),
          linear(parts[3], gate_.var(), gate_bias_.var())};
}

// The recurrence is given q and k before their normalisation and logits of its gates.
DeltaRuleOptions ChannelDeltaNet::rule_options() const {
  const int64_t shared = v_heads_ / gate_heads_;  // value heads that share a gate
  Var A_log = A_log_.var(), dt_bias = reshape(dt_bias_.var(), {gate_heads_, key_dim_});
  if (shared > 1)
    A_log = repeat_interleave(A_log, 0, shared), dt_bias = repeat_interleave(dt_bias, 0, shared);
  return {.scale = 1 / std::sqrt(double(key_dim_)),
          .normalize_qk = true,
          .sigmoid = true,
          .beta_scale = erase_scale_,
          .A_log = A_log,
          .dt_bias = dt_bias,
          .lower_bound = lower_bound_};
}

Var ChannelDeltaNet::finish(const Var& o, const Var& gate, const Shape& lead) const {
  Shape heads = lead, flat = lead;
  heads.push_back(v_heads_);
  heads.push_back(value_dim_);
  flat.push_back(v_heads_ * value_dim_);
  const Var y = gated_rms_norm(o, reshape(gate, heads), o_norm_.var(),
                               {.eps = float(eps_), .act = GateAct::sigmoid});
  return linear(reshape(y, flat), output_.var());
}

Var ChannelDeltaNet::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                             MixerState* final) {
  check(x.dim() == 3, "delta mixer: x is {}, want [B,T,d]", x.shape());
  const int64_t B = x.size(0), T = x.size(1), keys = heads_ * key_dim_;
  const Projected p = project(x);
  const CausalConv1d conv = conv_or_silu(p.qkv, conv_, initial, final, layout);
  const std::vector<Var> qkv = split(conv.y, -1, {keys, keys, v_heads_ * value_dim_});
  const Var q = in_heads(qkv[0], heads_), k = in_heads(qkv[1], heads_);
  const Var v = in_heads(qkv[2], v_heads_), h0 = initial ? Var(initial->tensors.at(0)) : Var();
  DeltaRuleOptions options = rule_options();
  options.want_final_state = final != nullptr, options.layout = layout;
  const DeltaRuleOutput r = gates_ == DeltaGates::kda ? kda(q, k, v, p.z, p.b, h0, options)
                                                      : gdn2(q, k, v, p.z, p.b, p.w, h0, options);
  if (final) final->tensors = with_conv_state(r.ht.value(), conv);
  return finish(r.o, p.gate, {B, T});
}

Var ChannelDeltaNet::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "delta mixer: x is {}, want [N,d]", x.shape());
  const int64_t N = x.size(0), keys = heads_ * key_dim_;
  const Projected p = project(x);
  const Tensor qkv = conv_or_silu_step(p.qkv.value(), conv_, state);
  const auto columns = [&](int64_t first, int64_t heads, int64_t width) {
    return qkv.slice(1, first, first + heads * width).reshape({N, heads, width});
  };
  const Tensor q = columns(0, heads_, key_dim_), k = columns(keys, heads_, key_dim_);
  const Tensor v = columns(2 * keys, v_heads_, value_dim_);
  const Tensor &z = p.z.value(), &b = p.b.value(), &s = state.tensors.at(0);
  const DeltaRuleOptions options = rule_options();
  const Tensor o = gates_ == DeltaGates::kda ? kda_step(q, k, v, z, b, s, options)
                                             : gdn2_step(q, k, v, z, b, p.w.value(), s, options);
  return finish(o, p.gate, {N});
}

MixerState ChannelDeltaNet::zero_state(int64_t n, DType activations, Device device) const {
  const int64_t channels = 2 * heads_ * key_dim_ + v_heads_ * value_dim_;
  MixerState s{
      {Tensor::zeros({n, v_heads_, key_dim_, value_dim_}, accumulate_type(activations), device)}};
  if (conv_width_)
    s.tensors.push_back(Tensor::zeros({n, channels, conv_width_}, activations, device));
  return s;
}

std::optional<DecayGate> ChannelDeltaNet::decay_gate_parameters() const {
  return DecayGate{A_log_, dt_bias_, gate_heads_, key_dim_};
}

Tensor ChannelDeltaNet::gate_preactivations(const Tensor& h) const {
  const NoGrad off;
  check(lower_bound_ == 0,
        "calibrate: the timescale of a bounded gate (lower_bound {}) is not "
        "exp(A_log) times a softplus; only the softplus gate can be calibrated",
        lower_bound_);
  const int64_t values = v_heads_ * value_dim_;
  const int64_t begin = 2 * heads_ * key_dim_ + (gates_ == DeltaGates::gdn2 ? 2 : 1) * values;
  const Tensor inner = input_.master().slice(0, begin, begin + value_dim_);
  const Var f = linear(h.to(inner.dtype()).reshape({-1, h.shape().back()}), inner);
  return linear(f, decay_.master()).value();
}

Tensor ChannelDeltaNet::log_decays(const Var& h) const {
  const NoGrad off;
  const DeltaRuleOptions o = rule_options();
  return decay_gate(project(h).z, o.A_log, o.dt_bias, {.lower_bound = o.lower_bound}).value();
}

}  // namespace ebb
