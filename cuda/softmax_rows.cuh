// Rows of logits for the two losses: packs of 16 bytes at any alignment, the softmax's max and sum
// over a block, and what a row's gradient is multiplied with.
#pragma once
#include "cuda/common.cuh"
#include "ops/cross_entropy.h"
#include "tensor/device_flags.h"

namespace ebb::gpu {

// A row of v values cut at the 16-byte boundaries of memory. The first and last packs may hang over
// the row's ends; `shift` values of pack 0 lie before the row.
template <class T>
struct RowPacks {
  static constexpr int N = 16 / int(sizeof(T));
  const T* g_row;
  int64_t v;
  int shift;
  int64_t packs;

  __device__ RowPacks(const T* row, int64_t size)
      : g_row(row),
        v(size),
        shift(int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T))),
        packs((size + shift + N - 1) / N) {}
  __device__ int64_t first(int64_t q) const { return q * N - shift; }  // value index
  __device__ bool whole(int64_t q) const { return first(q) >= 0 && first(q) + N <= v; }
  __device__ int64_t pack_of(int64_t j) const { return (j + shift) / N; }

  // Places outside the row read −inf, whose exponential is 0.
  __device__ void load(int64_t q, float (&out)[N]) const {
    if (whole(q)) {
      load_pack<T, N>(out, g_row + first(q));
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int64_t j = first(q) + i;
        out[i] = j >= 0 && j < v ? to_float(g_row[j]) : -INFINITY;
      }
    }
  }
  // Into another row (or this one) at the same places; `to` may be aligned differently.
  __device__ void store(T* to, int64_t q, const float (&in)[N]) const {
    T* p = to + first(q);
    if (whole(q) && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
      store_pack<T, N>(p, in);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int64_t j = first(q) + i;
        if (j >= 0 && j < v) to[j] = from_float<T>(in[i]);
      }
    }
  }
};

// Σ exp(z) carried as sum·exp(max). A max of −inf means nothing but −inf so far.
struct MaxSum {
  float max = -INFINITY, sum = 0;
};

// What to subtract before the exponential: max, but nothing from a row of −inf.
__device__ __forceinline__ float shift_of(float max) { return max == -INFINITY ? 0.f : max; }
// exp(from − to) for from <= to; 1 for equal infinities, so that NaN comes from values alone.
__device__ __forceinline__ float rescale(float from, float to) {
  return from == to ? 1.f : __expf(from - to);
}

// Over the block, the same bits in every thread. scratch: 64 floats of shared memory.
__device__ __forceinline__ MaxSum block_max_sum(MaxSum a, float* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  float top = warp_max(a.max);
  a.sum = warp_sum(a.sum * rescale(a.max, top));
  if (lane == 0) scratch[warp] = top, scratch[32 + warp] = a.sum;
  __syncthreads();
  const float mine = lane < warps ? scratch[lane] : -INFINITY;
  const float part = lane < warps ? scratch[32 + lane] : 0.f;
  top = warp_max(mine);
  a.sum = warp_sum(part * rescale(mine, top));
  __syncthreads();
  return {top, a.sum};
}

// True for a class; false for ignore_index and, raising the flag, for anything else.
__device__ __forceinline__ bool is_class(int64_t label, int64_t v, int64_t ignore_index,
                                         int32_t* g_flags) {
  if (label >= 0 && label < v && label != ignore_index) return true;
  if (label != ignore_index) g_flags[int(DeviceFlag::cross_entropy_label)] = 1;
  return false;
}

// The factor of row n: upstream·weight/count (ops/cross_entropy.h: RowScale).
struct RowFactors {
  const float* g_upstream = nullptr;  // [] or [N]
  const float* g_weights = nullptr;   // [N]
  const float* g_count = nullptr;     // []
  bool upstream_per_row = false;

  explicit RowFactors(const RowScale& s)
      : g_upstream(ptr<float>(s.upstream)),
        g_weights(ptr<float>(s.weights)),
        g_count(ptr<float>(s.count)),
        upstream_per_row(s.upstream.defined() && s.upstream.numel() > 1) {}

  __device__ float of(int64_t row) const {
    float g = g_upstream ? g_upstream[upstream_per_row ? row : 0] : 1.f;
    if (g_weights) g *= g_weights[row];
    if (g_count) g = *g_count == 0.f ? 0.f : g / *g_count;
    return g;
  }
};

}  // namespace ebb::gpu
