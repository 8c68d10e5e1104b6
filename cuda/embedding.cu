// Embedding rows and the table's gradient (ops/embedding.h).
//
// The gradient, without atomics and without a thread that walks one frequent id's whole list:
//   1 keys: the id of every token, or V if it lies outside the table (sorted to the end, skipped)
//   2 stable radix sort of (key, token)
//   3 tiles of 32 sorted entries. A run of equal keys that lies within its tile goes into the
//   table.
//     A run that continues into a neighbour leaves one partial row per tile, in slot 2t (it starts
//     with the tile) or 2t+1; those slots are the sorted entries of the next level.
// Level after level shrinks the list 16-fold until one tile holds it all.
#include <cub/device/device_radix_sort.cuh>

#include <algorithm>

#include "cuda/common.cuh"
#include "ops/embedding.h"
#include "tensor/device_flags.h"

namespace ebb::gpu {
namespace {

constexpr int kTile = 32;
constexpr int kThreads = 128;  // of segment_kernel

template <class T>
bool aligned_for(const T* p, int n) {
  return reinterpret_cast<uintptr_t>(p) % (sizeof(T) * size_t(n)) == 0;
}

// One warp per row, 8 rows per block; N consecutive values per lane.
template <class T, class Y, int N>
__global__ void __launch_bounds__(256)
    gather_kernel(const T* g_table /*[V,d]*/, const int64_t* g_ids /*[rows]*/, Y* g_y /*[rows,d]*/,
                  int64_t rows, int64_t v, int64_t d, int32_t* g_flags) {
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  const int64_t id = g_ids[row];
  const bool inside = id >= 0 && id < v;
  if (!inside && lane == 0) g_flags[int(DeviceFlag::embedding_id)] = 1;
  for (int64_t j = lane * N; j < d; j += 32 * N) {
    float r[N] = {};
    if (inside) load_pack<T, N>(r, g_table + id * d + j);
    store_pack<Y, N>(g_y + row * d + j, r);
  }
}

__global__ void keys_kernel(const int64_t* g_ids, uint32_t* g_key, int32_t* g_token, int64_t n,
                            int64_t v) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int64_t id = g_ids[i];
  g_key[i] = uint32_t(id >= 0 && id < v ? id : v);
  g_token[i] = int32_t(i);
}

// grid (tiles, column blocks). Entry i of the level is row g_row[i] of g_source, or row i when
// g_row is null. `none`: the key of an entry without a row. g_partial, g_partial_key: 2 per tile.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    segment_kernel(const T* g_source /*[·,d]*/, const int32_t* g_row, const uint32_t* g_key,
                   int64_t n, int64_t d, uint32_t none, float* g_table /*[V,d]*/,
                   float* g_partial /*[2·tiles,d]*/, uint32_t* g_partial_key /*[2·tiles]*/) {
  __shared__ uint32_t s_key[kTile + 2];  // with both neighbours
  __shared__ int64_t s_row[kTile];
  const int64_t tile = blockIdx.x, begin = tile * kTile;
  const int count = int(min(int64_t(kTile), n - begin));
  for (int i = threadIdx.x; i < count + 2; i += kThreads) {
    const int64_t at = begin + i - 1;
    s_key[i] = at >= 0 && at < n ? g_key[at] : none;
    if (i >= 1 && i <= count) s_row[i - 1] = g_row ? g_row[at] : at;
  }
  __syncthreads();
  const int64_t j = (int64_t(blockIdx.y) * kThreads + threadIdx.x) * N;
  const bool mine = j < d;
  uint32_t head = none, tail = none;
  int start = 0;  // of the current run
  float sum[N] = {};
  for (int i0 = 0; i0 < count; i0 += 4) {
    float rows[4][N];  // loads ahead of the sums
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (mine && i0 + u < count && s_key[i0 + u + 1] != none)
        load_pack<T, N>(rows[u], g_source + s_row[i0 + u] * d + j);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int i = i0 + u;
      if (i >= count) break;
      const uint32_t key = s_key[i + 1];
      if (key != none && mine)
#pragma unroll
        for (int e = 0; e < N; ++e) sum[e] += rows[u][e];
      const bool last = i + 1 == count;
      if (!last && s_key[i + 2] == key) continue;
      if (key != none) {  // the run ends here, at least within this tile
        const bool from_left = start == 0 && s_key[0] == key;
        const bool to_right = last && s_key[count + 1] == key;
        if (!from_left && !to_right) {
          if (mine) {
            float* p = g_table + key * d + j;
            float old[N];
            load_pack<float, N>(old, p);
#pragma unroll
            for (int e = 0; e < N; ++e) old[e] += sum[e];
            store_pack<float, N>(p, old);
          }
        } else {
          const bool first_slot = start == 0;
          (first_slot ? head : tail) = key;
          if (mine) store_pack<float, N>(g_partial + (2 * tile + !first_slot) * d + j, sum);
          if (first_slot && last) {  // the tile is one run: zeros keep it connected to the next
            const float zero[N] = {};
            tail = key;
            if (mine) store_pack<float, N>(g_partial + (2 * tile + 1) * d + j, zero);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] = 0;
      start = i + 1;
    }
  }
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    g_partial_key[2 * tile] = head;
    g_partial_key[2 * tile + 1] = tail;
  }
}

// The levels of step 3. source f32 or bf16 on the first, f32 partial rows after.
template <class T, int N>
void sum_segments(const T* g_source, const Tensor& row, const Tensor& key, int64_t n, uint32_t none,
                  const Tensor& dtable) {
  const int64_t d = dtable.size(1), tiles = ceil_div(n, kTile);
  const cudaStream_t stream = stream_of(dtable);
  const int64_t slots = tiles > 1 ? 2 * tiles : 2;
  const Tensor partial = Tensor::empty({tiles > 1 ? slots : 0, d}, DType::f32, dtable.device());
  const Tensor partial_key = Tensor::empty({slots}, DType::i32, dtable.device());
  const int64_t blocks_y = ceil_div(d, int64_t(kThreads) * N);
  if (blocks_y > 65535) throw Error("embedding: rows of " + std::to_string(d) + " are too long");
  auto* keys = reinterpret_cast<uint32_t*>(key.raw());
  auto* next_keys = reinterpret_cast<uint32_t*>(partial_key.raw());
  segment_kernel<T, N><<<dim3(unsigned(tiles), unsigned(blocks_y)), kThreads, 0, stream>>>(
      g_source, row ? row.data<int32_t>() : nullptr, keys, n, d, none, ptr<float>(dtable),
      ptr<float>(partial), next_keys);
  check_launch();
  if (tiles > 1)
    sum_segments<float, N>(ptr<float>(partial), Tensor(), partial_key, slots, none, dtable);
}

int bits_of(uint64_t value) {
  int bits = 0;
  for (; value; value >>= 1) ++bits;
  return bits;
}

}  // namespace

void embedding_fwd(const Tensor& table, const Tensor& ids, const Tensor& y) {
  const int64_t rows = ids.numel(), v = table.size(0), d = table.size(1);
  if (rows == 0) return;
  const auto grid = unsigned(ceil_div(rows, 8));
  const cudaStream_t stream = stream_of(y);
  visit_compute(table.dtype(), [&]<class T>() {
    visit_compute(y.dtype(), [&]<class Y>() {
      using DT = device_t<T>;
      using DY = device_t<Y>;
      constexpr int N = 16 / int(std::max(sizeof(T), sizeof(Y)));
      const auto run = [&](auto kernel) {
        kernel<<<grid, 256, 0, stream>>>(ptr<T>(table), ids.data<int64_t>(), ptr<Y>(y), rows, v, d,
                                         gpu::device_flags(y.device()));
        check_launch();
      };
      if (d % N == 0 && aligned_for(ptr<T>(table), N) && aligned_for(ptr<Y>(y), N))
        run(gather_kernel<DT, DY, N>);
      else
        run(gather_kernel<DT, DY, 1>);
    });
  });
}

void embedding_bwd(const Tensor& ids, const Tensor& dy, const Tensor& dtable) {
  const int64_t n = ids.numel(), v = dtable.size(0), d = dtable.size(1);
  if (n == 0 || d == 0 || v == 0) return;
  const cudaStream_t stream = stream_of(dtable);
  const auto ints = [&] { return Tensor::empty({n}, DType::i32, dtable.device()); };
  const Tensor key = ints(), token = ints(), sorted_key = ints(), sorted_token = ints();
  const auto keys = [](const Tensor& t) { return reinterpret_cast<uint32_t*>(t.raw()); };
  keys_kernel<<<unsigned(ceil_div(n, 256)), 256, 0, stream>>>(  // 1
      ids.data<int64_t>(), keys(key), token.data<int32_t>(), n, v);
  check_launch();
  const auto sort = [&](void* scratch, size_t& bytes) {  // 2
    cuda_check(cub::DeviceRadixSort::SortPairs(scratch, bytes, keys(key), keys(sorted_key),
                                               token.data<int32_t>(), sorted_token.data<int32_t>(),
                                               n, 0, bits_of(uint64_t(v)), stream),
               "sort token ids");
  };
  size_t bytes = 0;
  sort(nullptr, bytes);
  const Tensor scratch =
      Tensor::empty({std::max<int64_t>(1, int64_t(bytes))}, DType::u8, dtable.device());
  sort(scratch.raw(), bytes);
  visit_compute(dy.dtype(), [&]<class T>() {  // 3
    if (d % 4 == 0 && aligned_for(ptr<T>(dy), 4) && aligned_for(ptr<float>(dtable), 4))
      sum_segments<device_t<T>, 4>(ptr<T>(dy), sorted_token, sorted_key, n, uint32_t(v), dtable);
    else
      sum_segments<device_t<T>, 1>(ptr<T>(dy), sorted_token, sorted_key, n, uint32_t(v), dtable);
  });
}

}  // namespace ebb::gpu
