#include "models/decays.h"

#include <algorithm>
#include <cmath>

#include "autograd/tape.h"
#include "tensor/check.h"

namespace ebb {

using nlohmann::json;

namespace {

// The value at `share` of the way from the least to the most.
double quantile(std::vector<float>& g, double share) {
  const double at = share * double(g.size() - 1);
  const auto below = g.begin() + std::ptrdiff_t(at);
  std::nth_element(g.begin(), below, g.end());
  const double low = std::exp(double(*below));
  if (below + 1 == g.end()) return low;
  const double high = std::exp(double(*std::min_element(below + 1, g.end())));
  return std::lerp(low, high, at - std::floor(at));
}

}  // namespace

DecaySpread decay_spread(std::vector<float>& g) {
  DecaySpread s;
  s.values = int64_t(g.size());
  if (g.empty()) return s;
  if (std::any_of(g.begin(), g.end(), [](float x) { return std::isnan(x); })) {
    for (double* x : {&s.median, &s.lower_quartile, &s.upper_quartile, &s.mean, &s.deviation,
                      &s.least, &s.most})
      *x = std::nan("");
    return s;
  }
  for (const float x : g) s.mean += std::exp(double(x)) / double(g.size());
  double squares = 0;
  for (const float x : g) squares += std::pow(std::exp(double(x)) - s.mean, 2);
  s.deviation = std::sqrt(squares / double(g.size()));
  s.lower_quartile = quantile(g, 0.25);
  s.median = quantile(g, 0.5);
  s.upper_quartile = quantile(g, 0.75);
  s.least = std::exp(double(*std::min_element(g.begin(), g.end())));
  s.most = std::exp(double(*std::max_element(g.begin(), g.end())));
  return s;
}

DecayUse measure_decays(const LanguageModel& model, const Tensor& tokens, const LayerDone& done) {
  const NoGrad off;
  check(tokens.dim() == 2, "decays: tokens are {}, want [B,T]", tokens.shape());
  DecayUse use{.tokens = tokens.numel()};
  std::vector<float> all;
  Block::Stream s = model.enter(tokens.to(model.device()));
  for (int64_t l = 0; l < model.layers(); ++l) {
    const Block& block = model.block(l);
    const Tensor g = block.mixer().log_decays(block.mixer_input(s));
    if (!g) return {.tokens = tokens.numel()};
    std::vector<float> values = g.to(DType::f32, Device::cpu()).to_vector<float>();
    use.layers.push_back(decay_spread(values));
    all.insert(all.end(), values.begin(), values.end());
    if (l + 1 < model.layers()) s = block.forward(s, {}, nullptr, nullptr);
    if (done) done(l);
  }
  use.all = decay_spread(all);
  return use;
}

namespace {

json spread_to_json(const DecaySpread& s) {
  return {{"values", s.values},
          {"median", s.median},
          {"lower_quartile", s.lower_quartile},
          {"upper_quartile", s.upper_quartile},
          {"mean", s.mean},
          {"deviation", s.deviation},
          {"least", s.least},
          {"most", s.most}};
}

}  // namespace

json to_json(const DecayUse& use) {
  json layers = json::array();
  for (size_t l = 0; l < use.layers.size(); ++l) {
    layers.push_back(spread_to_json(use.layers[l]));
    layers.back()["layer"] = l;
  }
  return {{"tokens", use.tokens}, {"layers", layers}, {"all", spread_to_json(use.all)}};
}

}  // namespace ebb
