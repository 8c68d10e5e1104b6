#include "models/language_model.h"

#include "autograd/tape.h"
#include "models/attention_mixers.h"
#include "models/calibrate.h"
#include "models/dart.h"
#include "models/decay_study.h"
#include "models/delta.h"
#include "models/delta_channel.h"
#include "models/mamba2.h"
#include "models/rwkv7.h"
#include "ops/elementwise.h"
#include "ops/indexing.h"
#include "ops/linear_cross_entropy.h"
#include "ops/matmul.h"
#include "ops/movement.h"
#include "tensor/check.h"

namespace ebb {
namespace {

constexpr double kL2Wrap = 1e-4;

}  // namespace

DecodeState DecodeState::select(const std::vector<int64_t>& rows) const {
  const NoGrad off;
  DecodeState out;
  for (const MixerState& layer : layers) {
    MixerState s;
    for (const Tensor& t : layer.tensors) {
      s.tensors.push_back(
          index_select(t, 0, Tensor::from(rows, {int64_t(rows.size())}, t.device())).value());
    }
    out.layers.push_back(std::move(s));
  }
  return out;
}

namespace {

// The norms of a model are of one kind.
NormKind norm_kind(const ModelConfig& c) { return c.is_rwkv7() ? NormKind::layer : NormKind::rms; }
bool norm_bias(const ModelConfig& c) { return c.is_rwkv7() && c.norm_bias; }

}  // namespace

Block::Block(const ModelConfig& config, std::unique_ptr<Mixer> mixer, int64_t layer)
    : norm_(config.hidden_size, config.norm_eps, norm_kind(config), norm_bias(config)),
      mixer_(std::move(mixer)),
      hidden_(config.hidden_size),
      f32_stream_(config.residual_in_fp32) {
  if (config.is_mamba2()) {
    register_module("norm", norm_);
    register_module("mixer", *mixer_);
    return;
  }
  mlp_norm_ = std::make_unique<Norm>(config.hidden_size, config.norm_eps, norm_kind(config),
                                     norm_bias(config));
  if (config.is_rwkv7()) {
    if (layer == 0 && config.norm_first) {
      pre_norm_ = std::make_unique<Norm>(config.hidden_size, config.norm_eps, norm_kind(config),
                                         norm_bias(config));
      register_module("pre_norm", *pre_norm_);
    }
    channel_mix_ = std::make_unique<RwkvChannelMix>(config.hidden_size, config.mlp_width());
    register_module("attn_norm", norm_);
    register_module("attn", *mixer_);
    register_module("ffn_norm", *mlp_norm_);
    register_module("ffn", *channel_mix_);
    return;
  }
  mlp_ = std::make_unique<SwigluMlp>(config.hidden_size, config.mlp_width());
  register_module("attn_norm", norm_);
  register_module("attn", *mixer_);
  register_module("mlp_norm", *mlp_norm_);
  register_module("mlp", *mlp_);
}

namespace {

// norm(delta + stream) and the sum, whichever terms there are. A sum of one term is widened where
// the stream is to be f32; the norm has the dtype of the activations.
std::pair<Var, Var> normed(const Norm& norm, const Block::Stream& s, bool f32_stream) {
  if (s.delta.defined()) return norm.add_forward(s.delta, s.stream);
  const bool widen = f32_stream && s.stream.dtype() == DType::bf16;
  return {norm.forward(s.stream), widen ? cast(s.stream, DType::f32) : s.stream};
}

}  // namespace

Block::Stream Block::forward(const Stream& in, const SeqLayout& layout, const MixerState* initial,
                             MixerState* final) const {
  Stream before = in;
  if (pre_norm_) before.stream = pre_norm_->forward(in.stream);
  const auto [h, x] = normed(norm_, before, f32_stream_);
  before.stream = x;
  const Var mixed = mixer_->forward_sharing(h, &before.shared, layout, initial, final);
  if (channel_mix_)
    return finish_rwkv(mixed, before, layout, initial ? initial->tensors.back() : Tensor(), final);
  return finish(mixed, before);
}

Var Block::mixer_input(const Stream& in) const {
  Stream before = in;
  if (pre_norm_) before.stream = pre_norm_->forward(in.stream);
  return normed(norm_, before, f32_stream_).first;
}

Block::Stream Block::step(const Stream& in, MixerState& state) const {
  Stream before = in;
  if (pre_norm_) before.stream = pre_norm_->forward(in.stream);
  const auto [h, x] = normed(norm_, before, f32_stream_);
  before.stream = x;
  const Var mixed = mixer_->step_sharing(h, &before.shared, state);
  if (!channel_mix_) return finish(mixed, before);
  const auto [m, y] = normed(*mlp_norm_, {mixed, x}, f32_stream_);
  return {channel_mix_->step(m, state.tensors.back()), y, before.shared};
}

Block::Stream Block::finish(const Var& mixed, const Stream& before) const {
  if (!mlp_) return {mixed, before.stream, before.shared};
  const auto [m, y] = normed(*mlp_norm_, {mixed, before.stream}, f32_stream_);
  return {mlp_->forward(m), y, before.shared};
}

Block::Stream Block::finish_rwkv(const Var& mixed, const Stream& before, const SeqLayout& layout,
                                 const Tensor& last, MixerState* final) const {
  const auto [m, y] = normed(*mlp_norm_, {mixed, before.stream}, f32_stream_);
  Tensor end;
  const Var mlp = channel_mix_->forward(m, layout, last, final ? &end : nullptr);
  if (final) final->tensors.push_back(end);
  return {mlp, y, before.shared};
}

MixerState Block::zero_state(int64_t n, DType activations, Device device) const {
  MixerState s = mixer_->zero_state(n, activations, device);
  if (channel_mix_) s.tensors.push_back(Tensor::zeros({n, hidden_}, activations, device));
  return s;
}

LanguageModel::Body::Body(const ModelConfig& config)
    : embeddings(config.vocab_size, config.hidden_size),
      norm(config.hidden_size, config.norm_eps, norm_kind(config), norm_bias(config)) {
  register_module("embeddings", embeddings);
  if (config.model_type == "decay_study" && config.rpe == "tpe") {
    positions = std::make_unique<ToeplitzEncoding>(config);
    register_module("tpe", *positions);
  }
  const bool study = config.model_type == "decay_study" && config.decay.type == "hgrn2";
  if (study || (config.model_type == "hgrn2" && config.use_lower_bound)) {
    const int64_t bounds = !study                    ? config.num_heads * config.expand_ratio
                           : config.decay.by_channel ? config.hidden_size
                                                     : config.num_heads;
    lower_bounds = register_parameter(
        "lower_bounds", Tensor::zeros({config.num_hidden_layers, bounds}), WeightDecay::off);
    lower_bounds.keep_f32();
  }
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
    blocks.push_back(std::make_unique<Block>(config, make_mixer(config, l, lower_bounds), l));
    register_module(fmt::format("layers.{}", l), *blocks.back());
  }
  register_module(config.is_mamba2() ? "norm_f" : "norm", norm);
}

LanguageModel::LanguageModel(const ModelConfig& config) : config_(config), body_(config) {
  register_module(config.is_mamba2() ? "backbone" : "model", body_);
  if (config.tie_word_embeddings) return;
  lm_head_ = std::make_unique<Linear>(config.hidden_size, config.vocab_size);
  register_module("lm_head", *lm_head_);
}

Device LanguageModel::device() const { return body_.norm.weight().master().device(); }

DType LanguageModel::activation_dtype() const { return body_.embeddings.weight().var().dtype(); }

StateDict LanguageModel::stored_state() const {
  StateDict state = state_dict();
  if (stored_head_) state.emplace_back("lm_head.weight", body_.embeddings.weight().master());
  return state;
}

Var LanguageModel::head_weight() const {
  return lm_head_ ? lm_head_->weight().var() : body_.embeddings.weight().var();
}

Var LanguageModel::close(const Block::Stream& s) const {
  return normed(body_.norm, s, false).first;
}

Block::Stream LanguageModel::enter(const Tensor& tokens, const SeqLayout& layout,
                                   const DecodeState* initial, DecodeState* final) const {
  const Var x = embed(tokens);
  if (!body_.positions) return {{}, x};
  return {body_.positions->forward(x, layout, initial ? &initial->layers.back() : nullptr,
                                   final ? &final->layers.back() : nullptr),
          x};
}

Var LanguageModel::hidden(const Tensor& tokens, const SeqLayout& layout, const DecodeState* initial,
                          DecodeState* final, const Trace& trace) const {
  check(tokens.dim() == 2, "language model: tokens are {}, want [B,T]", tokens.shape());
  if (final) final->layers.assign(body_.blocks.size() + (body_.positions ? 1 : 0), {});
  Block::Stream s = enter(tokens, layout, initial, final);
  if (trace) trace(-1, s.delta.defined() ? add(s.delta, s.stream) : s.stream);
  for (size_t l = 0; l < body_.blocks.size(); ++l) {
    const Block& b = *body_.blocks[l];
    const MixerState* before = initial ? &initial->layers.at(l) : nullptr;
    MixerState* after = final ? &final->layers[l] : nullptr;
    if (recompute_ && grad_enabled() && !before && !after) {
      std::vector<Var> terms;
      for (const Var& v : {s.delta, s.stream, s.shared})
        if (v.defined()) terms.push_back(v);
      const bool first = !s.delta.defined(), shares = s.shared.defined();
      const std::vector<Var> out = recompute(
          [&b, layout, first, shares](std::span<const Var> in) {
            const Block::Stream o =
                b.forward({first ? Var() : in[0], in[first ? 0 : 1], shares ? in.back() : Var()},
                          layout, nullptr, nullptr);
            std::vector<Var> made{o.delta, o.stream};
            if (!shares && o.shared.defined()) made.push_back(o.shared);
            return made;
          },
          terms);
      s = {out[0], out[1], out.size() > 2 ? out[2] : s.shared};
    } else {
      s = b.forward(s, layout, before, after);
    }
    if (trace) trace(int64_t(l), add(s.delta, s.stream));
  }
  return close(s);
}

Var LanguageModel::logits(const Var& hidden, std::optional<DType> dtype) const {
  return linear(hidden, head_weight(), {}, {.output = dtype});
}

LanguageModel::LossResult LanguageModel::loss(const Tensor& tokens, const Tensor& labels,
                                              const SeqLayout& layout, const Tensor& count,
                                              const Tensor& rows, int64_t positions) const {
  check(labels.shape() == tokens.shape(), "language model: labels are {}, tokens {}",
        labels.shape(), tokens.shape());
  const Var h = hidden(tokens, layout);
  const int64_t n = tokens.numel();
  const Var flat = reshape(h, {n, h.shape().back()});
  const Tensor targets = labels.reshape({n});
  const LinearCrossEntropyOptions options{.count = count,
                                          .l2_wrap = config_.use_l2warp ? kL2Wrap : 0,
                                          .l2_wrap_rows = positions ? positions : n};
  if (rows) {
    const CrossEntropy r = linear_cross_entropy(index_select(flat, 0, rows), head_weight(),
                                                index_select(targets, 0, rows).value(), options);
    return {r.loss, r.token_loss};
  }
  const CrossEntropy r = linear_cross_entropy(flat, head_weight(), targets, options);
  return {r.loss, r.token_loss.view(tokens.shape())};
}

DecodeState LanguageModel::zero_state(int64_t n) const {
  DecodeState s;
  for (const auto& b : body_.blocks)
    s.layers.push_back(b->zero_state(n, activation_dtype(), device()));
  if (body_.positions)
    s.layers.push_back(body_.positions->zero_state(n, activation_dtype(), device()));
  return s;
}

Tensor LanguageModel::prefill(const Tensor& tokens, const SeqLayout& layout,
                              DecodeState* state) const {
  const NoGrad off;
  check(tokens.dim() == 2, "prefill: tokens are {}, want [B,T]", tokens.shape());
  const int64_t B = tokens.size(0), T = tokens.size(1), N = layout.count(B);
  DecodeState after;
  const Tensor h = hidden(tokens, layout, state->layers.empty() ? nullptr : state, &after).value();
  const Tensor flat = h.reshape({B * T, h.shape().back()});
  Tensor last = Tensor::empty({N, h.shape().back()}, h.dtype(), h.device());
  for (int64_t n = 0; n < N; ++n) {
    check(layout.end(n, T) > layout.begin(n, T), "prefill: sequence {} is empty", n);
    copy(last.select(0, n), flat.select(0, layout.end(n, T) - 1));
  }
  *state = std::move(after);
  return logits(last).value();
}

Tensor LanguageModel::step(const Tensor& tokens, DecodeState* state) const {
  const NoGrad off;
  check(tokens.dim() == 1, "step: tokens are {}, want [N]", tokens.shape());
  if (state->layers.empty()) *state = zero_state(tokens.size(0));
  Block::Stream s{{}, embed(tokens)};
  if (body_.positions) s.delta = body_.positions->step(s.stream, state->layers.back());
  for (size_t l = 0; l < body_.blocks.size(); ++l)
    s = body_.blocks[l]->step(s, state->layers.at(l));
  return logits(close(s)).value();
}

void LanguageModel::use_decay_scales() {
  config_.frozen_decay_scale = true;
  for (const auto& b : body_.blocks) b->mixer().use_decay_scales();
}

std::unique_ptr<Mixer> make_mixer(const ModelConfig& config, int64_t layer,
                                  const Parameter& lower_bounds) {
  const std::string& type = config.model_type;
  if (type == "gla") return make_gla(config);
  if (type == "hgrn2") return make_hgrn2(config, layer, lower_bounds);
  if (type == "lightnet") return make_lightnet(config);
  if (type == "decay_study") return make_decay_study(config, layer, lower_bounds);
  if (type == "retnet") return make_retnet(config);
  if (type == "transformer") return make_softmax_attention(config);
  if (config.model_type == "kda") return std::make_unique<ChannelDeltaNet>(config, DeltaGates::kda);
  if (config.model_type == "gdn2")
    return std::make_unique<ChannelDeltaNet>(config, DeltaGates::gdn2);
  if (config.is_dart()) return std::make_unique<Dart>(config);
  if (config.is_mamba2()) return std::make_unique<Mamba2>(config);
  if (config.is_rwkv7()) return std::make_unique<Rwkv7>(config, layer);
  check(config.model_type == "gated_deltanet", "model_type {} has no mixer", config.model_type);
  return std::make_unique<GatedDeltaNet>(config);
}

std::unique_ptr<LanguageModel> make_model(const ModelConfig& config) {
  return std::make_unique<LanguageModel>(config);
}

void init_weights(LanguageModel& model, uint64_t seed) {
  if (model.config().model_type == "decay_study") return init_decay_study_weights(model, seed);
  if (model.config().is_rwkv7()) return init_rwkv7_weights(model, seed);
  if (model.config().is_mamba2()) {
    init_mamba2_weights(model, seed);
    return apply_random_gates(model, seed);
  }
  for (const NamedParameter& p : model.named_parameters()) {
    if (p.shape.size() == 1)
      p.value().fill_(p.name.ends_with("bias") ? 0 : 1);
    else if (p.name.ends_with("lower_bounds"))
      p.value().fill_(0);
    else
      init_normal(p, seed, model.config().initializer_range);
    p.parameter.refresh_shadow();
  }
  apply_random_gates(model, seed);
}

}  // namespace ebb
