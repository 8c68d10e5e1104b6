// Delta rule with a decay per channel on the CPU, forward and one token. One chunk of n tokens,
// with γ_i = e^{G_i}, τ_i = e^{G_n−G_i} [K], K̂ = b∘k∘γ and S the entering state:
//   M_ij = Σ_d b_i k_i k_j e^{G_i−G_j} (i > j)   A = (I+M)⁻¹   P_ij = scale Σ_d q_i k_j e^{G_i−G_j}
//   V' = A (w∘V − K̂ S)     o = scale (q∘γ) S + P V'     S⁺ = Diag(γ_n) S + (k∘τ)ᵀ V'
// Threads as in ops/delta_rule_cpu.cpp: each number is computed by one thread in one order.
#include <cmath>

#include "ops/delta_rule_channel_cpu.h"

namespace ebb::cpu {
namespace {

using namespace delta_channel;

template <class T>
void chunk_inverse(const ChannelArrays<T>& in, const Chunk& c, int64_t head,
                   ChannelWorkspace<T>& w) {
  load_chunk(in, c, head, w);
  scores(w.b, w.k, T(1), true, w, w.p1);
  unit_lower_inverse(w.p1, c.rows, w.wc, w.p2);
  unpack(w.p2, w.wc, c.rows, in.plan.c, in.a_of(c.first, head), in.plan.c);
}

// w.v [rows,width] = columns [v0, v0+cols) of w∘V (β V).
template <class T>
void load_written(const ChannelArrays<T>& in, const Chunk& c, int64_t head, int64_t v0,
                  int64_t cols, int64_t width, ChannelWorkspace<T>& w) {
  for (int64_t i = 0; i < c.rows; ++i) {
    const int64_t at = in.value(c.first + i, head) + v0;
    const T beta = in.beta ? in.beta[(c.first + i) * in.plan.hv + head] : T(0);
    T* out = w.v + i * width;
    for (int64_t j = 0; j < cols; ++j) out[j] = (in.beta ? beta : in.write[at + j]) * in.v[at + j];
    std::fill(out + cols, out + width, T(0));
  }
}

// Columns [v0, v0+cols) of one sequence's states and of V', chunk after chunk; leaves the final
// state in w.s.
template <class T>
void scan(const ChannelArrays<T>& in, const T* h0, int64_t n, int64_t head, int64_t v0,
          int64_t cols, ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t width = padded<T>(cols), wk = w.wk;
  if (h0)
    pack(h0 + (n * plan.hv + head) * plan.k * plan.v + v0, plan.v, plan.k, cols, w.s, width);
  else
    std::fill(w.s, w.s + plan.k * width, T(0));
  for (int64_t i = plan.first_chunk[size_t(n)]; i < plan.first_chunk[size_t(n) + 1]; ++i) {
    const Chunk c = plan.chunks[size_t(i)];
    unpack(w.s, width, plan.k, cols, in.states + in.state(i, head) + v0, plan.v);
    load_chunk(in, c, head, w);
    load_written(in, c, head, v0, cols, width, w);
    from_start(w, w.b, T(1), w.bh);
    gemm<Write::subtract>(c.rows, width, plan.k, rows(w.bh, wk), w.s, width, w.v, width);
    gemm<Write::set>(c.rows, width, c.rows, rows(in.a_of(c.first, head), plan.c), w.v, width, w.y,
                     width, Part::lower_a);
    unpack(w.y, width, c.rows, cols, in.values_of(c.first, head) + v0, plan.v);
    to_end(w, w.k, w.kt);
    scale_rows(w.s, width, plan.k, [&](int64_t d) { return w.total[d]; });
    gemm<Write::add>(plan.k, width, c.rows, columns(w.kt, wk), w.y, width, w.s, width);
  }
}

// o of one chunk and head.
template <class T>
void read_out(const ChannelArrays<T>& in, int64_t chunk, int64_t head, T* o,
              ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk c = plan.chunks[size_t(chunk)];
  load_chunk(in, c, head, w);
  load_queries(in, c, head, w);
  scores(w.q, w.k, in.scale, false, w, w.p1);
  from_start(w, w.q, in.scale, w.qh);
  const T* s = dense(in.states + in.state(chunk, head), plan.v, plan.k, plan.v, w.s, w.wv);
  const T* v = dense(in.values_of(c.first, head), plan.v, c.rows, plan.v, w.v, w.wv);
  gemm<Write::set>(c.rows, w.wv, plan.k, rows(w.qh, w.wk), s, w.wv, w.x, w.wv);
  gemm<Write::add>(c.rows, w.wv, c.rows, rows(w.p1, w.wc), v, w.wv, w.x, w.wv, Part::lower_a);
  unpack(w.x, w.wv, c.rows, plan.v, o + in.value(c.first, head), plan.hv * plan.v);
}

template <class T>
void forward(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& o,
             const Tensor& ht) {
  const Plan plan(p);
  const ChannelArrays<T> in(plan, p, saved);
  const T* h0 = p.h0 ? p.h0.data<T>() : nullptr;
  T *p_o = o.data<T>(), *p_ht = ht ? ht.data<T>() : nullptr;
  run_pass<ChannelWorkspace, T>(
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
void step(const DeltaRuleProblem& p, const Tensor& state, const Tensor& o) {
  const int64_t b = p.batch(), hv = p.value_heads(), kk = p.key_dim(), vv = p.value_dim();
  const int64_t group = hv / p.heads();
#pragma omp parallel for if (b * hv * kk * vv > 32768)
  for (int64_t i = 0; i < b * hv; ++i) {
    const T *p_q = p.q.data<T>() + i / group * kk, *p_k = p.k.data<T>() + i / group * kk;
    const T *p_v = p.v.data<T>() + i * vv, *g = p.g.data<T>() + i * kk;
    const T* erase = p.erase ? p.erase.data<T>() + i * kk : nullptr;
    const T* write = p.erase ? p.write.data<T>() + i * vv : nullptr;
    const T beta = p.beta ? p.beta.data<T>()[i] : T(0);
    T *s = state.data<T>() + i * kk * vv, *p_o = o.data<T>() + i * vv;
    T alpha[256], u[256] = {}, read[256] = {};
    for (int64_t r = 0; r < kk; ++r) alpha[r] = vexp(g[r]);
    for (int64_t r = 0; r < kk; ++r) {
      const T key = (erase ? erase[r] : beta) * p_k[r] * alpha[r];
      for (int64_t j = 0; j < vv; ++j) u[j] += key * s[r * vv + j];
    }
    for (int64_t j = 0; j < vv; ++j) u[j] = (write ? write[j] : beta) * p_v[j] - u[j];
    for (int64_t r = 0; r < kk; ++r)
      for (int64_t j = 0; j < vv; ++j) {
        const T next = alpha[r] * s[r * vv + j] + p_k[r] * u[j];
        s[r * vv + j] = next;
        read[j] += p_q[r] * next;
      }
    for (int64_t j = 0; j < vv; ++j) p_o[j] = T(p.scale) * read[j];
  }
}

}  // namespace

DeltaRuleSaved channel_delta_rule_fwd(const DeltaRuleProblem& p, const Tensor& o,
                                      const Tensor& ht) {
  check_decays(p.erase ? "gdn2" : "kda", p.g);
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

void channel_delta_rule_step(const DeltaRuleProblem& p, const Tensor& state, const Tensor& o) {
  check_decays(p.erase ? "gdn2_step" : "kda_step", p.g.select(1, 0));
  if (p.v.dtype() == DType::f64)
    step<double>(p, state, o);
  else
    step<float>(p, state, o);
}

}  // namespace ebb::cpu
