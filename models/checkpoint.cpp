#include "models/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "models/config_reader.h"
#include "models/weight_files.h"
#include "tensor/check.h"
#include "tensor/file.h"

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

// No limit of a step is an infinite one there, and its default.
json public_config(const ModelConfig& config) {
  json j = config.to_json();
  if (!j.contains("dt_limit") || config.dt_limit_high || config.source.contains("dt_limit"))
    return j;
  if (config.dt_limit_low == 0)
    j.erase("dt_limit");
  else
    j["dt_limit"][1] = std::numeric_limits<double>::infinity();
  return j;
}

std::unique_ptr<LanguageModel> load_model(const std::string& folder, const json& changes) {
  const std::string config_file = folder + "/config.json";
  check(fs::is_directory(folder), "{}: there is no such model folder", folder);
  ModelConfig config =
      parse_foreign_config(parse_python_json(read_file(config_file), config_file), config_file);
  if (!changes.empty()) config = changed(std::move(config), changes, config_file);
  auto model = make_model(config);
  StateDict state = WeightFiles(folder).tensors();
  // A tied head may be stored beside the embedding it equals.
  if (model->config().tie_word_embeddings &&
      std::erase_if(state, [](const auto& entry) { return entry.first == "lm_head.weight"; }))
    model->store_tied_head();
  try {
    model->load_state_dict(state);
  } catch (const Error& e) {
    fail("{}: {}", folder, e.what());
  }
  return model;
}

void save_model(const std::string& folder, const LanguageModel& model, const Tokenizer* tokenizer) {
  make_folders(folder);
  save_weights(folder, model.stored_state());
  write_file_atomically(folder + "/config.json",
                        dump_python_json(public_config(model.config())) + "\n");
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
