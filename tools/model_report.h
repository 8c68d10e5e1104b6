// What a model is made of, as data for people and for JSON.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/calibrate.h"
#include "models/decays.h"
#include "models/language_model.h"

namespace ebb::tools {

struct ParameterLine {
  std::string name;  // within its layer: attn.q_proj.weight
  Shape shape;
  bool operator==(const ParameterLine&) const = default;
};
// Consecutive layers that hold the same tensors.
struct LayerGroup {
  int64_t first = 0, last = 0;
  std::vector<ParameterLine> parameters;
  int64_t per_layer = 0;  // elements
};
// What an optimizer treats alike.
struct OptimizerGroup {
  WeightDecay decay = WeightDecay::on;
  double lr_factor = 1;  // with "lr_factors" in a recipe; else all learn at one rate
  int64_t tensors = 0, elements = 0;
  std::vector<std::string> names = {};  // within a layer, each once
};
struct ModelReport {
  int64_t parameters = 0;
  std::vector<OptimizerGroup> groups = {};
  std::vector<ParameterLine> outside;  // embedding, final norm, head
  std::vector<LayerGroup> layers;
  struct State {
    std::string shape;  // "f32 [6,64,128]"
    int64_t elements = 0, bytes = 0;
  };
  std::vector<std::vector<State>> state;  // per layer, one sequence, f32 activations
  std::vector<State> position_state;      // of a position encoding that looks along time
  int64_t state_bytes_f32 = 0, state_bytes_bf16 = 0;
  int64_t cached_tokens = 0;  // whose keys and values are in it; 0: none are kept
  // What decoding keeps beside it and grows with the text: a DART's memories.
  struct Memories {
    int64_t context = 0, chunk = 0, runs = 0;      // tokens, tokens of a memory, memories
    int64_t state_size = 0, head_dim = 0;          // of a memory: N, P
    int64_t per_head = 0, attention_per_head = 0;  // elements; those of keys and values
    int64_t bytes_f32 = 0, bytes_bf16 = 0;         // of all heads and layers
    double ratio() const { return double(per_head) / double(attention_per_head); }
    double long_ratio() const { return double(state_size) / (2.0 * double(chunk)); }  // N/(2S)
  };
  std::optional<Memories> memories = {};
  // Bytes of the weights in f32; of a training run: master, gradient, two moments, bf16 shadows.
  int64_t weight_bytes = 0, training_bytes = 0;
};
// context: tokens that growing state is counted for.
ModelReport report_model(const LanguageModel& model, int64_t context = 4096);
void print_report(const ModelReport& report);
nlohmann::json to_json(const ModelReport& report);

// A row per layer and head: what was asked for and what was reached; "-" where there is none.
void print_targets(const std::vector<HeadReport>& gates);
// Timescales and sensitivities, a row per layer and a column per head.
void print_gates(const std::vector<HeadReport>& gates);
// Median and quartiles of the decays, a row per layer and one for all of them.
void print_decays(const DecayUse& use);

}  // namespace ebb::tools
