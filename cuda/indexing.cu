// index_select and gather on the GPU (ops/indexing.h). Forward copies raw words, whatever the
// dtype. Backward of index_select sorts the indices (stable), so that the terms of one row are
// neighbours in their order; no atomics.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "cuda/any_dtype.cuh"
#include "ops/indexing.h"
#include "tensor/device_flags.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kWindow = 256;  // sorted positions whose terms one thread adds up

unsigned blocks_for(int64_t items) {
  return unsigned(std::min<int64_t>(ceil_div(items, kThreads), 1 << 30));
}
__device__ __forceinline__ int64_t first_item() {
  return int64_t(blockIdx.x) * kThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t item_step() { return int64_t(gridDim.x) * kThreads; }

int32_t* index_flag(const Tensor& t) {
  return gpu::device_flags(t.device()) + int(DeviceFlag::gather_index);
}

// One thread per word of y [outer,m,words].
template <class Word>
__global__ void index_select_kernel(const Word* g_x, const int64_t* g_id, GatherShape s,
                                    int64_t words, Word* g_y, int32_t* flag) {
  const int64_t total = s.outer * s.m * words;
  for (int64_t i = first_item(); i < total; i += item_step()) {
    const int64_t row = i / words, w = i - row * words, o = row / s.m, m = row - o * s.m;
    const int64_t id = g_id[m];
    if (id >= 0 && id < s.n) {
      g_y[i] = g_x[(o * s.n + id) * words + w];
    } else {
      g_y[i] = Word{};
      *flag = 1;
    }
  }
}

template <class Word>
void launch_index_select(const Tensor& x, const Tensor& ids, GatherShape s, const Tensor& y) {
  const int64_t words = s.inner * item_size(x.dtype()) / int64_t(sizeof(Word));
  index_select_kernel<<<blocks_for(s.outer * s.m * words), kThreads, 0, stream_of(y)>>>(
      static_cast<const Word*>(x.raw()), ids.data<int64_t>(), s, words, static_cast<Word*>(y.raw()),
      index_flag(y));
  check_launch();
}

template <class Word>
__global__ void gather_kernel(const Word* g_x, const int64_t* g_id, GatherShape s, Word* g_y,
                              int32_t* flag) {
  const int64_t total = s.outer * s.m * s.inner;
  for (int64_t i = first_item(); i < total; i += item_step()) {
    const int64_t row = i / s.inner, c = i - row * s.inner, o = row / s.m, id = g_id[i];
    if (id >= 0 && id < s.n) {
      g_y[i] = g_x[(o * s.n + id) * s.inner + c];
    } else {
      g_y[i] = Word{};
      *flag = 1;
    }
  }
}

// Calls f with an unsigned type of the given size.
template <class F>
void visit_word(int64_t bytes, F&& f) {
  switch (bytes) {
    case 16:
      return f.template operator()<uint4>();
    case 8:
      return f.template operator()<uint64_t>();
    case 4:
      return f.template operator()<uint32_t>();
    case 2:
      return f.template operator()<uint16_t>();
    default:
      return f.template operator()<uint8_t>();
  }
}

// Columns (o,c) of dx have one owner each, which walks its indices in order.
template <class T>
__global__ void gather_columns_kernel(const T* g_dy, const int64_t* g_id, GatherShape s,
                                      float* g_dx) {
  for (int64_t i = first_item(); i < s.outer * s.inner; i += item_step()) {
    const int64_t o = i / s.inner, c = i - o * s.inner;
    for (int64_t m = 0; m < s.m; ++m) {
      const int64_t at = (o * s.m + m) * s.inner + c, id = g_id[at];
      if (id >= 0 && id < s.n) g_dx[(o * s.n + id) * s.inner + c] += to_float(g_dy[at]);
    }
  }
}

// Sort keys: the row of dx a position adds to, `rows` where the index is out of range.
__global__ void select_keys_kernel(const int64_t* g_id, int64_t n, int64_t m, uint64_t* g_key,
                                   int64_t* g_at) {
  for (int64_t i = first_item(); i < m; i += item_step()) {
    const int64_t id = g_id[i];
    g_key[i] = uint64_t(id >= 0 && id < n ? id : n);
    g_at[i] = i;
  }
}
__global__ void gather_keys_kernel(const int64_t* g_id, GatherShape s, uint64_t* g_key,
                                   int64_t* g_at) {
  for (int64_t i = first_item(); i < s.outer * s.m * s.inner; i += item_step()) {
    const int64_t row = i / s.inner, c = i - row * s.inner, o = row / s.m, id = g_id[i];
    g_key[i] =
        uint64_t(id >= 0 && id < s.n ? (o * s.n + id) * s.inner + c : s.outer * s.n * s.inner);
    g_at[i] = i;
  }
}

// A run of equal keys is cut at multiples of kWindow. A piece that is a whole run goes straight to
// dx; the pieces of longer runs go to g_part [windows][2][outer,inner]: slot 0 for a piece that
// continues a run from the window before, slot 1 for one that starts a run and leaves the window
// (at most one of each per window).
struct Runs {
  const uint64_t* key;  // [m] ascending
  const int64_t* at;    // [m] positions in dy
  int64_t m, n, outer, inner;
};
__device__ __forceinline__ bool starts_run(const Runs& r, int64_t p) {
  return p == 0 || r.key[p - 1] != r.key[p];
}

// One thread per (sorted position, outer, inner).
template <class T>
__global__ void add_pieces_kernel(Runs r, const T* g_dy, float* g_part, float* g_dx) {
  const int64_t width = r.outer * r.inner, total = r.m * width;
  for (int64_t i = first_item(); i < total; i += item_step()) {
    const int64_t p = i / width, column = i - p * width, o = column / r.inner;
    const int64_t c = column - o * r.inner, id = int64_t(r.key[p]);
    const bool first = starts_run(r, p);
    if (id >= r.n || !(first || p % kWindow == 0)) continue;
    const int64_t limit = ::min(r.m, (p / kWindow + 1) * kWindow);
    float sum = 0;
    int64_t q = p;
    for (; q < limit && int64_t(r.key[q]) == id; ++q)
      sum += to_float(g_dy[(o * r.m + r.at[q]) * r.inner + c]);
    const bool leaves = q == limit && q < r.m && int64_t(r.key[q]) == id;
    if (first && !leaves)
      g_dx[(o * r.n + id) * r.inner + c] = sum;
    else
      g_part[(p / kWindow * 2 + first) * width + column] = sum;
  }
}

// One thread per (window, outer, inner): the run that starts in the window and leaves it.
__global__ void join_pieces_kernel(Runs r, const float* g_part, float* g_dx) {
  const int64_t width = r.outer * r.inner, windows = (r.m + kWindow - 1) / kWindow;
  for (int64_t i = first_item(); i < (windows - 1) * width; i += item_step()) {
    const int64_t w = i / width, column = i - w * width, o = column / r.inner;
    const int64_t c = column - o * r.inner, next = (w + 1) * kWindow, id = int64_t(r.key[next]);
    if (id >= r.n || int64_t(r.key[next - 1]) != id) continue;  // nothing crosses here
    if (int64_t(r.key[w * kWindow]) == id && !starts_run(r, w * kWindow))
      continue;  // not its start
    float sum = g_part[(w * 2 + 1) * width + column];
    for (int64_t v = w + 1; v < windows && int64_t(r.key[v * kWindow]) == id; ++v)
      sum += g_part[v * 2 * width + column];
    g_dx[(o * r.n + id) * r.inner + c] = sum;
  }
}

// dx[o,key,c] = Σ dy[o,at,c] over the m (key, at) pairs, in the order of `at`.
void add_sorted(const Tensor& keys, const Tensor& at, const Tensor& dy, Runs r, const Tensor& dx) {
  const cudaStream_t stream = stream_of(dx);
  const Tensor key_out = Tensor::empty_like(keys), at_out = Tensor::empty_like(at);
  const auto* key_in = reinterpret_cast<const uint64_t*>(keys.data<int64_t>());
  auto* sorted = reinterpret_cast<uint64_t*>(key_out.data<int64_t>());
  size_t bytes = 0;
  const auto sort = [&](void* scratch) {
    cuda_check(cub::DeviceRadixSort::SortPairs(
                   scratch, bytes, key_in, sorted, static_cast<const int64_t*>(at.data<int64_t>()),
                   at_out.data<int64_t>(), r.m, 0, std::bit_width(uint64_t(r.n)), stream),
               "radix sort");
  };
  sort(nullptr);
  const Tensor scratch =
      Tensor::empty({int64_t(std::max<size_t>(bytes, 1))}, DType::u8, dx.device());
  sort(scratch.raw());
  r.key = sorted;
  r.at = at_out.data<int64_t>();
  const int64_t windows = ceil_div(r.m, kWindow), width = r.outer * r.inner;
  const Tensor part = Tensor::empty({windows, 2, width}, DType::f32, dx.device());
  visit_compute(dy.dtype(), [&]<class T>() {
    add_pieces_kernel<<<blocks_for(r.m * width), kThreads, 0, stream>>>(
        r, ptr<T>(dy), ptr<float>(part), ptr<float>(dx));
    check_launch();
  });
  if (windows == 1) return;
  join_pieces_kernel<<<blocks_for((windows - 1) * width), kThreads, 0, stream>>>(
      r, ptr<float>(part), ptr<float>(dx));
  check_launch();
}

}  // namespace

void index_select_fwd(const Tensor& x, const Tensor& ids, GatherShape s, const Tensor& y) {
  int64_t word = 16;
  const int64_t row = s.inner * item_size(x.dtype());
  const auto misaligned = [&] {
    return row % word || reinterpret_cast<uintptr_t>(x.raw()) % uintptr_t(word) ||
           reinterpret_cast<uintptr_t>(y.raw()) % uintptr_t(word);
  };
  while (word > 1 && misaligned()) word /= 2;
  visit_word(word, [&]<class Word>() { launch_index_select<Word>(x, ids, s, y); });
}

void gather_fwd(const Tensor& x, const Tensor& index, GatherShape s, const Tensor& y) {
  visit_word(item_size(x.dtype()), [&]<class Word>() {
    gather_kernel<<<blocks_for(y.numel()), kThreads, 0, stream_of(y)>>>(
        static_cast<const Word*>(x.raw()), index.data<int64_t>(), s, static_cast<Word*>(y.raw()),
        index_flag(y));
    check_launch();
  });
}

void index_select_bwd(const Tensor& dy, const Tensor& ids, GatherShape s, const Tensor& dx) {
  const Tensor keys = Tensor::empty_like(ids), at = Tensor::empty_like(ids);
  select_keys_kernel<<<blocks_for(s.m), kThreads, 0, stream_of(dx)>>>(
      ids.data<int64_t>(), s.n, s.m, reinterpret_cast<uint64_t*>(keys.data<int64_t>()),
      at.data<int64_t>());
  check_launch();
  add_sorted(
      keys, at, dy,
      {.key = nullptr, .at = nullptr, .m = s.m, .n = s.n, .outer = s.outer, .inner = s.inner}, dx);
}

void gather_bwd(const Tensor& dy, const Tensor& index, GatherShape s, const Tensor& dx) {
  const int64_t columns = s.outer * s.inner;
  if (s.m <= 64 || columns >= 1 << 15) {
    visit_compute(dy.dtype(), [&]<class T>() {
      gather_columns_kernel<<<blocks_for(columns), kThreads, 0, stream_of(dx)>>>(
          ptr<T>(dy), index.data<int64_t>(), s, ptr<float>(dx));
      check_launch();
    });
    return;
  }
  // Few long columns: every element of dy is a row of its own.
  const int64_t m = s.outer * s.m * s.inner;
  const Tensor keys = Tensor::empty({m}, DType::i64, dx.device()), at = Tensor::empty_like(keys);
  gather_keys_kernel<<<blocks_for(m), kThreads, 0, stream_of(dx)>>>(
      index.data<int64_t>(), s, reinterpret_cast<uint64_t*>(keys.data<int64_t>()),
      at.data<int64_t>());
  check_launch();
  add_sorted(
      keys, at, dy,
      {.key = nullptr, .at = nullptr, .m = m, .n = s.outer * s.n * s.inner, .outer = 1, .inner = 1},
      dx);
}

}  // namespace ebb::gpu
