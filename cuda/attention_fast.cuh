// Shared by the tensor-core kernels of causal softmax attention in bf16 (attention_fast_fwd.cu,
// attention_fast_bwd.cu; FlashAttention-2, Dao 2023): heads of at most 128 channels, a multiple of
// 8. A block has two groups of four warps, each with 64 rows of the block's 128; 64 columns at a
// time pass through shared memory, the next ones on their way meanwhile. Fragments as in
// cuda/delta_fast.cuh: a lane has rows g, g+8 of its warp's 16 and columns 8n+2c, 8n+2c+1.
#pragma once
#include "cuda/attention.cuh"
#include "cuda/delta_fast.cuh"

namespace ebb::gpu::attend {

using delta::bf16_t;
using delta::Lane;
using delta::TilePlace;

inline constexpr int kGroups = 2, kRows = 64 * kGroups, kColumns = 64, kFastThreads = 256;
inline constexpr float kLog2e = 1.4426950408889634f;

// Whether these kernels take the problem.
bool fast_path(const AttentionProblem& p);
void fast_forward(const Problem<bf16_t>& p, cudaStream_t stream);
void fast_backward(const Backward<bf16_t>& p, cudaStream_t stream);

#ifdef __CUDACC__

// The 16-byte rows of tokens [first, first + 64) of one head, in slabs of 64 channels; zeros beyond
// `rows` tokens and `width` channels. By all threads.
template <int SLABS>
__device__ __forceinline__ void fetch_rows(SwizzledTile (&s)[SLABS], const bf16_t* g,
                                           int64_t stride, int64_t rows, int width) {
  const TilePlace at;
  const int count = int(::max(int64_t(0), ::min(int64_t(64), rows)));
#pragma unroll
  for (int j = 0; j < SLABS; ++j) at.fetch(s[j], g + 64 * j, stride, count, width - 64 * j);
}
template <int SLABS>
__device__ __forceinline__ void store_rows(bf16_t* g, const SwizzledTile (&s)[SLABS],
                                           int64_t stride, int64_t rows, int width) {
  const TilePlace at;
  const int count = int(::max(int64_t(0), ::min(int64_t(64), rows)));
#pragma unroll
  for (int j = 0; j < SLABS; ++j) at.store(g + 64 * j, stride, s[j], count, width - 64 * j);
}

// x[64,64] = a bᵀ of two tiles of rows. Wait with warpgroup_wait, then settle(x).
template <int SLABS>
__device__ __forceinline__ void multiply_channels(float (&x)[8][4], const SwizzledTile (&a)[SLABS],
                                                  const SwizzledTile (&b)[SLABS], int warp) {
  multiply_tiles<true, Inner::last, Inner::last>(x, a[0], b[0], warp);
#pragma unroll
  for (int j = 1; j < SLABS; ++j)
    multiply_tiles<false, Inner::last, Inner::last>(x, a[j], b[j], warp);
}
// x += a b, a [64,64] in registers, b 64 rows.
template <int SLABS>
__device__ __forceinline__ void add_rows(float (&x)[SLABS][8][4], const unsigned (&a)[4][4],
                                         const SwizzledTile (&b)[SLABS]) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) multiply_columns(x[j], a, b[j]);
}
template <int SLABS>
__device__ __forceinline__ void settle_all(float (&x)[SLABS][8][4]) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) settle(x[j]);
}
template <int SLABS>
__device__ __forceinline__ void clear(float (&x)[SLABS][8][4]) {
#pragma unroll
  for (auto& slab : x)
#pragma unroll
    for (auto& tile : slab)
#pragma unroll
      for (float& e : tile) e = 0.f;
}

// The warp's 16 rows of x, row g times f[0] and g+8 times f[1], as bf16 to its rows of the tiles.
template <int SLABS>
__device__ __forceinline__ void put_rows(SwizzledTile (&s)[SLABS], const float (&x)[SLABS][8][4],
                                         const float (&f)[2], int warp, const Lane& l) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float(&a)[4] = x[j][2 * k];
      const float(&b)[4] = x[j][2 * k + 1];
      const unsigned r[4] = {
          pack_bf16(a[0] * f[0], a[1] * f[0]), pack_bf16(a[2] * f[1], a[3] * f[1]),
          pack_bf16(b[0] * f[0], b[1] * f[0]), pack_bf16(b[2] * f[1], b[3] * f[1])};
      delta::store_matrices<false>(s[j].at(16 * warp + l.low + 8 * l.odd, 16 * k + 8 * l.high), r);
    }
}

// Over the four lanes of a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Tile number `item` of an axis, counted so that the longest rows of the causal matrix come first:
// the last tiles of all sequences for queries, the first ones for keys.
__device__ __forceinline__ int64_t tile_index(const Axis& axis, bool of_keys, int64_t item) {
  if (axis.tiles_before) return of_keys ? item : axis.tiles - 1 - item;
  const int64_t batch = axis.tiles / axis.tiles_per_row, i = item / batch;
  return item % batch * axis.tiles_per_row + (of_keys ? i : axis.tiles_per_row - 1 - i);
}

// Which of 64 rows, keys or positions from `first` on, have to do with each other: keys `key`...
// and positions `position`... . All of them, some, or none.
enum class Sight { none, some, all };
template <class T>
__device__ __forceinline__ Sight sight_of(const Problem<T>& p, int64_t position, int64_t key) {
  if (key > position + 63 || key + 63 <= position - p.window) return Sight::none;
  return key + 63 <= position && key > position + 63 - p.window ? Sight::all : Sight::some;
}
template <class T>
__device__ __forceinline__ bool in_sight(const Problem<T>& p, int64_t position, int64_t key) {
  return key <= position && key > position - p.window;
}

template <class Shared, class P>
void launch_all(void (*kernel)(P, int64_t), const P& p, int64_t items, cudaStream_t stream) {
  constexpr int64_t kMost = int64_t(1) << 30;
  for (int64_t first = 0; first < items; first += kMost) {
    const dim3 grid(unsigned(std::min(items - first, kMost)));
    delta::launch_fast<Shared>(kernel, kFastThreads, grid, stream, p, first);
  }
}

#endif

}  // namespace ebb::gpu::attend
