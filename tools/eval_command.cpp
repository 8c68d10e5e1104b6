// The command line of `ebb eval`.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>

#include "eval/multiple_choice.h"
#include "eval/perplexity.h"
#include "eval/retrieval.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/folder_lock.h"
#include "tensor/hash.h"
#include "tensor/notice.h"
#include "tools/commands.h"
#include "tools/eval_models.h"
#include "tools/eval_tables.h"
#include "tools/result_file.h"
#include "train/config.h"
#include "train/log.h"
#include "train/shards.h"

namespace ebb::tools {
namespace {

using nlohmann::json;

constexpr char kPerplexity[] = "perplexity", kChoices[] = "multiple_choice";

struct EvalOptions {
  std::vector<std::string> models, tasks, tokens, questions, set;
  std::vector<int64_t> lengths;
  int64_t samples = 500, max_new_tokens = 128, batch = 32, max_tokens = 0;
  uint64_t seed = 42;
  std::string data, haystack, sentences, fit = "binary", tokenizer;
  std::string device = "cpu", dtype, out;
  bool force = false, add_bos = false;
};

bool needle_task(const std::string& task) { return task != kPerplexity && task != kChoices; }

void check_tasks(const EvalOptions& o) {
  std::vector<std::string> names{kPerplexity, kChoices};
  for (const NiahTask& t : niah_tasks()) names.push_back(t.name);
  for (const std::string& task : o.tasks) {
    if (std::find(names.begin(), names.end(), task) != names.end()) continue;
    const std::string guess = closest(task, names);
    throw UsageError(fmt::format("--task '{}': want {}{}", task, fmt::join(names, ", "),
                                 guess.empty() ? "" : "; did you mean " + guess + "?"));
  }
  const bool needles = std::any_of(o.tasks.begin(), o.tasks.end(), needle_task);
  const auto asks = [&](const char* task) {
    return std::find(o.tasks.begin(), o.tasks.end(), task) != o.tasks.end();
  };
  if (needles && (o.lengths.empty() || o.data.empty()))
    throw UsageError("needle tasks want --lengths and --data");
  if (asks(kPerplexity) && o.tokens.empty()) throw UsageError("--task perplexity wants --tokens");
  if (asks(kChoices) != !o.questions.empty())
    throw UsageError("--task multiple_choice and --questions belong together");
  if (!o.sentences.empty() && o.haystack.empty())
    throw UsageError("--sentences belongs to --haystack");
}

// One line that is redrawn on a terminal; nothing elsewhere.
class Counter {
 public:
  explicit Counter(std::string what) : what_(std::move(what)) {}
  ~Counter() {
    if (terminal_) notice("\r\x1b[K");
  }
  void show(int64_t done, int64_t all) {
    if (!terminal_) return;
    const double s = seconds();
    const std::string eta =
        all > 0 && done > 0 ? " | ETA " + short_time(s / double(done) * double(all - done)) : "";
    notice(
        fmt::format("\r\x1b[K{} {}{}{}", what_, done, all > 0 ? fmt::format("/{}", all) : "", eta));
  }
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::string what_;
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// What is asked of every model, and what came out so far.
class Evaluation {
 public:
  explicit Evaluation(const EvalOptions& o);
  void run();

 private:
  const std::vector<NiahData>& data_for(const EvalModel& m);
  void ask_needles(const EvalModel& m, const LanguageModel& model);
  void ask_perplexity(const EvalModel& m, const LanguageModel& model);
  void ask_questions(const EvalModel& m, const LanguageModel& model);
  void setting_record(const EvalModel& m, const RetrievalScores& s);
  void save(bool complete);

  EvalOptions o_;
  Device device_;
  DType dtype_;
  std::vector<EvalModel> models_;
  Words words_ = builtin_words();
  std::unique_ptr<Essay> essay_;
  std::vector<std::pair<std::string, std::vector<NiahData>>> data_;  // by tokenizer
  std::vector<Shard> shards_;
  std::vector<std::vector<ChoiceQuestion>> questions_;  // as o_.questions
  std::optional<FolderLock> lock_;
  json result_;
  std::string samples_;
};

Evaluation::Evaluation(const EvalOptions& o) : o_(o), device_(usable_device(o.device)) {
  dtype_ = o.dtype.empty() ? (device_.is_cuda() ? DType::bf16 : DType::f32)
                           : parse_dtype(o.dtype, {DType::f32, DType::bf16});
  if (dtype_ == DType::bf16 && !device_.is_cuda())
    throw UsageError("--dtype bf16: models run in f32 on cpu");
  models_ = find_eval_models(o.models, o.tokenizer);
  if (!o.haystack.empty()) essay_ = std::make_unique<Essay>(Essay::load(o.haystack, o.sentences));
  make_folders(o.out);
  lock_.emplace(o.out);
  for (const EvalModel& m : models_) data_for(m);
  for (const std::string& file : o.questions) questions_.push_back(read_choices(file));
  if (std::find(o.tasks.begin(), o.tasks.end(), kPerplexity) == o.tasks.end()) return;
  for (const std::string& path : expand_shards(o.tokens)) {
    shards_.emplace_back(path);
    shards_.back().verify();
    for (const EvalModel& m : models_)
      check(shards_.back().info().vocab_hash == m.tokenizer.vocab_hash() &&
                shards_.back().info().vocab_size == m.tokenizer.vocab_size(),
            "eval: {} was made with another tokenizer than that of {}", path, m.name);
  }
}

const std::vector<NiahData>& Evaluation::data_for(const EvalModel& m) {
  for (const auto& [tokenizer, data] : data_)
    if (tokenizer == m.tokenizer.sha256()) return data;
  std::vector<NiahData> all;
  for (const std::string& task : o_.tasks)
    for (int64_t length : o_.lengths)
      if (needle_task(task))
        all.push_back(open_niah_data(o_.data,
                                     {.task = task,
                                      .length = length,
                                      .samples = o_.samples,
                                      .seed = o_.seed,
                                      .fit = parse_niah_fit(o_.fit)},
                                     words_, essay_.get(), m.tokenizer,
                                     o_.force ? ForeignData::accept : ForeignData::refuse,
                                     [](const std::string& line) { fmt::print("{}\n", line); }));
  data_.emplace_back(m.tokenizer.sha256(), std::move(all));
  return data_.back().second;
}

void Evaluation::setting_record(const EvalModel& m, const RetrievalScores& s) {
  const NiahData& d = *s.data;
  double mean = 0;
  for (const SampleScore& x : s.samples) mean += double(x.prompt_tokens) / double(s.samples.size());
  const int64_t longest = s.prompt_tokens(true);
  json j = s.summary();
  print_score(m.name, j);
  j.update({{"model", m.name},
            {"protocol", "ruler"},
            {"data", d.path},
            {"data_sha256", d.sha256},
            {"data_tokenizer_sha256", d.tokenizer_sha256},
            {"tokenizer_sha256", m.tokenizer.sha256()},
            {"fit", d.fit},
            {"seed", d.seed ? json(*d.seed) : json()},
            {"prompt_tokens", {{"min", s.prompt_tokens(false)}, {"mean", mean}, {"max", longest}}},
            {"max_length", std::max(d.length, longest + o_.max_new_tokens)},
            {"max_length_raised", longest + o_.max_new_tokens > d.length},
            {"truncated", 0}});
  result_["scores"].push_back(j);
  for (const SampleScore& x : s.samples) {
    json r = x.record();
    r.update({{"model", m.name}, {"task", d.task}, {"length", d.length}});
    samples_ += r.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  }
}

void Evaluation::ask_needles(const EvalModel& m, const LanguageModel& model) {
  std::vector<RetrievalScores> settings;
  for (const NiahData& d : data_for(m)) {
    Counter counter(fmt::format("{} {} {}: samples", m.name, d.task, d.length));
    GenerateOptions options{.max_new_tokens = o_.max_new_tokens, .batch = o_.batch};
    options.progress = [&](int64_t n) { counter.show(n, int64_t(d.samples.size())); };
    settings.push_back(ask(d, m.tokenizer, model_predictor(model, m.tokenizer, options),
                           o_.add_bos ? Bos::add : Bos::leave_out));
    counter.show(0, 0);
    setting_record(m, settings.back());
    save(false);
  }
  if (settings.empty()) return;
  json mean = mean_accuracies(settings), distance = distance_table(settings);
  mean["model"] = m.name;
  result_["means"].push_back(mean);
  if (distance.is_null()) return;
  distance["model"] = m.name;
  result_["distance"].push_back(distance);
}

void Evaluation::ask_perplexity(const EvalModel& m, const LanguageModel& model) {
  size_t shard = 0;
  int64_t document = 0, tokens = 0;
  const DocumentSource next = [&](std::vector<int64_t>* ids) {
    while (shard < shards_.size() && document == shards_[shard].info().documents)
      ++shard, document = 0;
    if (shard == shards_.size() || (o_.max_tokens > 0 && tokens >= o_.max_tokens)) return false;
    const auto index = shards_[shard].documents();
    ids->resize(index[size_t(document) + 1] - index[size_t(document)]);
    shards_[shard].read(int64_t(index[size_t(document)]), *ids);
    ++document;
    tokens += int64_t(ids->size());
    return true;
  };
  int64_t all = 0;
  for (const Shard& s : shards_) all += s.info().tokens;
  json j;
  {
    Counter counter(m.name + " perplexity: tokens");
    const int64_t expected = o_.max_tokens > 0 ? std::min(all, o_.max_tokens) : all;
    PerplexityOptions options;
    options.progress = [&](int64_t n) { counter.show(n, std::max(n, expected)); };
    j = perplexity(model, m.tokenizer, next, options).record();
  }
  j.update({{"model", m.name}, {"tokenizer_sha256", m.tokenizer.sha256()}});
  for (const Shard& s : shards_)
    j["shards"].push_back({{"path", s.path()}, {"xxh64", file_hash(s.path())}});
  result_["perplexity"].push_back(j);
  fmt::print("{:<20} {} tokens, {} documents: perplexity {:.4f}{}\n", m.name,
             j["tokens"].get<int64_t>(), j["documents"].get<int64_t>(),
             j["perplexity"].get<double>(),
             j["bits_per_byte"].is_null()
                 ? ""
                 : fmt::format(", {:.4f} bits per byte", j["bits_per_byte"].get<double>()));
  save(false);
}

void Evaluation::ask_questions(const EvalModel& m, const LanguageModel& model) {
  for (size_t f = 0; f < questions_.size(); ++f) {
    const std::string task = std::filesystem::path(o_.questions[f]).stem().string();
    const std::vector<ChoiceQuestion>& questions = questions_[f];
    ChoiceScores s;
    {
      Counter counter(fmt::format("{} {}: questions", m.name, task));
      ChoiceOptions options{.add_bos = o_.add_bos};
      options.progress = [&](int64_t n) { counter.show(n, int64_t(questions.size())); };
      s = ask_choices(model, m.tokenizer, questions, options);
    }
    json j = s.record();
    print_choices(m.name, task, j);
    j.update({{"model", m.name},
              {"task", task},
              {"protocol", "lm_eval"},
              {"data", o_.questions[f]},
              {"data_sha256", sha256(read_file(o_.questions[f]))},
              {"tokenizer_sha256", m.tokenizer.sha256()}});
    result_["choices"].push_back(j);
    for (size_t q = 0; q < questions.size(); ++q)
      samples_ += json{{"model", m.name},
                       {"task", task},
                       {"question", q},
                       {"gold", questions[q].gold},
                       {"likelihoods", s.answers[q].likelihoods},
                       {"chosen", s.answers[q].chosen},
                       {"chosen_norm", s.answers[q].chosen_norm}}
                      .dump() +
                  "\n";
    save(false);
  }
}

void Evaluation::save(bool complete) {
  result_["complete"] = complete;
  write_file_atomically(o_.out + "/samples.jsonl", samples_);
  write_result(o_.out + "/results.json", result_);
}

void Evaluation::run() {
  result_ = result_header("eval", device_);
  result_.erase("date");  // the same inputs give the same bytes
  result_.update({{"dtype", name(dtype_)},
                  {"max_new_tokens", o_.max_new_tokens},
                  {"batch", o_.batch},
                  {"add_bos", o_.add_bos},
                  {"forced", o_.force},
                  {"models", json::array()},
                  {"scores", json::array()},
                  {"means", json::array()},
                  {"distance", json::array()},
                  {"perplexity", json::array()},
                  {"choices", json::array()}});
  save(false);  // says now, not after hours, when the folder cannot be written
  if (!o_.set.empty()) result_["changes"] = config_changes(o_.set);
  if (!data_for(models_[0]).empty()) print_score_heading();
  for (const EvalModel& m : models_) {
    const auto model = load_eval_model(m, device_, dtype_, config_changes(o_.set));
    result_["models"].push_back(eval_model_record(m, *model));
    ask_needles(m, *model);
    if (!shards_.empty()) ask_perplexity(m, *model);
    ask_questions(m, *model);
  }
  save(true);
  print_accuracies(result_);
  print_distances(result_);
  fmt::print("\nwrote {}/results.json and samples.jsonl\n", o_.out);
}

}  // namespace

void add_eval(CLI::App& app) {
  CLI::App* c = add_command(
      app, "eval", "Measure retrieval by length and distance, perplexity and multiple choice",
      "ebb eval --model runs/dami --task niah_single_1 --lengths 1024,2048 --data data/niah "
      "--out runs/dami/eval\n"
      "ebb eval --model gdn=runs/a,dami=runs/b --task niah_single_1,niah_single_2,niah_multikey_1 "
      "--lengths 1024,2048,4096 --haystack essays.txt --data data/niah --device cuda --out eval\n"
      "ebb eval --model runs/dami --task perplexity --tokens data/validation --out runs/dami/ppl\n"
      "ebb eval --model runs/dami --task multiple_choice --questions arc_easy.jsonl,piqa.jsonl "
      "--out runs/dami/choices");
  auto o = std::make_shared<EvalOptions>();
  c->add_option("--model", o->models, "Model or run folders, FOLDER or NAME=FOLDER")
      ->required()
      ->delimiter(',');
  c->add_option("--task", o->tasks,
                "niah_single_1, niah_single_2, niah_single_3, niah_multikey_1, perplexity, "
                "multiple_choice")
      ->required()
      ->delimiter(',');
  c->add_option("--lengths", o->lengths, "Tokens of prompt and answer")
      ->delimiter(',')
      ->check(CLI::Range(int64_t(1), int64_t(1) << 40));
  c->add_option("--samples", o->samples, "Samples of each task and length")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(1), int64_t(1) << 31));
  c->add_option("--data", o->data, "Folder of the sample files; those not there are made");
  c->add_option("--haystack", o->haystack, "Text to hide needles in (all tasks but niah_single_1)");
  c->add_option("--sentences", o->sentences,
                "Its sentences, 'start end' in bytes a line; else ebb's own rule");
  c->add_option("--fit", o->fit,
                "How haystacks are sized: binary (public suite) or step (lm-evaluation-harness)")
      ->capture_default_str()
      ->check(CLI::IsMember({"binary", "step"}));
  c->add_option("--seed", o->seed, "Of the samples")->capture_default_str();
  c->add_option("--max-new-tokens", o->max_new_tokens, "Of each answer")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(1), int64_t(1) << 20));
  c->add_option("--batch", o->batch, "Sequences decoded together; changes no result")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(1), int64_t(65536)));
  c->add_flag("--add-bos", o->add_bos, "Begin prompts with the tokenizer's BOS");
  c->add_option("--tokens", o->tokens, "Token shards for perplexity, files or prefixes")
      ->delimiter(',');
  c->add_option("--questions", o->questions,
                "Files for multiple_choice: JSON lines with context, choices and gold")
      ->delimiter(',');
  c->add_option("--max-tokens", o->max_tokens,
                "Perplexity: no further documents after so many tokens; 0 for all")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(0), int64_t(1) << 60));
  c->add_option("--tokenizer", o->tokenizer,
                "'bytes', a SentencePiece model or a folder; default: the model's own");
  c->add_option("--device", o->device, "cpu, cuda, cuda:N, or auto: a GPU where there is one")
      ->capture_default_str();
  c->add_option("--dtype", o->dtype, "f32 or bf16; the default is bf16 on a GPU, f32 on the CPU");
  add_set_option(c, &o->set);
  c->add_option("--out", o->out, "Folder for results.json and samples.jsonl")->required();
  c->add_flag("--force", o->force, "Take sample files that were made for another tokenizer");
  c->callback([o] {
    check_tasks(*o);
    Evaluation(*o).run();
  });
}

}  // namespace ebb::tools
