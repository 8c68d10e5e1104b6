// The fields of Mamba-2 and DART in a config (models.md 14.1): mamba2, dart.
#pragma once
#include "models/config.h"
#include "models/config_reader.h"

namespace ebb {

// The sizes of mamba2-100m, dart-100m.
ModelConfig mamba2_defaults(const std::string& model_type);
// dart-100m is mamba2-100m with state-memory attention, its weights but for that the same; the
// others are the paper's.
ModelConfig dart_preset(const std::string& name);
void read_mamba2_fields(ConfigReader* r, ModelConfig* c);
void validate_mamba2(ConfigReader* r, const ModelConfig& c);
void write_mamba2_fields(nlohmann::json* out, const ModelConfig& c);

}  // namespace ebb
