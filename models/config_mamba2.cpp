#include "models/config_mamba2.h"

#include <limits>

#include "tensor/check.h"

namespace ebb {

using nlohmann::json;

namespace {

// No upper limit: null, an infinite number, or as newer versions of the public library write it.
bool is_unlimited(const json& high) {
  return high.is_null() || high == json({{"__float__", "Infinity"}}) ||
         (high.is_number() && high.get<double>() == std::numeric_limits<double>::infinity());
}

// [low, high], high null for none.
void read_dt_limit(ConfigReader* r, ModelConfig* c) {
  const json limit = r->raw("dt_limit");
  if (limit.is_null()) return;
  if (!limit.is_array() || limit.size() != 2 || !limit[0].is_number() ||
      !(is_unlimited(limit[1]) || limit[1].is_number()))
    return r->error("dt_limit", "want [low, high], high null for none");
  c->dt_limit_low = limit[0];
  if (!is_unlimited(limit[1])) c->dt_limit_high = limit[1].get<double>();
}

// Where there is none, as the config was read.
json write_dt_limit(const ModelConfig& c) {
  if (c.dt_limit_high) return {c.dt_limit_low, *c.dt_limit_high};
  const json given = c.source.value("dt_limit", json());
  const bool kept = given.is_array() && given.size() == 2 && is_unlimited(given[1]);
  return {c.dt_limit_low, kept ? given[1] : json()};
}

}  // namespace

ModelConfig mamba2_defaults(const std::string& model_type) {
  ModelConfig c;
  c.model_type = model_type;
  c.num_hidden_layers = 42;
  c.num_heads = 16;
  c.norm_eps = 1e-5;
  c.residual_in_fp32 = true;
  c.hidden_act = "silu";
  if (c.is_dart()) c.weight_init = "mamba_ssm";
  return c;
}

ModelConfig dart_preset(const std::string& name) {
  ModelConfig c = mamba2_defaults("dart");
  if (name == "dart-100m") {
    c.weight_init = "fla";
    return c;
  }
  c.hidden_size = name == "dart-130m" ? 768 : name == "dart-370m" ? 1024 : 1536;
  c.num_hidden_layers = name == "dart-130m" ? 24 : 48;
  c.num_heads = c.expand * c.hidden_size / c.head_dim;
  c.vocab_size = 50288;
  c.tie_word_embeddings = true;
  return c;
}

void read_mamba2_fields(ConfigReader* r, ModelConfig* c) {
  *c = mamba2_defaults(c->model_type);
  r->read("hidden_size", &c->hidden_size);
  r->read("state_size", &c->state_size);
  r->read("expand", &c->expand);
  r->read("head_dim", &c->head_dim);
  std::optional<int64_t> heads;
  r->read("num_heads", &heads);
  c->num_heads = heads.value_or(c->head_dim > 0 ? c->expand * c->hidden_size / c->head_dim : 0);
  r->read("n_groups", &c->n_groups);
  r->read("conv_kernel", &c->conv_size);
  r->read("use_conv_bias", &c->use_conv_bias);
  if (!c->is_dart()) {
    r->read("use_bias", &c->use_bias);
    r->read("rmsnorm", &c->rmsnorm);
    r->read("norm_before_gate", &c->norm_before_gate);
  }
  r->read("chunk_size", &c->chunk_size);
  read_dt_limit(r, c);
  r->read("residual_in_fp32", &c->residual_in_fp32);
  r->read("rescale_prenorm_residual", &c->rescale_prenorm_residual);
  r->read("weight_init", &c->weight_init);
  if (!c->is_dart()) return;
  r->read("use_sma", &c->use_sma);
  r->read("sma_chunk", &c->sma_chunk);
  r->read("sma_normalize", &c->sma_normalize);
  r->read("sma_shared_read", &c->sma_shared_read);
  r->read("sma_eps", &c->sma_eps);
  r->read("sma_eps_row", &c->sma_eps_row);
}

void validate_mamba2(ConfigReader* r, const ModelConfig& c) {
  if (c.num_heads * c.head_dim != c.expand * c.hidden_size)
    r->error("num_heads", fmt::format("{} heads of {} are not expand·hidden_size = {}", c.num_heads,
                                      c.head_dim, c.expand * c.hidden_size));
  for (const auto& [key, size] : {std::pair{"state_size", c.state_size}, {"head_dim", c.head_dim}})
    if (size > 256) r->error(key, fmt::format("must be at most 256, got {}", size));
  if (c.is_dart() && c.n_groups != 1)
    r->error("n_groups", fmt::format("{} is not supported; want 1", c.n_groups));
  if (c.num_heads % c.n_groups != 0)
    r->error("n_groups", fmt::format("{} does not divide num_heads {}", c.n_groups, c.num_heads));
  if (!(c.dt_limit_low >= 0 && c.dt_limit_low <= c.dt_limit_high.value_or(c.dt_limit_low)))
    r->error("dt_limit", "want 0 <= low <= high");
  if (c.weight_init != "fla" && c.weight_init != "mamba_ssm")
    r->error("weight_init",
             fmt::format("\"{}\" does not exist; there are fla, mamba_ssm", c.weight_init));
  if (!c.is_dart()) return;
  if (c.sma_chunk < 1 || c.sma_chunk >= 1 << 30)
    r->error("sma_chunk", fmt::format("must lie in 1 ... 2^30 - 1, got {}", c.sma_chunk));
  for (const auto& [key, eps] : {std::pair{"sma_eps", c.sma_eps}, {"sma_eps_row", c.sma_eps_row}})
    if (!(eps > 0 && float(eps) > 0)) r->error(key, fmt::format("must be positive, got {}", eps));
}

void write_mamba2_fields(json* out, const ModelConfig& c) {
  json& j = *out;
  j["num_heads"] = c.num_heads;
  j["state_size"] = c.state_size;
  j["expand"] = c.expand;
  j["n_groups"] = c.n_groups;
  j["conv_kernel"] = c.conv_size;
  j["use_conv_bias"] = c.use_conv_bias;
  if (!c.is_dart()) {
    j["use_bias"] = c.use_bias;
    j["rmsnorm"] = c.rmsnorm;
    j["norm_before_gate"] = c.norm_before_gate;
  }
  j["chunk_size"] = c.chunk_size;
  j["dt_limit"] = write_dt_limit(c);
  j["residual_in_fp32"] = c.residual_in_fp32;
  j["rescale_prenorm_residual"] = c.rescale_prenorm_residual;
  j["weight_init"] = c.weight_init;
  if (!c.is_dart()) return;
  j["use_sma"] = c.use_sma;
  j["sma_chunk"] = c.sma_chunk;
  j["sma_normalize"] = c.sma_normalize;
  j["sma_shared_read"] = c.sma_shared_read;
  j["sma_eps"] = c.sma_eps;
  j["sma_eps_row"] = c.sma_eps_row;
}

}  // namespace ebb
