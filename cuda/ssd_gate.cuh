// The step Δ of SSD (ops/ssd.h) on the device, for kernels that work it out themselves.
#pragma once
#include "cuda/activation.cuh"
#include "ops/ssd.h"

namespace ebb::gpu {

// Rows of dt in T or f32, A or A_log and the bias by head; dt null: there are no steps.
struct StepSource {
  const void* dt = nullptr;
  bool wide = false;  // dt is f32, else bf16
  int64_t stride = 0;
  const float *A = nullptr, *bias = nullptr;  // [H]; the bias may be null
  float low = 0, high = 0;
  bool soft = true, log_A = false;

  StepSource() = default;
  explicit StepSource(const SsdGateArgs& in)
      : dt(in.dt.t ? in.dt.t.raw() : nullptr),
        wide(in.dt.t && in.dt.t.dtype() == DType::f32),
        stride(in.dt.stride),
        A(ptr<float>(in.A)),
        bias(ptr<float>(in.bias)),
        low(float(in.dt_min)),
        high(float(in.dt_max)),
        soft(in.softplus),
        log_A(in.log_A) {}

#ifdef __CUDACC__
  // A token's dt as it lies in memory: to ask for it early, as nothing waits for it until value().
  __device__ __forceinline__ unsigned bits(int64_t token, int h) const {
    const int64_t at = token * stride + h;
    return wide ? static_cast<const unsigned*>(dt)[at] : static_cast<const unsigned short*>(dt)[at];
  }
  __device__ __forceinline__ float value(unsigned bits) const {
    return __uint_as_float(wide ? bits : bits << 16);
  }
  __device__ __forceinline__ float raw(int64_t token, int h) const { return value(bits(token, h)); }
  __device__ __forceinline__ float rate_of(float a) const { return log_A ? -expf(a) : a; }
  __device__ __forceinline__ float rate(int h) const { return rate_of(A[h]); }
  __device__ __forceinline__ float offset(int h) const { return bias ? bias[h] : 0.f; }
  // Δ from dt + bias; `slope` receives dΔ/ddt.
  __device__ __forceinline__ float step(float y, float& slope) const {
    const float x = soft ? softplus(y) : y;
    slope = soft ? exact_sigmoid(y) : 1.f;
    if (x < low || x > high) {
      slope = 0.f;
      return x < low ? low : high;
    }
    return x;  // NaN stays NaN
  }
#endif
};

}  // namespace ebb::gpu
