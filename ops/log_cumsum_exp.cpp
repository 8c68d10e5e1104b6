#include "ops/log_cumsum_exp.h"

#include <cmath>
#include <limits>

#include "ops/common.h"

namespace ebb {

namespace cpu {
namespace {

constexpr int64_t kColumns = 64;  // channels of one task

// e^z as factor·e^top, in f64 whatever T is.
struct Sum {
  double top = -std::numeric_limits<double>::infinity(), factor = 0;

  static Sum of(double z) {
    Sum s;
    if (z != -std::numeric_limits<double>::infinity()) s.top = z, s.factor = 1;
    return s;
  }
  double log() const { return top + std::log(factor); }
  // Adds e^u; returns {k, g}.
  std::pair<double, double> add(double u) {
    const bool first = factor == 0;
    const double next = std::max(top, u), before = first ? 0 : factor * std::exp(top - next);
    const double added = std::exp(u - next), after = before + added;
    const double k = first ? 1 : added / after;
    const double g = first ? 0 : k < 0.5 ? std::log1p(-k) : top - next + std::log(factor / after);
    top = next, factor = after;
    return {k, g};
  }
};

template <class F>
void visit(DType t, F&& f) {
  t == DType::f64 ? f.template operator()<double>() : f.template operator()<float>();
}

// each(n, first channel, end channel, begin token, end token)
template <class Each>
void for_columns(const LogCumsumExpProblem& p, Each&& each) {
  const int64_t tiles = (p.channels() + kColumns - 1) / kColumns, work = p.sequences() * tiles;
#pragma omp parallel for schedule(dynamic) if (work > 1)
  for (int64_t i = 0; i < work; ++i) {
    const int64_t n = i / tiles, c = i % tiles * kColumns;
    each(n, c, std::min(p.channels(), c + kColumns), p.layout.begin(n, p.time()),
         p.layout.end(n, p.time()));
  }
}

}  // namespace

void log_cumsum_exp_fwd(const LogCumsumExpProblem& p, const Tensor& z) {
  visit(p.g.dtype(), [&]<class T>() {
    const int64_t width = p.channels();
    const T *u = p.u.data<T>(), *z0 = p.z0 ? p.z0.data<T>() : nullptr;
    T *k = p.k.data<T>(), *g = p.g.data<T>(), *last = z ? z.data<T>() : nullptr;
    for_columns(p, [&](int64_t n, int64_t c0, int64_t c1, int64_t begin, int64_t end) {
      Sum sums[kColumns];
      for (int64_t c = c0; c < c1 && z0; ++c) sums[c - c0] = Sum::of(double(z0[n * width + c]));
      for (int64_t t = begin; t < end; ++t)
        for (int64_t c = c0; c < c1; ++c) {
          const auto [key, decay] = sums[c - c0].add(double(u[t * width + c]));
          k[t * width + c] = T(key);
          g[t * width + c] = T(decay);
        }
      for (int64_t c = c0; c < c1 && last; ++c) last[n * width + c] = T(sums[c - c0].log());
    });
  });
}

void log_cumsum_exp_bwd(const LogCumsumExpProblem& p, const LogCumsumExpGradients& grads) {
  visit(p.g.dtype(), [&]<class T>() {
    const auto pointer = [](const Tensor& t) { return t ? t.data<T>() : nullptr; };
    const int64_t width = p.channels();
    const T *k = p.k.data<T>(), *g = p.g.data<T>(), *z0 = pointer(p.z0);
    const T *dk = pointer(grads.dk), *dg = pointer(grads.dg), *dz = pointer(grads.dz);
    T *du = pointer(grads.du), *dz0 = pointer(grads.dz0);
    for_columns(p, [&](int64_t n, int64_t c0, int64_t c1, int64_t begin, int64_t end) {
      for (int64_t c = c0; c < c1; ++c) {
        const bool fresh = !z0 || std::isinf(z0[n * width + c]);
        // What reaches z_t from later tokens: ρ_{t+1} e^{g_{t+1}} + dg_{t+1}.
        double later = dz ? double(dz[n * width + c]) : 0;
        for (int64_t t = end - 1; t >= begin; --t) {
          const int64_t at = t * width + c;
          const double key = double(k[at]), by_key = dk ? double(dk[at]) : 0;
          const double by_decay = !dg || (fresh && t == begin) ? 0 : double(dg[at]);
          const double rho = later - by_decay - key * by_key;
          if (du) du[at] = T(key * (by_key + rho));
          later = rho * std::exp(double(g[at])) + by_decay;
        }
        if (dz0) dz0[n * width + c] = fresh ? T(0) : T(later);
      }
    });
  });
}

}  // namespace cpu

namespace {

constexpr const char* kOp = "log_cumsum_exp";

// Saved: k, g, z0.
void backward(BackwardContext& ctx, const SeqLayout& layout) {
  const LogCumsumExpProblem p{
      .z0 = ctx.saved(2), .k = ctx.saved(0), .g = ctx.saved(1), .layout = layout};
  const auto upstream = [&](int i) { return ctx.has_dy(i) ? ctx.dy(i).contiguous() : Tensor(); };
  const LogCumsumExpGradients grads{.dk = upstream(0),
                                    .dg = upstream(1),
                                    .dz = upstream(2),
                                    .du = ctx.needs(0) ? Tensor::empty_like(p.k) : Tensor(),
                                    .dz0 = ctx.needs(1) ? Tensor::empty_like(p.z0) : Tensor()};
  if (kWithCuda && p.g.on_cuda())
    gpu::log_cumsum_exp_bwd(p, grads);
  else
    cpu::log_cumsum_exp_bwd(p, grads);
  if (grads.du) ctx.grad(0, grads.du);
  if (grads.dz0) ctx.grad(1, grads.dz0);
}

}  // namespace

LogCumsumExp log_cumsum_exp(const Var& uv, const Var& z0v, const LogCumsumExpOptions& options) {
  const OpScope scope(kOp);
  const Tensor &u = uv.value(), &z0 = z0v.value();
  check_defined(kOp, "u", u);
  check_compute_dtype(kOp, "u", u);
  check(u.dim() == 3, "{}: u is {}, want [B,T,C]", kOp, u.shape());
  check_same_device(kOp, u, {&z0});
  options.layout.check_covers(kOp, u.size(0), u.size(1), u.device());
  const DType wide = accumulate_type(u.dtype());
  const Shape rows{options.layout.count(u.size(0)), u.size(2)};
  if (z0) {
    check_shape(kOp, "z0", z0, rows);
    check(z0.dtype() == wide, "{}: z0 is {}, want {} beside {}", kOp, z0.dtype(), wide, u.dtype());
  }
  const LogCumsumExpProblem p{.u = u.contiguous(),
                              .z0 = z0 ? z0.contiguous() : Tensor(),
                              .k = Tensor::empty(u.shape(), u.dtype(), u.device()),
                              .g = Tensor::empty(u.shape(), wide, u.device()),
                              .layout = options.layout};
  const Tensor z = options.want_final ? Tensor::empty(rows, wide, u.device()) : Tensor();
  if (kWithCuda && u.on_cuda())
    gpu::log_cumsum_exp_fwd(p, z);
  else
    cpu::log_cumsum_exp_fwd(p, z);
  const std::vector<Var> out =
      record(kOp, {uv, z0v}, {p.k, p.g, p.z0}, {p.k, p.g, z},
             [layout = options.layout](BackwardContext& ctx) { backward(ctx, layout); });
  return {out[0], out[1], out[2]};
}

Cost log_cumsum_exp_cost(Pass pass, int64_t elements, DType dtype) {
  const double n = double(elements), size = double(item_size(dtype));
  const double wide = double(item_size(accumulate_type(dtype)));
  if (pass == Pass::forward) return {n * (2 * size + wide), n * 8};
  return {n * (3 * size + 2 * wide), n * 8};
}

}  // namespace ebb
