// Backward pass of the delta rule with a decay per channel on the CPU; notation of
// ops/delta_rule_channel_cpu.cpp. With D = dL/dS⁺ (models.md 3.2 in adjoint form, no gradient of
// the inverse):
//   X = Aᵀ (Pᵀ dO + (k∘τ) D)     D ← Diag(γ_n) D + (scale q∘γ)ᵀ dO − K̂ᵀ X
//   dP = scale·tril(dO V'ᵀ)      dM = −stril(X V'ᵀ)      dv = w∘X      dw = v∘X
//   dq_i = scale γ_i∘(S dO_i) + Σ_{j<=i} dP_ij k_j∘E_ij        E_ij = e^{G_i−G_j} [K]
//   p_i  =     −γ_i∘(S X_i)   + Σ_{j<i} dM_ij k_j∘E_ij         (of b∘k: db = k∘p, dk = r + b∘p)
//   r_j  =      τ_j∘(D V'_j)  + Σ_{i>=j} dP_ij q_i∘E_ij + Σ_{i>j} dM_ij (b_i k_i)∘E_ij
// dg_t sums exactly the terms whose exponent contains g_t, channel by channel; it is no difference
// of larger sums, so it stays accurate where the decay is near zero.
#include <cmath>

#include "ops/channel_reverse_cpu.h"
#include "ops/delta_rule_channel_gradients.h"

namespace ebb::cpu {
namespace {

using namespace delta_channel;

template <class T>
using Pass = BackwardPass<ChannelArrays, T>;

// X = Pᵀ dO: the part of V's gradient that does not come through the state.
template <class T>
void local_values(const Pass<T>& in, int64_t chunk, int64_t head, ChannelWorkspace<T>& w) {
  const Chunk c = in.plan.chunks[size_t(chunk)];
  load_chunk(in, c, head, w);
  load_queries(in, c, head, w);
  scores(w.q, w.k, in.scale, false, w, w.p1);
  put_local_values(in, c, head, w, in.x_of(c.first, head));
}

// Columns [v0, v0+cols) of D and X, from the last chunk to the first.
template <class T>
void reverse_scan(const Pass<T>& in, int64_t n, int64_t head, int64_t v0, int64_t cols,
                  ChannelWorkspace<T>& w) {
  scan_back<Write::subtract, T>(in, n, head, v0, cols, w, [&](const Chunk& c) {
    load_chunk(in, c, head, w);
    load_queries(in, c, head, w);
    to_end(w, w.k, w.kt);
    from_start(w, w.q, in.scale, w.qh);
    from_start(w, w.b, T(1), w.bh);
    return ReverseStep<T>{w.kt, w.qh, w.bh, in.a_of(c.first, head), in.x_of(c.first, head)};
  });
}

// w.p3 = dP, w.p4 = dM from dO (w.v), V' and X [n,wv].
template <class T>
void score_gradients(const Pass<T>& in, const T* values, const T* x, ChannelWorkspace<T>& w) {
  const int64_t wc = w.wc;
  transpose(values, w.wv, w.rows, w.wv, w.t, wc);
  gemm<Write::set>(w.rows, wc, in.plan.v, rows(w.v, w.wv), w.t, wc, w.p3, wc, Part::lower_c);
  gemm<Write::set>(w.rows, wc, in.plan.v, rows(x, w.wv), w.t, wc, w.p4, wc, Part::lower_c);
  for (int64_t i = 0; i < w.rows; ++i)
    for (int64_t j = 0; j < wc; ++j) {
      T &dp = w.p3[i * wc + j], &dm = w.p4[i * wc + j];
      dp = j <= i ? in.scale * dp : T(0);
      dm = j < i ? -dm : T(0);
    }
}

// dv, dw and, of dβ, the part of V.
template <class T>
void value_gradients(const Pass<T>& in, const Chunk& c, int64_t head, const T* x,
                     const ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  for (int64_t i = 0; i < c.rows; ++i) {
    const int64_t gate = (c.first + i) * plan.hv + head, at = gate * plan.v;
    const T* dv = x + i * w.wv;
    if (in.dv)
      for (int64_t j = 0; j < plan.v; ++j)
        in.dv[at + j] = (in.beta ? in.beta[gate] : in.write[at + j]) * dv[j];
    if (in.dwrite)
      for (int64_t j = 0; j < plan.v; ++j) in.dwrite[at + j] = in.v[at + j] * dv[j];
    if (in.dbeta) {
      T sum = dot(w.k + i * w.wk, w.p + i * w.wk, w.wk);
      for (int64_t j = 0; j < plan.v; ++j) sum += in.v[at + j] * dv[j];
      in.dbeta[gate] = sum;
    }
  }
}

// Gradients of one chunk and head, all of V at once.
template <class T>
void chunk_gradients(const Pass<T>& in, int64_t chunk, int64_t head, ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk c = plan.chunks[size_t(chunk)];
  const int64_t wk = w.wk, wv = w.wv, size = c.rows * wk, keys = plan.hv * plan.k;
  const int64_t keys_at = in.gate(c.first, head);
  load_chunk(in, c, head, w);
  load_queries(in, c, head, w);
  pack(in.d_o + in.value(c.first, head), plan.hv * plan.v, c.rows, plan.v, w.v, wv);
  const T* v_new = dense(in.values_of(c.first, head), plan.v, c.rows, plan.v, w.x, wv);
  const T* x = dense(in.x_of(c.first, head), plan.v, c.rows, plan.v, w.y, wv);
  const int64_t at = in.state(chunk, head);
  const T* s = dense(in.states + at, plan.v, plan.k, plan.v, w.s, wv);
  const T* ds = dense(in.dstates + at, plan.v, plan.k, plan.v, w.ds, wv);
  score_gradients(in, v_new, x, w);

  // 1. Through the states before and after the chunk.
  std::vector<T> reads(static_cast<size_t>(size)), kept(static_cast<size_t>(size));
  transpose(s, wv, plan.k, wv, w.st, wk);
  gemm<Write::set>(c.rows, wk, plan.v, rows(w.v, wv), w.st, wk, w.dq, wk);
  gemm<Write::set>(c.rows, wk, plan.v, rows(x, wv), w.st, wk, w.p, wk);
  from_start(w, w.dq, in.scale, w.dq);
  from_start(w, w.p, T(-1), w.p);
  for (int64_t i = 0; i < size; ++i) reads[size_t(i)] = w.q[i] * w.dq[i] + w.b[i] * w.p[i];
  transpose(ds, wv, plan.k, wv, w.st, wk);
  gemm<Write::set>(c.rows, wk, plan.v, rows(v_new, wv), w.st, wk, w.r, wk);
  to_end(w, w.r, w.r);
  for (int64_t i = 0; i < size; ++i) kept[size_t(i)] = w.k[i] * w.r[i];
  std::vector<T> carry(static_cast<size_t>(wk));
  for (int64_t d = 0; d < plan.k; ++d)
    carry[size_t(d)] = w.total[d] * dot(s + d * wv, ds + d * wv, wv);

  // 2. Inside the chunk.
  for (int64_t i = 0; i < size; ++i) {
    w.qh[i] = w.q[i] * w.head[i];
    w.bh[i] = w.b[i] * w.head[i];
    w.kt[i] = w.k[i] * w.tail[i];
    w.off_row[i] = w.off_col[i] = 0;
  }
  std::fill(w.across, w.across + w.subs * wk, T(0));
  for (int64_t I = 0; I < w.subs; ++I) {
    for (int64_t J = 0; J < I; ++J) pair_gradients<true>(I, J, w);
    diagonal_gradients<true>(I, w);
  }
  value_gradients(in, c, head, x, w);
  if (in.dg) {
    decay_gradient(reads.data(), kept.data(), carry.data(), w, w.qh);
    unpack(w.qh, wk, c.rows, plan.k, in.dg + keys_at, keys);
  }
  if (in.dq) unpack(w.dq, wk, c.rows, plan.k, in.dq + keys_at, keys);
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t d = 0; d < plan.k; ++d) {
      const int64_t from = i * wk + d, to = keys_at + i * keys + d;
      const T b = in.beta ? in.beta[(c.first + i) * plan.hv + head] : in.erase[to];
      if (in.derase) in.derase[to] = w.k[from] * w.p[from];
      if (in.dk) in.dk[to] = w.r[from] + b * w.p[from];
    }
}

template <class T>
void backward(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& d_o,
              const Tensor& dht, const DeltaRuleGradients& grads) {
  run_backward<ChannelArrays, ChannelWorkspace, T>(p, saved, d_o, dht, grads, local_values<T>,
                                                   reverse_scan<T>, chunk_gradients<T>);
}

}  // namespace

void channel_delta_rule_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                            const Tensor& d_o, const Tensor& dht, const DeltaRuleGradients& grads) {
  if (p.v.dtype() == DType::f64)
    backward<double>(p, saved, d_o, dht, grads);
  else
    backward<float>(p, saved, d_o, dht, grads);
}

}  // namespace ebb::cpu
