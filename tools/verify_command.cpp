// The command line of `ebb verify`.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <regex>

#include "tensor/check.h"
#include "tools/commands.h"
#include "tools/result_file.h"
#include "tools/verify.h"

namespace ebb::tools {
namespace {

struct VerifyOptions {
  std::vector<std::string> paths;
  std::string device = "cpu", dtype = "f32", filter, json, tokenizers;
  bool failures_only = false, strict = false;
};

std::vector<GoldenItem> matching(std::vector<GoldenItem> items, const std::string& filter) {
  if (filter.empty()) return items;
  std::regex pattern;
  try {
    pattern = std::regex(filter);
  } catch (const std::regex_error&) {
    throw UsageError(fmt::format("--filter '{}' is not a regular expression", filter));
  }
  std::erase_if(items, [&](const GoldenItem& i) {
    return !std::regex_search(std::string(name(i.kind)) + " " + i.name, pattern);
  });
  return items;
}

void run_verify(const VerifyOptions& o) {
  VerifySettings settings{.device = usable_device(o.device),
                          .dtype = parse_dtype(o.dtype, {DType::f32, DType::f64, DType::bf16}),
                          .tokenizers = o.tokenizers,
                          .failures_only = o.failures_only};
  const DType other = settings.device.is_cuda() ? DType::bf16 : DType::f64;
  if (settings.dtype != DType::f32 && settings.dtype != other)
    throw UsageError(fmt::format("--dtype {}: ebb runs in f32 or {} on {}", o.dtype,
                                 ebb::name(other), o.device));
  if (!o.tokenizers.empty() && !std::filesystem::is_directory(o.tokenizers))
    throw UsageError(fmt::format("--tokenizers '{}' is not a folder", o.tokenizers));
  const std::vector<GoldenItem> items = matching(find_golden_items(o.paths), o.filter);
  check(!items.empty(),
        "no golden case found{}; looked for ops/*/*.safetensors, models/*/ and "
        "tokenizers/*.jsonl below the paths",
        o.filter.empty() ? "" : " that matches --filter");
  check_result_path(o.json);
  const VerifySummary s = verify_items(items, settings);
  if (!o.json.empty()) {
    nlohmann::json result = result_header("verify", settings.device);
    result["dtype"] = o.dtype;
    result["passed"] = s.passed;
    result["failed"] = s.failed;
    result["skipped"] = s.skipped;
    result["items"] = s.items;
    write_result(o.json, result);
  }
  if (s.failed) throw Exit{kExitFailure};
  check(s.passed > 0, "nothing was verified: every case found was skipped");
  check(!o.strict || s.skipped == 0, "{} skipped, and --strict allows none", s.skipped);
}

}  // namespace

void add_verify(CLI::App& app) {
  CLI::App* c =
      add_command(app, "verify", "Compare operators, models and tokenizers with golden cases",
                  "ebb verify tests/data\n"
                  "ebb verify golden/ops/gated_delta_rule --device cuda --dtype bf16\n"
                  "ebb verify golden/models --filter 'model gated' --json verify.json\n"
                  "ebb verify golden --tokenizers tokenizers --strict");
  auto o = std::make_shared<VerifyOptions>();
  c->add_option("paths", o->paths,
                "Folders with ops/, models/ or tokenizers/ below, or single cases")
      ->required();
  c->add_option("--device", o->device, "cpu, cuda or cuda:N")->capture_default_str();
  c->add_option("--dtype", o->dtype, "f32, f64 (cpu) or bf16 (cuda)")->capture_default_str();
  c->add_option("--filter", o->filter,
                "Only cases whose 'kind name' matches this regular expression");
  c->add_option("--tokenizers", o->tokenizers,
                "Folder with the files of each golden tokenizer in a folder of its name");
  c->add_option("--json", o->json, "Also write the results to this file");
  c->add_flag("--failures-only", o->failures_only, "Print only what fails");
  c->add_flag("--strict", o->strict, "Fail when a case is skipped");
  c->callback([o] { run_verify(*o); });
}

}  // namespace ebb::tools
