#include "models/calibrate.h"

#include <algorithm>
#include <cmath>

#include "autograd/tape.h"
#include "models/rwkv7.h"
#include "ops/elementwise.h"
#include "tensor/check.h"

namespace ebb {
namespace {

DecayGate gate_of(const Block& block, int64_t layer) {
  const auto gate = block.mixer().decay_gate_parameters();
  check(gate.has_value(), "calibrate: layer {} has no decay gate", layer);
  return *gate;
}

// One head's pre-activations, [tokens·channels] in f64.
std::vector<double> head_sample(const Tensor& z /*[tokens,H·channels]*/, int64_t head,
                                int64_t channels) {
  return z.slice(1, head * channels, (head + 1) * channels).to_vector<double>();
}

// Walks the blocks on `tokens` in f32. visit(layer, z) sees each layer's pre-activations before
// the block runs, and may change its gate.
template <class Visit>
void walk(LanguageModel& model, const Tensor& tokens, const LayerDone& done, Visit visit) {
  const NoGrad off;
  check(model.activation_dtype() != DType::bf16,
        "calibrate: enable bf16 after calibration; activations are f32 here");
  Block::Stream s = model.enter(tokens.to(model.device()));
  for (int64_t l = 0; l < model.layers(); ++l) {
    Block& block = model.block(l);
    const Var x = s.delta.defined() ? add(s.delta, s.stream) : s.stream;
    visit(l, block.mixer().gate_preactivations(block.normed_input(x).value()));
    s = block.forward(s, {}, nullptr, nullptr);
    if (done) done(l);
  }
}

std::vector<HeadReport> measure_layer(const Block& block, int64_t layer, const Tensor& z) {
  const DecayGate gate = gate_of(block, layer);
  const auto A_log = gate.A_log.master().to_vector<double>(),
             dt_bias = gate.dt_bias.master().to_vector<double>();
  std::vector<HeadReport> out;
  for (int64_t h = 0; h < gate.heads; ++h) {
    // Channel biases around their mean, so that one number describes the head.
    double mean = 0;
    for (int64_t c = 0; c < gate.channels; ++c)
      mean += dt_bias[size_t(h * gate.channels + c)] / double(gate.channels);
    std::vector<double> offsets;
    for (int64_t c = 0; c < gate.channels; ++c)
      offsets.push_back(dt_bias[size_t(h * gate.channels + c)] - mean);
    const HeadGate g = measure_head(head_sample(z, h, gate.channels), offsets, mean,
                                    A_log[size_t(h)], gate.response);
    out.push_back({.layer = layer,
                   .head = h,
                   .sensitivity = g.sensitivity,
                   .timescale = g.timescale,
                   .A_log = g.A_log,
                   .dt_bias = g.dt_bias});
  }
  return out;
}

// DAMI of Mamba-2: m_l, of geometric mean 1.
std::vector<double> step_multipliers(const DamiOptions& options, int64_t layers) {
  constexpr int64_t kDepth = 18;  // of the profile
  const std::vector<double> profile = sensitivity_profile(options, kDepth);
  std::vector<double> m;
  double log_mean = 0;
  for (int64_t l = 0; l < layers; ++l) {
    const double x =
        layers > 1 ? double(l * (kDepth - 1)) / double(layers - 1) : 0.5 * (kDepth - 1);
    const size_t below = std::min(size_t(x), size_t(kDepth - 2));
    m.push_back(std::lerp(profile[below], profile[below + 1], x - double(below)));
    log_mean += std::log(m.back()) / double(layers);
  }
  for (double& x : m) x /= std::exp(log_mean);
  return m;
}

// The name of the layer's dt_bias: what its native values are drawn by.
std::string name_of(const LanguageModel& model, const Parameter& parameter) {
  for (const NamedParameter& p : model.named_parameters())
    if (p.parameter.slot() == parameter.slot()) return p.name;
  fail("calibrate: a gate's parameter is not one of the model's");
}

// The gates without data: z = 0.
std::vector<HeadReport> static_gates(const LanguageModel& model) {
  std::vector<HeadReport> report;
  for (int64_t l = 0; l < model.layers(); ++l) {
    const DecayGate gate = gate_of(model.block(l), l);
    const Tensor z = Tensor::zeros({1, gate.heads * gate.channels});
    for (const HeadReport& r : measure_layer(model.block(l), l, z)) report.push_back(r);
  }
  return report;
}

std::vector<HeadReport> calibrate_static(LanguageModel& model, const DamiOptions& options,
                                         const Tensor& tokens, const LayerDone& done) {
  const std::vector<double> m = step_multipliers(options, model.layers());
  std::vector<double> tau;
  for (int64_t l = 0; l < model.layers(); ++l) {
    const DecayGate gate = gate_of(model.block(l), l);
    tau = timescale_ladder(options, gate.heads);
    const std::vector<float> native =
        native_dt_bias(options.seed, name_hash(name_of(model, gate.dt_bias)), gate.heads);
    std::vector<float> A_log, dt_bias;
    for (int64_t h = 0; h < gate.heads; ++h) {
      const double step = softplus(double(native[size_t(h)]));
      dt_bias.push_back(float(inverse_softplus(m[size_t(l)] * step)));
      A_log.push_back(float(-std::log(tau[size_t(h)]) - std::log(step)));
    }
    gate.A_log.master().copy_(Tensor::from(A_log, {gate.heads}));
    gate.dt_bias.master().copy_(Tensor::from(dt_bias, {gate.heads}));
  }
  std::vector<HeadReport> report =
      tokens ? measure_gates(model, tokens, done) : static_gates(model);
  for (HeadReport& r : report) r.target_timescale = tau[size_t(r.head)] / m[size_t(r.layer)];
  return report;
}

// RWKV-7's native biases, and scales of e^{-1/2}.
void apply_native_scales(LanguageModel& model) {
  const ModelConfig& c = model.config();
  for (int64_t l = 0; l < model.layers(); ++l) {
    const DecayGate gate = gate_of(model.block(l), l);
    gate.A_log.master().fill_(-0.5);
    gate.dt_bias.master().copy_(
        Tensor::from(native_rwkv7_decay_bias(l, model.layers(), c.hidden_size, c.head_dim),
                     gate.dt_bias.master().shape()));
  }
}

// RWKV-7: `change` sees each layer's gate with its scales and biases [H·channels], and both are
// written back.
template <class Change>
void change_scales(LanguageModel& model, Change change) {
  model.use_decay_scales();
  for (int64_t l = 0; l < model.layers(); ++l) {
    const DecayGate gate = gate_of(model.block(l), l);
    std::vector<double> bias = gate.dt_bias.master().to_vector<double>();
    std::vector<float> A_log(static_cast<size_t>(gate.heads));
    change(l, gate, bias, A_log);
    gate.A_log.master().copy_(Tensor::from(A_log, {gate.heads}));
    gate.dt_bias.master().copy_(
        Tensor::from(std::vector<float>(bias.begin(), bias.end()), gate.dt_bias.master().shape()));
  }
}

std::span<double> head_biases(std::vector<double>& bias, const DecayGate& gate, int64_t head) {
  return std::span(bias).subspan(size_t(head * gate.channels), size_t(gate.channels));
}

// DAMI of RWKV-7, from the biases alone: those of a head are shifted together so that their mean
// sigmoid is the layer's target, and the scale gives the head its timescale.
std::vector<HeadReport> calibrate_scales(LanguageModel& model, const DamiOptions& options,
                                         const Tensor& tokens, const LayerDone& done) {
  const std::vector<double> profile = sensitivity_profile(options, model.layers());
  std::vector<double> tau;
  change_scales(model, [&](int64_t l, const DecayGate& gate, auto& bias, auto& A_log) {
    tau = timescale_ladder(options, gate.heads);
    const std::vector<double> silent(static_cast<size_t>(gate.channels));  // z
    for (int64_t h = 0; h < gate.heads; ++h) {
      const std::span<double> own = head_biases(bias, gate, h);
      const HeadGate g = solve_head(silent, own, profile[size_t(l)], tau[size_t(h)], gate.response);
      for (double& b : own) b += g.dt_bias;
      A_log[size_t(h)] = float(g.A_log);
    }
  });
  std::vector<HeadReport> report =
      tokens ? measure_gates(model, tokens, done) : static_gates(model);
  for (HeadReport& r : report) {
    r.target_sensitivity = profile[size_t(r.layer)];
    r.target_timescale = tau[size_t(r.head)];
  }
  return report;
}

}  // namespace

bool has_decay_gates(const LanguageModel& model) {
  for (int64_t l = 0; l < model.layers(); ++l)
    if (!model.block(l).mixer().decay_gate_parameters()) return false;
  return true;
}

std::vector<HeadReport> calibrate_dami(LanguageModel& model, const DamiOptions& options,
                                       const Tensor& tokens, const LayerDone& done) {
  if (model.config().is_mamba2()) return calibrate_static(model, options, tokens, done);
  if (model.config().is_rwkv7()) return calibrate_scales(model, options, tokens, done);
  const std::vector<double> profile = sensitivity_profile(options, model.layers());
  std::vector<HeadReport> report;
  walk(model, tokens, done, [&](int64_t l, const Tensor& z) {
    const DecayGate gate = gate_of(model.block(l), l);
    const std::vector<double> tau = timescale_ladder(options, gate.heads);
    std::vector<float> A_log, dt_bias;
    for (int64_t h = 0; h < gate.heads; ++h) {
      std::vector<double> offsets;  // of the channels around the head's dt_bias
      if (gate.channels > 1) offsets = channel_offsets(options.seed, l, h, gate.channels);
      const HeadGate g =
          solve_head(head_sample(z, h, gate.channels), offsets, profile[size_t(l)], tau[size_t(h)]);
      A_log.push_back(float(g.A_log));
      for (int64_t c = 0; c < gate.channels; ++c)
        dt_bias.push_back(float(g.dt_bias + (offsets.empty() ? 0 : offsets[size_t(c)])));
    }
    gate.A_log.master().copy_(Tensor::from(A_log, {gate.heads}));
    gate.dt_bias.master().copy_(Tensor::from(dt_bias, gate.dt_bias.master().shape()));
    for (HeadReport r : measure_layer(model.block(l), l, z)) {
      r.target_sensitivity = profile[size_t(l)];
      r.target_timescale = tau[size_t(r.head)];
      report.push_back(r);
    }
  });
  return report;
}

void apply_post(LanguageModel& model, double train_length) {
  if (model.config().is_rwkv7())
    return change_scales(model, [&](int64_t, const DecayGate& gate, auto& bias, auto& A_log) {
      const std::vector<double> tau = timescale_ladder({.tau_max = train_length}, gate.heads);
      const std::vector<double> silent(static_cast<size_t>(gate.channels));
      for (int64_t h = 0; h < gate.heads; ++h) {
        const HeadGate g = measure_head(silent, head_biases(bias, gate, h), 0, 0, gate.response);
        A_log[size_t(h)] = float(std::log(g.timescale / tau[size_t(h)]));
      }
    });
  for (int64_t l = 0; l < model.layers(); ++l) {
    const DecayGate gate = gate_of(model.block(l), l);
    gate.A_log.master().copy_(Tensor::from(post_A_log(gate.heads, train_length), {gate.heads}));
  }
}

void apply_random_gates(LanguageModel& model, uint64_t seed) {
  if (model.config().is_rwkv7()) return apply_native_scales(model);
  const double low = model.config().model_type == "gated_deltanet" ? 0 : 1;
  for (const NamedParameter& p : model.named_parameters()) {
    const int64_t n = p.shape.numel();
    if (p.name.ends_with("A_log") && model.config().safe_gate)
      p.value().fill_(0);
    else if (p.name.ends_with("A_log"))
      p.value().copy_(Tensor::from(native_A_log(seed, name_hash(p.name), n, low), p.shape));
    if (p.name.ends_with("dt_bias"))
      p.value().copy_(Tensor::from(native_dt_bias(seed, name_hash(p.name), n), p.shape));
  }
}

std::vector<HeadReport> measure_gates(LanguageModel& model, const Tensor& tokens,
                                      const LayerDone& done) {
  std::vector<HeadReport> report;
  if (!has_decay_gates(model)) return report;
  walk(model, tokens, done, [&](int64_t l, const Tensor& z) {
    for (const HeadReport& r : measure_layer(model.block(l), l, z)) report.push_back(r);
  });
  return report;
}

}  // namespace ebb
