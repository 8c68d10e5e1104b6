// The states between the segments of a sequence (cuda/delta_scan.cuh).
#include "cuda/delta_scan.cuh"

namespace ebb::gpu::delta {
namespace {

constexpr int kRows = 16, kThreads = 256;

// A segment's M [K,K] and the block's rows of E, behind each other in shared memory.
struct ChainBuffer {
  float *m, *e;

  __device__ __forceinline__ ChainBuffer(float* s, int index, int key_dim) {
    m = s + index * (key_dim + kRows) * key_dim;
    e = m + key_dim * key_dim;
  }
  __device__ __forceinline__ void fetch(const float* ends, int key_dim, int units, int v0) const {
    for (int i = 4 * int(threadIdx.x); i < key_dim * key_dim; i += 4 * kThreads)
      copy_async(m + i, ends + int64_t(units) * key_dim + i);
    for (int i = 4 * int(threadIdx.x); i < kRows * key_dim; i += 4 * kThreads)
      copy_async(e + i, ends + int64_t(v0) * key_dim + i);
  }
};

// The block's rows of the first start, transposed, from `given` [sequences·HV,K,V]; zeros if null.
__device__ __forceinline__ void read_given(float* s_start, const Problem<bf16_t>& p,
                                           const float* given, int64_t head, int v0) {
  for (int i = int(threadIdx.x); i < kRows * p.key_dim; i += kThreads) {
    const int r = i % kRows, c = i / kRows;  // neighbours along V, as given lies
    const int64_t at = (head * p.key_dim + c) * p.value_dim + v0 + r;
    s_start[r * p.key_dim + c] = given && v0 + r < p.value_dim ? given[at] : 0.f;
  }
}
// The block's rows of a start, to memory.
__device__ __forceinline__ void write_start(float* start, const Problem<bf16_t>& p,
                                            const float* s_start, int v0) {
  for (int j = 4 * int(threadIdx.x); j < min(kRows, p.value_dim - v0) * p.key_dim;
       j += 4 * kThreads)
    *reinterpret_cast<float4*>(start + j) = *reinterpret_cast<const float4*>(s_start + j);
}

// Block (16 columns of V, head, sequence), segment by segment: start ← E + start·M for rows of the
// transposed states, M as [unit vector, K], f32; the next M is on its way meanwhile. A thread has
// four channels of K and, where K > 64, several rows.
__global__ void __launch_bounds__(kThreads)
    chain_kernel(Problem<bf16_t> p, Segments segments, const float* given, bool reverse) {
  float* s = reinterpret_cast<float*>(&dynamic_shared<float4>());
  const int key_dim = p.key_dim, v0 = int(blockIdx.x) * kRows, hv = int(blockIdx.y);
  const int end_rows = ScanItem::tiles(p, true) * kFastTile;
  const int units = ScanItem::tiles(p, false) * kFastTile;  // the first row of M
  float* s_start = s + 2 * (key_dim + kRows) * key_dim;     // [kRows,K]
  const int quads = key_dim / 4, groups = kThreads / quads;
  const int k = 4 * (int(threadIdx.x) % quads), first = int(threadIdx.x) / quads;
  for (int64_t n = blockIdx.z; n < p.sequences; n += gridDim.z) {
    const auto item = [&](int i) {
      const int segment = reverse ? segments.count - 1 - i : i;
      return (n * segments.count + segment) * p.value_heads + hv;
    };
    const auto fetch = [&](int i) {
      if (i + 1 < segments.count)
        ChainBuffer(s, i & 1, key_dim)
            .fetch(segments.ends + item(i) * end_rows * key_dim, key_dim, units, v0);
      commit_copies();
    };
    fetch(0);
    read_given(s_start, p, given, n * p.value_heads + hv, v0);
    __syncthreads();
    for (int i = 0; i < segments.count; ++i) {
      fetch(i + 1);
      write_start(segments.starts + (item(i) * p.value_dim + v0) * key_dim, p, s_start, v0);
      if (i + 1 == segments.count) break;
      wait_copy_groups<1>();
      __syncthreads();
      const ChainBuffer now(s, i & 1, key_dim);
      float4 sums[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int r = first + j * groups;
        if (first >= groups || r >= kRows) continue;
        float4 x = *reinterpret_cast<const float4*>(now.e + r * key_dim + k);
        for (int c = 0; c < key_dim; c += 4) {
          const float4 a = *reinterpret_cast<const float4*>(s_start + r * key_dim + c);
          const float y[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float4 m = *reinterpret_cast<const float4*>(now.m + (c + e) * key_dim + k);
            x.x += y[e] * m.x, x.y += y[e] * m.y, x.z += y[e] * m.z, x.w += y[e] * m.w;
          }
        }
        sums[j] = x;
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int r = first + j * groups;
        if (first < groups && r < kRows)
          *reinterpret_cast<float4*>(s_start + r * key_dim + k) = sums[j];
      }
      __syncthreads();
    }
    wait_copy_groups<0>();
    __syncthreads();
  }
}

// The same for K > 128, where M does not fit: it comes in strips of rows, the next one on its way
// meanwhile.
constexpr int kStrip = 32;
constexpr int kRowsOfThread = kRows / (kThreads / (256 / 4));  // of 256 channels; else fewer

// By a thread, of its rows first, first + groups, ... and four channels: sums += start · strip.
__device__ __forceinline__ void add_strip(float4 (&sums)[kRowsOfThread], const float* s_start,
                                          const float* m, int rows, int key_dim, int first,
                                          int groups) {
  for (int c = 0; c < rows; c += 4) {
    float4 row[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) row[e] = *reinterpret_cast<const float4*>(m + (c + e) * key_dim);
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j) {
      const int r = first + j * groups;
      if (first >= groups || r >= kRows) continue;
      const float4 a = *reinterpret_cast<const float4*>(s_start + r * key_dim + c);
      const float y[4] = {a.x, a.y, a.z, a.w};
      float4& x = sums[j];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x.x += y[e] * row[e].x, x.y += y[e] * row[e].y;
        x.z += y[e] * row[e].z, x.w += y[e] * row[e].w;
      }
    }
  }
}

// Block (16 columns of V, head, sequence), as chain_kernel.
__global__ void __launch_bounds__(kThreads)
    chain_strips_kernel(Problem<bf16_t> p, Segments segments, const float* given, bool reverse) {
  float* s = reinterpret_cast<float*>(&dynamic_shared<float4>());
  const int key_dim = p.key_dim, v0 = int(blockIdx.x) * kRows, hv = int(blockIdx.y);
  const int64_t end_rows = ScanItem::tiles(p, true) * kFastTile;
  const int units = ScanItem::tiles(p, false) * kFastTile;  // the first row of M
  float* s_start = s + 2 * kStrip * key_dim;                // [kRows,K]
  const int quads = key_dim / 4, groups = kThreads / quads,
            strips = (key_dim + kStrip - 1) / kStrip;
  const int k = 4 * (int(threadIdx.x) % quads), first = int(threadIdx.x) / quads;
  for (int64_t n = blockIdx.z; n < p.sequences; n += gridDim.z) {
    const auto item = [&](int i) {
      const int segment = reverse ? segments.count - 1 - i : i;
      return (n * segments.count + segment) * p.value_heads + hv;
    };
    const auto strip = [&](int unit) { return s + (unit & 1) * kStrip * key_dim; };
    const auto rows_of = [&](int j) { return min(kStrip, key_dim - kStrip * j); };
    const auto fetch = [&](int unit) {  // strip unit % strips of segment unit / strips
      const int i = unit / strips, j = unit % strips;
      const float* from = segments.ends + (item(i) * end_rows + units + kStrip * j) * key_dim;
      for (int at = 4 * int(threadIdx.x); i + 1 < segments.count && at < rows_of(j) * key_dim;
           at += 4 * kThreads)
        copy_async(strip(unit) + at, from + at);
      commit_copies();
    };
    fetch(0);
    read_given(s_start, p, given, n * p.value_heads + hv, v0);
    __syncthreads();
    for (int i = 0; i < segments.count; ++i) {
      write_start(segments.starts + (item(i) * p.value_dim + v0) * key_dim, p, s_start, v0);
      if (i + 1 == segments.count) break;
      const float* ends = segments.ends + (item(i) * end_rows + v0) * key_dim + k;
      float4 sums[kRowsOfThread];
#pragma unroll
      for (int j = 0; j < kRowsOfThread; ++j) {
        const int r = first + j * groups;
        if (first < groups && r < kRows)
          sums[j] = *reinterpret_cast<const float4*>(ends + int64_t(r) * key_dim);
      }
      for (int at = 0; at < strips; ++at) {
        fetch(i * strips + at + 1);
        wait_copy_groups<1>();
        __syncthreads();
        add_strip(sums, s_start + kStrip * at, strip(i * strips + at) + k, rows_of(at), key_dim,
                  first, groups);
        __syncthreads();
      }
#pragma unroll
      for (int j = 0; j < kRowsOfThread; ++j) {
        const int r = first + j * groups;
        if (first < groups && r < kRows)
          *reinterpret_cast<float4*>(s_start + r * key_dim + k) = sums[j];
      }
      __syncthreads();
    }
    wait_copy_groups<0>();
    __syncthreads();
  }
}

}  // namespace

bool scans_fit(Device device, bool wide) {
  int shared = 0;  // bytes a block may have
  cuda_check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index),
             "device attribute");
  return size_t(shared) >= (wide ? sizeof(ScanShared<4, 2>)
                                 : std::max(sizeof(ScanShared<2, 3>), sizeof(ScanShared<2, 2>)));
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
  const bool wide = p.key_dim > 128;
  const int rows = wide ? 2 * kStrip + kRows : 2 * p.key_dim + 3 * kRows;
  const size_t shared = sizeof(float) * size_t(rows) * size_t(p.key_dim);
  const auto kernel = wide ? chain_strips_kernel : chain_kernel;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)),
             "shared memory");
  kernel<<<grid, kThreads, shared, stream>>>(p, segments, given, reverse);
  check_launch();
}

}  // namespace ebb::gpu::delta
