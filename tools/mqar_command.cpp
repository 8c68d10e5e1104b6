// ebb mqar: examples of multi-query associative recall as files, and models scored on them.
#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "eval/mqar.h"
#include "models/checkpoint.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tools/commands.h"
#include "tools/eval_models.h"
#include "tools/progress_line.h"
#include "tools/result_file.h"

namespace ebb::tools {
namespace {

using nlohmann::json;

struct Options {
  MqarSpec spec;
  std::vector<int64_t> pairs;
  int64_t examples = 3000;
  uint64_t seed = 42;
  bool zeros = false, test = false;
  std::vector<std::string> models, set;
  std::string out, device = "auto", dtype;
};

// Wrong sizes are wrong use.
MqarGenerator generator(const Options& o, int64_t pairs, uint64_t seed) {
  MqarSpec s = o.spec;
  s.pairs = pairs;
  s.seed = seed;
  s.random_non_queries = !o.zeros;
  try {
    return MqarGenerator(s);
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

uint64_t seed_of(const Options& o, bool test) {
  if (o.seed >> 31) throw UsageError(fmt::format("--seed {}: want less than 2^31", o.seed));
  return test ? mqar_test_seed(o.seed) : o.seed;
}

void run_generate(const Options& o) {
  std::vector<MqarGenerator> all;
  for (const int64_t n : o.pairs) all.push_back(generator(o, n, seed_of(o, o.test)));
  write_file_atomically(o.out, [&](FileWriter& out) {
    for (const MqarGenerator& g : all)
      for (int64_t i = 0; i < o.examples; ++i) {
        const MqarExample e = g.example(i);
        const MqarDraw d = g.draw(i);
        const nlohmann::ordered_json line = {{"inputs", e.inputs},
                                             {"labels", e.labels},
                                             {"pairs", g.spec().pairs},
                                             {"slots", d.slots}};
        out.write(line.dump() + "\n");
      }
  });
  fmt::print("{} examples in {}\n", o.examples * int64_t(all.size()), o.out);
}

void print_line(const std::string& model, const MqarScore& s) {
  fmt::print("{:<20} {:>6} {:>6} {:>9} {:>9.2f} {:>9.4f}\n", model, s.length, s.pairs, s.examples,
             100 * s.accuracy, s.loss);
}

MqarScore score(const std::string& name, const LanguageModel& model, const MqarGenerator& g,
                int64_t examples) {
  ProgressLine progress;
  MqarScoring options;
  options.progress = [&](int64_t done) {
    progress.show([&] { return fmt::format("{} {}/{} examples", name, done, examples); });
  };
  const MqarScore s = score_mqar(model, g, examples, options);
  check(std::isfinite(s.loss), "mqar eval: {}: the loss is {}", name, s.loss);
  return s;
}

void run_eval(const Options& o) {
  const Device device = usable_device(o.device);
  const DType dtype =
      o.dtype.empty() ? DType::f32 : parse_dtype(o.dtype, {DType::f32, DType::bf16});
  if (dtype == DType::bf16 && !device.is_cuda())
    throw UsageError("--dtype bf16: models run in f32 on cpu");
  std::vector<MqarGenerator> all;
  for (const int64_t n : o.pairs) all.push_back(generator(o, n, seed_of(o, true)));
  const std::vector<FoundModel> models = find_models(o.models);
  const json changes = config_changes(o.set);
  json result = result_header("mqar eval", device);
  result.update({{"dtype", name(dtype)},
                 {"vocab_size", o.spec.vocab_size},
                 {"power", o.spec.power},
                 {"random_non_queries", !o.zeros},
                 {"seed", seed_of(o, true)},
                 {"changes", changes},
                 {"scores", json::array()}});
  fmt::print("{:<20} {:>6} {:>6} {:>9} {:>9} {:>9}\n", "model", "length", "pairs", "examples",
             "right, %", "loss");
  for (const FoundModel& m : models) {
    const auto model = load_model(m.folder, changes);
    model->to(device);
    if (dtype == DType::bf16) model->enable_bf16();
    for (const MqarGenerator& g : all) {
      const MqarScore s = score(m.name, *model, g, o.examples);
      json record = s.record();
      record.update({{"model", m.name},
                     {"folder", m.folder},
                     {"model_type", model->config().model_type},
                     {"parameters", model->parameter_count()},
                     {"checkpoint", weights_hash(m.folder)}});
      result["scores"].push_back(record);
      print_line(m.name, s);
    }
  }
  if (!o.out.empty()) write_result(o.out, result);
}

void add_task_options(CLI::App* c, Options* o) {
  c->add_option("--length", o->spec.length, "Tokens of an example, even")->capture_default_str();
  c->add_option("--pairs", o->pairs, "Numbers of key-value pairs, each at most length/4")
      ->required()
      ->delimiter(',');
  c->add_option("--vocab-size", o->spec.vocab_size, "Keys are of the lower half, values the upper")
      ->capture_default_str();
  c->add_option("--power", o->spec.power, "Slot g is asked with weight (g+1)^(power-1)")
      ->capture_default_str();
  c->add_flag("--zeros", o->zeros, "Token 0 between the questions instead of random ones");
  c->add_option("--examples", o->examples, "Of each number of pairs")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(1), int64_t(1) << 40));
}

}  // namespace

void add_mqar(CLI::App& app) {
  auto* c = add_command(
      app, "mqar", "Multi-query associative recall: write examples, score models",
      "ebb mqar generate --length 256 --pairs 8,64 --examples 1000 --out mqar.jsonl\n"
      "ebb mqar eval --model runs/mqar-gdn --length 256 --pairs 64 --out runs/mqar-gdn/mqar.json");
  c->require_subcommand(1);
  auto o = std::make_shared<Options>();
  auto* g = add_command(
      *c, "generate", "Write examples as JSON lines: inputs, labels, pairs, slots",
      "ebb mqar generate --length 256 --pairs 64 --examples 3000 --test --out test.jsonl");
  add_task_options(g, o.get());
  g->add_option("--seed", o->seed, "Below 2^31")->capture_default_str();
  g->add_flag("--test", o->test, "The test examples that belong to this seed");
  g->add_option("--out", o->out, "JSON lines to write")->required();
  g->callback([o] { run_generate(*o); });

  auto* e =
      add_command(*c, "eval", "Share of the values that models recall, on test examples",
                  "ebb mqar eval --model a=runs/a,b=runs/b --length 256 --pairs 8,16,32,64\n"
                  "ebb mqar eval --model runs/dart --length 256 --pairs 64 --set use_sma=false");
  e->add_option("--model", o->models, "Model or run folders, FOLDER or NAME=FOLDER")
      ->required()
      ->delimiter(',');
  add_task_options(e, o.get());
  e->add_option("--seed", o->seed, "Of the training that the examples are to test")
      ->capture_default_str();
  e->add_option("--device", o->device, "cpu, cuda, cuda:N, or auto: a GPU where there is one")
      ->capture_default_str();
  e->add_option("--dtype", o->dtype, "f32 (default) or bf16");
  add_set_option(e, &o->set);
  e->add_option("--out", o->out, "JSON file with the scores, by distance too");
  e->callback([o] { run_eval(*o); });
}

}  // namespace ebb::tools
