// How much of its state a model keeps from token to token: the decays that it uses on a given text,
// whatever rule makes them (models.md 11.6).
//   DecayUse use = measure_decays(*model, tokens);
//   use.layers[3].median;   // of e^g over the tokens, heads and channels of layer 3
// The decay study found models best where the median is around 0.8.
#pragma once
#include <nlohmann/json.hpp>
#include <vector>

#include "models/calibrate.h"

namespace ebb {

// Of many decays e^g in [0,1]. Quantiles lie between neighbours as far as their position does.
struct DecaySpread {
  int64_t values = 0;
  double median = 0, lower_quartile = 0, upper_quartile = 0;
  double mean = 0, deviation = 0;  // of all, divided by their number
  double least = 0, most = 0;
};
// Of the log decays g, which are put in another order. All NaN where one is.
DecaySpread decay_spread(std::vector<float>& g);

struct DecayUse {
  int64_t tokens = 0;
  std::vector<DecaySpread> layers = {};  // empty: a model without decays
  DecaySpread all = {};                  // of all layers
};
// tokens i64 [B,T]. In the model's dtype, on its device; keeps all decays in memory, 4 bytes each.
DecayUse measure_decays(const LanguageModel& model, const Tensor& tokens,
                        const LayerDone& done = {});

// {"tokens", "layers": [{"layer", "median", ...}], "all": {"median", ...}}
nlohmann::json to_json(const DecayUse& use);

}  // namespace ebb
