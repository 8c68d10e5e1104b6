#include "models/config.h"

#include <algorithm>
#include <cmath>

#include "models/config_attention.h"
#include "models/config_mamba2.h"
#include "models/config_reader.h"
#include "tensor/check.h"

namespace ebb {

using nlohmann::json;

DecayConfig::DecayConfig() = default;

int64_t ModelConfig::v_dim() const { return int64_t(std::llround(double(head_dim) * expand_v)); }

int64_t ModelConfig::mlp_width() const {
  if (intermediate_size) return *intermediate_size;
  if (is_rwkv7()) return 32 * ((hidden_size * hidden_ratio + 31) / 32);
  const int64_t raw = hidden_size * hidden_ratio * 2 / 3;
  return 256 * ((raw + 255) / 256);
}

namespace {

// The sizes of rwkv7-100m.
ModelConfig rwkv7_defaults() {
  ModelConfig c;
  c.model_type = "rwkv7";
  c.num_hidden_layers = 20;
  c.num_heads = 8;
  c.expand_v = 1;
  c.norm_eps = 1e-5;
  c.hidden_act = "sqrelu";
  c.use_l2warp = true;
  return c;
}

}  // namespace

// null is 4 in the public library, whatever the model's own default.
void read_hidden_ratio(ConfigReader* r, ModelConfig* c) {
  std::optional<int64_t> ratio;
  if (r->has("hidden_ratio")) c->hidden_ratio = 4;
  r->read("hidden_ratio", &ratio);
  if (ratio) c->hidden_ratio = *ratio;
}

namespace {

// A rank given as null: about factor·√hidden_size in multiples of 32, as the public library's layer
// takes it (halves to even).
void read_rank(ConfigReader* r, const char* key, const ModelConfig& c, double factor,
               int64_t* rank) {
  std::optional<int64_t> given;
  r->read(key, &given);
  if (given) *rank = *given;
  if (given || !r->has(key) || c.hidden_size < 1 || c.head_dim < 1) return;
  const double width = std::min(factor * std::sqrt(double(c.hidden_size)), 1e12);
  *rank = std::max<int64_t>(32, 32 * int64_t(std::nearbyint(width / 32)));
}

void read_rwkv7_fields(ConfigReader* r, ModelConfig* c) {
  *c = rwkv7_defaults();
  r->read("hidden_size", &c->hidden_size);
  std::optional<int64_t> heads, head_dim;
  r->read("num_heads", &heads);
  r->read("head_dim", &head_dim);
  if (head_dim)
    c->head_dim = *head_dim;
  else if (r->has("head_dim") && heads && *heads > 0)  // where one is null, the other says it
    c->head_dim = c->hidden_size / *heads;
  c->num_heads = heads.value_or(c->head_dim > 0 ? c->hidden_size / c->head_dim : 0);
  read_hidden_ratio(r, c);
  r->read("intermediate_size", &c->intermediate_size);
  const double wide = double(c->head_dim) / 64;  // wider heads, higher ranks
  read_rank(r, "decay_low_rank_dim", *c, 2.5 * wide, &c->decay_low_rank_dim);
  read_rank(r, "gate_low_rank_dim", *c, 5, &c->gate_low_rank_dim);
  read_rank(r, "a_low_rank_dim", *c, 2.5 * wide, &c->a_low_rank_dim);
  read_rank(r, "v_low_rank_dim", *c, 1.7 * wide, &c->v_low_rank_dim);
  r->read("norm_first", &c->norm_first);
  r->read("norm_bias", &c->norm_bias);
  r->read("frozen_decay_scale", &c->frozen_decay_scale);
}

void read_delta_fields(ConfigReader* r, ModelConfig* c) {
  r->read("hidden_size", &c->hidden_size);
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
  read_hidden_ratio(r, c);
  r->read("intermediate_size", &c->intermediate_size);
}

void read_fields(ConfigReader* r, ModelConfig* c) {
  r->require("model_type", &c->model_type);
  is_attention_model(c->model_type) ? read_attention_fields(r, c)
  : c->is_mamba2()                  ? read_mamba2_fields(r, c)
  : c->is_rwkv7()                   ? read_rwkv7_fields(r, c)
                                    : read_delta_fields(r, c);
  r->read("vocab_size", &c->vocab_size);
  r->read("num_hidden_layers", &c->num_hidden_layers);
  r->read("norm_eps", &c->norm_eps);
  r->read("initializer_range", &c->initializer_range);
  r->read("tie_word_embeddings", &c->tie_word_embeddings);
  r->read("use_l2warp", &c->use_l2warp);
  r->read("hidden_act", &c->hidden_act);
}

// Bounds keep products of sizes within 64 bits and a slip of the keyboard from filling memory.
constexpr int64_t kMost = int64_t(1) << 31;

void validate_rwkv7(ConfigReader* r, const ModelConfig& c) {
  if (c.num_heads * c.head_dim != c.hidden_size)
    r->error("num_heads", fmt::format("{} heads of {} are not hidden_size = {}", c.num_heads,
                                      c.head_dim, c.hidden_size));
  if (c.head_dim > 256)
    r->error("head_dim", fmt::format("must be at most 256, got {}", c.head_dim));
}

void validate_delta(ConfigReader* r, const ModelConfig& c) {
  if (c.num_heads > 0 && c.v_heads() % c.num_heads != 0)
    r->error("num_v_heads",
             fmt::format("{} is not a multiple of num_heads {}", c.v_heads(), c.num_heads));
  const double width = double(c.head_dim) * c.expand_v;
  if (!(width >= 1 && width <= double(kMost)) || std::abs(width - double(c.v_dim())) > 1e-6)
    r->error("expand_v",
             fmt::format("head_dim·expand_v = {} is not a whole number of channels", width));
  if (c.lower_bound && !(*c.lower_bound < 0))
    r->error("lower_bound", fmt::format("must be negative, got {}", *c.lower_bound));
  if (c.safe_gate && !c.lower_bound)
    r->error("lower_bound", "is missing; safe_gate = true asks for a bounded gate");
  if (!c.use_gate && c.model_type != "gated_deltanet")
    r->error("use_gate", fmt::format("false is not supported by {}", c.model_type));
}

// What makes sense and what this version computes.
void validate(ConfigReader* r, const ModelConfig& c) {
  const std::vector<std::string>& types = model_types();
  if (std::find(types.begin(), types.end(), c.model_type) == types.end()) {
    const std::string near = closest(c.model_type, types);
    r->error("model_type", fmt::format("\"{}\" is not supported{}", c.model_type,
                                       near.empty() ? "" : "; did you mean " + near + "?"));
  }
  bool sizes = true;
  const auto within = [&](const char* key, int64_t v, int64_t most) {
    if (v >= 1 && v <= most) return;
    sizes = false;
    r->error(key, v < 1 ? fmt::format("must be at least 1, got {}", v)
                        : fmt::format("must be at most {}, got {}", most, v));
  };
  within("vocab_size", c.vocab_size, kMost);
  within("hidden_size", c.hidden_size, kMost);
  within("num_hidden_layers", c.num_hidden_layers, 10000);
  within("num_heads", c.num_heads, kMost);
  within("head_dim", c.head_dim, kMost);
  if (c.is_mamba2()) {
    within("state_size", c.state_size, kMost);
    within("expand", c.expand, kMost);
    within("n_groups", c.n_groups, kMost);
    within("chunk_size", c.chunk_size, kMost);
    within("conv_kernel", c.conv_size, 1024);
    if (sizes) validate_mamba2(r, c);
  } else if (c.is_rwkv7()) {
    if (!c.intermediate_size) within("hidden_ratio", c.hidden_ratio, 1 << 20);
    if (sizes) within("intermediate_size", c.mlp_width(), kMost);
    for (const auto& [key, rank] : {std::pair{"decay_low_rank_dim", c.decay_low_rank_dim},
                                    {"gate_low_rank_dim", c.gate_low_rank_dim},
                                    {"a_low_rank_dim", c.a_low_rank_dim},
                                    {"v_low_rank_dim", c.v_low_rank_dim}})
      within(key, rank, kMost);
    if (sizes) validate_rwkv7(r, c);
  } else if (is_attention_model(c.model_type)) {
    validate_attention(r, c);
  } else {
    within("num_v_heads", c.v_heads(), kMost);
    within("conv_size", c.conv_size, 1024);
    if (!c.intermediate_size) within("hidden_ratio", c.hidden_ratio, 1 << 20);
    if (sizes) within("intermediate_size", c.mlp_width(), kMost);
    validate_delta(r, c);
  }
  if (!(c.norm_eps > 0)) r->error("norm_eps", fmt::format("must be positive, got {}", c.norm_eps));
  if (!(c.initializer_range >= 0))
    r->error("initializer_range", fmt::format("must not be negative, got {}", c.initializer_range));
  if (c.is_rwkv7() && c.hidden_act != "sqrelu")
    r->error("hidden_act", fmt::format("\"{}\" is not supported; want sqrelu", c.hidden_act));
  if (!c.is_rwkv7() && c.hidden_act != "swish" && c.hidden_act != "silu")
    r->error("hidden_act", fmt::format("\"{}\" is not supported; want swish", c.hidden_act));
}

// Fields of foreign configs that change what is computed, with the one value that this version has.
void check_foreign(ConfigReader* r, const ModelConfig& c) {
  if (const json attn = r->raw("attn"); !attn.is_null())
    r->error("attn", "hybrid attention layers are not supported");
  if (const json block = r->raw("attnres_block_size"); !block.is_null())
    r->error("attnres_block_size", "attention residuals are not supported");
  if (c.is_rwkv7()) {
    const json widths = r->raw("value_dim");
    const json one = c.hidden_size;
    if (!widths.is_null() && widths != one &&
        widths != json(std::vector<int64_t>(size_t(c.num_hidden_layers), c.hidden_size)))
      r->error("value_dim", fmt::format("{} is not supported; want hidden_size {} in every layer",
                                        widths.dump(), c.hidden_size));
  }
  if (is_attention_model(c.model_type)) return check_foreign_attention(r, c);
  if (!c.is_mamba2()) return;
  std::vector<std::pair<const char*, bool>> only = {{"D_has_hdim", false}};
  if (c.is_dart())
    only.insert(only.end(), {{"use_bias", false}, {"rmsnorm", true}, {"norm_before_gate", false}});
  for (const auto& [key, want] : only)
    if (const json given = r->raw(key); !given.is_null() && given != json(want))
      r->error(key, fmt::format("{} is not supported", given.dump()));
}

}  // namespace

const std::vector<std::string>& model_types() {
  static const std::vector<std::string> types = {
      "gated_deltanet", "kda",      "gdn2",   "mamba2",      "dart",       "rwkv7", "gla",
      "hgrn2",          "lightnet", "retnet", "transformer", "decay_study"};
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
  check_foreign(&r, c);
  r.finish(file);
  c.source = object;
  return c;
}

namespace {

void write_rwkv7_fields(json* out, const ModelConfig& c) {
  json& j = *out;
  j["num_heads"] = c.num_heads;
  j["hidden_ratio"] = c.hidden_ratio;
  j["intermediate_size"] = c.intermediate_size ? json(*c.intermediate_size) : json();
  j["decay_low_rank_dim"] = c.decay_low_rank_dim;
  j["gate_low_rank_dim"] = c.gate_low_rank_dim;
  j["a_low_rank_dim"] = c.a_low_rank_dim;
  j["v_low_rank_dim"] = c.v_low_rank_dim;
  j["norm_first"] = c.norm_first;
  j["norm_bias"] = c.norm_bias;
  if (c.frozen_decay_scale) j["frozen_decay_scale"] = true;  // no field of the public library
}

void write_delta_fields(json* out, const ModelConfig& c) {
  json& j = *out;
  j["num_heads"] = c.num_heads;
  j["num_v_heads"] = c.num_v_heads ? json(*c.num_v_heads) : json();
  j["expand_v"] = c.expand_v;
  j["conv_size"] = c.conv_size;
  j["use_short_conv"] = c.use_short_conv;
  j["use_gate"] = c.use_gate;
  j["allow_neg_eigval"] = c.allow_neg_eigval;
  j["hidden_ratio"] = c.hidden_ratio;
  j["intermediate_size"] = c.intermediate_size ? json(*c.intermediate_size) : json();
  if (c.model_type == "kda") {
    j["safe_gate"] = c.safe_gate;
    j["lower_bound"] = c.lower_bound ? json(*c.lower_bound) : json();
  }
}

std::string architecture(const std::string& model_type) {
  if (is_attention_model(model_type)) return attention_architecture(model_type);
  if (model_type == "kda") return "KDAForCausalLM";
  if (model_type == "gdn2") return "GatedDeltaNet2ForCausalLM";
  if (model_type == "dart") return "DartForCausalLM";
  if (model_type == "rwkv7") return "RWKV7ForCausalLM";
  return model_type == "mamba2" ? "Mamba2ForCausalLM" : "GatedDeltaNetForCausalLM";
}

// Sizes that were null, because they follow from others, stay null while they still follow.
void keep_nulls(json* out, const ModelConfig& c) {
  json given = *out;
  for (const char* key :
       {"num_heads", "head_dim", "expand_ratio", "hidden_ratio", "decay_low_rank_dim",
        "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"})
    if (out->contains(key) && c.source.contains(key) && c.source.at(key).is_null())
      given[key] = nullptr;
  if (given == *out) return;
  ModelConfig again = parse_foreign_config(given, "config.json"), plain = c;
  again.source = plain.source = json::object();
  if (again.to_json() == plain.to_json()) *out = given;
}

}  // namespace

json ModelConfig::to_json() const {
  json j = source;
  j["model_type"] = model_type;
  j["vocab_size"] = vocab_size;
  j["hidden_size"] = hidden_size;
  j["num_hidden_layers"] = num_hidden_layers;
  const bool attention = is_attention_model(model_type);
  if (!attention) j["head_dim"] = head_dim;
  attention     ? write_attention_fields(&j, *this)
  : is_mamba2() ? write_mamba2_fields(&j, *this)
  : is_rwkv7()  ? write_rwkv7_fields(&j, *this)
                : write_delta_fields(&j, *this);
  j["norm_eps"] = norm_eps;
  j["initializer_range"] = initializer_range;
  j["tie_word_embeddings"] = tie_word_embeddings;
  j["use_l2warp"] = use_l2warp;
  j["hidden_act"] = hidden_act;
  if (!j.contains("architectures")) j["architectures"] = {architecture(model_type)};
  keep_nulls(&j, *this);
  return j;
}

std::vector<std::string> preset_names() {
  return {"gdn-100m",    "kda-100m",   "gdn2-100m",  "mamba2-100m", "dart-100m",  "dart-130m",
          "dart-370m",   "dart-780m",  "rwkv7-100m", "gla-100m",    "hgrn2-100m", "lightnet-100m",
          "retnet-100m", "llama-100m", "dlt-160m",   "dlt-410m",    "dlt-1p45b"};
}

ModelConfig preset(const std::string& name) {
  const std::vector<std::string> all = preset_names();
  if (name == "mamba2-100m") return mamba2_defaults("mamba2");
  if (name.starts_with("dart-") && std::find(all.begin(), all.end(), name) != all.end())
    return dart_preset(name);
  if (name == "rwkv7-100m") return rwkv7_defaults();
  if (name.starts_with("dlt-") && std::find(all.begin(), all.end(), name) != all.end())
    return decay_study_preset(name);
  if (name == "llama-100m") return attention_defaults("transformer");
  if (const std::string type = name.substr(0, name.find('-'));
      name == type + "-100m" && type != "transformer" && is_attention_model(type))
    return attention_defaults(type);
  ModelConfig c;  // the sizes of all three
  if (name == "gdn-100m") return c;
  if (name == "kda-100m" || name == "gdn2-100m") {
    c.model_type = name.substr(0, name.find('-'));
    return c;
  }
  const std::string near = closest(name, all);
  std::string names;
  for (const std::string& n : all) names += (names.empty() ? "" : ", ") + n;
  fail("preset '{}' does not exist{}; there are: {}", name,
       near.empty() ? "" : " (did you mean " + near + "?)", names);
}

}  // namespace ebb
