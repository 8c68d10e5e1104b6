// Backward pass of gated linear attention on the CPU; notation of gated_linear_attention_cpu.cpp.
// Backward (models.md 4.1), D = dL/dS⁺, E = the part of D that only the current run of
// memory_chunk tokens sees (from dcontributions), M what that run had written before the chunk:
//   U = (scale q kᵀ∘Γ)ᵀ dO + τ k (D+E)       dv = w U + skip dO     dw_j = v_j·U_j
//   Z = scale (dO vᵀ)∘Γ·diag(w)              dq = Z k + scale γ dO Sᵀ
//   dk = Zᵀ q + τ w v (D+E)ᵀ                 D ← γ_n D + (scale γ q)ᵀ dO      E ← γ_n E
// dg_t collects the terms whose exponent contains g_t (recurrence_cpu.h), the carry being
// γ_n (<S,D> + <M,E>). dq and dk are summed over the heads of a group in order.
#include "ops/gated_linear_attention_cpu.h"

namespace ebb::cpu {
namespace {

using namespace linear_attention;

template <class T>
struct Pass : Arrays<T> {
  using Arrays<T>::Arrays;
  const T *states = nullptr, *partials = nullptr;
  const T *d_o = nullptr, *dht = nullptr, *dcontributions = nullptr;
  T *dstates = nullptr, *druns = nullptr;  // D and E after each chunk; druns may be null
  T* totals = nullptr;                     // [chunks,H]: γ_n
  T *dq = nullptr, *dk = nullptr, *dv = nullptr, *dg = nullptr, *dh0 = nullptr, *dweight = nullptr;
  double* dskip = nullptr;  // [chunks,H]
};

// w.y = dO of one chunk and head.
template <class T>
void load_upstream(const Pass<T>& in, const Chunk& c, int64_t head, Workspace<T>& w) {
  pack(in.d_o + in.plan.value(c.first, head), in.plan.heads * in.plan.v, c.rows, in.plan.v, w.y,
       w.wv);
}

// 1. What the reads of a chunk add to the gradient of its entering state, (scale γ q)ᵀ dO; γ_n.
template <class T>
void read_gradient(const Pass<T>& in, int64_t chunk, int64_t group, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk& c = plan.chunks[size_t(chunk)];
  pack(in.q + plan.key(c.first, group), plan.groups * plan.k, c.rows, plan.k, w.q, w.wk);
  for (int64_t r = 0; r < plan.per_group; ++r) {
    const int64_t head = group * plan.per_group + r;
    w.decay.read(in.g + plan.gate(c.first, head), plan.heads, c.rows);
    load_upstream(in, c, head, w);
    scale_rows(w.y, w.wv, c.rows, [&](int64_t i) { return in.scale * w.decay.gamma[i]; });
    gemm<Write::set>(plan.k, w.wv, c.rows, columns(w.q, w.wk), w.y, w.wv, w.ds, w.wv);
    unpack(w.ds, w.wv, plan.k, plan.v, in.dstates + plan.state(chunk, head), plan.v);
    in.totals[chunk * plan.heads + head] = w.decay.total;
  }
}

// 2. Elements [begin, end) of D and E of one sequence and head, from the last chunk to the first.
template <class T>
void reverse_scan(const Pass<T>& in, int64_t n, int64_t head, int64_t begin, int64_t end) {
  constexpr int64_t kPiece = 2048;
  const Plan& plan = in.plan;
  T d[kPiece] = {}, e[kPiece] = {};
  const int64_t size = end - begin, row = (n * plan.heads + head) * plan.state_size() + begin;
  if (in.dht) std::copy(in.dht + row, in.dht + row + size, d);
  for (int64_t i = plan.first_chunk[size_t(n) + 1] - 1; i >= plan.first_chunk[size_t(n)]; --i) {
    const RunChunk& c = plan.chunks[size_t(i)];
    const int64_t at = plan.state(i, head) + begin;
    const T total = in.totals[i * plan.heads + head];
    if (in.druns) {
      if (c.ends) {
        const T* run = in.dcontributions + plan.state(c.memory, head) + begin;
        std::copy(run, run + size, e);
      }
      std::copy(e, e + size, in.druns + at);
      for (int64_t j = 0; j < size; ++j) e[j] *= total;
    }
    for (int64_t j = 0; j < size; ++j) {
      const T reads = in.dstates[at + j];
      in.dstates[at + j] = d[j];
      d[j] = std::fma(total, d[j], reads);
    }
  }
  if (in.dh0) std::copy(d, d + size, in.dh0 + row);
}

// w.p1 = scale·q kᵀ∘Γ, w.p2 = Z and w.z = Z∘q kᵀ below the diagonal.
template <class T>
void score_gradients(const Pass<T>& in, const Chunk& c, Workspace<T>& w) {
  const int64_t wc = w.wc;
  transpose(w.v, w.wv, c.rows, w.wv, w.vt, wc);
  gemm<Write::set>(c.rows, wc, in.plan.v, rows(w.y, w.wv), w.vt, wc, w.p2, wc, Part::lower_c);
  T decay[kMaxChunk];
  for (int64_t i = 0; i < c.rows; ++i) {
    w.decay.decay_row(i, c.rows, decay);
    T *p1 = w.p1 + i * wc, *p2 = w.p2 + i * wc, *z = w.z + i * wc;
    const T* qk = w.qk + i * wc;
    for (int64_t j = 0; j <= i; ++j) {
      const T factor = in.scale * decay[j];
      p1[j] = factor * qk[j];
      p2[j] *= factor * w.weight[j];
      z[j] = p2[j] * qk[j];
    }
    for (T* row : {p1, p2, z}) std::fill(row + i + 1, row + wc, T(0));
  }
}

// dv, dw and the chunk's part of dskip. ds: D+E.
template <class T>
void value_gradients(const Pass<T>& in, int64_t chunk, int64_t head, const T* ds, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk& c = plan.chunks[size_t(chunk)];
  if (in.dskip) {
    double sum = 0;
    for (int64_t i = 0; i < c.rows; ++i) sum += double(dot(w.v + i * w.wv, w.y + i * w.wv, w.wv));
    in.dskip[chunk * plan.heads + head] = sum;
  }
  if (!in.dv && !in.dweight) return;
  gemm<Write::set>(c.rows, w.wv, plan.k, rows(w.k, w.wk), ds, w.wv, w.u, w.wv);
  scale_rows(w.u, w.wv, c.rows, [&](int64_t i) { return w.decay.tail[i]; });
  gemm<Write::add>(c.rows, w.wv, c.rows, columns(w.p1, w.wc), w.y, w.wv, w.u, w.wv, Part::upper_a);
  const T skip = in.skip ? in.skip[head] : T(0);
  for (int64_t i = 0; i < c.rows; ++i) {
    const T *u = w.u + i * w.wv, *y = w.y + i * w.wv;
    if (in.dweight) in.dweight[plan.gate(c.first + i, head)] = dot(w.v + i * w.wv, u, w.wv);
    if (!in.dv) continue;
    T* dv = in.dv + plan.value(c.first + i, head);
    for (int64_t j = 0; j < plan.v; ++j) dv[j] = w.weight[i] * u[j] + skip * y[j];
  }
}

// Adds one head's dq and dk to w.dq and w.dk; writes dg.
template <class T>
void key_gradients(const Pass<T>& in, int64_t chunk, int64_t head, const T* s, const T* ds,
                   Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk& c = plan.chunks[size_t(chunk)];
  const int64_t wk = w.wk, wv = w.wv, n = c.rows;
  T reads[kMaxChunk], kept[kMaxChunk];
  const auto add_rows = [&](const T* x, T* sum) {
    for (int64_t i = 0; i < n * wk; ++i) sum[i] += x[i];
  };
  transpose(s, wv, plan.k, wv, w.st, wk);
  gemm<Write::set>(n, wk, plan.v, rows(w.y, wv), w.st, wk, w.x, wk);
  scale_rows(w.x, wk, n, [&](int64_t i) { return in.scale * w.decay.gamma[i]; });
  for (int64_t i = 0; i < n; ++i) reads[i] = dot(w.q + i * wk, w.x + i * wk, wk);
  add_rows(w.x, w.dq);
  gemm<Write::add>(n, wk, n, rows(w.p2, w.wc), w.k, wk, w.dq, wk, Part::lower_a);

  transpose(ds, wv, plan.k, wv, w.st, wk);
  gemm<Write::set>(n, wk, plan.v, rows(w.v, wv), w.st, wk, w.x, wk);
  scale_rows(w.x, wk, n, [&](int64_t i) { return w.decay.tail[i] * w.weight[i]; });
  for (int64_t i = 0; i < n; ++i) kept[i] = dot(w.k + i * wk, w.x + i * wk, wk);
  add_rows(w.x, w.dk);
  gemm<Write::add>(n, wk, n, columns(w.p2, w.wc), w.q, wk, w.dk, wk, Part::upper_a);

  if (!in.dg) return;
  const int64_t at = plan.state(chunk, head);
  const auto inner = [&](const T* a, const T* b) {
    double sum = 0;
    for (int64_t i = 0; i < plan.k; ++i) {
      T row = 0;
      for (int64_t j = 0; j < plan.v; ++j) row += a[at + i * plan.v + j] * b[at + i * plan.v + j];
      sum += double(row);
    }
    return sum;
  };
  double carry = inner(in.states, in.dstates);
  if (in.druns && in.partials) carry += inner(in.partials, in.druns);
  decay_gradient(w.z, w.wc, n, reads, kept, T(double(w.decay.total) * carry),
                 in.dg + plan.gate(c.first, head), plan.heads);
}

// 3. Gradients of one chunk and the heads of one group.
template <class T>
void chunk_gradients(const Pass<T>& in, int64_t chunk, int64_t group, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk& c = plan.chunks[size_t(chunk)];
  load_group(in, c, group, w);
  std::fill(w.dq, w.dq + c.rows * w.wk, T(0));
  std::fill(w.dk, w.dk + c.rows * w.wk, T(0));
  for (int64_t r = 0; r < plan.per_group; ++r) {
    const int64_t head = group * plan.per_group + r, at = plan.state(chunk, head);
    load_head(in, c, head, w);
    load_upstream(in, c, head, w);
    const T* s = dense(in.states + at, plan.v, plan.k, plan.v, w.s, w.wv);
    const T* ds = dense(in.dstates + at, plan.v, plan.k, plan.v, w.ds, w.wv);
    if (in.druns) {
      if (ds != w.ds) pack(in.dstates + at, plan.v, plan.k, plan.v, w.ds, w.wv);
      for (int64_t i = 0; i < plan.k; ++i)
        for (int64_t j = 0; j < plan.v; ++j) w.ds[i * w.wv + j] += in.druns[at + i * plan.v + j];
      ds = w.ds;
    }
    score_gradients(in, c, w);
    value_gradients(in, chunk, head, ds, w);
    if (in.dq || in.dk || in.dg) key_gradients(in, chunk, head, s, ds, w);
  }
  const int64_t keys = plan.key(c.first, group), stride = plan.groups * plan.k;
  if (in.dq) unpack(w.dq, w.wk, c.rows, plan.k, in.dq + keys, stride);
  if (in.dk) unpack(w.dk, w.wk, c.rows, plan.k, in.dk + keys, stride);
}

template <class T>
void backward(const LinearAttentionProblem& p, const LinearAttentionSaved& saved, const Tensor& d_o,
              const Tensor& dht, const Tensor& dcontributions,
              const LinearAttentionGradients& grads) {
  const Plan plan(p);
  const int64_t chunks = int64_t(plan.chunks.size());
  const Tensor dstates = Tensor::empty(saved.states.shape(), p.v.dtype());
  const Tensor druns = dcontributions ? Tensor::empty_like(dstates) : Tensor();
  std::vector<T> totals(size_t(chunks * plan.heads));
  std::vector<double> dskip(grads.dskip ? size_t(chunks * plan.heads) : 0);
  Pass<T> in(plan, p);
  in.states = pointer<T>(saved.states), in.partials = pointer<T>(saved.partials);
  in.d_o = pointer<T>(d_o), in.dht = pointer<T>(dht);
  in.dcontributions = pointer<T>(dcontributions);
  in.dstates = pointer<T>(dstates), in.druns = pointer<T>(druns), in.totals = totals.data();
  in.dq = pointer<T>(grads.dq), in.dk = pointer<T>(grads.dk), in.dv = pointer<T>(grads.dv);
  in.dg = pointer<T>(grads.dg), in.dh0 = pointer<T>(grads.dh0);
  in.dweight = pointer<T>(grads.dweight), in.dskip = grads.dskip ? dskip.data() : nullptr;
  for_chunks<T>(plan, [&](int64_t chunk, int64_t group, Workspace<T>& w) {
    read_gradient(in, chunk, group, w);
  });
  for_states(plan, [&](int64_t n, int64_t head, int64_t begin, int64_t end) {
    reverse_scan(in, n, head, begin, end);
  });
  for_chunks<T>(plan, [&](int64_t chunk, int64_t group, Workspace<T>& w) {
    chunk_gradients(in, chunk, group, w);
  });
  if (!grads.dskip) return;
  for (int64_t h = 0; h < plan.heads; ++h) {
    double sum = 0;
    for (int64_t i = 0; i < chunks; ++i) sum += dskip[size_t(i * plan.heads + h)];
    grads.dskip.data<T>()[h] = T(sum);
  }
}

// E after each chunk of every run: the gradient of its contribution, times the decay up to the
// run's end.
template <class T>
void reverse_runs(const Plan& plan, const T* totals, const T* dcontributions, T* druns) {
  for_states(plan, [&](int64_t n, int64_t head, int64_t begin, int64_t end) {
    T decay = 1;
    for (int64_t i = plan.first_chunk[size_t(n) + 1] - 1; i >= plan.first_chunk[size_t(n)]; --i) {
      const RunChunk& c = plan.chunks[size_t(i)];
      if (c.ends) decay = 1;
      const T* run = dcontributions + plan.state(c.memory, head);
      T* to = druns + plan.state(i, head);
      for (int64_t j = begin; j < end; ++j) to[j] = decay * run[j];
      decay *= totals[i * plan.heads + head];
    }
  });
}

// Adds what E brings the tokens of a chunk and the heads of one group.
template <class T>
void add_run_gradients(const Pass<T>& in, int64_t chunk, int64_t group, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk& c = plan.chunks[size_t(chunk)];
  const int64_t wk = w.wk, wv = w.wv, n = c.rows, stride = plan.groups * plan.k;
  pack(in.k + plan.key(c.first, group), stride, n, plan.k, w.k, wk);
  std::fill(w.dk, w.dk + n * wk, T(0));
  for (int64_t r = 0; r < plan.per_group; ++r) {
    const int64_t head = group * plan.per_group + r, at = plan.state(chunk, head);
    load_head(in, c, head, w);
    const T* e = dense(in.druns + at, plan.v, plan.k, plan.v, w.ds, wv);
    gemm<Write::set>(n, wv, plan.k, rows(w.k, wk), e, wv, w.u, wv);
    transpose(e, wv, plan.k, wv, w.st, wk);
    gemm<Write::set>(n, wk, plan.v, rows(w.v, wv), w.st, wk, w.x, wk);
    double before = 0;  // Σ_{t<s} w_t dw_t of the chunk, and of what its run wrote before
    if (in.partials)
      for (int64_t j = 0; j < plan.state_size(); ++j)
        before += double(w.decay.total) * double(in.partials[at + j]) * double(in.druns[at + j]);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t gate = plan.gate(c.first + i, head);
      const T tail = w.decay.tail[i], factor = tail * w.weight[i];
      const T dweight = tail * dot(w.k + i * wk, w.x + i * wk, wk);
      if (in.dweight) in.dweight[gate] += dweight;
      if (in.dg) in.dg[gate] += T(before);
      before += double(w.weight[i] * dweight);
      for (int64_t j = 0; j < plan.k; ++j) w.dk[i * wk + j] += factor * w.x[i * wk + j];
      if (!in.dv) continue;
      T* dv = in.dv + plan.value(c.first + i, head);
      for (int64_t j = 0; j < plan.v; ++j) dv[j] += factor * w.u[i * wv + j];
    }
  }
  if (!in.dk) return;
  for (int64_t i = 0; i < n; ++i) {
    T* dk = in.dk + plan.key(c.first + i, group);
    for (int64_t j = 0; j < plan.k; ++j) dk[j] += w.dk[i * wk + j];
  }
}

template <class T>
void backward_of_runs(const LinearAttentionProblem& p, const LinearAttentionSaved& saved,
                      const Tensor& dcontributions, const LinearAttentionGradients& grads) {
  const Plan plan(p);
  Pass<T> in(plan, p);
  in.partials = pointer<T>(saved.partials);
  in.dk = pointer<T>(grads.dk), in.dv = pointer<T>(grads.dv);
  in.dg = pointer<T>(grads.dg), in.dweight = pointer<T>(grads.dweight);
  Tensor druns = dcontributions;
  if (plan.split_runs) {
    const int64_t chunks = int64_t(plan.chunks.size());
    druns = Tensor::empty({chunks, plan.heads, plan.k, plan.v}, p.v.dtype());
    std::vector<T> totals(size_t(chunks * plan.heads));
    for_chunks<T>(plan, [&](int64_t chunk, int64_t group, Workspace<T>& w) {
      const Chunk& c = plan.chunks[size_t(chunk)];
      for (int64_t h = group * plan.per_group; h < (group + 1) * plan.per_group; ++h) {
        w.decay.read(in.g + plan.gate(c.first, h), plan.heads, c.rows);
        totals[size_t(chunk * plan.heads + h)] = w.decay.total;
      }
    });
    reverse_runs(plan, totals.data(), dcontributions.data<T>(), druns.data<T>());
  }
  in.druns = druns.data<T>();
  for_chunks<T>(plan, [&](int64_t chunk, int64_t group, Workspace<T>& w) {
    add_run_gradients(in, chunk, group, w);
  });
}

template <class T>
void backward_and_runs(const LinearAttentionProblem& p, const LinearAttentionSaved& saved,
                       const Tensor& d_o, const Tensor& dht, const Tensor& dcontributions,
                       const LinearAttentionGradients& grads) {
  if (!runs_apart(p)) return backward<T>(p, saved, d_o, dht, dcontributions, grads);
  backward<T>(without_runs(p), saved, d_o, dht, {}, grads);
  if (dcontributions) backward_of_runs<T>(p, saved, dcontributions, grads);
}

}  // namespace

void gated_linear_attention_bwd(const LinearAttentionProblem& p, const LinearAttentionSaved& saved,
                                const Tensor& d_o, const Tensor& dht, const Tensor& dcontributions,
                                const LinearAttentionGradients& grads) {
  if (p.v.dtype() == DType::f64)
    backward_and_runs<double>(p, saved, d_o, dht, dcontributions, grads);
  else
    backward_and_runs<float>(p, saved, d_o, dht, dcontributions, grads);
}

}  // namespace ebb::cpu
