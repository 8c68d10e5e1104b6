// ebb inspect: what a model is made of, and what its decay gates do.
#include <fmt/format.h>

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

std::vector<HeadReport> measure(LanguageModel& model, const Options& o, Device device) {
  const Tensor tokens = head_tokens(o.tokens, model.config().vocab_size, o.model);
  model.to(device);
  ProgressLine progress;
  return measure_gates(model, tokens, [&](int64_t l) {
    progress.show([&] { return fmt::format("gates of layer {}/{}", l + 1, model.layers()); });
  });
}

void run(const Options& o) {
  const Device device = usable_device(o.device);
  const auto model = load_or_make(o.model, o.seed);
  const ModelConfig& c = model->config();
  const ModelReport report = report_model(*model, o.context);
  const std::vector<HeadReport> gates =
      o.tokens.file.empty() ? std::vector<HeadReport>{} : measure(*model, o, device);
  if (!o.json.empty()) {
    json result = result_header("inspect", device);
    result["model"] = o.model;
    result["config"] = c.to_json();
    result.update(to_json(report));
    if (!gates.empty()) {
      result["tokens"] = {
          {"file", o.tokens.file}, {"sequences", o.tokens.sequences}, {"length", o.tokens.length}};
      result["gates"] = gates_to_json(gates);
    }
    if (o.json == "-") {
      fmt::print("{}\n", result.dump(1));
      return;
    }
    write_result(o.json, result);
  }
  fmt::print("{}: {}, {} layers of width {}, vocabulary {}\n\n", o.model, c.model_type,
             c.num_hidden_layers, c.hidden_size, grouped(c.vocab_size));
  print_report(report);
  if (gates.empty()) return;
  fmt::print("\ndecay gates on the first {} x {} tokens of {}\n", o.tokens.sequences,
             o.tokens.length, o.tokens.file);
  print_gates(gates);
}

}  // namespace

void add_inspect(CLI::App& app) {
  auto* c = add_command(app, "inspect", "Show a model's parameters, state and decay gates",
                        "ebb inspect gdn-100m\n"
                        "ebb inspect runs/a/final --tokens data/val --json a.json\n"
                        "ebb inspect model/ --tokens book.txt --tokenizer model/ --length 1024");
  auto o = std::make_shared<Options>();
  c->add_option("model", o->model, "A model folder, or a preset (random weights)")->required();
  add_token_options(c, &o->tokens, "Measure timescales and sensitivities on these tokens");
  c->add_option("--seed", o->seed, "Of a preset's random weights")->capture_default_str();
  c->add_option("--context", o->context, "Tokens for which state that grows (DART) is counted")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(1), int64_t(1) << 40));
  c->add_option("--device", o->device, "cpu, cuda or cuda:N")->capture_default_str();
  c->add_option("--json", o->json, "Also write everything to this file; - prints only that");
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
