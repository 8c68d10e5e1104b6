// Softmax and log-softmax over rows (ops/softmax.h). A row per group of lanes (a warp or less for
// short rows, a block for long ones), 8 consecutive elements per lane and step.
// Forward: 1 running maximum and sum in one pass  2 write y, reading the row again from cache.
// Backward: 1 Σ dy·y or Σ dy  2 write dx.
#include "cuda/reduce.cuh"
#include "ops/softmax.h"

namespace ebb::gpu {
namespace {

using Stats = LogSumExpState<float>;

struct Rows {
  int64_t n, d;
  int lanes;
  bool aligned;
};

// Calls f(row, lane, active) for every row of this thread's group, with all threads of the block
// taking part in the same number of calls.
template <class F>
__device__ __forceinline__ void for_rows(const Rows& r, F f) {
  const int groups = kReduceThreads / r.lanes, lane = threadIdx.x % r.lanes;
  const int64_t step = int64_t(gridDim.x) * groups;
  for (int64_t base = int64_t(blockIdx.x) * groups; base < r.n; base += step) {
    const int64_t row = base + threadIdx.x / r.lanes;
    f(row, lane * kPack, row < r.n);
  }
}

template <class T>
__global__ void __launch_bounds__(kReduceThreads)
    fwd_kernel(const T* g_x, T* g_y, float* g_stats, Rows r) {
  __shared__ Stats scratch[kReduceThreads / 32];
  for_rows(r, [&](int64_t row, int first, bool active) {
    // 1
    Stats s = Stats::empty();
    float v[kPack];
    const T* x = g_x + row * r.d;
    for (int64_t j = first; active && j < r.d; j += r.lanes * kPack) {
      const int n = int(::min(int64_t(kPack), r.d - j));
      load_some(v, x + j, n, r.aligned);
      // One rescaling of the running sum per pack.
      float largest = s.maximum;
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        if (e < n) largest = v[e] > largest ? v[e] : largest;
      if (largest == -INFINITY && s.sum == 0) {
        // only −∞ so far (or NaN, which no comparison notices)
#pragma unroll
        for (int e = 0; e < kPack; ++e)
          if (e < n && v[e] != v[e]) s.sum = v[e];
        continue;
      }
      float sum = s.maximum == largest ? s.sum : s.sum * expf(s.maximum - largest);
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        if (e < n) sum += expf(v[e] - largest);
      s = {largest, sum};
    }
    s = group_reduce(s, r.lanes, scratch);
    // 2
    if (!active) return;
    const float log_sum = logf(s.sum), scale = 1.f / s.sum;
    T* y = g_y + row * r.d;
    for (int64_t j = first; j < r.d; j += r.lanes * kPack) {
      const int n = int(::min(int64_t(kPack), r.d - j));
      load_some(v, x + j, n, r.aligned);
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        const float shifted = v[e] - s.maximum;
        v[e] = g_stats ? shifted - log_sum : expf(shifted) * scale;
      }
      store_some(y + j, v, n, r.aligned);
    }
    if (g_stats && first == 0) {
      g_stats[2 * row] = s.maximum;
      g_stats[2 * row + 1] = log_sum;
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kReduceThreads)
    bwd_kernel(const T* g_dy, const T* g_from, const float* g_stats, T* g_dx, Rows r) {
  __shared__ SumState<float> scratch[kReduceThreads / 32];
  for_rows(r, [&](int64_t row, int first, bool active) {
    const int64_t at = row * r.d;
    float g[kPack], v[kPack];
    // 1
    SumState<float> s = SumState<float>::empty();
    for (int64_t j = first; active && j < r.d; j += r.lanes * kPack) {
      const int n = int(::min(int64_t(kPack), r.d - j));
      load_some(g, g_dy + at + j, n, r.aligned);
      if (!g_stats) load_some(v, g_from + at + j, n, r.aligned);
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        if (e < n) s.add(g_stats ? g[e] : g[e] * v[e], 0);
    }
    s = group_reduce(s, r.lanes, scratch);
    // 2
    if (!active) return;
    const float max = g_stats ? g_stats[2 * row] : 0.f;
    const float log_sum = g_stats ? g_stats[2 * row + 1] : 0.f;
    for (int64_t j = first; j < r.d; j += r.lanes * kPack) {
      const int n = int(::min(int64_t(kPack), r.d - j));
      load_some(g, g_dy + at + j, n, r.aligned);
      load_some(v, g_from + at + j, n, r.aligned);
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        v[e] = g_stats ? g[e] - expf(v[e] - max - log_sum) * s.sum : v[e] * (g[e] - s.sum);
      store_some(g_dx + at + j, v, n, r.aligned);
    }
  });
}

Rows rows_of(const Tensor& x) {
  const int64_t d = x.shape().back();
  return {x.numel() / d, d, lanes_for(d), d % kPack == 0};
}
unsigned blocks_for(const Rows& r) {
  return unsigned(std::min<int64_t>(ceil_div(r.n, kReduceThreads / r.lanes), 1 << 30));
}

}  // namespace

void softmax_fwd(const Tensor& x, const Tensor& y, const Tensor& stats) {
  Rows r = rows_of(x);
  r.aligned = packs_aligned(x, r.d) && packs_aligned(y, r.d);
  visit_compute(x.dtype(), [&]<class T>() {
    fwd_kernel<<<blocks_for(r), kReduceThreads, 0, stream_of(x)>>>(ptr<T>(x), ptr<T>(y),
                                                                   ptr<float>(stats), r);
    check_launch();
  });
}

void softmax_bwd(const Tensor& dy, const Tensor& from, const Tensor& stats, const Tensor& dx) {
  Rows r = rows_of(dy);
  r.aligned = packs_aligned(dy, r.d) && packs_aligned(from, r.d) && packs_aligned(dx, r.d);
  visit_compute(dy.dtype(), [&]<class T>() {
    bwd_kernel<<<blocks_for(r), kReduceThreads, 0, stream_of(dy)>>>(
        ptr<T>(dy), ptr<T>(from), ptr<float>(stats), ptr<T>(dx), r);
    check_launch();
  });
}

}  // namespace ebb::gpu
