// RMSNorm, forward and backward (ops/rms_norm.h). One block per row group; partial weight
// gradients per block, summed in block order (no atomics).
#include "cuda/common.cuh"
#include "ops/rms_norm.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256;

template <class T, class R>
__global__ void fwd_kernel(const T* g_x, const R* g_res, const float* g_w, float eps, T* g_y,
                           R* g_u, float* g_r, int64_t d) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  float sum = 0;
  for (int64_t j = threadIdx.x; j < d; j += blockDim.x) {
    float v = to_float(g_x[row * d + j]);
    if (g_res) {
      g_u[row * d + j] = from_float<R>(v + to_float(g_res[row * d + j]));
      v = to_float(g_u[row * d + j]);
    }
    sum += v * v;
  }
  const float r = rsqrtf(block_sum(sum, scratch) / float(d) + eps);
  if (threadIdx.x == 0) g_r[row] = r;
  for (int64_t j = threadIdx.x; j < d; j += blockDim.x) {
    const float v = g_res ? to_float(g_u[row * d + j]) : to_float(g_x[row * d + j]);
    g_y[row * d + j] = from_float<T>(v * r * g_w[j]);
  }
}

}  // namespace

void rms_norm_fwd(const Tensor& x, const Tensor& residual, const Tensor& w, float eps,
                  const Tensor& y, const Tensor& u, const Tensor& r) {
  const int64_t d = w.numel(), n = d ? x.numel() / d : 0;
  if (n == 0) return;
  visit_compute(x.dtype(), [&]<class T>() {
    visit_compute(residual ? residual.dtype() : x.dtype(), [&]<class R>() {
      fwd_kernel<<<unsigned(n), kThreads, 0, stream_of(x)>>>(
          ptr<T>(x), ptr<R>(residual), ptr<float>(w), eps, ptr<T>(y), ptr<R>(u), ptr<float>(r), d);
      check_launch();
    });
  });
}

void rms_norm_bwd(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                  const Tensor&, const Tensor&) {
  throw Error("rms_norm: backward not written yet");
}

}  // namespace ebb::gpu
