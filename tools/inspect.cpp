// ebb inspect: what a model is made of, and what its decay gates do.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "models/checkpoint.h"
#include "tensor/check.h"
#include "tools/commands.h"
#include "tools/model_report.h"
#include "tools/progress_line.h"
#include "tools/result_file.h"
#include "tools/token_source.h"
#include "train/trainer.h"

namespace ebb::tools {
namespace {

using nlohmann::json;

struct Options {
  std::string model, device = "cpu", json;
  TokenSource tokens;
  uint64_t seed = 42;
  int64_t context = 4096;
};

constexpr int64_t kDecayTokens = 2048;  // at most, of one text: what the decay study looks at

// What a model does on given tokens.
struct Measured {
  std::vector<HeadReport> gates = {};  // empty: none that DAMI could set
  DecayUse decays = {};                // no layers: none at all
};

Measured measure(LanguageModel& model, const Options& o, Device device) {
  const Tensor tokens = head_tokens(o.tokens, model.config().vocab_size, o.model);
  const Tensor text = tokens.slice(0, 0, 1).slice(1, 0, std::min(tokens.size(1), kDecayTokens));
  model.to(device);
  ProgressLine progress;
  const auto show = [&](const char* what) {
    return [&progress, &model, what](int64_t l) {
      progress.show([&] { return fmt::format("{} of layer {}/{}", what, l + 1, model.layers()); });
    };
  };
  Measured m;
  if (!model.config().lower_bound)  // a bounded gate has no timescale of that kind
    m.gates = measure_gates(model, tokens, show("gates"));
  m.decays = measure_decays(model, text, show("decays"));
  return m;
}

void run(const Options& o) {
  const Device device = usable_device(o.device);
  const auto model = load_or_make(o.model, o.seed);
  const ModelConfig& c = model->config();
  const ModelReport report = report_model(*model, o.context);
  const Measured found = o.tokens.file.empty() ? Measured{} : measure(*model, o, device);
  if (!o.json.empty()) {
    json result = result_header("inspect", device);
    result["model"] = o.model;
    result["config"] = c.to_json();
    result.update(to_json(report));
    if (!o.tokens.file.empty())
      result["tokens"] = {
          {"file", o.tokens.file}, {"sequences", o.tokens.sequences}, {"length", o.tokens.length}};
    if (!found.gates.empty()) result["gates"] = gates_to_json(found.gates);
    if (!found.decays.layers.empty()) result["decays"] = to_json(found.decays);
    if (o.json == "-") {
      fmt::print("{}\n", result.dump(1));
      return;
    }
    write_result(o.json, result);
  }
  fmt::print("{}: {}, {} layers of width {}, vocabulary {}\n\n", o.model, c.model_type,
             c.num_hidden_layers, c.hidden_size, grouped(c.vocab_size));
  print_report(report);
  if (o.tokens.file.empty()) return;
  if (!found.gates.empty()) {
    fmt::print("\ndecay gates on the first {} x {} tokens of {}\n", o.tokens.sequences,
               o.tokens.length, o.tokens.file);
    print_gates(found.gates);
  }
  if (found.decays.layers.empty()) {
    fmt::print("\nno decays: nothing in a {} fades\n", c.model_type);
    return;
  }
  fmt::print("\nshare of the state kept from token to token, on the first {} tokens of {}\n",
             grouped(found.decays.tokens), o.tokens.file);
  print_decays(found.decays);
}

}  // namespace

void add_inspect(CLI::App& app) {
  auto* c = add_command(app, "inspect", "Show a model's parameters, state and decay gates",
                        "ebb inspect gdn-100m\n"
                        "ebb inspect runs/a/final --tokens data/val --json a.json\n"
                        "ebb inspect model/ --tokens book.txt --tokenizer model/ --length 1024");
  auto o = std::make_shared<Options>();
  c->add_option("model", o->model, "A model folder, or a preset (random weights)")->required();
  add_token_options(c, &o->tokens, "Measure timescales, sensitivities and decays on these tokens");
  c->add_option("--seed", o->seed, "Of a preset's random weights")->capture_default_str();
  c->add_option("--context", o->context,
                "Tokens for which state that grows (DART, Transformer) is counted")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(1), int64_t(1) << 40));
  c->add_option("--device", o->device, "cpu, cuda or cuda:N")->capture_default_str();
  c->add_option("--json", o->json, "Also write everything to this file; - prints only that");
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
