#include "tools/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "tensor/check.h"
#include "tools/verify_case.h"
#include "tools/verify_model.h"
#include "tools/verify_tokenizer.h"

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

nlohmann::json result_record(const VerifyResult& t) {
  nlohmann::json r = {{"name", t.name},
                      {"error", t.error},
                      {"limit", t.limit},
                      {"measure", t.measure},
                      {"passed", t.passed()}};
  if (t.golden_error >= 0) r["golden_error"] = t.golden_error;
  if (t.total > 0) r["total"] = t.total;
  if (!t.note.empty()) r["note"] = t.note;
  if (t.informative) r["informative"] = true;
  return r;
}

void print_result(const VerifyResult& t, size_t width) {
  std::string line;
  if (t.total > 0) {
    line =
        fmt::format("      {:<{}}  {} of {} {} differ", t.name, width, t.error, t.total, t.measure);
  } else {
    line = fmt::format("      {:<{}}  {:.2e}  limit {:g}", t.name, width, t.error, t.limit);
    if (t.measure != "relative") line += " (" + t.measure + ")";
  }
  if (t.informative) line += ", for information";
  if (!t.note.empty()) line += ", " + t.note;
  if (t.golden_error >= 0) line += fmt::format("  against golden {:.2e}", t.golden_error);
  fmt::print("{}{}\n", line, t.passed() ? "" : "  FAILED");
}

constexpr const char* kNotHere = "not in this version of ebb";

class Verifier {
 public:
  explicit Verifier(const VerifySettings& settings) : settings_(settings) {}

  void visit(const GoldenItem& item) {
    try {
      std::string why_not;
      const std::vector<VerifyResult> results = verify(item, &why_not);
      if (why_not.empty())
        report(item, results);
      else
        skip(item, why_not);
    } catch (const std::exception& e) {
      ++summary_.failed;
      fmt::print("FAIL  {}: {}\n", item.name, e.what());
      summary_.items.push_back(record(item, "failed", e.what()));
    }
  }

  VerifySummary finish() {
    for (const auto& [what, count] : skipped_)
      fmt::print("skip  {} ({} case{})\n", what, count, count > 1 ? "s" : "");
    fmt::print("{} passed, {} failed, {} skipped\n", summary_.passed, summary_.failed,
               summary_.skipped);
    return std::move(summary_);
  }

 private:
  std::vector<VerifyResult> verify(const GoldenItem& item, std::string* why_not) const {
    switch (item.kind) {
      case GoldenKind::op:
        return verify_operator(item, why_not);
      case GoldenKind::model:
        *why_not = model_not_implemented(item.path);
        if (!why_not->empty()) return {};
        return verify_model(item.path, settings_.device, settings_.dtype);
      case GoldenKind::tokenizer:
        const auto tokenizer = golden_tokenizer(settings_.tokenizers, item.name, why_not);
        if (!tokenizer) return {};
        return verify_tokenizer(item.path, *tokenizer);
    }
    return {};
  }

  std::vector<VerifyResult> verify_operator(const GoldenItem& item, std::string* why_not) const {
    const Adapter* adapter = find_adapter(item.group);
    if (!adapter) {
      *why_not = kNotHere;
      return {};
    }
    const GoldenCase c = load_golden_case(item.path);
    check(c.op == item.group, "{}: is a case of {}, in a folder of {}", item.path, c.op,
          item.group);
    return verify_case(c, *adapter, settings_.device, settings_.dtype);
  }

  void skip(const GoldenItem& item, const std::string& why) {
    ++summary_.skipped;
    ++skipped_[fmt::format("{} {}: {}", name(item.kind), item.group, why)];
    summary_.items.push_back(record(item, "skipped", why));
  }

  void report(const GoldenItem& item, const std::vector<VerifyResult>& results) {
    const bool passed = std::all_of(results.begin(), results.end(),
                                    [](const VerifyResult& r) { return r.passed(); });
    ++(passed ? summary_.passed : summary_.failed);
    nlohmann::json r = record(item, passed ? "passed" : "failed", "");
    r["tensors"] = nlohmann::json::array();
    for (const VerifyResult& t : results) r["tensors"].push_back(result_record(t));
    summary_.items.push_back(r);
    if (passed && settings_.failures_only) return;
    fmt::print("{}  {}\n", passed ? "ok  " : "FAIL", item.name);
    size_t width = 19;
    for (const VerifyResult& t : results) width = std::max(width, t.name.size());
    for (const VerifyResult& t : results)
      if (!settings_.failures_only || !t.passed()) print_result(t, width);
  }

  const VerifySettings& settings_;
  VerifySummary summary_;
  std::map<std::string, int> skipped_;
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

namespace {

// Links are followed, each folder once: they may lead back up.
void find_below(const fs::path& folder, std::set<fs::path>* seen, std::vector<GoldenItem>* items) {
  std::error_code error;
  if (!seen->insert(fs::canonical(folder, error)).second) return;
  GoldenItem item;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;  // a link to nowhere is neither
    if (at->is_directory(ignored))
      find_below(at->path(), seen, items);
    else if (at->is_regular_file(ignored) && classify(at->path(), &item))
      items->push_back(item);
  }
  check(!error, "{}: cannot list the folder: {}", folder.string(), error.message());
}

}  // namespace

std::vector<GoldenItem> find_golden_items(const std::vector<std::string>& paths) {
  std::vector<GoldenItem> items;
  GoldenItem item;
  std::set<fs::path> seen;
  for (const std::string& path : paths) {
    check(fs::exists(path), "{}: no such file or folder", path);
    if (!fs::is_directory(path)) {
      if (classify(path, &item)) items.push_back(item);
      continue;
    }
    find_below(path, &seen, &items);
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
