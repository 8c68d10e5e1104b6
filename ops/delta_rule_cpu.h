// Shared by the passes of the delta family on the CPU (ops/delta_rule_cpu.cpp, _bwd.cpp): where the
// chunks lie, the gates of a chunk, and its matrices as padded copies in a thread's own memory.
#pragma once
#include <omp.h>

#include <algorithm>

#include "ops/delta_rule.h"
#include "ops/recurrence_cpu.h"

namespace ebb::cpu::delta {

using namespace recurrence;

// Sizes, and where each sequence's chunks lie in the list of all chunks.
struct Plan {
  template <class Problem>
  explicit Plan(const Problem& p)
      : tokens(p.batch() * p.time()),
        h(p.heads()),
        hv(p.value_heads()),
        group(hv / h),
        k(p.key_dim()),
        v(p.value_dim()),
        c(p.chunk),
        sequences(p.sequences()) {
    for (int64_t n = 0; n < sequences; ++n) {
      first_chunk.push_back(int64_t(chunks.size()));
      const int64_t end = p.layout.end(n, p.time());
      for (int64_t t = p.layout.begin(n, p.time()); t < end; t += c)
        chunks.push_back({t, std::min(c, end - t)});
    }
    first_chunk.push_back(int64_t(chunks.size()));
  }
  int64_t tokens, h, hv, group, k, v, c, sequences;
  std::vector<Chunk> chunks;
  std::vector<int64_t> first_chunk;  // [N+1]

  int64_t work() const { return int64_t(chunks.size()) * hv; }
  // Columns of V one scan handles: all, or fewer where that keeps more threads busy.
  int64_t scan_columns(int64_t lanes) const {
    const int64_t threads = omp_get_max_threads(), rows = std::max<int64_t>(1, sequences * hv);
    const int64_t tiles = std::clamp<int64_t>((threads + rows - 1) / rows, 1, (v + 31) / 32);
    const int64_t columns = (v + tiles - 1) / tiles;
    return (columns + lanes - 1) / lanes * lanes;
  }
};

template <class T>
struct Arrays {  // of the problem and of what is saved, as raw pointers
  Arrays(const Plan& plan, const DeltaRuleProblem& p, const DeltaRuleSaved& saved)
      : plan(plan),
        scale(T(p.scale)),
        q(p.q.data<T>()),
        k(p.k.data<T>()),
        v(p.v.data<T>()),
        g(p.g.data<T>()),
        beta(p.beta.data<T>()),
        a(saved.a.data<T>()),
        states(saved.states.data<T>()),
        values(saved.values.data<T>()) {}
  const Plan& plan;
  T scale;
  const T *q, *k, *v, *g, *beta;
  T *a, *states, *values;

  // Rows of head `head` at flat token t in [tokens,H,K] and [tokens,HV,V].
  int64_t key(int64_t t, int64_t head) const { return (t * plan.h + head / plan.group) * plan.k; }
  int64_t value(int64_t t, int64_t head) const { return (t * plan.hv + head) * plan.v; }
  T* a_of(int64_t t, int64_t head) const { return a + (head * plan.tokens + t) * plan.c; }
  T* values_of(int64_t t, int64_t head) const { return values + (head * plan.tokens + t) * plan.v; }
  int64_t state(int64_t chunk, int64_t head) const {
    return (chunk * plan.hv + head) * plan.k * plan.v;
  }
};

// The gates of one chunk and head.
template <class T>
struct Gates : Decays<T> {
  T beta[kMaxChunk];

  void read(const Arrays<T>& in, const Chunk& chunk, int64_t head) {
    const int64_t at = chunk.first * in.plan.hv + head;
    Decays<T>::read(in.g + at, in.plan.hv, chunk.rows);
    for (int64_t i = 0; i < chunk.rows; ++i) beta[i] = in.beta[at + i * in.plan.hv];
  }
};

// One chunk's matrices as [rows, padded width] copies, and transposed ones.
template <class T>
struct Workspace {
  explicit Workspace(const Plan& plan)
      : wc(padded<T>(plan.c)), wk(padded<T>(plan.k)), wv(padded<T>(plan.v)) {
    for (T** p : {&q, &k, &dq, &dk}) *p = memory.take(plan.c * wk);
    kt = memory.take(wk * wc);
    for (T** p : {&v, &x, &y}) *p = memory.take(plan.c * wv);
    for (T** p : {&s, &ds}) *p = memory.take(padded<T>(plan.k) * wv);
    for (T** p : {&st, &t}) *p = memory.take(wv * std::max(wk, wc));
    for (T** p : {&p1, &p2, &p3, &p4}) *p = memory.take(plan.c * wc);
  }
  Scratch<T> memory;
  int64_t wc, wk, wv;
  T *q, *k, *dq, *dk;    // [C,wk]
  T* kt;                 // [wk,wc]
  T *v, *x, *y;          // [C,wv]
  T *s, *ds;             // [wk,wv]
  T *st, *t;             // [wv,max(wk,wc)]
  T *p1, *p2, *p3, *p4;  // [C,wc]
  Gates<T> gates;
};

template <class T>
void load_keys(const Arrays<T>& in, const Chunk& c, int64_t head, Workspace<T>& w) {
  const int64_t stride = in.plan.h * in.plan.k;
  pack(in.k + in.key(c.first, head), stride, c.rows, in.plan.k, w.k, w.wk);
  transpose(w.k, w.wk, c.rows, w.wk, w.kt, w.wc);
  w.gates.read(in, c, head);
}

template <class T>
void load_queries(const Arrays<T>& in, const Chunk& c, int64_t head, Workspace<T>& w) {
  pack(in.q + in.key(c.first, head), in.plan.h * in.plan.k, c.rows, in.plan.k, w.q, w.wk);
}

// A pass of the family, each thread with a Work<T> of its own: before(chunk, head, w) for all
// chunks and heads; scan(n, head, v0, cols, w) for the sequences, heads and columns of V;
// after(chunk, head, w) for all chunks and heads.
template <template <class> class Work, class T, class Before, class Scan, class After>
void run_pass(const Plan& plan, Before&& before, Scan&& scan, After&& after) {
  const int64_t columns = plan.scan_columns(kLanes<T>), tiles = (plan.v + columns - 1) / columns;
#pragma omp parallel if (plan.work() > 1)
  {
    Work<T> w(plan);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < plan.work(); ++i) before(i / plan.hv, i % plan.hv, w);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < plan.sequences * plan.hv * tiles; ++i) {
      const int64_t v0 = i % tiles * columns;
      scan(i / (plan.hv * tiles), i / tiles % plan.hv, v0, std::min(columns, plan.v - v0), w);
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < plan.work(); ++i) after(i / plan.hv, i % plan.hv, w);
  }
}

// a = (I + m)⁻¹ for m [n,width] strictly lower, by forward substitution, row i = e_i − Σ_{j<i} m_ij
// row j, eight rows at a time so that most of it is a product.
template <class T>
void unit_lower_inverse(const T* m, int64_t n, int64_t width, T* a) {
  constexpr int64_t kBlock = 8;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t end = std::min(first + kBlock, n);
    for (int64_t i = first; i < end; ++i) {
      std::fill(a + i * width, a + (i + 1) * width, T(0));
      a[i * width + i] = 1;
    }
    gemm<Write::subtract>(end - first, padded<T>(first), first, rows(m + first * width, width), a,
                          width, a + first * width, width);
    for (int64_t i = first; i < end; ++i)
      for (int64_t j = first; j < i; ++j) {
        const T f = m[i * width + j];
        for (int64_t x = 0; x <= j; ++x) a[i * width + x] -= f * a[j * width + x];
      }
  }
}

// out [tokens,H,K] = sum over the value heads of each q/k head, in order.
template <class T>
void sum_groups(const Plan& plan, const T* per_value_head, T* out) {
#pragma omp parallel for if (plan.tokens * plan.hv * plan.k > 65536)
  for (int64_t i = 0; i < plan.tokens * plan.h; ++i)
    for (int64_t j = 0; j < plan.k; ++j) {
      T sum = 0;
      for (int64_t r = 0; r < plan.group; ++r)
        sum += per_value_head[(i * plan.group + r) * plan.k + j];
      out[i * plan.k + j] = sum;
    }
}

// A backward pass: the arrays of the forward one, Base<T>, and what is computed beside them.
template <template <class> class Base, class T>
struct BackwardPass : Base<T> {
  using Base<T>::Base;
  const T *d_o = nullptr, *dht = nullptr;
  T *x = nullptr, *dstates = nullptr;  // X [HV,tokens,V]; D after each chunk
  T *dq = nullptr, *dk = nullptr;      // [tokens,HV,K]: per value head
  T *dv = nullptr, *dg = nullptr, *dbeta = nullptr, *dh0 = nullptr;
  T *derase = nullptr, *dwrite = nullptr;
  T* x_of(int64_t t, int64_t head) const {
    return x + (head * this->plan.tokens + t) * this->plan.v;
  }
};

// Its three parts, as those of run_pass with the pass before them.
template <template <class> class Base, template <class> class Work, class T, class Local,
          class Scan, class Chunks>
void run_backward(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& d_o,
                  const Tensor& dht, const DeltaRuleGradients& grads, Local&& local, Scan&& scan,
                  Chunks&& chunks) {
  const auto pointer = [](const Tensor& t) { return t ? t.data<T>() : nullptr; };
  const Plan plan(p);
  const DType dtype = p.v.dtype();
  const Tensor x = Tensor::empty(saved.values.shape(), dtype);
  const Tensor dstates = Tensor::empty(saved.states.shape(), dtype);
  const auto per_value_head = [&](const Tensor& t) {
    return !t || plan.group == 1 ? t : Tensor::empty({plan.tokens, plan.hv, plan.k}, dtype);
  };
  const Tensor dq = per_value_head(grads.dq), dk = per_value_head(grads.dk);
  BackwardPass<Base, T> in(plan, p, saved);
  in.d_o = pointer(d_o), in.dht = pointer(dht);
  in.x = pointer(x), in.dstates = pointer(dstates);
  in.dq = pointer(dq), in.dk = pointer(dk), in.dv = pointer(grads.dv);
  in.dg = pointer(grads.dg), in.dbeta = pointer(grads.dbeta), in.dh0 = pointer(grads.dh0);
  in.derase = pointer(grads.derase), in.dwrite = pointer(grads.dwrite);
  run_pass<Work, T>(
      plan, [&](int64_t chunk, int64_t head, auto& w) { local(in, chunk, head, w); },
      [&](int64_t n, int64_t head, int64_t v0, int64_t cols, auto& w) {
        scan(in, n, head, v0, cols, w);
      },
      [&](int64_t chunk, int64_t head, auto& w) { chunks(in, chunk, head, w); });
  if (plan.group > 1) {
    if (dq) sum_groups(plan, dq.data<T>(), grads.dq.data<T>());
    if (dk) sum_groups(plan, dk.data<T>(), grads.dk.data<T>());
  }
}

// w.p1 = P, from w.q and w.kt.
template <class T>
void scores(const Arrays<T>& in, const Chunk& c, Workspace<T>& w) {
  gemm<Write::set>(c.rows, w.wc, in.plan.k, rows(w.q, w.wk), w.kt, w.wc, w.p1, w.wc, Part::lower_c);
  T decay[128];
  for (int64_t i = 0; i < c.rows; ++i) {
    w.gates.decay_row(i, w.wc, decay);
    T* row = w.p1 + i * w.wc;
    for (int64_t j = 0; j < w.wc; ++j) row[j] = j <= i ? row[j] * decay[j] * in.scale : T(0);
  }
}

}  // namespace ebb::cpu::delta
