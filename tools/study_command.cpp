// The command line of `ebb study`.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>

#include "tensor/check.h"
#include "tensor/notice.h"
#include "tools/commands.h"
#include "tools/study.h"

namespace ebb::tools {
namespace {

namespace fs = std::filesystem;

struct Options {
  StudyOptions study;
  std::vector<std::string> tasks, tokens, questions;
  std::vector<int64_t> lengths;
  int64_t samples = 0;
  std::string data, haystack;
  bool table = false, dry_run = false;
};

// What `ebb eval` is given beside model, device and folder. What is wrong with it is said before
// hours of training, not after them.
std::vector<std::string> eval_arguments(const Options& o) {
  const auto wants = [&](const std::string& task) {
    return std::any_of(o.tasks.begin(), o.tasks.end(),
                       [&](const std::string& t) { return t.starts_with(task); });
  };
  const auto files = [](const char* option, const std::vector<std::string>& paths) {
    for (const std::string& p : paths)
      if (!fs::is_regular_file(p))
        throw UsageError(fmt::format("{}: there is no file {}", option, p));
  };
  if (o.tasks.empty()) {
    if (!o.tokens.empty() || !o.questions.empty() || !o.lengths.empty())
      throw UsageError("--tokens, --questions and --lengths are for --eval");
    return {};
  }
  for (const std::string& t : o.tasks)
    if (t != "perplexity" && t != "multiple_choice" && !t.starts_with("niah_"))
      throw UsageError(fmt::format("--eval: unknown task '{}'; `ebb eval --help` lists them", t));
  if (wants("perplexity") && o.tokens.empty()) throw UsageError("--eval perplexity wants --tokens");
  if (wants("multiple_choice") && o.questions.empty())
    throw UsageError("--eval multiple_choice wants --questions");
  if (wants("niah_") && (o.lengths.empty() || o.data.empty()))
    throw UsageError("--eval of needles wants --lengths and --data");
  files("--questions", o.questions);
  if (!o.haystack.empty()) files("--haystack", {o.haystack});
  std::vector<std::string> out = {"--task", fmt::format("{}", fmt::join(o.tasks, ","))};
  const auto add = [&](const char* option, const std::string& value) {
    if (!value.empty()) out.insert(out.end(), {option, value});
  };
  add("--tokens", fmt::format("{}", fmt::join(o.tokens, ",")));
  add("--questions", fmt::format("{}", fmt::join(o.questions, ",")));
  add("--lengths", fmt::format("{}", fmt::join(o.lengths, ",")));
  add("--samples", o.samples > 0 ? std::to_string(o.samples) : "");
  add("--data", o.data);
  add("--haystack", o.haystack);
  return out;
}

void check_options(const Options& o) {
  if (o.study.recipes.empty() && !o.table)
    throw UsageError("no recipes; --table prints what is there");
  const std::set<uint64_t> seeds(o.study.seeds.begin(), o.study.seeds.end());
  if (seeds.size() != o.study.seeds.size()) throw UsageError("--seeds names one twice");
  for (const std::string& s : o.study.set)
    for (const char* mine : {"out=", "seed=", "init.seed="})
      if (s.starts_with(mine))
        throw UsageError(fmt::format("--set {}: ebb study sets this itself", s));
}

void list(const Study& study, const std::vector<size_t>& mine) {
  for (const size_t i : mine) {
    const StudyRun& r = study.runs[i];
    fmt::print("{:<8} {}\n", state_name(r.state), r.name);
  }
}

void run(const Options& o) {
  check_options(o);
  StudyOptions options = o.study;
  options.eval = eval_arguments(o);
  options.eval_alone = !o.data.empty();
  if (o.table)
    check(fs::exists(options.out + "/study.json"), "{} holds no study.json", options.out);
  Study study(options.out);
  if (o.table) return summarize(study);
  const std::vector<size_t> mine = study.plan(options);
  if (o.dry_run) return list(study, mine);
  const int failed = run_study(study, mine, options);
  summarize(study);
  fmt::print("\nwrote {0}/summary.json, summary.csv and summary.txt; `ebb report {0}` draws all\n",
             options.out);
  size_t left = 0;
  for (const size_t i : mine) {
    const StudyRun& r = study.runs[i];
    left += r.state == RunState::stopped || r.state == RunState::waiting;
  }
  if (left)
    fmt::print("{} of {} runs are not finished; the same command goes on\n", left, mine.size());
  if (failed == 0) return;
  for (const size_t i : mine)
    if (const StudyRun& r = study.runs[i]; r.state == RunState::failed)
      notice(fmt::format("ebb: error: {} failed: {}\n", r.name, r.error));
  throw Exit{kExitFailure};
}

}  // namespace

void add_study(CLI::App& app) {
  auto* c = add_command(
      app, "study", "Train a grid of recipes and seeds, and compare them",
      "ebb study recipes/decay/vector-*.json --seeds 1,2,3 --out runs/decay\n"
      "ebb study recipes/decay/*.json --out runs/decay --device cuda:0,cuda:1 --budget 36000\n"
      "ebb study a.json b.json --seeds 1,2 --set steps=2000 --jobs 2 --out runs/ab --eval "
      "perplexity "
      "--tokens data/val\n"
      "ebb study --out runs/decay --table");
  auto o = std::make_shared<Options>();
  StudyOptions& s = o->study;
  c->add_option("recipes", s.recipes, "JSON recipes; each is trained with every seed");
  c->add_option("--out", s.out, "Folder of the study: a run folder for each, study.json, summary.*")
      ->required();
  c->add_option("--seeds", s.seeds, "Of weights and order of the data")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  c->add_option("--set", s.set, "Override a field of every recipe: path=value, e.g. steps=2000")
      ->allow_extra_args(false);
  c->add_option("--device", s.devices,
                "cpu, cuda, cuda:N, auto, or several with commas that runs are spread over")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  c->add_option("--jobs", s.jobs, "Runs side by side; 0: one for each device")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(0), int64_t(1024)));
  c->add_option("--budget", s.budget, "Seconds, after which runs stop with a checkpoint; 0: no end")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1e9));
  c->add_flag("--retry", s.retry, "Go on with those that failed, too");
  c->add_flag("--dry-run", o->dry_run, "Check everything and list the runs, train none");
  c->add_flag("--table", o->table, "Only print what is there");
  c->add_option("--eval", o->tasks, "After its training, tasks of `ebb eval` for each run")
      ->delimiter(',')
      ->allow_extra_args(false);
  c->add_option("--tokens", o->tokens, "--eval perplexity: token shards")
      ->delimiter(',')
      ->allow_extra_args(false);
  c->add_option("--questions", o->questions, "--eval multiple_choice: its files")
      ->delimiter(',')
      ->allow_extra_args(false);
  c->add_option("--lengths", o->lengths, "--eval niah_...: tokens of prompt and answer")
      ->delimiter(',')
      ->allow_extra_args(false);
  c->add_option("--samples", o->samples, "--eval niah_...: of each task and length")
      ->check(CLI::Range(int64_t(1), int64_t(1) << 31));
  c->add_option("--data", o->data, "--eval niah_...: folder of the sample files");
  c->add_option("--haystack", o->haystack, "--eval niah_...: text to hide needles in");
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
