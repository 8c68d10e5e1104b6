#include "ops/causal_conv1d.h"

#include <omp.h>

#include <algorithm>

#include "ops/common.h"
#include "ops/cpu_math.h"

namespace ebb {

namespace cpu {
namespace {

constexpr int64_t kTokens = 64;     // tokens of a block: its rows stay in the cache
constexpr int64_t kChannels = 256;  // channels of a task
constexpr int64_t kRuns = 256;      // at most so many partial weight gradients

template <class F>
void visit(DType t, F&& f) {
  t == DType::f64 ? f.template operator()<double>() : f.template operator()<float>();
}

// Tokens of one task: a multiple of kTokens that depends on the size alone, so that the order of
// sums does not depend on the number of threads.
int64_t run_length(int64_t tokens) {
  const int64_t per_run = (tokens + kRuns - 1) / kRuns;
  return std::max(kTokens, (per_run + kTokens - 1) / kTokens * kTokens);
}

// fn(run, f0, f1, c0, n): tokens [f0,f1), channels [c0,c0+n).
template <class F>
void for_tasks(int64_t tokens, int64_t d, const F& fn) {
  const int64_t length = run_length(tokens), runs = (tokens + length - 1) / length;
  const int64_t blocks = (d + kChannels - 1) / kChannels;
#pragma omp parallel for if (tokens * d > 4096)
  for (int64_t task = 0; task < runs * blocks; ++task) {
    const int64_t run = task / blocks, c0 = task % blocks * kChannels;
    fn(run, run * length, std::min(tokens, (run + 1) * length), c0, std::min(kChannels, d - c0));
  }
}

// Channels contiguous: weights and states as the loops below want them.
template <class T>
struct Layer {
  explicit Layer(const ConvArgs& a)
      : width(a.w.size(1)),
        d(a.x.width),
        stride(a.x.stride),
        w_t(a.w.transpose(0, 1).contiguous()),
        state_t(a.state ? a.state.transpose(1, 2).contiguous() : Tensor()),
        zeros(size_t(d)),
        x(a.x.t.data<T>()),
        w(w_t.data<T>()),
        bias(a.bias ? a.bias.data<T>() : nullptr),
        state(state_t ? state_t.data<T>() : nullptr) {}

  // What stands at flat position p, or before the sequence's first token.
  const T* input(const SequenceCursor& s, int64_t p) const {
    if (p >= s.begin) return x + p * stride;
    return state ? state + (s.n * width + width + p - s.begin) * d : zeros.data();
  }
  // out[c] = pre of token f, channels [c0,c0+n).
  void pre(const SequenceCursor& s, int64_t f, int64_t c0, int64_t n, T* out) const {
    for (int64_t c = 0; c < n; ++c) out[c] = bias ? bias[c0 + c] : T(0);
    for (int64_t j = 0; j < width; ++j) {
      const T *row = input(s, f - (width - 1) + j) + c0, *tap = w + j * d + c0;
      for (int64_t c = 0; c < n; ++c) out[c] += tap[c] * row[c];
    }
  }
  // out[c] = dpre of token f.
  void dpre(const SequenceCursor& s, int64_t f, int64_t c0, int64_t n, const T* dy, bool silu,
            T* out) const {
    if (!silu) {
      std::copy(dy, dy + n, out);
      return;
    }
    pre(s, f, c0, n, out);
    for (int64_t c = 0; c < n; ++c) {
      const T sig = sigmoid(out[c]);
      out[c] = dy[c] * sig * (1 + out[c] * (1 - sig));
    }
  }

  int64_t width, d, stride;
  Tensor w_t, state_t;   // [W,D], [N,W,D]
  std::vector<T> zeros;  // [D]
  const T *x, *w, *bias, *state;
};

// Gradients of one block of tokens [f0,f1) and channels [c0,c0+n): dx rows are written, `sums`
// [W+1,D] (dw by tap, then dbias) is added to. g: room for the block's dpre.
template <class T>
void backward_block(const Layer<T>& in, const ConvArgs& a, const Rows& dy, const T* dfinal_t,
                    int64_t f0, int64_t f1, int64_t c0, int64_t n, T* g, T* dx, T* sums) {
  const int64_t width = in.width, d = in.d;
  const int64_t last = std::min(f1 + width - 1, a.x.count);  // dx reaches W−1 tokens ahead
  SequenceCursor s = a.first;
  s.seek(f0);
  for (int64_t f = f0; f < last; ++f) {
    if (f == s.end) s.next();
    T* row = g + (f - f0) * kChannels;
    in.dpre(s, f, c0, n, dy.t.data<T>() + f * dy.stride + c0, a.silu, row);
    if (!sums || f >= f1) continue;
    for (int64_t j = 0; j < width; ++j) {
      const T* x = in.input(s, f - (width - 1) + j) + c0;
      for (int64_t c = 0; c < n; ++c) sums[j * d + c0 + c] += row[c] * x[c];
    }
    for (int64_t c = 0; c < n; ++c) sums[width * d + c0 + c] += row[c];
  }
  if (!dx) return;
  s.seek(f0);
  for (int64_t f = f0; f < f1; ++f) {
    if (f == s.end) s.next();
    T* out = dx + f * d + c0;
    const bool tail = dfinal_t && f >= s.end - width;  // the token is part of the final state
    const T* extra = tail ? dfinal_t + (s.n * width + f - (s.end - width)) * d + c0 : nullptr;
    for (int64_t c = 0; c < n; ++c) out[c] = extra ? extra[c] : T(0);
    for (int64_t i = 0; i < width && f + i < s.end; ++i) {
      const T *row = g + (f + i - f0) * kChannels, *tap = in.w + (width - 1 - i) * d + c0;
      for (int64_t c = 0; c < n; ++c) out[c] += tap[c] * row[c];
    }
  }
}

// Gradient of the initial states: through the first W−1 tokens, and through what is left of them
// in the final state of a short sequence.
template <class T>
void state_gradient(const Layer<T>& in, const ConvArgs& a, const Rows& dy, const T* dfinal_t,
                    T* out_t /*[N,W,D]*/) {
  const int64_t width = in.width, d = in.d;
#pragma omp parallel for if (a.first.count * d > 4096)
  for (int64_t n = 0; n < a.first.count; ++n) {
    SequenceCursor s = a.first;
    s.select(n);
    const int64_t length = s.end - s.begin;
    std::vector<T> g(static_cast<size_t>(d));
    T* out = out_t + n * width * d;
    std::fill(out, out + width * d, T(0));
    for (int64_t i = 0; i < std::min(width - 1, length); ++i) {
      const int64_t f = s.begin + i;
      in.dpre(s, f, 0, d, dy.t.data<T>() + f * dy.stride, a.silu, g.data());
      // Tap j of token i reads column i + j + 1 of the state while that is below W.
      for (int64_t j = 0; i + j + 1 < width; ++j)
        for (int64_t c = 0; c < d; ++c) out[(i + j + 1) * d + c] += in.w[j * d + c] * g[size_t(c)];
    }
    if (!dfinal_t) continue;
    for (int64_t i = 0; length + i < width; ++i)
      for (int64_t c = 0; c < d; ++c)
        out[(length + i) * d + c] += dfinal_t[(n * width + i) * d + c];
  }
}

}  // namespace

void causal_conv1d_fwd(const ConvArgs& a, const Tensor& y) {
  visit(y.dtype(), [&]<class T>() {
    const Layer<T> in(a);
    for_tasks(a.x.count, in.d, [&](int64_t, int64_t f0, int64_t f1, int64_t c0, int64_t n) {
      SequenceCursor s = a.first;
      s.seek(f0);
      for (int64_t f = f0; f < f1; ++f) {
        if (f == s.end) s.next();
        T* out = y.data<T>() + f * in.d + c0;
        in.pre(s, f, c0, n, out);
        if (a.silu)
          for (int64_t c = 0; c < n; ++c) out[c] *= sigmoid(out[c]);
      }
    });
  });
}

void causal_conv1d_final(const ConvArgs& a, const Tensor& state) {
  visit(state.dtype(), [&]<class T>() {
    const Layer<T> in(a);
    T* out = state.data<T>();
#pragma omp parallel for if (state.numel() > 16384)
    for (int64_t n = 0; n < a.first.count; ++n) {
      SequenceCursor s = a.first;
      s.select(n);
      for (int64_t j = 0; j < in.width; ++j) {
        const T* row = in.input(s, s.end - in.width + j);
        for (int64_t c = 0; c < in.d; ++c) out[(n * in.d + c) * in.width + j] = row[c];
      }
    }
  });
}

void causal_conv1d_bwd(const ConvArgs& a, const Rows& dy, const Tensor& dfinal,
                       const ConvGrads& grads) {
  visit(dy.t.dtype(), [&]<class T>() {
    const Layer<T> in(a);
    const int64_t tokens = a.x.count, d = in.d, width = in.width;
    const Tensor dfinal_t = dfinal ? dfinal.transpose(1, 2).contiguous() : Tensor();
    const T* p_dfinal = dfinal ? dfinal_t.data<T>() : nullptr;
    const bool weights = grads.dw || grads.dbias;
    const int64_t length = run_length(tokens), runs = (tokens + length - 1) / length;
    std::vector<T> partial(weights ? size_t(runs * (width + 1) * d) : 0);
    if (grads.dx || weights) {
      for_tasks(tokens, d, [&](int64_t run, int64_t f0, int64_t f1, int64_t c0, int64_t n) {
        std::vector<T> g(size_t((kTokens + width - 1) * kChannels));
        T* sums = weights ? partial.data() + run * (width + 1) * d : nullptr;
        for (int64_t f = f0; f < f1; f += kTokens)
          backward_block(in, a, dy, p_dfinal, f, std::min(f1, f + kTokens), c0, n, g.data(),
                         grads.dx ? grads.dx.data<T>() : nullptr, sums);
      });
    }
    if (weights) {
      const Tensor sum = Tensor::zeros({width + 1, d}, dy.t.dtype());
      T* p_sum = sum.data<T>();
      for (int64_t r = 0; r < runs; ++r)
        for (int64_t i = 0; i < (width + 1) * d; ++i)
          p_sum[i] += partial[size_t(r * (width + 1) * d + i)];
      if (grads.dw) grads.dw.transpose(0, 1).copy_(sum.slice(0, 0, width));
      if (grads.dbias) grads.dbias.copy_(sum.select(0, width));
    }
    if (grads.dstate) {
      const Tensor out = Tensor::empty({a.first.count, width, d}, grads.dstate.dtype());
      state_gradient(in, a, dy, p_dfinal, out.data<T>());
      grads.dstate.copy_(out.transpose(1, 2));
    }
  });
}

void causal_conv1d_step(const Tensor& x, const Tensor& w, const Tensor& bias, bool silu,
                        const Tensor& state, const Tensor& y) {
  visit(y.dtype(), [&]<class T>() {
    visit(state.dtype(), [&]<class S>() {
      const int64_t d = w.size(0), width = w.size(1), rows = d ? y.numel() / d : 0;
#pragma omp parallel for if (rows * d > 4096)
      for (int64_t n = 0; n < rows; ++n) {
        S* row = state.data<S>() + n * state.stride(0);
        for (int64_t c = 0; c < d; ++c, row += width) {
          T sum = bias ? bias.data<T>()[c] : T(0);
          const T* tap = w.data<T>() + c * width;
          for (int64_t j = 0; j + 1 < width; ++j) {
            row[j] = row[j + 1];
            sum += tap[j] * T(row[j]);
          }
          const T token = x.data<T>()[n * d + c];
          row[width - 1] = S(token);
          sum += tap[width - 1] * token;
          y.data<T>()[n * d + c] = silu ? sum * sigmoid(sum) : sum;
        }
      }
    });
  });
}

}  // namespace cpu

namespace {

// w as [D,W], in the accumulate type.
Tensor taps(const char* op, const Tensor& w, const Tensor& x, int64_t d) {
  check_defined(op, "weight", w);
  const bool rank = w.dim() == 2 || (w.dim() == 3 && w.size(1) == 1);
  check(rank && w.size(0) == d && w.size(-1) >= 1 && w.size(-1) <= kMaxConvWidth,
        "{}: weight is {}, x is {}; want [{},W] or [{},1,W] with W = 1..{}", op, w.shape(),
        x.shape(), d, d, kMaxConvWidth);
  return parameter_values(op, "weight", w, x).view({d, w.size(-1)});
}

Tensor bias_values(const char* op, const Tensor& bias, const Tensor& x, int64_t d) {
  if (!bias) return {};
  check_shape(op, "bias", bias, {d});
  return parameter_values(op, "bias", bias, x);
}

void check_state(const char* op, const Tensor& state, const Tensor& x, const Shape& want) {
  check_shape(op, "state", state, want);
  check(state.dtype() == x.dtype() || state.dtype() == DType::f32,
        "{}: state {} is {}, x is {}; want {} or f32", op, state.shape(), state.dtype(), x.dtype(),
        x.dtype());
}

void backward(BackwardContext& ctx, int64_t batch, int64_t time, bool silu, const Shape& w_shape) {
  const Tensor &x = ctx.saved(0), &w = ctx.saved(1);
  const ConvArgs a{.x = as_rows(x),
                   .w = w,
                   .bias = ctx.saved(2),
                   .state = ctx.saved(3),
                   .first = sequence_cursor(ctx.saved(4), batch, time),
                   .silu = silu};
  const DType wide = accumulate_type(x.dtype());
  const Shape state{a.first.count, w.size(0), w.size(1)};
  const auto wanted = [&](int i, const Shape& shape, DType t) {
    return ctx.needs(i) ? Tensor::empty(shape, t, x.device()) : Tensor();
  };
  const ConvGrads g{.dx = wanted(0, x.shape(), x.dtype()),
                    .dw = wanted(1, w.shape(), wide),
                    .dbias = wanted(2, {w.size(0)}, wide),
                    .dstate = wanted(3, state, wide)};
  const Tensor dfinal = ctx.has_dy(1) ? ctx.dy(1).to(wide).contiguous() : Tensor();
  const Rows dy = as_rows(ctx.dy(0));
  if (kWithCuda && x.on_cuda())
    gpu::causal_conv1d_bwd(a, dy, dfinal, g);
  else
    cpu::causal_conv1d_bwd(a, dy, dfinal, g);
  if (g.dx) ctx.grad(0, g.dx);
  if (g.dw) ctx.grad(1, g.dw.view(w_shape));
  if (g.dbias) ctx.grad(2, g.dbias);
  if (g.dstate) ctx.grad(3, g.dstate);
}

}  // namespace

CausalConv1d causal_conv1d(const Var& xv, const Var& weight, const Var& bias,
                           const Var& initial_state, const CausalConv1dOptions& options) {
  const char* op = "causal_conv1d";
  const OpScope scope(op);
  const Tensor& x = xv.value();
  check_defined(op, "x", x);
  check(x.dim() == 3, "{}: x is {}, want [B,T,D]", op, x.shape());
  check_compute_dtype(op, "x", x);
  check_same_device(op, x, {&weight.value(), &bias.value(), &initial_state.value()});
  const int64_t batch = x.size(0), time = x.size(1), d = x.size(2);
  options.layout.check_covers(op, batch, time, x.device());
  const Tensor offsets = options.layout.device_offsets();
  ConvArgs a{.x = as_rows(x),
             .w = taps(op, weight.value(), x, d),
             .bias = bias_values(op, bias.value(), x, d),
             .first = sequence_cursor(offsets, batch, time),
             .silu = options.activation == ConvActivation::silu};
  const DType wide = accumulate_type(x.dtype());
  const Shape states{a.first.count, d, a.w.size(1)};
  if (initial_state) {
    check_state(op, initial_state.value(), x, states);
    a.state = initial_state.value().to(wide).contiguous();
  }
  const Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  Tensor final_state = options.final_state ? Tensor::empty(states, wide, x.device()) : Tensor();
  if (kWithCuda && x.on_cuda()) {
    gpu::causal_conv1d_fwd(a, y);
    if (final_state) gpu::causal_conv1d_final(a, final_state);
  } else {
    cpu::causal_conv1d_fwd(a, y);
    if (final_state) cpu::causal_conv1d_final(a, final_state);
  }
  if (final_state) final_state = final_state.to(initial_state ? initial_state.dtype() : x.dtype());
  const std::vector<Var> out =
      record(op, {xv, weight, bias, initial_state}, {a.x.t, a.w, a.bias, a.state, offsets},
             {y, final_state},
             [batch, time, silu = a.silu, w_shape = weight.shape()](BackwardContext& ctx) {
               backward(ctx, batch, time, silu, w_shape);
             });
  return {out[0], out[1]};
}

Tensor causal_conv1d_step(const Tensor& x, const Tensor& weight, const Tensor& bias,
                          const Tensor& state, ConvActivation activation) {
  const char* op = "causal_conv1d_step";
  const OpScope scope(op);
  check_defined(op, "x", x);
  check(x.dim() == 2 || (x.dim() == 3 && x.size(1) == 1), "{}: x is {}, want [N,D] or [N,1,D]", op,
        x.shape());
  check_compute_dtype(op, "x", x);
  check_same_device(op, x, {&weight, &bias, &state});
  const int64_t d = x.size(-1);
  const Tensor w = taps(op, weight, x, d), b = bias_values(op, bias, x, d);
  check_state(op, state, x, {x.size(0), d, w.size(1)});
  const bool rows = state.numel() == 0 || state.select(0, 0).is_contiguous();
  check(rows, "{}: the state's rows [{},{}] must be dense, strides are {}", op, d, w.size(1),
        state.strides());
  const Tensor token = x.contiguous(), y = Tensor::empty(x.shape(), x.dtype(), x.device());
  const bool silu = activation == ConvActivation::silu;
  state.bump_version();
  if (kWithCuda && x.on_cuda())
    gpu::causal_conv1d_step(token, w, b, silu, state, y);
  else
    cpu::causal_conv1d_step(token, w, b, silu, state, y);
  return y;
}

Cost causal_conv1d_cost(Pass pass, int64_t tokens, int64_t channels, int64_t width, DType dtype) {
  const double n = double(tokens) * double(channels), size = double(item_size(dtype));
  const double w = double(width), weights = double(channels) * (w + 1) * 4;
  if (pass == Pass::forward) return {2 * n * size + weights, n * (2 * w + 4)};
  return {3 * n * size + 2 * weights, n * (2 * w + 8 + 2 * w + 2 * w + 1)};
}

}  // namespace ebb
