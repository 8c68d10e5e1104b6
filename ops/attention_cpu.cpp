// Causal softmax attention on the CPU: tiles of 64 queries by 64 keys, products of cache-sized
// matrices (small_gemm.h), softmax with a running maximum and sum. OpenMP over (sequence, head,
// tile of queries), in the backward pass also over (sequence, key head, tile of keys), each of
// which makes the scores again: every number is computed by one thread in one order.
#include <cmath>
#include <limits>

#include "ops/attention.h"
#include "ops/common.h"
#include "ops/cpu_math.h"
#include "ops/small_gemm.h"

namespace ebb::cpu {
namespace {

using namespace simd;

constexpr int64_t kTile = 64;

struct Sequence {
  int64_t query, queries;  // first flat token, how many
  int64_t key, keys;
};

template <class T>
struct Arrays {
  explicit Arrays(const AttentionProblem& p)
      : heads(p.heads()),
        key_heads(p.key_heads()),
        group(heads / key_heads),
        width(p.head_dim()),
        window(p.window > 0 ? p.window : std::numeric_limits<int64_t>::max() / 4),
        scale(T(p.scale)),
        q(p.q.data<T>()),
        k(p.k.data<T>()),
        v(p.v.data<T>()) {
    for (int64_t n = 0; n < p.sequences(); ++n) {
      const int64_t q0 = p.layout.begin(n, p.time()), k0 = p.key_layout.begin(n, p.key_time());
      sequences.push_back(
          {q0, p.layout.end(n, p.time()) - q0, k0, p.key_layout.end(n, p.key_time()) - k0});
    }
  }
  int64_t heads, key_heads, group, width, window;
  T scale;
  const T *q, *k, *v;
  std::vector<Sequence> sequences;
  // Of the backward pass.
  const T *o = nullptr, *lse = nullptr, *d_o = nullptr;
  T *dq = nullptr, *dk = nullptr, *dv = nullptr;

  int64_t at(int64_t token, int64_t head) const { return (token * heads + head) * width; }
  int64_t key_at(int64_t token, int64_t head) const { return (token * key_heads + head) * width; }
};

// A tile of queries, by their positions among the keys, or of keys.
struct Item {
  const Sequence* s;
  int64_t head, first, rows;  // query `first` of the sequence; position first + keys − queries
};

// All tiles of `count(sequence)` rows; the longest rows of a causal matrix come last in memory and
// are started first.
template <class Count>
std::vector<Item> items(const std::vector<Sequence>& sequences, int64_t heads, Count&& count) {
  std::vector<Item> all;
  for (const Sequence& s : sequences)
    for (int64_t first = 0; first < count(s); first += kTile)
      for (int64_t h = 0; h < heads; ++h)
        all.push_back({&s, h, first, std::min(kTile, count(s) - first)});
  return all;
}

template <class T>
struct Workspace {
  explicit Workspace(int64_t width) : wp(padded<T>(width)) {
    for (T** p : {&q, &k, &v, &d_o, &sum, &sum2}) *p = memory.take(kTile * wp);
    for (T** p : {&kt, &vt}) *p = memory.take(wp * kTile);
    for (T** p : {&s, &ds}) *p = memory.take(kTile * kTile);
  }
  Scratch<T> memory;
  int64_t wp;
  T *q, *k, *v, *d_o, *sum, *sum2;  // [64,wp]
  T *kt, *vt;                       // [wp,64]
  T *s, *ds;                        // [64,64]
  T top[kTile], total[kTile], delta[kTile];
};

// Over the 64 columns of a row of scores.
template <class T>
T maximum(const T* row) {
  Vec<T> m = load(row);
  for (int64_t j = kLanes<T>; j < kTile; j += kLanes<T>) {
    const Vec<T> x = load(row + j);
    m = m > x ? m : x;
  }
  T top = m[0];
  for (int l = 1; l < kLanes<T>; ++l) top = std::max(top, T(m[l]));
  return top;
}
template <class T>
T sum_of(const T* row) {
  Vec<T> sum{};
  for (int64_t j = 0; j < kTile; j += kLanes<T>) sum += load(row + j);
  T s = 0;
  for (int l = 0; l < kLanes<T>; ++l) s += sum[l];
  return s;
}

// w.k, w.v and w.kt: keys [first, first + rows) of the sequence.
template <class T>
void load_keys(const Arrays<T>& in, const Sequence& s, int64_t head, int64_t first, int64_t rows,
               Workspace<T>& w) {
  const int64_t at = in.key_at(s.key + first, head), stride = in.key_heads * in.width;
  pack(in.k + at, stride, rows, in.width, w.k, w.wp);
  pack(in.v + at, stride, rows, in.width, w.v, w.wp);
  transpose(w.k, w.wp, rows, w.wp, w.kt, kTile);
}

template <class T>
void load_queries(const Arrays<T>& in, const T* x, const Sequence& s, int64_t head, int64_t first,
                  int64_t rows, T* to, int64_t wp) {
  pack(x + in.at(s.query + first, head), in.heads * in.width, rows, in.width, to, wp);
}

// w.s [rows,64] = scale q kᵀ, −inf where query position + i does not see key first + j.
template <class T>
void scores(const Arrays<T>& in, int64_t rows, int64_t position, int64_t first, int64_t keys,
            Workspace<T>& w) {
  gemm<Write::set>(rows, kTile, in.width, simd::rows(w.q, w.wp), w.kt, kTile, w.s, kTile);
  for (int64_t i = 0; i < rows; ++i) {
    T* row = w.s + i * kTile;
    const int64_t last = std::min(keys, position + i - first + 1);
    const int64_t begin =
        std::min(kTile, std::max<int64_t>(0, position + i - in.window + 1 - first));
    for (int64_t j = begin; j < last; ++j) row[j] *= in.scale;
    std::fill(row, row + std::min(begin, kTile), -std::numeric_limits<T>::infinity());
    std::fill(row + std::max<int64_t>(0, std::min(last, kTile)), row + kTile,
              -std::numeric_limits<T>::infinity());
  }
}

// The keys, in whole tiles, that some of the queries at position ... position + rows − 1 see.
struct Range {
  int64_t begin, end;
};
Range keys_of(int64_t position, int64_t rows, int64_t window) {
  const int64_t first = std::max<int64_t>(0, position - window + 1);
  return {first / kTile * kTile, position + rows};
}

template <class T>
void forward_tile(const Arrays<T>& in, const Item& x, T* o, T* lse, Workspace<T>& w) {
  const Sequence& s = *x.s;
  const int64_t position = x.first + s.keys - s.queries, wp = w.wp;
  load_queries(in, in.q, s, x.head, x.first, x.rows, w.q, wp);
  std::fill(w.sum, w.sum + x.rows * wp, T(0));
  std::fill(w.top, w.top + x.rows, -std::numeric_limits<T>::infinity());
  std::fill(w.total, w.total + x.rows, T(0));
  const Range range = keys_of(position, x.rows, in.window);
  for (int64_t j = range.begin; j < range.end; j += kTile) {
    const int64_t keys = std::min(kTile, range.end - j);
    load_keys(in, s, x.head / in.group, j, keys, w);
    scores(in, x.rows, position, j, keys, w);
    for (int64_t i = 0; i < x.rows; ++i) {
      T* row = w.s + i * kTile;
      const T top = std::max(w.top[i], maximum(row));
      // Nothing seen yet: every term of this tile is 0.
      const T shift = top == -std::numeric_limits<T>::infinity() ? T(0) : top;
      const T keep = vexp(w.top[i] - shift);
      for (int64_t c = 0; c < kTile; ++c) row[c] = vexp(row[c] - shift);
      const T total = sum_of(row);  // NaN if any of them is
      w.total[i] = w.total[i] * keep + total;
      w.top[i] = top;
      for (int64_t c = 0; c < wp; ++c) w.sum[i * wp + c] *= keep;
    }
    gemm<Write::add>(x.rows, wp, keys, rows(w.s, kTile), w.v, wp, w.sum, wp);
  }
  for (int64_t i = 0; i < x.rows; ++i) {
    const T f = 1 / w.total[i];
    T* to = o + in.at(s.query + x.first + i, x.head);
    for (int64_t c = 0; c < in.width; ++c) to[c] = w.sum[i * wp + c] * f;
    lse[(s.query + x.first + i) * in.heads + x.head] = w.top[i] + std::log(w.total[i]);
  }
}

// w.q, w.d_o, w.delta = dO·o of a tile of queries; w.total = lse.
template <class T>
void load_upstream(const Arrays<T>& in, const Sequence& s, int64_t head, int64_t first,
                   int64_t rows, Workspace<T>& w) {
  load_queries(in, in.q, s, head, first, rows, w.q, w.wp);
  load_queries(in, in.d_o, s, head, first, rows, w.d_o, w.wp);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t at = in.at(s.query + first + i, head);
    T sum = 0;
    for (int64_t c = 0; c < in.width; ++c) sum += in.d_o[at + c] * in.o[at + c];
    w.delta[i] = sum;
    w.total[i] = in.lse[(s.query + first + i) * in.heads + head];
  }
}

// w.s = a and w.ds = scale a∘(dO vᵀ − D); w.k, w.v loaded.
template <class T>
void score_gradients(const Arrays<T>& in, int64_t rows, int64_t position, int64_t first,
                     int64_t keys, Workspace<T>& w) {
  scores(in, rows, position, first, keys, w);
  transpose(w.v, w.wp, keys, w.wp, w.vt, kTile);
  gemm<Write::set>(rows, kTile, in.width, simd::rows(w.d_o, w.wp), w.vt, kTile, w.ds, kTile);
  for (int64_t i = 0; i < rows; ++i) {
    T *a = w.s + i * kTile, *d = w.ds + i * kTile;
    // The softmax of one score is 1 whatever it is: no gradient, and not a rounded difference.
    const bool one = position + i == 0 || in.window == 1;
    for (int64_t j = 0; j < kTile; ++j) {
      const bool seen = !one && a[j] != -std::numeric_limits<T>::infinity();
      a[j] = vexp(a[j] - w.total[i]);
      d[j] = seen ? in.scale * a[j] * (d[j] - w.delta[i]) : T(0);
    }
  }
}

template <class T>
void query_gradients(const Arrays<T>& in, const Item& x, Workspace<T>& w) {
  const Sequence& s = *x.s;
  const int64_t position = x.first + s.keys - s.queries;
  load_upstream(in, s, x.head, x.first, x.rows, w);
  std::fill(w.sum, w.sum + x.rows * w.wp, T(0));
  const Range range = keys_of(position, x.rows, in.window);
  for (int64_t j = range.begin; j < range.end; j += kTile) {
    const int64_t keys = std::min(kTile, range.end - j);
    load_keys(in, s, x.head / in.group, j, keys, w);
    score_gradients(in, x.rows, position, j, keys, w);
    gemm<Write::add>(x.rows, w.wp, keys, rows(w.ds, kTile), w.k, w.wp, w.sum, w.wp);
  }
  unpack(w.sum, w.wp, x.rows, in.width, in.dq + in.at(s.query + x.first, x.head),
         in.heads * in.width);
}

template <class T>
void key_gradients(const Arrays<T>& in, const Item& x, Workspace<T>& w) {
  const Sequence& s = *x.s;
  const int64_t before = s.keys - s.queries;
  load_keys(in, s, x.head, x.first, x.rows, w);
  std::fill(w.sum, w.sum + x.rows * w.wp, T(0));
  std::fill(w.sum2, w.sum2 + x.rows * w.wp, T(0));
  // Queries at positions first ... first + rows − 1 + window − 1.
  const int64_t begin = std::max<int64_t>(0, x.first - before) / kTile * kTile;
  const int64_t end = std::min(s.queries, x.first + x.rows - before + in.window - 1);
  for (int64_t h = x.head * in.group; h < (x.head + 1) * in.group; ++h)
    for (int64_t i = begin; i < end; i += kTile) {
      const int64_t queries = std::min(kTile, s.queries - i);
      load_upstream(in, s, h, i, queries, w);
      score_gradients(in, queries, i + before, x.first, x.rows, w);
      gemm<Write::add>(x.rows, w.wp, queries, columns(w.ds, kTile), w.q, w.wp, w.sum, w.wp);
      gemm<Write::add>(x.rows, w.wp, queries, columns(w.s, kTile), w.d_o, w.wp, w.sum2, w.wp);
    }
  const int64_t at = in.key_at(s.key + x.first, x.head), stride = in.key_heads * in.width;
  if (in.dk) unpack(w.sum, w.wp, x.rows, in.width, in.dk + at, stride);
  if (in.dv) unpack(w.sum2, w.wp, x.rows, in.width, in.dv + at, stride);
}

template <class T, class Each>
void for_items(const std::vector<Item>& all, int64_t width, Each&& each) {
  const int64_t n = int64_t(all.size());
#pragma omp parallel if (n > 1)
  {
    Workspace<T> w(width);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < n; ++i) each(all[size_t(i)], w);
  }
}

template <class T>
void backward(const AttentionProblem& p, const Tensor& o, const Tensor& lse, const Tensor& d_o,
              const AttentionGradients& grads) {
  Arrays<T> in(p);
  const auto pointer = [](const Tensor& t) { return t ? t.data<T>() : nullptr; };
  in.o = o.data<T>(), in.lse = lse.data<T>(), in.d_o = d_o.data<T>();
  in.dq = pointer(grads.dq), in.dk = pointer(grads.dk), in.dv = pointer(grads.dv);
  if (in.dq)
    for_items<T>(items(in.sequences, in.heads, [](const Sequence& s) { return s.queries; }),
                 in.width, [&](const Item& x, Workspace<T>& w) { query_gradients(in, x, w); });
  if (in.dk || in.dv)
    for_items<T>(items(in.sequences, in.key_heads, [](const Sequence& s) { return s.keys; }),
                 in.width, [&](const Item& x, Workspace<T>& w) { key_gradients(in, x, w); });
}

template <class T>
void step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
          const Tensor& v_cache, const Tensor& position, T scale, int64_t window, const Tensor& o) {
  const int64_t n = q.size(0), heads = q.size(1), width = q.size(2);
  const int64_t capacity = k_cache.size(1), key_heads = k.size(1), row = key_heads * width;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = (i * capacity + position.data<int64_t>()[i] % capacity) * row;
    std::copy_n(k.data<T>() + i * row, row, k_cache.data<T>() + at);
    std::copy_n(v.data<T>() + i * row, row, v_cache.data<T>() + at);
  }
#pragma omp parallel for schedule(dynamic) if (n * heads > 1)
  for (int64_t i = 0; i < n * heads; ++i) {
    const int64_t seq = i / heads, head = i % heads / (heads / key_heads);
    const int64_t last = position.data<int64_t>()[seq];
    const int64_t count = std::min({last + 1, capacity, window > 0 ? window : capacity});
    const T *p_q = q.data<T>() + i * width, *keys = k_cache.data<T>() + seq * capacity * row,
            *values = v_cache.data<T>() + seq * capacity * row;
    std::vector<T> a(static_cast<size_t>(count));
    T top = -std::numeric_limits<T>::infinity(), total = 0, sum[256] = {};
    const auto place = [&](int64_t j) {
      return (last - count + 1 + j) % capacity * row + head * width;
    };
    for (int64_t j = 0; j < count; ++j) {
      T dot = 0;
      for (int64_t c = 0; c < width; ++c) dot += p_q[c] * keys[place(j) + c];
      a[size_t(j)] = scale * dot;
      top = std::max(top, a[size_t(j)]);
    }
    for (int64_t j = 0; j < count; ++j) {
      const T f = vexp(a[size_t(j)] - top);
      total += f;
      for (int64_t c = 0; c < width; ++c) sum[c] += f * values[place(j) + c];
    }
    for (int64_t c = 0; c < width; ++c) o.data<T>()[i * width + c] = sum[c] / total;
  }
}

}  // namespace

void attention_fwd(const AttentionProblem& p, const Tensor& o, const Tensor& lse) {
  const auto run = [&]<class T>() {
    const Arrays<T> in(p);
    for_items<T>(items(in.sequences, in.heads, [](const Sequence& s) { return s.queries; }),
                 in.width, [&](const Item& x, Workspace<T>& w) {
                   forward_tile(in, x, o.data<T>(), lse.data<T>(), w);
                 });
  };
  p.q.dtype() == DType::f64 ? run.operator()<double>() : run.operator()<float>();
}

void attention_bwd(const AttentionProblem& p, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                   const AttentionGradients& grads) {
  if (p.q.dtype() == DType::f64)
    backward<double>(p, o, lse, d_o, grads);
  else
    backward<float>(p, o, lse, d_o, grads);
}

void attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                    const Tensor& v_cache, const Tensor& position, double scale, int64_t window,
                    const Tensor& o) {
  if (q.dtype() == DType::f64)
    step<double>(q, k, v, k_cache, v_cache, position, scale, window, o);
  else
    step<float>(q, k, v, k_cache, v_cache, position, float(scale), window, o);
}

}  // namespace ebb::cpu
