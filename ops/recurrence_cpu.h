// Shared by the chunked recurrences on the CPU (the delta family, gated linear attention): where
// the chunks lie, the scalar decays of a chunk, gradients of those, small row helpers.
#pragma once
#include <algorithm>
#include <vector>

#include "ops/common.h"
#include "ops/cpu_math.h"
#include "ops/small_gemm.h"

namespace ebb::cpu::recurrence {

using namespace simd;

inline constexpr int64_t kMaxChunk = 128;

struct Chunk {
  int64_t first, rows;  // flat tokens [first, first + rows)
};

// The log decays of one chunk of one head: G_i their sum up to token i, n tokens. Sums in f64:
// differences of large sums stay exact.
template <class T>
struct Decays {
  double sum[kMaxChunk];                // G_i
  T gamma[kMaxChunk], tail[kMaxChunk];  // γ_i = e^{G_i}, τ_i = e^{G_n−G_i}
  T total = 1;                          // γ_n
  int64_t rows = 0;

  // g[i·stride]: the log decay of token i.
  void read(const T* g, int64_t stride, int64_t n) {
    rows = n;
    double s = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const double x = double(g[i * stride]);
      s += x < -1000 ? -1000 : x;  // e^-1000 is 0 already; −inf would give inf − inf
      sum[i] = s;
    }
    for (int64_t i = 0; i < rows; ++i) {
      gamma[i] = vexp(T(sum[i]));
      tail[i] = vexp(T(s - sum[i]));
    }
    total = vexp(T(s));
  }
  // Row i of Γ, up to `width` columns: e^{G_i−G_j} for j <= i, else 0.
  void decay_row(int64_t i, int64_t width, T* row) const {
    T x[kMaxChunk];
    for (int64_t j = 0; j <= i; ++j) x[j] = T(sum[i] - sum[j]);
    for (int64_t j = 0; j <= i; ++j) row[j] = vexp(x[j]);
    std::fill(row + i + 1, row + width, T(0));
  }
};

// The gradient of g_t: every term whose exponent contains it, instead of a difference of larger
// sums, so that it is accurate even where the decay is near zero. z [C,width]: the terms with
// e^{G_i−G_j}, below the diagonal. reads_i and kept_i: the terms with e^{G_i} and with e^{G_n−G_i};
// carry: with e^{G_n}.
template <class T>
void decay_gradient(const T* z, int64_t width, int64_t n, const T* reads, const T* kept, T carry,
                    T* dg, int64_t stride) {
  double kept_before[kMaxChunk];
  double sum = 0;
  for (int64_t t = 0; t < n; ++t) {
    kept_before[t] = sum;
    sum += double(kept[t]);
  }
  T column[kMaxChunk] = {};  // Σ_{i>=t} z_ij
  double later_reads = 0;
  for (int64_t t = n - 1; t >= 0; --t) {
    double crossing = 0;  // Σ_{i>=t>j} z_ij
    for (int64_t j = 0; j < t; ++j) column[j] += z[t * width + j];
    for (int64_t j = 0; j < t; ++j) crossing += double(column[j]);
    later_reads += double(reads[t]);
    dg[t * stride] = T(crossing + later_reads + kept_before[t] + double(carry));
  }
}

// row i of x *= factor_i
template <class T, class F>
void scale_rows(T* x, int64_t width, int64_t rows, F&& factor) {
  for (int64_t i = 0; i < rows; ++i) {
    const T f = factor(i);
    for (int64_t j = 0; j < width; ++j) x[i * width + j] *= f;
  }
}

template <class T>
T dot(const T* a, const T* b, int64_t width) {
  Vec<T> sum{};
  for (int64_t j = 0; j < width; j += kLanes<T>) sum += load(a + j) * load(b + j);
  T s = 0;
  for (int l = 0; l < kLanes<T>; ++l) s += sum[l];
  return s;
}

// The first positive log decay is an error that says where it stands.
inline void check_decays(const char* op, const Tensor& g, const char* name = "g",
                         const char* want = "log decays <= 0") {
  visit_float(g.dtype(), [&]<class T>() {
    const T* p = g.data<T>();
    const int64_t n = g.numel();
    int64_t first = n;
#pragma omp parallel for reduction(min : first) if (n > 65536)
    for (int64_t i = 0; i < n; ++i)
      if (p[i] > 0) first = std::min(first, i);
    if (first == n) return;
    std::string at;
    int64_t rest = first;
    for (int d = g.dim() - 1; d >= 0; rest /= g.size(d--))
      at = fmt::format("{}{}{}", rest % g.size(d), at.empty() ? "" : ",", at);
    fail("{}: {}[{}] = {} is positive; want {}", op, name, at, double(p[first]), want);
  });
}

}  // namespace ebb::cpu::recurrence
