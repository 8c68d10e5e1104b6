// `ebb verify`: golden cases against this build, on any device and dtype.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tensor/device.h"
#include "tensor/dtype.h"

namespace ebb::tools {

enum class GoldenKind { op, model, tokenizer };
const char* name(GoldenKind kind);

// Something to verify, found below the paths: ops/<operator>/<case>.safetensors, models/<name>/,
// tokenizers/<name>.jsonl.
struct GoldenItem {
  GoldenKind kind = GoldenKind::op;
  std::string group;  // operator; model or tokenizer name
  std::string name;   // operator/case; model or tokenizer name
  std::string path;
};
// In order of kind and name. A path may be one case itself. Throws when a path does not exist.
std::vector<GoldenItem> find_golden_items(const std::vector<std::string>& paths);

struct VerifySettings {
  Device device = {};
  DType dtype = DType::f32;
  std::string tokenizers = {};  // folder with a folder of files per golden tokenizer
  bool failures_only = false;   // print only what fails
};

struct VerifySummary {
  int passed = 0, failed = 0, skipped = 0;
  nlohmann::json items = nlohmann::json::array();  // one record per item
};
// Prints every tensor's error and limit, what was skipped and why, and the closing line.
VerifySummary verify_items(const std::vector<GoldenItem>& items, const VerifySettings& settings);

}  // namespace ebb::tools
