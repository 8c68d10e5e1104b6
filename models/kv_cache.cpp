#include "models/kv_cache.h"

#include <algorithm>

#include "models/heads.h"

namespace ebb {
namespace {

constexpr int64_t kRows = 64;  // a cache without a window grows by at least as many

std::vector<int64_t> positions_of(const MixerState* state, int64_t n) {
  return state ? state->tensors.at(2).to_vector<int64_t>() : std::vector<int64_t>(size_t(n), 0);
}

// Rows of positions [begin, end) between a cache [C,Hkv,P] and dense rows: at most two runs.
template <class Run>  // run(row of the cache, row of the dense ones, how many)
void for_runs(int64_t begin, int64_t end, int64_t capacity, Run&& run) {
  for (int64_t p = begin; p < end;) {
    const int64_t row = p % capacity, count = std::min(end - p, capacity - row);
    run(row, p - begin, count);
    p += count;
  }
}

}  // namespace

int64_t KvCache::rows_for(int64_t tokens) const {
  if (window_ > 0) return window_;
  return (tokens + kRows) / kRows * kRows;  // more than `tokens`: the next one has a place
}

MixerState KvCache::zero_state(int64_t n, DType activations, Device device) const {
  const Shape shape{n, rows_for(0), heads_, width_};
  return {{Tensor::zeros(shape, activations, device), Tensor::zeros(shape, activations, device),
           Tensor::zeros({n}, DType::i64)}};
}

KvCache::Extended KvCache::extend(const MixerState* state, const Tensor& keys, const Tensor& values,
                                  const SeqLayout& layout) const {
  const int64_t batch = keys.size(0), time = keys.size(1), n = layout.count(batch);
  const std::vector<int64_t> past = positions_of(state, n), added = lengths_of(layout, batch, time);
  std::vector<int64_t> all{0}, queries{0}, kept;
  for (size_t i = 0; i < size_t(n); ++i) {
    kept.push_back(window_ > 0 ? std::min(past[i], window_ - 1) : past[i]);
    all.push_back(all.back() + kept[i] + added[i]);
    queries.push_back(queries.back() + added[i]);
  }
  const Device device = keys.device();
  const Shape shape{1, all.back(), heads_, width_};
  Extended e{Tensor::empty(shape, keys.dtype(), device), Tensor::empty(shape, keys.dtype(), device),
             SeqLayout::packed(all, device), SeqLayout::packed(queries, device)};
  const Shape flat{batch * time, heads_, width_};
  for (const auto& [to_all, from, index] :
       {std::tuple{e.keys, keys.contiguous().view(flat), size_t(0)},
        std::tuple{e.values, values.contiguous().view(flat), size_t(1)}}) {
    const Tensor to = to_all.select(0, 0);
    for (int64_t i = 0; i < n; ++i) {
      const size_t s = size_t(i);
      if (kept[s] > 0) {
        const Tensor cache = state->tensors.at(index).select(0, i);
        for_runs(
            past[s] - kept[s], past[s], cache.size(0), [&](int64_t row, int64_t at, int64_t count) {
              to.slice(0, all[s] + at, all[s] + at + count).copy_(cache.slice(0, row, row + count));
            });
      }
      if (added[s] > 0)
        to.slice(0, all[s] + kept[s], all[s + 1]).copy_(from.slice(0, queries[s], queries[s + 1]));
    }
  }
  return e;
}

MixerState KvCache::after(const MixerState* state, const Tensor& keys, const Tensor& values,
                          const SeqLayout& layout) const {
  const int64_t batch = keys.size(0), time = keys.size(1), n = layout.count(batch);
  const std::vector<int64_t> past = positions_of(state, n), added = lengths_of(layout, batch, time);
  int64_t longest = 0;
  for (size_t i = 0; i < size_t(n); ++i) longest = std::max(longest, past[i] + added[i]);
  const int64_t capacity = rows_for(longest);
  MixerState out;
  const Shape flat{batch * time, heads_, width_};
  for (const size_t index : {size_t(0), size_t(1)}) {
    const Tensor from = (index ? values : keys).contiguous().view(flat);
    const Tensor cache = Tensor::zeros({n, capacity, heads_, width_}, keys.dtype(), keys.device());
    for (int64_t i = 0; i < n; ++i) {
      const size_t s = size_t(i);
      const Tensor to = cache.select(0, i);
      const int64_t end = past[s] + added[s], begin = std::max<int64_t>(0, end - capacity);
      if (state && begin < past[s]) {
        const Tensor old = state->tensors.at(index).select(0, i);
        // Rows keep their place in a ring; a cache without a window has never gone round.
        for_runs(begin, past[s], old.size(0), [&](int64_t row, int64_t, int64_t count) {
          to.slice(0, row, row + count).copy_(old.slice(0, row, row + count));
        });
      }
      const int64_t first = std::max(begin, past[s]);
      for_runs(first, end, capacity, [&](int64_t row, int64_t at, int64_t count) {
        const int64_t token = layout.begin(i, time) + first - past[s] + at;
        to.slice(0, row, row + count).copy_(from.slice(0, token, token + count));
      });
    }
    out.tensors.push_back(cache);
  }
  out.tensors.push_back(positions_after(state ? state->tensors.at(2) : Tensor(), added));
  return out;
}

void KvCache::reserve_next(MixerState* state) const {
  const std::vector<int64_t> past = state->tensors.at(2).to_vector<int64_t>();
  int64_t longest = 0;
  for (const int64_t p : past) longest = std::max(longest, p);
  const int64_t rows = state->tensors[0].size(1);
  if (window_ > 0 || longest < rows) return;
  for (const size_t index : {size_t(0), size_t(1)}) {
    const Tensor old = state->tensors[index];
    const Tensor wider =
        Tensor::zeros({old.size(0), rows_for(2 * rows), heads_, width_}, old.dtype(), old.device());
    wider.slice(1, 0, rows).copy_(old);
    state->tensors[index] = wider;
  }
}

}  // namespace ebb
