// ebb init: decay gates of a fresh or a foreign model, by DAMI or its controls.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>

#include "models/checkpoint.h"
#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tools/commands.h"
#include "tools/model_report.h"
#include "tools/output_folder.h"
#include "tools/progress_line.h"
#include "tools/temporary_folder.h"
#include "tools/token_source.h"
#include "train/trainer.h"

namespace ebb::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Options {
  std::string model, scheme, out, device = "cpu";
  TokenSource tokens;
  uint64_t seed = 42;
  std::vector<std::string> set;
  bool overwrite = false;
};

// The init section a recipe would hold, by the same parser.
InitConfig init_config(const Options& o) {
  json recipe = {{"init",
                  {{"scheme", o.scheme},
                   {"seed", o.seed},
                   {"calibration_sequences", o.tokens.sequences},
                   {"calibration_length", o.tokens.length}}}};
  try {
    for (const std::string& s : o.set) set_path(&recipe, "init." + s);
    ConfigReader reader(recipe, "");
    const InitConfig init = parse_init_config(reader.object("init"));
    reader.finish("--set");
    return init;
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

DecayGate gate_of(const LanguageModel& model, int64_t layer) {
  const auto gate = model.block(layer).mixer().decay_gate_parameters();
  check(gate.has_value(), "init: layer {} of this model has no decay gate to set", layer);
  return *gate;
}

// What is impossible is said before anything is read or run.
void check_targets(const LanguageModel& model, const InitConfig& init) {
  if (init.scheme == InitScheme::random && !has_decay_gates(model)) return;  // weights alone
  for (int64_t l = 0; l < model.layers(); ++l) gate_of(model, l);
  if (init.scheme != InitScheme::dami) return;
  sensitivity_profile(init.dami, model.layers());
  timescale_ladder(init.dami, gate_of(model, 0).heads);
}

// The gates where nothing was measured.
std::vector<HeadReport> gate_values(const LanguageModel& model) {
  std::vector<HeadReport> out;
  if (!has_decay_gates(model)) return out;
  for (int64_t l = 0; l < model.layers(); ++l) {
    const DecayGate gate = gate_of(model, l);
    const auto A_log = gate.A_log.master().to_vector<double>(),
               dt_bias = gate.dt_bias.master().to_vector<double>();
    for (int64_t h = 0; h < gate.heads; ++h) {
      HeadReport r{.layer = l, .head = h, .A_log = A_log[size_t(h)]};
      for (int64_t c = 0; c < gate.channels; ++c)
        r.dt_bias += dt_bias[size_t(h * gate.channels + c)] / double(gate.channels);
      out.push_back(r);
    }
  }
  return out;
}

std::vector<HeadReport> apply(LanguageModel& model, const InitConfig& init, const Tensor& tokens) {
  ProgressLine progress;
  const auto show = [&](int64_t l) {
    progress.show([&] { return fmt::format("layer {}/{}", l + 1, model.layers()); });
  };
  if (init.scheme == InitScheme::dami) return calibrate_dami(model, init.dami, tokens, show);
  if (init.scheme == InitScheme::random) apply_random_gates(model, init.seed);
  if (init.scheme == InitScheme::post) apply_post(model, init.post_length);
  return tokens ? measure_gates(model, tokens, show) : gate_values(model);
}

// The folder with the new weights; what else the source folder holds (tokenizer, generation
// settings) comes along.
void write_folder(const fs::path& folder, const Options& o, const LanguageModel& model,
                  const json& record) {
  save_model(folder.string(), model);
  write_file_atomically((folder / "init.json").string(), record.dump(1) + "\n");
  if (fs::is_directory(o.model)) copy_other_files(o.model, folder);
  const bool has_tokenizer =
      fs::exists(folder / "tokenizer.model") || fs::exists(folder / "tokenizer.json");
  if (!has_tokenizer && !o.tokens.tokenizer.empty())
    Tokenizer::load(o.tokens.tokenizer).save(folder.string());
}

void print_deviation(const std::vector<HeadReport>& gates) {
  double timescale = 0, sensitivity = 0;
  for (const HeadReport& g : gates) {
    timescale = std::max(timescale, std::abs(g.timescale / g.target_timescale - 1));
    if (g.target_sensitivity > 0)
      sensitivity = std::max(sensitivity, std::abs(g.sensitivity - g.target_sensitivity));
  }
  fmt::print("\nlargest deviation from the targets: timescale {:.1e} of it", timescale);
  // Mamba-2's rule has no sensitivities to aim at.
  const bool aimed = !gates.empty() && gates[0].target_sensitivity > 0;
  fmt::print("{}\n", aimed ? fmt::format(", sensitivity {:.1e}", sensitivity) : "");
}

void run(const Options& o) {
  const InitConfig init = init_config(o);
  const bool dami = init.scheme == InitScheme::dami;
  const Device device = usable_device(o.device);
  const fs::path out = new_folder(o.out, o.overwrite, "init");

  const auto model = load_or_make(o.model, init.seed);
  const bool needs_data = !model->config().is_mamba2() && !model->config().is_rwkv7();
  if (dami && o.tokens.file.empty() && needs_data)
    throw UsageError("--scheme dami calibrates on data: name it with --tokens");
  check_targets(*model, init);
  TokenSource source = o.tokens;
  source.sequences = init.calibration_sequences;
  source.length = init.calibration_length;
  const Tensor tokens =
      source.file.empty() ? Tensor() : head_tokens(source, model->config().vocab_size, o.model);
  const TemporaryFolder staging(out.parent_path(), out.filename().string());
  model->to(device);
  const std::vector<HeadReport> gates = apply(*model, init, tokens);

  TrainConfig as_recipe;
  as_recipe.init = init;
  json record = {
      {"model", o.model}, {"init", as_recipe.resolved()["init"]}, {"gates", gates_to_json(gates)}};
  if (tokens) record["tokens"] = source.file;
  write_folder(staging.path() / "model", o, *model, record);
  publish(staging.path() / "model", out);

  fmt::print("{} gates of {}, {} layers", o.scheme, o.model, model->layers());
  if (tokens)
    fmt::print(", on the first {} x {} tokens of {}", source.sequences, source.length, source.file);
  fmt::print("\n\n");
  print_targets(gates);
  if (dami) print_deviation(gates);
  fmt::print("\nwrote {}\n", o.out);
}

}  // namespace

void add_init(CLI::App& app) {
  auto* c = add_command(
      app, "init", "Set the decay gates of a fresh or foreign model: DAMI, PoST or Random",
      "ebb init --model gdn-100m --scheme dami --tokens data/train --out models/dami\n"
      "ebb init --model foreign/ --scheme dami --tokens corpus.jsonl.zst --tokenizer foreign/ "
      "--out calibrated/\n"
      "ebb init --model gdn-100m --scheme dami --set dami.tau_max=2048 --tokens data/train "
      "--out models/tau2048\n"
      "ebb init --model gdn-100m --scheme post --set post_length=4096 --out models/post");
  auto o = std::make_shared<Options>();
  c->add_option("--model", o->model, "A model folder, or a preset (random weights by --seed)")
      ->required();
  c->add_option("--scheme", o->scheme, "dami, post or random")
      ->check(CLI::IsMember({"dami", "post", "random"}))
      ->required();
  c->add_option("--out", o->out, "The model folder to write")->required();
  add_token_options(c, &o->tokens, "Calibrate (dami) or measure on these tokens");
  c->add_option("--seed", o->seed, "Of a preset's weights and of random gates")
      ->capture_default_str();
  c->add_option("--set", o->set,
                "A field of a recipe's init section: dami.tau_max, dami.tau_min, dami.ladder, "
                "dami.shape, dami.low, dami.high, dami.shift, dami.peak_layer, post_length")
      ->allow_extra_args(false);
  c->add_option("--device", o->device, "cpu, cuda or cuda:N")->capture_default_str();
  c->add_flag("--overwrite", o->overwrite, "Replace the folder when it exists");
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
