// Gated linear attention on the CPU: chunks of C tokens, products of cache-sized matrices
// (small_gemm.h), OpenMP over (chunk, group) and, along the sequences, over (sequence, head, piece
// of the state). The heads of a group share q kᵀ. Every number is computed by one thread in one
// order. Notation of one chunk of n tokens:
//   γ_i = e^{G_i}, τ_i = e^{G_n−G_i}, Γ_ij = e^{G_i−G_j} (i >= j, else 0), S the entering state
//   P = scale·(q kᵀ∘Γ)·diag(w)    o = P v + scale γ q S + skip v    S⁺ = γ_n S + (τ w k)ᵀ v
#include "ops/gated_linear_attention_cpu.h"

namespace ebb::cpu {
namespace {

using namespace linear_attention;

// 1. What a chunk writes, (τ w k)ᵀ v, and γ_n.
template <class T>
void write_chunk(const Arrays<T>& in, int64_t chunk, int64_t group, T* written, T* totals,
                 Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk& c = plan.chunks[size_t(chunk)];
  pack(in.k + plan.key(c.first, group), plan.groups * plan.k, c.rows, plan.k, w.k, w.wk);
  for (int64_t r = 0; r < plan.per_group; ++r) {
    const int64_t head = group * plan.per_group + r;
    load_head(in, c, head, w);
    scale_rows(w.v, w.wv, c.rows, [&](int64_t i) { return w.decay.tail[i] * w.weight[i]; });
    gemm<Write::set>(plan.k, w.wv, c.rows, columns(w.k, w.wk), w.v, w.wv, w.s, w.wv);
    unpack(w.s, w.wv, plan.k, plan.v, written + plan.state(chunk, head), plan.v);
    totals[chunk * plan.heads + head] = w.decay.total;
  }
}

// 2. Elements [begin, end) of the states of one sequence and head: on entry `states` holds what the
// chunks write, on return the state before each.
template <class T>
struct Scan {
  const Plan& plan;
  const T *totals, *h0;
  T *states, *partials, *contributions, *ht;  // all but states may be null

  void operator()(int64_t n, int64_t head, int64_t begin, int64_t end) const {
    constexpr int64_t kPiece = 2048;
    T s[kPiece] = {}, run[kPiece] = {};  // the state; what the current run wrote
    const int64_t size = end - begin, row = (n * plan.heads + head) * plan.state_size() + begin;
    if (h0) std::copy(h0 + row, h0 + row + size, s);
    for (int64_t i = plan.first_chunk[size_t(n)]; i < plan.first_chunk[size_t(n) + 1]; ++i) {
      const RunChunk& c = plan.chunks[size_t(i)];
      const int64_t at = plan.state(i, head) + begin;
      const T total = totals[i * plan.heads + head];
      if (c.opens) std::fill(run, run + size, T(0));
      if (partials) std::copy(run, run + size, partials + at);
      for (int64_t j = 0; j < size; ++j) {
        const T written = states[at + j];
        states[at + j] = s[j];
        s[j] = std::fma(total, s[j], written);
        run[j] = std::fma(total, run[j], written);
      }
      if (contributions && c.ends)
        std::copy(run, run + size, contributions + plan.state(c.memory, head) + begin);
    }
    if (ht) std::copy(s, s + size, ht + row);
  }
};

// 3. o of one chunk and the heads of one group.
template <class T>
void read_chunk(const Arrays<T>& in, int64_t chunk, int64_t group, const T* states, T* o,
                Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Chunk& c = plan.chunks[size_t(chunk)];
  load_group(in, c, group, w);
  T row[kMaxChunk];
  for (int64_t r = 0; r < plan.per_group; ++r) {
    const int64_t head = group * plan.per_group + r;
    load_head(in, c, head, w);
    for (int64_t i = 0; i < c.rows; ++i) {
      w.decay.decay_row(i, c.rows, row);
      for (int64_t j = 0; j <= i; ++j)
        w.p1[i * w.wc + j] = in.scale * w.qk[i * w.wc + j] * row[j] * w.weight[j];
      std::fill(w.p1 + i * w.wc + i + 1, w.p1 + (i + 1) * w.wc, T(0));
      if (in.skip) w.p1[i * w.wc + i] += in.skip[head];
    }
    const T* s = dense(states + plan.state(chunk, head), plan.v, plan.k, plan.v, w.s, w.wv);
    gemm<Write::set>(c.rows, w.wv, plan.k, rows(w.q, w.wk), s, w.wv, w.y, w.wv);
    scale_rows(w.y, w.wv, c.rows, [&](int64_t i) { return in.scale * w.decay.gamma[i]; });
    gemm<Write::add>(c.rows, w.wv, c.rows, rows(w.p1, w.wc), w.v, w.wv, w.y, w.wv, Part::lower_a);
    unpack(w.y, w.wv, c.rows, plan.v, o + plan.value(c.first, head), plan.heads * plan.v);
  }
}

template <class T>
LinearAttentionSaved forward(const LinearAttentionProblem& p, const Tensor& o, const Tensor& ht,
                             const Tensor& contributions) {
  const Plan plan(p);
  const Arrays<T> in(plan, p);
  const int64_t chunks = int64_t(plan.chunks.size());
  const Shape shape = {chunks, plan.heads, plan.k, plan.v};
  const LinearAttentionSaved saved{Tensor::empty(shape, p.v.dtype()),
                                   plan.split_runs ? Tensor::empty(shape, p.v.dtype()) : Tensor()};
  T *states = saved.states.data<T>(), *p_o = o.data<T>();
  std::vector<T> totals(size_t(chunks * plan.heads));
  for_chunks<T>(plan, [&](int64_t chunk, int64_t group, Workspace<T>& w) {
    write_chunk(in, chunk, group, states, totals.data(), w);
  });
  for_states(plan, Scan<T>{plan, totals.data(), pointer<T>(p.h0), states,
                           pointer<T>(saved.partials), pointer<T>(contributions), pointer<T>(ht)});
  for_chunks<T>(plan, [&](int64_t chunk, int64_t group, Workspace<T>& w) {
    read_chunk(in, chunk, group, states, p_o, w);
  });
  return saved;
}

// The contributions alone, from the runs' own chunks: what those write is a contribution already
// where a run is one chunk. Returns LinearAttentionSaved::partials.
template <class T>
Tensor write_runs(const LinearAttentionProblem& p, const Tensor& contributions) {
  const Plan plan(p);
  const Arrays<T> in(plan, p);
  const int64_t chunks = int64_t(plan.chunks.size());
  const Shape shape = {chunks, plan.heads, plan.k, plan.v};
  const Tensor written = plan.split_runs ? Tensor::empty(shape, p.v.dtype()) : contributions;
  const Tensor partials = plan.split_runs ? Tensor::empty_like(written) : Tensor();
  std::vector<T> totals(size_t(chunks * plan.heads));
  for_chunks<T>(plan, [&](int64_t chunk, int64_t group, Workspace<T>& w) {
    write_chunk(in, chunk, group, written.data<T>(), totals.data(), w);
  });
  if (plan.split_runs)
    for_states(plan, Scan<T>{plan, totals.data(), nullptr, written.data<T>(), partials.data<T>(),
                             contributions.data<T>(), nullptr});
  return partials;
}

template <class T>
LinearAttentionSaved forward_and_runs(const LinearAttentionProblem& p, const Tensor& o,
                                      const Tensor& ht, const Tensor& contributions) {
  if (!runs_apart(p)) return forward<T>(p, o, ht, contributions);
  LinearAttentionSaved saved = forward<T>(without_runs(p), o, ht, {});
  if (contributions) saved.partials = write_runs<T>(p, contributions);
  return saved;
}

template <class T>
void step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& state,
          const LinearAttentionStep& options, const Tensor& o) {
  const int64_t b = v.size(0), h = v.size(1), kk = q.size(2), vv = v.size(2);
  const int64_t per_group = h / q.size(1);
  const T *weight = pointer<T>(options.weight), *skip = pointer<T>(options.skip);
#pragma omp parallel for if (b * h * kk * vv > 32768)
  for (int64_t i = 0; i < b * h; ++i) {
    const T *p_q = q.data<T>() + i / per_group * kk, *p_k = k.data<T>() + i / per_group * kk;
    const T* p_v = v.data<T>() + i * vv;
    T *s = state.data<T>() + i * kk * vv, *p_o = o.data<T>() + i * vv;
    const T alpha = vexp(g.data<T>()[i]);
    T u[256], read[256] = {};
    for (int64_t j = 0; j < vv; ++j) u[j] = weight ? weight[i] * p_v[j] : p_v[j];
    for (int64_t r = 0; r < kk; ++r)
      for (int64_t j = 0; j < vv; ++j) {
        const T next = alpha * s[r * vv + j] + p_k[r] * u[j];
        s[r * vv + j] = next;
        read[j] += p_q[r] * next;
      }
    const T through = skip ? skip[i % h] : T(0);
    for (int64_t j = 0; j < vv; ++j) p_o[j] = T(options.scale) * read[j] + through * p_v[j];
  }
}

}  // namespace

LinearAttentionSaved gated_linear_attention_fwd(const LinearAttentionProblem& p, const Tensor& o,
                                                const Tensor& ht, const Tensor& contributions) {
  check_decays("gated_linear_attention", p.g);
  return p.v.dtype() == DType::f64 ? forward_and_runs<double>(p, o, ht, contributions)
                                   : forward_and_runs<float>(p, o, ht, contributions);
}

void gated_linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                 const Tensor& state, const LinearAttentionStep& options,
                                 const Tensor& o) {
  check_decays("gated_linear_attention_step", g);
  if (v.dtype() == DType::f64)
    step<double>(q, k, v, g, state, options, o);
  else
    step<float>(q, k, v, g, state, options, o);
}

}  // namespace ebb::cpu
