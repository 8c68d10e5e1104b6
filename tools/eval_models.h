// The models of `ebb eval` and `ebb generate`: which folders, under which names, with which
// tokenizers.
#pragma once
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/language_model.h"
#include "models/tokenizer.h"

namespace ebb::tools {

// The model in a folder: a model's own, or of a run the final one, or else the newest intact
// checkpoint. Throws when there is none; files with checksums are compared with them.
std::string model_folder(const std::string& folder);

struct FoundModel {
  std::string name;    // unique
  std::string folder;  // with config.json and model.safetensors
};
// Entries FOLDER or NAME=FOLDER, of which model_folder() is taken. Without a name, the shortest
// ends of the paths that differ.
std::vector<FoundModel> find_models(const std::vector<std::string>& entries);

struct EvalModel {
  std::string name;    // unique
  std::string folder;  // with config.json and model.safetensors
  Tokenizer tokenizer;
};

// The same with tokenizers. `tokenizer`: for all of them, "" for each its own.
std::vector<EvalModel> find_eval_models(const std::vector<std::string>& entries,
                                        const std::string& tokenizer);

// --set FIELD=VALUE, repeatable: fields of config.json that are to be others in this evaluation, as
// an object for load_model.
void add_set_option(CLI::App* c, std::vector<std::string>* set);
nlohmann::json config_changes(const std::vector<std::string>& set);

// On the device, with bf16 shadows when dtype asks for them.
std::unique_ptr<LanguageModel> load_eval_model(
    const EvalModel& m, Device device, DType dtype,
    const nlohmann::json& changes = nlohmann::json::object());
std::string weights_hash(const std::string& folder);  // of each file with weights
nlohmann::json eval_model_record(const EvalModel& m, const LanguageModel& model);

}  // namespace ebb::tools
