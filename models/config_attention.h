// The fields of the linear-attention and Transformer models in a config (models.md 14.1): gla,
// hgrn2, lightnet, retnet, transformer, decay_study.
#pragma once
#include "models/config.h"
#include "models/config_reader.h"

namespace ebb {

bool is_attention_model(const std::string& model_type);
// The sizes of a model of about 100M parameters, "gla-100m" and so on.
ModelConfig attention_defaults(const std::string& model_type);
ModelConfig decay_study_preset(const std::string& name);  // dlt-160m, dlt-410m, dlt-1p45b
void read_attention_fields(ConfigReader* r, ModelConfig* c);
void read_hidden_ratio(ConfigReader* r, ModelConfig* c);  // of every model with an MLP
void validate_attention(ConfigReader* r, const ModelConfig& c);
// Fields of foreign configs that change what is computed and have one supported value.
void check_foreign_attention(ConfigReader* r, const ModelConfig& c);
void write_attention_fields(nlohmann::json* out, const ModelConfig& c);
std::string attention_architecture(const std::string& model_type);

}  // namespace ebb
