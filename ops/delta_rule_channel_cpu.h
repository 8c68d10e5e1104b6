// Shared by the passes of the delta rule with a decay per channel on the CPU
// (ops/delta_rule_channel_cpu.cpp, _bwd.cpp): raw pointers, and one chunk's keys, decays and scores
// in a thread's own memory. Decays and sub-chunks: ops/channel_decay_cpu.h.
#pragma once
#include "ops/channel_decay_cpu.h"
#include "ops/delta_rule_channel.h"
#include "ops/delta_rule_cpu.h"

namespace ebb::cpu::delta_channel {

using namespace delta;
using namespace channel_decay;

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
        a(saved.a ? saved.a.data<T>() : nullptr),
        states(saved.states.data<T>()),
        values(saved.values ? saved.values.data<T>() : nullptr) {}
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
struct ChannelWorkspace : ChannelDecays<T> {
  explicit ChannelWorkspace(const Plan& plan)
      : ChannelDecays<T>(plan.c, plan.k), wv(padded<T>(plan.v)) {
    Scratch<T>& memory = this->memory;
    const int64_t wk = this->wk, wc = this->wc;
    for (T** to : {&q, &k, &b, &qh, &bh, &kt, &dq, &p, &r}) *to = memory.take(plan.c * wk);
    for (T** to : {&v, &x, &y}) *to = memory.take(plan.c * wv);
    for (T** to : {&s, &ds}) *to = memory.take(padded<T>(plan.k) * wv);
    for (T** to : {&st, &t}) *to = memory.take(std::max(wv, wk) * std::max(wk, wc));
    for (T** to : {&p1, &p2, &p3, &p4}) *to = memory.take(plan.c * wc);
  }
  int64_t wv;
  T *q, *k, *b;     // [C,wk]; b: b∘k
  T *qh, *bh, *kt;  // q∘head, b∘head, k∘tail
  T *dq, *p, *r;    // gradients of q, of b∘k, of k as a key that was written
  T *v, *x, *y, *s, *ds, *st, *t, *p1, *p2, *p3, *p4;
};

// Keys, erase keys and everything about the decays of a chunk.
template <class T>
void load_chunk(const ChannelArrays<T>& in, const Chunk& c, int64_t head, ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t wk = w.wk;
  pack(in.k + in.key(c.first, head), plan.h * plan.k, c.rows, plan.k, w.k, wk);
  if (in.erase) pack(in.erase + in.gate(c.first, head), plan.hv * plan.k, c.rows, plan.k, w.b, wk);
  for (int64_t i = 0; i < c.rows; ++i) {
    T* b = w.b + i * wk;
    const T* k = w.k + i * wk;
    const T beta = in.beta ? in.beta[(c.first + i) * plan.hv + head] : T(0);
    for (int64_t d = 0; d < wk; ++d) b[d] = in.erase ? b[d] * k[d] : beta * k[d];
  }
  load_decays(in.g + in.gate(c.first, head), plan.hv * plan.k, c.rows, plan.k, w);
}

template <class T>
void load_queries(const ChannelArrays<T>& in, const Chunk& c, int64_t head,
                  ChannelWorkspace<T>& w) {
  pack(in.q + in.key(c.first, head), in.plan.h * in.plan.k, c.rows, in.plan.k, w.q, w.wk);
}

}  // namespace ebb::cpu::delta_channel
