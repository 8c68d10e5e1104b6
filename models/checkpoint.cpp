#include "models/checkpoint.h"

#include <algorithm>
#include <filesystem>

#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"

namespace ebb {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

ModelConfig changed(ModelConfig config, const json& changes, const std::string& file) {
  ModelConfig known = config;
  known.source = json::object();
  const json fields = known.to_json();
  std::vector<std::string> names;
  for (const auto& [key, value] : fields.items()) names.push_back(key);
  for (const auto& [key, value] : changes.items()) {
    const std::string near = closest(key, names);
    check(fields.contains(key), "{}: /{}: unknown{}", file, key,
          near.empty() ? "" : "; did you mean " + near + "?");
  }
  json object = config.to_json();
  object.update(changes);
  return parse_foreign_config(object, file);
}

}  // namespace

std::unique_ptr<LanguageModel> load_model(const std::string& folder, const json& changes) {
  const std::string config_file = folder + "/config.json";
  check(fs::is_directory(folder), "{}: there is no such model folder", folder);
  ModelConfig config = parse_foreign_config(read_json(config_file), config_file);
  if (!changes.empty()) config = changed(std::move(config), changes, config_file);
  auto model = make_model(config);
  const SafeTensors file(folder + "/model.safetensors");
  StateDict state;
  for (const std::string& name : file.names()) {
    // A tied head may be stored beside the embedding it equals.
    if (model->config().tie_word_embeddings && name == "lm_head.weight") continue;
    state.emplace_back(name, file.get(name));
  }
  model->load_state_dict(state);
  return model;
}

void save_model(const std::string& folder, const LanguageModel& model, const Tokenizer* tokenizer) {
  make_folders(folder);
  save_safetensors(folder + "/model.safetensors", model.state_dict(), {{"format", "pt"}});
  write_file_atomically(folder + "/config.json", model.config().to_json().dump(1) + "\n");
  if (tokenizer) tokenizer->save(folder);
}

std::unique_ptr<LanguageModel> load_or_make(const std::string& folder_or_preset, uint64_t seed) {
  if (fs::is_directory(folder_or_preset)) return load_model(folder_or_preset);
  const std::vector<std::string> names = preset_names();
  if (std::find(names.begin(), names.end(), folder_or_preset) == names.end()) {
    const std::string near = closest(folder_or_preset, names);
    fail("{} is neither a model folder nor a preset{}; presets: {}", folder_or_preset,
         near.empty() ? "" : " (did you mean " + near + "?)", fmt::join(names, ", "));
  }
  auto model = make_model(preset(folder_or_preset));
  init_weights(*model, seed);
  return model;
}

}  // namespace ebb
