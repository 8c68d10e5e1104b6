// Model folders as the public library keeps them: config.json, weights (models/weight_files.h),
// tokenizer files.
//   auto model = load_model("folder");
//   save_model("folder", *model, &tokenizer);
#pragma once
#include <memory>
#include <string>

#include "models/language_model.h"
#include "models/tokenizer.h"

namespace ebb {

// Throws naming file and field when something is missing, unknown to this version or mis-shaped.
// `changes` to the config, e.g. {{"sma_chunk", 64}}, are fields that ebb knows; the weights still
// have to fit.
std::unique_ptr<LanguageModel> load_model(const std::string& folder,
                                          const nlohmann::json& changes = nlohmann::json::object());
// Writes (atomically, file by file) config.json with every field it was read with, and the fp32
// masters under their public names. Creates the folder.
void save_model(const std::string& folder, const LanguageModel& model,
                const Tokenizer* tokenizer = nullptr);
// config.json with every field it was read with, as the public library reads it.
nlohmann::json public_config(const ModelConfig& config);
// A folder, or the name of a preset (with random weights from `seed`). Throws with the list of
// presets when it is neither.
std::unique_ptr<LanguageModel> load_or_make(const std::string& folder_or_preset, uint64_t seed);

}  // namespace ebb
