#include "ops/token_shift.h"

#include <omp.h>

#include <algorithm>

#include "ops/common.h"

namespace ebb {

namespace cpu {
namespace {

constexpr int64_t kRuns = 128;  // at most so many partial sums of μ's gradients

template <class F>
void visit(DType t, F&& f) {
  t == DType::f64 ? f.template operator()<double>() : f.template operator()<float>();
}

// fn(run, f0, f1) over fixed runs of tokens, whatever the number of threads.
template <class F>
int64_t for_runs(int64_t tokens, const F& fn) {
  const int64_t length = std::max<int64_t>(32, (tokens + kRuns - 1) / kRuns);
  const int64_t runs = (tokens + length - 1) / length;
#pragma omp parallel for if (runs > 1)
  for (int64_t r = 0; r < runs; ++r) fn(r, r * length, std::min(tokens, (r + 1) * length));
  return runs;
}

// The token before f, or what stands before the sequence.
template <class T>
const T* before(const TokenShiftArgs& a, const SequenceCursor& s, int64_t f, const T* zeros) {
  if (f > s.begin) return a.x.t.data<T>() + (f - 1) * a.x.stride;
  return a.last ? a.last.data<T>() + s.n * a.x.width : zeros;
}

// Gradient of the token before f that comes from f's outputs: Σ_m μ_m ⊙ d^m_f, or d_f.
template <class T>
void pull_back(const TokenShiftArgs& a, const std::vector<Tensor>& dy, int64_t f, T* out) {
  const int64_t d = a.x.width;
  for (int64_t c = 0; c < d; ++c) out[c] = 0;
  for (size_t m = 0; m < dy.size(); ++m) {
    const T* g = dy[m].data<T>() + f * d;
    const T* mu = a.mu.empty() ? nullptr : a.mu[m].data<T>();
    for (int64_t c = 0; c < d; ++c) out[c] += mu ? mu[c] * g[c] : g[c];
  }
}

}  // namespace

void token_shift_fwd(const TokenShiftArgs& a, const std::vector<Tensor>& out) {
  visit(a.x.t.dtype(), [&]<class T>() {
    const int64_t d = a.x.width;
    const std::vector<T> zeros(static_cast<size_t>(d));
    for_runs(a.x.count, [&](int64_t, int64_t f0, int64_t f1) {
      SequenceCursor s = a.first;
      s.seek(f0);
      for (int64_t f = f0; f < f1; ++f) {
        if (f == s.end) s.next();
        const T *now = a.x.t.data<T>() + f * a.x.stride, *old = before(a, s, f, zeros.data());
        for (size_t m = 0; m < out.size(); ++m) {
          T* y = out[m].data<T>() + f * d;
          if (a.mu.empty()) {
            for (int64_t c = 0; c < d; ++c) y[c] = old[c] - now[c];
          } else {
            const T* mu = a.mu[m].data<T>();
            for (int64_t c = 0; c < d; ++c) y[c] = now[c] + (old[c] - now[c]) * mu[c];
          }
        }
      }
    });
  });
}

void token_shift_last(const TokenShiftArgs& a, const Tensor& out) {
  visit(out.dtype(), [&]<class T>() {
    const int64_t d = a.x.width;
    const std::vector<T> zeros(static_cast<size_t>(d));
    for (int64_t n = 0; n < a.first.count; ++n) {
      SequenceCursor s = a.first;
      s.select(n);
      std::copy_n(before(a, s, s.end, zeros.data()), d, out.data<T>() + n * d);
    }
  });
}

void token_shift_bwd(const TokenShiftArgs& a, const std::vector<Tensor>& dy, const Tensor& dfinal,
                     const TokenShiftGrads& g) {
  visit(a.x.t.dtype(), [&]<class T>() {
    const int64_t d = a.x.width, mixes = int64_t(g.dmu.size());
    const std::vector<T> zeros(static_cast<size_t>(d));
    std::vector<T> partial(size_t(kRuns * mixes * d));
    const int64_t runs = for_runs(a.x.count, [&](int64_t run, int64_t f0, int64_t f1) {
      SequenceCursor s = a.first;
      s.seek(f0);
      std::vector<T> later(static_cast<size_t>(d)), own(static_cast<size_t>(d));
      for (int64_t f = f0; f < f1; ++f) {
        if (f == s.end) s.next();
        const T *now = a.x.t.data<T>() + f * a.x.stride, *old = before(a, s, f, zeros.data());
        for (int64_t m = 0; m < mixes; ++m) {
          const T* gm = dy[size_t(m)].data<T>() + f * d;
          T* sum = partial.data() + (run * mixes + m) * d;
          for (int64_t c = 0; c < d; ++c) sum[c] += (old[c] - now[c]) * gm[c];
        }
        if (!g.dx) continue;
        T* out = g.dx.data<T>() + f * d;
        const bool end = f + 1 == s.end;
        const T* extra = end && dfinal ? dfinal.data<T>() + s.n * d : zeros.data();
        pull_back(a, dy, f, own.data());
        if (!end) pull_back(a, dy, f + 1, later.data());
        for (int64_t c = 0; c < d; ++c)
          out[c] = (end ? extra[c] : later[size_t(c)]) - own[size_t(c)];
        for (size_t m = 0; !a.mu.empty() && m < dy.size(); ++m)
          for (int64_t c = 0; c < d; ++c) out[c] += dy[m].data<T>()[f * d + c];
      }
    });
    for (int64_t m = 0; m < mixes; ++m) {
      T* out = g.dmu[size_t(m)].data<T>();
      std::fill(out, out + d, T(0));
      for (int64_t r = 0; r < runs; ++r)
        for (int64_t c = 0; c < d; ++c) out[c] += partial[size_t((r * mixes + m) * d + c)];
    }
    if (!g.dlast) return;
    for (int64_t n = 0; n < a.first.count; ++n) {
      SequenceCursor s = a.first;
      s.select(n);
      T* out = g.dlast.data<T>() + n * d;
      if (s.begin < s.end)
        pull_back(a, dy, s.begin, out);
      else
        std::copy_n(dfinal ? dfinal.data<T>() + n * d : zeros.data(), d, out);
    }
  });
}

}  // namespace cpu

namespace {

struct Result {
  std::vector<Var> out;
  Var last;
};

// What is recorded: inputs x, last, then μ (one [M,D] when `stacked`); saved x, last, offsets, μ.
void backward(BackwardContext& ctx, int64_t batch, int64_t time, int mixes, bool stacked,
              const std::vector<Shape>& shapes) {
  const Tensor &x = ctx.saved(0), &offsets = ctx.saved(2);
  const DType wide = accumulate_type(x.dtype());
  TokenShiftArgs a{
      .x = as_rows(x), .last = ctx.saved(1), .first = sequence_cursor(offsets, batch, time)};
  const int64_t d = a.x.width;
  TokenShiftGrads g;
  bool wanted = false;  // any of μ's gradients: one pass makes them all
  for (size_t i = 0; i < shapes.size(); ++i) wanted = wanted || ctx.needs(2 + int(i));
  const Tensor dmu = wanted ? Tensor::empty({mixes, d}, wide, x.device()) : Tensor();
  for (int m = 0; m < mixes; ++m) {
    a.mu.push_back(ctx.saved(3 + m));
    if (wanted) g.dmu.push_back(dmu.select(0, m));
  }
  if (ctx.needs(0)) g.dx = Tensor::empty(x.shape(), x.dtype(), x.device());
  if (ctx.needs(1)) g.dlast = Tensor::empty({a.first.count, d}, wide, x.device());
  const int outputs = std::max(mixes, 1);
  std::vector<Tensor> dy;
  for (int m = 0; m < outputs; ++m) dy.push_back(ctx.dy(m).contiguous());
  const Tensor dfinal = ctx.has_dy(outputs) ? ctx.dy(outputs).to(wide).contiguous() : Tensor();
  if (kWithCuda && x.on_cuda())
    gpu::token_shift_bwd(a, dy, dfinal, g);
  else
    cpu::token_shift_bwd(a, dy, dfinal, g);
  if (g.dx) ctx.grad(0, g.dx);
  if (g.dlast) ctx.grad(1, g.dlast);
  for (size_t i = 0; i < shapes.size(); ++i)
    if (ctx.needs(2 + int(i)))
      ctx.grad(2 + int(i), (stacked ? dmu : g.dmu[i].contiguous()).view(shapes[i]));
}

TokenShiftArgs arguments(const char* op, const Var& xv, const std::vector<Var>& mu, bool stacked,
                         const Var& last, const TokenShiftOptions& options) {
  const Tensor& x = xv.value();
  check_defined(op, "x", x);
  check(x.dim() == 3, "{}: x is {}, want [B,T,D]", op, x.shape());
  check_compute_dtype(op, "x", x);
  check_same_device(op, x, {&last.value()});
  options.layout.check_covers(op, x.size(0), x.size(1), x.device());
  const int64_t d = x.size(2);
  TokenShiftArgs a{.x = as_rows(x),
                   .first = sequence_cursor(options.layout.device_offsets(), x.size(0), x.size(1))};
  if (last) {
    check_shape(op, "last", last.value(), {a.first.count, d});
    check(last.dtype() == x.dtype() || last.dtype() == DType::f32, "{}: last is {}, x is {}", op,
          last.dtype(), x.dtype());
    a.last = last.value().to(accumulate_type(x.dtype())).contiguous();
  }
  for (const Var& m : mu) {
    check_defined(op, "mu", m.value());
    check_same_device(op, x, {&m.value()});
    if (stacked)
      check(m.dim() == 2 && m.size(1) == d, "{}: mu is {}, x is {}; want [M,{}]", op, m.shape(),
            x.shape(), d);
    else
      check(m.numel() == d, "{}: mu is {}, x is {}; want {} values", op, m.shape(), x.shape(), d);
    const Tensor rows = parameter_values(op, "mu", m.value(), x).view({-1, d});
    for (int64_t i = 0; i < rows.size(0); ++i) a.mu.push_back(rows.select(0, i));
  }
  return a;
}

Result run(const char* op, const Var& xv, const std::vector<Var>& mu, bool stacked, const Var& last,
           const TokenShiftOptions& options) {
  const OpScope scope(op);
  const Tensor& x = xv.value();
  const TokenShiftArgs a = arguments(op, xv, mu, stacked, last, options);
  const int mixes = int(a.mu.size());
  check(mu.empty() || (mixes >= 1 && mixes <= kMaxMixes), "{}: {} mixes, want 1..{}", op, mixes,
        kMaxMixes);
  std::vector<Tensor> out;
  for (int m = 0; m < std::max(mixes, 1); ++m)
    out.push_back(Tensor::empty(x.shape(), x.dtype(), x.device()));
  Tensor ends;
  if (options.last)
    ends = Tensor::empty({a.first.count, x.size(2)}, accumulate_type(x.dtype()), x.device());
  if (kWithCuda && x.on_cuda()) {
    gpu::token_shift_fwd(a, out);
    if (ends) gpu::token_shift_last(a, ends);
  } else {
    cpu::token_shift_fwd(a, out);
    if (ends) cpu::token_shift_last(a, ends);
  }
  if (ends) ends = ends.to(last ? last.dtype() : x.dtype());
  std::vector<Var> inputs{xv, last};
  std::vector<Shape> shapes;
  for (const Var& m : mu) {
    inputs.push_back(m);
    shapes.push_back(m.shape());
  }
  std::vector<Tensor> saved{a.x.t, a.last, options.layout.device_offsets()};
  saved.insert(saved.end(), a.mu.begin(), a.mu.end());
  out.push_back(ends);
  std::vector<Var> vars = record(op, inputs, std::move(saved), std::move(out),
                                 [=, batch = x.size(0), time = x.size(1)](BackwardContext& ctx) {
                                   backward(ctx, batch, time, mixes, stacked, shapes);
                                 });
  Result r{.out = std::move(vars), .last = {}};
  r.last = r.out.back();
  r.out.pop_back();
  return r;
}

}  // namespace

TokenShift token_shift(const Var& x, const Var& last, const TokenShiftOptions& options) {
  const Result r = run("token_shift", x, {}, false, last, options);
  return {r.out[0], r.last};
}

TokenShiftMix token_shift_mix(const Var& x, const Var& mu, const Var& last,
                              const TokenShiftOptions& options) {
  Result r = run("token_shift_mix", x, {mu}, true, last, options);
  return {std::move(r.out), r.last};
}

TokenShiftMix token_shift_mix(const Var& x, const std::vector<Var>& mu, const Var& last,
                              const TokenShiftOptions& options) {
  check(!mu.empty(), "token_shift_mix: no mu given");
  Result r = run("token_shift_mix", x, mu, false, last, options);
  return {std::move(r.out), r.last};
}

Cost token_shift_cost(Pass pass, int64_t tokens, int64_t channels, int64_t mixes, DType dtype) {
  const double n = double(tokens) * double(channels), size = double(item_size(dtype));
  const double m = double(mixes);
  if (mixes == 0) return {2 * n * size, n};
  if (pass == Pass::forward) return {(1 + m) * n * size, n * (1 + 2 * m)};
  return {(2 + m) * n * size, n * (3 + 5 * m)};
}

}  // namespace ebb
