#include "tools/eval_models.h"

#include <filesystem>
#include <map>
#include <set>

#include "models/checkpoint.h"
#include "models/weight_files.h"
#include "tensor/check.h"
#include "tensor/hash.h"
#include "train/config.h"
#include "train/resume.h"

namespace ebb::tools {

namespace fs = std::filesystem;

namespace {

bool is_model(const std::string& folder) {
  return fs::exists(folder + "/config.json") && WeightFiles::there(folder);
}

}  // namespace

std::string model_folder(const std::string& folder) {
  check(fs::is_directory(folder), "there is no folder {}", folder);
  if (is_model(folder)) {
    if (fs::exists(folder + "/checksums.json")) verify_checkpoint(folder);
    return folder;
  }
  if (is_model(folder + "/final")) return folder + "/final";
  if (list_checkpoints(folder).empty())
    fail("{} holds neither config.json and model.safetensors nor checkpoints", folder);
  std::string note;
  const auto newest = newest_checkpoint(folder, &note);
  check(newest.has_value(), "no checkpoint of {} is intact: {}", folder, note);
  return *newest;
}

namespace {

// The last `parts` components of a path.
std::string tail(const fs::path& path, int parts) {
  fs::path out;
  for (fs::path p = path; parts > 0 && p.has_filename(); p = p.parent_path(), --parts)
    out = out.empty() ? p.filename() : p.filename() / out;
  return out.string();
}

// Lengthens names that several paths share until they differ.
std::vector<std::string> short_names(const std::vector<fs::path>& paths) {
  std::vector<std::string> names(paths.size());
  std::vector<int> parts;
  for (const fs::path& p : paths) {  // "dami/final" rather than "final"
    const std::string last = p.filename().string();
    parts.push_back(last == "final" || last.starts_with("checkpoint-") ? 2 : 1);
  }
  for (int round = 0; round < 64; ++round) {
    std::map<std::string, int> seen;
    for (size_t i = 0; i < paths.size(); ++i) ++seen[names[i] = tail(paths[i], parts[i])];
    bool done = true;
    for (size_t i = 0; i < paths.size(); ++i)
      if (seen[names[i]] > 1) ++parts[i], done = false;
    if (done) break;
  }
  return names;
}

}  // namespace

std::vector<FoundModel> find_models(const std::vector<std::string>& entries) {
  std::vector<std::string> given, folders;
  std::vector<fs::path> paths;
  for (const std::string& e : entries) {
    const size_t equals = e.find('=');
    const bool named = equals != std::string::npos && !fs::exists(e);
    given.push_back(named ? e.substr(0, equals) : "");
    const std::string folder = named ? e.substr(equals + 1) : e;
    folders.push_back(model_folder(folder));
    paths.push_back(fs::absolute(folder).lexically_normal() / "");
    paths.back() = paths.back().parent_path();  // without a trailing slash
  }
  const std::vector<std::string> names = short_names(paths);
  std::vector<FoundModel> out;
  std::set<std::string> seen;
  for (size_t i = 0; i < entries.size(); ++i) {
    const std::string name = given[i].empty() ? names[i] : given[i];
    check(seen.insert(name).second, "two models are called {}", name);
    out.push_back({name, folders[i]});
  }
  return out;
}

std::vector<EvalModel> find_eval_models(const std::vector<std::string>& entries,
                                        const std::string& tokenizer) {
  std::vector<EvalModel> out;
  for (const FoundModel& m : find_models(entries))
    out.push_back({m.name, m.folder, Tokenizer::load(tokenizer.empty() ? m.folder : tokenizer)});
  return out;
}

void add_set_option(CLI::App* c, std::vector<std::string>* set) {
  c->add_option("--set", *set,
                "FIELD=VALUE of config.json to change for this evaluation, e.g. use_sma=false or "
                "sma_chunk=64")
      ->allow_extra_args(false);
}

nlohmann::json config_changes(const std::vector<std::string>& set) {
  nlohmann::json changes = nlohmann::json::object();
  for (const std::string& s : set) set_path(&changes, s);
  return changes;
}

std::unique_ptr<LanguageModel> load_eval_model(const EvalModel& m, Device device, DType dtype,
                                               const nlohmann::json& changes) {
  auto model = load_model(m.folder, changes);
  check(m.tokenizer.vocab_size() <= model->config().vocab_size,
        "{} has {} token ids, its tokenizer {}", m.folder, model->config().vocab_size,
        m.tokenizer.vocab_size());
  model->to(device);
  if (dtype == DType::bf16) model->enable_bf16();
  return model;
}

std::string weights_hash(const std::string& folder) {
  std::vector<std::string> hashes;
  for (const std::string& file : WeightFiles(folder).paths()) hashes.push_back(file_hash(file));
  return fmt::format("xxh64:{}", fmt::join(hashes, ","));
}

nlohmann::json eval_model_record(const EvalModel& m, const LanguageModel& model) {
  return {{"name", m.name},
          {"folder", m.folder},
          {"checkpoint", weights_hash(m.folder)},
          {"model_type", model.config().model_type},
          {"parameters", model.parameter_count()},
          {"tokenizer", {{"kind", m.tokenizer.kind()}, {"sha256", m.tokenizer.sha256()}}}};
}

}  // namespace ebb::tools
