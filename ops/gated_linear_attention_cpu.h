// Shared by the passes of gated linear attention on the CPU (ops/gated_linear_attention_cpu.cpp,
// _bwd.cpp): where the chunks lie, and a chunk's matrices as padded copies in a thread's own
// memory.
#pragma once
#include "ops/gated_linear_attention.h"
#include "ops/recurrence_cpu.h"

namespace ebb::cpu::linear_attention {

using namespace recurrence;

// Where the runs of memory_chunk tokens are not made of whole chunks, a pass of its own works out
// what they write, and its gradients: o and the other gradients do not depend on S then, to the
// last bit.
inline bool runs_apart(const LinearAttentionProblem& p) {
  return p.memory_chunk % std::min(p.chunk, kMaxChunk) != 0;
}
inline LinearAttentionProblem without_runs(LinearAttentionProblem p) {
  p.memory_chunk = 0;
  return p;
}

// A chunk and the run of `memory_chunk` tokens it belongs to (the whole sequence if there is none).
struct RunChunk : Chunk {
  int64_t memory;    // index of the run
  bool opens, ends;  // first, last chunk of its run
};

struct Plan {
  explicit Plan(const LinearAttentionProblem& p)
      : tokens(p.batch() * p.time()),
        groups(p.groups()),
        heads(p.heads()),
        per_group(heads / groups),
        k(p.key_dim()),
        v(p.value_dim()),
        c(std::min(p.chunk, kMaxChunk)),
        sequences(p.sequences()) {
    if (p.memory_chunk) {  // runs are cut into chunks of equal length, as far as that goes
      const int64_t pieces = (p.memory_chunk + c - 1) / c;
      c = (p.memory_chunk + pieces - 1) / pieces;
    }
    int64_t memory = 0;
    for (int64_t n = 0; n < sequences; ++n) {
      first_chunk.push_back(int64_t(chunks.size()));
      const int64_t end = p.layout.end(n, p.time());
      for (int64_t t = p.layout.begin(n, p.time()); t < end;) {
        const int64_t run = p.memory_chunk ? std::min(end, t + p.memory_chunk) : end;
        for (const int64_t opens = t; t < run; t += c)
          chunks.push_back({{t, std::min(c, run - t)}, memory, t == opens, t + c >= run});
        t = run;
        ++memory;
      }
    }
    first_chunk.push_back(int64_t(chunks.size()));
    split_runs = p.memory_chunk > c;
  }
  int64_t tokens, groups, heads, per_group, k, v, c, sequences;
  std::vector<RunChunk> chunks;
  std::vector<int64_t> first_chunk;  // [N+1]
  bool split_runs = false;           // runs of more than one chunk

  int64_t work() const { return int64_t(chunks.size()) * groups; }
  int64_t state_size() const { return k * v; }
  int64_t state(int64_t chunk, int64_t head) const { return (chunk * heads + head) * k * v; }
  // Rows of group and head at flat token t in [tokens,G,K] and [tokens,H,V]; of [tokens,H].
  int64_t key(int64_t t, int64_t group) const { return (t * groups + group) * k; }
  int64_t value(int64_t t, int64_t head) const { return (t * heads + head) * v; }
  int64_t gate(int64_t t, int64_t head) const { return t * heads + head; }
};

template <class T>
T* pointer(const Tensor& t) {
  return t ? t.data<T>() : nullptr;
}

template <class T>
struct Arrays {  // of the problem, as raw pointers
  Arrays(const Plan& plan, const LinearAttentionProblem& p)
      : plan(plan),
        scale(T(p.scale)),
        q(p.q.data<T>()),
        k(p.k.data<T>()),
        v(p.v.data<T>()),
        g(p.g.data<T>()),
        weight(pointer<T>(p.weight)),
        skip(pointer<T>(p.skip)) {}
  const Plan& plan;
  T scale;
  const T *q, *k, *v, *g, *weight, *skip;
};

// One chunk's matrices as [rows, padded width] copies, and transposed ones.
template <class T>
struct Workspace {
  explicit Workspace(const Plan& plan)
      : wc(padded<T>(plan.c)), wk(padded<T>(plan.k)), wv(padded<T>(plan.v)) {
    for (T** p : {&q, &k, &dq, &dk, &x}) *p = memory.take(plan.c * wk);
    kt = memory.take(wk * wc);
    for (T** p : {&v, &y, &u}) *p = memory.take(plan.c * wv);
    for (T** p : {&s, &ds}) *p = memory.take(padded<T>(plan.k) * wv);
    for (T** p : {&st, &vt}) *p = memory.take(wv * std::max(wk, wc));
    for (T** p : {&qk, &p1, &p2, &z}) *p = memory.take(plan.c * wc);
  }
  Scratch<T> memory;
  int64_t wc, wk, wv;
  T *q, *k, *dq, *dk, *x;  // [C,wk]
  T* kt;                   // [wk,wc]
  T *v, *y, *u;            // [C,wv]
  T *s, *ds;               // [wk,wv]
  T *st, *vt;              // [wv,max(wk,wc)]
  T *qk, *p1, *p2, *z;     // [C,wc]
  T weight[kMaxChunk];
  Decays<T> decay;
};

// What the heads of a group share: w.q, w.k and, below the diagonal, w.qk = q kᵀ.
template <class T>
void load_group(const Arrays<T>& in, const Chunk& c, int64_t group, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t stride = plan.groups * plan.k;
  pack(in.k + plan.key(c.first, group), stride, c.rows, plan.k, w.k, w.wk);
  pack(in.q + plan.key(c.first, group), stride, c.rows, plan.k, w.q, w.wk);
  transpose(w.k, w.wk, c.rows, w.wk, w.kt, w.wc);
  gemm<Write::set>(c.rows, w.wc, plan.k, rows(w.q, w.wk), w.kt, w.wc, w.qk, w.wc, Part::lower_c);
}

// w.v, w.weight and w.decay of one head.
template <class T>
void load_head(const Arrays<T>& in, const Chunk& c, int64_t head, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t at = plan.gate(c.first, head);
  pack(in.v + plan.value(c.first, head), plan.heads * plan.v, c.rows, plan.v, w.v, w.wv);
  w.decay.read(in.g + at, plan.heads, c.rows);
  for (int64_t i = 0; i < c.rows; ++i)
    w.weight[i] = in.weight ? in.weight[at + i * plan.heads] : T(1);
}

// each(chunk, group, w) for all chunks and groups, each thread with a workspace of its own.
template <class T, class Each>
void for_chunks(const Plan& plan, Each&& each) {
#pragma omp parallel if (plan.work() > 1)
  {
    Workspace<T> w(plan);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < plan.work(); ++i) each(i / plan.groups, i % plan.groups, w);
  }
}

// each(n, head, begin, end) for all sequences, heads and pieces of a state's K·V elements.
template <class Each>
void for_states(const Plan& plan, Each&& each) {
  constexpr int64_t kPiece = 2048;
  const int64_t pieces = (plan.state_size() + kPiece - 1) / kPiece;
  const int64_t work = plan.sequences * plan.heads * pieces;
#pragma omp parallel for schedule(dynamic) if (work > 1)
  for (int64_t i = 0; i < work; ++i) {
    const int64_t begin = i % pieces * kPiece, row = i / pieces;
    each(row / plan.heads, row % plan.heads, begin, std::min(begin + kPiece, plan.state_size()));
  }
}

}  // namespace ebb::cpu::linear_attention
