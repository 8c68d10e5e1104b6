#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>

#include "autograd/tape.h"
#include "eval/runner.h"
#include "tensor/check.h"

namespace ebb {

double PerplexityResult::per_token() const { return std::exp(nll / double(tokens)); }
double PerplexityResult::per_byte() const { return std::exp(nll / double(bytes)); }
double PerplexityResult::bits_per_byte() const { return nll / double(bytes) / std::log(2.0); }

nlohmann::json PerplexityResult::record() const {
  using nlohmann::json;
  return {{"nll", nll},
          {"tokens", tokens},
          {"documents", documents},
          {"bytes", bytes},
          {"perplexity", per_token()},
          {"byte_perplexity", bytes ? json(per_byte()) : json()},
          {"bits_per_byte", bytes ? json(bits_per_byte()) : json()}};
}

namespace {

// Some documents side by side, window after window.
double group_loss(const LanguageModel& model, const std::vector<std::vector<int64_t>>& documents,
                  int64_t separator, const PerplexityOptions& options,
                  const std::function<void(int64_t)>& done) {
  const int64_t N = int64_t(documents.size());
  const Device device = model.device();
  DecodeState state = model.zero_state(N);
  std::vector<int64_t> at(size_t(N), 0);
  double sum = 0;
  for (;;) {
    int64_t open = 0;
    for (int64_t i = 0; i < N; ++i) open += at[size_t(i)] < int64_t(documents[size_t(i)].size());
    if (open == 0) return sum;
    const int64_t share = window_share(options.window_tokens, open);
    std::vector<int64_t> inputs, labels, cuts{0};
    for (int64_t i = 0; i < N; ++i) {
      const std::vector<int64_t>& d = documents[size_t(i)];
      const int64_t from = at[size_t(i)], to = std::min(from + share, int64_t(d.size()));
      for (int64_t t = from; t < to; ++t) {
        inputs.push_back(t == 0 ? separator : d[size_t(t) - 1]);
        labels.push_back(d[size_t(t)]);
      }
      at[size_t(i)] = to;
      cuts.push_back(int64_t(inputs.size()));
    }
    DecodeState after;
    const int64_t n = int64_t(inputs.size());
    const Tensor h = model
                         .hidden(Tensor::from(inputs, {1, n}, device),
                                 SeqLayout::packed(cuts, device), &state, &after)
                         .value()
                         .select(0, 0);
    state = std::move(after);
    for (const double x : token_losses(model, h, labels, options.logit_rows)) sum += x;
    done(n);
  }
}

}  // namespace

PerplexityResult perplexity(const LanguageModel& model, const Tokenizer& tokenizer,
                            const DocumentSource& next, const PerplexityOptions& options) {
  check(options.window_tokens >= 1 && options.documents >= 1 && options.logit_rows >= 1,
        "perplexity: windows of {} tokens, {} documents, {} rows", options.window_tokens,
        options.documents, options.logit_rows);
  check(tokenizer.vocab_size() <= model.config().vocab_size,
        "perplexity: the tokenizer has {} tokens, the model {}", tokenizer.vocab_size(),
        model.config().vocab_size);
  const NoGrad off;
  const int64_t separator = tokenizer.separator();
  PerplexityResult r;
  int64_t done = 0;
  const auto report = [&](int64_t n) {
    done += n;
    if (options.progress) options.progress(done);
  };
  std::vector<int64_t> ids;
  for (bool more = true; more;) {
    std::vector<std::vector<int64_t>> group;
    int64_t tokens = 0;
    while (int64_t(group.size()) < options.documents && tokens < options.window_tokens &&
           (more = next(&ids))) {
      if (ids.empty()) continue;
      tokens += int64_t(ids.size());
      r.bytes += int64_t(tokenizer.decode(ids).size());
      group.push_back(ids);
    }
    if (group.empty()) break;
    r.nll += group_loss(model, group, separator, options, report);
    r.tokens += tokens;
    r.documents += int64_t(group.size());
  }
  check(r.tokens > 0, "perplexity: there are no tokens");
  check(std::isfinite(r.nll), "perplexity: the loss is {}", r.nll);
  return r;
}

}  // namespace ebb
