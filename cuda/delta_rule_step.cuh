// Shared by the decoding steps of the delta rule: of finished inputs (delta_rule_step.cu) and of
// logits (delta_rule_step_logits.cu).
#pragma once
#include "cuda/common.cuh"
#include "ops/delta_rule.h"

namespace ebb::gpu::delta {

inline constexpr int kLanes = 32, kGroups = 8;  // columns or quads of columns; row groups that
                                                // share them

// Sums over the kGroups threads of a column, in order; the same values in each. s is free again
// after the block's next barrier.
template <int V>
__device__ __forceinline__ void sum_columns(float (&x)[V], float (*s)[kLanes][V]) {
#pragma unroll
  for (int e = 0; e < V; ++e) s[threadIdx.y][threadIdx.x][e] = x[e];
  __syncthreads();
#pragma unroll
  for (int e = 0; e < V; ++e) x[e] = 0.f;
#pragma unroll
  for (int y = 0; y < kGroups; ++y)
#pragma unroll
    for (int e = 0; e < V; ++e) x[e] += s[y][threadIdx.x][e];
}
__device__ __forceinline__ float of_row(float x, int i) { return __shfl_sync(0xffffffffu, x, i); }

// Kernels by the rows of the state that a thread holds.
template <class F>
void visit_step_rows(int key_dim, F&& f) {
  if (key_dim <= 64)
    f.template operator()<8>();
  else if (key_dim <= 128)
    f.template operator()<16>();
  else
    f.template operator()<32>();
}
inline unsigned step_grid(int64_t heads, int value_dim, int columns) {
  const int64_t blocks = heads * ceil_div(value_dim, kLanes * columns);
  return unsigned(std::min<int64_t>(blocks, (int64_t(1) << 31) - 1));
}

// The same from logits, or from rows that lie apart.
void logit_step(const DeltaRuleStep& p, const Tensor& state, const Tensor& o);

}  // namespace ebb::gpu::delta
