#include "models/weight_files.h"

#include <filesystem>
#include <map>
#include <set>

#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/file.h"

namespace ebb {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kOne = "/model.safetensors";
constexpr const char* kIndex = "/model.safetensors.index.json";

// The weight_map of an index: tensors by file.
std::map<std::string, std::set<std::string>> read_index(const std::string& file) {
  const json j = read_json(file);
  const json map = j.is_object() ? j.value("weight_map", json()) : json();
  check(map.is_object() && !map.empty(), "{}: want an object \"weight_map\"", file);
  std::map<std::string, std::set<std::string>> out;
  for (const auto& [tensor, shard] : map.items()) {
    const std::string name = shard.is_string() ? shard.get<std::string>() : "";
    check(!name.empty() && fs::path(name).filename() == name,
          "{}: /weight_map/{}: want the name of a file beside it, got {}", file, tensor,
          shard.dump());
    out[name].insert(tensor);
  }
  return out;
}

// Public folders of older software, which ebb does not read.
void refuse_pickles(const std::string& folder) {
  for (const char* other : {"/pytorch_model.bin", "/pytorch_model.bin.index.json"})
    check(!fs::exists(folder + other),
          "{} holds {} and no model.safetensors; save it again as safetensors", folder, other + 1);
}

}  // namespace

bool WeightFiles::there(const std::string& folder) {
  return fs::exists(folder + kOne) || fs::exists(folder + kIndex);
}

WeightFiles::WeightFiles(const std::string& folder) {
  if (!there(folder)) refuse_pickles(folder);
  if (fs::exists(folder + kOne) || !fs::exists(folder + kIndex)) {
    files_.emplace_back(folder + kOne);
    return;
  }
  std::string problems;
  const auto shards = read_index(folder + kIndex);
  for (const auto& [name, tensors] : shards) {
    const std::string path = folder + "/" + name;
    if (!fs::exists(path)) {
      problems += fmt::format("\n  {} is missing", name);
      continue;
    }
    files_.emplace_back(path);
    for (const std::string& t : tensors)
      if (!files_.back().contains(t)) problems += fmt::format("\n  {} does not hold {}", name, t);
    for (const std::string& t : files_.back().names())
      if (!tensors.count(t)) problems += fmt::format("\n  {} of {} is not listed", t, name);
  }
  check(problems.empty(), "{}: the shards are not as it says:{}", folder + kIndex, problems);
}

StateDict WeightFiles::tensors() const {
  StateDict out;
  for (const SafeTensors& f : files_)
    for (const SafeTensors::Info& t : f.infos())
      out.emplace_back(t.name, t.dtype == "F16" ? f.get(t.name, DType::f32) : f.get(t.name));
  return out;
}

std::vector<std::string> WeightFiles::paths() const {
  std::vector<std::string> out;
  for (const SafeTensors& f : files_) out.push_back(f.path());
  return out;
}

void save_weights(const std::string& folder, const StateDict& tensors, int64_t shard_bytes) {
  const std::map<std::string, std::string> about = {{"format", "pt"}};
  std::vector<StateDict> shards;
  int64_t filled = 0, total = 0;
  for (const auto& [name, t] : tensors) {
    const bool full = shard_bytes > 0 && filled > 0 && filled + t.nbytes() > shard_bytes;
    if (shards.empty() || full) shards.emplace_back(), filled = 0;
    shards.back().emplace_back(name, t);
    filled += t.nbytes();
    total += t.nbytes();
  }
  if (shards.size() <= 1) return save_safetensors(folder + kOne, tensors, about);
  json map = json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string file = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    save_safetensors(folder + "/" + file, shards[i], about);
    for (const auto& [name, t] : shards[i]) map[name] = file;
  }
  const json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  write_file_atomically(folder + kIndex, index.dump(2) + "\n");
}

}  // namespace ebb
