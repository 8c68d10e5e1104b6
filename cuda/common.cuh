// Shared by every .cu file: error checks, streams, warp and block sums, vector loads, exponentials.
// No fmt, JSON or third-party host headers here: nvcc reads this file.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "tensor/memory.h"
#include "tensor/tensor.h"

namespace ebb::gpu {

[[noreturn]] void throw_cuda_error(cudaError_t code, const char* what);  // cuda/memory.cu

inline void cuda_check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw_cuda_error(code, what);
}
// After every launch: surfaces a bad configuration at that call, named by the current operator.
inline void check_launch() { cuda_check(cudaGetLastError(), "kernel launch"); }

inline cudaStream_t stream_of(const Tensor& t) {
  return static_cast<cudaStream_t>(gpu::current_stream(t.device()).handle);
}
int multiprocessors(Device device);     // cuda/memory.cu
int compute_capability(Device device);  // 80, 90, ...

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ebb::bf16 on the host side is __nv_bfloat16 on the device side, bit for bit.
template <class T>
struct device_type {
  using type = T;
};
template <>
struct device_type<bf16> {
  using type = __nv_bfloat16;
};
template <class T>
using device_t = typename device_type<T>::type;

template <class T>
device_t<T>* ptr(const Tensor& t) {
  return t.defined() ? reinterpret_cast<device_t<T>*>(t.data<T>()) : nullptr;
}

// CUDA kernels exist for f32 and bf16: lambda receives float or __nv_bfloat16.
template <class F>
void visit_compute(DType t, F&& f) {
  if (t == DType::f32)
    f.template operator()<float>();
  else if (t == DType::bf16)
    f.template operator()<bf16>();
  else
    throw Error(std::string(current_op()) + ": dtype " + name(t) + " has no CUDA kernel");
}

#ifdef __CUDACC__

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// N consecutive values moved as one access (N·sizeof(T) = 1, 2, 4, 8 bytes or a multiple of 16;
// aligned to that, at most 16). Moved as words: nvcc would store the members of a bf16 struct
// two bytes at a time.
template <int bytes>
struct WordOf {
  using type = uint4;
};
template <>
struct WordOf<1> {
  using type = unsigned char;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <class T, int N>
union Pack {
  using Word = typename WordOf<int(sizeof(T)) * N>::type;
  static constexpr int kWords = int(sizeof(T)) * N / int(sizeof(Word));
  Word words[kWords];
  T v[N];
  __device__ __forceinline__ Pack() : words{} {}
};
// As stored, and widened: apart, so that a load can go out long before its values are needed.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_raw(const T* p) {
  using P = Pack<T, N>;
  P a;
#pragma unroll
  for (int i = 0; i < P::kWords; ++i) a.words[i] = reinterpret_cast<const typename P::Word*>(p)[i];
  return a;
}
template <class T, int N>
__device__ __forceinline__ void unpack(float (&out)[N], const Pack<T, N>& a) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {  // bf16 pairs: one instruction each
    unsigned pairs[N / 2];
    memcpy(pairs, a.words, sizeof pairs);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      out[i] = __uint_as_float(pairs[i / 2] << 16);
      out[i + 1] = __uint_as_float(pairs[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(a.v[i]);
  }
}
template <class T, int N>
__device__ __forceinline__ void load_pack(float (&out)[N], const T* p) {
  unpack(out, load_raw<T, N>(p));
}
// Global memory only. The wide words go out in assembly: left to itself, nvcc takes the assignment
// of a vector apart again where its parts come from far away.
__device__ __forceinline__ void store_word(uint4* p, uint4 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
               : "memory");
}
__device__ __forceinline__ void store_word(uint2* p, uint2 w) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(w.x),
               "r"(w.y)
               : "memory");
}
template <class W>
__device__ __forceinline__ void store_word(W* p, W w) {
  *p = w;
}
template <class T, int N>
__device__ __forceinline__ void store_pack(T* p, const float (&in)[N]) {
  using P = Pack<T, N>;
  P a;
#pragma unroll
  for (int i = 0; i < N; ++i) a.v[i] = from_float<T>(in[i]);
#pragma unroll
  for (int i = 0; i < P::kWords; ++i)
    store_word(reinterpret_cast<typename P::Word*>(p) + i, a.words[i]);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

// Sum over the block, same value and same order of additions in every thread. `scratch`: 32 floats
// of shared memory, reusable after return.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = (blockDim.x + 31) >> 5;
  v = warp_sum(v);
  if (warps == 1) return v;
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  v = warp_sum(lane < warps ? scratch[lane] : 0.f);
  __syncthreads();
  return v;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

#endif

}  // namespace ebb::gpu
