#include "ops/rotary.h"

#include <cmath>

#include "ops/common.h"

namespace ebb {

namespace cpu {
namespace {

// cos and sin of a token's angles, [P] each.
template <class T>
struct Angles {
  explicit Angles(const RotaryProblem& p)
      : theta(size_t(p.width), 0.0), cosine(size_t(p.width), T(1)), sine(size_t(p.width), T(0)) {
    for (int64_t j = 0; j < p.width / 2; ++j)
      theta[size_t(j)] = std::pow(p.base, -2 * double(j) / double(p.width));
  }
  void at(int64_t position) {
    for (size_t j = 0; j < theta.size() / 2; ++j) {
      const double angle = double(position) * theta[j];
      cosine[j] = T(std::cos(angle));
      sine[j] = T(std::sin(angle));
    }
  }
  std::vector<double> theta;
  std::vector<T> cosine, sine;  // the second half is for the cosine form: 1 and 0
};

// each(flat token, angles) for all tokens, in runs of one thread each.
template <class T, class Each>
void for_tokens(const RotaryProblem& p, Each&& each) {
  constexpr int64_t kRun = 32;
  const int64_t tokens = p.x.count, runs = (tokens + kRun - 1) / kRun;
  const int64_t* start = p.start ? p.start.data<int64_t>() : nullptr;
#pragma omp parallel if (runs > 1)
  {
    Angles<T> angles(p);
#pragma omp for
    for (int64_t r = 0; r < runs; ++r) {
      SequenceCursor s = p.first;
      s.seek(r * kRun);
      for (int64_t f = r * kRun; f < std::min(tokens, (r + 1) * kRun); ++f) {
        if (f == s.end) s.next();
        angles.at(f - s.begin + p.offset + (start ? start[s.n] : 0));
        each(f, angles);
      }
    }
  }
}

template <class F>
void visit(DType t, F&& f) {
  t == DType::f64 ? f.template operator()<double>() : f.template operator()<float>();
}

// One head. `sign` −1: the opposite rotation.
template <class T>
void rotate(const T* x, const Angles<T>& a, T sign, int64_t half, T* y) {
  for (int64_t j = 0; j < half; ++j) {
    const T c = a.cosine[size_t(j)], s = sign * a.sine[size_t(j)], low = x[j], high = x[j + half];
    y[j] = low * c - high * s;
    y[j + half] = high * c + low * s;
  }
}

}  // namespace

void rotary_fwd(const RotaryProblem& p, const Tensor& y) {
  visit(y.dtype(), [&]<class T>() {
    const int64_t w = p.width;
    for_tokens<T>(p, [&](int64_t f, const Angles<T>& a) {
      const T* x = p.x.t.data<T>() + f * p.x.stride;
      T* out = y.data<T>() + f * p.heads * w * (p.form == RotaryForm::cosine ? 2 : 1);
      for (int64_t h = 0; h < p.heads; ++h) {
        if (p.form == RotaryForm::rotate) {
          rotate(x + h * w, a, T(1), w / 2, out + h * w);
          continue;
        }
        for (int64_t j = 0; j < w; ++j) {
          out[2 * h * w + j] = x[h * w + j] * a.cosine[size_t(j)];
          out[2 * h * w + w + j] = x[h * w + j] * a.sine[size_t(j)];
        }
      }
    });
  });
}

void rotary_bwd(const RotaryProblem& p, const Tensor& dx) {
  visit(dx.dtype(), [&]<class T>() {
    const int64_t w = p.width;
    for_tokens<T>(p, [&](int64_t f, const Angles<T>& a) {
      const T* dy = p.x.t.data<T>() + f * p.x.stride;
      T* out = dx.data<T>() + f * p.heads * w;
      for (int64_t h = 0; h < p.heads; ++h) {
        if (p.form == RotaryForm::rotate) {
          rotate(dy + h * w, a, T(-1), w / 2, out + h * w);
          continue;
        }
        for (int64_t j = 0; j < w; ++j)
          out[h * w + j] =
              dy[2 * h * w + j] * a.cosine[size_t(j)] + dy[2 * h * w + w + j] * a.sine[size_t(j)];
      }
    });
  });
}

}  // namespace cpu

namespace {

constexpr const char* kOp = "rotary";

// Captured by backward: everything but the tensors.
RotaryProblem problem_of(const Tensor& x, int64_t width, const RotaryOptions& o,
                         const Tensor& start) {
  const Tensor& offsets = o.layout.device_offsets();
  RotaryProblem p{.x = as_rows(x, 2),
                  .heads = x.size(2),
                  .width = width,
                  .base = o.base,
                  .form = o.form,
                  .offset = o.offset,
                  .start = start};
  p.first = sequence_cursor(o.layout.is_packed() ? offsets : Tensor(), x.size(0), x.size(1));
  return p;
}

void backward(BackwardContext& ctx, int64_t width, const RotaryOptions& o) {
  const Tensor dy = ctx.dy(0);
  Shape shape = dy.shape();
  shape[3] = width;
  const Tensor dx = Tensor::empty(shape, dy.dtype(), dy.device());
  if (dx.numel() > 0) {
    const RotaryProblem p = problem_of(dy, width, o, ctx.saved(0));
    if (kWithCuda && dy.on_cuda())
      gpu::rotary_bwd(p, dx);
    else
      cpu::rotary_bwd(p, dx);
  }
  ctx.grad(0, dx);
}

}  // namespace

Var rotary(const Var& xv, const RotaryOptions& options) {
  const OpScope scope(kOp);
  const Tensor& x = xv.value();
  check_defined(kOp, "x", x);
  check_compute_dtype(kOp, "x", x);
  check(x.dim() == 4, "{}: x is {}, want [B,T,H,P]", kOp, x.shape());
  const int64_t width = x.size(3);
  check(width >= 2 && width % 2 == 0 && width <= kMaxRotaryWidth,
        "{}: head size {} of x {}; want an even one, at most {}", kOp, width, x.shape(),
        kMaxRotaryWidth);
  check(options.base > 0, "{}: base is {}, want > 0", kOp, options.base);
  check_same_device(kOp, x, {&options.start});
  options.layout.check_covers(kOp, x.size(0), x.size(1), x.device());
  Tensor start;
  if (options.start) {
    check_shape(kOp, "start", options.start, {options.layout.count(x.size(0))});
    check(options.start.dtype() == DType::i64, "{}: start is {}, want i64", kOp,
          options.start.dtype());
    start = options.start.contiguous();
  }
  Shape shape = x.shape();
  if (options.form == RotaryForm::cosine) shape[3] = 2 * width;
  const Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  if (y.numel() > 0) {
    const RotaryProblem p = problem_of(x, width, options, start);
    if (kWithCuda && x.on_cuda())
      gpu::rotary_fwd(p, y);
    else
      cpu::rotary_fwd(p, y);
  }
  RotaryOptions kept = options;
  kept.start = {};
  return record(kOp, {xv}, {start}, {y},
                [width, kept](BackwardContext& ctx) { backward(ctx, width, kept); })[0];
}

Cost rotary_cost(Pass, int64_t elements, RotaryForm form, DType dtype) {
  const double n = double(elements), wide = form == RotaryForm::cosine ? 2 : 1;
  return {n * (1 + wide) * double(item_size(dtype)), n * 3};
}

}  // namespace ebb
