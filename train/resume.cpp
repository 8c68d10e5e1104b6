#include "train/resume.h"

#include <algorithm>
#include <filesystem>

#include "models/checkpoint.h"
#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/hash.h"
#include "tensor/safetensors.h"

namespace ebb {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr char kPrefix[] = "checkpoint-";

json read_object(const std::string& file) {
  json j = read_json(file);
  check(j.is_object(), "checkpoint: {} is not a JSON object", file);
  return j;
}

// Leftovers of writers that were killed.
void remove_temporaries(const std::string& run) {
  if (!fs::is_directory(run)) return;
  for (const auto& e : fs::directory_iterator(run))
    if (e.path().filename().string().starts_with(std::string(".") + kPrefix))
      fs::remove_all(e.path());
}

}  // namespace

std::string save_checkpoint(const std::string& run, const LanguageModel& model,
                            const Tokenizer* tokenizer, const StateDict& optimizer,
                            const LoopState& state, int64_t keep_last) {
  make_folders(run);
  remove_temporaries(run);
  const std::string name = fmt::format("{}{:06}", kPrefix, state.step);
  const std::string temporary = run + "/." + name, final = run + "/" + name;
  try {
    save_model(temporary, model, tokenizer);
    save_safetensors(temporary + "/optimizer.safetensors", optimizer, {{"format", "ebb"}});
    const json loop = {{"step", state.step},
                       {"cursor", state.cursor},
                       {"skipped", state.skipped},
                       {"tokens", state.tokens},
                       {"extra", state.extra}};
    write_file_atomically(temporary + "/loop.json", loop.dump(1) + "\n");
    json sums;
    for (const auto& e : fs::directory_iterator(temporary))
      sums[e.path().filename().string()] = file_hash(e.path().string());
    write_file_atomically(temporary + "/checksums.json", sums.dump(1) + "\n");
    sync_folder(temporary);
    fs::remove_all(final);
    fs::rename(temporary, final);
    sync_folder(run);
  } catch (const std::exception& e) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    fail("checkpoint: {} was not written: {}", final, e.what());
  }
  const std::vector<std::string> all = list_checkpoints(run);
  for (size_t i = size_t(std::max<int64_t>(keep_last, 1)); i < all.size(); ++i)
    fs::remove_all(all[i]);
  return final;
}

std::vector<std::string> list_checkpoints(const std::string& run) {
  std::vector<std::pair<int64_t, std::string>> found;
  if (fs::is_directory(run)) {
    for (const auto& e : fs::directory_iterator(run)) {
      const std::string name = e.path().filename().string();
      const std::string digits = name.starts_with(kPrefix) ? name.substr(sizeof kPrefix - 1) : "";
      if (!digits.empty() && digits.find_first_not_of("0123456789") == std::string::npos &&
          digits.size() < 18)
        found.emplace_back(std::stoll(digits), e.path().string());
    }
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> out;
  for (auto& [step, path] : found) out.push_back(std::move(path));
  return out;
}

void verify_checkpoint(const std::string& folder) {
  const json sums = read_object(folder + "/checksums.json");
  for (const auto& [file, sum] : sums.items()) {
    const std::string path = folder + "/" + file;
    check(fs::exists(path), "checkpoint: {} is missing", path);
    check(sum.is_string() && file_hash(path) == sum.get<std::string>(),
          "checkpoint: {} is damaged (checksum differs)", path);
  }
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "loop.json"})
    check(sums.contains(file), "checkpoint: {}/checksums.json does not list {}", folder, file);
}

std::optional<std::string> newest_checkpoint(const std::string& run, std::string* note) {
  for (const std::string& folder : list_checkpoints(run)) {
    try {
      verify_checkpoint(folder);
      return folder;
    } catch (const Error& e) {
      *note += fmt::format("{}{}", note->empty() ? "" : "; ", e.what());
    }
  }
  return std::nullopt;
}

LoopState load_checkpoint(const std::string& folder, LanguageModel& model, StateDict* optimizer) {
  StateDict weights;
  const SafeTensors file(folder + "/model.safetensors");
  for (const std::string& name : file.names()) weights.emplace_back(name, file.get(name));
  model.load_state_dict(weights);
  return load_training_state(folder, optimizer);
}

LoopState load_training_state(const std::string& folder, StateDict* optimizer) {
  const SafeTensors moments(folder + "/optimizer.safetensors");
  optimizer->clear();
  for (const std::string& name : moments.names())
    optimizer->emplace_back(name, moments.get(name).clone());
  const json j = read_object(folder + "/loop.json");
  LoopState state;
  try {
    state = {j.at("step"), j.at("cursor"), j.at("skipped"), j.at("tokens"), j.at("extra")};
  } catch (const json::exception& e) {
    fail("checkpoint: {}/loop.json: {}", folder, json_problem(e));
  }
  return state;
}

}  // namespace ebb
