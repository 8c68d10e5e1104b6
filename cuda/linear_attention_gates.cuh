// The gates of one chunk and head for the tensor-core kernels of gated linear attention, by one
// warp: lane l has tokens 2l and 2l+1.
#pragma once
#include "cuda/linear_attention_fast.cuh"

namespace ebb::gpu::linear_attention {

// g and w of a lane's tokens: as given, or from SSD's steps, g = A Δ and w = Δ.
struct LaneGates {
  float g[2] = {}, w[2] = {};

  // Asks for what lies in memory: g and w, or the bits of dt.
  __device__ __forceinline__ void fetch(const FastAttention& p, Span span, int h) {
    const int lane = int(threadIdx.x) & 31;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane + e;
      g[e] = w[e] = 0.f;
      if (i >= span.rows) continue;
      if (p.steps.dt) {
        g[e] = __uint_as_float(p.steps.bits(span.first + i, h));
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
      w[e] = p.steps.step(p.steps.value(__float_as_uint(g[e])) + offset, slope);
      g[e] = rate * w[e];
      if (2 * (int(threadIdx.x) & 31) + e >= rows) g[e] = w[e] = 0.f;
    }
  }
};

// What a lane knows of the record of a chunk's gates.
struct GateRecord {
  float high[2], low[2], gamma[2], tail[2], weight[2], total;

  GateRecord() = default;
  // Sums in f64: kept as high + low, their differences are exact to f32.
  __device__ __forceinline__ GateRecord(const FastAttention& p, const LaneGates& in) {
    const int lane = int(threadIdx.x) & 31;
    double x[2], sum = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (in.g[e] > 0.f) *p.positive_decay = 1;
      x[e] = double(in.g[e] < -1000.f ? -1000.f : in.g[e]);  // −inf: e^-1000 = 0
      sum += x[e];
    }
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, sum, o);
      if (lane >= o) sum += before;
    }
    const double whole = __shfl_sync(0xffffffffu, sum, 31);
    const double through[2] = {sum - x[1], sum};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const double log2 = through[e] * 1.4426950408889634;
      high[e] = float(log2), low[e] = float(log2 - double(high[e]));
      gamma[e] = __expf(float(through[e])), tail[e] = __expf(float(whole - through[e]));
      weight[e] = in.w[e];
    }
    total = __expf(float(whole));
  }
  __device__ __forceinline__ void put(FastGates& to) const {
    const int lane = int(threadIdx.x) & 31;
    const auto put = [&](float* row, const float(&y)[2]) {
      *reinterpret_cast<float2*>(row + 2 * lane) = {y[0], y[1]};
    };
    put(to.high, high), put(to.low, low), put(to.gamma, gamma), put(to.tail, tail);
    put(to.beta, weight);
    if (lane < 4) to.total[lane] = total;
  }
};

}  // namespace ebb::gpu::linear_attention
