#include "train/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numbers>

#include "models/config_reader.h"
#include "tensor/check.h"
#include "train/shards.h"

namespace ebb {

using nlohmann::json;
namespace fs = std::filesystem;

namespace {

const std::vector<std::string> kSchemes = {"random", "post", "dami"};
const std::vector<std::string> kSchedules = {"constant", "cosine", "wsd", "linear"};
const std::vector<std::string> kLadders = {"geometric", "linear"};
const std::vector<std::string> kShapes = {"half_sine", "parabola", "low_high", "high_low",
                                          "high_low_high"};
const std::vector<std::string> kDtypes = {"f32", "bf16"};
const std::vector<std::string> kKinds = {"shards", "mqar"};
const std::vector<std::string> kOrders = {"listed", "mixed"};

template <class E>
void read_enum(ConfigReader* r, const std::string& key, const std::vector<std::string>& words,
               E* out) {
  int v = int(*out);
  r->choice(key, words, &v);
  *out = E(v);
}

void at_least(ConfigReader* r, const char* key, int64_t value, int64_t low) {
  if (value < low) r->error(key, fmt::format("must be at least {}, got {}", low, value));
}

void in_range(ConfigReader* r, const char* key, double value, double low, double high) {
  if (!(value >= low && value <= high))
    r->error(key, fmt::format("must lie in [{}, {}], got {}", low, high, value));
}

OptimConfig parse_optim(ConfigReader r) {
  OptimConfig o;
  r.read("lr", &o.lr);
  r.read("beta1", &o.beta1);
  r.read("beta2", &o.beta2);
  r.read("eps", &o.eps);
  r.read("weight_decay", &o.weight_decay);
  r.read("clip", &o.clip);
  read_enum(&r, "schedule", kSchedules, &o.schedule);
  r.read("warmup", &o.warmup);
  r.read("final_lr", &o.final_lr);
  r.read("decay", &o.decay);
  r.read("decay_all", &o.decay_all);
  r.read("lr_factors", &o.lr_factors);
  in_range(&r, "lr", o.lr, 0, 1e3);
  for (const auto& [key, beta] : {std::pair("beta1", o.beta1), std::pair("beta2", o.beta2)})
    if (!(beta >= 0 && beta < 1))
      r.error(key, fmt::format("must be at least 0 and less than 1, got {}", beta));
  in_range(&r, "eps", o.eps, 1e-30, 1);
  in_range(&r, "weight_decay", o.weight_decay, 0, 1e3);
  in_range(&r, "clip", o.clip, 0, 1e30);
  in_range(&r, "warmup", o.warmup, 0, 1);
  in_range(&r, "final_lr", o.final_lr, 0, 1);
  in_range(&r, "decay", o.decay, 0, 1);
  r.close();
  return o;
}

MqarConfig parse_mqar(ConfigReader r) {
  MqarConfig m;
  r.read("vocab_size", &m.vocab_size);
  r.read("pairs", &m.pairs);
  r.read("test_pairs", &m.test_pairs);
  r.read("examples", &m.examples);
  r.read("test_examples", &m.test_examples);
  r.read("power", &m.power);
  r.read("random_non_queries", &m.random_non_queries);
  read_enum(&r, "order", kOrders, &m.order);
  at_least(&r, "examples", m.examples, 1);
  at_least(&r, "test_examples", m.test_examples, 1);
  r.close();
  return m;
}

DataConfig parse_data(ConfigReader r) {
  DataConfig d;
  read_enum(&r, "kind", kKinds, &d.kind);
  if (d.kind == DataKind::mqar) {
    for (const char* key : {"train", "validation", "tokenizer", "reset_at_documents"})
      if (r.has(key)) r.error(key, "belongs to shards, kind is mqar");
    d.mqar = parse_mqar(r.object("mqar"));
    if (d.mqar.pairs.empty()) r.error("mqar", "names no numbers of pairs, e.g. \"pairs\": [8, 64]");
  } else if (r.has("mqar")) {
    r.error("mqar", "wants \"kind\": \"mqar\"");
    r.ignore("mqar");
  }
  r.read("train", &d.train);
  r.read("validation", &d.validation);
  r.read("tokenizer", &d.tokenizer);
  r.read("reset_at_documents", &d.reset_at_documents);
  r.read("shuffle", &d.shuffle);
  r.close();
  return d;
}

// {"preset": NAME, ...overrides}, a full model section, or {"folder": DIR}.
void parse_model(ConfigReader* r, TrainConfig* c, const std::string& what) {
  json section = r->raw("model");
  if (!section.is_object()) return r->error("model", "is missing");
  if (section.contains("folder")) {
    if (section.size() != 1 || !section["folder"].is_string())
      return r->error("model", "with \"folder\" nothing else may stand beside it");
    c->model_folder = section["folder"];
    return;
  }
  json full = section;
  if (section.contains("preset")) {
    if (!section["preset"].is_string()) return r->error("model", "preset must be a string");
    full = preset(section["preset"]).to_json();
    full.erase("architectures");
    section.erase("preset");
    full.update(section);
  }
  c->model = parse_model_config(full, "/model", what);
}

}  // namespace

InitConfig parse_init_config(ConfigReader r) {
  InitConfig i;
  read_enum(&r, "scheme", kSchemes, &i.scheme);
  r.read("seed", &i.seed);
  i.dami.seed = i.seed;
  r.read("calibration_sequences", &i.calibration_sequences);
  r.read("calibration_length", &i.calibration_length);
  r.read("post_length", &i.post_length);
  in_range(&r, "calibration_sequences", double(i.calibration_sequences), 1, 1 << 20);
  in_range(&r, "calibration_length", double(i.calibration_length), 1, 0x1p40);
  ConfigReader d = r.object("dami");
  d.read("tau_max", &i.dami.tau_max);
  d.read("tau_min", &i.dami.tau_min);
  read_enum(&d, "ladder", kLadders, &i.dami.ladder);
  read_enum(&d, "shape", kShapes, &i.dami.shape);
  d.read("low", &i.dami.low);
  d.read("high", &i.dami.high);
  d.read("shift", &i.dami.shift);
  d.read("peak_layer", &i.dami.peak_layer);
  in_range(&r, "post_length", i.post_length, 1, 1e12);
  in_range(&d, "tau_max", i.dami.tau_max, 1e-3, 1e12);
  in_range(&d, "tau_min", i.dami.tau_min, 1e-3, 1e12);
  for (const auto& [key, s] : {std::pair("low", i.dami.low), std::pair("high", i.dami.high),
                               std::pair("shift", i.dami.shift)})
    in_range(&d, key, s, -1, 2);
  d.close();
  r.close();
  return i;
}

TrainConfig parse_train_config(const json& recipe, const std::string& what) {
  ConfigReader r(recipe, "");
  TrainConfig c;
  parse_model(&r, &c, what);
  c.init = parse_init_config(r.object("init"));
  c.data = parse_data(r.object("data"));
  c.optim = parse_optim(r.object("optim"));
  r.read("steps", &c.steps);
  r.read("sequences", &c.sequences);
  r.read("length", &c.length);
  r.read("accumulate", &c.accumulate);
  int dtype = c.dtype == DType::bf16;
  r.choice("dtype", kDtypes, &dtype);
  c.dtype = dtype ? DType::bf16 : DType::f32;
  r.read("recompute", &c.recompute);
  r.read("seed", &c.seed);
  r.read("log_every", &c.log_every);
  r.read("checkpoint_every", &c.checkpoint_every);
  r.read("keep_last", &c.keep_last);
  r.read("validate_every", &c.validate_every);
  r.read("validation_batches", &c.validation_batches);
  r.read("out", &c.out);
  r.ignore("comment");
  if (c.data.kind == DataKind::mqar && c.init.scheme == InitScheme::dami)
    r.error("init", "scheme dami calibrates on token shards, /data/kind is mqar");
  at_least(&r, "steps", c.steps, 0);
  at_least(&r, "sequences", c.sequences, 1);
  at_least(&r, "length", c.length, 1);
  at_least(&r, "accumulate", c.accumulate, 1);
  at_least(&r, "log_every", c.log_every, 1);
  at_least(&r, "checkpoint_every", c.checkpoint_every, 0);
  at_least(&r, "keep_last", c.keep_last, 1);
  at_least(&r, "validate_every", c.validate_every, 0);
  at_least(&r, "validation_batches", c.validation_batches, 1);
  r.finish(what);
  return c;
}

json TrainConfig::resolved() const {
  const InitConfig& i = init;
  const OptimConfig& o = optim;
  json dami = {{"tau_max", i.dami.tau_max},
               {"tau_min", i.dami.tau_min},
               {"ladder", kLadders[size_t(i.dami.ladder)]},
               {"shape", kShapes[size_t(i.dami.shape)]},
               {"low", i.dami.low},
               {"high", i.dami.high},
               {"shift", i.dami.shift}};
  if (i.dami.peak_layer) dami["peak_layer"] = *i.dami.peak_layer;
  json model_section = model_folder.empty() ? model.to_json() : json{{"folder", model_folder}};
  model_section.erase("architectures");
  json data_section = {{"train", data.train},
                       {"validation", data.validation},
                       {"tokenizer", data.tokenizer},
                       {"reset_at_documents", data.reset_at_documents},
                       {"shuffle", data.shuffle}};
  if (data.kind == DataKind::mqar) {
    const MqarConfig& m = data.mqar;
    data_section = {{"kind", "mqar"},
                    {"shuffle", data.shuffle},
                    {"mqar",
                     {{"vocab_size", m.vocab_size},
                      {"pairs", m.pairs},
                      {"test_pairs", m.test_pairs},
                      {"examples", m.examples},
                      {"test_examples", m.test_examples},
                      {"power", m.power},
                      {"random_non_queries", m.random_non_queries},
                      {"order", kOrders[size_t(m.order)]}}}};
  }
  return {{"model", model_section},
          {"init",
           {{"scheme", kSchemes[size_t(i.scheme)]},
            {"seed", i.seed},
            {"calibration_sequences", i.calibration_sequences},
            {"calibration_length", i.calibration_length},
            {"post_length", i.post_length},
            {"dami", dami}}},
          {"data", data_section},
          {"optim",
           {{"lr", o.lr},
            {"beta1", o.beta1},
            {"beta2", o.beta2},
            {"eps", o.eps},
            {"weight_decay", o.weight_decay},
            {"clip", o.clip},
            {"schedule", kSchedules[size_t(o.schedule)]},
            {"warmup", o.warmup},
            {"final_lr", o.final_lr},
            {"decay", o.decay},
            {"decay_all", o.decay_all},
            {"lr_factors", o.lr_factors}}},
          {"steps", steps},
          {"sequences", sequences},
          {"length", length},
          {"accumulate", accumulate},
          {"dtype", name(dtype)},
          {"recompute", recompute},
          {"seed", seed},
          {"log_every", log_every},
          {"checkpoint_every", checkpoint_every},
          {"keep_last", keep_last},
          {"validate_every", validate_every},
          {"validation_batches", validation_batches},
          {"out", out}};
}

std::string recipe_difference(const std::string& file, const TrainConfig& now) {
  const json found = read_json(file);
  check(found.is_object(), "{} is not a JSON object", file);
  const json before = parse_train_config(found, file).resolved(), after = now.resolved();
  std::string differs;
  for (const auto& [key, value] : after.items()) {
    const bool free = key == "out" || key == "log_every" || key == "checkpoint_every" ||
                      key == "keep_last" || key == "validate_every" || key == "validation_batches";
    if (!free && before.value(key, json()) != value) differs += (differs.empty() ? "" : ", ") + key;
  }
  return differs;
}

void set_path(json* recipe, const std::string& assignment) {
  const size_t eq = assignment.find('=');
  check(eq != std::string::npos && eq > 0, "--set {}: want path=value, e.g. optim.lr=3e-4",
        assignment);
  std::string pointer;
  for (char c : assignment.substr(0, eq)) pointer += c == '.' ? '/' : c;
  const std::string text = assignment.substr(eq + 1);
  json value;
  if (!parse_json_line(text, &value)) value = text;
  try {
    (*recipe)[json::json_pointer("/" + pointer)] = value;
  } catch (const json::exception&) {
    fail("--set {}: the path runs through something that is not an object", assignment);
  }
}

double schedule_factor(const OptimConfig& o, int64_t step, int64_t steps) {
  const double n = double(std::max<int64_t>(steps, 1)), t = double(step);
  const double warm = std::ceil(o.warmup * n);
  if (t < warm) return (t + 1) / warm;
  const double progress = n > warm + 1 ? std::min(1.0, (t - warm) / (n - 1 - warm)) : 1.0;
  switch (o.schedule) {
    case Schedule::constant:
      return 1;
    case Schedule::cosine:
      return o.final_lr + (1 - o.final_lr) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
    case Schedule::linear:
      return 1 + (o.final_lr - 1) * progress;
    case Schedule::wsd: {
      const double start = n - std::ceil(o.decay * n);
      if (t < start) return 1;
      const double p = n - 1 > start ? (t - start) / (n - 1 - start) : 1.0;
      return 1 + (o.final_lr - 1) * p;
    }
  }
  return 1;
}

std::vector<std::string> expand_shards(const std::vector<std::string>& entries) {
  std::vector<std::string> out;
  for (const std::string& e : entries) {
    if (fs::is_regular_file(e)) {
      out.push_back(e);
      continue;
    }
    const fs::path prefix(e);
    const fs::path folder = prefix.has_parent_path() ? prefix.parent_path() : fs::path(".");
    std::vector<std::string> found;
    if (fs::is_directory(folder))
      for (const auto& f : fs::directory_iterator(folder)) {
        const std::string base = f.path().filename().string();
        if (is_shard_name(base, prefix.filename().string())) found.push_back(f.path().string());
      }
    check(!found.empty(), "data: no shard {} and none called {}-*.bin", e, e);
    std::sort(found.begin(), found.end(), [](const std::string& a, const std::string& b) {
      return std::pair(a.size(), a) < std::pair(b.size(), b);  // by number
    });
    for (size_t i = 0; i < found.size(); ++i)
      check(found[i].ends_with(fmt::format("-{:05}.bin", i)),
            "data: {}-{:05}.bin is missing, {} is there", e, i, found[i]);
    out.insert(out.end(), found.begin(), found.end());
  }
  return out;
}

}  // namespace ebb
