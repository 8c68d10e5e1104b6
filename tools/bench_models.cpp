// ebb bench models: whole training steps of presets, recipes and model folders, side by side.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>

#include "models/config_reader.h"
#include "ops/matmul.h"
#include "tensor/check.h"
#include "tensor/device_info.h"
#include "tensor/memory.h"
#include "tensor/random.h"
#include "tools/commands.h"
#include "tools/progress_line.h"
#include "tools/result_file.h"
#include "train/trainer.h"

namespace ebb::tools {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

struct Options {
  std::vector<std::string> models, set;
  std::string device = "cpu", dtype, json;
  int64_t batch = 0, length = 0;  // 0: 8 x 4096 on a GPU, 1 x 256 on the CPU
  int repeats = 20, warmup = 5;
  bool recompute = false, autotune = false, list = false;
};

// The presets of about 100M parameters, one of every kind.
std::vector<std::string> default_models() {
  std::vector<std::string> out;
  for (const std::string& name : preset_names())
    if (name.ends_with("-100m") || name == "dlt-160m") out.push_back(name);
  return out;
}

// What is measured under a name: a recipe's model and optimizer; of the rest of a recipe only what
// changes a step (accumulation does not: one micro-batch is timed).
struct Subject {
  std::string name;
  TrainConfig config;
};

Subject subject(const std::string& what, const Options& o) {
  const bool file = fs::is_regular_file(what), folder = fs::is_directory(what);
  json recipe = file     ? read_json(what, Comments::allow)
                : folder ? json{{"model", {{"folder", what}}}}
                         : json{{"model", {{"preset", what}}}};
  if (!file && !folder) preset(what);  // says which there are
  for (const std::string& s : o.set) set_path(&recipe, s);
  Subject out{file ? fs::path(what).stem().string() : what, parse_train_config(recipe, what)};
  if (!out.config.model_folder.empty()) {
    const std::string config = out.config.model_folder + "/config.json";
    out.config.model = parse_foreign_config(read_json(config), config);
  }
  return out;
}

struct Timing {
  int64_t parameters = 0, peak = 0;  // bytes, of what this model took
  int repeats = 0;
  double ms = 0, lower = 0, upper = 0;  // median and quartiles of a step
  double loss = 0;                      // after the last step
};

Batch random_batch(int64_t batch, int64_t length, int64_t vocab) {
  const Tensor tokens = Tensor::empty({batch, length}, DType::i64), labels = tokens.clone();
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    tokens.data<int64_t>()[i] = int64_t(random_word({31, 1}, uint64_t(i)) % uint64_t(vocab));
    labels.data<int64_t>()[i] = int64_t(random_word({31, 2}, uint64_t(i)) % uint64_t(vocab));
  }
  return {tokens, labels, {}};
}

Timing time_steps(const TrainConfig& c, const Options& o, Device device, DType dtype,
                  ProgressLine& progress, const std::string& name) {
  Timing t;
  const int64_t before = memory_stats(device).current;
  const auto model = make_model(c.model);
  init_weights(*model, c.init.seed);
  model->to(device);
  if (dtype == DType::bf16) model->enable_bf16();
  model->set_recompute(o.recompute);
  t.parameters = model->parameter_count();
  AdamW optimizer(
      decay_groups(model->named_parameters(), c.optim.weight_decay),
      {.beta1 = c.optim.beta1, .beta2 = c.optim.beta2, .eps = c.optim.eps, .clip = c.optim.clip});
  const Batch batch = random_batch(o.batch, o.length, c.model.vocab_size);
  std::vector<double> ms;
  for (int i = -o.warmup; i < o.repeats; ++i) {
    if (i == 0) reset_peak_memory(device);
    progress.show([&] {
      return i < 0 ? fmt::format("{}: warming up", name)
                   : fmt::format("{}: step {}/{}", name, i + 1, o.repeats);
    });
    const auto start = std::chrono::steady_clock::now();
    const StepResult r = train_step(*model, optimizer, batch, 1e-4);  // ends with a synchronisation
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    check(!r.skipped, "a gradient is not finite: such a step is no measure");
    if (i >= 0) ms.push_back(took.count());
    t.loss = r.loss;
  }
  t.peak = memory_stats(device).peak - before;
  std::sort(ms.begin(), ms.end());
  t.repeats = int(ms.size());
  t.ms = ms[ms.size() / 2];
  t.lower = ms[ms.size() / 4];
  t.upper = ms[ms.size() * 3 / 4];
  return t;
}

// What this machine's data has been measured with.
void resolve(Options* o, Device device, DType* dtype) {
  const bool cuda = device.is_cuda();
  if (o->batch == 0) o->batch = cuda ? 8 : 1;
  if (o->length == 0) o->length = cuda ? 4096 : 256;
  *dtype = o->dtype.empty() ? (cuda ? DType::bf16 : DType::f32)
                            : parse_dtype(o->dtype, {DType::f32, DType::bf16});
  if (!cuda && *dtype == DType::bf16) throw UsageError("--dtype bf16: models run in f32 on cpu");
}

// How much longer than the fastest the others take, fastest first.
void print_comparison(json rows) {
  std::sort(rows.begin(), rows.end(), [](const json& a, const json& b) {
    return a["ms"].get<double>() < b["ms"].get<double>();
  });
  if (rows.size() < 2) return;
  const double fastest = rows[0]["ms"];
  fmt::print("\n{:<32} {:>10}\n", "over the fastest", "%");
  for (const json& r : rows)
    fmt::print("{:<32} {:>10.1f}\n", r["model"].get<std::string>(),
               100 * (r["ms"].get<double>() / fastest - 1));
}

void run(Options o) {
  const Device device = usable_device(o.device);
  DType dtype;
  resolve(&o, device, &dtype);
  std::vector<Subject> subjects;
  for (const std::string& m : o.models.empty() ? default_models() : o.models)
    subjects.push_back(subject(m, o));
  if (o.list) {
    for (const Subject& s : subjects) fmt::print("{}\n", s.name);
    return;
  }
  check_result_path(o.json);
  set_matmul_autotune(o.autotune);
  json result = result_header("bench models", device);
  result["settings"] = {{"batch", o.batch},       {"length", o.length}, {"dtype", name(dtype)},
                        {"repeats", o.repeats},   {"warmup", o.warmup}, {"recompute", o.recompute},
                        {"autotune", o.autotune}, {"set", o.set}};
  result["rows"] = json::array();
  fmt::print("{}, {}; training steps on {} x {} tokens\n", device_info(device).name, name(dtype),
             o.batch, o.length);
  fmt::print("{:<32} {:>13} {:>10} {:>19} {:>12} {:>10}\n", "model", "parameters", "ms a step",
             "quartiles", "tokens/s", "peak MB");
  json timed = json::array();
  int failed = 0;
  for (const Subject& s : subjects) {
    json row = {{"model", s.name}, {"config", s.config.model.to_json()}};
    try {
      Timing t;
      {
        ProgressLine progress;
        t = time_steps(s.config, o, device, dtype, progress, s.name);
      }
      const double rate = 1e3 * double(o.batch * o.length) / t.ms;
      fmt::print("{:<32} {:>13} {:>10.2f} {:>9.2f} {:>9.2f} {:>12.0f} {:>10.1f}\n", s.name,
                 grouped(t.parameters), t.ms, t.lower, t.upper, rate, double(t.peak) / 1e6);
      row.update({{"parameters", t.parameters},
                  {"ms", t.ms},
                  {"ms_lower_quartile", t.lower},
                  {"ms_upper_quartile", t.upper},
                  {"tokens_per_second", rate},
                  {"peak_bytes", t.peak},
                  {"loss", t.loss}});
      timed.push_back(row);
    } catch (const Error& e) {  // the other rows are still worth having
      ++failed;
      fmt::print("{:<32} failed: {}\n", s.name, e.what());
      row["error"] = e.what();
    }
    std::fflush(stdout);
    result["rows"].push_back(row);
  }
  print_comparison(timed);
  if (!o.json.empty()) write_result(o.json, result);
  check(failed == 0, "{} of {} benchmarks failed", failed, subjects.size());
}

}  // namespace

void add_bench_models(CLI::App& bench) {
  CLI::App* c = add_command(
      bench, "models", "Training steps of whole models: time, tokens per second, peak memory",
      "ebb bench models --device cuda\n"
      "ebb bench models gdn-100m kda-100m --device cuda --batch 2 --length 16384\n"
      "ebb bench models recipes/decay/vector-*.json recipes/decay/simple-vector-p99.json --device "
      "cuda\n"
      "ebb bench models mamba2-100m --set model.num_hidden_layers=2");
  auto o = std::make_shared<Options>();
  c->add_option("models", o->models,
                "Presets, recipes or model folders; the default is every preset of about 100M");
  c->add_option("--set", o->set, "Override a field of the recipe: path=value")
      ->allow_extra_args(false);
  c->add_option("--device", o->device, "cpu, cuda or cuda:N")->capture_default_str();
  c->add_option("--dtype", o->dtype, "f32 or bf16; the default is bf16 on a GPU, f32 on the CPU");
  const CLI::Range positive(int64_t(1), int64_t(1) << 31);
  c->add_option("--batch", o->batch, "Sequences; the default is 8 on a GPU, 1 on the CPU")
      ->check(positive);
  c->add_option("--length", o->length,
                "Tokens of a sequence; the default is 4096 on a GPU, 256 on the CPU")
      ->check(positive);
  c->add_option("--repeats", o->repeats, "Steps, of which the median counts")
      ->capture_default_str()
      ->check(CLI::Range(3, 10000));
  c->add_option("--warmup", o->warmup, "Steps before those")
      ->capture_default_str()
      ->check(CLI::Range(1, 10000));
  c->add_flag("--recompute", o->recompute, "Activation checkpointing, block by block");
  c->add_flag("--autotune", o->autotune, "Time cuBLASLt's suggestions for each product");
  c->add_option("--json", o->json, "Also write the results to this file");
  c->add_flag("--list", o->list, "Only list what would be measured");
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
