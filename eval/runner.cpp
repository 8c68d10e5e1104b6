#include "eval/runner.h"

#include <algorithm>

#include "autograd/tape.h"
#include "ops/cross_entropy.h"
#include "tensor/check.h"

namespace ebb {

int64_t window_share(int64_t window_tokens, int64_t n) {
  constexpr int64_t kChunk = 64;
  const int64_t share = std::max<int64_t>(1, window_tokens / std::max<int64_t>(n, 1));
  return share < kChunk ? share : share / kChunk * kChunk;
}

std::vector<double> token_losses(const LanguageModel& model, const Tensor& hidden,
                                 const std::vector<int64_t>& labels, int64_t rows) {
  std::vector<double> out;
  const int64_t n = int64_t(labels.size());
  std::optional<DType> wide;
  if (hidden.dtype() == DType::bf16) wide = DType::f32;
  for (int64_t begin = 0; begin < n; begin += rows) {
    const int64_t end = std::min(n, begin + rows);
    const std::vector<int64_t> part(labels.begin() + begin, labels.begin() + end);
    const Var logits = model.logits(hidden.slice(0, begin, end), wide);
    const Tensor losses = cross_entropy(logits, Tensor::from(part, {end - begin}, model.device()),
                                        {.reduction = Reduction::sum})
                              .token_loss;
    const std::vector<double> some = losses.to(DType::f64).to_vector<double>();
    out.insert(out.end(), some.begin(), some.end());
  }
  return out;
}

Tensor chunked_prefill(const LanguageModel& model, const std::vector<std::vector<int64_t>>& prompts,
                       int64_t prefill_tokens, DecodeState* state) {
  const NoGrad off;
  const int64_t N = int64_t(prompts.size());
  const Device device = model.device();
  const int64_t share = window_share(prefill_tokens, N);
  int64_t longest = 0;
  for (const auto& p : prompts) {
    check(!p.empty(), "generate: a prompt is empty");
    for (const int64_t id : p)
      check(id >= 0 && id < model.config().vocab_size,
            "generate: a prompt holds token {}, the model knows [0, {})", id,
            model.config().vocab_size);
    longest = std::max(longest, int64_t(p.size()));
  }
  *state = model.zero_state(N);
  Tensor last;  // [N,d]
  for (int64_t begin = 0; begin < longest; begin += share) {
    std::vector<int64_t> tokens, cuts{0};
    for (const auto& p : prompts) {
      const int64_t from = std::min(begin, int64_t(p.size())),
                    to = std::min(begin + share, int64_t(p.size()));
      tokens.insert(tokens.end(), p.begin() + from, p.begin() + to);
      cuts.push_back(int64_t(tokens.size()));
    }
    const int64_t n = int64_t(tokens.size());
    DecodeState after;
    const Tensor h = model
                         .hidden(Tensor::from(tokens, {1, n}, device),
                                 SeqLayout::packed(cuts, device), state, &after)
                         .value()
                         .select(0, 0);
    *state = std::move(after);
    if (!last.defined()) last = Tensor::empty({N, h.shape().back()}, h.dtype(), device);
    for (int64_t i = 0; i < N; ++i) {
      const int64_t length = int64_t(prompts[size_t(i)].size());
      if (length > begin && length <= begin + share)
        copy(last.select(0, i), h.select(0, cuts[size_t(i) + 1] - 1));
    }
  }
  return model.logits(last).value();
}

namespace {

// Cuts text before the earliest stop string; true when there was one.
bool cut_at_stop(const std::vector<std::string>& stops, std::string* text) {
  size_t first = std::string::npos;
  for (const std::string& s : stops)
    if (!s.empty()) first = std::min(first, text->find(s));
  if (first == std::string::npos) return false;
  text->resize(first);
  return true;
}

// `first`: the number of the first of these prompts among all of them.
void generate_batch(const LanguageModel& model, const Tokenizer& tokenizer,
                    const std::vector<std::vector<int64_t>>& prompts, int64_t first,
                    const GenerateOptions& options, Generation* out) {
  DecodeState state;
  Tensor logits = chunked_prefill(model, prompts, options.prefill_tokens, &state);
  std::vector<int64_t> active;  // which prompt each row of the state belongs to
  for (size_t i = 0; i < prompts.size(); ++i) active.push_back(first + int64_t(i));
  const auto eos = tokenizer.eos();
  for (int64_t made = 0; made < options.max_new_tokens && !active.empty(); ++made) {
    const std::vector<int64_t> next =
        choose_tokens(logits.slice(1, 0, std::min(logits.size(1), tokenizer.vocab_size())),
                      options.sampling, active, made);
    std::vector<int64_t> kept, tokens, owners;
    for (size_t r = 0; r < active.size(); ++r) {
      Generation& g = out[active[r] - first];
      if (eos && next[r] == *eos) {
        g.reached_eos = true;
        continue;
      }
      g.ids.push_back(next[r]);
      if (options.on_token) options.on_token(active[r], next[r]);
      if (!options.stop.empty()) {
        g.text = tokenizer.decode(g.ids);
        if (cut_at_stop(options.stop, &g.text)) continue;
      }
      kept.push_back(int64_t(r));
      tokens.push_back(next[r]);
      owners.push_back(active[r]);
    }
    if (kept.size() != active.size()) state = state.select(kept);
    active = owners;
    if (active.empty() || made + 1 == options.max_new_tokens) break;
    logits = model.step(Tensor::from(tokens, {int64_t(tokens.size())}, model.device()), &state);
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    out[i].text = tokenizer.decode(out[i].ids);
    cut_at_stop(options.stop, &out[i].text);
  }
}

}  // namespace

std::vector<Generation> generate(const LanguageModel& model, const Tokenizer& tokenizer,
                                 const std::vector<std::vector<int64_t>>& prompts,
                                 const GenerateOptions& options) {
  check(options.batch >= 1 && options.max_new_tokens >= 0 && options.prefill_tokens >= 1,
        "generate: batch {}, {} new tokens, {} prefill tokens", options.batch,
        options.max_new_tokens, options.prefill_tokens);
  check_sampling(options.sampling);
  std::vector<Generation> out(prompts.size());
  for (size_t begin = 0; begin < prompts.size(); begin += size_t(options.batch)) {
    const size_t end = std::min(prompts.size(), begin + size_t(options.batch));
    generate_batch(model, tokenizer, {prompts.begin() + begin, prompts.begin() + end},
                   int64_t(begin), options, out.data() + begin);
    if (options.progress) options.progress(int64_t(end));
  }
  return out;
}

Generation generate(const LanguageModel& model, const Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options) {
  const std::vector<std::vector<int64_t>> prompts = {tokenizer.encode(prompt)};
  return generate(model, tokenizer, prompts, options).front();
}

}  // namespace ebb
