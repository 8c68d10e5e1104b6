#include "eval/multiple_choice.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <span>

#include "autograd/tape.h"
#include "eval/runner.h"
#include "eval/statistics.h"
#include "models/config_reader.h"
#include "ops/indexing.h"
#include "ops/movement.h"
#include "tensor/check.h"

namespace ebb {

using nlohmann::json;

namespace {

std::vector<std::string> strings(const json& j, const std::string& where, const char* key) {
  check(j.is_array(), "{}: {} is not a list", where, key);
  std::vector<std::string> out;
  for (const json& s : j) {
    check(s.is_string(), "{}: {} holds something that is not a string", where, key);
    out.push_back(s);
  }
  return out;
}

// Where the Unicode white space at the end of the text begins.
size_t end_of_words(const std::string& text) {
  size_t end = text.size();
  while (end > 0) {
    size_t from = end - 1;
    while (from > 0 && (static_cast<unsigned char>(text[from]) & 0xc0) == 0x80) --from;
    const std::string c = text.substr(from, end - from);
    const bool ascii =
        c.size() == 1 && std::string(" \t\n\v\f\r\x1c\x1d\x1e\x1f").find(c) != std::string::npos;
    const bool wide = c == "\u0085" || c == "\u00a0" || c == "\u1680" || c == "\u202f" ||
                      c == "\u205f" || c == "\u3000" || c == "\u2028" || c == "\u2029" ||
                      (c >= "\u2000" && c <= "\u200a");
    if (!ascii && !wide) break;
    end = from;
  }
  return end;
}

int64_t characters(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
}

// One choice of one question, as tokens.
struct Candidate {
  size_t question;
  std::vector<int64_t> inputs, labels;  // labels: of the last inputs
};

// Log-likelihoods of some candidates side by side.
std::vector<double> score(const LanguageModel& model, std::span<const Candidate> candidates,
                          int64_t logit_rows) {
  std::vector<int64_t> inputs, labels, rows, cuts{0};
  for (const Candidate& c : candidates) {
    inputs.insert(inputs.end(), c.inputs.begin(), c.inputs.end());
    labels.insert(labels.end(), c.labels.begin(), c.labels.end());
    cuts.push_back(int64_t(inputs.size()));
    for (size_t i = c.labels.size(); i > 0; --i) rows.push_back(cuts.back() - int64_t(i));
  }
  const Device device = model.device();
  const int64_t n = int64_t(inputs.size());
  const Var h = model.hidden(Tensor::from(inputs, {1, n}, device), SeqLayout::packed(cuts, device));
  const Var read = index_select(reshape(h, {n, h.shape().back()}), 0,
                                Tensor::from(rows, {int64_t(rows.size())}, device));
  const std::vector<double> losses = token_losses(model, read.value(), labels, logit_rows);
  std::vector<double> out;
  auto at = losses.begin();
  for (const Candidate& c : candidates) {
    const auto end = at + std::ptrdiff_t(c.labels.size());
    out.push_back(-std::accumulate(at, end, 0.0));
    at = end;
  }
  return out;
}

}  // namespace

std::vector<ChoiceQuestion> read_choices(const std::string& file) {
  std::ifstream in(file);
  check(bool(in), "multiple_choice: cannot read {}", file);
  std::vector<ChoiceQuestion> out;
  int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    const std::string where = fmt::format("multiple_choice: {}:{}", file, ++number);
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    json j;
    check(parse_json_line(line, &j) && j.is_object(), "{}: not a JSON object", where);
    for (const char* key : {"context", "choices", "gold"})
      check(j.contains(key), "{}: no field {}", where, key);
    ChoiceQuestion q;
    q.choices = strings(j["choices"], where, "choices");
    q.contexts = j["context"].is_string() ? std::vector<std::string>{j["context"]}
                                          : strings(j["context"], where, "context");
    const int64_t n = int64_t(q.choices.size());
    check(n >= 2, "{}: {} choices, want at least 2", where, n);
    for (const std::string& c : q.choices) check(!c.empty(), "{}: a choice is empty", where);
    check(q.contexts.size() == 1 || int64_t(q.contexts.size()) == n, "{}: {} contexts, {} choices",
          where, q.contexts.size(), n);
    check(j["gold"].is_number_integer(), "{}: gold is not a whole number", where);
    q.gold = j["gold"];
    check(q.gold >= 0 && q.gold < n, "{}: gold is {}, there are choices 0 to {}", where, q.gold,
          n - 1);
    out.push_back(std::move(q));
  }
  check(!out.empty(), "multiple_choice: {} holds no questions", file);
  return out;
}

EncodedPair encode_pair(const Tokenizer& tokenizer, std::string context, std::string continuation) {
  const size_t end = end_of_words(context);
  continuation = context.substr(end) + continuation;
  context.resize(end);
  EncodedPair p;
  if (context.empty()) {
    p.context = {tokenizer.bos() ? *tokenizer.bos() : tokenizer.separator()};
    p.continuation = tokenizer.encode(continuation);
  } else {
    const std::vector<int64_t> whole = tokenizer.encode(context + continuation);
    p.context = tokenizer.encode(context);
    const size_t n = p.context.size();
    p.shifted = whole.size() < n || !std::equal(p.context.begin(), p.context.end(), whole.begin());
    if (whole.size() > n) p.continuation.assign(whole.begin() + std::ptrdiff_t(n), whole.end());
    p.joined = p.continuation.empty();
    if (p.joined) p.continuation = tokenizer.encode(continuation);
  }
  check(!p.continuation.empty(), "multiple_choice: '{}' gives no token", continuation);
  return p;
}

ChoiceAnswer choose(const ChoiceQuestion& question, std::vector<double> likelihoods) {
  ChoiceAnswer a{.likelihoods = std::move(likelihoods)};
  std::vector<double> normed;
  for (size_t i = 0; i < a.likelihoods.size(); ++i)
    normed.push_back(a.likelihoods[i] / double(characters(question.choices[i])));
  const auto largest = [](const std::vector<double>& x) {
    return int64_t(std::max_element(x.begin(), x.end()) - x.begin());
  };
  a.chosen = largest(a.likelihoods), a.chosen_norm = largest(normed);
  return a;
}

ChoiceScores ask_choices(const LanguageModel& model, const Tokenizer& tokenizer,
                         const std::vector<ChoiceQuestion>& questions,
                         const ChoiceOptions& options) {
  check(options.window_tokens >= 1 && options.logit_rows >= 1,
        "multiple_choice: windows of {} tokens, {} rows", options.window_tokens,
        options.logit_rows);
  check(tokenizer.vocab_size() <= model.config().vocab_size,
        "multiple_choice: the tokenizer has {} tokens, the model {}", tokenizer.vocab_size(),
        model.config().vocab_size);
  check(!options.add_bos || tokenizer.bos(), "multiple_choice: the tokenizer has no BOS");
  const NoGrad off;
  ChoiceScores out;
  std::vector<std::vector<double>> likelihoods(questions.size());
  std::vector<Candidate> window;
  int64_t tokens = 0;
  const auto flush = [&](size_t done) {
    if (window.empty()) return;
    const std::vector<double> scores = score(model, window, options.logit_rows);
    for (size_t i = 0; i < window.size(); ++i) likelihoods[window[i].question].push_back(scores[i]);
    window.clear(), tokens = 0;
    if (options.progress) options.progress(int64_t(done));
  };
  for (size_t q = 0; q < questions.size(); ++q) {
    const ChoiceQuestion& question = questions[q];
    for (size_t i = 0; i < question.choices.size(); ++i) {
      EncodedPair p =
          encode_pair(tokenizer, question.contexts[question.contexts.size() > 1 ? i : 0],
                      " " + question.choices[i]);
      out.joined += p.joined, out.shifted += p.shifted;
      if (options.add_bos && (p.context.empty() || p.context[0] != *tokenizer.bos()))
        p.context.insert(p.context.begin(), *tokenizer.bos());
      Candidate c{.question = q, .inputs = std::move(p.context), .labels = p.continuation};
      c.inputs.insert(c.inputs.end(), p.continuation.begin(), p.continuation.end() - 1);
      if (tokens + int64_t(c.inputs.size()) > options.window_tokens) flush(q);
      tokens += int64_t(c.inputs.size());
      window.push_back(std::move(c));
    }
  }
  flush(questions.size());
  for (size_t q = 0; q < questions.size(); ++q) {
    for (const double ll : likelihoods[q])
      check(std::isfinite(ll), "multiple_choice: question {}: a log-likelihood is {}", q, ll);
    out.answers.push_back(choose(questions[q], std::move(likelihoods[q])));
    out.right += out.answers[q].chosen == questions[q].gold;
    out.right_norm += out.answers[q].chosen_norm == questions[q].gold;
  }
  return out;
}

json ChoiceScores::record() const {
  const int64_t n = int64_t(answers.size());
  const auto part = [n](int64_t hits) {
    const Interval i = wilson(double(hits), n);
    return json{
        {"right", hits}, {"accuracy", double(hits) / double(n)}, {"low", i.low}, {"high", i.high}};
  };
  return {{"count", n},
          {"acc", part(right)},
          {"acc_norm", part(right_norm)},
          {"joined", joined},
          {"shifted", shifted}};
}

}  // namespace ebb
