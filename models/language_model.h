// LanguageModel: embedding, pre-norm blocks of mixer and MLP, final norm, head.
//   auto model = make_model(preset("gdn-100m"));
//   init_weights(*model, /*seed=*/42);
//   Var loss = model->loss(batch.tokens, batch.labels, batch.layout).loss;
//   Decoding: DecodeState s; logits = model->prefill(ids, layout, &s); logits = model->step(next,
//   &s);
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "models/config.h"
#include "models/rwkv_channel_mix.h"
#include "models/toeplitz.h"
#include "nn/layers.h"
#include "nn/mixer.h"

namespace ebb {

struct DecodeState {
  // Each tensor [N, ...]; of the mixer, then of an RWKV MLP. A position encoding that looks along
  // time (rpe tpe) stands behind the last layer.
  std::vector<MixerState> layers;
  // The given rows of every tensor, in order (repeats allowed).
  DecodeState select(const std::vector<int64_t>& rows) const;
};

// x + mixer(norm(x)), then x + mlp(norm(x)); Mamba-2's and DART's blocks end after the mixer.
// RWKV-7's first block normalises the residual stream itself, and its MLP looks one token back.
class Block : public Module {
 public:
  Block(const ModelConfig& config, std::unique_ptr<Mixer> mixer, int64_t layer);
  Mixer& mixer() const { return *mixer_; }
  // What the mixer is given where the residual stream is x.
  Var normed_input(const Var& x) const {
    return norm_.forward(pre_norm_ ? pre_norm_->forward(x) : x);
  }
  MixerState zero_state(int64_t n, DType activations, Device device) const;

  // The residual stream travels as two terms, x = delta + stream, so that the add is fused into
  // the next norm. delta may be undefined (first block). With residual_in_fp32, stream is f32
  // beside bf16 activations. shared: what the mixers share (nn/mixer.h).
  struct Stream {
    Var delta, stream, shared = {};
  };
  Stream forward(const Stream& in, const SeqLayout& layout, const MixerState* initial,
                 MixerState* final) const;
  Var mixer_input(const Stream& in) const;  // what forward gives the mixer
  Stream step(const Stream& in, MixerState& state) const;

 private:
  Stream finish(const Var& mixed, const Stream& before) const;
  Stream finish_rwkv(const Var& mixed, const Stream& before, const SeqLayout& layout,
                     const Tensor& last, MixerState* final) const;

  std::unique_ptr<Norm> pre_norm_;  // RWKV-7's first block
  Norm norm_;
  std::unique_ptr<Mixer> mixer_;
  std::unique_ptr<Norm> mlp_norm_;  // null, as the MLP, where there is none
  std::unique_ptr<SwigluMlp> mlp_;
  std::unique_ptr<RwkvChannelMix> channel_mix_;
  int64_t hidden_;
  bool f32_stream_;
};

class LanguageModel : public Module {
 public:
  explicit LanguageModel(const ModelConfig& config);
  const ModelConfig& config() const { return config_; }
  int64_t layers() const { return int64_t(body_.blocks.size()); }
  Block& block(int64_t l) const { return *body_.blocks.at(size_t(l)); }
  const ToeplitzEncoding* positions() const { return body_.positions.get(); }  // rpe tpe, or null
  Device device() const;
  DType activation_dtype() const;  // bf16 with shadows enabled, else the masters' dtype

  // tokens i64 [B,T] on the model's device -> [B,T,d] after the final norm. `initial`: the states
  // before the tokens (null: fresh); `final` receives those after them (null: not wanted). `trace`
  // sees the residual stream: index -1 after the embedding, l after block l.
  using Trace = std::function<void(int64_t, const Var&)>;
  Var hidden(const Tensor& tokens, const SeqLayout& layout = {},
             const DecodeState* initial = nullptr, DecodeState* final = nullptr,
             const Trace& trace = {}) const;
  // [...,d] -> [...,V], in the activations' dtype or in the one asked for (f32).
  Var logits(const Var& hidden, std::optional<DType> dtype = {}) const;
  Var embed(const Tensor& tokens) const { return body_.embeddings.forward(tokens); }
  // What the first block is given: the embedding, and behind it what depends on positions alone.
  Block::Stream enter(const Tensor& tokens, const SeqLayout& layout = {},
                      const DecodeState* initial = nullptr, DecodeState* final = nullptr) const;

  struct LossResult {
    Var loss;           // scalar: sum of -log p over the labelled tokens / count
    Tensor token_loss;  // [B,T], 0 where the label is ignored; [n] where `rows` are given
  };
  // labels i64 [B,T], already shifted: what each position is to predict, -100 to leave it out.
  // `count`: device scalar to divide by (undefined: the number of labels in this batch). `rows` i64
  // [n] on the device: positions among the B·T that alone pass the head, where few have a label.
  // `positions`: what use_l2warp divides by, the tokens of all micro-batches (0: of this batch).
  LossResult loss(const Tensor& tokens, const Tensor& labels, const SeqLayout& layout = {},
                  const Tensor& count = {}, const Tensor& rows = {}, int64_t positions = 0) const;

  // Decoding, nothing is recorded. prefill: logits [N,V] after the last token of every sequence;
  // an empty sequence is an error. `state` may hold what precedes the tokens, and is replaced.
  Tensor prefill(const Tensor& tokens, const SeqLayout& layout, DecodeState* state) const;
  Tensor step(const Tensor& tokens /*[N]*/, DecodeState* state) const;
  DecodeState zero_state(int64_t n) const;

  // Frozen scales of the decays (RWKV-7, ModelConfig::frozen_decay_scale), from now on part of the
  // state.
  void use_decay_scales();

  // A tied head is saved beside the embedding that it equals, as it was found.
  void store_tied_head() { stored_head_ = config_.tie_word_embeddings; }
  StateDict stored_state() const;  // state_dict(), with that head

  void set_recompute(bool on) { recompute_ = on; }  // activation checkpointing, block by block

 private:
  struct Body : Module {
    explicit Body(const ModelConfig& config);
    Embedding embeddings;
    std::unique_ptr<ToeplitzEncoding> positions;  // rpe tpe
    Parameter lower_bounds;                       // [L,H·K], hgrn2's
    std::vector<std::unique_ptr<Block>> blocks;
    Norm norm;
  };
  Var head_weight() const;
  Var close(const Block::Stream& s) const;

  ModelConfig config_;
  Body body_;
  std::unique_ptr<Linear> lm_head_;  // null when tied to the embedding
  bool recompute_ = false, stored_head_ = false;
};

// The mixer that the config's model_type names, for a layer. lower_bounds: hgrn2's, of all layers.
std::unique_ptr<Mixer> make_mixer(const ModelConfig& config, int64_t layer,
                                  const Parameter& lower_bounds = {});
// The architecture with zero weights, on the CPU, in f32.
std::unique_ptr<LanguageModel> make_model(const ModelConfig& config);
// The public "normal" rule (Mamba-2: models/mamba2.h, RWKV-7: models/rwkv7.h): N(0,
// initializer_range²) for matrices, conv kernels, embedding and head, ones for norms, native decay
// gates. Tensors are drawn by (seed, name).
void init_weights(LanguageModel& model, uint64_t seed);

}  // namespace ebb
