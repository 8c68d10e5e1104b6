// A tiny model with room for the byte vocabulary, for tests that need one to run.
#pragma once
#include <memory>
#include <string>

#include "models/language_model.h"

namespace ebb::testing {

inline std::unique_ptr<LanguageModel> small_model(uint64_t seed = 1,
                                                  const std::string& type = "gated_deltanet") {
  ModelConfig config;
  if (type == "mamba2" || type == "dart") {
    config = preset(type + "-100m");
    config.expand = 1;
    config.state_size = 24;
    config.sma_chunk = 8;
  }
  if (type == "rwkv7") config = preset("rwkv7-100m");
  config.vocab_size = 300;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.head_dim = 16;
  config.initializer_range = 0.3;  // far from ties
  auto model = make_model(config);
  init_weights(*model, seed);
  if (type == "dart")  // its gates, which begin closed
    for (const NamedParameter& p : model->named_parameters())
      if (p.name.ends_with("g_proj.weight")) init_normal(p, seed, 0.3);
  if (type == "rwkv7")  // whose native rule leaves every residual branch at zero
    for (const NamedParameter& p : model->named_parameters())
      if (p.shape.size() == 2) init_normal(p, seed, config.initializer_range);
  return model;
}

}  // namespace ebb::testing
