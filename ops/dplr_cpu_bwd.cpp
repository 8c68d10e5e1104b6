// Backward pass of dplr on the CPU; notation of ops/dplr.h and ops/dplr_cpu.h. With D = dL/dS⁺,
// τ = e^{G_n−G} and X = dL/dY (models.md 5):
//   X = A_rbᵀ dO + (b∘τ) D        Z = (I − A_ab)⁻ᵀ X
//   D ← Diag(e^{G_n}) D + scale (r∘e^G)ᵀ dO + (a∘e^{Gx})ᵀ Z
//   dV = A_rkᵀ dO + (k∘τ) D + A_akᵀ Z
//   dA_rk, dA_rb = scale tril(dO {V,Y}ᵀ)      dA_ak, dA_ab = stril(Z {V,Y}ᵀ)
// from which dr, da, dk, db follow row by row, besides what they give to and take from the states.
// dw_t sums exactly the terms whose exponent contains w_t, so it stays accurate where the decay is
// near zero.
#include <cmath>

#include "ops/channel_reverse_cpu.h"
#include "ops/dplr_cpu.h"

namespace ebb::cpu {
namespace {

using namespace low_rank;

template <class T>
struct Pass : DplrArrays<T> {
  using DplrArrays<T>::DplrArrays;
  const T *d_o = nullptr, *dht = nullptr;
  T *z = nullptr, *dstates = nullptr;  // X, then Z [H,tokens,V]; D after each chunk
  T *dr = nullptr, *dw = nullptr, *dk = nullptr, *dv = nullptr;
  T *da = nullptr, *db = nullptr, *dh0 = nullptr;
  T* z_of(int64_t t, int64_t head) const {
    return z + (head * this->plan.tokens + t) * this->plan.v;
  }
};

// The part of X that does not come through the state.
template <class T>
void local_values(const Pass<T>& in, int64_t chunk, int64_t head, DplrWorkspace<T>& w) {
  const Chunk c = in.plan.chunks[size_t(chunk)];
  load_chunk(in, c, head, w);
  load_reads(in, c, head, w);
  scores(w.r, w.b, in.scale, false, w, w.p1);
  put_local_values(in, c, head, w, in.z_of(c.first, head));
}

// Columns [v0, v0+cols) of D and Z, from the last chunk to the first.
template <class T>
void reverse_scan(const Pass<T>& in, int64_t n, int64_t head, int64_t v0, int64_t cols,
                  DplrWorkspace<T>& w) {
  scan_back<Write::add, T>(in, n, head, v0, cols, w, [&](const Chunk& c) {
    load_chunk(in, c, head, w);
    load_reads(in, c, head, w);
    to_end(w, w.b, w.bt);
    from_start(w, w.r, in.scale, w.rh);
    from_start(w, w.a, T(1), w.ah);
    return ReverseStep<T>{w.bt, w.rh, w.start, in.inverse_of(c.first, head),
                          in.z_of(c.first, head)};
  });
}

// The score gradients of one chunk: w.p1 = dA_rk, w.p2 = dA_rb, w.p3 = dA_ak, w.p4 = dA_ab, the
// latter two shifted as a is. Adds to w.dr, w.da, w.dk and w.db what sub-chunk I reads of J < I,
// and to the parts of dw whose exponents span that pair: from a row of I on, up to a column of J,
// and of the sub-chunks between whole. w.rh = r∘head, w.ah = a∘head, w.kt = k∘tail, w.bt = b∘tail.
template <class T>
void pair_gradients(int64_t I, int64_t J, DplrWorkspace<T>& w) {
  const int64_t wk = w.wk, first = w.first(I), n = w.end(I) - first, column = w.first(J);
  const int64_t m = w.end(J) - column, block = first * w.wc + column;
  exp_of_sums(w, J + 1, I, w.gap);
  const auto rows_of = [&](const T* with_k, const T* with_b, const T* x, T* dx) {
    gemm<Write::set>(n, wk, m, rows(with_k + block, w.wc), w.kt + column * wk, wk, w.x1, wk);
    gemm<Write::add>(n, wk, m, rows(with_b + block, w.wc), w.bt + column * wk, wk, w.x1, wk);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t d = 0; d < wk; ++d) {
        const int64_t at = (first + i) * wk + d;
        const T g = w.head[at] * w.gap[d] * w.x1[i * wk + d], z = x[at] * g;
        dx[at] += g;
        w.off_row[at] += z;
        for (int64_t a = J + 1; a < I; ++a) w.across[a * wk + d] += z;
      }
  };
  const auto columns_of = [&](const T* with_r, const T* with_a, const T* x, T* dx) {
    gemm<Write::set>(m, wk, n, columns(with_r + block, w.wc), w.rh + first * wk, wk, w.x1, wk);
    gemm<Write::add>(m, wk, n, columns(with_a + block, w.wc), w.ah + first * wk, wk, w.x1, wk);
    for (int64_t j = 0; j < m; ++j)
      for (int64_t d = 0; d < wk; ++d) {
        const int64_t at = (column + j) * wk + d;
        const T g = w.tail[at] * w.gap[d] * w.x1[j * wk + d];
        dx[at] += g;
        w.off_col[at] += x[at] * g;
      }
  };
  rows_of(w.p1, w.p2, w.r, w.dr);
  rows_of(w.p3, w.p4, w.a, w.da);
  columns_of(w.p1, w.p3, w.k, w.dk);
  columns_of(w.p2, w.p4, w.b, w.db);
}

// The same inside sub-chunk I, channel by channel; w.cross_t: the terms with i >= t > j.
template <class T>
void diagonal_gradients(int64_t I, DplrWorkspace<T>& w) {
  const int64_t wk = w.wk, first = w.first(I), n = w.end(I) - first;
  const auto add = [](T* p, Vec<T> x) { store(p, load(p) + x); };
  for (int64_t d = 0; d < wk; d += kLanes<T>) {
    const auto at = [&](int64_t i) { return (first + i) * wk + d; };
    for (int64_t i = 0; i < n; ++i) store(w.cross + at(i), Vec<T>{});
    for (int64_t j = 0; j < n; ++j) {
      const Vec<T> k = load(w.k + at(j)), b = load(w.b + at(j));
      Vec<T> decay = Vec<T>{} + T(1), dk{}, db{}, z[kSub];
      for (int64_t i = j; i < n; ++i) {
        if (i > j) decay *= load(w.alpha + at(i));
        const int64_t score = (first + i) * w.wc + first + j;
        const Vec<T> r = load(w.r + at(i)) * decay, a = load(w.a + at(i)) * decay;
        add(w.dr + at(i), (w.p1[score] * k + w.p2[score] * b) * decay);
        add(w.da + at(i), (w.p3[score] * k + w.p4[score] * b) * decay);
        const Vec<T> to_k = w.p1[score] * r + w.p3[score] * a;
        const Vec<T> to_b = w.p2[score] * r + w.p4[score] * a;
        dk += to_k, db += to_b;
        z[i] = to_k * k + to_b * b;
      }
      add(w.dk + at(j), dk);
      add(w.db + at(j), db);
      Vec<T> sum{};
      for (int64_t t = n - 1; t > j; --t) {
        sum += z[t];
        add(w.cross + at(t), sum);
      }
    }
  }
}

// out = factor·left·transposed on and below the diagonal, zero above; rows from
// `filled` on are zero. transposed [width,wc].
template <class T>
void lower_scores(const T* left, T factor, int64_t filled, const T* transposed, int64_t width,
                  DplrWorkspace<T>& w, T* out) {
  const int64_t wc = w.wc;
  gemm<Write::set>(filled, wc, width, rows(left, w.wv), transposed, wc, out, wc, Part::lower_c);
  for (int64_t i = 0; i < w.rows; ++i)
    for (int64_t j = 0; j < wc; ++j)
      out[i * wc + j] = i < filled && j <= i ? factor * out[i * wc + j] : T(0);
}

// What the chunk of one head needs besides its inputs, [rows,wv] and [K,wv].
template <class T>
struct ChunkValues {
  const T *y, *z, *s, *ds;
};

// dV of one chunk, in w.x's place: A_rkᵀ dO + (k∘τ) D + A_akᵀ Z.
template <class T>
void value_gradient(const Pass<T>& in, const Chunk& c, int64_t head, const T* d_o,
                    const ChunkValues<T>& u, T* out, DplrWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t wv = w.wv, n = c.rows;
  scores(w.r, w.k, in.scale, false, w, w.p1);
  scores(w.a, w.k, T(1), false, w, w.p2);
  to_end(w, w.k, w.kt);
  gemm<Write::set>(n, wv, n, columns(w.p1, w.wc), d_o, wv, out, wv, Part::upper_a);
  gemm<Write::add>(n - 1, wv, n - 1, columns(w.p2, w.wc), u.z + wv, wv, out, wv, Part::upper_a);
  gemm<Write::add>(n, wv, plan.k, rows(w.kt, w.wk), u.ds, wv, out, wv);
  unpack(out, wv, n, plan.v, in.dv + in.value(c.first, head), plan.h * plan.v);
}

// Gradients that pass through the states, into w.dr, w.da, w.dstart, w.dk, w.db; reads, kept and
// carry: their shares of dw. w.v holds V.
template <class T>
void state_gradients(const Pass<T>& in, int64_t n, const T* d_o, const ChunkValues<T>& u, T* reads,
                     T* kept, T* carry, DplrWorkspace<T>& w) {
  const int64_t wk = w.wk, wv = w.wv, key_dim = in.plan.k, value_dim = in.plan.v;
  transpose(u.s, wv, key_dim, wv, w.st, wk);
  gemm<Write::set>(n, wk, value_dim, rows(d_o, wv), w.st, wk, w.dr, wk);
  gemm<Write::set>(1, wk, value_dim, rows(u.z, wv), w.st, wk, w.dstart, wk);
  gemm<Write::set>(n - 1, wk, value_dim, rows(u.z + wv, wv), w.st, wk, w.da, wk);
  std::fill(w.da + (n - 1) * wk, w.da + n * wk, T(0));
  from_start(w, w.dr, in.scale, w.dr);
  from_start(w, w.da, T(1), w.da);
  transpose(u.ds, wv, key_dim, wv, w.st, wk);
  gemm<Write::set>(n, wk, value_dim, rows(w.v, wv), w.st, wk, w.dk, wk);
  gemm<Write::set>(n, wk, value_dim, rows(u.y, wv), w.st, wk, w.db, wk);
  to_end(w, w.dk, w.dk);
  to_end(w, w.db, w.db);
  for (int64_t i = 0; i < n * wk; ++i) {
    reads[i] = w.r[i] * w.dr[i] + w.a[i] * w.da[i];
    kept[i] = w.k[i] * w.dk[i] + w.b[i] * w.db[i];
  }
  for (int64_t d = 0; d < key_dim; ++d)
    carry[d] = w.total[d] * dot(u.s + d * wv, u.ds + d * wv, wv);
}

// Gradients that stay inside the chunk, on top of those.
template <class T>
void local_gradients(const Pass<T>& in, const T* d_o, const ChunkValues<T>& u,
                     DplrWorkspace<T>& w) {
  const int64_t n = w.rows, wv = w.wv, size = n * w.wk;
  transpose(w.v, wv, n, wv, w.t, w.wc);
  lower_scores(d_o, in.scale, n, w.t, in.plan.v, w, w.p1);
  lower_scores(u.z + wv, T(1), n - 1, w.t, in.plan.v, w, w.p3);
  transpose(u.y, wv, n, wv, w.t, w.wc);
  lower_scores(d_o, in.scale, n, w.t, in.plan.v, w, w.p2);
  lower_scores(u.z + wv, T(1), n - 1, w.t, in.plan.v, w, w.p4);
  for (int64_t i = 0; i < size; ++i) {
    w.rh[i] = w.r[i] * w.head[i], w.ah[i] = w.a[i] * w.head[i];
    w.kt[i] = w.k[i] * w.tail[i], w.bt[i] = w.b[i] * w.tail[i];
    w.off_row[i] = w.off_col[i] = 0;
  }
  std::fill(w.across, w.across + w.subs * w.wk, T(0));
  for (int64_t I = 0; I < w.subs; ++I) {
    for (int64_t J = 0; J < I; ++J) pair_gradients(I, J, w);
    diagonal_gradients(I, w);
  }
}

template <class T>
void chunk_gradients(const Pass<T>& in, int64_t chunk, int64_t head, DplrWorkspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk c = plan.chunks[size_t(chunk)];
  const int64_t wk = w.wk, wv = w.wv, n = c.rows, at = in.key(c.first, head), keys = in.keys();
  const int64_t value = in.value(c.first, head), state = in.state(chunk, head);
  std::vector<T> upstream(static_cast<size_t>(n * wv)), y_rows(upstream.size());
  T* d_o = upstream.data();
  load_chunk(in, c, head, w);
  load_reads(in, c, head, w);
  pack(in.d_o + value, plan.h * plan.v, n, plan.v, d_o, wv);
  pack(in.v + value, plan.h * plan.v, n, plan.v, w.v, wv);
  const ChunkValues<T> u{dense(in.values_of(c.first, head), plan.v, n, plan.v, y_rows.data(), wv),
                         dense(in.z_of(c.first, head), plan.v, n, plan.v, w.y, wv),
                         dense(in.states + state, plan.v, plan.k, plan.v, w.s, wv),
                         dense(in.dstates + state, plan.v, plan.k, plan.v, w.ds, wv)};
  if (in.dv) value_gradient(in, c, head, d_o, u, w.x, w);
  std::vector<T> reads(static_cast<size_t>(n * wk)), kept(reads.size());
  std::vector<T> carry(static_cast<size_t>(wk));
  state_gradients(in, n, d_o, u, reads.data(), kept.data(), carry.data(), w);
  local_gradients(in, d_o, u, w);
  if (in.dw) {
    decay_gradient(reads.data(), kept.data(), carry.data(), w, w.rh);
    unpack(w.rh, wk, n, plan.k, in.dw + at, keys);
  }
  if (in.dr) unpack(w.dr, wk, n, plan.k, in.dr + at, keys);
  if (in.dk) unpack(w.dk, wk, n, plan.k, in.dk + at, keys);
  if (in.db) unpack(w.db, wk, n, plan.k, in.db + at, keys);
  if (!in.da) return;
  unpack(w.dstart, wk, 1, plan.k, in.da + at, keys);
  if (n > 1) unpack(w.da, wk, n - 1, plan.k, in.da + at + keys, keys);
}

template <class T>
void backward(const DplrProblem& p, const DplrSaved& saved, const Tensor& d_o, const Tensor& dht,
              const DplrGradients& grads) {
  const auto pointer = [](const Tensor& t) { return t ? t.data<T>() : nullptr; };
  const Plan plan(p);
  const Tensor z = Tensor::empty(saved.values.shape(), p.v.dtype());
  const Tensor dstates = Tensor::empty(saved.states.shape(), p.v.dtype());
  Pass<T> in(plan, p, saved);
  in.d_o = pointer(d_o), in.dht = pointer(dht);
  in.z = pointer(z), in.dstates = pointer(dstates);
  in.dr = pointer(grads.dr), in.dw = pointer(grads.dw), in.dk = pointer(grads.dk);
  in.dv = pointer(grads.dv), in.da = pointer(grads.da), in.db = pointer(grads.db);
  in.dh0 = pointer(grads.dh0);
  run_pass<DplrWorkspace, T>(
      plan, [&](int64_t chunk, int64_t head, auto& w) { local_values(in, chunk, head, w); },
      [&](int64_t n, int64_t head, int64_t v0, int64_t cols, auto& w) {
        reverse_scan(in, n, head, v0, cols, w);
      },
      [&](int64_t chunk, int64_t head, auto& w) { chunk_gradients(in, chunk, head, w); });
}

}  // namespace

void dplr_bwd(const DplrProblem& p, const DplrSaved& saved, const Tensor& d_o, const Tensor& dht,
              const DplrGradients& grads) {
  if (p.v.dtype() == DType::f64)
    backward<double>(p, saved, d_o, dht, grads);
  else
    backward<float>(p, saved, d_o, dht, grads);
}

}  // namespace ebb::cpu
