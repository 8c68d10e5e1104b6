// Shared by the passes of the delta rule with a decay per channel on the CPU
// (ops/delta_rule_channel_cpu.cpp, _bwd.cpp): raw pointers, and one chunk's keys, decays and scores
// in a thread's own memory. Sub-chunks have 16 rows; I and J name them, R_I is the sum of the log
// decays of the chunk before I, E_I the sum up to its last row.
#pragma once
#include "ops/delta_rule_channel.h"
#include "ops/delta_rule_cpu.h"

namespace ebb::cpu::delta_channel {

using namespace delta;

inline constexpr int64_t kSub = 16, kMaxSubs = 8;

template <class T>
struct ChannelArrays {
  ChannelArrays(const Plan& plan, const DeltaRuleProblem& p, const DeltaRuleSaved& saved)
      : plan(plan),
        scale(T(p.scale)),
        q(p.q.data<T>()),
        k(p.k.data<T>()),
        v(p.v.data<T>()),
        g(p.g.data<T>()),
        beta(p.beta ? p.beta.data<T>() : nullptr),
        erase(p.erase ? p.erase.data<T>() : nullptr),
        write(p.write ? p.write.data<T>() : nullptr),
        a(saved.a.data<T>()),
        states(saved.states.data<T>()),
        values(saved.values.data<T>()) {}
  const Plan& plan;
  T scale;
  const T *q, *k, *v, *g;
  const T *beta, *erase, *write;  // [tokens,HV]; [tokens,HV,K] and [tokens,HV,V]
  T *a, *states, *values;

  int64_t key(int64_t t, int64_t head) const { return (t * plan.h + head / plan.group) * plan.k; }
  int64_t gate(int64_t t, int64_t head) const { return (t * plan.hv + head) * plan.k; }
  int64_t value(int64_t t, int64_t head) const { return (t * plan.hv + head) * plan.v; }
  T* a_of(int64_t t, int64_t head) const { return a + (head * plan.tokens + t) * plan.c; }
  T* values_of(int64_t t, int64_t head) const { return values + (head * plan.tokens + t) * plan.v; }
  int64_t state(int64_t chunk, int64_t head) const {
    return (chunk * plan.hv + head) * plan.k * plan.v;
  }
};

// One chunk's matrices as [rows, padded width] copies, and transposed ones.
template <class T>
struct ChannelWorkspace {
  explicit ChannelWorkspace(const Plan& plan)
      : wc(padded<T>(plan.c)), wk(padded<T>(plan.k)), wv(padded<T>(plan.v)) {
    for (T** p :
         {&q, &k, &b, &alpha, &head, &tail, &qh, &bh, &kt, &dq, &p, &r, &off_row, &off_col, &cross})
      *p = memory.take(plan.c * wk);
    for (T** p : {&before, &after, &across}) *p = memory.take(kMaxSubs * wk);
    for (T** p : {&total, &gap}) *p = memory.take(wk);
    for (T** p : {&x1, &x2}) *p = memory.take(kSub * wk);
    for (T** p : {&v, &x, &y}) *p = memory.take(plan.c * wv);
    for (T** p : {&s, &ds}) *p = memory.take(padded<T>(plan.k) * wv);
    for (T** p : {&st, &t}) *p = memory.take(std::max(wv, wk) * std::max(wk, wc));
    for (T** p : {&p1, &p2, &p3, &p4}) *p = memory.take(plan.c * wc);
    sums.assign(size_t(kMaxSubs * wk), 0);
  }
  Scratch<T> memory;
  int64_t wc, wk, wv;
  int64_t rows = 0, subs = 0;
  T *q, *k, *b;            // [C,wk]; b: b∘k
  T *alpha, *head, *tail;  // e^{g_i}, e^{G_i−R_I}, e^{E_I−G_i}
  T *qh, *bh, *kt;         // q∘head, b∘head, k∘tail
  T *before, *after;       // [subs,wk]: e^{R_I}, e^{G_n−E_I}
  T *total, *gap;          // e^{G_n}; e^{R_I−E_J}
  T *dq, *p, *r;           // gradients of q, of b∘k, of k as a key that was written
  T *off_row, *off_col, *cross, *across;  // parts of dg
  T *x1, *x2;
  T *v, *x, *y, *s, *ds, *st, *t, *p1, *p2, *p3, *p4;
  std::vector<double> sums;  // [subs,wk]: the log decays of a sub-chunk

  int64_t first(int64_t sub) const { return sub * kSub; }
  int64_t end(int64_t sub) const { return std::min(rows, (sub + 1) * kSub); }
};

// exp of the sum of the log decays of sub-chunks [begin, end).
template <class T>
void exp_of_sums(const ChannelWorkspace<T>& w, int64_t begin, int64_t end, T* out) {
  for (int64_t d = 0; d < w.wk; ++d) {
    double sum = 0;
    for (int64_t a = begin; a < end; ++a) sum += w.sums[size_t(a * w.wk + d)];
    out[d] = vexp(T(sum));
  }
}

// Keys, erase keys and everything about the decays of a chunk.
template <class T>
void load_chunk(const ChannelArrays<T>& in, const Chunk& c, int64_t head, ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t wk = w.wk;
  w.rows = c.rows, w.subs = (c.rows + kSub - 1) / kSub;
  pack(in.k + in.key(c.first, head), plan.h * plan.k, c.rows, plan.k, w.k, wk);
  if (in.erase) pack(in.erase + in.gate(c.first, head), plan.hv * plan.k, c.rows, plan.k, w.b, wk);
  for (int64_t i = 0; i < c.rows; ++i) {
    T* b = w.b + i * wk;
    const T* k = w.k + i * wk;
    const T beta = in.beta ? in.beta[(c.first + i) * plan.hv + head] : T(0);
    for (int64_t d = 0; d < wk; ++d) b[d] = in.erase ? b[d] * k[d] : beta * k[d];
  }
  pack(in.g + in.gate(c.first, head), plan.hv * plan.k, c.rows, plan.k, w.alpha, wk);
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
  for (int64_t i = 0; i < c.rows * wk; ++i) w.alpha[i] = vexp(w.alpha[i]);
  for (int64_t a = 0; a < w.subs; ++a) {
    exp_of_sums(w, 0, a, w.before + a * wk);
    exp_of_sums(w, a + 1, w.subs, w.after + a * wk);
  }
  exp_of_sums(w, 0, w.subs, w.total);
}

template <class T>
void load_queries(const ChannelArrays<T>& in, const Chunk& c, int64_t head,
                  ChannelWorkspace<T>& w) {
  pack(in.q + in.key(c.first, head), in.plan.h * in.plan.k, c.rows, in.plan.k, w.q, w.wk);
}

// out_i = x_i∘e^{G_i}, the operand that meets the entering state.
template <class T>
void from_start(const ChannelWorkspace<T>& w, const T* x, T factor, T* out) {
  for (int64_t a = 0; a < w.subs; ++a)
    for (int64_t i = w.first(a); i < w.end(a); ++i)
      for (int64_t d = 0; d < w.wk; ++d) {
        const int64_t at = i * w.wk + d;
        out[at] = factor * x[at] * (w.head[at] * w.before[a * w.wk + d]);
      }
}
// out_i = x_i∘e^{G_n−G_i}, the operand that meets the state after the chunk.
template <class T>
void to_end(const ChannelWorkspace<T>& w, const T* x, T* out) {
  for (int64_t a = 0; a < w.subs; ++a)
    for (int64_t i = w.first(a); i < w.end(a); ++i)
      for (int64_t d = 0; d < w.wk; ++d) {
        const int64_t at = i * w.wk + d;
        out[at] = x[at] * (w.tail[at] * w.after[a * w.wk + d]);
      }
}

// out[i,j] = factor·Σ_d x_i k_j e^{G_i−G_j} for j <= i (j < i if `strict`), else 0.
template <class T>
void scores(const T* x, T factor, bool strict, ChannelWorkspace<T>& w, T* out) {
  const int64_t wk = w.wk, wc = w.wc;
  T *keys = w.r, *transposed = w.st;
  for (int64_t i = 0; i < w.rows * wk; ++i) keys[i] = w.k[i] * w.tail[i];
  transpose(keys, wk, w.rows, wk, transposed, wc);
  for (int64_t a = 0; a < w.subs; ++a) {
    const int64_t first = w.first(a), end = w.end(a);
    for (int64_t i = first; i < end; ++i) std::fill(out + i * wc + first, out + (i + 1) * wc, T(0));
    for (int64_t j = first; j < end; ++j) {  // inside the sub-chunk
      T* run = w.gap;                        // k_j e^{G_i−G_j}
      std::copy(w.k + j * wk, w.k + (j + 1) * wk, run);
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

}  // namespace ebb::cpu::delta_channel
