// Loads and stores whose element type is known at run time only: one branch, the same in every
// thread, instead of a kernel per combination of types.
#pragma once
#include "cuda/common.cuh"

namespace ebb::gpu {

inline constexpr int kPack = 8;  // elements of a vector access: 16 bytes of bf16, 2 × 16 of f32

#ifdef __CUDACC__

__device__ __forceinline__ float load_any(const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::f32:
      return static_cast<const float*>(p)[i];
    case DType::bf16:
      return to_float(static_cast<const __nv_bfloat16*>(p)[i]);
    default:
      return float(static_cast<const uint8_t*>(p)[i]);
  }
}

__device__ __forceinline__ void store_any(void* p, DType t, int64_t i, float v) {
  switch (t) {
    case DType::f32:
      static_cast<float*>(p)[i] = v;
      break;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(p)[i] = from_float<__nv_bfloat16>(v);
      break;
    default:
      static_cast<uint8_t*>(p)[i] = uint8_t(v);
  }
}

// Eight consecutive elements; p aligned to 16 bytes (8 for u8).
template <class T>
__device__ __forceinline__ void load_pack8(float (&v)[kPack], const T* p) {
  load_pack<T, kPack>(v, p);
}
__device__ __forceinline__ void load_pack8(float (&v)[kPack], const uint8_t* p) {
  const uint2 word = *reinterpret_cast<const uint2*>(p);
#pragma unroll
  for (int e = 0; e < kPack; ++e) v[e] = float((e < 4 ? word.x : word.y) >> (e % 4 * 8) & 0xffu);
}
template <class T>
__device__ __forceinline__ void store_pack8(T* p, const float (&v)[kPack]) {
  store_pack<T, kPack>(p, v);
}
__device__ __forceinline__ void store_pack8(uint8_t* p, const float (&v)[kPack]) {
  uint2 word{0, 0};
#pragma unroll
  for (int e = 0; e < kPack; ++e)
    (e < 4 ? word.x : word.y) |= unsigned(uint8_t(v[e])) << (e % 4 * 8);
  store_word(reinterpret_cast<uint2*>(p), word);
}

__device__ __forceinline__ void load_any8(float (&v)[kPack], const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::f32:
      return load_pack8(v, static_cast<const float*>(p) + i);
    case DType::bf16:
      return load_pack8(v, static_cast<const __nv_bfloat16*>(p) + i);
    default:
      return load_pack8(v, static_cast<const uint8_t*>(p) + i);
  }
}
__device__ __forceinline__ void store_any8(void* p, DType t, int64_t i, const float (&v)[kPack]) {
  switch (t) {
    case DType::f32:
      return store_pack8(static_cast<float*>(p) + i, v);
    case DType::bf16:
      return store_pack8(static_cast<__nv_bfloat16*>(p) + i, v);
    default:
      return store_pack8(static_cast<uint8_t*>(p) + i, v);
  }
}

#endif

}  // namespace ebb::gpu
