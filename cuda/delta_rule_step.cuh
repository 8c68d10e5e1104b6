// Shared by the decoding steps of the delta rule: of finished inputs (delta_rule_step.cu) and of
// logits (delta_rule_step_logits.cu).
#pragma once
#include <algorithm>

#include "cuda/dependent_launch.cuh"
#include "ops/delta_rule.h"
#include "tensor/device_flags.h"

namespace ebb::gpu::delta {

inline constexpr int kGroups = 8;  // of rows; the threads of a column
// Columns or quads of columns of a block, by the rows of the state that a thread holds. Narrow
// blocks even out what the multiprocessors do; 64 sequences of 6 heads are one wave on an H200.
template <int ROWS>
inline constexpr int kLanes = ROWS <= 16 ? 16 : 32;
template <int ROWS>
inline constexpr int kStepThreads = kLanes<ROWS>* kGroups;
template <int ROWS>
inline constexpr int kStepBlocks = ROWS == 8    ? 6
                                   : ROWS == 16 ? 4
                                                : 1;  // per multiprocessor

// Sums over the kGroups threads of a column, in order; the same values in each. s is free again
// after the block's next barrier.
template <int LANES, int V>
__device__ __forceinline__ void sum_columns(float (&x)[V], float (*s)[LANES][V]) {
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
// Of the i-th row of this thread, which thread i of its group holds.
template <int LANES>
__device__ __forceinline__ float of_row(float x, int i) {
  return __shfl_sync(0xffffffffu, x, i, LANES);
}

// Where a thread stands. Grid (tiles of columns, value heads, sequences), of the latter two perhaps
// a part, since a grid is limited there.
template <int ROWS, int V>
struct StepPlace {
  int64_t batch, head;  // its sequence; its value head, of all sequences
  int hv, column;
  bool inside;

  template <class P>
  __device__ __forceinline__ explicit StepPlace(const P& p)
      : batch(p.first + blockIdx.z), hv(p.first_head + int(blockIdx.y)) {
    head = batch * p.value_heads + hv;
    const int64_t c = int64_t(blockIdx.x) * (kLanes<ROWS> * V) + V * threadIdx.x;
    inside = c < p.value_dim;
    column = int(c);
  }
  // Its head of q and k.
  template <class P>
  __device__ __forceinline__ int key_head(const P& p) const {
    return p.group == 1 ? hv : hv / p.group;
  }
};

// What a row of the state needs; thread i of group y holds it for row y+8i.
struct RowFactors {
  float alpha = 0, erase = 0, k = 0, q = 0;  // e^g; b∘k∘e^g
  bool positive = false;                     // g is; said when all else is done
};

// A thread's part of the state: rows y, y+8, ..., V columns. FULL: no row and no column is missing.
template <int ROWS, int V, bool FULL>
struct HeldState {
  Pack<float, V> r_s[ROWS];
  float* g_state;
  unsigned step;  // to the next row

  template <class P>
  __device__ __forceinline__ HeldState(const P& p, const StepPlace<ROWS, V>& at)
      : g_state(p.state + (at.head * p.key_dim + int(threadIdx.y)) * p.value_dim + at.column),
        step(kGroups * unsigned(p.value_dim)) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if constexpr (!FULL) r_s[i] = {};
      if (FULL || (at.inside && holds(p, i)))
        r_s[i] = load_raw<float, V>(g_state + step * unsigned(i));
    }
  }
  template <class P>
  __device__ __forceinline__ static bool holds(const P& p, int i) {
    return int(threadIdx.y) + kGroups * i < p.key_dim;
  }

  // u = v − Sᵀ(b∘k∘α). S = α∘S + k uᵀ, written; o = scale Sᵀq. v: w∘v.
  template <class P>
  __device__ __forceinline__ void advance(const P& p, const StepPlace<ROWS, V>& at,
                                          const RowFactors& row, const float (&v)[V]) {
    constexpr int LANES = kLanes<ROWS>;
    __shared__ __align__(16) float s_read[kGroups][LANES][V], s_out[kGroups][LANES][V];
    float u[V] = {}, out[V] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float erase = of_row<LANES>(row.erase, i);
#pragma unroll
      for (int e = 0; e < V; ++e) u[e] += erase * r_s[i].v[e];
    }
    sum_columns<LANES, V>(u, s_read);
#pragma unroll
    for (int e = 0; e < V; ++e) u[e] = v[e] - u[e];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float alpha = of_row<LANES>(row.alpha, i), k = of_row<LANES>(row.k, i);
      const float q = of_row<LANES>(row.q, i);
      float next[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        next[e] = alpha * r_s[i].v[e] + k * u[e];
        out[e] += q * next[e];
      }
      if (FULL || (at.inside && holds(p, i))) store_pack(g_state + step * unsigned(i), next);
    }
    sum_columns<LANES, V>(out, s_out);
#pragma unroll
    for (int e = 0; e < V; ++e) out[e] *= p.scale;
    if ((FULL || at.inside) && threadIdx.y == 0)
      store_pack(p.o + at.head * p.value_dim + at.column, out);
  }
};

// launch.operator()<ROWS, FULL>(p, grid), once unless there are more heads or sequences than a grid
// takes.
template <int ROWS, int V, class P, class F>
void launch_parts(P p, int64_t batch, F&& launch) {
  constexpr int64_t kMost = 65535;
  if (int64_t(p.key_dim) * p.value_dim >> 32)
    throw Error(std::string(current_op()) + ": a state of 2^32 elements a head or more");
  const unsigned tiles = unsigned(ceil_div(p.value_dim, kLanes<ROWS> * V));
  for (p.first = 0; p.first < batch; p.first += kMost)
    for (int64_t h = 0; h < p.value_heads; h += kMost) {
      p.first_head = int(h);
      const dim3 grid(tiles, unsigned(std::min(p.value_heads - h, kMost)),
                      unsigned(std::min(batch - p.first, kMost)));
      if (V > 1 && p.key_dim == ROWS * kGroups && p.value_dim % (kLanes<ROWS> * V) == 0)
        launch.template operator()<ROWS, (V > 1)>(p, grid);
      else
        launch.template operator()<ROWS, false>(p, grid);
    }
}
template <int V, class P, class F>
void visit_step(const P& p, int64_t batch, F&& launch) {
  if (p.key_dim <= 64)
    launch_parts<8, V>(p, batch, launch);
  else if (p.key_dim <= 128)
    launch_parts<16, V>(p, batch, launch);
  else
    launch_parts<32, V>(p, batch, launch);
}

// What a step has of its state and of its inputs' scale and kind, whatever they are made from.
template <class P>
void set_sizes(P& p, const DeltaRuleStep& from, const Tensor& state, const Tensor& o) {
  p.scale = float(from.scale), p.by_channel = from.by_channel;
  p.state = ptr<float>(state);
  p.positive_decay = ebb::device_flags(o.device()) + int(DeviceFlag::positive_decay);
  p.heads = int(from.heads), p.value_heads = int(state.size(1));
  p.group = p.value_heads / p.heads;
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
