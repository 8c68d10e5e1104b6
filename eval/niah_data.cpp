#include "eval/niah_data.h"

#include <exception>
#include <filesystem>
#include <set>

#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/hash.h"

namespace ebb {

namespace fs = std::filesystem;
using nlohmann::json;

std::string niah_data_path(const std::string& folder, const std::string& task, int64_t length) {
  return fmt::format("{}/{}_{}.jsonl", folder, task, length);
}

namespace {

std::string meta_path(const std::string& samples) {
  return samples.substr(0, samples.size() - std::string(".jsonl").size()) + ".meta.json";
}

// Samples do not depend on each other, so they are made side by side; the first error in order is
// reported.
std::vector<NiahSample> make_samples(const NiahGenerator& generator, int64_t count) {
  std::vector<NiahSample> out{size_t(count)};
  std::vector<std::exception_ptr> errors{size_t(count)};
#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < count; ++i) {
    try {
      out[size_t(i)] = generator.sample(i);
    } catch (...) {
      errors[size_t(i)] = std::current_exception();
    }
  }
  for (const std::exception_ptr& e : errors)
    if (e) std::rethrow_exception(e);
  return out;
}

json token_summary(const std::vector<NiahSample>& samples) {
  int64_t least = INT64_MAX, most = 0;
  double mean = 0;
  for (const NiahSample& s : samples) {
    least = std::min(least, s.tokens);
    most = std::max(most, s.tokens);
    mean += double(s.tokens) / double(samples.size());
  }
  return {{"min", least}, {"mean", mean}, {"max", most}};
}

std::string words_sha256(const Words& words) {
  std::string all;
  for (const auto* list : {&words.adjectives, &words.nouns})
    for (const std::string& w : *list) all += w + "\n";
  return sha256(all);
}

void make_files(const std::string& path, const NiahDataSpec& spec, const Words& words,
                const Essay* essay, const Tokenizer& tokenizer) {
  const NiahTask& task = niah_task(spec.task);
  const NiahOptions options{.length = spec.length, .seed = spec.seed, .fit = spec.fit};
  const NiahGenerator generator(task, words, essay, token_count(tokenizer), options);
  const std::vector<NiahSample> samples = make_samples(generator, spec.samples);
  std::string text;
  for (const NiahSample& s : samples) {
    json j = s.to_json();
    j["task"] = spec.task;
    j["length"] = spec.length;
    j["seed"] = spec.seed;
    j["tokenizer_sha256"] = tokenizer.sha256();
    text += j.dump() + "\n";
  }
  json meta = {{"task", spec.task},
               {"length", spec.length},
               {"allowance", options.allowance},
               {"seed", spec.seed},
               {"fit", name(spec.fit)},
               {"samples", spec.samples},
               {"haystack", generator.haystack()},
               {"tokens", token_summary(samples)},
               {"tokenizer", {{"kind", tokenizer.kind()}, {"sha256", tokenizer.sha256()}}},
               {"words_sha256", words_sha256(words)},
               {"samples_sha256", sha256(text)}};
  if (task.haystack == HaystackKind::essay) meta["haystack_sha256"] = essay->sha256();
  make_folders(folder_of(path));
  // The samples last: where they are, the other file is too.
  write_file_atomically(meta_path(path), meta.dump(1) + "\n");
  write_file_atomically(path, text);
}

std::vector<NiahSample> read_samples(const std::string& path, const std::string& text,
                                     const NiahDataSpec& spec, std::string* tokenizer) {
  std::vector<NiahSample> out;
  std::set<std::string> ids;
  size_t begin = 0;
  for (int64_t line = 1; begin < text.size(); ++line) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string where = fmt::format("{}:{}", path, line);
    json j;
    check(parse_json_line(std::string_view(text).substr(begin, end - begin), &j),
          "{}: not valid JSON", where);
    begin = end + 1;
    NiahSample s = NiahSample::from_json(j, where, line - 1);
    const json task = s.other.value("task", json(spec.task));
    check(task == spec.task, "{}: a sample of {}, want {}", where, task.dump(), spec.task);
    check(ids.insert(s.id.dump()).second, "{}: id {} was there before", where, s.id.dump());
    const std::string of = s.other.value("tokenizer_sha256", std::string());
    check(line == 1 || of == *tokenizer, "{}: made with another tokenizer than line 1", where);
    *tokenizer = of;
    out.push_back(std::move(s));
  }
  return out;
}

// What the file says about itself must be what is asked for.
void check_meta(const json& meta, const NiahDataSpec& spec, const NiahData& d) {
  const auto same = [&](const char* field, const json& want, const char* flag) {
    check(!meta.contains(field) || meta.at(field) == want,
          "{} was made with {} {}, {} is asked for; give it, or another --data folder", d.path,
          flag, meta.value(field, json()).dump(), want.dump());
  };
  check(meta.value("samples_sha256", d.sha256) == d.sha256,
        "{} was changed since it was made: its SHA-256 is not the one in {}", d.path,
        meta_path(d.path));
  same("task", spec.task, "--task");
  same("length", spec.length, "--lengths");
  same("seed", spec.seed, "--seed");
  same("fit", name(spec.fit), "--fit");
}

NiahData read_files(const std::string& path, const NiahDataSpec& spec, const Tokenizer& tokenizer,
                    ForeignData foreign) {
  NiahData d{.path = path, .task = spec.task, .length = spec.length};
  const std::string text = read_file(path);
  d.sha256 = sha256(text);
  json meta = json::object();
  if (fs::exists(meta_path(path))) {
    meta = read_json(meta_path(path));
    check(meta.is_object(), "{} is not a JSON object", meta_path(path));
  }
  check_meta(meta, spec, d);
  d.samples = read_samples(path, text, spec, &d.tokenizer_sha256);
  check(!d.samples.empty(), "{} is empty", path);
  d.fit = meta.value("fit", "unknown");
  const json& about = meta.contains("seed") ? meta : d.samples[0].other;
  if (about.contains("seed") && about.at("seed").is_number_unsigned()) d.seed = about.at("seed");
  if (foreign == ForeignData::refuse && d.tokenizer_sha256 != tokenizer.sha256()) {
    check(!d.tokenizer_sha256.empty(),
          "{} does not say which tokenizer its lengths were counted with; --force takes it all the "
          "same",
          path);
    fail(
        "{} was made for another tokenizer ({}..., this model has {}...): its lengths differ for "
        "this one; give another --data folder, or --force",
        path, d.tokenizer_sha256.substr(0, 12), tokenizer.sha256().substr(0, 12));
  }
  check(int64_t(d.samples.size()) >= spec.samples,
        "{} holds {} samples, {} are asked for; give --samples {}, or another --data folder", path,
        d.samples.size(), spec.samples, d.samples.size());
  d.samples.resize(size_t(spec.samples));
  if (d.tokenizer_sha256 != tokenizer.sha256())  // .tokens was counted with the other one
    for (NiahSample& s : d.samples) s.tokens = int64_t(tokenizer.encode(s.prompt()).size());
  return d;
}

}  // namespace

NiahData open_niah_data(const std::string& folder, const NiahDataSpec& spec, const Words& words,
                        const Essay* essay, const Tokenizer& tokenizer, ForeignData foreign,
                        const std::function<void(const std::string&)>& note) {
  check(spec.samples >= 1, "niah: {} samples", spec.samples);
  const std::string path = niah_data_path(folder, niah_task(spec.task).name, spec.length);
  const bool make = !fs::exists(path);
  if (make) make_files(path, spec, words, essay, tokenizer);
  NiahData d;
  try {
    d = read_files(path, spec, tokenizer, foreign);
  } catch (const json::exception& e) {
    fail("{} or the file beside it holds a field of the wrong type: {}", path, json_problem(e));
  }
  d.made_now = make;
  if (note) {
    const json tokens = token_summary(d.samples);
    note(fmt::format("{} {}: {} samples, tokens min {} mean {:.1f} max {}", make ? "made" : "read",
                     path, d.samples.size(), tokens["min"].get<int64_t>(),
                     tokens["mean"].get<double>(), tokens["max"].get<int64_t>()));
  }
  return d;
}

}  // namespace ebb
