#include "models/attention_mixers.h"

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "models/head_norm.h"
#include "models/heads.h"
#include "models/short_conv.h"
#include "ops/elementwise.h"
#include "ops/forget_gate.h"
#include "ops/gated_linear_attention.h"
#include "ops/matmul.h"
#include "tensor/check.h"

namespace ebb {
namespace {

class Gla : public Mixer {
 public:
  explicit Gla(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  Projected project(const Var& x) const;
  struct Heads;
  Heads heads(const std::vector<Var>& qkv) const;
  std::vector<int64_t> qkv_widths() const;
  Var shared_heads(const Var& x) const;
  Var finish(const Var& o, const Var& gate) const;

  int64_t heads_, kv_heads_;  // of q and the output; of k, v and the decays
  int64_t key_dim_, value_dim_, rank_;
  int64_t conv_width_;  // 0: no convolution, and no activation either
  bool gated_;          // the output
  double eps_, divisor_, least_;
  Parameter input_;  // rows q | k | v | gate | first matrix of z
  Parameter conv_;   // [channels of q | k | v, W], undefined without
  Parameter decay_, decay_bias_, o_norm_, output_;
};

Gla::Gla(const ModelConfig& c)
    : heads_(c.num_heads),
      kv_heads_(c.key_heads()),
      key_dim_(c.gla_key_width() / c.num_heads),
      value_dim_(c.gla_value_width() / c.num_heads),
      rank_(c.gate_low_rank_dim),
      conv_width_(c.use_short_conv ? c.conv_size : 0),
      gated_(c.use_output_gate),
      eps_(c.norm_eps),
      divisor_(c.gate_logit_normalizer),
      least_(c.clamp_min.value_or(-std::numeric_limits<double>::infinity())) {
  const int64_t d = c.hidden_size, values = heads_ * value_dim_;
  const int64_t queries = heads_ * key_dim_, keys = kv_heads_ * key_dim_;
  std::vector<FusedPart> rows = {{"q_proj.weight", {queries, d}},
                                 {"k_proj.weight", {keys, d}},
                                 {"v_proj.weight", {kv_heads_ * value_dim_, d}}};
  if (gated_) rows.push_back({"g_proj.weight", {values, d}});
  rows.push_back({"gk_proj.0.weight", {rank_, d}});
  // Eight rows at a time, so that every row of the product starts at a 16-byte boundary.
  input_ = register_fused(rows, 8);
  if (conv_width_) {
    conv_ = register_fused({{"q_conv1d.weight", {queries, 1, conv_width_}},
                            {"k_conv1d.weight", {keys, 1, conv_width_}},
                            {"v_conv1d.weight", {kv_heads_ * value_dim_, 1, conv_width_}}});
    conv_.keep_f32();
  }
  decay_ = register_parameter("gk_proj.1.weight", Tensor::zeros({keys, rank_}));
  decay_bias_ = register_parameter("gk_proj.1.bias", Tensor::zeros({keys}), WeightDecay::off);
  if (c.elementwise_affine)
    o_norm_ = register_parameter(gated_ ? "g_norm_swish_gate.weight" : "g_norm.weight",
                                 Tensor::full({value_dim_}, 1), WeightDecay::off);
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, values}));
}

struct Gla::Projected {
  std::vector<Var> qkv;  // [...,H·K], [...,G·K], [...,G·V]; in one where a convolution follows
  Var gate;              // [...,H,V], undefined without
  Var g;                 // [...,H,K]
};
struct Gla::Heads {
  Var q, k, v;  // [...,H,K], [...,H,K], [...,H,V]
};

// A head of k, v or g for each of q: every one stands for as many as share it.
Var Gla::shared_heads(const Var& x) const { return repeated_heads(in_heads(x, kv_heads_), heads_); }

Gla::Projected Gla::project(const Var& x) const {
  std::vector<int64_t> widths = qkv_widths();
  if (conv_width_) widths = {widths[0] + widths[1] + widths[2]};
  widths.push_back(gated_ ? heads_ * value_dim_ : 0);
  widths.push_back(rank_);
  std::vector<Var> p = columns_of(linear(x, input_.var()), widths);
  p.resize(widths.size());
  const Var z = linear(p.back(), decay_.var(), decay_bias_.var()), gate = p[p.size() - 2];
  p.resize(p.size() - 2);
  Var g = forget_gate(z, {.divisor = divisor_});
  if (std::isfinite(least_)) g = clamp(g, least_, 0);
  return {p, gated_ ? in_heads(gate, heads_) : Var(), shared_heads(g)};
}

std::vector<int64_t> Gla::qkv_widths() const {
  return {heads_ * key_dim_, kv_heads_ * key_dim_, kv_heads_ * value_dim_};
}

Gla::Heads Gla::heads(const std::vector<Var>& qkv) const {
  return {in_heads(qkv[0], heads_), shared_heads(qkv[1]), shared_heads(qkv[2])};
}

Var Gla::finish(const Var& o, const Var& gate) const {
  return linear(from_heads(head_norm(o, gate, o_norm_, eps_)), output_.var());
}

Var Gla::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                 MixerState* final) {
  check(x.dim() == 3, "gla: x is {}, want [B,T,d]", x.shape());
  const Projected p = project(x);
  CausalConv1d conv;
  if (conv_width_) conv = conv_or_silu(p.qkv[0], conv_, initial, final, layout);
  const Heads h = heads(conv_width_ ? split(conv.y, -1, qkv_widths()) : p.qkv);
  const LinearAttentionOutput r =
      gated_linear_attention(h.q, h.k, h.v, p.g, initial ? Var(initial->tensors.at(0)) : Var(),
                             {.scale = 1 / std::sqrt(double(key_dim_)),
                              .want_final_state = final != nullptr,
                              .layout = layout});
  if (final) final->tensors = with_conv_state(r.ht.value(), conv);
  return finish(r.o, p.gate);
}

Var Gla::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "gla: x is {}, want [N,d]", x.shape());
  const Projected p = project(x);
  const auto convolved = [&] { return conv_or_silu_step(p.qkv[0].value(), conv_, state); };
  const Heads h = heads(conv_width_ ? split(convolved(), -1, qkv_widths()) : p.qkv);
  const Tensor o =
      gated_linear_attention_step(h.q.value(), h.k.value(), h.v.value(), p.g.value(),
                                  state.tensors.at(0), {.scale = 1 / std::sqrt(double(key_dim_))});
  return finish(o, p.gate);
}

MixerState Gla::zero_state(int64_t n, DType activations, Device device) const {
  MixerState s{
      {Tensor::zeros({n, heads_, key_dim_, value_dim_}, accumulate_type(activations), device)}};
  const int64_t channels = (heads_ + kv_heads_) * key_dim_ + kv_heads_ * value_dim_;
  if (conv_width_)
    s.tensors.push_back(Tensor::zeros({n, channels, conv_width_}, activations, device));
  return s;
}

Tensor Gla::log_decays(const Var& h) const {
  const NoGrad off;
  return project(h).g.value();
}

}  // namespace

std::unique_ptr<Mixer> make_gla(const ModelConfig& config) { return std::make_unique<Gla>(config); }

}  // namespace ebb
