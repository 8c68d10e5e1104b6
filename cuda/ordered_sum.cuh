// Second stage of parameter gradients: partial sums per block, [rows, cols] f32 or f64, are added
// up over the rows in one fixed order (no atomics), in f64.
//   ordered_sum(partial, rows, cols, stream, put);   // put(col, sum): where the sum goes
#pragma once
#include "cuda/common.cuh"

namespace ebb::gpu {

#ifdef __CUDACC__

inline constexpr int kSumColumns = 32, kSumRows = 16;

// grid (ceil(cols/32)), block (32,16). Thread row y adds rows y, y+16, ...; then the 16 sums are
// added in order.
template <class P, class Put>
__global__ void ordered_sum_kernel(const P* g_partial, int64_t rows, int64_t cols, Put put) {
  __shared__ double s_sum[kSumRows][kSumColumns];
  const int64_t col = int64_t(blockIdx.x) * kSumColumns + threadIdx.x;
  double sum = 0;
  if (col < cols) {
#pragma unroll 4
    for (int64_t r = threadIdx.y; r < rows; r += kSumRows) sum += double(g_partial[r * cols + col]);
  }
  s_sum[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
  for (int y = 1; y < kSumRows; ++y) sum += s_sum[y][threadIdx.x];
  put(col, sum);
}

template <class P, class Put>
void ordered_sum(const P* g_partial, int64_t rows, int64_t cols, cudaStream_t stream, Put put) {
  if (cols == 0) return;
  ordered_sum_kernel<<<unsigned(ceil_div(cols, kSumColumns)), dim3(kSumColumns, kSumRows), 0,
                       stream>>>(g_partial, rows, cols, put);
  check_launch();
}

#endif

}  // namespace ebb::gpu
