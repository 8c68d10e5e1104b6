// The gates of one chunk and head for the tensor-core kernels of gated linear attention, by one
// warp: lane l has tokens 2l and 2l+1.
#pragma once
#include "cuda/linear_attention_fast.cuh"

namespace ebb::gpu::linear_attention {

// g and w of a lane's tokens: as given, or from SSD's steps, g = A Δ and w = Δ.
struct LaneGates {
  float g[2] = {}, w[2] = {};

  // Asks for what lies in memory: g and w, or dt.
  __device__ __forceinline__ void fetch(const FastAttention& p, Span span, int h) {
    const int lane = int(threadIdx.x) & 31;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane + e;
      g[e] = w[e] = 0.f;
      if (i >= span.rows) continue;
      if (p.steps.dt) {
        g[e] = p.steps.raw(span.first + i, h);
      } else {
        const int64_t at = p.gate_at(span.first + i, h);
        g[e] = p.g[at], w[e] = p.beta ? p.beta[at] : 1.f;
      }
    }
  }
  __device__ __forceinline__ void apply_steps(const FastAttention& p, int rows, int h) {
    if (!p.steps.dt) return;
    const float rate = p.steps.rate(h), offset = p.steps.offset(h);
    if (rate > 0.f) *p.positive_decay = 1;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float slope;
      w[e] = p.steps.step(g[e] + offset, slope);
      g[e] = rate * w[e];
      if (2 * (int(threadIdx.x) & 31) + e >= rows) g[e] = w[e] = 0.f;
    }
  }
  // Sums in f64: kept as high + low, their differences are exact to f32. To one or two places.
  __device__ __forceinline__ void write(const FastAttention& p, FastGates* s,
                                        FastGates* g_s) const {
    const int lane = int(threadIdx.x) & 31;
    double x[2], sum = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (g[e] > 0.f) *p.positive_decay = 1;
      x[e] = double(g[e] < -1000.f ? -1000.f : g[e]);  // −inf: e^-1000 = 0
      sum += x[e];
    }
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, sum, o);
      if (lane >= o) sum += before;
    }
    const double total = __shfl_sync(0xffffffffu, sum, 31);
    const double through[2] = {sum - x[1], sum};
    float high[2], low[2], gamma[2], tail[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const double log2 = through[e] * 1.4426950408889634;
      high[e] = float(log2), low[e] = float(log2 - double(high[e]));
      gamma[e] = __expf(float(through[e])), tail[e] = __expf(float(total - through[e]));
    }
    const float whole = __expf(float(total));
    for (FastGates* to : {s, g_s}) {
      if (!to) continue;
      const auto put = [&](float* row, const float(&y)[2]) {
        *reinterpret_cast<float2*>(row + 2 * lane) = {y[0], y[1]};
      };
      put(to->high, high), put(to->low, low), put(to->gamma, gamma), put(to->tail, tail);
      put(to->beta, w);
      if (lane < 4) to->total[lane] = whole;
    }
  }
};

}  // namespace ebb::gpu::linear_attention
