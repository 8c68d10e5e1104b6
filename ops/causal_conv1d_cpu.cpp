// The CPU passes of the short convolution (ops/causal_conv1d.h). Work is dealt out by runs of
// tokens and blocks of channels; inner loops run over neighbouring channels.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "ops/causal_conv1d.h"
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
  // out[c] = map(pre, c) for the channels [c0,c0+n) of token f.
  template <class Map>
  void map_pre(const SequenceCursor& s, int64_t f, int64_t c0, int64_t n, T* out, Map map) const {
    const T* row[kMaxConvWidth];
    for (int64_t j = 0; j < width; ++j) row[j] = input(s, f - (width - 1) + j) + c0;
    const T *tap = w + c0, *offset = (bias ? bias : zeros.data()) + c0;
    if (width == 4) return map_taps<4>(row, tap, offset, n, out, map);
    if (width == 3) return map_taps<3>(row, tap, offset, n, out, map);
    if (width == 2) return map_taps<2>(row, tap, offset, n, out, map);
    std::copy(offset, offset + n, out);
    for (int64_t j = 0; j < width; ++j)
      for (int64_t c = 0; c < n; ++c) out[c] += tap[j * d + c] * row[j][c];
    for (int64_t c = 0; c < n; ++c) out[c] = map(out[c], c);
  }
  // The same in one loop; out overlaps nothing.
  template <int W, class Map>
  void map_taps(const T* const* row, const T* tap, const T* offset, int64_t n, T* __restrict out,
                Map map) const {
    const T *r0 = row[0], *r1 = row[1], *r2 = row[W > 2 ? 2 : 0], *r3 = row[W > 3 ? 3 : 0];
    const int64_t step = d;
    for (int64_t c = 0; c < n; ++c) {
      T sum = offset[c] + tap[c] * r0[c] + tap[step + c] * r1[c];
      if constexpr (W > 2) sum += tap[2 * step + c] * r2[c];
      if constexpr (W > 3) sum += tap[3 * step + c] * r3[c];
      out[c] = map(sum, c);
    }
  }
  // out[c] = y of token f.
  void activation(const SequenceCursor& s, int64_t f, int64_t c0, int64_t n, bool silu,
                  T* out) const {
    if (silu)
      map_pre(s, f, c0, n, out, [](T pre, int64_t) { return pre * sigmoid(pre); });
    else
      map_pre(s, f, c0, n, out, [](T pre, int64_t) { return pre; });
  }
  // out[c] = dpre of token f.
  void dpre(const SequenceCursor& s, int64_t f, int64_t c0, int64_t n, const T* dy, bool silu,
            T* out) const {
    if (!silu) {
      std::copy(dy, dy + n, out);
      return;
    }
    map_pre(s, f, c0, n, out, [dy](T pre, int64_t c) {
      const T sig = sigmoid(pre);
      return dy[c] * sig * (1 + pre * (1 - sig));
    });
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
        in.activation(s, f, c0, n, a.silu, y.data<T>() + f * in.d + c0);
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

}  // namespace ebb
