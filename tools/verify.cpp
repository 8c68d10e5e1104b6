#include "tools/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "tensor/check.h"
#include "tools/verify_case.h"

namespace ebb::tools {
namespace {

namespace fs = std::filesystem;

// The item a file stands for, by its name and folders; nothing for files beside the golden ones.
bool classify(const fs::path& file, GoldenItem* item) {
  const fs::path full = fs::absolute(file).lexically_normal();
  const std::string parent = full.parent_path().filename().string();
  const std::string grandparent = full.parent_path().parent_path().filename().string();
  const std::string stem = full.stem().string(), extension = full.extension().string();
  if (grandparent == "ops" && extension == ".safetensors") {
    *item = {GoldenKind::op, parent, parent + "/" + stem, file.string()};
    return true;
  }
  if (grandparent == "models" && full.filename() == "io.safetensors") {
    *item = {GoldenKind::model, parent, parent, file.parent_path().string()};
    return true;
  }
  if (parent == "tokenizers" && extension == ".jsonl" && !stem.ends_with(".decode")) {
    *item = {GoldenKind::tokenizer, stem, stem, file.string()};
    return true;
  }
  return false;
}

const Adapter* find_adapter(const std::string& op) {
  for (const Adapter& a : adapters())
    if (a.op == op) return &a;
  return nullptr;
}

nlohmann::json record(const GoldenItem& item, const std::string& status,
                      const std::string& message) {
  nlohmann::json r = {
      {"kind", name(item.kind)}, {"name", item.name}, {"path", item.path}, {"status", status}};
  if (!message.empty()) r["message"] = message;
  return r;
}

nlohmann::json tensor_record(const TensorResult& t) {
  nlohmann::json r = {{"name", t.name},
                      {"error", t.error},
                      {"limit", t.limit},
                      {"measure", t.measure},
                      {"passed", t.passed()}};
  if (t.golden_error >= 0) r["golden_error"] = t.golden_error;
  return r;
}

void print_tensor(const TensorResult& t) {
  std::string line = fmt::format("      {:<20} {:.2e}  limit {:g}", t.name, t.error, t.limit);
  if (t.measure != "relative") line += " (" + t.measure + ")";
  if (t.golden_error >= 0) line += fmt::format("  against golden {:.2e}", t.golden_error);
  fmt::print("{}{}\n", line, t.passed() ? "" : "  FAILED");
}

class Verifier {
 public:
  explicit Verifier(const VerifySettings& settings) : settings_(settings) {}

  void visit(const GoldenItem& item) {
    const Adapter* adapter = item.kind == GoldenKind::op ? find_adapter(item.group) : nullptr;
    if (!adapter) return skip(item);
    try {
      const GoldenCase c = load_golden_case(item.path);
      check(c.op == item.group, "{}: is a case of {}, in a folder of {}", item.path, c.op,
            item.group);
      report(item, verify_case(c, *adapter, settings_.device, settings_.dtype));
    } catch (const std::exception& e) {
      ++summary_.failed;
      fmt::print("FAIL  {}: {}\n", item.name, e.what());
      summary_.items.push_back(record(item, "failed", e.what()));
    }
  }

  VerifySummary finish() {
    for (const auto& [key, count] : skipped_)
      fmt::print("skip  {} {}: not in this version of ebb ({} case{})\n", name(key.first),
                 key.second, count, count > 1 ? "s" : "");
    fmt::print("{} passed, {} failed, {} skipped\n", summary_.passed, summary_.failed,
               summary_.skipped);
    return std::move(summary_);
  }

 private:
  void skip(const GoldenItem& item) {
    ++summary_.skipped;
    ++skipped_[{item.kind, item.group}];
    summary_.items.push_back(record(item, "skipped", "not in this version of ebb"));
  }

  void report(const GoldenItem& item, const std::vector<TensorResult>& tensors) {
    const bool passed = std::all_of(tensors.begin(), tensors.end(),
                                    [](const TensorResult& t) { return t.passed(); });
    ++(passed ? summary_.passed : summary_.failed);
    nlohmann::json r = record(item, passed ? "passed" : "failed", "");
    r["tensors"] = nlohmann::json::array();
    for (const TensorResult& t : tensors) r["tensors"].push_back(tensor_record(t));
    summary_.items.push_back(r);
    if (passed && settings_.failures_only) return;
    fmt::print("{}  {}\n", passed ? "ok  " : "FAIL", item.name);
    for (const TensorResult& t : tensors)
      if (!settings_.failures_only || !t.passed()) print_tensor(t);
  }

  const VerifySettings& settings_;
  VerifySummary summary_;
  std::map<std::pair<GoldenKind, std::string>, int> skipped_;
};

}  // namespace

const char* name(GoldenKind kind) {
  switch (kind) {
    case GoldenKind::op:
      return "operator";
    case GoldenKind::model:
      return "model";
    case GoldenKind::tokenizer:
      return "tokenizer";
  }
  return "?";
}

std::vector<GoldenItem> find_golden_items(const std::vector<std::string>& paths) {
  std::vector<GoldenItem> items;
  GoldenItem item;
  for (const std::string& path : paths) {
    check(fs::exists(path), "{}: no such file or folder", path);
    if (!fs::is_directory(path)) {
      if (classify(path, &item)) items.push_back(item);
      continue;
    }
    for (const auto& entry :
         fs::recursive_directory_iterator(path, fs::directory_options::follow_directory_symlink))
      if (entry.is_regular_file() && classify(entry.path(), &item)) items.push_back(item);
  }
  std::sort(items.begin(), items.end(), [](const GoldenItem& a, const GoldenItem& b) {
    return std::tie(a.kind, a.name, a.path) < std::tie(b.kind, b.name, b.path);
  });
  return items;
}

VerifySummary verify_items(const std::vector<GoldenItem>& items, const VerifySettings& settings) {
  Verifier verifier(settings);
  for (const GoldenItem& item : items) verifier.visit(item);
  return verifier.finish();
}

}  // namespace ebb::tools
