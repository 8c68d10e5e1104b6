// Cumulative sums of dense x [outer,n,inner] along n (ops/cumsum.h), by recursion over chunks:
//   1 total of every chunk   2 scan the totals, by the same code   3 scan every chunk, starting
//   from the total before it.
// Positions count in scan order; `reset` marks those where a sequence begins. What a chunk passes
// on is the sum since its last reset; whether it has one is the same for all columns.
// inner = 1: a block per (outer, chunk), 8 consecutive elements per thread. Else, and for short
// rows: a thread per (outer, chunk, column).
#include <algorithm>

#include "cuda/reduce.cuh"
#include "ops/cumsum.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kColumnChunk = 128;

struct Scan {
  int64_t outer, n, inner;
  int64_t chunk, chunks;
  bool backward;
  const uint8_t* reset;  // [n], may be null
};

__device__ __forceinline__ int64_t first_item() {
  return int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t item_step() { return int64_t(gridDim.x) * blockDim.x; }

// g_total [outer,chunks,inner]: write only these. Else g_scanned, their scan, says what comes
// before each chunk (null: nothing), and y is written.
template <class T>
__global__ void __launch_bounds__(kThreads)
    column_kernel(const T* __restrict__ g_x, T* __restrict__ g_y, float* __restrict__ g_total,
                  const float* __restrict__ g_scanned, Scan s) {
  const int64_t tasks = s.outer * s.chunks * s.inner;
  for (int64_t task = first_item(); task < tasks; task += item_step()) {
    const int64_t part = task / s.inner, c = task - part * s.inner;
    const int64_t o = part / s.chunks, k = part - o * s.chunks;
    const int64_t begin = k * s.chunk, end = ::min(s.n, begin + s.chunk);
    const T* x = g_x + o * s.n * s.inner + c;
    T* y = g_y + o * s.n * s.inner + c;
    float sum = g_scanned && k > 0 ? g_scanned[task - s.inner] : 0.f;
#pragma unroll 8
    for (int64_t r = begin; r < end; ++r) {
      const int64_t at = (s.backward ? s.n - 1 - r : r) * s.inner;
      if (s.reset && s.reset[r]) sum = 0;
      sum += to_float(x[at]);
      if (!g_total) y[at] = from_float<T>(sum);
    }
    if (g_total) g_total[task] = sum;
  }
}

// A sum and whether it began at a reset inside.
struct Piece {
  float sum;
  bool reset;
  __device__ void prepend(float before) {
    if (!reset) sum += before;
  }
};

// Inclusive scan over the warp.
__device__ __forceinline__ Piece warp_scan(Piece p) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const float sum = __shfl_up_sync(0xffffffffu, p.sum, o);
    const bool reset = __shfl_up_sync(0xffffffffu, int(p.reset), o);
    if (lane >= o) {
      p.prepend(sum);
      p.reset |= reset;
    }
  }
  return p;
}

// Elements r ... r+n-1 of a row in scan order, n <= 8.
__device__ __forceinline__ void reverse_if(bool backward, float (&v)[kPack]) {
#pragma unroll
  for (int e = 0; e < kPack / 2; ++e) {
    const float a = v[e], b = v[kPack - 1 - e];
    v[e] = backward ? b : a;
    v[kPack - 1 - e] = backward ? a : b;
  }
}
template <class T>
__device__ __forceinline__ void load_in_order(float (&v)[kPack], const T* row, const Scan& s,
                                              int64_t r, int n, bool aligned) {
  if (aligned && n == kPack) {
    load_pack8(v, row + (s.backward ? s.n - r - kPack : r));
    return reverse_if(s.backward, v);
  }
#pragma unroll
  for (int e = 0; e < kPack; ++e)
    v[e] = e < n ? to_float(row[s.backward ? s.n - 1 - r - e : r + e]) : 0.f;
}
template <class T>
__device__ __forceinline__ void store_in_order(T* row, float (&v)[kPack], const Scan& s, int64_t r,
                                               int n, bool aligned) {
  if (aligned && n == kPack) {
    reverse_if(s.backward, v);
    return store_pack8(row + (s.backward ? s.n - r - kPack : r), v);
  }
#pragma unroll
  for (int e = 0; e < kPack; ++e)
    if (e < n) row[s.backward ? s.n - 1 - r - e : r + e] = from_float<T>(v[e]);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    row_kernel(const T* __restrict__ g_x, T* __restrict__ g_y, float* __restrict__ g_total,
               const float* __restrict__ g_scanned, Scan s, bool aligned) {
  __shared__ Piece s_warp[kThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int64_t tasks = s.outer * s.chunks;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t o = task / s.chunks, k = task - o * s.chunks;
    const int64_t r = k * s.chunk + threadIdx.x * kPack;  // in scan order
    const int n = int(::max(int64_t(0), ::min(int64_t(kPack), s.n - r)));
    // Own elements: v[e] becomes the sum up to e, `fresh` the mask of those after a reset.
    float v[kPack];
    unsigned fresh = 0;
    load_in_order(v, g_x + o * s.n, s, r, n, aligned);
    Piece own{0, false};
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      if (e < n) {
        if (s.reset && s.reset[r + e]) own = {0, true};
        own.sum += v[e];
        v[e] = own.sum;
        fresh |= unsigned(own.reset) << e;
      }
    }
    // What the threads before pass on.
    const Piece upto = warp_scan(own);
    if (lane == 31) s_warp[warp] = upto;
    __syncthreads();
    float before = g_scanned && k > 0 ? g_scanned[task - 1] : 0.f;
    for (int w = 0; w < (g_total ? warps : warp); ++w) {
      Piece p = s_warp[w];
      p.prepend(before);
      before = p.sum;
    }
    if (g_total) {
      if (threadIdx.x == 0) g_total[task] = before;
    } else {
      Piece left{__shfl_up_sync(0xffffffffu, upto.sum, 1),
                 bool(__shfl_up_sync(0xffffffffu, int(upto.reset), 1))};
      if (lane == 0) left = {0, false};
      left.prepend(before);
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        if (!(fresh >> e & 1u)) v[e] += left.sum;
      store_in_order(g_y + o * s.n, v, s, r, n, aligned);
    }
    __syncthreads();
  }
}

// reset[r] = 1 where a sequence that is not empty begins, in scan order; zero on entry.
__global__ void mark_kernel(const int64_t* g_offsets, int64_t sequences, int64_t n, bool backward,
                            uint8_t* g_reset) {
  for (int64_t i = first_item(); i < sequences; i += item_step()) {
    const int64_t begin = g_offsets[i], end = g_offsets[i + 1];
    if (begin < end && begin >= 0 && end <= n) g_reset[backward ? n - end : begin] = 1;
  }
}
__global__ void any_kernel(const uint8_t* g_reset, Scan s, uint8_t* g_any) {
  for (int64_t k = first_item(); k < s.chunks; k += item_step()) {
    uint8_t any = 0;
    for (int64_t r = k * s.chunk; r < ::min(s.n, (k + 1) * s.chunk); ++r) any |= g_reset[r];
    g_any[k] = any;
  }
}

unsigned blocks_for(int64_t items, int threads) {
  return unsigned(std::min<int64_t>(ceil_div(items, threads), 1 << 30));
}

template <class T>
void scan(const T* x, T* y, Scan s, bool aligned, Device device) {
  const auto stream = static_cast<cudaStream_t>(ebb::current_stream(device).handle);
  const bool rows = s.inner == 1 && s.n > 32;
  int threads = kThreads;
  if (rows) {
    while (threads > 32 && threads / 2 * kPack >= s.n) threads /= 2;
    s.chunk = threads * kPack;
  } else {
    s.chunk = s.n <= 2 * kColumnChunk ? s.n : kColumnChunk;
  }
  s.chunks = ceil_div(s.n, s.chunk);
  const auto launch = [&](float* total, const float* scanned) {
    if (rows)
      row_kernel<<<blocks_for(s.outer * s.chunks, 1), threads, 0, stream>>>(x, y, total, scanned, s,
                                                                            aligned);
    else
      column_kernel<<<blocks_for(s.outer * s.chunks * s.inner, kThreads), kThreads, 0, stream>>>(
          x, y, total, scanned, s);
    check_launch();
  };
  if (s.chunks == 1) return launch(nullptr, nullptr);
  const Tensor total = Tensor::empty({s.outer, s.chunks, s.inner}, DType::f32, device);
  const Tensor scanned = Tensor::empty_like(total);
  Scan up{s.outer, s.chunks, s.inner, 0, 0, false, nullptr};
  Tensor any;
  if (s.reset) {
    any = Tensor::empty({s.chunks}, DType::u8, device);
    any_kernel<<<blocks_for(s.chunks, kThreads), kThreads, 0, stream>>>(s.reset, s,
                                                                        any.data<uint8_t>());
    check_launch();
    up.reset = any.data<uint8_t>();
  }
  launch(ptr<float>(total), nullptr);
  scan<float>(ptr<float>(total), ptr<float>(scanned), up, s.chunks % kPack == 0, device);
  launch(nullptr, ptr<float>(scanned));
}

}  // namespace

void cumsum(const Tensor& x, ScanShape shape, const SeqLayout& layout, ScanOrder order,
            const Tensor& y) {
  Scan s{shape.outer, shape.n, shape.inner, 0, 0, order == ScanOrder::backward, nullptr};
  Tensor reset;
  if (layout.is_packed()) {
    reset = Tensor::zeros({shape.n}, DType::u8, x.device());
    const int64_t sequences = layout.count(1);
    if (sequences > 0) {
      mark_kernel<<<blocks_for(sequences, kThreads), kThreads, 0, stream_of(x)>>>(
          layout.device_offsets().data<int64_t>(), sequences, shape.n, s.backward,
          reset.data<uint8_t>());
      check_launch();
    }
    s.reset = reset.data<uint8_t>();
  }
  const int64_t row = shape.outer == 1 && !s.backward ? 0 : shape.n;
  const bool aligned = packs_aligned(x, row) && packs_aligned(y, row);
  visit_compute(x.dtype(), [&]<class T>() { scan(ptr<T>(x), ptr<T>(y), s, aligned, x.device()); });
}

}  // namespace ebb::gpu
