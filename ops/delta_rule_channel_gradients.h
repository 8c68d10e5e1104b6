// Gradients inside one chunk of a recurrence with a decay per channel on the CPU, from those of its
// scores: shared by the delta rule (ops/delta_rule_channel_cpu_bwd.cpp) and, with kErase = false,
// by gated linear attention, which has neither b∘k nor M (ops/linear_attention_channel_cpu.cpp).
#pragma once
#include "ops/delta_rule_channel_cpu.h"

namespace ebb::cpu::delta_channel {

// Adds to w.dq, w.p and w.r what sub-chunk I reads of J < I, and to the parts of dg whose exponents
// span that pair: from a row of I on, up to a column of J, and of the sub-chunks between whole.
// w.p3 = dP, w.p4 = dM; w.qh = q∘head, w.bh = b∘head, w.kt = k∘tail.
template <bool kErase, class T>
void pair_gradients(int64_t I, int64_t J, ChannelWorkspace<T>& w) {
  const int64_t wk = w.wk, first = w.first(I), n = w.end(I) - first, column = w.first(J);
  const int64_t columns_before = w.end(J) - column;  // a full sub-chunk
  const int64_t block = first * w.wc + column;
  exp_of_sums(w, J + 1, I, w.gap);
  gemm<Write::set>(n, wk, columns_before, rows(w.p3 + block, w.wc), w.kt + column * wk, wk, w.x1,
                   wk);
  if (kErase)
    gemm<Write::set>(n, wk, columns_before, rows(w.p4 + block, w.wc), w.kt + column * wk, wk, w.x2,
                     wk);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t d = 0; d < wk; ++d) {
      const int64_t at = (first + i) * wk + d;
      const T q = w.head[at] * w.gap[d] * w.x1[i * wk + d];
      T z = w.q[at] * q;
      w.dq[at] += q;
      if (kErase) {
        const T p = w.head[at] * w.gap[d] * w.x2[i * wk + d];
        z += w.b[at] * p;
        w.p[at] += p;
      }
      w.off_row[at] += z;
      for (int64_t a = J + 1; a < I; ++a) w.across[a * wk + d] += z;
    }
  gemm<Write::set>(columns_before, wk, n, columns(w.p3 + block, w.wc), w.qh + first * wk, wk, w.x1,
                   wk);
  if (kErase)
    gemm<Write::add>(columns_before, wk, n, columns(w.p4 + block, w.wc), w.bh + first * wk, wk,
                     w.x1, wk);
  for (int64_t j = 0; j < columns_before; ++j)
    for (int64_t d = 0; d < wk; ++d) {
      const int64_t at = (column + j) * wk + d;
      const T r = w.tail[at] * w.gap[d] * w.x1[j * wk + d];
      w.r[at] += r;
      w.off_col[at] += w.k[at] * r;
    }
}

// The same inside sub-chunk I, channel by channel; w.cross_t = Σ_{i>=t>j} Z_ij with
// Z_ij = (dP_ij q_i + dM_ij b_i k_i)∘k_j∘E_ij.
template <bool kErase, class T>
void diagonal_gradients(int64_t I, ChannelWorkspace<T>& w) {
  const int64_t wk = w.wk, first = w.first(I), n = w.end(I) - first;
  for (int64_t d = 0; d < wk; d += kLanes<T>) {
    const auto at = [&](int64_t i) { return (first + i) * wk + d; };
    for (int64_t i = 0; i < n; ++i) store(w.cross + at(i), Vec<T>{});
    for (int64_t j = 0; j < n; ++j) {
      const Vec<T> k = load(w.k + at(j));
      const T* p = w.p3 + (first + j) * w.wc + first + j;
      Vec<T> decay = Vec<T>{} + T(1), z[kSub];
      store(w.dq + at(j), load(w.dq + at(j)) + *p * k);
      Vec<T> r = load(w.r + at(j)) + *p * load(w.q + at(j));
      for (int64_t i = j + 1; i < n; ++i) {
        decay *= load(w.alpha + at(i));
        const int64_t score = (first + i) * w.wc + first + j;
        const T dp = w.p3[score];
        const Vec<T> key = k * decay;
        store(w.dq + at(i), load(w.dq + at(i)) + dp * key);
        Vec<T> y = dp * load(w.q + at(i));
        if (kErase) {
          const T dm = w.p4[score];
          store(w.p + at(i), load(w.p + at(i)) + dm * key);
          y += dm * load(w.b + at(i));
        }
        r += y * decay;
        z[i] = y * key;
      }
      store(w.r + at(j), r);
      Vec<T> sum{};
      for (int64_t t = n - 1; t > j; --t) {
        sum += z[t];
        store(w.cross + at(t), load(w.cross + at(t)) + sum);
      }
    }
  }
}

}  // namespace ebb::cpu::delta_channel
