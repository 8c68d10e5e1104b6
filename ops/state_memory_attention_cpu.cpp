// Forward pass of state-memory attention on the CPU: OpenMP over (tile of tokens, head), products
// of cache-sized matrices (small_gemm.h), a running softmax over the memories in their order. Every
// number is computed by one thread in one order.
#include "ops/state_memory_attention_cpu.h"

#include <cmath>
#include <limits>

namespace ebb::cpu {
namespace {

using namespace state_memory;

template <class T>
struct Results {
  T *o, *r, *lse;  // o may be null
  const T* base;   // may be null
};

// Per token of a tile: the largest logit so far and Σ e^(ℓ − largest).
template <class T>
struct Softmax {
  T largest[kTile], total[kTile];
  explicit Softmax(int64_t rows) {
    std::fill(largest, largest + rows, -std::numeric_limits<T>::infinity());
    std::fill(total, total + rows, T(0));
  }
  // Takes in one more logit: {factor of what was summed before, weight of the new}.
  std::pair<T, T> add(int64_t i, T logit) {
    const T before = largest[i];
    // A NaN stays in `largest`, so that everything after it is NaN too.
    largest[i] = logit > before || std::isnan(logit) ? logit : before;
    const T keep = before == largest[i] ? T(1) : std::exp(before - largest[i]);
    const T weight = std::exp(logit - largest[i]);
    total[i] = total[i] * keep + weight;
    return {keep, weight};
  }
};

template <class T>
void attend(const Arrays<T>& in, const Tile& t, int64_t head, const Results<T>& out,
            Workspace<T>& w) {
  const Plan& plan = in.plan;
  Softmax<T> softmax(t.rows);
  std::fill(w.sum, w.sum + t.rows * w.wp, T(0));
  if (t.memory > t.first_memory) load_tile(in, t, head, w);
  for (int64_t m = t.first_memory; m < t.memory; ++m) {
    const T* s = load_memory(in, m, head, w);
    times_rho(in, m, head, w.q, t.rows, w, w.a);
    gemm<Write::set>(t.rows, w.wp, plan.n, rows(w.a, w.wn), s, w.wp, w.x_p, w.wp);
    gemm<Write::set>(t.rows, w.wp, plan.n, rows(w.c, w.wn), s, w.wp, w.v, w.wp);
    for (int64_t i = 0; i < t.rows; ++i) {
      const T logit = in.scale * dot(w.x_p + i * w.wp, w.e + i * w.wp, w.wp);
      const auto [keep, weight] = softmax.add(i, logit);
      for (int64_t j = 0; j < w.wp; ++j)
        w.sum[i * w.wp + j] = w.sum[i * w.wp + j] * keep + weight * w.v[i * w.wp + j];
    }
  }
  const bool sees = t.memory > t.first_memory;
  for (int64_t i = 0; i < t.rows; ++i) {
    const int64_t at = plan.row(t.first + i, head);
    const T inverse = sees ? T(1) / softmax.total[i] : T(0);
    out.lse[(t.first + i) * plan.heads + head] =
        sees ? softmax.largest[i] + std::log(softmax.total[i]) : T(0);
    for (int64_t j = 0; j < plan.p; ++j) out.r[at + j] = w.sum[i * w.wp + j] * inverse;
    if (!out.o) continue;
    const T gate = in.gate_of(t.first + i, head);
    for (int64_t j = 0; j < plan.p; ++j)
      out.o[at + j] = (out.base ? out.base[at + j] : T(0)) + gate * out.r[at + j];
  }
}

template <class T>
void forward(const StateMemoryProblem& p, const Tensor& o, const Tensor& r, const Tensor& lse) {
  const Plan plan(p);
  const Arrays<T> in(plan, p);
  const Results<T> out{o ? o.data<T>() : nullptr, r.data<T>(), lse.data<T>(),
                       p.base ? p.base.data<T>() : nullptr};
  // The last tiles see most: first, so that no thread is left with one at the end.
  const int64_t work = int64_t(plan.tiles.size()) * plan.heads;
#pragma omp parallel if (work > 1)
  {
    Workspace<T> w(plan);
#pragma omp for schedule(dynamic)
    for (int64_t i = work - 1; i >= 0; --i)
      attend(in, plan.tiles[size_t(i / plan.heads)], i % plan.heads, out, w);
  }
}

}  // namespace

void state_memory_attention_fwd(const StateMemoryProblem& p, const Tensor& o, const Tensor& r,
                                const Tensor& lse) {
  p.q.dtype() == DType::f64 ? forward<double>(p, o, r, lse) : forward<float>(p, o, r, lse);
}

}  // namespace ebb::cpu
