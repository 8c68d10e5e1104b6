// The reverse scan that the delta rule with a decay per channel
// (ops/delta_rule_channel_cpu_bwd.cpp) and dplr (ops/dplr_cpu_bwd.cpp) have in common on the CPU.
// With D = dL/dS⁺, A the chunk's triangular inverse and x what the values' gradient has without the
// state, per chunk from the last
//   X = Aᵀ (x + W D)     D ← Diag(γ_n) D + Rᵀ dO ± Eᵀ X
// where rows of W write to the state at the chunk's end, rows of R and E read it at its start.
#pragma once
#include "ops/channel_decay_cpu.h"
#include "ops/delta_rule_cpu.h"

namespace ebb::cpu::channel_decay {

// Of one chunk: rows [n,wk] that load() has made, A [n,C], and x [n,V], which becomes X.
template <class T>
struct ReverseStep {
  const T *writes, *reads, *erases, *inverse;
  T* values;
};

// Columns [v0, v0+cols) of one sequence and head. `in` has plan, d_o, dht, dh0, dstates, value()
// and state(); load(chunk) fills w for a chunk, w.total with γ_n, and returns its ReverseStep.
// ERASE: how Eᵀ X counts.
template <Write ERASE, class T, class In, class Work, class Load>
void scan_back(const In& in, int64_t n, int64_t head, int64_t v0, int64_t cols, Work& w,
               Load&& load) {
  const delta::Plan& plan = in.plan;
  const int64_t width = padded<T>(cols), wk = w.wk;
  const int64_t state = (n * plan.hv + head) * plan.k * plan.v + v0;
  if (in.dht)
    pack(in.dht + state, plan.v, plan.k, cols, w.ds, width);
  else
    std::fill(w.ds, w.ds + plan.k * width, T(0));
  for (int64_t i = plan.first_chunk[size_t(n) + 1] - 1; i >= plan.first_chunk[size_t(n)]; --i) {
    const Chunk c = plan.chunks[size_t(i)];
    unpack(w.ds, width, plan.k, cols, in.dstates + in.state(i, head) + v0, plan.v);
    const ReverseStep<T> step = load(c);
    pack(in.d_o + in.value(c.first, head) + v0, plan.hv * plan.v, c.rows, cols, w.v, width);
    pack(step.values + v0, plan.v, c.rows, cols, w.x, width);
    gemm<Write::add>(c.rows, width, plan.k, rows(step.writes, wk), w.ds, width, w.x, width);
    gemm<Write::set>(c.rows, width, c.rows, columns(step.inverse, plan.c), w.x, width, w.y, width,
                     Part::upper_a);
    unpack(w.y, width, c.rows, cols, step.values + v0, plan.v);
    scale_rows(w.ds, width, plan.k, [&](int64_t d) { return w.total[d]; });
    gemm<Write::add>(plan.k, width, c.rows, columns(step.reads, wk), w.v, width, w.ds, width);
    gemm<ERASE>(plan.k, width, c.rows, columns(step.erases, wk), w.y, width, w.ds, width);
  }
  if (in.dh0) unpack(w.ds, width, plan.k, cols, in.dh0 + state, plan.v);
}

// x of one chunk to memory: Pᵀ dO, P [n,wc] the scores in w.p1 of the reads with what is written.
template <class In, class Work, class T>
void put_local_values(const In& in, const Chunk& c, int64_t head, Work& w, T* values) {
  const delta::Plan& plan = in.plan;
  pack(in.d_o + in.value(c.first, head), plan.hv * plan.v, c.rows, plan.v, w.v, w.wv);
  gemm<Write::set>(c.rows, w.wv, c.rows, columns(w.p1, w.wc), w.v, w.wv, w.x, w.wv, Part::upper_a);
  unpack(w.x, w.wv, c.rows, plan.v, values, plan.v);
}

}  // namespace ebb::cpu::channel_decay
