#include "models/attention_mixers.h"

#include <cmath>

#include "autograd/tape.h"
#include "models/heads.h"
#include "ops/elementwise.h"
#include "ops/forget_gate.h"
#include "ops/gated_linear_attention.h"
#include "ops/gated_rms_norm.h"
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
  Var finish(const Var& o, const Var& gate) const;

  int64_t heads_, key_dim_, value_dim_, rank_;
  double eps_, divisor_;
  Parameter input_;  // rows q | k | v | gate | first matrix of z
  Parameter decay_, decay_bias_, o_norm_, output_;
};

Gla::Gla(const ModelConfig& c)
    : heads_(c.num_heads),
      key_dim_(c.gla_key_width() / c.num_heads),
      value_dim_(c.gla_value_width() / c.num_heads),
      rank_(c.gate_low_rank_dim),
      eps_(c.norm_eps),
      divisor_(c.gate_logit_normalizer) {
  const int64_t d = c.hidden_size, keys = c.gla_key_width(), values = c.gla_value_width();
  // Eight rows at a time, so that every row of the product starts at a 16-byte boundary.
  input_ = register_fused({{"q_proj.weight", {keys, d}},
                           {"k_proj.weight", {keys, d}},
                           {"v_proj.weight", {values, d}},
                           {"g_proj.weight", {values, d}},
                           {"gk_proj.0.weight", {rank_, d}}},
                          8);
  decay_ = register_parameter("gk_proj.1.weight", Tensor::zeros({keys, rank_}));
  decay_bias_ = register_parameter("gk_proj.1.bias", Tensor::zeros({keys}), WeightDecay::off);
  o_norm_ = register_parameter("g_norm_swish_gate.weight", Tensor::full({value_dim_}, 1),
                               WeightDecay::off);
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, values}));
}

struct Gla::Projected {
  Var q, k;     // [...,H,K]
  Var v, gate;  // [...,H,V]
  Var g;        // [...,H,K]
};

Gla::Projected Gla::project(const Var& x) const {
  const int64_t keys = heads_ * key_dim_, values = heads_ * value_dim_;
  const auto p = columns_of(linear(x, input_.var()), {keys, keys, values, values, rank_});
  const Var z = linear(p[4], decay_.var(), decay_bias_.var());
  const auto heads = [&](const Var& t) { return in_heads(t, heads_); };
  return {heads(p[0]), heads(p[1]), heads(p[2]), heads(p[3]),
          heads(forget_gate(z, {.divisor = divisor_}))};
}

Var Gla::finish(const Var& o, const Var& gate) const {
  const Var y = gated_rms_norm(o, gate, o_norm_.var(), {.eps = float(eps_)});
  return linear(from_heads(y), output_.var());
}

Var Gla::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                 MixerState* final) {
  check(x.dim() == 3, "gla: x is {}, want [B,T,d]", x.shape());
  const Projected p = project(x);
  const LinearAttentionOutput r =
      gated_linear_attention(p.q, p.k, p.v, p.g, initial ? Var(initial->tensors.at(0)) : Var(),
                             {.scale = 1 / std::sqrt(double(key_dim_)),
                              .want_final_state = final != nullptr,
                              .layout = layout});
  if (final) final->tensors = {r.ht.value()};
  return finish(r.o, p.gate);
}

Var Gla::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "gla: x is {}, want [N,d]", x.shape());
  const Projected p = project(x);
  const Tensor o =
      gated_linear_attention_step(p.q.value(), p.k.value(), p.v.value(), p.g.value(),
                                  state.tensors.at(0), {.scale = 1 / std::sqrt(double(key_dim_))});
  return finish(o, p.gate);
}

MixerState Gla::zero_state(int64_t n, DType activations, Device device) const {
  return {{Tensor::zeros({n, heads_, key_dim_, value_dim_}, accumulate_type(activations), device)}};
}

Tensor Gla::log_decays(const Var& h) const {
  const NoGrad off;
  return project(h).g.value();
}

}  // namespace

std::unique_ptr<Mixer> make_gla(const ModelConfig& config) { return std::make_unique<Gla>(config); }

}  // namespace ebb
