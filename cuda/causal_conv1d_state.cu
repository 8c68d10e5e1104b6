// The states of the short convolution (ops/causal_conv1d.h): final state, gradient of the initial
// one, and the decoding step. Small next to the sequence passes; one thread per (sequence,
// channel).
#include "cuda/causal_conv1d.cuh"

namespace ebb::gpu {
namespace {

using namespace conv;

// Column j of the final state is the input at end − W + j, which for a short sequence lies in the
// initial state.
template <class T>
__global__ void final_kernel(const Input<T> in, int width, float* g_final) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= in.first.count * in.d) return;
  SequenceCursor s = in.first;
  s.select(i / in.d);
  for (int j = 0; j < width; ++j) {
    const int64_t p = s.end - width + j;
    float v = 0;
    if (p >= s.begin)
      v = to_float(in.g_x[p * in.stride + i % in.d]);
    else if (in.g_state)
      v = in.g_state[i * width + width + p - s.begin];
    g_final[i * width + j] = v;
  }
}

// Tap j of a sequence's k-th token reads column k + j + 1 of the initial state while that is below
// W; what is left of the initial state in the final one adds dfinal.
template <class T, int W, bool kSilu>
__global__ void state_grad_kernel(const Input<T> in, const Output<T> out, float* g_dstate) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= in.first.count * in.d) return;
  SequenceCursor s = in.first;
  s.select(i / in.d);
  const Channels<T, W, 1, kSilu> ch(in, i % in.d);
  const int64_t length = s.end - s.begin;
  float r_ds[W] = {};
#pragma unroll
  for (int k = 0; k < W - 1; ++k) {
    if (k >= length) break;
    float r_window[W][1], r_g[1];
    ch.window(r_window, s, s.begin + k);
    load_pack(r_g, out.g_dy + (s.begin + k) * out.dy_stride + ch.c);
    ch.dpre(r_g, r_window, 0);
#pragma unroll
    for (int j = 0; k + j + 1 < W; ++j) r_ds[k + j + 1] += ch.r_w[j][0] * r_g[0];
  }
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (out.g_dfinal && j >= length) r_ds[j] += out.g_dfinal[i * W + j - length];
    g_dstate[i * W + j] = r_ds[j];
  }
}

// The state moves one column to the left, the token enters at the right.
template <class T, class S>
__global__ void step_kernel(const T* g_x, const float* g_w, const float* g_bias, bool silu,
                            S* g_state, int64_t state_stride, T* g_y, int64_t n, int64_t d,
                            int width) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n * d) return;
  const int64_t row = i / d, c = i - row * d;
  S* state = g_state + row * state_stride + c * width;
  const float token = to_float(g_x[i]);
  float sum = g_bias ? g_bias[c] : 0.f;
  for (int j = 0; j + 1 < width; ++j) {
    const S v = state[j + 1];
    state[j] = v;
    sum = fmaf(g_w[c * width + j], to_float(v), sum);
  }
  state[width - 1] = from_float<S>(token);
  sum = fmaf(g_w[c * width + width - 1], token, sum);
  g_y[i] = from_float<T>(silu ? sum * fast_sigmoid(sum) : sum);
}

}  // namespace

void causal_conv1d_final(const ConvArgs& a, const Tensor& state) {
  if (state.numel() == 0) return;
  const int64_t rows = a.first.count * a.x.width;
  visit_compute(a.x.t.dtype(), [&]<class T>() {
    final_kernel<<<unsigned(ceil_div(rows, kThreads)), kThreads, 0, stream_of(state)>>>(
        input_of<T>(a), int(a.w.size(1)), ptr<float>(state));
    check_launch();
  });
}

void causal_conv1d_dstate(const ConvArgs& a, const Rows& dy, const Tensor& dfinal,
                          const Tensor& dstate) {
  const int64_t rows = a.first.count * a.x.width;
  if (rows == 0) return;
  visit_compute(a.x.t.dtype(), [&]<class T>() {
    visit_variant<4>(a, false, [&]<int W, int V, bool kSilu>() {
      state_grad_kernel<device_t<T>, W, kSilu>
          <<<unsigned(ceil_div(rows, kThreads)), kThreads, 0, stream_of(dstate)>>>(
              input_of<T>(a), output_of<T>(dy, dfinal, {}), ptr<float>(dstate));
      check_launch();
    });
  });
}

void causal_conv1d_step(const Tensor& x, const Tensor& w, const Tensor& bias, bool silu,
                        const Tensor& state, const Tensor& y) {
  if (y.numel() == 0) return;
  const int64_t d = w.size(0), n = y.numel() / d;
  visit_compute(x.dtype(), [&]<class T>() {
    visit_compute(state.dtype(), [&]<class S>() {
      step_kernel<<<unsigned(ceil_div(n * d, kThreads)), kThreads, 0, stream_of(x)>>>(
          ptr<T>(x), ptr<float>(w), ptr<float>(bias), silu, ptr<S>(state), state.stride(0),
          ptr<T>(y), n, d, int(w.size(1)));
      check_launch();
    });
  });
}

}  // namespace ebb::gpu
