// Random fills (tensor/random.h). grid: ceil(blocks of four elements / 256); thread i draws the
// four words of Philox block i and writes elements 4i … 4i+3, as the CPU does.
#include "cuda/common.cuh"
#include "tensor/random.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256;
enum Kind { kUniform = 0, kNormal = 1, kWords = 2 };

template <class T>
__device__ __forceinline__ T store_as(double v) {
  return T(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 store_as<__nv_bfloat16>(double v) {
  return __float2bfloat16_rn(float(v));
}

// Box-Muller on two words; even elements take the cosine.
__device__ __forceinline__ double normal(uint32_t first, uint32_t second, bool odd) {
  const double u = uniform_open(first), v = uniform_open(second);
  const double radius = sqrt(-2 * log(u)), angle = 2 * 3.14159265358979323846 * v;
  return radius * (odd ? sin(angle) : cos(angle));
}

template <class T>
__global__ void random_kernel(T* g_x, int64_t n, RandomKey key, int kind, double a, double b) {
  const int64_t block = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (block * 4 >= n) return;
  const Philox4 r = philox(key, uint64_t(block));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t i = block * 4 + j;
    if (i >= n) break;
    if (kind == kUniform)
      g_x[i] = store_as<T>(double(float(fma(b - a, double(uniform_open(r.v[j])), a))));
    else
      g_x[i] = store_as<T>(fma(b, normal(r.v[j & 2], r.v[(j & 2) + 1], j & 1), a));
  }
}

__global__ void words_kernel(int64_t* g_x, int64_t n, RandomKey key) {
  const int64_t block = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const Philox4 r = philox(key, uint64_t(block));
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (block * 4 + j < n) g_x[block * 4 + j] = int64_t(r.v[j]);
}

}  // namespace

void fill_random(const Tensor& x, RandomKey key, int kind, double a, double b) {
  const int64_t n = x.numel();
  if (n == 0) return;
  const unsigned grid = unsigned(ceil_div(ceil_div(n, 4), kThreads));
  const cudaStream_t stream = stream_of(x);
  if (kind == kWords) {
    words_kernel<<<grid, kThreads, 0, stream>>>(x.data<int64_t>(), n, key);
    return check_launch();
  }
  visit_float(x.dtype(), [&]<class T>() {
    random_kernel<<<grid, kThreads, 0, stream>>>(ptr<T>(x), n, key, kind, a, b);
    check_launch();
  });
}

}  // namespace ebb::gpu
