#include "models/delta.h"

#include <cmath>

#include "autograd/tape.h"
#include "models/heads.h"
#include "models/short_conv.h"
#include "ops/decay_gate.h"
#include "ops/gated_rms_norm.h"
#include "ops/matmul.h"
#include "ops/movement.h"
#include "ops/rms_norm.h"
#include "tensor/check.h"

namespace ebb {

GatedDeltaNet::GatedDeltaNet(const ModelConfig& c)
    : heads_(c.num_heads),
      v_heads_(c.v_heads()),
      key_dim_(c.head_dim),
      value_dim_(c.v_dim()),
      conv_width_(c.use_short_conv ? c.conv_size : 0),
      gates_(c.use_gate ? v_heads_ * value_dim_ : 0),
      eps_(c.norm_eps),
      beta_scale_(c.allow_neg_eigval ? 2 : 1) {
  const int64_t d = c.hidden_size, keys = heads_ * key_dim_, values = v_heads_ * value_dim_;
  // Eight rows at a time, so that every row of the product starts at a 16-byte boundary.
  std::vector<FusedPart> rows = {
      {"q_proj.weight", {keys, d}}, {"k_proj.weight", {keys, d}}, {"v_proj.weight", {values, d}}};
  if (gates_) rows.push_back({"g_proj.weight", {gates_, d}});
  rows.push_back({"a_proj.weight", {v_heads_, d}});
  rows.push_back({"b_proj.weight", {v_heads_, d}});
  input_ = register_fused(rows, 8);
  if (conv_width_) {
    conv_ = register_fused({{"q_conv1d.weight", {keys, 1, conv_width_}},
                            {"k_conv1d.weight", {keys, 1, conv_width_}},
                            {"v_conv1d.weight", {values, 1, conv_width_}}});
    conv_.keep_f32();
  }
  A_log_ = register_parameter("A_log", Tensor::zeros({v_heads_}), WeightDecay::off);
  dt_bias_ = register_parameter("dt_bias", Tensor::zeros({v_heads_}), WeightDecay::off);
  o_norm_ = register_parameter("o_norm.weight", Tensor::full({value_dim_}, 1), WeightDecay::off);
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, values}));
}

// The recurrence is given q and k before their normalisation and logits of its gates.
DeltaRuleOptions GatedDeltaNet::rule_options() const {
  return {.scale = 1 / std::sqrt(double(key_dim_)),
          .normalize_qk = true,
          .sigmoid = true,
          .beta_scale = beta_scale_,
          .A_log = A_log_.var(),
          .dt_bias = dt_bias_.var()};
}

// The columns of the input product.
struct GatedDeltaNet::Projected {
  Var qkv;   // [...,2·H·K + HV·V]
  Var gate;  // [...,HV·V] or [...,0]
  Var a, b;  // [...,HV]
};

GatedDeltaNet::Projected GatedDeltaNet::project(const Var& x) const {
  const int64_t values = v_heads_ * value_dim_, qkv = 2 * heads_ * key_dim_ + values;
  const Var all = linear(x, input_.var());
  const int64_t rest = all.shape().back() - qkv - gates_ - 2 * v_heads_;
  std::vector<int64_t> sizes = {qkv, gates_, v_heads_, v_heads_};
  if (rest > 0) sizes.push_back(rest);
  const std::vector<Var> parts = split(all, -1, sizes);
  return {parts[0], parts[1], parts[2], parts[3]};
}

Var GatedDeltaNet::finish(const Var& o, const Var& gate, const Shape& lead) const {
  Shape heads = lead, flat = lead;
  heads.push_back(v_heads_);
  heads.push_back(value_dim_);
  flat.push_back(v_heads_ * value_dim_);
  const Var y = gates_
                    ? gated_rms_norm(o, reshape(gate, heads), o_norm_.var(), {.eps = float(eps_)})
                    : rms_norm(o, o_norm_.var(), float(eps_));
  return linear(reshape(y, flat), output_.var());
}

Var GatedDeltaNet::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                           MixerState* final) {
  check(x.dim() == 3, "gated_deltanet: x is {}, want [B,T,d]", x.shape());
  const int64_t B = x.size(0), T = x.size(1), keys = heads_ * key_dim_;
  const Projected p = project(x);
  const CausalConv1d conv = conv_or_silu(p.qkv, conv_, initial, final, layout);
  const std::vector<Var> qkv = split(conv.y, -1, {keys, keys, v_heads_ * value_dim_});
  DeltaRuleOptions options = rule_options();
  options.want_final_state = final != nullptr, options.layout = layout;
  const DeltaRuleOutput r = gated_delta_rule(
      in_heads(qkv[0], heads_), in_heads(qkv[1], heads_), in_heads(qkv[2], v_heads_), p.a, p.b,
      initial ? Var(initial->tensors.at(0)) : Var(), options);
  if (final) final->tensors = with_conv_state(r.ht.value(), conv);
  return finish(r.o, p.gate, {B, T});
}

Var GatedDeltaNet::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "gated_deltanet: x is {}, want [N,d]", x.shape());
  const int64_t N = x.size(0), keys = heads_ * key_dim_;
  const Projected p = project(x);
  const Tensor qkv = conv_or_silu_step(p.qkv.value(), conv_, state);
  const auto columns = [&](int64_t first, int64_t heads, int64_t width) {
    return qkv.slice(1, first, first + heads * width).reshape({N, heads, width});
  };
  const Tensor o =
      gated_delta_rule_step(columns(0, heads_, key_dim_), columns(keys, heads_, key_dim_),
                            columns(2 * keys, v_heads_, value_dim_), p.a.value(), p.b.value(),
                            state.tensors.at(0), rule_options());
  return finish(o, p.gate, {N});
}

MixerState GatedDeltaNet::zero_state(int64_t n, DType activations, Device device) const {
  const int64_t channels = 2 * heads_ * key_dim_ + v_heads_ * value_dim_;
  MixerState s{
      {Tensor::zeros({n, v_heads_, key_dim_, value_dim_}, accumulate_type(activations), device)}};
  if (conv_width_)
    s.tensors.push_back(Tensor::zeros({n, channels, conv_width_}, activations, device));
  return s;
}

std::optional<DecayGate> GatedDeltaNet::decay_gate_parameters() const {
  return DecayGate{A_log_, dt_bias_, v_heads_, 1};
}

Tensor GatedDeltaNet::gate_preactivations(const Tensor& h) const {
  const NoGrad off;
  const int64_t begin = 2 * heads_ * key_dim_ + v_heads_ * value_dim_ + gates_;
  const Tensor w = input_.master().slice(0, begin, begin + v_heads_);
  return linear(h.to(w.dtype()).reshape({-1, h.shape().back()}), w).value();
}

Tensor GatedDeltaNet::log_decays(const Var& h) const {
  const NoGrad off;
  return decay_gate(project(h).a, A_log_.var(), dt_bias_.var()).value();
}

}  // namespace ebb
