// Device side of tensor/strided.h: packs of several elements, division-free index decoding. Used by
// copy.cu.
#pragma once
#include "cuda/common.cuh"
#include "tensor/strided.h"

namespace ebb::gpu {

using Plan = StridedPlan;

// Whether the elements can move in packs of `pack`, each aligned to its own size.
inline bool packs(const Plan& p, int64_t pack, int64_t d_item, int64_t s_item, const void* dst,
                  const void* src) {
  if (!p.inner_dense() || p.rank == 0 || p.n[0] % pack != 0) return false;
  if (reinterpret_cast<uintptr_t>(dst) % uintptr_t(pack * d_item) != 0) return false;
  if (reinterpret_cast<uintptr_t>(src) % uintptr_t(pack * s_item) != 0) return false;
  for (int i = 1; i < p.rank; ++i)
    if (p.ds[i] % pack != 0 || p.ss[i] % pack != 0) return false;
  return true;
}

// The same traversal in units of `pack` elements.
inline Plan in_packs(Plan p, int64_t pack) {
  p.n[0] /= pack;
  for (int i = 1; i < p.rank; ++i) p.ds[i] /= pack, p.ss[i] /= pack;
  return p;
}

// n / d and the remainder for n < 2^31 (32-bit) or any n (64-bit).
template <class I>
struct Divider;
template <>
struct Divider<uint32_t> {
  uint32_t d = 1, multiplier = 1, shift = 0;
  Divider() = default;
  explicit Divider(uint32_t divisor) : d(divisor) {
    while ((uint64_t(1) << shift) < d) ++shift;
    multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d)) / d + 1);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
#endif
};
template <>
struct Divider<uint64_t> {
  uint64_t d = 1;
  Divider() = default;
  explicit Divider(uint64_t divisor) : d(divisor) {}
#ifdef __CUDACC__
  __device__ __forceinline__ uint64_t divide(uint64_t n) const { return n / d; }
#endif
};

template <class I>
struct Walk {
  int rank = 0;
  Divider<I> n[kMaxDims];
  int64_t ds[kMaxDims] = {};
  int64_t ss[kMaxDims] = {};

  explicit Walk(const Plan& p, int first = 0) : rank(p.rank - first) {
    for (int i = 0; i < rank; ++i) {
      n[i] = Divider<I>(I(p.n[first + i]));
      ds[i] = p.ds[first + i];
      ss[i] = p.ss[first + i];
    }
  }
#ifdef __CUDACC__
  // Offsets of element `index` of the traversal.
  __device__ __forceinline__ void locate(I index, int64_t* d, int64_t* s) const {
    int64_t to = 0, from = 0;
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) {
      if (i >= rank) break;
      I at = index;
      if (i + 1 < rank) {
        const I rest = n[i].divide(index);
        at = index - rest * n[i].d;
        index = rest;
      }
      to += int64_t(at) * ds[i];
      from += int64_t(at) * ss[i];
    }
    *d = to;
    *s = from;
  }
#endif
};

inline constexpr int64_t kMax32 = (int64_t(1) << 31) - 1;

}  // namespace ebb::gpu
