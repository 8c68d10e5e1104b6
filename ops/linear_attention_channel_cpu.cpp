// Gated linear attention with a decay per channel on the CPU. One chunk of n tokens, γ_i = e^{G_i},
// τ_i = e^{G_n−G_i} [K], S the entering state, D = dL/dS⁺ (models.md 4.2):
//   P_ij = scale Σ_d q_i k_j e^{G_i−G_j} (j <= i)    o = scale (q∘γ) S + P v
//   S⁺ = Diag(γ_n) S + (k∘τ)ᵀ v                       dv = Pᵀ dO + (k∘τ) D
//   dq_i = scale γ_i∘(S dO_i) + Σ_{j<=i} dP_ij k_j∘E_ij    dP = scale·tril(dO vᵀ)
//   dk_j = τ_j∘(D v_j) + Σ_{i>=j} dP_ij q_i∘E_ij            D ← Diag(γ_n) D + (scale q∘γ)ᵀ dO
// dg_t sums exactly the terms whose exponent contains g_t. Sub-chunks and threads as in
// ops/delta_rule_channel_cpu.cpp; along the sequences only sums of states are left.
#include "ops/linear_attention_channel.h"

#include <cmath>

#include "ops/delta_rule_channel_gradients.h"

namespace ebb::cpu {
namespace {

using namespace delta_channel;

template <class T>
struct Pass : ChannelArrays<T> {
  using ChannelArrays<T>::ChannelArrays;
  const T *h0 = nullptr, *d_o = nullptr, *dht = nullptr;
  T* totals = nullptr;  // [chunks,HV,K]: γ_n
  T *o = nullptr, *ht = nullptr, *dstates = nullptr;
  T *dq = nullptr, *dk = nullptr;  // [tokens,HV,K]
  T *dv = nullptr, *dg = nullptr, *dh0 = nullptr;

  T* totals_of(int64_t chunk, int64_t head) const {
    return totals + (chunk * this->plan.hv + head) * this->plan.k;
  }
};

// w.v = the chunk's rows of x [tokens,HV,V].
template <class T>
void load_rows(const Pass<T>& in, const T* x, const Chunk& c, int64_t head,
               ChannelWorkspace<T>& w) {
  pack(x + in.value(c.first, head), in.plan.hv * in.plan.v, c.rows, in.plan.v, w.v, w.wv);
}

// to = aᵀ w.v, what a chunk adds to a state or to the gradient of one; γ_n.
template <class T>
void put_sum(const Pass<T>& in, int64_t chunk, int64_t head, const T* a, T* to,
             ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  gemm<Write::set>(plan.k, w.wv, w.rows, columns(a, w.wk), w.v, w.wv, w.s, w.wv);
  unpack(w.s, w.wv, plan.k, plan.v, to + in.state(chunk, head), plan.v);
  std::copy(w.total, w.total + plan.k, in.totals_of(chunk, head));
}

template <class T>
void write_chunk(const Pass<T>& in, int64_t chunk, int64_t head, ChannelWorkspace<T>& w) {
  const Chunk c = in.plan.chunks[size_t(chunk)];
  load_chunk(in, c, head, w);
  load_rows(in, in.v, c, head, w);
  to_end(w, w.k, w.kt);
  put_sum(in, chunk, head, w.kt, in.states, w);
}

template <class T>
void read_gradient(const Pass<T>& in, int64_t chunk, int64_t head, ChannelWorkspace<T>& w) {
  const Chunk c = in.plan.chunks[size_t(chunk)];
  load_chunk(in, c, head, w);
  load_queries(in, c, head, w);
  load_rows(in, in.d_o, c, head, w);
  from_start(w, w.q, in.scale, w.qh);
  put_sum(in, chunk, head, w.qh, in.dstates, w);
}

// Columns [v0, v0+cols) of the running sums of one sequence and head, over its chunks from `first`
// on: on entry x holds what each adds, on return the sum before it (backward: after it).
template <class T>
void scan(const Pass<T>& in, T* x, const T* start, T* end, bool backward, int64_t n, int64_t head,
          int64_t v0, int64_t cols, ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t first = plan.first_chunk[size_t(n)],
                count = plan.first_chunk[size_t(n) + 1] - first;
  const int64_t row = (n * plan.hv + head) * plan.k * plan.v + v0;
  T* s = w.s;  // [K,cols]
  for (int64_t d = 0; d < plan.k; ++d)
    for (int64_t j = 0; j < cols; ++j) s[d * cols + j] = start ? start[row + d * plan.v + j] : T(0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t chunk = first + (backward ? count - 1 - i : i);
    const T* total = in.totals_of(chunk, head);
    T* at = x + in.state(chunk, head) + v0;
    for (int64_t d = 0; d < plan.k; ++d)
      for (int64_t j = 0; j < cols; ++j) {
        const T added = at[d * plan.v + j];
        at[d * plan.v + j] = s[d * cols + j];
        s[d * cols + j] = std::fma(total[d], s[d * cols + j], added);
      }
  }
  if (!end) return;
  for (int64_t d = 0; d < plan.k; ++d)
    for (int64_t j = 0; j < cols; ++j) end[row + d * plan.v + j] = s[d * cols + j];
}

template <class T>
void read_chunk(const Pass<T>& in, int64_t chunk, int64_t head, ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk c = plan.chunks[size_t(chunk)];
  load_chunk(in, c, head, w);
  load_queries(in, c, head, w);
  load_rows(in, in.v, c, head, w);
  scores(w.q, w.k, in.scale, false, w, w.p1);
  from_start(w, w.q, in.scale, w.qh);
  const T* s = dense(in.states + in.state(chunk, head), plan.v, plan.k, plan.v, w.s, w.wv);
  gemm<Write::set>(c.rows, w.wv, plan.k, rows(w.qh, w.wk), s, w.wv, w.x, w.wv);
  gemm<Write::add>(c.rows, w.wv, c.rows, rows(w.p1, w.wc), w.v, w.wv, w.x, w.wv, Part::lower_a);
  unpack(w.x, w.wv, c.rows, plan.v, in.o + in.value(c.first, head), plan.hv * plan.v);
}

// w.v = dO, w.x = v. dv = Pᵀ dO + (k∘τ) D.
template <class T>
void value_gradients(const Pass<T>& in, const Chunk& c, int64_t head, const T* ds,
                     ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  scores(w.q, w.k, in.scale, false, w, w.p1);
  to_end(w, w.k, w.kt);
  gemm<Write::set>(c.rows, w.wv, plan.k, rows(w.kt, w.wk), ds, w.wv, w.y, w.wv);
  gemm<Write::add>(c.rows, w.wv, c.rows, columns(w.p1, w.wc), w.v, w.wv, w.y, w.wv, Part::upper_a);
  unpack(w.y, w.wv, c.rows, plan.v, in.dv + in.value(c.first, head), plan.hv * plan.v);
}

// w.p3 = dP.
template <class T>
void score_gradients(const Pass<T>& in, ChannelWorkspace<T>& w) {
  const int64_t wc = w.wc;
  transpose(w.x, w.wv, w.rows, w.wv, w.t, wc);
  gemm<Write::set>(w.rows, wc, in.plan.v, rows(w.v, w.wv), w.t, wc, w.p3, wc, Part::lower_c);
  for (int64_t i = 0; i < w.rows; ++i)
    for (int64_t j = 0; j < wc; ++j) w.p3[i * wc + j] = j <= i ? in.scale * w.p3[i * wc + j] : T(0);
}

template <class T>
void chunk_gradients(const Pass<T>& in, int64_t chunk, int64_t head, ChannelWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk c = plan.chunks[size_t(chunk)];
  const int64_t wk = w.wk, wv = w.wv, size = c.rows * wk, keys = plan.hv * plan.k;
  const int64_t at = in.state(chunk, head), keys_at = in.gate(c.first, head);
  load_chunk(in, c, head, w);
  load_queries(in, c, head, w);
  load_rows(in, in.d_o, c, head, w);
  pack(in.v + in.value(c.first, head), plan.hv * plan.v, c.rows, plan.v, w.x, wv);
  const T* s = dense(in.states + at, plan.v, plan.k, plan.v, w.s, wv);
  const T* ds = dense(in.dstates + at, plan.v, plan.k, plan.v, w.ds, wv);
  if (in.dv) value_gradients(in, c, head, ds, w);
  if (!in.dq && !in.dk && !in.dg) return;
  score_gradients(in, w);

  // 1. Through the states before and after the chunk.
  std::vector<T> reads(static_cast<size_t>(size)), kept(static_cast<size_t>(size));
  transpose(s, wv, plan.k, wv, w.st, wk);
  gemm<Write::set>(c.rows, wk, plan.v, rows(w.v, wv), w.st, wk, w.dq, wk);
  from_start(w, w.dq, in.scale, w.dq);
  transpose(ds, wv, plan.k, wv, w.st, wk);
  gemm<Write::set>(c.rows, wk, plan.v, rows(w.x, wv), w.st, wk, w.r, wk);
  to_end(w, w.r, w.r);
  for (int64_t i = 0; i < size; ++i) {
    reads[size_t(i)] = w.q[i] * w.dq[i];
    kept[size_t(i)] = w.k[i] * w.r[i];
  }
  std::vector<T> carry(static_cast<size_t>(wk));
  for (int64_t d = 0; d < plan.k; ++d)
    carry[size_t(d)] = w.total[d] * dot(s + d * wv, ds + d * wv, wv);

  // 2. Inside the chunk.
  for (int64_t i = 0; i < size; ++i) {
    w.qh[i] = w.q[i] * w.head[i];
    w.kt[i] = w.k[i] * w.tail[i];
    w.off_row[i] = w.off_col[i] = 0;
  }
  std::fill(w.across, w.across + w.subs * wk, T(0));
  for (int64_t I = 0; I < w.subs; ++I) {
    for (int64_t J = 0; J < I; ++J) pair_gradients<false>(I, J, w);
    diagonal_gradients<false>(I, w);
  }
  if (in.dq) unpack(w.dq, wk, c.rows, plan.k, in.dq + keys_at, keys);
  if (in.dk) unpack(w.r, wk, c.rows, plan.k, in.dk + keys_at, keys);
  if (!in.dg) return;
  decay_gradient(reads.data(), kept.data(), carry.data(), w, w.qh);
  unpack(w.qh, wk, c.rows, plan.k, in.dg + keys_at, keys);
}

template <class T>
T* pointer(const Tensor& t) {
  return t ? t.data<T>() : nullptr;
}

template <class T>
void forward(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& o,
             const Tensor& ht) {
  const Plan plan(p);
  std::vector<T> totals(plan.chunks.size() * size_t(plan.hv * plan.k));
  Pass<T> in(plan, p, saved);
  in.h0 = pointer<T>(p.h0), in.o = o.data<T>(), in.ht = pointer<T>(ht), in.totals = totals.data();
  run_pass<ChannelWorkspace, T>(
      plan, [&](int64_t chunk, int64_t head, auto& w) { write_chunk(in, chunk, head, w); },
      [&](int64_t n, int64_t head, int64_t v0, int64_t cols, auto& w) {
        scan(in, in.states, in.h0, in.ht, false, n, head, v0, cols, w);
      },
      [&](int64_t chunk, int64_t head, auto& w) { read_chunk(in, chunk, head, w); });
}

template <class T>
void backward(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& d_o,
              const Tensor& dht, const DeltaRuleGradients& grads) {
  const Plan plan(p);
  const Tensor dstates = Tensor::empty(saved.states.shape(), p.v.dtype());
  const auto per_value_head = [&](const Tensor& t) {
    return !t || plan.group == 1 ? t : Tensor::empty({plan.tokens, plan.hv, plan.k}, p.v.dtype());
  };
  const Tensor dq = per_value_head(grads.dq), dk = per_value_head(grads.dk);
  std::vector<T> totals(plan.chunks.size() * size_t(plan.hv * plan.k));
  Pass<T> in(plan, p, saved);
  in.d_o = d_o.data<T>(), in.dht = pointer<T>(dht), in.dstates = dstates.data<T>();
  in.totals = totals.data();
  in.dq = pointer<T>(dq), in.dk = pointer<T>(dk), in.dv = pointer<T>(grads.dv);
  in.dg = pointer<T>(grads.dg), in.dh0 = pointer<T>(grads.dh0);
  run_pass<ChannelWorkspace, T>(
      plan, [&](int64_t chunk, int64_t head, auto& w) { read_gradient(in, chunk, head, w); },
      [&](int64_t n, int64_t head, int64_t v0, int64_t cols, auto& w) {
        scan(in, in.dstates, in.dht, in.dh0, true, n, head, v0, cols, w);
      },
      [&](int64_t chunk, int64_t head, auto& w) { chunk_gradients(in, chunk, head, w); });
  if (plan.group == 1) return;
  if (dq) sum_groups(plan, dq.data<T>(), grads.dq.data<T>());
  if (dk) sum_groups(plan, dk.data<T>(), grads.dk.data<T>());
}

template <class T>
void step(const DeltaRuleProblem& p, const Tensor& state, const Tensor& o) {
  const int64_t b = p.batch(), hv = p.value_heads(), kk = p.key_dim(), vv = p.value_dim();
  const int64_t group = hv / p.heads();
#pragma omp parallel for if (b * hv * kk * vv > 32768)
  for (int64_t i = 0; i < b * hv; ++i) {
    const T *p_q = p.q.data<T>() + i / group * kk, *p_k = p.k.data<T>() + i / group * kk;
    const T *p_v = p.v.data<T>() + i * vv, *g = p.g.data<T>() + i * kk;
    T *s = state.data<T>() + i * kk * vv, *p_o = o.data<T>() + i * vv;
    T read[256] = {};
    for (int64_t r = 0; r < kk; ++r) {
      const T alpha = vexp(g[r]);
      for (int64_t j = 0; j < vv; ++j) {
        const T next = alpha * s[r * vv + j] + p_k[r] * p_v[j];
        s[r * vv + j] = next;
        read[j] += p_q[r] * next;
      }
    }
    for (int64_t j = 0; j < vv; ++j) p_o[j] = T(p.scale) * read[j];
  }
}

}  // namespace

DeltaRuleSaved channel_linear_attention_fwd(const DeltaRuleProblem& p, const Tensor& o,
                                            const Tensor& ht) {
  check_decays("gated_linear_attention", p.g);
  DeltaRuleSaved saved;
  saved.states =
      Tensor::empty({p.chunks(), p.value_heads(), p.key_dim(), p.value_dim()}, p.v.dtype());
  if (p.v.dtype() == DType::f64)
    forward<double>(p, saved, o, ht);
  else
    forward<float>(p, saved, o, ht);
  return saved;
}

void channel_linear_attention_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                                  const Tensor& d_o, const Tensor& dht,
                                  const DeltaRuleGradients& grads) {
  if (p.v.dtype() == DType::f64)
    backward<double>(p, saved, d_o, dht, grads);
  else
    backward<float>(p, saved, d_o, dht, grads);
}

void channel_linear_attention_step(const DeltaRuleProblem& p, const Tensor& state,
                                   const Tensor& o) {
  check_decays("gated_linear_attention_step", p.g.select(1, 0));
  if (p.v.dtype() == DType::f64)
    step<double>(p, state, o);
  else
    step<float>(p, state, o);
}

namespace {
template <class F>
void visit(DType t, F&& f) {
  t == DType::f64 ? f.template operator()<double>() : f.template operator()<float>();
}
}  // namespace

void shared_key(const Tensor& g, const Tensor& k) {
  visit(g.dtype(), [&]<class T>() {
    const T* x = g.data<T>();
    T* y = k.data<T>();
#pragma omp parallel for if (g.numel() > 16384)
    for (int64_t i = 0; i < g.numel(); ++i) y[i] = -std::expm1(x[i]);
  });
}

void shared_key_bwd(const Tensor& g, const Tensor& dk, const Tensor& dg) {
  visit(g.dtype(), [&]<class T>() {
    const T *x = g.data<T>(), *d = dk.data<T>();
    T* y = dg.data<T>();
#pragma omp parallel for if (g.numel() > 16384)
    for (int64_t i = 0; i < g.numel(); ++i) y[i] -= vexp(x[i]) * d[i];
  });
}

}  // namespace ebb::cpu
