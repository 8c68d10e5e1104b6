// Bias of linear and its gradient (ops/matmul.h); the products are in cuda/gemm.cu.
#include <algorithm>

#include "cuda/common.cuh"
#include "ops/matmul.h"

namespace ebb::gpu {
namespace {

constexpr int64_t kMaxParts = 256;

// A block walks rows blockIdx.x, + gridDim.x, ...
template <class T>
__global__ void add_bias_kernel(T* g_y /*[rows,n]*/, const float* g_bias /*[n]*/, int64_t rows,
                                int64_t n) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x)
      g_y[row * n + j] = from_float<T>(to_float(g_y[row * n + j]) + g_bias[j]);
}

// grid (column tiles of 32, parts), 32×8 threads. Part p: rows [p·rows_per_part, ...).
// 1 a thread sums every eighth row of its column.  2 the eight sums are added in order.
template <class T>
__global__ void column_sum_kernel(const T* g_x /*[rows,n]*/, float* g_partial /*[parts,n]*/,
                                  int64_t rows, int64_t n, int64_t rows_per_part) {
  __shared__ float s_sum[8][32];
  const int64_t j = int64_t(blockIdx.x) * 32 + threadIdx.x;
  const int64_t begin = blockIdx.y * rows_per_part, end = min(rows, begin + rows_per_part);
  float sum = 0;
  if (j < n)
    for (int64_t i = begin + threadIdx.y; i < end; i += 8) sum += to_float(g_x[i * n + j]);  // 1
  s_sum[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || j >= n) return;
  for (int k = 1; k < 8; ++k) sum += s_sum[k][threadIdx.x];  // 2
  g_partial[blockIdx.y * n + j] = sum;
}

__global__ void add_parts_kernel(const float* g_partial /*[parts,n]*/, float* g_sum /*[n]*/,
                                 int64_t parts, int64_t n, bool accumulate) {
  const int64_t j = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j >= n) return;
  float sum = accumulate ? g_sum[j] : 0.f;
  for (int64_t p = 0; p < parts; ++p) sum += g_partial[p * n + j];
  g_sum[j] = sum;
}

}  // namespace

void add_bias(const Tensor& y, const Tensor& bias) {
  const int64_t n = bias.numel(), rows = n ? y.numel() / n : 0;
  if (rows == 0) return;
  const unsigned grid = unsigned(std::min<int64_t>(rows, 16 * multiprocessors(y.device())));
  const unsigned threads = unsigned(std::min<int64_t>(256, ceil_div(n, 32) * 32));
  visit_compute(y.dtype(), [&]<class T>() {
    add_bias_kernel<<<grid, threads, 0, stream_of(y)>>>(ptr<T>(y), ptr<float>(bias), rows, n);
    check_launch();
  });
}

void column_sum(const Tensor& x, const Tensor& sum, bool accumulate) {
  const int64_t n = sum.numel(), rows = n ? x.numel() / n : 0;
  if (n == 0) return;
  const int64_t rows_per_part = std::max<int64_t>(256, ceil_div(rows, kMaxParts));
  const int64_t parts = ceil_div(rows, rows_per_part);
  const Tensor partial = Tensor::empty({parts, n}, DType::f32, x.device());
  const cudaStream_t stream = stream_of(x);
  if (parts > 0)
    visit_compute(x.dtype(), [&]<class T>() {
      const dim3 grid(unsigned(ceil_div(n, 32)), unsigned(parts));
      column_sum_kernel<<<grid, dim3(32, 8), 0, stream>>>(ptr<T>(x), ptr<float>(partial), rows, n,
                                                          rows_per_part);
      check_launch();
    });
  add_parts_kernel<<<unsigned(ceil_div(n, 256)), 256, 0, stream>>>(
      ptr<float>(partial), ptr<float>(sum), parts, n, accumulate);
  check_launch();
}

}  // namespace ebb::gpu
