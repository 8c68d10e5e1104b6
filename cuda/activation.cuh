// Activations. fast_*: for the bandwidth-bound kernels over activations, relative errors near 1e-6,
// two special function instructions and no slow paths. The others are for gates, whose f32 values
// go into recurrences: errors of a few ulp.
#pragma once
#include "cuda/common.cuh"

namespace ebb::gpu {

#ifdef __CUDACC__

// 2^x without the scaling that subnormal results would need: those become 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_sigmoid(float x) {
  return __fdividef(1.f, 1.f + fast_exp2(-1.44269504f * x));
}
// silu'(x) = σ + σ(x − σx)
__device__ __forceinline__ float silu_slope(float x) {
  const float sig = fast_sigmoid(x);
  return fmaf(sig, fmaf(-sig, x, x), sig);
}

__device__ __forceinline__ float exact_sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
// σ(x)σ(−x), with all digits on both sides.
__device__ __forceinline__ float sigmoid_slope(float x) {
  const float z = expf(-fabsf(x)), r = 1.f / (1.f + z);
  return z * r * r;
}
// log(1 + eˣ), linear above 20.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

#endif

}  // namespace ebb::gpu
