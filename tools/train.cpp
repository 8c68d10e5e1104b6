// ebb train: a recipe to a run folder.
#include <cmath>
#include <csignal>

#include "models/config_reader.h"
#include "tensor/check.h"
#include "tools/commands.h"
#include "tools/mqar_task.h"
#include "tools/recipe.h"
#include "train/trainer.h"

namespace ebb::tools {
namespace {

volatile std::sig_atomic_t stop_requested = 0;
void request_stop(int) { stop_requested = 1; }

struct Options {
  std::string recipe, device = "auto";
  std::vector<std::string> set;
  bool resume = false, quiet = false;
};

std::vector<Shard> open_shards(const std::vector<std::string>& paths) {
  std::vector<Shard> out;
  for (const std::string& p : paths) out.emplace_back(p);
  verify_shards(out);  // a flipped bit would be trained on in silence
  return out;
}

LoaderOptions loader_options(const TrainConfig& c, const std::vector<std::string>& shards) {
  return {.shards = expand_shards(shards),
          .batch = c.sequences,
          .length = c.length,
          .seed = c.seed,
          .shuffle = c.data.shuffle,
          .reset_at_documents = c.data.reset_at_documents};
}

void print_memory(const TrainSummary& s, Device device) {
  const TrainingMemory& m = s.memory;
  const auto mb = [](int64_t bytes) { return double(bytes) / 1e6; };
  fmt::print(
      "memory on {}, MB: peak {:.1f}; weights {:.1f} + gradients {:.1f} + optimizer {:.1f} + saved "
      "for backward {:.1f} + workspace {:.1f} = {:.1f}\n",
      device.str(), mb(s.peak_bytes), mb(m.weights), mb(m.gradients), mb(m.optimizer), mb(m.saved),
      mb(m.workspace), mb(m.sum()));
}

// Token shards: what training and validation read. Borrows the recipe.
class ShardTask {
 public:
  explicit ShardTask(const TrainConfig& c)
      : c_(c),
        tokenizer_(Tokenizer::load(c.data.tokenizer)),
        loader_(loader_options(c, c.data.train), tokenizer_.vocab_hash()),
        stream_(open_shards(expand_shards(c.data.train))) {
    if (c.data.validation.empty()) return;  // made now, so that what is wrong with it is said now
    open_shards(expand_shards(c.data.validation));
    LoaderOptions fixed = loader_options(c, c.data.validation);
    fixed.shuffle = false;
    validation_ = std::make_unique<Loader>(fixed, tokenizer_.vocab_hash());
  }
  // `in` borrows this.
  void give(TrainerInputs* in) {
    in->tokenizer = tokenizer_;
    in->batches = loader_.source();
    in->stream = std::move(stream_);
    if (validation_) in->validate = [this](const LanguageModel& model) { return validate(model); };
  }

 private:
  nlohmann::json validate(const LanguageModel& model) {
    validation_->seek(0);
    std::vector<Batch> batches;
    const int64_t n = std::min(c_.validation_batches,
                               std::max<int64_t>(1, validation_->windows() / c_.sequences));
    for (int64_t i = 0; i < n; ++i) batches.push_back(validation_->next());
    const double loss = mean_loss(model, batches);
    return {{"validation_loss", loss}, {"perplexity", std::exp(loss)}};
  }

  const TrainConfig& c_;
  Tokenizer tokenizer_;
  Loader loader_;
  std::vector<Shard> stream_;
  std::unique_ptr<Loader> validation_;
};

void run(const Options& o) {
  const TrainConfig c = read_recipe(o.recipe, o.set);
  const bool mqar = c.data.kind == DataKind::mqar;
  check(mqar || !c.data.train.empty(), "{}: /data/train names no shards", o.recipe);

  TrainerInputs in{.config = c, .device = usable_device(o.device)};
  std::unique_ptr<ShardTask> shards;
  std::unique_ptr<MqarTask> recall;
  if (mqar) {
    recall = std::make_unique<MqarTask>(c);
    in.batches = recall->source();
    in.validate = [&](const LanguageModel& model) { return recall->validate(model); };
  } else {
    shards = std::make_unique<ShardTask>(c);
    shards->give(&in);
  }
  in.resume = o.resume;
  in.quiet = o.quiet;
  in.stop = [] { return stop_requested != 0; };
  const Device device = in.device;
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
  if (std::signal(SIGHUP, request_stop) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // nohup
  std::signal(SIGPIPE, SIG_IGN);  // who read the progress may go away
  const TrainSummary s = train(std::move(in));
  if (s.taken == 0) {
    fmt::print("{} steps, nothing left to do; run folder {}\n", s.steps, c.out);
    return;
  }
  fmt::print(
      "{} steps, {} labelled tokens, last loss {:.4f}, {} skipped, {:.1f} s; run folder {}\n",
      s.steps, s.tokens, s.loss, s.skipped, s.seconds, c.out);
  if (s.tokens_per_gpu_per_second > 0)
    fmt::print("{} tokens per {} per second: median of steps {} to {}, {} x {} tokens a step, {}\n",
               grouped(int64_t(s.tokens_per_gpu_per_second)), device.is_cuda() ? "GPU" : "CPU",
               s.first_timed, s.last_timed, c.sequences * c.accumulate, c.length, name(c.dtype));
  print_memory(s, device);
}

}  // namespace

TrainConfig read_recipe(const std::string& file, const std::vector<std::string>& set) {
  nlohmann::json recipe = read_json(file, Comments::allow);
  for (const std::string& s : set) set_path(&recipe, s);
  return parse_train_config(recipe, file);
}

void check_trainable(const TrainConfig& c, const std::string& file, Device device) {
  check(c.dtype != DType::bf16 || device.is_cuda(),
        "{}: bf16 needs a GPU; set dtype to f32 on the CPU", file);
  if (c.data.kind == DataKind::mqar) {
    const MqarTask task(c);
    return;
  }
  check(!c.data.train.empty(), "{}: /data/train names no shards", file);
  const Tokenizer tokenizer = Tokenizer::load(c.data.tokenizer);
  check(!c.model_folder.empty() || c.model.vocab_size >= tokenizer.vocab_size(),
        "{}: the model's vocab_size {} is less than the tokenizer's {}", file, c.model.vocab_size,
        tokenizer.vocab_size());
  for (const auto& shards : {c.data.train, c.data.validation})
    if (!shards.empty()) Loader(loader_options(c, shards), tokenizer.vocab_hash());
}

void add_train(CLI::App& app) {
  auto* c = add_command(app, "train", "Train a model from a recipe",
                        "ebb train recipes/gdn-100m.json\n"
                        "ebb train recipes/gdn-100m.json --set optim.lr=1e-3 --set out=runs/b\n"
                        "ebb train recipes/gdn-100m.json --resume");
  auto o = std::make_shared<Options>();
  c->add_option("recipe", o->recipe, "JSON recipe (docs/guide.md lists every field)")->required();
  c->add_option("--set", o->set, "Override a field: path=value, e.g. optim.lr=3e-4")
      ->allow_extra_args(false);
  c->add_option("--device", o->device, "cpu, cuda, cuda:N, or auto: a GPU where there is one")
      ->capture_default_str();
  c->add_flag("--resume", o->resume, "Go on from the newest checkpoint of the run folder");
  c->add_flag("--quiet", o->quiet, "No progress line");
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
