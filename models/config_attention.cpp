#include "models/config_attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "tensor/check.h"

namespace ebb {

using nlohmann::json;

namespace {

constexpr int64_t kMost = int64_t(1) << 31;

bool is_any(const std::string& type, std::initializer_list<const char*> of) {
  return std::any_of(of.begin(), of.end(), [&](const char* t) { return type == t; });
}
bool has_expansion(const ModelConfig& c) { return is_any(c.model_type, {"gla", "retnet"}); }
bool has_ratio(const ModelConfig& c) { return is_any(c.model_type, {"hgrn2", "lightnet"}); }
bool has_short_conv(const ModelConfig& c) {
  return is_any(c.model_type, {"gla", "hgrn2", "lightnet"});
}
bool has_rank(const ModelConfig& c) { return is_any(c.model_type, {"gla", "lightnet"}); }

void within(ConfigReader* r, const char* key, int64_t v, int64_t most) {
  if (v < 1 || v > most)
    r->error(key, v < 1 ? fmt::format("must be at least 1, got {}", v)
                        : fmt::format("must be at most {}, got {}", most, v));
}

}  // namespace

int64_t ModelConfig::gla_key_width() const {
  return int64_t(std::llround(double(hidden_size) * expand_k));
}
int64_t ModelConfig::gla_value_width() const {
  return int64_t(std::llround(double(hidden_size) * expand_v));
}

bool is_attention_model(const std::string& model_type) {
  return is_any(model_type, {"gla", "hgrn2", "lightnet", "retnet", "transformer", "decay_study"});
}

ModelConfig attention_defaults(const std::string& model_type) {
  ModelConfig c;
  c.model_type = model_type;
  c.use_short_conv = false;
  if (model_type == "decay_study") {
    c.hidden_size = 768;
    c.num_hidden_layers = 12;
    c.num_heads = 6;
    c.intermediate_size = 2048;
    c.vocab_size = 50432;
    c.norm_eps = 1e-5;
    c.weight_init = "zero_branches";
  } else if (model_type == "transformer") {
    c.num_hidden_layers = 21;
    c.num_heads = 8;
  } else if (model_type == "retnet") {
    c.num_heads = 8;
    c.expand_k = 1, c.expand_v = 2;
    c.hidden_ratio = 2;
  } else if (model_type == "gla") {
    c.num_heads = 4;
    c.expand_k = 0.5, c.expand_v = 1;
    c.gate_low_rank_dim = 16;
  } else {
    c.num_heads = 4;  // heads of 128 channels
    c.gate_low_rank_dim = 128;
  }
  return c;
}

namespace {

const std::vector<std::string> kDecayTypes = {
    "mamba2", "mamba2_noA", "mamba2_noDelta", "mamba2_noA_noDelta",
    "gla",    "hgrn2",      "lightnet",       "lssp",
    "tnl",    "tnl_l",      "simple"};

// One of the words, by name.
void read_word(ConfigReader* r, const char* key, const std::vector<std::string>& words,
               std::string* out) {
  int index = int(std::find(words.begin(), words.end(), *out) - words.begin());
  r->choice(key, words, &index);
  *out = words[size_t(index)];
}

void read_decay_fields(ConfigReader* r, ModelConfig* c) {
  ConfigReader d = r->object("decay");
  read_word(&d, "type", kDecayTypes, &c->decay.type);
  const bool fixed = c->decay.type == "tnl" || c->decay.type == "tnl_l";
  std::string granularity = fixed ? "scalar" : "vector", rule = "root";
  read_word(&d, "granularity", {"vector", "scalar"}, &granularity);
  read_word(&d, "gla_rule", {"root", "scaled"}, &rule);
  c->decay.by_channel = granularity == "vector";
  c->decay.scaled = rule == "scaled";
  d.read("share", &c->decay.share);
  d.read("threshold", &c->decay.threshold);
  if (fixed && c->decay.by_channel)
    d.error("granularity", "tnl has one decay per head; want scalar");
  if (c->decay.share && (!c->decay.by_channel || fixed || c->decay.type.starts_with("mamba2_")))
    d.error("share",
            "true is for a decay per channel of mamba2, gla, hgrn2, lightnet, lssp, simple");
  if (!(c->decay.threshold > 0 && c->decay.threshold < 1))
    d.error("threshold", fmt::format("must lie between 0 and 1, got {}", c->decay.threshold));
  d.close();
  read_word(r, "rpe", {"none", "rope", "tpe"}, &c->rpe);
  std::string form = c->decay.by_channel ? "cosine" : "rotate";
  read_word(r, "rope_form", {"rotate", "cosine"}, &form);
  c->rope_cosine = !c->decay.by_channel && form == "cosine";
  if (c->decay.by_channel && form == "rotate")
    r->error("rope_form", "a rotation would mix channels of different decays; want cosine");
  read_word(r, "token_mixer", {"linear", "dplr"}, &c->token_mixer);
  read_word(r, "weight_init", {"zero_branches", "fla"}, &c->weight_init);
  if (c->decay.share && (c->rpe == "rope" || c->token_mixer != "linear"))
    r->error("rpe", "a shared key goes with rpe none or tpe and token_mixer linear only");
}

}  // namespace

void read_attention_fields(ConfigReader* r, ModelConfig* c) {
  *c = attention_defaults(c->model_type);
  r->read("hidden_size", &c->hidden_size);
  std::optional<int64_t> heads, ratio;
  r->read("num_heads", &heads);
  if (has_ratio(*c)) {  // where one is null, the other says it
    r->read("expand_ratio", &ratio);
    if (ratio)
      c->expand_ratio = *ratio;
    else if (r->has("expand_ratio") && heads && *heads > 0)
      c->expand_ratio = c->hidden_size / *heads;
    if (!heads) c->num_heads = c->expand_ratio > 0 ? c->hidden_size / c->expand_ratio : 0;
  }
  if (heads) c->num_heads = *heads;
  if (has_expansion(*c)) {
    r->read("expand_k", &c->expand_k);
    r->read("expand_v", &c->expand_v);
    r->read("num_kv_heads", &c->num_kv_heads);
    r->read("use_output_gate", &c->use_output_gate);
  }
  if (c->model_type == "gla") {
    r->read("gate_logit_normalizer", &c->gate_logit_normalizer);
    r->read("clamp_min", &c->clamp_min);
  }
  if (has_expansion(*c) || has_ratio(*c)) r->read("elementwise_affine", &c->elementwise_affine);
  if (has_rank(*c)) r->read("gate_low_rank_dim", &c->gate_low_rank_dim);
  if (c->model_type == "hgrn2") r->read("use_lower_bound", &c->use_lower_bound);
  if (c->model_type == "decay_study") {
    read_decay_fields(r, c);
  } else if (c->model_type == "transformer") {
    r->read("num_kv_heads", &c->num_kv_heads);
    r->read("qk_norm", &c->qk_norm);
    r->read("qkv_bias", &c->qkv_bias);
    r->read("window_size", &c->window_size);
    r->read("rope_theta", &c->rope_theta);
    r->read("max_position_embeddings", &c->max_position_embeddings);
  } else {
    r->read("use_short_conv", &c->use_short_conv);
    if (has_short_conv(*c)) r->read("conv_size", &c->conv_size);
  }
  read_hidden_ratio(r, c);
  r->read("intermediate_size", &c->intermediate_size);
}

void validate_attention(ConfigReader* r, const ModelConfig& c) {
  if (!c.intermediate_size) within(r, "hidden_ratio", c.hidden_ratio, 1 << 20);
  if (c.hidden_ratio >= 1 && c.hidden_size >= 1 && c.hidden_size <= kMost)
    within(r, "intermediate_size", c.mlp_width(), kMost);
  if (c.num_heads < 1 || c.hidden_size < 1) return;  // reported already
  const auto per_head = [&](const char* key, double width, bool even) {
    const double channels = width / double(c.num_heads);
    const bool whole = channels >= 1 && std::abs(channels - std::round(channels)) < 1e-9;
    if (!whole || (even && std::llround(channels) % 2 != 0))
      r->error(key, fmt::format("{} heads of {} channels: want {}", c.num_heads, channels,
                                even ? "an even number of them" : "whole ones"));
    else if (channels > 256)
      r->error(key, fmt::format("heads of {} channels; at most 256 are supported", channels));
  };
  if (has_expansion(c)) {
    per_head("expand_k", double(c.hidden_size) * c.expand_k, c.model_type == "retnet");
    per_head("expand_v", double(c.hidden_size) * c.expand_v, false);
  } else {
    per_head("num_heads", double(c.hidden_size),
             c.model_type == "transformer" || c.model_type == "decay_study");
    if (c.model_type == "decay_study" && c.cosine_rope() && c.hidden_size > 128 * c.num_heads)
      r->error("rpe", "rope in its cosine form doubles the keys; want heads of at most 128");
  }
  if (has_ratio(c)) within(r, "expand_ratio", c.expand_ratio, 256);
  // The public library computes the number from the ratio, whatever it is given.
  if (c.model_type == "hgrn2" && c.expand_ratio > 0 &&
      c.num_heads != c.hidden_size / c.expand_ratio)
    r->error("num_heads", fmt::format("{} is not hidden_size / expand_ratio = {}", c.num_heads,
                                      c.hidden_size / c.expand_ratio));
  if (has_rank(c)) within(r, "gate_low_rank_dim", c.gate_low_rank_dim, kMost);
  if (!(c.gate_logit_normalizer > 0))
    r->error("gate_logit_normalizer",
             fmt::format("must be positive, got {}", c.gate_logit_normalizer));
  if (c.use_short_conv && !has_short_conv(c))
    r->error("use_short_conv", fmt::format("true is not supported by {}", c.model_type));
  if (has_short_conv(c)) within(r, "conv_size", c.conv_size, 1024);
  if (c.clamp_min && !(*c.clamp_min <= 0))
    r->error("clamp_min", fmt::format("must not be positive, got {}", *c.clamp_min));
  if (c.model_type != "transformer" && !has_expansion(c)) return;
  if (c.key_heads() < 1 || c.num_heads % c.key_heads() != 0)
    r->error("num_kv_heads",
             fmt::format("{} does not divide num_heads {}", c.key_heads(), c.num_heads));
  if (c.model_type != "transformer") return;
  if (c.window_size) within(r, "window_size", *c.window_size, kMost);
  if (!(c.rope_theta > 0))
    r->error("rope_theta", fmt::format("must be positive, got {}", c.rope_theta));
}

void check_foreign_attention(ConfigReader* r, const ModelConfig& c) {
  const auto only = [&](const char* key, const json& want) {
    if (const json given = r->raw(key); !given.is_null() && given != want)
      r->error(key, fmt::format("{} is not supported", given.dump()));
  };
  if (c.model_type == "transformer" || c.model_type == "decay_study") return;
  if (has_expansion(c)) {
    only("feature_map", json());
  }
  if (c.model_type == "gla") {
    only("use_gk", true);
    only("use_gv", false);
  }
}

void write_attention_fields(json* out, const ModelConfig& c) {
  json& j = *out;
  const auto or_null = [](const std::optional<int64_t>& v) { return v ? json(*v) : json(); };
  j["num_heads"] = c.num_heads;
  if (has_expansion(c)) {
    j["expand_k"] = c.expand_k;
    j["expand_v"] = c.expand_v;
    j["num_kv_heads"] = or_null(c.num_kv_heads);
    j["use_output_gate"] = c.use_output_gate;
  }
  if (has_expansion(c) || has_ratio(c)) j["elementwise_affine"] = c.elementwise_affine;
  if (has_ratio(c)) j["expand_ratio"] = c.expand_ratio;
  if (c.model_type == "gla") {
    j["gate_logit_normalizer"] = c.gate_logit_normalizer;
    j["clamp_min"] = c.clamp_min ? json(*c.clamp_min) : json();
  }
  if (has_rank(c)) j["gate_low_rank_dim"] = c.gate_low_rank_dim;
  if (c.model_type == "hgrn2") j["use_lower_bound"] = c.use_lower_bound;
  if (c.model_type == "decay_study") {
    j["decay"] = {{"type", c.decay.type},
                  {"granularity", c.decay.by_channel ? "vector" : "scalar"},
                  {"share", c.decay.share},
                  {"threshold", c.decay.threshold},
                  {"gla_rule", c.decay.scaled ? "scaled" : "root"}};
    j["rpe"] = c.rpe;
    if (c.rope_cosine) j["rope_form"] = "cosine";
    j["token_mixer"] = c.token_mixer;
    j["weight_init"] = c.weight_init;
  } else if (c.model_type == "transformer") {
    j["num_kv_heads"] = or_null(c.num_kv_heads);
    j["qk_norm"] = c.qk_norm;
    j["qkv_bias"] = c.qkv_bias;
    j["window_size"] = or_null(c.window_size);
    j["rope_theta"] = c.rope_theta;
    j["max_position_embeddings"] = c.max_position_embeddings;
  } else {
    j["use_short_conv"] = c.use_short_conv;
    if (has_short_conv(c)) j["conv_size"] = c.conv_size;
  }
  j["hidden_ratio"] = c.hidden_ratio;
  j["intermediate_size"] = or_null(c.intermediate_size);
}

ModelConfig decay_study_preset(const std::string& name) {
  ModelConfig c = attention_defaults("decay_study");
  if (name == "dlt-160m") return c;
  c.hidden_size = name == "dlt-410m" ? 1024 : 2048;
  c.num_hidden_layers = 24;
  c.num_heads = c.hidden_size / 128;
  c.intermediate_size = name == "dlt-410m" ? 2816 : 5632;
  return c;
}

std::string attention_architecture(const std::string& model_type) {
  if (model_type == "gla") return "GLAForCausalLM";
  if (model_type == "hgrn2") return "HGRN2ForCausalLM";
  if (model_type == "lightnet") return "LightNetForCausalLM";
  if (model_type == "decay_study") return "DecayStudyForCausalLM";
  return model_type == "retnet" ? "RetNetForCausalLM" : "TransformerForCausalLM";
}

}  // namespace ebb
