// Backward pass of state-memory attention on the CPU, in the notation of its header; the weights w
// are computed again from the saved log-sum-exp. Two passes, each number by one thread in one
// order:
//   1. over (tile of tokens, block of heads): dq, de, dc, dgate, the heads that share one in order
//   2. over (memory, head): dΔ, the tiles that see it in order
// A block of heads is the smallest that no shared vector crosses.
#include <cmath>
#include <numeric>

#include "ops/state_memory_attention_cpu.h"

namespace ebb::cpu {
namespace {

using namespace state_memory;

template <class T>
struct Pass : Arrays<T> {
  using Arrays<T>::Arrays;
  const T *r = nullptr, *lse = nullptr, *dy = nullptr;
  T *dq = nullptr, *de = nullptr, *dc = nullptr, *dgate = nullptr, *dmemories = nullptr;
  int64_t blocks = 1;
};

// What a tile's tokens have alike for all memories of one head.
template <class T>
struct Upstream {
  T delta[kTile], lse[kTile], weight[kTile], dlogit[kTile];
};

// w.q, w.e, w.c, w.y = dR, δ and lse.
template <class T>
void load_upstream(const Pass<T>& in, const Tile& t, int64_t head, Workspace<T>& w,
                   Upstream<T>& u) {
  const Plan& plan = in.plan;
  load_tile(in, t, head, w);
  for (int64_t i = 0; i < t.rows; ++i) {
    const int64_t at = plan.row(t.first + i, head);
    const T gate = in.gate_of(t.first + i, head);
    T sum = 0;
    for (int64_t j = 0; j < plan.p; ++j) {
      const T d = gate * in.dy[at + j];
      w.y[i * w.wp + j] = d;
      sum += d * in.r[at + j];
    }
    std::fill(w.y + i * w.wp + plan.p, w.y + (i + 1) * w.wp, T(0));
    u.delta[i] = sum;
    u.lse[i] = in.lse[(t.first + i) * plan.heads + head];
  }
}

// w and scale·dℓ from the logits' and the values' products: ℓ_i = scale x_i·y_i, V·dR = a_i·b_i. A
// tile that sees one memory gives it weight 1 whatever its logit.
template <class T>
void weights(const Pass<T>& in, const Tile& t, const T* x, const T* y, int64_t width_l, const T* a,
             const T* b, int64_t width_v, Upstream<T>& u) {
  const bool alone = t.memory - t.first_memory == 1;
  for (int64_t i = 0; i < t.rows; ++i) {
    const T logit = in.scale * dot(x + i * width_l, y + i * width_l, width_l);
    u.weight[i] = std::exp(logit - u.lse[i]);
    const T value = dot(a + i * width_v, b + i * width_v, width_v);
    u.dlogit[i] = alone ? T(0) : in.scale * u.weight[i] * (value - u.delta[i]);
  }
}

// sum_i += factor_i x_i
template <class T>
void add_rows(const T* x, const T* factor, int64_t rows, int64_t width, T* sum) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < width; ++j) sum[i * width + j] += factor[i] * x[i * width + j];
}

// Sums over a block's heads, one matrix of a tile's rows for each shared vector.
template <class T>
struct Sums {
  Sums(const Plan& plan, int64_t blocks, const Workspace<T>& w)
      : q_size(plan.tile_rows * w.wn),
        e_size(plan.tile_rows * w.wp),
        q(size_t(plan.q_heads / blocks * q_size)),
        c(size_t(plan.c_heads / blocks * q_size)),
        e(size_t(plan.e_heads / blocks * e_size)) {}
  void clear() {
    for (auto* x : {&q, &c, &e}) std::fill(x->begin(), x->end(), T(0));
  }
  int64_t q_size, e_size;
  std::vector<T> q, c, e;
};

// 1a. Adds one head's terms to dq̂, dê, dc.
template <class T>
void token_terms(const Pass<T>& in, const Tile& t, int64_t head, T* dq, T* de, T* dc,
                 Workspace<T>& w, Upstream<T>& u) {
  const Plan& plan = in.plan;
  load_upstream(in, t, head, w, u);
  for (int64_t m = t.first_memory; m < t.memory; ++m) {
    const T* s = load_memory(in, m, head, w);
    transpose(s, w.wp, plan.n, w.wp, w.st, w.wn);
    gemm<Write::set>(t.rows, w.wn, plan.p, rows(w.y, w.wp), w.st, w.wn, w.b, w.wn);    // Δ dR
    gemm<Write::set>(t.rows, w.wn, plan.p, rows(w.e, w.wp), w.st, w.wn, w.x_n, w.wn);  // Δ ê
    times_rho(in, m, head, w.x_n, t.rows, w, w.a);
    weights(in, t, w.q, w.a, w.wn, w.c, w.b, w.wn, u);
    add_rows(w.b, u.weight, t.rows, w.wn, dc);
    add_rows(w.a, u.dlogit, t.rows, w.wn, dq);
    if (!in.de) continue;
    times_rho(in, m, head, w.q, t.rows, w, w.a);
    scale_rows(w.a, w.wn, t.rows, [&](int64_t i) { return u.dlogit[i]; });
    gemm<Write::add>(t.rows, w.wp, plan.n, rows(w.a, w.wn), s, w.wp, de, w.wp);
  }
}

// 1b. The gradients of a tile's tokens, heads of one block.
template <class T>
void token_gradients(const Pass<T>& in, const Tile& t, int64_t block, Sums<T>& sums,
                     Workspace<T>& w) {
  const Plan& plan = in.plan;
  const int64_t per_block = plan.heads / in.blocks, first = block * per_block;
  sums.clear();
  Upstream<T> u;
  for (int64_t head = first; head < first + per_block; ++head) {
    const auto part = [&](std::vector<T>& all, int64_t of, int64_t size) {
      return all.data() + (plan.shared(head, of) - plan.shared(first, of)) * size;
    };
    if (t.memory > t.first_memory)
      token_terms(in, t, head, part(sums.q, plan.q_heads, sums.q_size),
                  part(sums.e, plan.e_heads, sums.e_size), part(sums.c, plan.c_heads, sums.q_size),
                  w, u);
    if (!in.dgate) continue;
    const bool opens = head % (plan.heads / plan.gate_heads) == 0;
    for (int64_t i = 0; i < t.rows; ++i) {
      const int64_t at = plan.row(t.first + i, head);
      T sum = 0;
      for (int64_t j = 0; j < plan.p; ++j) sum += in.r[at + j] * in.dy[at + j];
      T& out = in.dgate[(t.first + i) * plan.gate_heads + plan.shared(head, plan.gate_heads)];
      out = opens ? sum : out + sum;
    }
  }
  const auto write = [&](const std::vector<T>& all, int64_t of, int64_t size, int64_t width,
                         auto&& each) {
    for (int64_t g = 0; g < of / in.blocks; ++g)
      for (int64_t i = 0; i < t.rows; ++i)
        each((t.first + i) * of + block * (of / in.blocks) + g, all.data() + g * size + i * width);
  };
  if (in.dq)
    write(sums.q, plan.q_heads, sums.q_size, w.wn,
          [&](int64_t row, const T* d) { in.q.backward(row, d, in.dq + row * plan.n); });
  if (in.de)
    write(sums.e, plan.e_heads, sums.e_size, w.wp,
          [&](int64_t row, const T* d) { in.e.backward(row, d, in.de + row * plan.p); });
  if (in.dc)
    write(sums.c, plan.c_heads, sums.q_size, w.wn,
          [&](int64_t row, const T* d) { std::copy(d, d + plan.n, in.dc + row * plan.n); });
}

// 2. dΔ of one memory and head.
template <class T>
void memory_gradient(const Pass<T>& in, int64_t m, int64_t head, Workspace<T>& w) {
  const Plan& plan = in.plan;
  const Readers& readers = plan.readers[size_t(m)];
  T* out = in.dmemories + plan.memory(m, head);
  if (readers.begin == readers.end) {
    std::fill(out, out + plan.n * plan.p, T(0));
    return;
  }
  Upstream<T> u;
  std::fill(w.g1, w.g1 + w.wn * w.wp, T(0));  // Σ w c dRᵀ
  std::fill(w.g2, w.g2 + w.wn * w.wp, T(0));  // X
  const T* s = load_memory(in, m, head, w);
  for (int64_t k = readers.begin; k < readers.end; ++k) {
    const Tile& t = plan.tiles[size_t(k)];
    load_upstream(in, t, head, w, u);
    times_rho(in, m, head, w.q, t.rows, w, w.a);
    gemm<Write::set>(t.rows, w.wp, plan.n, rows(w.a, w.wn), s, w.wp, w.x_p, w.wp);
    gemm<Write::set>(t.rows, w.wp, plan.n, rows(w.c, w.wn), s, w.wp, w.v, w.wp);
    weights(in, t, w.x_p, w.e, w.wp, w.v, w.y, w.wp, u);
    scale_rows(w.c, w.wn, t.rows, [&](int64_t i) { return u.weight[i]; });
    scale_rows(w.q, w.wn, t.rows, [&](int64_t i) { return u.dlogit[i]; });
    gemm<Write::add>(plan.n, w.wp, t.rows, columns(w.c, w.wn), w.y, w.wp, w.g1, w.wp);
    gemm<Write::add>(plan.n, w.wp, t.rows, columns(w.q, w.wn), w.e, w.wp, w.g2, w.wp);
  }
  for (int64_t i = 0; i < plan.n; ++i) {
    const T rho = in.rho[size_t((m * plan.heads + head) * plan.n + i)];
    const T *x = w.g2 + i * w.wp, *row = s + i * w.wp;
    T mean = 0;  // of X∘Δ̂
    if (!in.q.inverse.empty())
      for (int64_t j = 0; j < plan.p; ++j) mean += x[j] * row[j] * rho / T(plan.p);
    for (int64_t j = 0; j < plan.p; ++j)
      out[i * plan.p + j] = w.g1[i * w.wp + j] + rho * (x[j] - rho * row[j] * mean);
  }
}

template <class T>
void backward(const StateMemoryProblem& p, const Tensor& r, const Tensor& lse, const Tensor& d_o,
              const StateMemoryGradients& grads) {
  const Plan plan(p);
  const auto pointer = [](const Tensor& t) { return t ? t.data<T>() : nullptr; };
  Pass<T> in(plan, p);
  in.r = r.data<T>(), in.lse = lse.data<T>(), in.dy = d_o.data<T>();
  in.dq = pointer(grads.dq), in.de = pointer(grads.de), in.dc = pointer(grads.dc);
  in.dgate = pointer(grads.dgate), in.dmemories = pointer(grads.dmemories);
  in.blocks =
      std::gcd(std::gcd(plan.q_heads, plan.e_heads), std::gcd(plan.c_heads, plan.gate_heads));
  const int64_t tokens =
      in.dq || in.de || in.dc || in.dgate ? int64_t(plan.tiles.size()) * in.blocks : 0;
  const int64_t memories = in.dmemories ? int64_t(plan.readers.size()) * plan.heads : 0;
#pragma omp parallel if (tokens + memories > 1)
  {
    Workspace<T> w(plan);
    Sums<T> sums(plan, in.blocks, w);
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = tokens - 1; i >= 0; --i)
      token_gradients(in, plan.tiles[size_t(i / in.blocks)], i % in.blocks, sums, w);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < memories; ++i) memory_gradient(in, i / plan.heads, i % plan.heads, w);
  }
}

}  // namespace

void state_memory_attention_bwd(const StateMemoryProblem& p, const Tensor& r, const Tensor& lse,
                                const Tensor& d_o, const StateMemoryGradients& grads) {
  p.q.dtype() == DType::f64 ? backward<double>(p, r, lse, d_o, grads)
                            : backward<float>(p, r, lse, d_o, grads);
}

}  // namespace ebb::cpu
