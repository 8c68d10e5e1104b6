// Shared by the passes of dplr on the CPU (ops/dplr_cpu.cpp, _bwd.cpp): raw pointers, and one
// chunk's operands in a thread's own memory.
//
// a_i meets e^{Gx_i} = e^{G_{i−1}}, so a is kept shifted by one row: row i of `a` is a_{i+1}, whose
// decays are then those of row i, as r's are; the last row is zero. a_0 meets no decay at all and
// lies in `start`.
#pragma once
#include "ops/channel_decay_cpu.h"
#include "ops/delta_rule_cpu.h"
#include "ops/dplr.h"

namespace ebb::cpu::low_rank {

using namespace channel_decay;
using delta::Plan;
using delta::run_pass;
using delta::unit_lower_inverse;

template <class T>
struct DplrArrays {
  DplrArrays(const Plan& plan, const DplrProblem& p, const DplrSaved& saved)
      : plan(plan),
        scale(T(p.scale)),
        r(p.r.data<T>()),
        w(p.w.data<T>()),
        k(p.k.data<T>()),
        v(p.v.data<T>()),
        a(p.a.data<T>()),
        b(p.b.data<T>()),
        inverse(saved.inverse.data<T>()),
        states(saved.states.data<T>()),
        values(saved.values.data<T>()) {}
  const Plan& plan;
  T scale;
  const T *r, *w, *k, *v, *a, *b;
  T *inverse, *states, *values;

  int64_t keys() const { return plan.h * plan.k; }  // from token to token
  int64_t key(int64_t t, int64_t head) const { return (t * plan.h + head) * plan.k; }
  int64_t value(int64_t t, int64_t head) const { return (t * plan.h + head) * plan.v; }
  T* inverse_of(int64_t t, int64_t head) const {
    return inverse + (head * plan.tokens + t) * plan.c;
  }
  T* values_of(int64_t t, int64_t head) const { return values + (head * plan.tokens + t) * plan.v; }
  int64_t state(int64_t chunk, int64_t head) const {
    return (chunk * plan.h + head) * plan.k * plan.v;
  }
};

// One chunk's matrices as [rows, padded width] copies, and transposed ones.
template <class T>
struct DplrWorkspace : ChannelDecays<T> {
  explicit DplrWorkspace(const Plan& plan)
      : ChannelDecays<T>(plan.c, plan.k), wv(padded<T>(plan.v)) {
    Scratch<T>& memory = this->memory;
    const int64_t wk = this->wk, wc = this->wc;
    for (T** to : {&r, &k, &a, &b, &rh, &kt, &bt, &dr, &dk, &da, &db})
      *to = memory.take(plan.c * wk);
    start = memory.take((plan.c + 1) * wk);
    ah = start + wk;
    dstart = memory.take(wk);
    for (T** to : {&v, &x, &y}) *to = memory.take(plan.c * wv);
    for (T** to : {&s, &ds}) *to = memory.take(padded<T>(plan.k) * wv);
    for (T** to : {&st, &t}) *to = memory.take(wv * std::max(wk, wc));
    for (T** to : {&p1, &p2, &p3, &p4}) *to = memory.take(plan.c * wc);
  }
  int64_t wv;
  T *r, *k, *a, *b;      // [C,wk]; a shifted
  T *rh, *ah, *kt, *bt;  // decayed: r and a to the chunk's start, k and b to its end
  T* start;              // [C+1,wk]: a_0, then ah; its first n rows are a_i∘e^{Gx_i}
  T *dr, *dk, *da, *db;  // [C,wk], da shifted
  T* dstart;             // [wk]: of a_0
  T *v, *x, *y;          // [C,wv]
  T *s, *ds;             // [wk,wv]
  T *st, *t;             // transposed
  T *p1, *p2, *p3, *p4;  // [C,wc]
};

// k, b, a and everything about the decays of a chunk.
template <class T>
void load_chunk(const DplrArrays<T>& in, const Chunk& c, int64_t head, DplrWorkspace<T>& w) {
  const int64_t stride = in.keys(), at = in.key(c.first, head), wk = w.wk, key_dim = in.plan.k;
  pack(in.k + at, stride, c.rows, key_dim, w.k, wk);
  pack(in.b + at, stride, c.rows, key_dim, w.b, wk);
  pack(in.a + at, stride, 1, key_dim, w.start, wk);
  pack(in.a + at + (c.rows > 1 ? stride : 0), stride, c.rows - 1, key_dim, w.a, wk);
  std::fill(w.a + (c.rows - 1) * wk, w.a + c.rows * wk, T(0));
  load_decays(in.w + at, stride, c.rows, key_dim, w);
}

template <class T>
void load_reads(const DplrArrays<T>& in, const Chunk& c, int64_t head, DplrWorkspace<T>& w) {
  pack(in.r + in.key(c.first, head), in.keys(), c.rows, in.plan.k, w.r, w.wk);
}

}  // namespace ebb::cpu::low_rank
