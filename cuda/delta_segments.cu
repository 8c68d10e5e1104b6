// The states between the segments of a sequence (cuda/delta_scan.cuh).
#include "cuda/delta_scan.cuh"

namespace ebb::gpu::delta {
namespace {

constexpr int kRows = 16, kThreads = 256;

// Block (16 columns of V, head, sequence), segment by segment: start ← E + start·M for rows of the
// transposed states, M as [unit vector, K], f32. 1 store the start; 2 M to shared memory by 64
// rows; 3 the product, a thread having one channel of K and every fourth (second) row.
__global__ void __launch_bounds__(kThreads)
    chain_kernel(Problem<bf16_t> p, Segments segments, const float* given, bool reverse) {
  __shared__ float s_start[kRows][129];
  const int key_dim = p.key_dim, v0 = int(blockIdx.x) * kRows, hv = int(blockIdx.y);
  const int end_rows = ScanItem::tiles(p, true) * kFastTile;
  const int units = ScanItem::tiles(p, false) * kFastTile;  // the first row of M
  for (int64_t n = blockIdx.z; n < p.sequences; n += gridDim.z) {
    for (int i = int(threadIdx.x); i < kRows * key_dim; i += kThreads) {
      const int r = i % kRows, k = i / kRows;  // neighbours along V, as given lies
      const int64_t at = ((n * p.value_heads + hv) * key_dim + k) * p.value_dim + v0 + r;
      s_start[r][k] = given && v0 + r < p.value_dim ? given[at] : 0.f;
    }
    __syncthreads();
    for (int i = 0; i < segments.count; ++i) {
      const int segment = reverse ? segments.count - 1 - i : i;
      const int64_t item = (n * segments.count + segment) * p.value_heads + hv;
      for (int j = int(threadIdx.x); j < kRows * key_dim; j += kThreads) {  // 1
        const int r = j / key_dim, k = j % key_dim;
        if (v0 + r < p.value_dim)
          segments.starts[(item * p.value_dim + v0 + r) * key_dim + k] = s_start[r][k];
      }
      if (i + 1 == segments.count) break;
      const float* ends = segments.ends + item * end_rows * key_dim;
      float sums[8];  // 2, 3
      const int per_pass = kThreads / key_dim;
      const int k = int(threadIdx.x) % key_dim, first = int(threadIdx.x) / key_dim;
      const bool active = first < per_pass;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int r = first + j * per_pass;
        sums[j] = active && r < kRows ? ends[int64_t(v0 + r) * key_dim + k] : 0.f;
      }
#pragma unroll 16
      for (int c = 0; c < key_dim; ++c) {
        const float m = ends[int64_t(units + c) * key_dim + k];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int r = first + j * per_pass;
          if (r < kRows) sums[j] += s_start[r][c] * m;
        }
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int r = first + j * per_pass;
        if (active && r < kRows) s_start[r][k] = sums[j];
      }
      __syncthreads();
    }
    __syncthreads();
  }
}

}  // namespace

bool scans_fit(Device device) {
  int shared = 0;  // bytes a block may have
  cuda_check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index),
             "device attribute");
  return size_t(shared) >= sizeof(ScanShared<2, 3>);
}

Segments cut_sequences(const Problem<bf16_t>& p, Device device, Tensor (&buffers)[2]) {
  Segments segments;
  const int64_t heads = p.sequences * p.value_heads, processors = multiprocessors(device);
  if (heads == 0 || p.chunks == 0) return segments;
  // The scan's blocks and the first pass's must both find room at once, or cutting costs more than
  // it brings; so does cutting into fewer than three, or below eight chunks.
  const int64_t by_scan = processors / (heads * ScanItem::tiles(p, false));
  const int64_t by_ends = processors / (heads * ScanItem::tiles(p, true)) + 1;
  const int64_t by_length = p.chunks / p.sequences / 8;
  const int64_t count = std::min({by_scan, by_ends, by_length});
  if (count < 3) return segments;
  segments.count = int(count);
  const int64_t rows = heads * count * p.key_dim;
  buffers[0] = Tensor::empty({rows * ScanItem::tiles(p, true) * kFastTile}, DType::f32, device);
  buffers[1] = Tensor::empty({rows * p.value_dim}, DType::f32, device);
  segments.ends = ptr<float>(buffers[0]), segments.starts = ptr<float>(buffers[1]);
  return segments;
}

void chain_segments(const Problem<bf16_t>& p, const Segments& segments, const float* given,
                    bool reverse, cudaStream_t stream) {
  const dim3 grid(unsigned(ceil_div(p.value_dim, kRows)), unsigned(p.value_heads),
                  unsigned(std::min<int64_t>(p.sequences, 65535)));
  chain_kernel<<<grid, kThreads, 0, stream>>>(p, segments, given, reverse);
  check_launch();
}

}  // namespace ebb::gpu::delta
