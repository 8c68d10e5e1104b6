// CPU kernels of ops/reduce.h. Every result is assembled from blocks of a fixed size in a fixed
// order, so it does not depend on the number of threads.
#include <omp.h>

#include <algorithm>
#include <memory>

#include "ops/reduce.h"
#include "ops/reduce_states.h"

namespace ebb::cpu {
namespace {

constexpr int64_t kParallelItems = 1 << 15;
constexpr int64_t kRowBlock = 1024;  // elements of a row reduced at a time
constexpr int kLanes = 16;           // independent partial states, for vector units
constexpr int64_t kColumnBlock = 64, kColumnTile = 256;

// Reads x, or x·factor, widened and with a sign.
template <class T>
struct Source {
  using A = acc_t<T>;
  const T* x;
  const T* factor;
  A sign;
  A operator()(int64_t i) const {
    const A v = sign * A(x[i]);
    return factor ? v * A(factor[i]) : v;
  }
};

template <class S, class T>
S reduce_run(const Source<T>& x, int64_t at, int64_t first, int64_t n) {
  S total = S::empty();
  int64_t j = 0;
  if (n >= 4 * kLanes) {
    S lane[kLanes];
    for (S& s : lane) s = S::empty();
    for (; j + kLanes <= n; j += kLanes)
      for (int l = 0; l < kLanes; ++l) lane[l].add(x(at + j + l), first + j + l);
    for (const S& s : lane) total.merge(s);
  }
  for (; j < n; ++j) total.add(x(at + j), first + j);
  return total;
}

// The union of n >= 1 states `step` apart, pairwise: rounding grows with log n only. Overwrites
// them.
template <class S>
S merge_all(S* state, int64_t n, int64_t step) {
  for (int64_t width = 1; width < n; width *= 2)
    for (int64_t i = 0; i + width < n; i += 2 * width)
      state[i * step].merge(state[(i + width) * step]);
  return state[0];
}

// emit(state, position in [outer,inner]) once per result.
template <class S, class T, class Emit>
void reduce_rows(const Source<T>& x, ReduceShape s, const Emit& emit) {
  const int64_t blocks = (s.n + kRowBlock - 1) / kRowBlock;
  const auto partial = std::make_unique_for_overwrite<S[]>(size_t(s.outer * blocks));
#pragma omp parallel for if (s.outer * s.n > kParallelItems)
  for (int64_t task = 0; task < s.outer * blocks; ++task) {
    const int64_t row = task / blocks, first = task % blocks * kRowBlock;
    partial[size_t(task)] =
        reduce_run<S>(x, row * s.n + first, first, std::min(kRowBlock, s.n - first));
  }
#pragma omp parallel for if (s.outer * blocks > kParallelItems)
  for (int64_t row = 0; row < s.outer; ++row)
    emit(merge_all(partial.get() + row * blocks, blocks, 1), row);
}

template <class S, class T, class Emit>
void reduce_columns(const Source<T>& x, ReduceShape s, const Emit& emit) {
  const int64_t blocks = (s.n + kColumnBlock - 1) / kColumnBlock;
  const int64_t tiles = (s.inner + kColumnTile - 1) / kColumnTile;
  const auto partial = std::make_unique_for_overwrite<S[]>(size_t(s.outer * blocks * s.inner));
#pragma omp parallel for if (s.outer * s.n * s.inner > kParallelItems)
  for (int64_t task = 0; task < s.outer * blocks * tiles; ++task) {
    const int64_t tile = task % tiles, block = task / tiles % blocks, o = task / tiles / blocks;
    const int64_t c0 = tile * kColumnTile, width = std::min(kColumnTile, s.inner - c0);
    const int64_t r0 = block * kColumnBlock, r1 = std::min(s.n, r0 + kColumnBlock);
    S column[kColumnTile];
    std::fill_n(column, width, S::empty());
    for (int64_t r = r0; r < r1; ++r)
      for (int64_t c = 0; c < width; ++c) column[c].add(x((o * s.n + r) * s.inner + c0 + c), r);
    std::copy(column, column + width, partial.get() + (o * blocks + block) * s.inner + c0);
  }
#pragma omp parallel for if (s.outer * blocks * s.inner > kParallelItems)
  for (int64_t i = 0; i < s.outer * s.inner; ++i) {
    const int64_t o = i / s.inner, c = i % s.inner;
    emit(merge_all(partial.get() + o * blocks * s.inner + c, blocks, s.inner), i);
  }
}

template <class S, class T, class Emit>
void reduce(const Source<T>& x, ReduceShape s, const Emit& emit) {
  if (s.inner == 1)
    reduce_rows<S>(x, s, emit);
  else
    reduce_columns<S>(x, s, emit);
}

}  // namespace

void sum(const Tensor& x, const Tensor& factor, ReduceShape s, double divisor, const Tensor& y) {
  const Tensor f = factor ? factor.to(x.dtype()) : Tensor();
  visit_float(x.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const Source<T> source{x.data<T>(), f ? f.data<T>() : nullptr, A(1)};
    visit_float(y.dtype(), [&]<class Y>() {
      Y* out = y.data<Y>();
      reduce<SumState<A>>(source, s,
                          [&](const SumState<A>& r, int64_t i) { out[i] = Y(r.sum / A(divisor)); });
    });
  });
}

void max(const Tensor& x, ReduceShape s, bool negate, const Tensor& y, const Tensor& index) {
  visit_float(x.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const A sign = negate ? A(-1) : A(1);
    T* out = y ? y.data<T>() : nullptr;
    int64_t* at = index ? index.data<int64_t>() : nullptr;
    reduce<MaxState<A>>(Source<T>{x.data<T>(), nullptr, sign}, s,
                        [&](const MaxState<A>& r, int64_t i) {
                          if (out) out[i] = T(sign * r.value);
                          if (at) at[i] = r.index;
                        });
  });
}

void logsumexp(const Tensor& x, ReduceShape s, const Tensor& y) {
  visit_float(x.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    A* out = y.data<A>();
    reduce<LogSumExpState<A>>(Source<T>{x.data<T>(), nullptr, A(1)}, s,
                              [&](const LogSumExpState<A>& r, int64_t i) { out[i] = r.value(); });
  });
}

}  // namespace ebb::cpu
