// Initial weights of the decay study (models/decay_study.h).
#include <algorithm>
#include <cmath>

#include "models/calibrate.h"
#include "models/decay_study.h"
#include "tensor/random.h"

namespace ebb {

std::vector<double> tnl_decays(int64_t layer, int64_t layers, int64_t heads) {
  std::vector<double> g;
  const double depth = layers > 1 ? double(layer) / double(layers - 1) : 0;
  for (int64_t h = 0; h < heads; ++h) {
    const double n = 2 * std::pow(128.0, heads > 1 ? double(h) / double(heads - 1) : 0);
    g.push_back(-(1 - depth + 1e-5) / n);
  }
  return g;
}

namespace {

// N(0, std²) cut off at three standard deviations: what lies beyond is drawn again.
void init_truncated_normal(const NamedParameter& p, uint64_t seed, double std) {
  const Tensor drawn = Tensor::empty(p.shape, DType::f32), again = Tensor::empty_like(drawn);
  fill_normal(drawn, {seed, name_hash(p.name)}, 0, std);
  float *x = drawn.data<float>(), *y = again.data<float>();
  const auto outside = [&](float v) { return std::abs(v) > 3 * std; };
  for (uint64_t round = 1; std::any_of(x, x + drawn.numel(), outside); ++round) {
    fill_normal(again, {seed, name_hash(p.name + "/" + std::to_string(round))}, 0, std);
    for (int64_t i = 0; i < drawn.numel(); ++i)
      if (outside(x[i])) x[i] = y[i];
  }
  p.value().copy_(drawn);
}

}  // namespace

void init_decay_study_weights(LanguageModel& model, uint64_t seed) {
  const ModelConfig& c = model.config();
  const bool fla = c.weight_init == "fla";
  const double p = c.decay.threshold;
  for (const NamedParameter& named : model.named_parameters()) {
    const auto is = [&](const char* end) { return named.name.ends_with(end); };
    if (is("lower_bounds"))
      named.value().fill_(1);
    else if (is(".delta"))
      named.value().fill_(std::log(p / (1 - p)));
    else if (is("tpe.decay"))
      named.value().fill_(0);
    else if (is("tpe.q") || is("tpe.k"))
      named.value().fill_(1);
    else if (is("tpe.o_proj.weight"))
      init_normal(named, seed, c.initializer_range);
    else if (is("attn.decay")) {
      const size_t at = named.name.find("layers.") + 7;
      const int64_t layer = std::stoll(named.name.substr(at));
      named.value().copy_(
          Tensor::from(tnl_decays(layer, c.num_hidden_layers, c.num_heads), {c.num_heads}));
    } else if (named.shape.size() == 1)
      named.value().fill_(is("bias") ? 0 : 1);
    else if (!fla && (is("attn.o_proj.weight") || is("mlp.down_proj.weight")))
      named.value().fill_(0);
    else if (fla)
      init_normal(named, seed, c.initializer_range);
    else
      init_truncated_normal(named, seed, c.initializer_range);
    named.parameter.refresh_shadow();
  }
  apply_random_gates(model, seed);
}

}  // namespace ebb
