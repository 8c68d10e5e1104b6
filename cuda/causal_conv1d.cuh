// Shared by the kernels of the short convolution (causal_conv1d.cu, causal_conv1d_state.cu).
#pragma once
#include "cuda/activation.cuh"
#include "cuda/common.cuh"
#include "ops/causal_conv1d.h"

namespace ebb::gpu::conv {

inline constexpr int kThreads = 256;

// What the kernels read. Pointers at channel 0; rows of x lie `stride` elements apart.
template <class T>
struct Input {
  const T* g_x;
  int64_t stride;
  const float* g_w;      // [D,W]
  const float* g_bias;   // [D] or null
  const float* g_state;  // [N,D,W] or null
  int64_t tokens, d;
  SequenceCursor first;
};

// A thread's channels: taps, bias, and how their inputs are found.
template <class T, int W, int V, bool kSilu>
struct Channels {
  const Input<T>& in;
  int64_t c;
  float r_w[W][V], r_bias[V];

  __device__ __forceinline__ Channels(const Input<T>& input, int64_t channel)
      : in(input), c(channel) {
    constexpr int N = V > 1 && V * W % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < V * W; i += N) {
      float some[N];
      load_pack(some, in.g_w + c * W + i);
#pragma unroll
      for (int k = 0; k < N; ++k) r_w[(i + k) % W][(i + k) / W] = some[k];
    }
#pragma unroll
    for (int v = 0; v < V; ++v) r_bias[v] = in.g_bias ? in.g_bias[c + v] : 0.f;
  }
  // The window of token f of sequence s, whatever of it lies before the sequence.
  __device__ __forceinline__ void window(float (&r)[W][V], const SequenceCursor& s,
                                         int64_t f) const {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const int64_t p = f - (W - 1) + j;
      if (p >= s.begin) {
        load_pack(r[j], in.g_x + p * in.stride + c);
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v)
          r[j][v] = in.g_state ? in.g_state[(s.n * in.d + c + v) * W + W + p - s.begin] : 0.f;
      }
    }
  }
  // r_x: the window of a token, oldest first, W rows from `at` on.
  template <int N>
  __device__ __forceinline__ void pre(float (&r)[V], const float (&r_x)[N][V], int at) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      r[v] = r_bias[v];
#pragma unroll
      for (int j = 0; j < W; ++j) r[v] = fmaf(r_w[j][v], r_x[at + j][v], r[v]);
    }
  }
  // dy -> dpre, in place.
  template <int N>
  __device__ __forceinline__ void dpre(float (&r_dy)[V], const float (&r_x)[N][V], int at) const {
    if constexpr (kSilu) {
      float r_pre[V];
      pre(r_pre, r_x, at);
#pragma unroll
      for (int v = 0; v < V; ++v) r_dy[v] *= silu_slope(r_pre[v]);
    }
  }
};

template <class T>
struct Output {
  const T* g_dy;
  int64_t dy_stride;
  const float* g_dfinal;  // [N,D,W] or null
  T* g_dx;                // [B·T,D] or null
  float* g_partial;       // [groups,W+1,D] or null: dw by tap, then dbias
};

template <class T>
Input<device_t<T>> input_of(const ConvArgs& a) {
  return {.g_x = ptr<T>(a.x.t),
          .stride = a.x.stride,
          .g_w = ptr<float>(a.w),
          .g_bias = ptr<float>(a.bias),
          .g_state = ptr<float>(a.state),
          .tokens = a.x.count,
          .d = a.x.width,
          .first = a.first};
}

template <class T>
Output<device_t<T>> output_of(const Rows& dy, const Tensor& dfinal, const Tensor& dx) {
  return {.g_dy = ptr<T>(dy.t),
          .dy_stride = dy.stride,
          .g_dfinal = ptr<float>(dfinal),
          .g_dx = ptr<T>(dx),
          .g_partial = nullptr};
}

// fn<W, V, silu>: kV channels per thread where rows allow it (W = 2, 3, 4), else one.
template <int kV, bool kSilu, class F>
void visit_width(int64_t width, bool vector, F&& f) {
  if (vector && width == 4) return f.template operator()<4, kV, kSilu>();
  if (vector && width == 3) return f.template operator()<3, kV, kSilu>();
  if (vector && width == 2) return f.template operator()<2, kV, kSilu>();
  switch (width) {
    case 1:
      return f.template operator()<1, 1, kSilu>();
    case 2:
      return f.template operator()<2, 1, kSilu>();
    case 3:
      return f.template operator()<3, 1, kSilu>();
    case 4:
      return f.template operator()<4, 1, kSilu>();
    case 5:
      return f.template operator()<5, 1, kSilu>();
    case 6:
      return f.template operator()<6, 1, kSilu>();
    case 7:
      return f.template operator()<7, 1, kSilu>();
    default:
      return f.template operator()<8, 1, kSilu>();
  }
}
template <int kV, class F>
void visit_variant(const ConvArgs& a, bool vector, F&& f) {
  a.silu ? visit_width<kV, true>(a.w.size(1), vector, f)
         : visit_width<kV, false>(a.w.size(1), vector, f);
}

}  // namespace ebb::gpu::conv

namespace ebb::gpu {

// Gradient of the initial state (causal_conv1d_state.cu); dstate [N,D,W] f32 is overwritten.
void causal_conv1d_dstate(const ConvArgs& a, const Rows& dy, const Tensor& dfinal,
                          const Tensor& dstate);

}  // namespace ebb::gpu
