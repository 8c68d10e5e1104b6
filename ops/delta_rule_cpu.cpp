// Gated delta rule on the CPU: chunks of C tokens, products of cache-sized matrices (small_gemm.h),
// OpenMP over (chunk, head) where chunks are independent and over (sequence, head, columns of V)
// along the scans. Every partition is free to change: each number is computed by one thread in one
// order. Notation of one chunk of n tokens, W the vector padding of a width:
//   γ_i = e^{G_i}, τ_i = e^{G_n−G_i}, Γ_ij = e^{G_i−G_j} (i >= j, else 0), S the entering state
//   M = stril(β KKᵀ∘Γ), A = (I+M)⁻¹, P = scale·tril(QKᵀ∘Γ)
//   V' = A β (V − γ K S)      o = scale γ Q S + P V'      S⁺ = γ_n S + (τK)ᵀ V'
#include "ops/delta_rule_cpu.h"

#include <cmath>

#include "ops/common.h"

namespace ebb::cpu {
namespace {

using namespace delta;

// A = (I + M)⁻¹ of one chunk.
template <class T>
void chunk_inverse(const Arrays<T>& in, const Chunk& c, int64_t head, Workspace<T>& w) {
  load_keys(in, c, head, w);
  T *m = w.p1, *a = w.p2;
  gemm<Write::set>(c.rows, w.wc, in.plan.k, rows(w.k, w.wk), w.kt, w.wc, m, w.wc, Part::lower_c);
  T decay[128];
  for (int64_t i = 0; i < c.rows; ++i) {
    w.gates.decay_row(i, w.wc, decay);
    for (int64_t j = 0; j < i; ++j) m[i * w.wc + j] *= w.gates.beta[i] * decay[j];
  }
  unit_lower_inverse(m, c.rows, w.wc, a);
  unpack(a, w.wc, c.rows, in.plan.c, in.a_of(c.first, head), in.plan.c);
}

// Columns [v0, v0+cols) of one sequence's states and of V', chunk after chunk; leaves the final
// state in w.s.
template <class T>
void scan(const Arrays<T>& in, const T* h0, int64_t n, int64_t head, int64_t v0, int64_t cols,
          Workspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t width = padded<T>(cols);
  if (h0)
    pack(h0 + (n * plan.hv + head) * plan.k * plan.v + v0, plan.v, plan.k, cols, w.s, width);
  else
    std::fill(w.s, w.s + plan.k * width, T(0));
  for (int64_t i = plan.first_chunk[size_t(n)]; i < plan.first_chunk[size_t(n) + 1]; ++i) {
    const Chunk c = plan.chunks[size_t(i)];
    unpack(w.s, width, plan.k, cols, in.states + in.state(i, head) + v0, plan.v);
    load_keys(in, c, head, w);
    pack(in.v + in.value(c.first, head) + v0, plan.hv * plan.v, c.rows, cols, w.v, width);
    gemm<Write::set>(c.rows, width, plan.k, rows(w.k, w.wk), w.s, width, w.x, width);
    for (int64_t r = 0; r < c.rows; ++r)
      for (int64_t j = 0; j < width; ++j)
        w.x[r * width + j] =
            w.gates.beta[r] * std::fma(-w.gates.gamma[r], w.x[r * width + j], w.v[r * width + j]);
    gemm<Write::set>(c.rows, width, c.rows, rows(in.a_of(c.first, head), plan.c), w.x, width, w.y,
                     width, Part::lower_a);
    unpack(w.y, width, c.rows, cols, in.values_of(c.first, head) + v0, plan.v);
    scale_rows(w.y, width, c.rows, [&](int64_t r) { return w.gates.tail[r]; });
    scale_rows(w.s, width, plan.k, [&](int64_t) { return w.gates.total; });
    gemm<Write::add>(plan.k, width, c.rows, columns(w.k, w.wk), w.y, width, w.s, width);
  }
}

// o of one chunk and head.
template <class T>
void read_out(const Arrays<T>& in, int64_t chunk, int64_t head, T* o, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk c = plan.chunks[size_t(chunk)];
  load_keys(in, c, head, w);
  load_queries(in, c, head, w);
  scores(in, c, w);
  const T* s = dense(in.states + in.state(chunk, head), plan.v, plan.k, plan.v, w.s, w.wv);
  const T* v = dense(in.values_of(c.first, head), plan.v, c.rows, plan.v, w.v, w.wv);
  gemm<Write::set>(c.rows, w.wv, plan.k, rows(w.q, w.wk), s, w.wv, w.x, w.wv);
  scale_rows(w.x, w.wv, c.rows, [&](int64_t r) { return in.scale * w.gates.gamma[r]; });
  gemm<Write::add>(c.rows, w.wv, c.rows, rows(w.p1, w.wc), v, w.wv, w.x, w.wv, Part::lower_a);
  unpack(w.x, w.wv, c.rows, plan.v, o + in.value(c.first, head), plan.hv * plan.v);
}

template <class T>
void forward(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& o,
             const Tensor& ht) {
  const Plan plan(p);
  const Arrays<T> in(plan, p, saved);
  const T* h0 = p.h0 ? p.h0.data<T>() : nullptr;
  T *p_o = o.data<T>(), *p_ht = ht ? ht.data<T>() : nullptr;
  run_pass<Workspace, T>(
      plan,
      [&](int64_t chunk, int64_t head, auto& w) {
        chunk_inverse(in, plan.chunks[size_t(chunk)], head, w);
      },
      [&](int64_t n, int64_t head, int64_t v0, int64_t cols, auto& w) {
        scan(in, h0, n, head, v0, cols, w);
        if (p_ht)
          unpack(w.s, padded<T>(cols), plan.k, cols,
                 p_ht + (n * plan.hv + head) * plan.k * plan.v + v0, plan.v);
      },
      [&](int64_t chunk, int64_t head, auto& w) { read_out(in, chunk, head, p_o, w); });
}

template <class T>
void step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
          const Tensor& state, T scale, const Tensor& o) {
  const int64_t b = v.size(0), hv = v.size(1), kk = q.size(2), vv = v.size(2);
  const int64_t group = hv / q.size(1);
#pragma omp parallel for if (b * hv * kk * vv > 32768)
  for (int64_t i = 0; i < b * hv; ++i) {
    const T *p_q = q.data<T>() + i / group * kk, *p_k = k.data<T>() + i / group * kk;
    const T* p_v = v.data<T>() + i * vv;
    T *s = state.data<T>() + i * kk * vv, *p_o = o.data<T>() + i * vv;
    const T alpha = vexp(g.data<T>()[i]), write = beta.data<T>()[i];
    T u[256] = {}, read[256] = {};
    for (int64_t r = 0; r < kk; ++r)
      for (int64_t j = 0; j < vv; ++j) u[j] += p_k[r] * s[r * vv + j];
    for (int64_t j = 0; j < vv; ++j) u[j] = write * (p_v[j] - alpha * u[j]);
    for (int64_t r = 0; r < kk; ++r)
      for (int64_t j = 0; j < vv; ++j) {
        const T next = alpha * s[r * vv + j] + p_k[r] * u[j];
        s[r * vv + j] = next;
        read[j] += p_q[r] * next;
      }
    for (int64_t j = 0; j < vv; ++j) p_o[j] = scale * read[j];
  }
}

}  // namespace

DeltaRuleSaved gated_delta_rule_fwd(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht) {
  check_decays("gated_delta_rule", p.g);
  const DType dtype = p.v.dtype();
  const int64_t hv = p.value_heads(), tokens = p.batch() * p.time();
  const DeltaRuleSaved saved{Tensor::empty({hv, tokens, p.chunk}, dtype),
                             Tensor::empty({p.chunks(), hv, p.key_dim(), p.value_dim()}, dtype),
                             Tensor::empty({hv, tokens, p.value_dim()}, dtype)};
  if (dtype == DType::f64)
    forward<double>(p, saved, o, ht);
  else
    forward<float>(p, saved, o, ht);
  return saved;
}

void gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                           const Tensor& beta, const Tensor& state, double scale, const Tensor& o) {
  check_decays("gated_delta_rule_step", g);
  if (v.dtype() == DType::f64)
    step<double>(q, k, v, g, beta, state, scale, o);
  else
    step<float>(q, k, v, g, beta, state, float(scale), o);
}

}  // namespace ebb::cpu
