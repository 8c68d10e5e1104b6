// Shared by the decoding steps of the delta rule: of finished inputs (delta_rule_step.cu) and of
// logits (delta_rule_step_logits.cu).
#pragma once
#include <algorithm>

#include "cuda/dependent_launch.cuh"
#include "ops/delta_rule.h"
#include "tensor/device_flags.h"

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

// Where a block stands. Grid (value heads of some sequences, tiles of columns).
struct StepPlace {
  int64_t batch, head;  // its sequence; its value head, of all sequences
  int hv;

  template <class P>
  __device__ __forceinline__ explicit StepPlace(const P& p)
      : batch(p.first + blockIdx.x / unsigned(p.value_heads)),
        head(p.first * p.value_heads + blockIdx.x),
        hv(int(blockIdx.x % unsigned(p.value_heads))) {}
};

// Blocks per multiprocessor. With 64 rows three are enough to keep the memory busy, and 64
// sequences of 6 heads are one wave on an H200.
template <int ROWS>
inline constexpr int kStepBlocks = ROWS == 8    ? 3
                                   : ROWS == 16 ? 2
                                                : 1;

// launch.operator()<ROWS>(p, grid) by the rows of the state that a thread holds; once, unless the
// heads are more than a grid takes.
template <int V, class P, class F>
void visit_step(P p, int64_t batch, F&& launch) {
  const int64_t most = std::max<int64_t>(1, ((int64_t(1) << 31) - 1) / p.value_heads);
  const int64_t tiles = std::min<int64_t>(ceil_div(p.value_dim, kLanes * V), 65535);
  for (p.first = 0; p.first < batch; p.first += most) {
    const dim3 grid(unsigned(std::min(batch - p.first, most) * p.value_heads), unsigned(tiles));
    if (p.key_dim <= 64)
      launch.template operator()<8>(p, grid);
    else if (p.key_dim <= 128)
      launch.template operator()<16>(p, grid);
    else
      launch.template operator()<32>(p, grid);
  }
}

// What a step has of its state and of its inputs' scale and kind, whatever they are made from.
template <class P>
void set_sizes(P& p, const DeltaRuleStep& from, const Tensor& state, const Tensor& o) {
  p.scale = float(from.scale), p.by_channel = from.by_channel;
  p.state = ptr<float>(state);
  p.positive_decay = ebb::device_flags(o.device()) + int(DeviceFlag::positive_decay);
  p.heads = int(from.heads), p.value_heads = int(state.size(1));
  p.key_dim = int(state.size(2)), p.value_dim = int(state.size(3));
}
inline bool aligned(const void* x, size_t bytes) {
  return reinterpret_cast<uintptr_t>(x) % bytes == 0;
}
// Whether a thread may take four columns at once; rows of v are as long as those of o.
template <class T, class P>
bool in_quads(const P& p) {
  return p.value_dim % 4 == 0 && aligned(p.state, 16) && aligned(p.v, 4 * sizeof(T)) &&
         aligned(p.o, 4 * sizeof(T));
}

// The same from logits, or from rows that lie apart.
void logit_step(const DeltaRuleStep& p, const Tensor& state, const Tensor& o);

}  // namespace ebb::gpu::delta
