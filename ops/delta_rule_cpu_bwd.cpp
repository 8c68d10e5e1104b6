// Backward pass of the gated delta rule on the CPU; notation of ops/delta_rule_cpu.cpp.
// Backward, D = dL/dS⁺ (adjoint form of models.md 3.2, without a gradient of the inverse):
//   X = Aᵀ (Pᵀ dO + τ K D)    dV = β X    D ← γ_n D + Qᵀ(scale γ dO) − Kᵀ(γ β X)
//   dP = tril(dO V'ᵀ)         dM = −stril(X V'ᵀ)
// dg_t collects exactly the terms whose exponent contains g_t, instead of differences of larger
// sums: with Z_ij = dP_ij P_ij + dM_ij M_ij it is Σ_{i>=t>j} Z_ij + (reads of S at i >= t)
// + (writes kept from j < t) + γ_n <S, D>. So it is accurate even where the decay is near zero.
#include <cmath>

#include "ops/common.h"
#include "ops/delta_rule_cpu.h"

namespace ebb::cpu {
namespace {

using namespace delta;

template <class T>
using Pass = BackwardPass<Arrays, T>;

// X = Pᵀ dO: the part of V's gradient that does not come through the state.
template <class T>
void local_values(const Pass<T>& in, int64_t chunk, int64_t head, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk c = plan.chunks[size_t(chunk)];
  load_keys(in, c, head, w);
  load_queries(in, c, head, w);
  scores(in, c, w);
  pack(in.d_o + in.value(c.first, head), plan.hv * plan.v, c.rows, plan.v, w.v, w.wv);
  gemm<Write::set>(c.rows, w.wv, c.rows, columns(w.p1, w.wc), w.v, w.wv, w.x, w.wv, Part::upper_a);
  unpack(w.x, w.wv, c.rows, plan.v, in.x_of(c.first, head), plan.v);
}

// Columns [v0, v0+cols) of D and X, from the last chunk to the first.
template <class T>
void reverse_scan(const Pass<T>& in, int64_t n, int64_t head, int64_t v0, int64_t cols,
                  Workspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t width = padded<T>(cols), state = (n * plan.hv + head) * plan.k * plan.v + v0;
  if (in.dht)
    pack(in.dht + state, plan.v, plan.k, cols, w.ds, width);
  else
    std::fill(w.ds, w.ds + plan.k * width, T(0));
  for (int64_t i = plan.first_chunk[size_t(n) + 1] - 1; i >= plan.first_chunk[size_t(n)]; --i) {
    const Chunk c = plan.chunks[size_t(i)];
    const Gates<T>& gate = w.gates;
    unpack(w.ds, width, plan.k, cols, in.dstates + in.state(i, head) + v0, plan.v);
    load_keys(in, c, head, w);
    load_queries(in, c, head, w);
    pack(in.d_o + in.value(c.first, head) + v0, plan.hv * plan.v, c.rows, cols, w.v, width);
    pack(in.x_of(c.first, head) + v0, plan.v, c.rows, cols, w.y, width);
    gemm<Write::set>(c.rows, width, plan.k, rows(w.k, w.wk), w.ds, width, w.x, width);
    for (int64_t r = 0; r < c.rows; ++r)
      for (int64_t j = 0; j < width; ++j)
        w.y[r * width + j] = std::fma(gate.tail[r], w.x[r * width + j], w.y[r * width + j]);
    gemm<Write::set>(c.rows, width, c.rows, columns(in.a_of(c.first, head), plan.c), w.y, width,
                     w.x, width, Part::upper_a);
    unpack(w.x, width, c.rows, cols, in.x_of(c.first, head) + v0, plan.v);
    scale_rows(w.v, width, c.rows, [&](int64_t r) { return in.scale * gate.gamma[r]; });
    scale_rows(w.x, width, c.rows, [&](int64_t r) { return gate.gamma[r] * gate.beta[r]; });
    scale_rows(w.ds, width, plan.k, [&](int64_t) { return gate.total; });
    gemm<Write::add>(plan.k, width, c.rows, columns(w.q, w.wk), w.v, width, w.ds, width);
    gemm<Write::subtract>(plan.k, width, c.rows, columns(w.k, w.wk), w.x, width, w.ds, width);
  }
  if (in.dh0) unpack(w.ds, width, plan.k, cols, in.dh0 + state, plan.v);
}

// w.p3 = scale·dP∘Γ, w.p4 = dM∘Γ (without β) and w.p1 = dP∘P + dM∘M below the diagonal, from dO, V'
// and X [n,wv].
template <class T>
void score_gradients(const Pass<T>& in, const Chunk& c, const T* d_o, const T* values, const T* x,
                     Workspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t wc = w.wc;
  transpose(values, w.wv, c.rows, w.wv, w.t, wc);
  gemm<Write::set>(c.rows, wc, plan.k, rows(w.q, w.wk), w.kt, wc, w.p1, wc, Part::lower_c);
  gemm<Write::set>(c.rows, wc, plan.k, rows(w.k, w.wk), w.kt, wc, w.p2, wc, Part::lower_c);
  gemm<Write::set>(c.rows, wc, plan.v, rows(d_o, w.wv), w.t, wc, w.p3, wc, Part::lower_c);
  gemm<Write::set>(c.rows, wc, plan.v, rows(x, w.wv), w.t, wc, w.p4, wc, Part::lower_c);
  T decay[128];
  for (int64_t i = 0; i < c.rows; ++i) {
    w.gates.decay_row(i, wc, decay);
    T *p1 = w.p1 + i * wc, *p2 = w.p2 + i * wc, *p3 = w.p3 + i * wc, *p4 = w.p4 + i * wc;
    const T beta = w.gates.beta[i];
    for (int64_t j = 0; j < wc; ++j) {
      p3[j] = j <= i ? in.scale * decay[j] * p3[j] : T(0);
      p4[j] = j < i ? -decay[j] * p4[j] : T(0);
      p1[j] = j < i ? p3[j] * p1[j] + beta * p4[j] * p2[j] : T(0);
    }
  }
}

// Gradients of one chunk and head, all of V at once.
template <class T>
void chunk_gradients(const Pass<T>& in, int64_t chunk, int64_t head, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk c = plan.chunks[size_t(chunk)];
  const Gates<T>& gate = w.gates;
  const int64_t wk = w.wk, wv = w.wv, wc = w.wc, values = plan.hv * plan.v, keys = plan.hv * plan.k;
  const int64_t gates_at = c.first * plan.hv + head, keys_at = gates_at * plan.k;
  load_keys(in, c, head, w);
  load_queries(in, c, head, w);
  pack(in.d_o + in.value(c.first, head), values, c.rows, plan.v, w.v, wv);
  const T* v_new = dense(in.values_of(c.first, head), plan.v, c.rows, plan.v, w.x, wv);
  const T* x = dense(in.x_of(c.first, head), plan.v, c.rows, plan.v, w.y, wv);
  const int64_t at = in.state(chunk, head);
  const T* s = dense(in.states + at, plan.v, plan.k, plan.v, w.s, wv);
  const T* ds = dense(in.dstates + at, plan.v, plan.k, plan.v, w.ds, wv);
  score_gradients(in, c, w.v, v_new, x, w);

  // 1. Through the entering state: dq_i = scale γ_i S dO_i, p_i = −γ_i S X_i (of β_i k_i).
  T reads[128], kept[128];
  transpose(s, wv, plan.k, wv, w.st, wk);
  gemm<Write::set>(c.rows, wk, plan.v, rows(w.v, wv), w.st, wk, w.dq, wk);
  gemm<Write::set>(c.rows, wk, plan.v, rows(x, wv), w.st, wk, w.dk, wk);
  scale_rows(w.dq, wk, c.rows, [&](int64_t i) { return in.scale * gate.gamma[i]; });
  scale_rows(w.dk, wk, c.rows, [&](int64_t i) { return -gate.gamma[i]; });
  for (int64_t i = 0; i < c.rows; ++i)
    reads[i] =
        dot(w.q + i * wk, w.dq + i * wk, wk) + gate.beta[i] * dot(w.k + i * wk, w.dk + i * wk, wk);

  // 2. dq and p inside the chunk; dβ_i = k_i·p_i + v_i·X_i; dv.
  if (in.dq) {
    gemm<Write::add>(c.rows, wk, c.rows, rows(w.p3, wc), w.k, wk, w.dq, wk, Part::lower_a);
    unpack(w.dq, wk, c.rows, plan.k, in.dq + keys_at, keys);
  }
  gemm<Write::add>(c.rows, wk, c.rows, rows(w.p4, wc), w.k, wk, w.dk, wk, Part::lower_a);
  if (in.dbeta) {
    pack(in.v + in.value(c.first, head), values, c.rows, plan.v, w.v, wv);
    for (int64_t i = 0; i < c.rows; ++i)
      in.dbeta[gates_at + i * plan.hv] =
          dot(w.k + i * wk, w.dk + i * wk, wk) + dot(w.v + i * wv, x + i * wv, wv);
  }
  if (in.dv)
    for (int64_t i = 0; i < c.rows; ++i)
      for (int64_t j = 0; j < plan.v; ++j)
        in.dv[in.value(c.first + i, head) + j] = gate.beta[i] * x[i * wv + j];

  // 3. r_j, the gradient of k_j as a key that was written: τ_j D V'_j and the chunk's columns.
  T* r = w.dq;
  transpose(ds, wv, plan.k, wv, w.st, wk);
  gemm<Write::set>(c.rows, wk, plan.v, rows(v_new, wv), w.st, wk, r, wk);
  scale_rows(r, wk, c.rows, [&](int64_t i) { return gate.tail[i]; });
  for (int64_t i = 0; i < c.rows; ++i) kept[i] = dot(w.k + i * wk, r + i * wk, wk);
  if (in.dk) {
    scale_rows(w.k, wk, c.rows, [&](int64_t i) { return gate.beta[i]; });
    gemm<Write::add>(c.rows, wk, c.rows, columns(w.p3, wc), w.q, wk, r, wk, Part::upper_a);
    gemm<Write::add>(c.rows, wk, c.rows, columns(w.p4, wc), w.k, wk, r, wk, Part::upper_a);
    for (int64_t i = 0; i < c.rows; ++i)
      for (int64_t j = 0; j < wk; ++j) r[i * wk + j] += gate.beta[i] * w.dk[i * wk + j];
    unpack(r, wk, c.rows, plan.k, in.dk + keys_at, keys);
  }
  if (in.dg)
    decay_gradient(w.p1, wc, c.rows, reads, kept, gate.total * dot(s, ds, plan.k * wv),
                   in.dg + gates_at, plan.hv);
}

template <class T>
void backward(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& d_o,
              const Tensor& dht, const DeltaRuleGradients& grads) {
  run_backward<Arrays, Workspace, T>(p, saved, d_o, dht, grads, local_values<T>, reverse_scan<T>,
                                     chunk_gradients<T>);
}

}  // namespace

void gated_delta_rule_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& d_o,
                          const Tensor& dht, const DeltaRuleGradients& grads) {
  if (p.v.dtype() == DType::f64)
    backward<double>(p, saved, d_o, dht, grads);
  else
    backward<float>(p, saved, d_o, dht, grads);
}

}  // namespace ebb::cpu
