// Device side of reductions: merging states (ops/reduce_states.h) across a group of threads.
#pragma once
#include <algorithm>
#include <cstring>

#include "cuda/any_dtype.cuh"
#include "ops/reduce_states.h"

namespace ebb::gpu {

inline constexpr int kReduceThreads = 256;

// Threads that share a row of n elements: up to a warp for short rows, a block for long ones.
inline int lanes_for(int64_t n) {
  if (n > 1024) return kReduceThreads;
  int lanes = 1;
  while (lanes < 32 && lanes * kPack < n) lanes *= 2;
  return lanes;
}

// Whether packs of 8 starting at multiples of `row` elements are aligned to 16 bytes.
inline bool packs_aligned(const Tensor& t, int64_t row) {
  return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0 && row % kPack == 0;
}

#ifdef __CUDACC__

template <class S>
__device__ __forceinline__ S shuffle_xor(const S& s, int mask) {
  static_assert(sizeof(S) % 4 == 0);
  uint32_t word[sizeof(S) / 4];
  memcpy(word, &s, sizeof(S));
#pragma unroll
  for (auto& w : word) w = __shfl_xor_sync(0xffffffffu, w, mask);
  S out;
  memcpy(&out, word, sizeof(S));
  return out;
}

// The union of the states of `lanes` neighbouring threads (a power of two up to 32, or the whole
// block), in every one of them. All threads of the block take part; `scratch` holds 8 states.
template <class S>
__device__ __forceinline__ S group_reduce(S s, int lanes, S* scratch) {
  for (int o = ::min(lanes, 32) / 2; o > 0; o /= 2) s.merge(shuffle_xor(s, o));
  if (lanes <= 32) return s;
  __syncthreads();  // scratch may still be read from the round before
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = s;
  __syncthreads();
  S total = scratch[0];
#pragma unroll
  for (int w = 1; w < kReduceThreads / 32; ++w) total.merge(scratch[w]);
  return total;
}

// n <= 8 consecutive values; the rest of v is unset.
template <class T>
__device__ __forceinline__ void load_some(float (&v)[kPack], const T* p, int n, bool aligned) {
  if (aligned && n == kPack) return load_pack8(v, p);
#pragma unroll
  for (int e = 0; e < kPack; ++e)
    if (e < n) v[e] = to_float(p[e]);
}
template <class T>
__device__ __forceinline__ void store_some(T* p, const float (&v)[kPack], int n, bool aligned) {
  if (aligned && n == kPack) return store_pack8(p, v);
#pragma unroll
  for (int e = 0; e < kPack; ++e)
    if (e < n) p[e] = from_float<T>(v[e]);
}

#endif

}  // namespace ebb::gpu
