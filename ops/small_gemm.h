// Products of small row-major matrices that sit in the caches: no packing, no threads, no call
// overhead. Every element of C is one chain of fused multiply-adds over ascending p, so results do
// not depend on how the caller tiles M and N.
//   gemm<Write::add>(m, n, k, rows(a, lda), b, ldb, c, ldc);     // C[m,n] += A[m,k] B[k,n]
//   gemm<Write::set>(m, n, k, columns(a, lda), ...)              // C[m,n]  = A[k,m]ᵀ B[k,n]
#pragma once
#include <algorithm>

#include "ops/simd.h"

namespace ebb::simd {

enum class Write { set, add, subtract };
// Triangles that need not be touched (all in units of rows of C).
enum class Part {
  full,
  lower_a,  // A[i,p] = 0 for p > i
  upper_a,  // A[i,p] = 0 for p < i
  lower_c,  // only C[i,j], j <= i is wanted (some of the rest is written, too)
};

template <class T>
struct Left {  // A[i,p] = data[i·row + p·column]
  const T* data;
  int64_t row, column;
};
template <class T>
Left<T> rows(const T* a, int64_t stride) {
  return {a, stride, 1};
}
template <class T>
Left<T> columns(const T* a, int64_t stride) {  // A is the transpose of what is stored
  return {a, 1, stride};
}

namespace detail {
// Rows of vectors kept in registers: 6x2 accumulators fill 16 registers, 8x2 half of 32.
inline constexpr int kTileRows = kVectorBytes == 64 ? 8 : 6;

template <Write W, int M, int N, class T>
inline void tile(Left<T> a, const T* b, int64_t ldb, T* c, int64_t ldc, int64_t begin,
                 int64_t end) {
  constexpr int n = kLanes<T>;
  Vec<T> sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) sum[i][j] = W == Write::set ? Vec<T>{} : load(c + i * ldc + j * n);
  for (int64_t p = begin; p < end; ++p) {
    Vec<T> row[N];
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) row[j] = load(b + p * ldb + j * n);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const T s = a.data[i * a.row + p * a.column];
#pragma GCC unroll 2
      for (int j = 0; j < N; ++j) {
        sum[i][j] = fused(W == Write::subtract ? -s : s, row[j], sum[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) store(c + i * ldc + j * n, sum[i][j]);
}

template <Write W, int M, class T>
inline void tile_row(int64_t i, int64_t n, int64_t k, Left<T> a, const T* b, int64_t ldb, T* c,
                     int64_t ldc, Part part) {
  constexpr int lanes = kLanes<T>;
  const int64_t begin = part == Part::upper_a ? std::min(i, k) : 0;
  const int64_t end = part == Part::lower_a ? std::min(i + M, k) : k;
  const int64_t width = part == Part::lower_c ? std::min(n, padded<T>(i + M)) : n;
  const Left<T> left{a.data + i * a.row, a.row, a.column};
  T* out = c + i * ldc;
  int64_t j = 0;
  for (; j + 2 * lanes <= width; j += 2 * lanes)
    tile<W, M, 2>(left, b + j, ldb, out + j, ldc, begin, end);
  if (j < width) tile<W, M, 1>(left, b + j, ldb, out + j, ldc, begin, end);
}
}  // namespace detail

// n a multiple of kLanes<T>; b and c have n columns' worth of memory in every row.
template <Write W, class T>
void gemm(int64_t m, int64_t n, int64_t k, Left<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
          Part part = Part::full) {
  constexpr int rows = detail::kTileRows;
  int64_t i = 0;
  for (; i + rows <= m; i += rows) detail::tile_row<W, rows>(i, n, k, a, b, ldb, c, ldc, part);
  for (; i + 4 <= m; i += 4) detail::tile_row<W, 4>(i, n, k, a, b, ldb, c, ldc, part);
  for (; i < m; ++i) detail::tile_row<W, 1>(i, n, k, a, b, ldb, c, ldc, part);
}

}  // namespace ebb::simd
