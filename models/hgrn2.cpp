#include <cmath>

#include "autograd/tape.h"
#include "models/attention_mixers.h"
#include "models/head_norm.h"
#include "models/heads.h"
#include "models/short_conv.h"
#include "ops/elementwise.h"
#include "ops/forget_gate.h"
#include "ops/gated_linear_attention.h"
#include "ops/matmul.h"
#include "ops/reduce.h"
#include "ops/softmax.h"
#include "tensor/check.h"

namespace ebb {
namespace {

constexpr float kNormEps = 1e-5f;  // whatever norm_eps says, as in the public library

class Hgrn2 : public Mixer {
 public:
  // lower_bounds [L,H·K], shared by the layers (undefined: none); layer 0 has bound 0.
  Hgrn2(const ModelConfig& config, int64_t layer, const Parameter& lower_bounds);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  Projected cut(const Var& qfi) const;
  Var finish(const Var& o, const Shape& lead) const;

  int64_t layer_, heads_, key_dim_, value_dim_;
  int64_t conv_width_;  // 0: no convolution
  Parameter lower_bounds_;
  Parameter input_;  // rows q | f | i
  Parameter conv_;   // [channels of q | f | i, W], undefined without
  Parameter norm_, output_;
};

Hgrn2::Hgrn2(const ModelConfig& c, int64_t layer, const Parameter& lower_bounds)
    : layer_(layer),
      heads_(c.num_heads),
      key_dim_(c.expand_ratio),
      value_dim_(c.hidden_size / c.num_heads),
      conv_width_(c.use_short_conv ? c.conv_size : 0),
      lower_bounds_(lower_bounds) {
  const int64_t d = c.hidden_size, keys = heads_ * key_dim_;
  input_ = register_fused(
      {{"q_proj.weight", {keys, d}}, {"f_proj.weight", {keys, d}}, {"i_proj.weight", {d, d}}});
  if (conv_width_) {
    conv_ = register_fused({{"q_conv1d.weight", {keys, 1, conv_width_}},
                            {"f_conv1d.weight", {keys, 1, conv_width_}},
                            {"i_conv1d.weight", {d, 1, conv_width_}}});
    conv_.keep_f32();
  }
  if (c.elementwise_affine)
    norm_ = register_parameter("g_norm.weight", Tensor::full({d}, 1), WeightDecay::off);
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, d}));
}

struct Hgrn2::Projected {
  Var q, g;  // [...,H,K]
  Var v;     // [...,H,V]
};

// Of what the projections, or the convolution behind them, give.
Hgrn2::Projected Hgrn2::cut(const Var& qfi) const {
  const int64_t keys = heads_ * key_dim_;
  const std::vector<Var> p = split(qfi, -1, {keys, keys, heads_ * value_dim_});
  Var bound;  // Σ_{0<m<=l} softmax over the layers
  if (layer_ > 0 && lower_bounds_.defined())
    bound = sum(slice(softmax(transpose(lower_bounds_.var(), 0, 1)), 1, 1, layer_ + 1), {1});
  return {in_heads(silu(p[0]), heads_), in_heads(forget_gate(p[1], {.lower_bound = bound}), heads_),
          in_heads(p[2], heads_)};
}

Var Hgrn2::finish(const Var& o, const Shape& lead) const {
  Shape flat = lead;
  flat.push_back(heads_ * value_dim_);
  return linear(head_norm(reshape(o, flat), {}, norm_, kNormEps), output_.var());
}

Var Hgrn2::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                   MixerState* final) {
  check(x.dim() == 3, "hgrn2: x is {}, want [B,T,d]", x.shape());
  const CausalConv1d conv = conv_if_any(linear(x, input_.var()), conv_, initial, 1, final, layout);
  const Projected p = cut(conv.y);
  const LinearAttentionOutput r =
      gated_linear_attention(p.q, {}, p.v, p.g, initial ? Var(initial->tensors.at(0)) : Var(),
                             {.scale = 1 / std::sqrt(double(key_dim_)),
                              .want_final_state = final != nullptr,
                              .layout = layout});
  if (final) final->tensors = with_conv_state(r.ht.value(), conv);
  return finish(r.o, x.shape().first(2));
}

Var Hgrn2::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "hgrn2: x is {}, want [N,d]", x.shape());
  const Var qfi = linear(x, input_.var());
  const Projected p = cut(conv_if_any_step(qfi.value(), conv_, state, 1));
  const Tensor o =
      gated_linear_attention_step(p.q.value(), {}, p.v.value(), p.g.value(), state.tensors.at(0),
                                  {.scale = 1 / std::sqrt(double(key_dim_))});
  return finish(o, x.shape().first(1));
}

MixerState Hgrn2::zero_state(int64_t n, DType activations, Device device) const {
  MixerState s{
      {Tensor::zeros({n, heads_, key_dim_, value_dim_}, accumulate_type(activations), device)}};
  const int64_t channels = heads_ * (2 * key_dim_ + value_dim_);
  if (conv_width_)
    s.tensors.push_back(Tensor::zeros({n, channels, conv_width_}, activations, device));
  return s;
}

Tensor Hgrn2::log_decays(const Var& h) const {
  const NoGrad off;
  return cut(conv_if_any(linear(h, input_.var()), conv_, nullptr, 1, nullptr, {}).y).g.value();
}

}  // namespace

std::unique_ptr<Mixer> make_hgrn2(const ModelConfig& config, int64_t layer,
                                  const Parameter& lower_bounds) {
  return std::make_unique<Hgrn2>(config, layer, lower_bounds);
}

}  // namespace ebb
