// Shared by the passes of state-memory attention on the CPU (ops/state_memory_attention_cpu.cpp,
// _bwd.cpp): which tokens see which memories, the normalised inputs, a tile's matrices as padded
// copies in a thread's own memory.
#pragma once
#include <vector>

#include "ops/recurrence_cpu.h"
#include "ops/state_memory_attention.h"

namespace ebb::cpu::state_memory {

using namespace recurrence;

inline constexpr int64_t kTile = 64;  // tokens side by side

// Tokens of one run; they see the memories [first_memory, memory), memory being their own run's.
struct Tile : Chunk {
  int64_t first_memory, memory;
};
// The tiles that see a memory.
struct Readers {
  int64_t begin, end;
};

struct Plan {
  explicit Plan(const StateMemoryProblem& p)
      : tokens(p.batch() * p.time()),
        heads(p.heads()),
        n(p.state_dim()),
        p(p.value_dim()),
        q_heads(p.q.size(2)),
        e_heads(p.e.size(2)),
        c_heads(p.c.size(2)),
        gate_heads(p.gate ? p.gate.size(2) : heads) {
    for (int64_t s = 0; s < p.layout.count(p.batch()); ++s) {
      const bool goes_on = !p.before.empty();
      const int64_t begin = p.layout.begin(s, p.time()), end = p.layout.end(s, p.time());
      const int64_t past = goes_on ? p.before[size_t(s)] : 0;
      const int64_t first_memory = goes_on ? s * p.room : int64_t(readers.size());
      for (int64_t t = begin; t < end;) {
        const int64_t at = past + t - begin, memory = first_memory + at / p.memory_chunk;
        const int64_t run = std::min(end, t + p.memory_chunk - at % p.memory_chunk);
        for (; t < run; t += std::min(kTile, run - t))
          tiles.push_back({{t, std::min(kTile, run - t)}, first_memory, memory});
        if (!goes_on) readers.push_back({int64_t(tiles.size()), 0});
      }
      for (size_t m = size_t(first_memory); m < readers.size(); ++m)
        readers[m].end = int64_t(tiles.size());
    }
    for (const Tile& t : tiles) tile_rows = std::max(tile_rows, t.rows);
  }
  int64_t tokens, heads, n, p;
  int64_t q_heads, e_heads, c_heads, gate_heads;
  int64_t tile_rows = 1;
  std::vector<Tile> tiles;
  std::vector<Readers> readers;  // [M]; none where sequences go on

  int64_t memory(int64_t m, int64_t head) const { return (m * heads + head) * n * p; }
  int64_t row(int64_t t, int64_t head) const { return (t * heads + head) * p; }  // of r, o, dy
  // The vector of `head` in one of `of` heads.
  int64_t shared(int64_t head, int64_t of) const { return head / (heads / of); }
};

// Rows over their root mean square, and the reciprocals of it.
template <class T>
struct Normalized {
  Normalized(const Tensor& x, double eps, bool on) : width(x.size(-1)), source(x.data<T>()) {
    if (!on) return;
    const int64_t count = x.numel() / width;
    unit.resize(size_t(count * width));
    inverse.resize(size_t(count));
#pragma omp parallel for if (count * width > 16384)
    for (int64_t i = 0; i < count; ++i) {
      const T* row = source + i * width;
      T sum = 0;
      for (int64_t j = 0; j < width; ++j) sum += row[j] * row[j];
      inverse[size_t(i)] = T(1) / std::sqrt(sum / T(width) + T(eps));
      for (int64_t j = 0; j < width; ++j) unit[size_t(i * width + j)] = row[j] * inverse[size_t(i)];
    }
    source = unit.data();
  }
  const T* row(int64_t i) const { return source + i * width; }
  // The gradient of the row before, from that of the normalised one.
  void backward(int64_t i, const T* d, T* out) const {
    if (inverse.empty()) {
      std::copy(d, d + width, out);
      return;
    }
    const T* x = row(i);
    T sum = 0;
    for (int64_t j = 0; j < width; ++j) sum += d[j] * x[j];
    sum /= T(width);
    for (int64_t j = 0; j < width; ++j) out[j] = inverse[size_t(i)] * (d[j] - x[j] * sum);
  }
  int64_t width;
  std::vector<T> unit, inverse;
  const T* source;
};

// Reciprocal root mean squares of the memories' rows; all 1 without normalisation.
template <class T>
std::vector<T> row_scales(const StateMemoryProblem& p) {
  const int64_t width = p.value_dim(), count = p.memories.numel() / width;
  std::vector<T> out(size_t(count), T(1));
  if (!p.normalize) return out;
  const T* x = p.memories.data<T>();
#pragma omp parallel for if (count * width > 16384)
  for (int64_t i = 0; i < count; ++i) {
    T sum = 0;
    for (int64_t j = 0; j < width; ++j) sum += x[i * width + j] * x[i * width + j];
    out[size_t(i)] = T(1) / std::sqrt(sum / T(width) + T(p.eps_row));
  }
  return out;
}

template <class T>
struct Arrays {  // of the problem
  Arrays(const Plan& plan, const StateMemoryProblem& p)
      : plan(plan),
        q(p.q, p.eps, p.normalize),
        e(p.e, p.eps, p.normalize),
        rho(row_scales<T>(p)),
        scale(T(p.scale)),
        c(p.c.data<T>()),
        memories(p.memories.data<T>()),
        gate(p.gate ? p.gate.data<T>() : nullptr) {}
  const Plan& plan;
  Normalized<T> q, e;
  std::vector<T> rho;  // [M,H,N]
  T scale;
  const T *c, *memories, *gate;

  T gate_of(int64_t t, int64_t head) const {
    return gate ? gate[t * plan.gate_heads + plan.shared(head, plan.gate_heads)] : T(1);
  }
};

// One tile's matrices as [rows, padded width] copies, a memory and its transpose.
template <class T>
struct Workspace {
  explicit Workspace(const Plan& plan) : wn(padded<T>(plan.n)), wp(padded<T>(plan.p)) {
    for (T** x : {&q, &c, &a, &b, &x_n}) *x = memory.take(plan.tile_rows * wn);
    for (T** x : {&e, &y, &v, &sum, &x_p}) *x = memory.take(plan.tile_rows * wp);
    for (T** x : {&s, &g1, &g2}) *x = memory.take(wn * wp);
    st = memory.take(wp * wn);
  }
  Scratch<T> memory;
  int64_t wn, wp;
  T *q, *c, *a, *b, *x_n;    // [rows,wn]
  T *e, *y, *v, *sum, *x_p;  // [rows,wp]
  T *s, *g1, *g2;            // [wn,wp]
  T* st;                     // [wp,wn]
};

// w.q, w.e, w.c: the vectors of one head.
template <class T>
void load_tile(const Arrays<T>& in, const Tile& t, int64_t head, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const auto load = [&](const T* x, int64_t of, int64_t width, T* to, int64_t padded_width) {
    pack(x + (t.first * of + plan.shared(head, of)) * width, of * width, t.rows, width, to,
         padded_width);
  };
  load(in.q.source, plan.q_heads, plan.n, w.q, w.wn);
  load(in.e.source, plan.e_heads, plan.p, w.e, w.wp);
  load(in.c, plan.c_heads, plan.n, w.c, w.wn);
}

// The memory with rows of wp.
template <class T>
const T* load_memory(const Arrays<T>& in, int64_t m, int64_t head, Workspace<T>& w) {
  return dense(in.memories + in.plan.memory(m, head), in.plan.p, in.plan.n, in.plan.p, w.s, w.wp);
}

// to = x∘ρ, row by row.
template <class T>
void times_rho(const Arrays<T>& in, int64_t m, int64_t head, const T* x, int64_t rows,
               const Workspace<T>& w, T* to) {
  const int64_t n = in.plan.n;
  const T* rho = in.rho.data() + (m * in.plan.heads + head) * n;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < n; ++j) to[i * w.wn + j] = x[i * w.wn + j] * rho[j];
    std::fill(to + i * w.wn + n, to + (i + 1) * w.wn, T(0));
  }
}

}  // namespace ebb::cpu::state_memory
