// ebb generate: text from a model.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "eval/runner.h"
#include "tensor/check.h"
#include "tools/commands.h"
#include "tools/eval_models.h"
#include "tools/progress_line.h"
#include "train/text_reader.h"

namespace ebb::tools {
namespace {

struct Options {
  std::string model, prompt_file, field = "prompt", tokenizer, device = "auto", dtype;
  std::vector<std::string> set;
  std::optional<std::string> prompt;
  int64_t max_new_tokens = 128, batch = 32;
  std::optional<double> temperature, top_p;
  std::optional<int64_t> top_k;
  std::optional<uint64_t> seed;
  bool echo = false, add_bos = false;
};

Sampling sampling_of(const Options& o) {
  if (o.temperature.value_or(0) == 0 && (o.top_k || o.top_p || o.seed))
    throw UsageError("--top-k, --top-p and --seed want a --temperature above 0");
  const Sampling s{.temperature = o.temperature.value_or(0),
                   .top_k = o.top_k.value_or(0),
                   .top_p = o.top_p.value_or(1),
                   .seed = o.seed.value_or(0)};
  try {
    check_sampling(s);
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  return s;
}

std::string read_standard_input() {
  if (isatty(STDIN_FILENO))
    throw UsageError("no prompt: give --prompt TEXT, --prompt-file FILE or standard input");
  std::string text;
  char piece[65536];
  while (const size_t n = std::fread(piece, 1, sizeof piece, stdin)) text.append(piece, n);
  check(!std::ferror(stdin), "generate: standard input cannot be read");
  return text;
}

struct Prompts {
  std::vector<std::string> texts;
  bool lines = false;  // JSON lines in, JSON lines out
};

// The newline that editors put at the end of a file is not part of a prompt.
std::string without_last_newline(std::string text) {
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

Prompts read_prompts(const Options& o) {
  if (o.prompt) return {{*o.prompt}};
  if (o.prompt_file.empty()) return {{without_last_newline(read_standard_input())}};
  Prompts p;
  const std::string name = std::filesystem::path(o.prompt_file).filename().string();
  p.lines = name.find(".json") != std::string::npos;
  const ReadCounts c = read_documents(
      o.prompt_file, {.format = p.lines ? TextFormat::jsonl : TextFormat::text, .field = o.field},
      [&](std::string_view text) { p.texts.emplace_back(text); });
  check(c.empty == 0 || p.lines, "generate: {} is empty: a prompt needs at least one character",
        o.prompt_file);
  check(c.empty == 0, "generate: {} holds {} empty prompts", o.prompt_file, c.empty);
  check(!p.texts.empty(), "generate: {} holds no prompts", o.prompt_file);
  if (!p.lines) p.texts[0] = without_last_newline(p.texts[0]);
  return p;
}

std::vector<std::vector<int64_t>> encode(const Prompts& p, const Tokenizer& tokenizer,
                                         bool add_bos) {
  check(!add_bos || tokenizer.bos(), "generate: --add-bos: this tokenizer has no BOS");
  std::vector<std::vector<int64_t>> out;
  for (const std::string& text : p.texts) {
    check(!text.empty(), "generate: the prompt is empty: it needs at least one character");
    std::vector<int64_t> ids = tokenizer.encode(text);
    check(!ids.empty(), "generate: the prompt gives no tokens");
    if (add_bos) ids.insert(ids.begin(), *tokenizer.bos());
    out.push_back(std::move(ids));
  }
  return out;
}

void stream(const LanguageModel& model, const Tokenizer& tokenizer, const Options& o,
            const Prompts& prompts, const std::vector<std::vector<int64_t>>& ids,
            GenerateOptions options) {
  if (o.echo) fmt::print("{}", prompts.texts[0]);
  options.on_token = [&](int64_t, int64_t id) {
    const std::string bytes = tokenizer.token_bytes(id);
    const bool ok = std::fwrite(bytes.data(), 1, bytes.size(), stdout) == bytes.size() &&
                    std::fflush(stdout) == 0;
    check(ok, "cannot write to standard output: {}", std::strerror(errno));
  };
  generate(model, tokenizer, ids, options);
  fmt::print("\n");
}

void print_lines(const LanguageModel& model, const Tokenizer& tokenizer, const Prompts& prompts,
                 const std::vector<std::vector<int64_t>>& ids, GenerateOptions options) {
  ProgressLine progress;
  options.progress = [&](int64_t done) {
    progress.show([&] { return fmt::format("{}/{} prompts", done, ids.size()); });
  };
  const std::vector<Generation> all = generate(model, tokenizer, ids, options);
  for (size_t i = 0; i < all.size(); ++i) {
    std::string text;
    for (const int64_t id : all[i].ids) text += tokenizer.token_bytes(id);
    const nlohmann::ordered_json line = {{"prompt", prompts.texts[i]},
                                         {"text", text},
                                         {"tokens", all[i].ids},
                                         {"end", all[i].reached_eos ? "end-of-text" : "length"}};
    fmt::print("{}\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
}

void run(const Options& o) {
  const Sampling sampling = sampling_of(o);
  const Device device = usable_device(o.device);
  const DType dtype = o.dtype.empty() ? (device.is_cuda() ? DType::bf16 : DType::f32)
                                      : parse_dtype(o.dtype, {DType::f32, DType::bf16});
  if (dtype == DType::bf16 && !device.is_cuda())
    throw UsageError("--dtype bf16: models run in f32 on cpu");
  const EvalModel entry = find_eval_models({o.model}, o.tokenizer).front();
  const Prompts prompts = read_prompts(o);
  const auto ids = encode(prompts, entry.tokenizer, o.add_bos);
  const auto model = load_eval_model(entry, device, dtype, config_changes(o.set));
  const GenerateOptions options{
      .max_new_tokens = o.max_new_tokens, .batch = o.batch, .sampling = sampling};
  if (prompts.lines)
    print_lines(*model, entry.tokenizer, prompts, ids, options);
  else
    stream(*model, entry.tokenizer, o, prompts, ids, options);
}

}  // namespace

void add_generate(CLI::App& app) {
  auto* c = add_command(
      app, "generate", "Let a model go on from a prompt",
      "ebb generate --model runs/dami --prompt 'It was '\n"
      "ebb generate --model runs/dami --prompt-file start.txt --temperature 0.8 --top-p 0.95 "
      "--seed 7\n"
      "ebb generate --model models/gdn --prompt-file prompts.jsonl --device cuda > answers.jsonl\n"
      "head -c 500 book.txt | ebb generate --model runs/dami --max-new-tokens 300 --echo");
  auto o = std::make_shared<Options>();
  c->add_option("--model", o->model,
                "A model folder, or a run folder: its final model or newest "
                "checkpoint")
      ->required();
  auto* prompt = c->add_option("--prompt", o->prompt,
                               "The text to go on from; without --prompt "
                               "and --prompt-file: standard input");
  c->add_option("--prompt-file", o->prompt_file,
                "A text file with one prompt, or JSON lines (.jsonl), decoded side by side")
      ->excludes(prompt);
  c->add_option("--field", o->field, "Of JSON lines: the field with the prompt")
      ->capture_default_str();
  c->add_option("--max-new-tokens", o->max_new_tokens, "At most; end-of-text ends earlier")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(1), int64_t(1) << 30));
  c->add_option("--temperature", o->temperature,
                "Sample from logits divided by it; 0, the "
                "default, takes the most likely token");
  c->add_option("--top-k", o->top_k, "Sample among the k most likely tokens only; 0: all");
  c->add_option("--top-p", o->top_p,
                "Then among the most likely ones that together have this probability");
  c->add_option("--seed", o->seed, "Of the samples; 0 by default. Equal seeds, equal text");
  c->add_flag("--echo", o->echo, "Print the prompt before its continuation");
  c->add_flag("--add-bos", o->add_bos, "Begin prompts with the tokenizer's BOS");
  c->add_option("--batch", o->batch, "Prompts decoded together; changes no result")
      ->capture_default_str()
      ->check(CLI::Range(int64_t(1), int64_t(65536)));
  c->add_option("--tokenizer", o->tokenizer,
                "'bytes', a SentencePiece model or a folder; default: the model's own");
  c->add_option("--device", o->device, "cpu, cuda, cuda:N, or auto: a GPU where there is one")
      ->capture_default_str();
  c->add_option("--dtype", o->dtype, "f32 or bf16; the default is bf16 on a GPU, f32 on the CPU");
  add_set_option(c, &o->set);
  c->callback([o] { run(*o); });
}

}  // namespace ebb::tools
