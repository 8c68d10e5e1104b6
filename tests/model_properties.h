// What holds for every language model, whatever mixes its tokens.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>

#include "autograd/tape.h"
#include "models/language_model.h"
#include "tensor/compare.h"
#include "tensor/random.h"

namespace ebb::testing {

inline Tensor random_tokens(int64_t B, int64_t T, int64_t vocab = 64) {
  Tensor t = Tensor::empty({B, T}, DType::i64);
  for (int64_t i = 0; i < B * T; ++i)
    t.data<int64_t>()[i] = int64_t(random_word({3, 4}, uint64_t(i))) % vocab;
  return t;
}

// Known faults B22, B26: any split into prefill and steps, short prompts, from nothing, states
// handed on from one prefill to the next.
inline void expect_prefill_and_step(const LanguageModel& model) {
  const NoGrad off;
  const Tensor tokens = random_tokens(1, 72);
  const Tensor full = model.logits(model.hidden(tokens)).value().select(0, 0);
  const auto token = [&](int64_t t) { return tokens.slice(1, t, t + 1).reshape({1}); };
  for (const int64_t split : {1, 2, 3, 17, 19, 64, 66}) {
    DecodeState state;
    Tensor logits = model.prefill(tokens.slice(1, 0, split), {}, &state);
    for (int64_t t = split; t < std::min<int64_t>(split + 5, 72); ++t) {
      EXPECT_LE(relative_error(logits.select(0, 0), full.select(0, t - 1)), 1e-5)
          << "split " << split << " token " << t;
      logits = model.step(token(t), &state);
    }
  }
  DecodeState stepped, chunked;
  Tensor a, b;
  for (int64_t t = 0; t < 5; ++t) a = model.step(token(t), &stepped);
  model.prefill(tokens.slice(1, 0, 3), {}, &chunked);
  b = model.prefill(tokens.slice(1, 3, 5), {}, &chunked);
  EXPECT_LE(relative_error(a.select(0, 0), full.select(0, 4)), 1e-5) << "from nothing";
  EXPECT_LE(relative_error(b.select(0, 0), full.select(0, 4)), 1e-5) << "second prefill";
}

// No token sees the one before its document: states, convolutions, token shifts, positions.
inline void expect_documents_apart(const LanguageModel& model) {
  const NoGrad off;
  const Tensor tokens = random_tokens(1, 100);
  const Tensor packed =
      model.logits(model.hidden(tokens, SeqLayout::packed({0, 30, 31, 100}))).value();
  for (const auto& [begin, end] : {std::pair{0, 30}, std::pair{30, 31}, std::pair{31, 100}})
    EXPECT_LE(relative_error(packed.slice(1, begin, end),
                             model.logits(model.hidden(tokens.slice(1, begin, end))).value()),
              1e-5)
        << begin;
}

}  // namespace ebb::testing
