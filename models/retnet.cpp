#include <cmath>

#include "autograd/tape.h"
#include "models/attention_mixers.h"
#include "models/head_norm.h"
#include "models/heads.h"
#include "ops/gated_linear_attention.h"
#include "ops/matmul.h"
#include "ops/rotary.h"
#include "tensor/check.h"

namespace ebb {
namespace {

class RetNet : public Mixer {
 public:
  explicit RetNet(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;
  Tensor log_decays(const Var& h) const override;

 private:
  struct Projected;
  Projected project(const Var& x) const;
  Var finish(const Var& o, const Var& gate) const;
  Tensor decays(const Shape& lead, DType activations, Device device) const;

  int64_t heads_, kv_heads_;  // of q and the output; of k and v
  int64_t key_dim_, value_dim_;
  bool gated_;  // the output
  double eps_;
  Parameter input_;  // rows q | k | v | gate
  Parameter o_norm_, output_;
};

RetNet::RetNet(const ModelConfig& c)
    : heads_(c.num_heads),
      kv_heads_(c.key_heads()),
      key_dim_(c.gla_key_width() / c.num_heads),
      value_dim_(c.gla_value_width() / c.num_heads),
      gated_(c.use_output_gate),
      eps_(c.norm_eps) {
  const int64_t d = c.hidden_size, values = heads_ * value_dim_;
  std::vector<FusedPart> rows = {{"q_proj.weight", {heads_ * key_dim_, d}},
                                 {"k_proj.weight", {kv_heads_ * key_dim_, d}},
                                 {"v_proj.weight", {kv_heads_ * value_dim_, d}}};
  if (gated_) rows.push_back({"g_proj.weight", {values, d}});
  input_ = register_fused(rows);
  if (c.elementwise_affine)
    o_norm_ = register_parameter(gated_ ? "g_norm_swish_gate.weight" : "g_norm.weight",
                                 Tensor::full({value_dim_}, 1), WeightDecay::off);
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, values}));
}

struct RetNet::Projected {
  Var q, k;     // [...,H,K]
  Var v, gate;  // [...,H,V]; the gate undefined without one
};

RetNet::Projected RetNet::project(const Var& x) const {
  const int64_t gate = gated_ ? heads_ * value_dim_ : 0;
  const auto p = columns_of(linear(x, input_.var()), {heads_ * key_dim_, kv_heads_ * key_dim_,
                                                      kv_heads_ * value_dim_, gate});
  const auto shared = [&](const Var& t) { return repeated_heads(in_heads(t, kv_heads_), heads_); };
  return {in_heads(p[0], heads_), shared(p[1]), shared(p[2]),
          gated_ ? in_heads(p[3], heads_) : Var()};
}

Var RetNet::finish(const Var& o, const Var& gate) const {
  return linear(from_heads(head_norm(o, gate, o_norm_, eps_)), output_.var());
}

// [...,H]: log(1 − 2^{−5−h}) of every token.
Tensor RetNet::decays(const Shape& lead, DType activations, Device device) const {
  std::vector<double> g;
  for (int64_t h = 0; h < heads_; ++h) g.push_back(std::log1p(-std::exp2(-5.0 - double(h))));
  Shape ones, all = lead;
  for (size_t i = 0; i < size_t(lead.size()); ++i) ones.push_back(1);
  ones.push_back(heads_);
  all.push_back(heads_);
  return Tensor::from(g, {heads_}).to(accumulate_type(activations), device).view(ones).expand(all);
}

Var RetNet::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                    MixerState* final) {
  check(x.dim() == 3, "retnet: x is {}, want [B,T,d]", x.shape());
  const Projected p = project(x);
  const Tensor position = initial ? initial->tensors.at(1) : Tensor();
  const RotaryOptions turn{.start = position ? position.to(x.value().device()) : Tensor(),
                           .layout = layout};
  const LinearAttentionOutput r =
      gated_linear_attention(rotary(p.q, turn), rotary(p.k, turn), p.v,
                             decays(x.shape().first(2), x.dtype(), x.value().device()),
                             initial ? Var(initial->tensors.at(0)) : Var(),
                             {.scale = 1 / std::sqrt(double(key_dim_)),
                              .want_final_state = final != nullptr,
                              .layout = layout});
  if (final)
    final->tensors = {r.ht.value(),
                      positions_after(position, lengths_of(layout, x.size(0), x.size(1)))};
  return finish(r.o, p.gate);
}

Var RetNet::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "retnet: x is {}, want [N,d]", x.shape());
  const Projected p = project(x);
  const RotaryOptions turn{.start = state.tensors.at(1).to(x.value().device())};
  const auto turned = [&](const Var& t) {
    return select(rotary(unsqueeze(t, 1), turn), 1, 0).value();
  };
  const Tensor o =
      gated_linear_attention_step(turned(p.q), turned(p.k), p.v.value(),
                                  decays(x.shape().first(1), x.dtype(), x.value().device()),
                                  state.tensors.at(0), {.scale = 1 / std::sqrt(double(key_dim_))});
  state.tensors[1] = positions_after(state.tensors[1], std::vector<int64_t>(size_t(x.size(0)), 1));
  return finish(o, p.gate);
}

MixerState RetNet::zero_state(int64_t n, DType activations, Device device) const {
  return {{Tensor::zeros({n, heads_, key_dim_, value_dim_}, accumulate_type(activations), device),
           Tensor::zeros({n}, DType::i64)}};
}

Tensor RetNet::log_decays(const Var& h) const {
  return decays(h.shape().first(2), h.dtype(), h.value().device());
}

}  // namespace

std::unique_ptr<Mixer> make_retnet(const ModelConfig& config) {
  return std::make_unique<RetNet>(config);
}

}  // namespace ebb
