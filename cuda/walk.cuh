// For kernels in which every thread owns V neighbouring channels and walks along a run of tokens:
// what comes from earlier tokens stays in registers, every row is read once, and gradients of
// per-channel parameters are summed on the way.
#pragma once
#include "cuda/common.cuh"

namespace ebb::gpu {

#ifdef __CUDACC__

// The shape of a launch in which every thread owns V neighbouring channels and walks along a run
// of tokens: block (lanes, 256/lanes), lanes over channel vectors, the other axis over runs.
struct WalkShape {
  unsigned lanes = 1, rows = 256;
  int64_t channel_blocks = 1;
  int64_t run = 1;     // tokens per thread
  int64_t blocks = 0;  // grid.x: channel blocks fastest
  int64_t groups = 0;  // blocks along the tokens: rows of partial sums
  dim3 block() const { return dim3(lanes, rows); }
};

// Runs as long as `longest` where that leaves about `threads` of them, never below `shortest`.
// Depends on the sizes alone: the order of sums does too.
inline WalkShape walk_shape(int64_t tokens, int64_t vectors, int64_t shortest, int64_t longest,
                            int64_t threads) {
  WalkShape s;
  while (s.lanes < 32 && int64_t(s.lanes) < vectors) s.lanes *= 2;
  s.rows = 256 / s.lanes;
  s.channel_blocks = ceil_div(vectors, s.lanes);
  s.run = shortest;
  while (s.run < longest && tokens * vectors >= 2 * s.run * threads) s.run *= 2;
  s.groups = ceil_div(tokens, s.run * s.rows);
  s.blocks = s.groups * s.channel_blocks;
  return s;
}

// Where a thread of such a launch stands.
struct WalkPosition {
  int64_t c = 0;      // its first channel
  int64_t f0 = 0;     // its first token
  int64_t group = 0;  // its block along the tokens
};
template <int V>
__device__ __forceinline__ WalkPosition walk_position(int64_t channel_blocks, int64_t run) {
  WalkPosition p;
  const int64_t block = blockIdx.x;
  p.group = block / channel_blocks;
  p.c = ((block - p.group * channel_blocks) * blockDim.x + threadIdx.x) * V;
  p.f0 = (p.group * blockDim.y + threadIdx.y) * run;
  return p;
}

// Sums r_value[i][v] of the block's threads that own the same channels, in order of threadIdx.y,
// and writes those with i < count to g_row[i·d + c + v]. s_sum: 256·N·V values; every thread of the
// block calls.
template <class A, int N, int V>
__device__ __forceinline__ void block_partials(const A (&r_value)[N][V], A* s_sum, A* g_row,
                                               int64_t d, int64_t c_block, int count = N) {
  const int lanes = blockDim.x, rows = blockDim.y;
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int v = 0; v < V; ++v)
      s_sum[((i * V + v) * rows + threadIdx.y) * lanes + threadIdx.x] = r_value[i][v];
  __syncthreads();
  for (int o = threadIdx.y * lanes + threadIdx.x; o < N * V * lanes; o += rows * lanes) {
    const int x = o % lanes, iv = o / lanes;
    const int64_t c = c_block + x * V + iv % V;
    A sum = 0;
    for (int y = 0; y < rows; ++y) sum += s_sum[(iv * rows + y) * lanes + x];
    if (c < d && iv / V < count) g_row[(iv / V) * d + c] = sum;
  }
}

#endif

}  // namespace ebb::gpu
