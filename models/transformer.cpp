#include "models/attention_mixers.h"

#include "autograd/tape.h"
#include "models/heads.h"
#include "models/kv_cache.h"
#include "ops/attention.h"
#include "ops/matmul.h"
#include "ops/rms_norm.h"
#include "ops/rotary.h"
#include "tensor/check.h"

namespace ebb {
namespace {

constexpr float kNormEps = 1e-5f;  // of q and k, whatever norm_eps says

class SoftmaxAttention : public Mixer {
 public:
  explicit SoftmaxAttention(const ModelConfig& config);
  Var forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
              MixerState* final) override;
  Var step(const Var& x, MixerState& state) override;
  MixerState zero_state(int64_t n, DType activations, Device device) const override;

 private:
  struct Projected;
  // start: the first position of every sequence (undefined: 0), on x's device.
  Projected project(const Var& x /*[B,T,d]*/, const Tensor& start, const SeqLayout& layout) const;

  int64_t heads_, key_heads_, head_dim_, window_;
  double rope_base_;
  KvCache cache_;
  Parameter input_, bias_;     // rows q | k | v
  Parameter q_norm_, k_norm_;  // [P]; undefined: none
  Parameter output_;
};

SoftmaxAttention::SoftmaxAttention(const ModelConfig& c)
    : heads_(c.num_heads),
      key_heads_(c.key_heads()),
      head_dim_(c.hidden_size / c.num_heads),
      window_(c.window_size.value_or(0)),
      rope_base_(c.rope_theta),
      cache_(key_heads_, head_dim_, window_) {
  const int64_t d = c.hidden_size, keys = key_heads_ * head_dim_;
  input_ = register_fused(
      {{"q_proj.weight", {d, d}}, {"k_proj.weight", {keys, d}}, {"v_proj.weight", {keys, d}}});
  if (c.qkv_bias) {
    bias_ = register_fused({{"q_proj.bias", {d}}, {"k_proj.bias", {keys}}, {"v_proj.bias", {keys}}},
                           1, WeightDecay::off);
    bias_.keep_f32();
  }
  if (c.qk_norm) {
    q_norm_ = register_parameter("q_norm.weight", Tensor::full({head_dim_}, 1), WeightDecay::off);
    k_norm_ = register_parameter("k_norm.weight", Tensor::full({head_dim_}, 1), WeightDecay::off);
  }
  output_ = register_parameter("o_proj.weight", Tensor::zeros({d, d}));
}

struct SoftmaxAttention::Projected {
  Var q;     // [B,T,H,P]
  Var k, v;  // [B,T,Hkv,P]
};

SoftmaxAttention::Projected SoftmaxAttention::project(const Var& x, const Tensor& start,
                                                      const SeqLayout& layout) const {
  const int64_t keys = key_heads_ * head_dim_;
  const Var bias = bias_.defined() ? flatten(bias_.var(), 0, 1) : Var();
  const auto p = columns_of(linear(x, input_.var(), bias), {heads_ * head_dim_, keys, keys});
  const auto turned = [&](const Var& t, int64_t heads, const Parameter& norm) {
    Var y = in_heads(t, heads);
    if (norm.defined()) y = rms_norm(y, norm.var(), kNormEps);
    return rotary(y, {.base = rope_base_, .start = start, .layout = layout});
  };
  return {turned(p[0], heads_, q_norm_), turned(p[1], key_heads_, k_norm_),
          in_heads(p[2], key_heads_)};
}

Var SoftmaxAttention::forward(const Var& x, const SeqLayout& layout, const MixerState* initial,
                              MixerState* final) {
  check(x.dim() == 3, "transformer: x is {}, want [B,T,d]", x.shape());
  const Device device = x.value().device();
  const Tensor start = initial ? initial->tensors.at(2).to(device) : Tensor();
  const Projected p = project(x, start, layout);
  Var o;
  if (initial) {
    const KvCache::Extended e = cache_.extend(initial, p.k.value(), p.v.value(), layout);
    const Shape flat{1, x.size(0) * x.size(1), heads_, head_dim_};
    o = attention(reshape(p.q, flat), e.keys, e.values,
                  {.window = window_, .layout = e.queries, .key_layout = e.layout})
            .o;
    o = reshape(o, p.q.shape());
  } else {
    o = attention(p.q, p.k, p.v, {.window = window_, .layout = layout}).o;
  }
  if (final) *final = cache_.after(initial, p.k.value(), p.v.value(), layout);
  return linear(from_heads(o), output_.var());
}

Var SoftmaxAttention::step(const Var& x, MixerState& state) {
  const NoGrad off;
  check(x.dim() == 2, "transformer: x is {}, want [N,d]", x.shape());
  cache_.reserve_next(&state);
  const Tensor position = state.tensors.at(2).to(x.value().device());
  const Projected p = project(unsqueeze(x, 1), position, {});
  const auto token = [](const Var& t) { return select(t, 1, 0).value(); };
  const Tensor o = attention_step(token(p.q), token(p.k), token(p.v), state.tensors.at(0),
                                  state.tensors.at(1), position, {.window = window_});
  state.tensors[2] = positions_after(state.tensors[2], std::vector<int64_t>(size_t(x.size(0)), 1));
  return linear(from_heads(o), output_.var());
}

MixerState SoftmaxAttention::zero_state(int64_t n, DType activations, Device device) const {
  return cache_.zero_state(n, activations, device);
}

}  // namespace

std::unique_ptr<Mixer> make_softmax_attention(const ModelConfig& config) {
  return std::make_unique<SoftmaxAttention>(config);
}

}  // namespace ebb
