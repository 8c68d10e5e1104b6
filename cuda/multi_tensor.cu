// Sums and fills over lists of tensors (ops/multi_tensor.h). One block per chunk of 8192 elements;
// the block finds its tensor in the chunk table.
#include "cuda/common.cuh"
#include "ops/multi_tensor.h"

namespace ebb::gpu {
namespace {

using Row = TensorList::Row;
constexpr int kThreads = 256;
constexpr int kFinalThreads = 1024;

__device__ __forceinline__ double warp_sum_f64(double v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// Sum over the block in a fixed order; valid in thread 0.
__device__ double block_sum_f64(double v) {
  __shared__ double s_warp[32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  v = warp_sum_f64(v);
  if (lane == 0) s_warp[warp] = v;
  __syncthreads();
  return warp == 0 ? warp_sum_f64(lane < warps ? s_warp[lane] : 0.0) : 0.0;
}

__device__ __forceinline__ double square(float v) { return double(v) * double(v); }

// grid: chunks. 1 every thread squares its elements in f64, 16 bytes at a time where the address
// allows.  2 g_partial[chunk] = sum over the block.
template <class T>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const Row* g_rows, const TensorChunk* g_chunks, double* g_partial) {
  constexpr int N = 16 / sizeof(T);
  const TensorChunk chunk = g_chunks[blockIdx.x];
  const Row row = g_rows[chunk.row];
  const T* g_x = static_cast<const T*>(row.data) + chunk.begin;
  const int64_t left = row.numel - chunk.begin;
  const int items = int(left < kChunkItems ? left : kChunkItems);
  const int packs = reinterpret_cast<uintptr_t>(g_x) % 16 == 0 ? items / N : 0;
  double sum = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < packs; i += kThreads) {
    float r_x[N];
    load_pack<T, N>(r_x, g_x + i * N);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += square(r_x[j]);
  }
  for (int i = packs * N + threadIdx.x; i < items; i += kThreads) sum += square(to_float(g_x[i]));
  sum = block_sum_f64(sum);
  if (threadIdx.x == 0) g_partial[blockIdx.x] = sum;
}

// One block: g_out = Σ g_partial.
__global__ void __launch_bounds__(kFinalThreads)
    total_kernel(const double* g_partial, int64_t n, double* g_out) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kFinalThreads) sum += g_partial[i];
  sum = block_sum_f64(sum);
  if (threadIdx.x == 0) *g_out = sum;
}

// grid: chunks. Zeros, 16 bytes at a time where the address allows.
template <class T>
__global__ void __launch_bounds__(kThreads)
    zero_kernel(const Row* g_rows, const TensorChunk* g_chunks) {
  constexpr int N = 16 / sizeof(T);
  const TensorChunk chunk = g_chunks[blockIdx.x];
  const Row row = g_rows[chunk.row];
  T* g_x = static_cast<T*>(row.data) + chunk.begin;
  const int64_t left = row.numel - chunk.begin;
  const int items = int(left < kChunkItems ? left : kChunkItems);
  const int packs = reinterpret_cast<uintptr_t>(g_x) % 16 == 0 ? items / N : 0;
  for (int i = threadIdx.x; i < packs; i += kThreads)
    reinterpret_cast<uint4*>(g_x)[i] = uint4{0, 0, 0, 0};
  for (int i = packs * N + threadIdx.x; i < items; i += kThreads) g_x[i] = from_float<T>(0.f);
}

}  // namespace

void sum_of_squares(const TensorList& list, const Tensor& out) {
  const int64_t chunks = list.table().chunk_count();
  double* partial = static_cast<double*>(list.partials().raw());
  if (chunks > 0) {
    visit_compute(list.dtype(), [&]<class T>() {
      squares_kernel<device_t<T>><<<unsigned(chunks), kThreads, 0, stream_of(out)>>>(
          list.table().rows<Row>(), list.table().chunks(), partial);
    });
    check_launch();
  }
  total_kernel<<<1, kFinalThreads, 0, stream_of(out)>>>(partial, chunks,
                                                        static_cast<double*>(out.raw()));
  check_launch();
}

void zero_all(const TensorList& list) {
  const int64_t chunks = list.table().chunk_count();
  visit_compute(list.dtype(), [&]<class T>() {
    zero_kernel<device_t<T>><<<unsigned(chunks), kThreads, 0, stream_of(list.tensors()[0])>>>(
        list.table().rows<Row>(), list.table().chunks());
  });
  check_launch();
}

}  // namespace ebb::gpu
