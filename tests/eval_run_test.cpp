// Sample files, oracles, batching and perplexity: evaluation from end to end without the command.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "eval/perplexity.h"
#include "eval/retrieval.h"
#include "ops/cross_entropy.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tests/small_model.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

using nlohmann::json;

const Words& words() {
  static const Words w = builtin_words();
  return w;
}

const Essay& essay() {
  static const Essay e = [] {
    std::string text;
    for (int i = 0; i < 900; ++i) text += fmt::format("Rain fell on day {}. Nobody minded it. ", i);
    return Essay(text);
  }();
  return e;
}

NiahData open(const std::string& folder, const NiahDataSpec& spec,
              ForeignData foreign = ForeignData::refuse) {
  return open_niah_data(folder, spec, words(), &essay(), Tokenizer::bytes(), foreign);
}

template <class F>
std::string message(F fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
}

TEST(NiahFiles, AreMadeOnceAndThenOnlyRead) {
  const TemporaryFolder a, b;
  const NiahDataSpec spec{.task = "niah_single_1", .length = 1024, .samples = 12};
  const NiahData made = open(a.path(), spec);
  EXPECT_TRUE(made.made_now);
  const auto files = [](const TemporaryFolder& f) {
    return read_file(f.file("niah_single_1_1024.jsonl")) +
           read_file(f.file("niah_single_1_1024.meta.json"));
  };
  const std::string first = files(a);
  const NiahData again = open(a.path(), spec);
  EXPECT_FALSE(again.made_now);
  EXPECT_EQ(files(a), first);
  EXPECT_EQ(again.sha256, made.sha256);
  EXPECT_EQ(again.fit, "binary");
  EXPECT_EQ(again.seed, 42u);
  // Elsewhere the same bytes; so too when the program died between the two files.
  open(b.path(), spec);
  EXPECT_EQ(files(b), first);
  std::filesystem::remove(a.file("niah_single_1_1024.jsonl"));
  open(a.path(), spec);
  EXPECT_EQ(files(a), first);
  EXPECT_EQ(a.names().size(), 2u);  // nothing temporary is left
  // Sample i does not depend on how many there are.
  const TemporaryFolder c;
  NiahDataSpec fewer = spec;
  fewer.samples = 5;
  const NiahData five = open(c.path(), fewer), part = open(a.path(), fewer);
  ASSERT_EQ(part.samples.size(), 5u);
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(five.samples[i].input, part.samples[i].input);

  const json meta = json::parse(read_file(a.file("niah_single_1_1024.meta.json")));
  EXPECT_EQ(meta["samples"], 12);
  EXPECT_EQ(meta["tokenizer"]["sha256"], Tokenizer::bytes().sha256());
  EXPECT_LE(meta["tokens"]["max"].get<int64_t>(), 1024 - 128);
  EXPECT_LE(meta["tokens"]["min"].get<double>(), meta["tokens"]["mean"].get<double>());
}

TEST(NiahFiles, OthersThanAskedForAreRefused) {
  const TemporaryFolder folder;
  const NiahDataSpec spec{.task = "niah_single_2", .length = 2048, .samples = 4};
  open(folder.path(), spec);
  const auto with = [&](auto change) {
    NiahDataSpec s = spec;
    change(s);
    return message([&] { open(folder.path(), s); });
  };
  expect_in("--seed 42, 7 is asked for", with([](auto& s) { s.seed = 7; }));
  expect_in("--fit \"binary\"", with([](auto& s) { s.fit = NiahFit::step; }));
  expect_in("holds 4 samples, 5 are asked for", with([](auto& s) { s.samples = 5; }));

  const std::string path = folder.file("niah_single_2_2048.jsonl"), text = read_file(path);
  const auto rewritten = [&](const std::string& now, ForeignData foreign = ForeignData::refuse) {
    write_file_atomically(path, now);
    return message([&] { open(folder.path(), spec, foreign); });
  };
  expect_in("was changed since it was made", rewritten(text + "\n"));
  std::filesystem::remove(folder.file("niah_single_2_2048.meta.json"));
  EXPECT_EQ(rewritten(text), "no error");
  expect_in("2048.jsonl:5: not valid JSON", rewritten(text + "{\n"));
  const std::string line = text.substr(0, text.find('\n') + 1);
  expect_in("2048.jsonl:5: id 0 was there before", rewritten(text + line));
  expect_in("is empty", rewritten(""));

  // Another tokenizer, and one that is not named.
  std::string other;
  json j = json::parse(line);
  for (int i = 0; i < 4; ++i) {
    j["id"] = i;
    j["tokenizer_sha256"] = "0123";
    other += j.dump() + "\n";
  }
  expect_in("was made for another tokenizer", rewritten(other));
  EXPECT_EQ(rewritten(other, ForeignData::accept), "no error");
  j.erase("tokenizer_sha256");
  j["id"] = "four";
  expect_in("made with another tokenizer than line 1", rewritten(other + j.dump()));
  j.erase("id");
  std::string silent;
  for (int i = 0; i < 4; ++i) silent += j.dump() + "\n";  // ids are then the line numbers
  expect_in("does not say which tokenizer", rewritten(silent));
  EXPECT_EQ(rewritten(silent, ForeignData::accept), "no error");
  expect_in("--haystack", message([&] {
              open_niah_data(folder.path() + "/new", spec, words(), nullptr, Tokenizer::bytes(),
                             ForeignData::refuse);
            }));
}

// A copying model scores 100, one that takes another key's value 0, on every task.
TEST(Retrieval, Oracles) {
  const TemporaryFolder folder;
  const Predictor right = [](const std::vector<Question>& questions) {
    std::vector<Answer> out;
    for (const Question& q : questions) {
      const std::string prompt = Tokenizer::bytes().decode(q.ids);
      EXPECT_EQ(prompt, q.sample->prompt());
      // What a reader of the prompt can know: the sentence with the asked key.
      const std::string sentence = " for " + q.sample->query + " is: ";
      const size_t at = prompt.find(sentence) + sentence.size();
      out.push_back({fmt::format(" {}.", prompt.substr(at, prompt.find('.', at) - at)), 8});
    }
    return out;
  };
  const Predictor wrong = [](const std::vector<Question>& questions) {
    std::vector<Answer> out;
    for (const Question& q : questions) {
      std::string text;
      for (size_t i = 0; i < q.sample->keys.size(); ++i)
        if (q.sample->keys[i] != q.sample->query) text += " " + q.sample->values[i];
      out.push_back({text, 8});
    }
    return out;
  };
  std::vector<RetrievalScores> settings;
  std::vector<NiahData> data;
  for (const NiahTask& t : niah_tasks())
    data.push_back(open(folder.path(), {.task = t.name, .length = 2048, .samples = 40}));
  for (const NiahData& d : data) {
    settings.push_back(ask(d, Tokenizer::bytes(), right));
    EXPECT_EQ(settings.back().accuracy(), 1) << d.task;
    EXPECT_EQ(ask(d, Tokenizer::bytes(), wrong).accuracy(), 0) << d.task;
    const json s = settings.back().summary();
    EXPECT_EQ(s["right"], 40);
    EXPECT_NEAR(s["low"].get<double>(), wilson(40, 40).low, 1e-15);
    EXPECT_LE(settings.back().prompt_tokens(true), 2048 - 128);
    for (const SampleScore& x : settings.back().samples) {
      ASSERT_TRUE(x.distance.has_value());
      EXPECT_GT(x.distance->relative, 0);
      EXPECT_LE(x.distance->relative, 1);
      const json r = x.record();
      EXPECT_EQ(r["truncated"], false);
      EXPECT_EQ(r["score"], 1);
      EXPECT_EQ(r["prompt_sha256"].get<std::string>().size(), 64u);
    }
  }
  EXPECT_EQ(mean_accuracies(settings)["accuracy"], 1);
  EXPECT_EQ(mean_accuracies(settings)["by_task"]["niah_multikey_1"]["accuracy"], 1);
  const json table = distance_table(settings);
  int64_t samples = 0;
  for (const json& bin : table["lengths"][0]["bins"]) {
    for (const json& n : bin["samples"]) samples += n.get<int64_t>();
    if (bin["tasks"].get<int64_t>() > 0) {
      EXPECT_EQ(bin["accuracy"], 1);
    }
  }
  EXPECT_EQ(samples, 160);
}

TEST(Retrieval, MeansAreOverSettingsNotFamilies) {
  NiahData a, b;
  a.task = "x", b.task = "y";
  const NiahSample sample;
  const auto scores = [&](const NiahData& d, int right) {
    RetrievalScores s;
    s.data = &d;
    for (int i = 0; i < 10; ++i) s.samples.emplace_back().score = i < right;
    return s;
  };
  const json m = mean_accuracies({scores(a, 10), scores(a, 10), scores(b, 1)});
  EXPECT_NEAR(m["accuracy"].get<double>(), 0.7, 1e-15);
  EXPECT_EQ(m["by_task"]["x"]["settings"], 2);
}

TEST(Distance, IntervalOfAMeanOfTasks) {
  // One task: Wilson's. Two of equal size: as many samples together.
  const DistanceCurves one = distance_curves({{"a", "1", {{0.5, 1}, {0.5, 0}, {0.5, 1}}}}, 1);
  EXPECT_NEAR(one.by_length[0].second[0].interval().low, wilson(2, 3).low, 1e-15);
  const DistanceCurves two =
      distance_curves({{"a", "1", {{0.5, 1}, {0.5, 1}}}, {"b", "1", {{0.5, 0}, {0.5, 0}}}}, 1);
  EXPECT_NEAR(two.by_length[0].second[0].interval().low, wilson(2, 4).low, 1e-15);
  EXPECT_EQ(two.by_length[0].second[0].samples, (std::vector<int64_t>{2, 2}));
}

TEST(Generate, BatchingChangesNothing) {
  const auto model = small_model();
  const Tokenizer bytes = Tokenizer::bytes();
  std::vector<std::vector<int64_t>> prompts;
  for (int i = 0; i < 9; ++i)
    prompts.push_back(bytes.encode(std::string(size_t(1 + 37 * i % 200), char('a' + i))));
  const auto all = generate(*model, bytes, prompts, {.max_new_tokens = 20, .batch = 1});
  for (const auto& [batch, window] : {std::pair{9, 16384}, {4, 16384}, {9, 9 * 64}, {5, 100}}) {
    const auto some = generate(*model, bytes, prompts,
                               {.max_new_tokens = 20, .batch = batch, .prefill_tokens = window});
    for (size_t i = 0; i < prompts.size(); ++i)
      EXPECT_EQ(some[i].ids, all[i].ids) << i << " in batches of " << batch << ", " << window;
  }
}

// ids of documents, one after the other.
DocumentSource source(const std::vector<std::vector<int64_t>>& documents) {
  auto at = std::make_shared<size_t>(0);
  return [&documents, at](std::vector<int64_t>* ids) {
    if (*at == documents.size()) return false;
    *ids = documents[(*at)++];
    return true;
  };
}

std::vector<std::vector<int64_t>> some_documents() {
  std::vector<std::vector<int64_t>> out;
  for (int i = 0; i < 7; ++i) {
    std::string text;
    for (int k = 0; k < 3 + 61 * i; ++k) text += char('a' + (k * k + i) % 26);
    out.push_back(Tokenizer::bytes().encode(text));
    out.back().push_back(256);
  }
  return out;
}

TEST(Perplexity, OfUniformLogitsIsTheVocabulary) {
  const auto model = make_model(small_model()->config());  // all weights zero
  const auto documents = some_documents();
  const PerplexityResult r = perplexity(*model, Tokenizer::bytes(), source(documents), {});
  int64_t tokens = 0;
  for (const auto& d : documents) tokens += int64_t(d.size());
  EXPECT_EQ(r.tokens, tokens);
  EXPECT_EQ(r.documents, 7);
  EXPECT_EQ(r.bytes, tokens - 7);  // the separators have no text
  EXPECT_NEAR(r.nll, double(tokens) * std::log(300.0), 1e-4 * double(tokens));
  EXPECT_NEAR(r.per_token(), 300, 0.05);
  EXPECT_NEAR(r.bits_per_byte(), r.nll / double(r.bytes) / std::log(2.0), 1e-12);
}

TEST(Perplexity, DoesNotDependOnWindowsOrGroups) {
  const auto model = small_model();
  const auto documents = some_documents();
  // One document at a time, in one piece.
  double want = 0;
  for (const auto& d : documents) {
    std::vector<int64_t> input{256};
    input.insert(input.end(), d.begin(), d.end() - 1);
    const int64_t n = int64_t(d.size());
    const auto loss = model->loss(Tensor::from(input, {1, n}), Tensor::from(d, {1, n}));
    for (float x : loss.token_loss.to_vector<float>()) want += double(x);
  }
  for (const auto& [window, lanes, rows] :
       {std::tuple{16384, 64, 1024}, {100, 3, 7}, {13, 1, 1}, {640, 64, 50}}) {
    const PerplexityResult r =
        perplexity(*model, Tokenizer::bytes(), source(documents),
                   {.window_tokens = window, .documents = lanes, .logit_rows = rows});
    EXPECT_NEAR(r.nll / want, 1, 1e-6) << window << " " << lanes;
    EXPECT_EQ(r.documents, 7);
  }
}

TEST(Perplexity, NothingToScoreIsAnError) {
  const auto model = small_model();
  expect_in("there are no tokens",
            message([&] { perplexity(*model, Tokenizer::bytes(), source({}), {}); }));
}

}  // namespace
}  // namespace ebb::testing
