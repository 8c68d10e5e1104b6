#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "models/attention_mixers.h"
#include "models/head_norm.h"
#include "models/heads.h"
#include "models/short_conv.h"
#include "ops/elementwise.h"
#include "ops/gated_linear_attention.h"
#include "ops/log_cumsum_exp.h"
#include "ops/matmul.h"
#include "tensor/check.h"

namespace ebb {
namespace {

constexpr float kNormEps = 1e-6f;  // whatever norm_eps says, as in the public library

class LightNet : public Mixer {
 public:
  explicit LightNet(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  Projected project(const Var& x) const;
  struct Heads;
  Heads heads(const Projected& p, const Var& convolved) const;
  Var finish(const Var& o, const Var& gate, const Shape& lead) const;

  int64_t heads_, key_dim_, value_dim_, rank_;
  int64_t conv_width_;  // 0: no convolution
  Parameter input_;     // rows q | k | v | first matrix of the gate
  Parameter conv_;      // [channels of q | k | v, W], undefined without
  Parameter gate_, norm_, output_;
};

LightNet::LightNet(const ModelConfig& c)
    : heads_(c.num_heads),
      key_dim_(c.expand_ratio),
      value_dim_(c.hidden_size / c.num_heads),
      rank_(c.gate_low_rank_dim),
      conv_width_(c.use_short_conv ? c.conv_size : 0) {
  const int64_t d = c.hidden_size, keys = heads_ * key_dim_;
  input_ = register_fused({{"q_proj.weight", {keys, d}},
                           {"k_proj.weight", {keys, d}},
                           {"v_proj.weight", {d, d}},
                           {"g_proj.0.weight", {rank_, d}}},
                          8);
  if (conv_width_) {
    conv_ = register_fused({{"q_conv1d.weight", {keys, 1, conv_width_}},
                            {"k_conv1d.weight", {keys, 1, conv_width_}},
                            {"v_conv1d.weight", {d, 1, conv_width_}}});
    conv_.keep_f32();
  }
  gate_ = register_parameter("g_proj.1.weight", Tensor::zeros({d, rank_}));
  if (c.elementwise_affine)
    norm_ = register_parameter("g_norm.weight", Tensor::full({d}, 1), WeightDecay::off);
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, d}));
}

struct LightNet::Projected {
  std::vector<Var> qkv;  // [...,H·K], [...,H·K], [...,H·V]; in one where a convolution follows
  Var gate;              // [...,H·V]
};
struct LightNet::Heads {
  Var q;  // [...,H,K]
  Var u;  // [...,H·K]
  Var v;  // [...,H,V]
};

LightNet::Projected LightNet::project(const Var& x) const {
  const int64_t keys = heads_ * key_dim_, values = heads_ * value_dim_;
  if (conv_width_) {
    const auto p = columns_of(linear(x, input_.var()), {2 * keys + values, rank_});
    return {{p[0]}, linear(p[1], gate_.var())};
  }
  const auto p = columns_of(linear(x, input_.var()), {keys, keys, values, rank_});
  return {{p[0], p[1], p[2]}, linear(p[3], gate_.var())};
}

// Of the projections, or of what the convolution makes of them.
LightNet::Heads LightNet::heads(const Projected& p, const Var& convolved) const {
  const int64_t keys = heads_ * key_dim_;
  const std::vector<Var> qkv =
      conv_width_ ? split(convolved, -1, {keys, keys, heads_ * value_dim_}) : p.qkv;
  return {in_heads(silu(qkv[0]), heads_), qkv[1], in_heads(qkv[2], heads_)};
}

Var LightNet::finish(const Var& o, const Var& gate, const Shape& lead) const {
  Shape flat = lead;
  flat.push_back(heads_ * value_dim_);
  return linear(head_norm(reshape(o, flat), gate, norm_, kNormEps), output_.var());
}

Var LightNet::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                      MixerState* final) {
  check(x.dim() == 3, "lightnet: x is {}, want [B,T,d]", x.shape());
  const auto state = [&](size_t i) { return initial ? Var(initial->tensors.at(i)) : Var(); };
  const Projected p = project(x);
  const CausalConv1d conv = conv_if_any(p.qkv[0], conv_, initial, 2, final, layout);
  const Heads h = heads(p, conv.y);
  const LogCumsumExp gate =
      log_cumsum_exp(h.u, state(1), {.want_final = final != nullptr, .layout = layout});
  const LinearAttentionOutput r =
      gated_linear_attention(h.q, in_heads(gate.k, heads_), h.v, in_heads(gate.g, heads_), state(0),
                             {.scale = 1 / std::sqrt(double(key_dim_)),
                              .want_final_state = final != nullptr,
                              .layout = layout});
  if (final) {
    final->tensors = {r.ht.value(), gate.z.value()};
    if (conv_width_) final->tensors.push_back(conv.final_state.value());
  }
  return finish(r.o, p.gate, x.shape().first(2));
}

Var LightNet::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "lightnet: x is {}, want [N,d]", x.shape());
  const Projected p = project(x);
  const Heads h = heads(p, conv_if_any_step(p.qkv[0].value(), conv_, state, 2));
  const LogCumsumExp gate =
      log_cumsum_exp(unsqueeze(h.u, 1), state.tensors.at(1), {.want_final = true});
  state.tensors[1] = gate.z.value();
  const auto last = [&](const Var& t) { return in_heads(select(t, 1, 0), heads_).value(); };
  const Tensor o =
      gated_linear_attention_step(h.q.value(), last(gate.k), h.v.value(), last(gate.g),
                                  state.tensors.at(0), {.scale = 1 / std::sqrt(double(key_dim_))});
  return finish(o, p.gate, x.shape().first(1));
}

MixerState LightNet::zero_state(int64_t n, DType activations, Device device) const {
  const DType wide = accumulate_type(activations);
  MixerState s{{Tensor::zeros({n, heads_, key_dim_, value_dim_}, wide, device),
                Tensor::full({n, heads_ * key_dim_}, -std::numeric_limits<double>::infinity(), wide,
                             device)}};
  const int64_t channels = heads_ * (2 * key_dim_ + value_dim_);
  if (conv_width_)
    s.tensors.push_back(Tensor::zeros({n, channels, conv_width_}, activations, device));
  return s;
}

Tensor LightNet::log_decays(const Var& h) const {
  const NoGrad off;
  const Projected p = project(h);
  const Var convolved = conv_if_any(p.qkv[0], conv_, nullptr, 2, nullptr, {}).y;
  return in_heads(log_cumsum_exp(heads(p, convolved).u, {}).g, heads_).value();
}

}  // namespace

std::unique_ptr<Mixer> make_lightnet(const ModelConfig& config) {
  return std::make_unique<LightNet>(config);
}

}  // namespace ebb
