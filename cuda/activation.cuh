// Activations of the bandwidth-bound kernels. Relative errors stay near 1e-6, with two special
// function instructions and no slow paths.
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
// silu'(x) = σ(1 + x(1 − σ))
__device__ __forceinline__ float silu_slope(float x) {
  const float sig = fast_sigmoid(x);
  return sig * fmaf(x, 1.f - sig, 1.f);
}

#endif

}  // namespace ebb::gpu
