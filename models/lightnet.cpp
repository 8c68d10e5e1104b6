#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "models/attention_mixers.h"
#include "models/heads.h"
#include "ops/elementwise.h"
#include "ops/gated_linear_attention.h"
#include "ops/gated_rms_norm.h"
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
  Var finish(const Var& o, const Var& gate, const Shape& lead) const;

  int64_t heads_, key_dim_, value_dim_, rank_;
  Parameter input_;  // rows q | k | v | first matrix of the gate
  Parameter gate_, norm_, output_;
};

LightNet::LightNet(const ModelConfig& c)
    : heads_(c.num_heads),
      key_dim_(c.expand_ratio),
      value_dim_(c.hidden_size / c.num_heads),
      rank_(c.gate_low_rank_dim) {
  const int64_t d = c.hidden_size, keys = heads_ * key_dim_;
  input_ = register_fused({{"q_proj.weight", {keys, d}},
                           {"k_proj.weight", {keys, d}},
                           {"v_proj.weight", {d, d}},
                           {"g_proj.0.weight", {rank_, d}}},
                          8);
  gate_ = register_parameter("g_proj.1.weight", Tensor::zeros({d, rank_}));
  norm_ = register_parameter("g_norm.weight", Tensor::full({d}, 1), WeightDecay::off);
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, d}));
}

struct LightNet::Projected {
  Var q;     // [...,H,K]
  Var u;     // [...,H·K]
  Var v;     // [...,H,V]
  Var gate;  // [...,H·V]
};

LightNet::Projected LightNet::project(const Var& x) const {
  const int64_t keys = heads_ * key_dim_;
  const auto p = columns_of(linear(x, input_.var()), {keys, keys, heads_ * value_dim_, rank_});
  return {in_heads(silu(p[0]), heads_), p[1], in_heads(p[2], heads_), linear(p[3], gate_.var())};
}

Var LightNet::finish(const Var& o, const Var& gate, const Shape& lead) const {
  Shape flat = lead;
  flat.push_back(heads_ * value_dim_);
  return linear(gated_rms_norm(reshape(o, flat), gate, norm_.var(), {.eps = kNormEps}),
                output_.var());
}

Var LightNet::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                      MixerState* final) {
  check(x.dim() == 3, "lightnet: x is {}, want [B,T,d]", x.shape());
  const auto state = [&](size_t i) { return initial ? Var(initial->tensors.at(i)) : Var(); };
  const Projected p = project(x);
  const LogCumsumExp gate =
      log_cumsum_exp(p.u, state(1), {.want_final = final != nullptr, .layout = layout});
  const LinearAttentionOutput r =
      gated_linear_attention(p.q, in_heads(gate.k, heads_), p.v, in_heads(gate.g, heads_), state(0),
                             {.scale = 1 / std::sqrt(double(key_dim_)),
                              .want_final_state = final != nullptr,
                              .layout = layout});
  if (final) final->tensors = {r.ht.value(), gate.z.value()};
  return finish(r.o, p.gate, x.shape().first(2));
}

Var LightNet::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "lightnet: x is {}, want [N,d]", x.shape());
  const Projected p = project(x);
  const LogCumsumExp gate =
      log_cumsum_exp(unsqueeze(p.u, 1), state.tensors.at(1), {.want_final = true});
  state.tensors[1] = gate.z.value();
  const auto heads = [&](const Var& t) { return in_heads(select(t, 1, 0), heads_).value(); };
  const Tensor o =
      gated_linear_attention_step(p.q.value(), heads(gate.k), p.v.value(), heads(gate.g),
                                  state.tensors.at(0), {.scale = 1 / std::sqrt(double(key_dim_))});
  return finish(o, p.gate, x.shape().first(1));
}

MixerState LightNet::zero_state(int64_t n, DType activations, Device device) const {
  const DType wide = accumulate_type(activations);
  return {{Tensor::zeros({n, heads_, key_dim_, value_dim_}, wide, device),
           Tensor::full({n, heads_ * key_dim_}, -std::numeric_limits<double>::infinity(), wide,
                        device)}};
}

Tensor LightNet::log_decays(const Var& h) const {
  const NoGrad off;
  return in_heads(log_cumsum_exp(project(h).u, {}).g, heads_).value();
}

}  // namespace

std::unique_ptr<Mixer> make_lightnet(const ModelConfig& config) {
  return std::make_unique<LightNet>(config);
}

}  // namespace ebb
