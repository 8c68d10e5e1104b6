// Decays per key channel of one chunk on the CPU, shared by the delta rule with a decay per channel
// (ops/delta_rule_channel_cpu.h) and dplr (ops/dplr_cpu.h). Sub-chunks have 16 rows; I and J name
// them, R_I is the sum of the log decays of the chunk before I, E_I the sum up to its last row.
// Every exponent is a sum of log decays, never a difference of such sums.
#pragma once
#include "ops/recurrence_cpu.h"

namespace ebb::cpu::channel_decay {

using namespace recurrence;

inline constexpr int64_t kSub = 16, kMaxSubs = 8;

template <class T>
struct ChannelDecays {
  ChannelDecays(int64_t chunk, int64_t key_dim) : wc(padded<T>(chunk)), wk(padded<T>(key_dim)) {
    for (T** p : {&alpha, &head, &tail, &off_row, &off_col, &cross, &scaled})
      *p = memory.take(chunk * wk);
    for (T** p : {&before, &after, &across}) *p = memory.take(kMaxSubs * wk);
    for (T** p : {&total, &gap}) *p = memory.take(wk);
    for (T** p : {&x1, &x2}) *p = memory.take(kSub * wk);
    turned = memory.take(wk * wc);
    sums.assign(size_t(kMaxSubs * wk), 0);
  }
  Scratch<T> memory;
  int64_t wc, wk;
  int64_t rows = 0, subs = 0;
  T *alpha, *head, *tail;                 // [C,wk]: e^{g_i}, e^{G_i−R_I}, e^{E_I−G_i}
  T *before, *after;                      // [subs,wk]: e^{R_I}, e^{G_n−E_I}
  T *total, *gap;                         // [wk]: e^{G_n}; e^{R_I−E_J}
  T *off_row, *off_col, *cross, *across;  // parts of dg: [C,wk], across [subs,wk]
  T *x1, *x2;                             // [kSub,wk]
  T *scaled, *turned;                     // [C,wk], [wk,wc]
  std::vector<double> sums;               // [subs,wk]: the log decays of a sub-chunk

  int64_t first(int64_t sub) const { return sub * kSub; }
  int64_t end(int64_t sub) const { return std::min(rows, (sub + 1) * kSub); }
};

// exp of the sum of the log decays of sub-chunks [begin, end).
template <class T>
void exp_of_sums(const ChannelDecays<T>& w, int64_t begin, int64_t end, T* out) {
  for (int64_t d = 0; d < w.wk; ++d) {
    double sum = 0;
    for (int64_t a = begin; a < end; ++a) sum += w.sums[size_t(a * w.wk + d)];
    out[d] = vexp(T(sum));
  }
}

// The log decays of `n` tokens of one head, g[i·stride + d].
template <class T>
void load_decays(const T* g, int64_t stride, int64_t n, int64_t key_dim, ChannelDecays<T>& w) {
  const int64_t wk = w.wk;
  w.rows = n, w.subs = (n + kSub - 1) / kSub;
  pack(g, stride, n, key_dim, w.alpha, wk);
  double* sum = nullptr;
  for (int64_t a = 0; a < w.subs; ++a) {
    sum = w.sums.data() + a * wk;
    std::fill(sum, sum + wk, 0.0);
    for (int64_t i = w.end(a) - 1; i >= w.first(a); --i)
      for (int64_t d = 0; d < wk; ++d) {
        w.tail[i * wk + d] = vexp(T(sum[d]));
        sum[d] += double(w.alpha[i * wk + d]);
      }
    std::fill(sum, sum + wk, 0.0);
    for (int64_t i = w.first(a); i < w.end(a); ++i)
      for (int64_t d = 0; d < wk; ++d) {
        sum[d] += double(w.alpha[i * wk + d]);
        w.head[i * wk + d] = vexp(T(sum[d]));
      }
  }
  for (int64_t i = 0; i < n * wk; ++i) w.alpha[i] = vexp(w.alpha[i]);
  for (int64_t a = 0; a < w.subs; ++a) {
    exp_of_sums(w, 0, a, w.before + a * wk);
    exp_of_sums(w, a + 1, w.subs, w.after + a * wk);
  }
  exp_of_sums(w, 0, w.subs, w.total);
}

// out_i = x_i∘e^{G_i}, the operand that meets the entering state.
template <class T>
void from_start(const ChannelDecays<T>& w, const T* x, T factor, T* out) {
  for (int64_t a = 0; a < w.subs; ++a)
    for (int64_t i = w.first(a); i < w.end(a); ++i)
      for (int64_t d = 0; d < w.wk; ++d) {
        const int64_t at = i * w.wk + d;
        out[at] = factor * x[at] * (w.head[at] * w.before[a * w.wk + d]);
      }
}
// out_i = x_i∘e^{G_n−G_i}, the operand that meets the state after the chunk.
template <class T>
void to_end(const ChannelDecays<T>& w, const T* x, T* out) {
  for (int64_t a = 0; a < w.subs; ++a)
    for (int64_t i = w.first(a); i < w.end(a); ++i)
      for (int64_t d = 0; d < w.wk; ++d) {
        const int64_t at = i * w.wk + d;
        out[at] = x[at] * (w.tail[at] * w.after[a * w.wk + d]);
      }
}

// out[i,j] = factor·Σ_d x_i k_j e^{G_i−G_j} for j <= i (j < i if `strict`), else 0.
template <class T>
void scores(const T* x, const T* k, T factor, bool strict, ChannelDecays<T>& w, T* out) {
  const int64_t wk = w.wk, wc = w.wc;
  T *keys = w.scaled, *transposed = w.turned;
  for (int64_t i = 0; i < w.rows * wk; ++i) keys[i] = k[i] * w.tail[i];
  transpose(keys, wk, w.rows, wk, transposed, wc);
  for (int64_t a = 0; a < w.subs; ++a) {
    const int64_t first = w.first(a), end = w.end(a);
    for (int64_t i = first; i < end; ++i) std::fill(out + i * wc + first, out + (i + 1) * wc, T(0));
    for (int64_t j = first; j < end; ++j) {  // inside the sub-chunk
      T* run = w.gap;                        // k_j e^{G_i−G_j}
      std::copy(k + j * wk, k + (j + 1) * wk, run);
      for (int64_t i = strict ? j + 1 : j; i < end; ++i) {
        if (i > j)
          for (int64_t d = 0; d < wk; ++d) run[d] *= w.alpha[i * wk + d];
        out[i * wc + j] = factor * dot(x + i * wk, run, wk);
      }
    }
    for (int64_t b = 0; b < a; ++b) {  // against earlier ones
      exp_of_sums(w, b + 1, a, w.gap);
      for (int64_t i = first; i < end; ++i)
        for (int64_t d = 0; d < wk; ++d)
          w.x1[(i - first) * wk + d] = factor * x[i * wk + d] * (w.head[i * wk + d] * w.gap[d]);
      gemm<Write::set>(end - first, kSub, wk, simd::rows(w.x1, wk), transposed + b * kSub, wc,
                       out + first * wc + b * kSub, wc);
    }
  }
}

// dg from its parts. reads_t and kept_t [rows,wk]: the terms with e^{G_t} and with e^{G_n−G_t};
// carry: with e^{G_n}.
template <class T>
void decay_gradient(const T* reads, const T* kept, const T* carry, ChannelDecays<T>& w, T* out) {
  const int64_t wk = w.wk;
  T *whole = w.x1, *part = w.x2;  // sums over the chunk and over the sub-chunk
  std::copy(carry, carry + wk, whole);
  for (int64_t a = w.subs - 1; a >= 0; --a) {
    std::copy(w.across + a * wk, w.across + (a + 1) * wk, part);
    for (int64_t t = w.end(a) - 1; t >= w.first(a); --t)
      for (int64_t d = 0; d < wk; ++d) {
        const int64_t at = t * wk + d;
        whole[d] += reads[at];
        part[d] += w.off_row[at];
        out[at] = whole[d] + part[d] + w.cross[at];
      }
  }
  std::fill(whole, whole + wk, T(0));
  for (int64_t a = 0; a < w.subs; ++a) {
    std::fill(part, part + wk, T(0));
    for (int64_t t = w.first(a); t < w.end(a); ++t)
      for (int64_t d = 0; d < wk; ++d) {
        const int64_t at = t * wk + d;
        out[at] += whole[d] + part[d];
        whole[d] += kept[at];
        part[d] += w.off_col[at];
      }
  }
}

}  // namespace ebb::cpu::channel_decay
