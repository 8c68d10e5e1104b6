// dplr on the CPU, forward and one token; formulas in ops/dplr.h. Chunks are independent but for
// the state: 1 inverse and A_ak V of every chunk, 2 the states and Y, sequence by sequence, columns
// of V in parallel, 3 the read-out of every chunk. Each number is computed by one thread in one
// order.
#include <cmath>

#include "ops/dplr_cpu.h"

namespace ebb::cpu {
namespace {

using namespace low_rank;

// 1. (I − A_ab)⁻¹, and A_ak V where Y will stand.
template <class T>
void chunk_inverse(const DplrArrays<T>& in, const Chunk& c, int64_t head, DplrWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t wc = w.wc, wv = w.wv;
  load_chunk(in, c, head, w);
  scores(w.a, w.b, T(-1), false, w, w.p1);
  std::fill(w.p2, w.p2 + wc, T(0));  // row i of −A_ab is row i − 1 of the shifted scores
  std::copy(w.p1, w.p1 + (c.rows - 1) * wc, w.p2 + wc);
  unit_lower_inverse(w.p2, c.rows, wc, w.p1);
  unpack(w.p1, wc, c.rows, plan.c, in.inverse_of(c.first, head), plan.c);
  scores(w.a, w.k, T(1), false, w, w.p1);
  pack(in.v + in.value(c.first, head), plan.h * plan.v, c.rows, plan.v, w.v, wv);
  std::fill(w.x, w.x + wv, T(0));
  gemm<Write::set>(c.rows - 1, wv, c.rows - 1, rows(w.p1, wc), w.v, wv, w.x + wv, wv,
                   Part::lower_a);
  unpack(w.x, wv, c.rows, plan.v, in.values_of(c.first, head), plan.v);
}

// 2. Columns [v0, v0+cols) of one sequence's states and of Y, chunk after chunk; leaves the final
// state in w.s.
template <class T>
void scan(const DplrArrays<T>& in, const T* h0, int64_t n, int64_t head, int64_t v0, int64_t cols,
          DplrWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t width = padded<T>(cols), wk = w.wk;
  if (h0)
    pack(h0 + (n * plan.h + head) * plan.k * plan.v + v0, plan.v, plan.k, cols, w.s, width);
  else
    std::fill(w.s, w.s + plan.k * width, T(0));
  for (int64_t i = plan.first_chunk[size_t(n)]; i < plan.first_chunk[size_t(n) + 1]; ++i) {
    const Chunk c = plan.chunks[size_t(i)];
    unpack(w.s, width, plan.k, cols, in.states + in.state(i, head) + v0, plan.v);
    load_chunk(in, c, head, w);
    from_start(w, w.a, T(1), w.ah);
    pack(in.values_of(c.first, head) + v0, plan.v, c.rows, cols, w.x, width);
    gemm<Write::add>(c.rows, width, plan.k, rows(w.start, wk), w.s, width, w.x, width);
    gemm<Write::set>(c.rows, width, c.rows, rows(in.inverse_of(c.first, head), plan.c), w.x, width,
                     w.y, width, Part::lower_a);
    unpack(w.y, width, c.rows, cols, in.values_of(c.first, head) + v0, plan.v);
    pack(in.v + in.value(c.first, head) + v0, plan.h * plan.v, c.rows, cols, w.v, width);
    to_end(w, w.k, w.kt);
    to_end(w, w.b, w.bt);
    scale_rows(w.s, width, plan.k, [&](int64_t d) { return w.total[d]; });
    gemm<Write::add>(plan.k, width, c.rows, columns(w.kt, wk), w.v, width, w.s, width);
    gemm<Write::add>(plan.k, width, c.rows, columns(w.bt, wk), w.y, width, w.s, width);
  }
}

// 3. o of one chunk and head.
template <class T>
void read_out(const DplrArrays<T>& in, int64_t chunk, int64_t head, T* o, DplrWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk c = plan.chunks[size_t(chunk)];
  const int64_t wv = w.wv;
  load_chunk(in, c, head, w);
  load_reads(in, c, head, w);
  scores(w.r, w.k, in.scale, false, w, w.p1);
  scores(w.r, w.b, in.scale, false, w, w.p2);
  from_start(w, w.r, in.scale, w.rh);
  const T* s = dense(in.states + in.state(chunk, head), plan.v, plan.k, plan.v, w.s, wv);
  const T* y = dense(in.values_of(c.first, head), plan.v, c.rows, plan.v, w.y, wv);
  pack(in.v + in.value(c.first, head), plan.h * plan.v, c.rows, plan.v, w.v, wv);
  gemm<Write::set>(c.rows, wv, plan.k, rows(w.rh, w.wk), s, wv, w.x, wv);
  gemm<Write::add>(c.rows, wv, c.rows, rows(w.p1, w.wc), w.v, wv, w.x, wv, Part::lower_a);
  gemm<Write::add>(c.rows, wv, c.rows, rows(w.p2, w.wc), y, wv, w.x, wv, Part::lower_a);
  unpack(w.x, wv, c.rows, plan.v, o + in.value(c.first, head), plan.h * plan.v);
}

template <class T>
void forward(const DplrProblem& p, const DplrSaved& saved, const Tensor& o, const Tensor& ht) {
  const Plan plan(p);
  const DplrArrays<T> in(plan, p, saved);
  const T* h0 = p.h0 ? p.h0.data<T>() : nullptr;
  T *p_o = o.data<T>(), *p_ht = ht ? ht.data<T>() : nullptr;
  run_pass<DplrWorkspace, T>(
      plan,
      [&](int64_t chunk, int64_t head, auto& w) {
        chunk_inverse(in, plan.chunks[size_t(chunk)], head, w);
      },
      [&](int64_t n, int64_t head, int64_t v0, int64_t cols, auto& w) {
        scan(in, h0, n, head, v0, cols, w);
        if (p_ht)
          unpack(w.s, padded<T>(cols), plan.k, cols,
                 p_ht + (n * plan.h + head) * plan.k * plan.v + v0, plan.v);
      },
      [&](int64_t chunk, int64_t head, auto& w) { read_out(in, chunk, head, p_o, w); });
}

template <class T>
void step(const DplrProblem& p, const Tensor& state, const Tensor& o) {
  const int64_t heads = p.batch() * p.heads(), kk = p.key_dim(), vv = p.value_dim();
  const T *r = p.r.data<T>(), *g = p.w.data<T>(), *k = p.k.data<T>(), *v = p.v.data<T>();
  const T *a = p.a.data<T>(), *b = p.b.data<T>();
  T *states = state.data<T>(), *out = o.data<T>();
#pragma omp parallel for if (heads * kk * vv > 32768)
  for (int64_t i = 0; i < heads; ++i) {
    T *s = states + i * kk * vv, y[256] = {}, read[256] = {};
    const int64_t key = i * kk, value = i * vv;
    for (int64_t d = 0; d < kk; ++d)
      for (int64_t j = 0; j < vv; ++j) y[j] += a[key + d] * s[d * vv + j];
    for (int64_t d = 0; d < kk; ++d) {
      const T alpha = vexp(g[key + d]);
      for (int64_t j = 0; j < vv; ++j) {
        const T next = alpha * s[d * vv + j] + b[key + d] * y[j] + k[key + d] * v[value + j];
        s[d * vv + j] = next;
        read[j] += r[key + d] * next;
      }
    }
    for (int64_t j = 0; j < vv; ++j) out[value + j] = T(p.scale) * read[j];
  }
}

// The declared bound, with room for the rounding of a gate that reaches it.
void check_bound(const Tensor& w, double bound) {
  if (bound == 0) return;
  const double least = bound * (1 + 1e-5);
  visit_float(w.dtype(), [&]<class T>() {
    const T* p = w.data<T>();
    for (int64_t i = 0; i < w.numel(); ++i)
      check(!(double(p[i]) < least), "dplr: w[{}] of {} is {}, below the declared lower_bound {}",
            i, w.shape(), double(p[i]), bound);
  });
}

}  // namespace

DplrSaved dplr_fwd(const DplrProblem& p, const Tensor& o, const Tensor& ht) {
  check_decays("dplr", p.w, "w");
  check_bound(p.w, p.lower_bound);
  const DType dtype = p.v.dtype();
  const int64_t h = p.heads(), tokens = p.batch() * p.time();
  const DplrSaved saved{.inverse = Tensor::empty({h, tokens, p.chunk}, dtype),
                        .states = Tensor::empty({p.chunks(), h, p.key_dim(), p.value_dim()}, dtype),
                        .values = Tensor::empty({h, tokens, p.value_dim()}, dtype)};
  if (dtype == DType::f64)
    forward<double>(p, saved, o, ht);
  else
    forward<float>(p, saved, o, ht);
  return saved;
}

void dplr_step(const DplrProblem& p, const Tensor& state, const Tensor& o) {
  check_decays("dplr_step", p.w.select(1, 0), "w");
  if (p.v.dtype() == DType::f64)
    step<double>(p, state, o);
  else
    step<float>(p, state, o);
}

}  // namespace ebb::cpu
