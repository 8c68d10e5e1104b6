// What the oracles of recurrent states [K,V] share: they go through a sequence with eight columns
// of V at a time, which meet only in sums over V, and backwards with the states of 32 tokens at a
// time. Both stay in the cache, so that long sequences are quick.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace ebb::testing::reference {

inline constexpr size_t kColumns = 8;
using Columns = std::array<double, kColumns>;  // of one row; zeros behind the last column of V
using StateColumns = std::vector<Columns>;     // [K]

inline Columns load_columns(const double* row, int64_t column, int64_t width) {
  Columns x{};
  std::copy_n(row + column, std::min(int64_t(kColumns), width - column), x.begin());
  return x;
}
inline void store_columns(double* row, int64_t column, int64_t width, const Columns& x) {
  std::copy_n(x.begin(), std::min(int64_t(kColumns), width - column), row + column);
}
// Of a matrix [rows,width]; zeros for none.
inline StateColumns load_state(const double* state, int64_t rows, int64_t column, int64_t width) {
  StateColumns s(size_t(rows), Columns{});
  for (int64_t i = 0; state && i < rows; ++i)
    s[size_t(i)] = load_columns(state + i * width, column, width);
  return s;
}
inline void store_state(double* state, int64_t column, int64_t width, const StateColumns& s) {
  for (size_t i = 0; i < s.size(); ++i)
    store_columns(state + int64_t(i) * width, column, width, s[i]);
}

// f(n, head, column) for the columns of every state.
template <class F>
void each_part(int64_t sequences, int64_t heads, int64_t width, F&& f) {
  for (int64_t n = 0; n < sequences; ++n)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t j = 0; j < width; j += int64_t(kColumns)) f(n, h, j);
}

// advance(t, s) makes of a state s that after token t. f(t, before, after) for the tokens
// end−1 … begin, from the state s before all of them.
template <class S, class Advance, class F>
void each_token_backwards(int64_t begin, int64_t end, S s, Advance&& advance, F&& f) {
  constexpr int64_t kRun = 32;
  std::vector<S> starts;  // of runs of tokens
  for (int64_t t = begin; t < end; ++t) {
    if ((t - begin) % kRun == 0) starts.push_back(s);
    advance(t, s);
  }
  std::vector<S> states(kRun + 1);  // before each token of a run and after the last
  for (; !starts.empty(); starts.pop_back()) {
    const int64_t first = begin + (int64_t(starts.size()) - 1) * kRun;
    const int64_t count = std::min(kRun, end - first);
    states[0] = starts.back();
    for (int64_t i = 0; i < count; ++i) {
      states[size_t(i) + 1] = states[size_t(i)];
      advance(first + i, states[size_t(i) + 1]);
    }
    for (int64_t i = count - 1; i >= 0; --i) f(first + i, states[size_t(i)], states[size_t(i) + 1]);
  }
}

}  // namespace ebb::testing::reference
