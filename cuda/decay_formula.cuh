// The gates of the recurrences as functions of their logits (ops/decay_gate.h), for the kernels
// that make them where they are used as well as for those that write them.
#pragma once
#include "cuda/activation.cuh"

namespace ebb::gpu {

#ifdef __CUDACC__

// y = a + dt_bias, scale = exp(A_log).
template <bool kBounded>
__device__ __forceinline__ float log_decay(float y, float scale, float bound) {
  return kBounded ? bound * exact_sigmoid(scale * y) : -scale * softplus(y);
}
// dg -> da; `log` receives the summand of dA_log.
template <bool kBounded>
__device__ __forceinline__ float log_decay_slope(float y, float scale, float bound, float dg,
                                                 float& log) {
  if constexpr (kBounded) {
    const float u = scale * y, du = bound * sigmoid_slope(u) * dg;
    log = du * u;
    return scale * du;
  }
  log = dg * log_decay<kBounded>(y, scale, bound);
  return -scale * exact_sigmoid(y) * dg;
}

#endif

}  // namespace ebb::gpu
