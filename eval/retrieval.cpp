#include "eval/retrieval.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "tensor/check.h"
#include "tensor/hash.h"

namespace ebb {

using nlohmann::json;

Predictor model_predictor(const LanguageModel& model, const Tokenizer& tokenizer,
                          const GenerateOptions& options) {
  return [&model, &tokenizer, options](const std::vector<Question>& questions) {
    std::vector<std::vector<int64_t>> prompts;
    for (const Question& q : questions) prompts.push_back(q.ids);
    std::vector<Answer> out;
    for (Generation& g : generate(model, tokenizer, prompts, options))
      out.push_back({std::move(g.text), int64_t(g.ids.size())});
    return out;
  };
}

RetrievalScores ask(const NiahData& data, const Tokenizer& tokenizer, const Predictor& predictor,
                    Bos bos) {
  check(bos == Bos::leave_out || tokenizer.bos().has_value(),
        "the tokenizer has no token for the beginning of a text");
  RetrievalScores out{.data = &data};
  std::vector<Question> questions;
  for (const NiahSample& s : data.samples) {
    const std::string prompt = s.prompt();
    const std::vector<Tokenizer::Span> spans = tokenizer.encode_spans(prompt);
    Question q{&s, {}};
    if (bos == Bos::add) q.ids.push_back(*tokenizer.bos());
    for (const Tokenizer::Span& span : spans) q.ids.push_back(span.id);
    SampleScore& score = out.samples.emplace_back();
    score.sample = &s;
    score.prompt_sha256 = sha256(prompt);
    score.prompt_tokens = int64_t(q.ids.size());
    score.distance = needle_distance(s, spans);
    questions.push_back(std::move(q));
  }
  std::vector<Answer> answers = predictor(questions);
  check(answers.size() == questions.size(), "eval: {} answers to {} questions", answers.size(),
        questions.size());
  for (size_t i = 0; i < answers.size(); ++i) {
    SampleScore& s = out.samples[i];
    s.score = string_match_all(answers[i].text, s.sample->outputs);
    s.answer = std::move(answers[i]);
  }
  return out;
}

json SampleScore::record() const {
  json j = {{"id", sample->id},
            {"prompt_sha256", prompt_sha256},
            {"prompt_tokens", prompt_tokens},
            {"truncated", false},
            {"outputs", sample->outputs},
            {"text", answer.text},
            {"new_tokens", answer.tokens},
            {"score", score}};
  j["distance"] = distance ? json(distance->relative) : json();
  j["gap"] = distance ? json(distance->gap) : json();
  return j;
}

double RetrievalScores::right() const {
  double sum = 0;
  for (const SampleScore& s : samples) sum += s.score;
  return sum;
}

double RetrievalScores::accuracy() const {
  return samples.empty() ? 0 : right() / double(samples.size());
}

Interval RetrievalScores::interval() const { return wilson(right(), int64_t(samples.size())); }

int64_t RetrievalScores::prompt_tokens(bool longest) const {
  int64_t out = samples.empty() ? 0 : samples[0].prompt_tokens;
  for (const SampleScore& s : samples)
    out = longest ? std::max(out, s.prompt_tokens) : std::min(out, s.prompt_tokens);
  return out;
}

json RetrievalScores::summary() const {
  const int64_t n = int64_t(samples.size());
  const double p = accuracy();
  const Interval i = interval();
  return {{"task", data->task},
          {"length", data->length},
          {"count", n},
          {"right", right()},
          {"accuracy", p},
          {"low", i.low},
          {"high", i.high},
          {"stderr", n > 1 ? json(std::sqrt(p * (1 - p) / double(n - 1))) : json()}};
}

DistanceTask RetrievalScores::by_distance() const {
  DistanceTask t{fmt::format("{}/{}", data->length, data->task), std::to_string(data->length), {}};
  for (const SampleScore& s : samples)
    if (s.distance) t.samples.push_back({s.distance->relative, s.score});
  return t;
}

json mean_accuracies(const std::vector<RetrievalScores>& settings) {
  std::map<std::string, std::vector<double>> by_task;
  std::vector<double> all;
  for (const RetrievalScores& s : settings) {
    by_task[s.data->task].push_back(s.accuracy());
    all.push_back(s.accuracy());
  }
  const auto mean = [](const std::vector<double>& x) {
    return json{{"settings", x.size()},
                {"accuracy", std::accumulate(x.begin(), x.end(), 0.0) / double(x.size())}};
  };
  check(!all.empty(), "eval: no settings to average");
  json out = mean(all);
  for (const auto& [task, x] : by_task) out["by_task"][task] = mean(x);
  return out;
}

json distance_table(const std::vector<RetrievalScores>& settings, int64_t bins) {
  std::vector<DistanceTask> tasks;
  int64_t unknown = 0;
  for (const RetrievalScores& s : settings) {
    tasks.push_back(s.by_distance());
    unknown += int64_t(s.samples.size() - tasks.back().samples.size());
    if (tasks.back().samples.empty()) tasks.pop_back();
  }
  if (tasks.empty()) return nullptr;
  const DistanceCurves c = distance_curves(tasks, bins);
  json out = {{"bins", bins},
              {"edges", c.edges},
              {"moved_boundary", c.moved_boundary < 0 ? json() : json(c.moved_boundary)},
              {"samples_without_distance", unknown},
              {"lengths", json::array()}};
  for (const auto& [length, curve] : c.by_length) {
    json rows = json::array();
    for (const DistanceBin& b : curve) {
      const bool any = b.tasks > 0;
      const Interval i = b.interval();
      rows.push_back({{"center", b.center},
                      {"accuracy", any ? json(b.accuracy) : json()},
                      {"low", any ? json(i.low) : json()},
                      {"high", any ? json(i.high) : json()},
                      {"tasks", b.tasks},
                      {"samples", b.samples},
                      {"right", b.right}});
    }
    json names = json::array();
    for (const DistanceTask& t : tasks)
      if (t.length == length) names.push_back(t.name.substr(length.size() + 1));
    out["lengths"].push_back({{"length", std::stoll(length)}, {"tasks", names}, {"bins", rows}});
  }
  return out;
}

}  // namespace ebb
