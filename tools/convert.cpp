// ebb convert: models between the public folder layout and checkpoints of ebb's training, and
// between dtypes. Tensors are called the same everywhere.
#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "models/checkpoint.h"
#include "models/weight_files.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/file.h"
#include "tensor/json_text.h"
#include "tools/commands.h"
#include "tools/eval_models.h"
#include "tools/output_folder.h"
#include "tools/temporary_folder.h"
#include "train/optimizer.h"
#include "train/resume.h"

namespace ebb::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Options {
  std::string source, out, to = "model", dtype = "keep", optimizer;
  uint64_t shard_size = 0;
  bool all = false, overwrite = false;
};

bool is_checkpoint(const std::string& folder) {
  return fs::exists(folder + "/optimizer.safetensors") && fs::exists(folder + "/loop.json");
}

// A head that is stored beside the embedding it is tied to is not written again, so it must be it.
void check_tied_head(const LanguageModel& model, const std::map<std::string, Tensor>& given,
                     const std::string& folder) {
  const auto head = given.find("lm_head.weight"),
             embeddings = given.find("model.embeddings.weight");
  if (!model.config().tie_word_embeddings || head == given.end() || embeddings == given.end())
    return;
  check(bitwise_equal(head->second, embeddings->second),
        "convert: {}/config.json ties lm_head.weight to the embeddings, and the two differ; set "
        "tie_word_embeddings to false",
        folder);
}

// What bf16 training computes with bf16 copies of: matrices.
bool becomes_bf16(const NamedParameter& p) {
  return p.parameter.master().dim() >= 2 && p.parameter.uses_shadow();
}

// The tensors to write, in the model's order, as the files have them or in the dtype asked for.
StateDict converted(const LanguageModel& model, const std::map<std::string, Tensor>& given,
                    const Options& o) {
  std::set<std::string> bf16;  // the others, and buffers, stay f32
  for (const NamedParameter& p : model.named_parameters())
    if (becomes_bf16(p)) bf16.insert(p.name);
  StateDict out;
  for (const auto& [name, master] : model.state_dict()) {
    Tensor t = given.at(name);
    if (o.dtype == "bf16" && (o.all || bf16.count(name)))
      t = t.to(DType::bf16);
    else if (o.dtype != "keep")
      t = t.to(DType::f32);
    out.emplace_back(name, t);
  }
  return out;
}

// What the public library calls the dtype, where its versions look for it.
json config_of(const LanguageModel& model, const std::string& dtype) {
  json j = public_config(model.config());
  if (dtype == "keep") return j;
  const char* name = dtype == "f32" ? "float32" : "bfloat16";
  const bool newer = j.contains("dtype");
  if (newer) j["dtype"] = name;
  if (!newer || j.contains("torch_dtype")) j["torch_dtype"] = name;
  return j;
}

std::string types_of(const StateDict& tensors) {
  std::map<std::string, int64_t> count;
  for (const auto& [name, t] : tensors) ++count[std::string(ebb::name(t.dtype()))];
  std::string out;
  for (const auto& [type, n] : count)
    out += fmt::format("{}{}{}", out.empty() ? "" : ", ", type,
                       count.size() > 1 ? fmt::format(" ({})", n) : "");
  return out;
}

void write_model(const std::string& folder, const LanguageModel& model, const StateDict& tensors,
                 const Options& o) {
  const fs::path out = new_folder(o.out, o.overwrite, "convert");
  const TemporaryFolder staging(out.parent_path(), out.filename().string());
  const fs::path made = staging.path() / "model";
  make_folders(made.string());
  save_weights(made.string(), tensors, int64_t(o.shard_size));
  write_file_atomically((made / "config.json").string(),
                        dump_python_json(config_of(model, o.dtype)) + "\n");
  copy_other_files(folder, made);
  const size_t files = WeightFiles(made.string()).paths().size();
  publish(made, out);
  int64_t bytes = 0;
  for (const auto& [name, t] : tensors) bytes += t.nbytes();
  fmt::print("wrote {}: {} tensors, {} parameters, {}, {:.1f} MB in {} file{}\n", o.out,
             tensors.size(), grouped(model.parameter_count()), types_of(tensors),
             double(bytes) / 1e6, files, files == 1 ? "" : "s");
}

std::optional<Tokenizer> tokenizer_of(const std::string& folder) {
  if (!fs::exists(folder + "/tokenizer.model") && !fs::exists(folder + "/tokenizer.json"))
    return {};
  try {
    return Tokenizer::load(folder);
  } catch (const Error& e) {  // another kind; training reads that of its recipe
    fmt::print(stderr, "ebb: note: the tokenizer stays behind: {}\n", e.what());
    return {};
  }
}

// Moments and counters come from another checkpoint, or from the source if it is one; or else they
// are those of a run that is about to begin.
void write_checkpoint(const std::string& folder, const LanguageModel& model, const Options& o) {
  check(list_checkpoints(o.out).empty(), "convert: {} holds checkpoints already", o.out);
  AdamW optimizer(decay_groups(model.named_parameters(), 0));
  const std::string from = !o.optimizer.empty() ? o.optimizer : is_checkpoint(folder) ? folder : "";
  LoopState state;
  if (!from.empty()) {
    verify_checkpoint(from);
    StateDict moments;
    state = load_training_state(from, &moments);
    optimizer.load_state_dict(moments);
  }
  const std::optional<Tokenizer> tokenizer = tokenizer_of(folder);
  const std::string made = save_checkpoint(o.out, model, tokenizer ? &*tokenizer : nullptr,
                                           optimizer.state_dict(), state, INT64_MAX);
  fmt::print("wrote {}: {} parameters, step {}, {}\n", made, grouped(model.parameter_count()),
             state.step, from.empty() ? "moments at zero" : "moments of " + from);
  fmt::print("`ebb train RECIPE --set out={} --resume` goes on from it\n", o.out);
}

void run(const Options& o) {
  const bool checkpoint = o.to == "checkpoint";
  if (checkpoint && (o.dtype == "bf16" || o.shard_size > 0))
    throw UsageError("a checkpoint is f32 in one file; --dtype and --shard-size are for a model");
  if (!checkpoint && !o.optimizer.empty()) throw UsageError("--optimizer is for --to checkpoint");
  if (o.all && o.dtype != "bf16") throw UsageError("--all is for --dtype bf16");
  if (!checkpoint) new_folder(o.out, o.overwrite, "convert");  // what is wrong is said at once
  const std::string folder = model_folder(o.source);
  const auto model = load_model(folder);
  if (checkpoint) return write_checkpoint(folder, *model, o);
  const StateDict tensors = WeightFiles(folder).tensors();
  const std::map<std::string, Tensor> given(tensors.begin(), tensors.end());
  check_tied_head(*model, given, folder);
  write_model(folder, *model, converted(*model, given, o), o);
}

}  // namespace

void add_convert(CLI::App& app) {
  auto* c = add_command(
      app, "convert", "Convert models: training checkpoints, public folders, shards, dtypes",
      "ebb convert runs/a --out models/a --dtype bf16\n"
      "ebb convert foreign/ --out one/                     # of shards one file\n"
      "ebb convert models/a --out sharded/ --shard-size 5GB\n"
      "ebb convert foreign/ --to checkpoint --out runs/b   # for ebb train --resume\n"
      "ebb convert edited/ --to checkpoint --optimizer runs/a/checkpoint-000500 --out runs/b");
  auto o = std::make_shared<Options>();
  c->add_option("source", o->source,
                "A model folder, a checkpoint, or a run (its final model, or newest checkpoint)")
      ->required();
  c->add_option("--out", o->out, "The model folder to write; of a checkpoint, its run folder")
      ->required();
  c->add_option("--to", o->to, "model: a public folder; checkpoint: of a training run")
      ->capture_default_str()
      ->check(CLI::IsMember({"model", "checkpoint"}));
  c->add_option(
       "--dtype", o->dtype,
       "keep, f32, or bf16: the matrices; gates, norms, biases and short convolutions stay f32")
      ->capture_default_str()
      ->check(CLI::IsMember({"keep", "f32", "bf16"}));
  c->add_flag("--all", o->all, "With --dtype bf16: those too, as many public folders have them");
  c->add_option("--shard-size", o->shard_size,
                "Most bytes of a file, e.g. 5GB (1 GB: 10^9 bytes); 0: one file")
      ->transform(CLI::AsSizeValue(true));
  c->add_option("--optimizer", o->optimizer,
                "Checkpoint whose moments and counters go with the weights; else the source's own, "
                "or zeros");
  c->add_flag("--overwrite", o->overwrite, "Replace the model folder when it exists");
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
