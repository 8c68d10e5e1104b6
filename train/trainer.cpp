#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>

#include "models/checkpoint.h"
#include "models/config_reader.h"
#include "ops/matmul.h"
#include "tensor/check.h"
#include "tensor/device_info.h"
#include "tensor/file.h"
#include "tensor/folder_lock.h"
#include "tensor/memory.h"
#include "tensor/notice.h"

namespace ebb {

namespace fs = std::filesystem;
using nlohmann::json;

Tensor calibration_tokens(const std::vector<Shard>& stream, int64_t sequences, int64_t length) {
  std::vector<int64_t> ids;
  for (const Shard& s : stream) {
    const int64_t n = std::min(sequences * length - int64_t(ids.size()), s.info().tokens);
    const size_t at = ids.size();
    ids.resize(at + size_t(n));
    s.read(0, std::span(ids).subspan(at));
    if (int64_t(ids.size()) == sequences * length) break;
  }
  check(int64_t(ids.size()) == sequences * length,
        "calibration: the stream has {} tokens, {} x {} are asked for", ids.size(), sequences,
        length);
  return Tensor::from(ids, {sequences, length});
}

namespace {

// What the gates are measured on: the calibration sample, or as much of it as the stream holds.
Tensor measured_tokens(const std::vector<Shard>& stream, const InitConfig& init) {
  int64_t tokens = 0;
  for (const Shard& s : stream) tokens += s.info().tokens;
  const int64_t length = std::clamp<int64_t>(tokens, 1, init.calibration_length);
  return calibration_tokens(
      stream, std::clamp<int64_t>(tokens / length, 1, init.calibration_sequences), length);
}

}  // namespace

json gates_to_json(const std::vector<HeadReport>& gates) {
  json out = json::array();
  for (const HeadReport& g : gates) {
    out.push_back({{"layer", g.layer},
                   {"head", g.head},
                   {"A_log", g.A_log},
                   {"dt_bias", g.dt_bias},
                   {"sensitivity", g.sensitivity},
                   {"timescale", g.timescale}});
    if (g.target_timescale > 0) {
      out.back()["target_sensitivity"] = g.target_sensitivity;
      out.back()["target_timescale"] = g.target_timescale;
    }
  }
  return out;
}

std::unique_ptr<LanguageModel> starting_model(const TrainConfig& config, Device device,
                                              const std::vector<Shard>& stream,
                                              std::vector<HeadReport>* report) {
  const InitConfig& init = config.init;
  std::unique_ptr<LanguageModel> model;
  if (config.model_folder.empty()) {
    model = make_model(config.model);
    init_weights(*model, init.seed);
  } else {
    model = load_model(config.model_folder);
  }
  for (const Shard& s : stream)
    check(s.info().vocab_size <= model->config().vocab_size,
          "train: the model's vocab_size {} is less than the {} of {}", model->config().vocab_size,
          s.info().vocab_size, s.path());
  const bool gated = has_decay_gates(*model);
  check(
      gated || init.scheme == InitScheme::random,
      "train: /init/scheme sets decay gates, and the layers of a {} have none that it knows; want "
      "random",
      model->config().model_type);
  model->to(device);
  if (init.scheme == InitScheme::post) apply_post(*model, init.post_length);
  std::vector<HeadReport> gates;
  if (init.scheme == InitScheme::dami)
    gates = calibrate_dami(
        *model, init.dami,
        calibration_tokens(stream, init.calibration_sequences, init.calibration_length));
  else if (report && gated)
    gates = measure_gates(*model, measured_tokens(stream, init));
  if (report) *report = gates;
  if (config.dtype == DType::bf16) model->enable_bf16();
  model->set_recompute(config.recompute);
  return model;
}

namespace {

// The gates of a model in training, on the calibration sample, in f32 whatever it trains in.
std::vector<HeadReport> current_gates(const LanguageModel& model, const TrainerInputs& in) {
  const auto copy = make_model(model.config());
  copy->load_state_dict(model.state_dict());
  copy->to(in.device);
  return measure_gates(*copy, measured_tokens(in.stream, in.config.init));
}

// A run folder belongs to one recipe; how long it runs and what it prints may change.
void check_same_recipe(const std::string& file, const TrainConfig& now) {
  const std::string differs = recipe_difference(file, now);
  check(differs.empty(),
        "train: {} was made with another recipe (different: {}); choose another "
        "\"out\"",
        file, differs);
}

class Run {
 public:
  explicit Run(TrainerInputs in) : in_(std::move(in)), c_(in_.config) {
    check(!c_.out.empty(), "train: the recipe names no run folder (\"out\")");
    check(c_.dtype != DType::bf16 || in_.device.is_cuda(),
          "train: bf16 needs a GPU; set dtype to f32 on the CPU");
    make_folders(c_.out);
    lock_.emplace(c_.out);
    open();
  }

  TrainSummary operator()() {
    RunLog log(c_.out, state_.step + 1);
    Progress progress(state_.step, c_.steps);
    reset_peak_memory(in_.device);
    const auto start = std::chrono::steady_clock::now();
    TrainSummary summary;
    while (state_.step < c_.steps) {
      const auto step_start = std::chrono::steady_clock::now();
      const StepResult r = step();
      const double seconds = since(step_start);
      record(log, progress, r, double(r.tokens) / std::max(seconds, 1e-9));
      if (int64_t(step_seconds_.size()) < kTimedSteps.second) step_seconds_.push_back(seconds);
      summary.loss = r.loss;
      ++summary.taken;
      const bool last = state_.step == c_.steps;
      if (!last && in_.stop && in_.stop()) {
        save();
        summary.stopped = true;
        progress.note(fmt::format("stopped after step {}; --resume goes on", state_.step));
        break;
      }
      if (last || (c_.checkpoint_every > 0 && state_.step % c_.checkpoint_every == 0)) save();
    }
    progress.finish();
    summary.steps = state_.step;
    summary.skipped = state_.skipped;
    summary.tokens = state_.tokens;
    summary.seconds = since(start);
    summary.peak_bytes = memory_stats(in_.device).peak;
    summary.memory = training_memory(*model_, *optimizer_, saved_);
    write_memory(summary);
    write_speed(&summary);
    if (!summary.stopped) close();
    return summary;
  }

 private:
  static double since(std::chrono::steady_clock::time_point t) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count();
  }

  void open() {
    const std::string recipe = c_.out + "/recipe.json";
    std::string note;
    const auto found = newest_checkpoint(c_.out, &note);
    check(found || note.empty(),
          "train: no checkpoint in {} is intact: {}; remove them to begin anew", c_.out, note);
    if (!note.empty()) notice(fmt::format("ebb: warning: {}; going back to {}\n", note, *found));
    check(!found || in_.resume,
          "train: {} holds checkpoints already; give --resume to go on from "
          "them or choose another \"out\"",
          c_.out);
    const bool written = fs::exists(recipe);  // not beside a checkpoint from `ebb convert`
    if (found && written) check_same_recipe(recipe, c_);
    std::vector<HeadReport> gates;
    model_ =
        starting_model(c_, in_.device, in_.stream, in_.stream.empty() || found ? nullptr : &gates);
    if (in_.tokenizer)
      check(model_->config().vocab_size >= in_.tokenizer->vocab_size(),
            "train: the model's vocab_size {} is less than the tokenizer's {}",
            model_->config().vocab_size, in_.tokenizer->vocab_size());
    StateDict moments;
    if (found) {
      state_ = load_checkpoint(*found, *model_, &moments);
      if (state_.extra.contains("matmul"))
        load_matmul_algorithms(state_.extra["matmul"].get<std::string>());
    }
    optimizer_ = std::make_unique<AdamW>(
        decay_groups(model_->named_parameters(), c_.optim.weight_decay, c_.optim.decay_all,
                     c_.optim.lr_factors ? LearningRates::by_model : LearningRates::one),
        AdamWConfig{.lr = c_.optim.lr,
                    .beta1 = c_.optim.beta1,
                    .beta2 = c_.optim.beta2,
                    .eps = c_.optim.eps,
                    .clip = c_.optim.clip});
    if (found) {
      optimizer_->load_state_dict(moments);
      in_.batches.seek(state_.cursor);
    }
    if (!found || !written) write_file_atomically(recipe, c_.resolved().dump(1) + "\n");
    if (!found) {
      if (!gates.empty())
        write_file_atomically(c_.out + "/gates_initial.json", gates_to_json(gates).dump(1) + "\n");
      write_decays("decays_initial.json");
    }
  }

  StepResult step() {
    std::vector<Batch> batches;
    for (int64_t i = 0; i < c_.accumulate; ++i) batches.push_back(in_.batches.next());
    const StepResult r = train_step(*model_, *optimizer_, batches,
                                    c_.optim.lr * schedule_factor(c_.optim, state_.step, c_.steps),
                                    saved_ ? nullptr : &saved_);  // every step has the same shapes
    ++state_.step;
    state_.cursor = in_.batches.cursor();
    state_.tokens += r.tokens;
    state_.skipped += r.skipped;
    return r;
  }

  void record(RunLog& log, Progress& progress, const StepResult& r, double rate) {
    const double lr = c_.optim.lr * schedule_factor(c_.optim, state_.step - 1, c_.steps);
    const bool last = state_.step == c_.steps;
    const bool due = state_.step % c_.log_every == 0 || last || state_.step == 1;
    const bool check_now =
        in_.validate && (last || (c_.validate_every > 0 && state_.step % c_.validate_every == 0));
    if (r.skipped)
      progress.note(
          fmt::format("step {}: a gradient is not finite; the step is skipped ({} so far)",
                      state_.step, state_.skipped));
    if (due && !in_.quiet) progress.show(state_.step, r.loss, r.grad_norm, lr, rate);
    if (!due && !check_now && !r.skipped) return;
    json line = {{"step", state_.step},      {"loss", r.loss},
                 {"norm", r.grad_norm},      {"lr", lr},
                 {"tokens", state_.tokens},  {"tokens_per_second", rate},
                 {"skipped", state_.skipped}};
    if (check_now) {
      const json more = in_.validate(*model_);
      line.update(more);
      if (!in_.quiet) progress.note(fmt::format("step {}: {}", state_.step, more.dump()));
    }
    log.write(line);
  }

  const Tokenizer* tokenizer() const { return in_.tokenizer ? &*in_.tokenizer : nullptr; }

  void save() {
    state_.extra["matmul"] = matmul_algorithms_json();
    save_checkpoint(c_.out, *model_, tokenizer(), optimizer_->state_dict(), state_, c_.keep_last);
  }

  void write_memory(const TrainSummary& s) const {
    const TrainingMemory& m = s.memory;
    const json j = {{"device", in_.device.str()}, {"peak", s.peak_bytes},
                    {"weights", m.weights},       {"gradients", m.gradients},
                    {"optimizer", m.optimizer},   {"saved", m.saved},
                    {"workspace", m.workspace},   {"sum", m.sum()}};
    write_file_atomically(c_.out + "/memory.json", j.dump(1) + "\n");
  }

  void write_speed(TrainSummary* s) const {
    if (int64_t(step_seconds_.size()) < kTimedSteps.first) return;
    std::vector<double> timed(step_seconds_.begin() + kTimedSteps.first - 1, step_seconds_.end());
    const auto middle = timed.begin() + std::ptrdiff_t(timed.size() / 2);
    std::nth_element(timed.begin(), middle, timed.end());
    const int64_t tokens = c_.sequences * c_.accumulate * c_.length;
    s->tokens_per_gpu_per_second = double(tokens) / std::max(*middle, 1e-9);
    s->first_timed = kTimedSteps.first;
    s->last_timed = int64_t(step_seconds_.size());
    const json j = {{"device", device_info(in_.device).name},
                    {"gpus", in_.device.is_cuda() ? 1 : 0},
                    {"tokens_per_gpu_per_second", s->tokens_per_gpu_per_second},
                    {"median_step_ms", 1e3 * *middle},
                    {"steps", {s->first_timed, s->last_timed}},
                    {"tokens_per_step", tokens},
                    {"sequences", c_.sequences * c_.accumulate},
                    {"length", c_.length},
                    {"dtype", name(c_.dtype)}};
    write_file_atomically(c_.out + "/speed.json", j.dump(1) + "\n");
  }

  // The decays in use on the head of the training stream, at most 2048 tokens as one text.
  void write_decays(const char* file) const {
    int64_t tokens = 0;
    for (const Shard& s : in_.stream) tokens += s.info().tokens;
    tokens = std::min<int64_t>(tokens, 2048);
    if (tokens == 0) return;
    const DecayUse use = measure_decays(*model_, calibration_tokens(in_.stream, 1, tokens));
    if (use.layers.empty()) return;
    write_file_atomically(c_.out + "/" + file, to_json(use).dump(1) + "\n");
  }

  void close() {
    save_model(c_.out + "/final", *model_, tokenizer());
    if (!in_.stream.empty() && has_decay_gates(*model_))
      write_file_atomically(c_.out + "/gates_final.json",
                            gates_to_json(current_gates(*model_, in_)).dump(1) + "\n");
    write_decays("decays_final.json");
    write_metrics_csv(c_.out);
  }

  TrainerInputs in_;
  const TrainConfig& c_;
  std::optional<FolderLock> lock_;
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<AdamW> optimizer_;
  LoopState state_;
  int64_t saved_ = 0;                 // bytes the tape keeps in one step
  std::vector<double> step_seconds_;  // of this process
};

}  // namespace

TrainSummary train(TrainerInputs in) { return Run(std::move(in))(); }

}  // namespace ebb
