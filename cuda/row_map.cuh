// Elementwise kernels over rows that may lie apart: one thread per pack of V elements.
//   const RowMap map(rows, width, V, all_dense);
//   launch_rows(map, stream, [=] __device__(int64_t row, int64_t col) { ... });
#pragma once
#include "cuda/common.cuh"
#include "ops/rows.h"

namespace ebb::gpu {

// [rows, packs] and how a flat index becomes row and column. Where every tensor is dense the whole
// is one row, and nothing is divided.
struct RowMap {
  int64_t rows, packs;
  int width;   // elements of a pack
  bool small;  // 32-bit division will do

  RowMap(int64_t row_count, int64_t row_width, int pack, bool dense)
      : rows(dense ? 1 : row_count),
        packs((dense ? row_count * row_width : row_width) / pack),
        width(pack),
        small(rows * packs < (int64_t(1) << 32)) {}
};

inline bool is_dense(const Rows& r) { return r.count <= 1 || r.stride == r.width; }

#ifdef __CUDACC__

// grid (ceil(rows·packs/256)), block 256.
template <class F>
__global__ void rows_kernel(const RowMap map, F body) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= map.rows * map.packs) return;
  int64_t row = 0;
  if (map.rows > 1) row = map.small ? unsigned(i) / unsigned(map.packs) : i / map.packs;
  body(row, (i - row * map.packs) * map.width);
}

template <class F>
void launch_rows(const RowMap& map, cudaStream_t stream, F body) {
  const int64_t n = map.rows * map.packs;
  if (n == 0) return;
  rows_kernel<<<unsigned(ceil_div(n, 256)), 256, 0, stream>>>(map, body);
  check_launch();
}

#endif

}  // namespace ebb::gpu
