#include "models/config.h"

#include <algorithm>
#include <cmath>

#include "models/config_reader.h"
#include "tensor/check.h"

namespace ebb {

using nlohmann::json;

int64_t ModelConfig::v_dim() const { return int64_t(std::llround(double(head_dim) * expand_v)); }

int64_t ModelConfig::mlp_width() const {
  if (intermediate_size) return *intermediate_size;
  const int64_t raw = hidden_size * hidden_ratio * 2 / 3;
  return 256 * ((raw + 255) / 256);
}

namespace {

void read_fields(ConfigReader* r, ModelConfig* c) {
  r->require("model_type", &c->model_type);
  r->read("vocab_size", &c->vocab_size);
  r->read("hidden_size", &c->hidden_size);
  r->read("num_hidden_layers", &c->num_hidden_layers);
  r->read("num_heads", &c->num_heads);
  r->read("num_v_heads", &c->num_v_heads);
  r->read("head_dim", &c->head_dim);
  r->read("expand_v", &c->expand_v);
  r->read("conv_size", &c->conv_size);
  r->read("use_short_conv", &c->use_short_conv);
  r->read("use_gate", &c->use_gate);
  r->read("allow_neg_eigval", &c->allow_neg_eigval);
  if (c->model_type == "kda") {
    r->read("safe_gate", &c->safe_gate);
    r->read("lower_bound", &c->lower_bound);
  }
  r->read("hidden_ratio", &c->hidden_ratio);
  r->read("intermediate_size", &c->intermediate_size);
  r->read("norm_eps", &c->norm_eps);
  r->read("initializer_range", &c->initializer_range);
  r->read("tie_word_embeddings", &c->tie_word_embeddings);
  r->read("use_l2warp", &c->use_l2warp);
  r->read("hidden_act", &c->hidden_act);
}

// What makes sense and what this version computes.
void validate(ConfigReader* r, const ModelConfig& c) {
  const std::vector<std::string>& types = model_types();
  if (std::find(types.begin(), types.end(), c.model_type) == types.end()) {
    const std::string near = closest(c.model_type, types);
    r->error("model_type", fmt::format("\"{}\" is not supported{}", c.model_type,
                                       near.empty() ? "" : "; did you mean " + near + "?"));
  }
  const auto positive = [&](const char* key, int64_t v) {
    if (v < 1) r->error(key, fmt::format("must be at least 1, got {}", v));
  };
  positive("vocab_size", c.vocab_size);
  positive("hidden_size", c.hidden_size);
  positive("num_hidden_layers", c.num_hidden_layers);
  positive("num_heads", c.num_heads);
  positive("num_v_heads", c.v_heads());
  positive("head_dim", c.head_dim);
  positive("conv_size", c.conv_size);
  positive("intermediate_size", c.mlp_width());
  if (c.num_heads > 0 && c.v_heads() % c.num_heads != 0)
    r->error("num_v_heads",
             fmt::format("{} is not a multiple of num_heads {}", c.v_heads(), c.num_heads));
  if (c.v_dim() < 1 || std::abs(double(c.head_dim) * c.expand_v - double(c.v_dim())) > 1e-6)
    r->error("expand_v", fmt::format("head_dim·expand_v = {} is not a whole number of channels",
                                     double(c.head_dim) * c.expand_v));
  if (!(c.norm_eps > 0)) r->error("norm_eps", fmt::format("must be positive, got {}", c.norm_eps));
  if (!(c.initializer_range >= 0))
    r->error("initializer_range", fmt::format("must not be negative, got {}", c.initializer_range));
  if (c.lower_bound && !(*c.lower_bound < 0))
    r->error("lower_bound", fmt::format("must be negative, got {}", *c.lower_bound));
  if (c.safe_gate && !c.lower_bound)
    r->error("lower_bound", "is missing; safe_gate = true asks for a bounded gate");
  if (!c.use_short_conv) r->error("use_short_conv", "false is not supported");
  if (!c.use_gate) r->error("use_gate", "false is not supported");
  if (c.use_l2warp) r->error("use_l2warp", "true is not supported");
  if (c.hidden_act != "swish" && c.hidden_act != "silu")
    r->error("hidden_act", fmt::format("\"{}\" is not supported; want swish", c.hidden_act));
}

}  // namespace

const std::vector<std::string>& model_types() {
  static const std::vector<std::string> types = {"gated_deltanet", "kda", "gdn2"};
  return types;
}

ModelConfig parse_model_config(const json& object, const std::string& path,
                               const std::string& what) {
  ConfigReader r(object, path);
  ModelConfig c;
  read_fields(&r, &c);
  validate(&r, c);
  r.finish(what);
  return c;
}

ModelConfig parse_foreign_config(const json& object, const std::string& file) {
  ConfigReader r(object, "", ConfigReader::Unknown::keep);
  ModelConfig c;
  read_fields(&r, &c);
  validate(&r, c);
  if (const json attn = r.raw("attn"); !attn.is_null())
    r.error("attn", "hybrid attention layers are not supported");
  if (const json block = r.raw("attnres_block_size"); !block.is_null())
    r.error("attnres_block_size", "attention residuals are not supported");
  r.finish(file);
  c.source = object;
  return c;
}

json ModelConfig::to_json() const {
  json j = source;
  j["model_type"] = model_type;
  j["vocab_size"] = vocab_size;
  j["hidden_size"] = hidden_size;
  j["num_hidden_layers"] = num_hidden_layers;
  j["num_heads"] = num_heads;
  j["num_v_heads"] = num_v_heads ? json(*num_v_heads) : json();
  j["head_dim"] = head_dim;
  j["expand_v"] = expand_v;
  j["conv_size"] = conv_size;
  j["use_short_conv"] = use_short_conv;
  j["use_gate"] = use_gate;
  j["allow_neg_eigval"] = allow_neg_eigval;
  j["hidden_ratio"] = hidden_ratio;
  j["intermediate_size"] = intermediate_size ? json(*intermediate_size) : json();
  j["norm_eps"] = norm_eps;
  j["initializer_range"] = initializer_range;
  j["tie_word_embeddings"] = tie_word_embeddings;
  j["use_l2warp"] = use_l2warp;
  j["hidden_act"] = hidden_act;
  if (model_type == "kda") {
    j["safe_gate"] = safe_gate;
    j["lower_bound"] = lower_bound ? json(*lower_bound) : json();
  }
  if (!j.contains("architectures"))
    j["architectures"] = {model_type == "kda"    ? "KDAForCausalLM"
                          : model_type == "gdn2" ? "GatedDeltaNet2ForCausalLM"
                                                 : "GatedDeltaNetForCausalLM"};
  return j;
}

std::vector<std::string> preset_names() { return {"gdn-100m", "kda-100m", "gdn2-100m"}; }

ModelConfig preset(const std::string& name) {
  ModelConfig c;  // the sizes of all three
  if (name == "gdn-100m") return c;
  if (name == "kda-100m" || name == "gdn2-100m") {
    c.model_type = name.substr(0, name.find('-'));
    return c;
  }
  const std::string near = closest(name, preset_names());
  std::string names;
  for (const std::string& n : preset_names()) names += (names.empty() ? "" : ", ") + n;
  fail("preset '{}' does not exist{}; there are: {}", name,
       near.empty() ? "" : " (did you mean " + near + "?)", names);
}

}  // namespace ebb
