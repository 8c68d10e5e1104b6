// Products of tiles in shared memory, for blocks of 256 threads: one kernel body serves f32 (fused
// multiply-adds) and bf16 (tensor cores, f32 sums).
//   Accumulator<T, 64> acc;                                           // 64x64 over the block
//   multiply<Stored::rows, Stored::rows>(acc, s_a, lda, s_b, ldb, k);       // acc += A[64,k]
//   B[k,64] multiply<Stored::columns, Stored::rows>(acc, s_a, lda, ...);            // A is stored
//   as [k,64] acc.each([&](int row, int col, float& v) { v *= s_scale[row]; });
// Leading dimensions: row_length<T>(columns), padded against bank conflicts. k a multiple of 16.
#pragma once
#include <algorithm>

#include "cuda/common.cuh"
#include "cuda/ptx.cuh"

namespace ebb::gpu {

inline constexpr int kTileThreads = 256;
inline constexpr int kTileRows = 64;

template <class T>
constexpr int row_length(int columns) {
  return columns + 16 / int(sizeof(T));
}

// How an operand lies in memory: as it reads in the product, or transposed.
enum class Stored { rows, columns };

// 64xN f32 sums, N = 32 or 64, 64·N/256 per thread.
template <class T, int N>
struct Accumulator;

// f32: thread (ty, tx) of 16x16 holds rows 4ty..4ty+3 and columns tx, tx+16, ...
template <int N>
struct Accumulator<float, N> {
  static constexpr int kColumns = N / 16, kCount = 4 * kColumns;
  float v[kCount];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = 0.f;
  }
  __device__ __forceinline__ static int row(int i) {
    return 4 * (int(threadIdx.x) >> 4) + i / kColumns;
  }
  __device__ __forceinline__ static int col(int i) {
    return (int(threadIdx.x) & 15) + 16 * (i % kColumns);
  }
  template <class F>
  __device__ __forceinline__ void each(F&& f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) f(row(i), col(i), v[i]);
  }
  // s[row,col] = f(row, col, value); f may read what it replaces.
  template <class F>
  __device__ __forceinline__ void put(float* s, int ld, F&& f) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[row(i) * ld + col(i)] = f(row(i), col(i), v[i]);
  }
  // s_parts [2][64]: sums over the columns in two parts; add both after a barrier.
  template <class F>
  __device__ __forceinline__ void row_sums(float* s_parts, F&& f) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float sum = 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = r * kColumns + c;
        sum += f(row(i), col(i), i);
      }
#pragma unroll
      for (int o = 8; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
      if ((threadIdx.x & 15) == 0) {
        s_parts[row(r * kColumns)] = sum;
        s_parts[kTileRows + row(r * kColumns)] = 0.f;
      }
    }
  }
};

// bf16: warps 4x2, each 16 rows by N/2 columns in fragments of 8 columns (mma m16n8k16).
template <int N>
struct Accumulator<__nv_bfloat16, N> {
  static constexpr int kFragments = N / 16, kCount = 4 * kFragments;
  float v[kCount];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = 0.f;
  }
  __device__ __forceinline__ static int first_row() { return 16 * ((int(threadIdx.x) >> 5) & 3); }
  __device__ __forceinline__ static int first_col() { return N / 2 * (int(threadIdx.x) >> 7); }
  __device__ __forceinline__ static int row(int i) {
    return first_row() + ((int(threadIdx.x) & 31) >> 2) + 8 * ((i >> 1) & 1);
  }
  __device__ __forceinline__ static int col(int i) {
    return first_col() + 8 * (i >> 2) + 2 * (int(threadIdx.x) & 3) + (i & 1);
  }
  template <class F>
  __device__ __forceinline__ void each(F&& f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) f(row(i), col(i), v[i]);
  }
  template <class F>
  __device__ __forceinline__ void put(__nv_bfloat16* s, int ld, F&& f) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int r = row(i), c = col(i);
      const float low = f(r, c, v[i]), high = f(r, c + 1, v[i + 1]);
      *reinterpret_cast<unsigned*>(s + r * ld + c) = pack_bf16(low, high);
    }
  }
  template <class F>
  __device__ __forceinline__ void row_sums(float* s_parts, F&& f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0;
#pragma unroll
      for (int c = 0; c < kFragments; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * c + 2 * half + e;
          sum += f(row(i), col(i), i);
        }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if ((threadIdx.x & 3) == 0)
        s_parts[kTileRows * (int(threadIdx.x) >> 7) + row(2 * half)] = sum;
    }
  }
};

template <Stored A, Stored B, int N>
__device__ __forceinline__ void multiply(Accumulator<float, N>& acc, const float* s_a, int lda,
                                         const float* s_b, int ldb, int k) {
  constexpr int kColumns = N / 16;
  const int ty = int(threadIdx.x) >> 4, tx = int(threadIdx.x) & 15;
  for (int p = 0; p < k; p += 4) {
    float a[4][4], b[kColumns][4];  // [row or column][p]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* from =
          A == Stored::rows ? s_a + (4 * ty + i) * lda + p : s_a + (p + i) * lda + 4 * ty;
      const float4 x = *reinterpret_cast<const float4*>(from);
      const float e[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) (A == Stored::rows ? a[i][j] : a[j][i]) = e[j];
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (B == Stored::columns) {
        const float4 x = *reinterpret_cast<const float4*>(s_b + (tx + 16 * c) * ldb + p);
        b[c][0] = x.x, b[c][1] = x.y, b[c][2] = x.z, b[c][3] = x.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) b[c][j] = s_b[(p + j) * ldb + tx + 16 * c];
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) acc.v[i * kColumns + c] += a[i][j] * b[c][j];
  }
}

template <Stored A, Stored B, int N>
__device__ __forceinline__ void multiply(Accumulator<__nv_bfloat16, N>& acc,
                                         const __nv_bfloat16* s_a, int lda,
                                         const __nv_bfloat16* s_b, int ldb, int k) {
  constexpr int kFragments = N / 16;
  const int lane = int(threadIdx.x) & 31, m0 = acc.first_row(), n0 = acc.first_col();
  const int low = lane & 7, odd = (lane >> 3) & 1,
            high = lane >> 4;  // matrix 2·high + odd, row low
  for (int p = 0; p < k; p += 16) {
    unsigned a[4];
    if constexpr (A == Stored::rows)
      load_matrices(a, s_a + (m0 + low + 8 * odd) * lda + p + 8 * high);
    else
      load_matrices_transposed(a, s_a + (p + low + 8 * high) * lda + m0 + 8 * odd);
#pragma unroll
    for (int f = 0; f < kFragments; f += 2) {
      unsigned b[4];  // k halves of fragment f, then of f+1
      const int n = n0 + 8 * f;
      if constexpr (B == Stored::columns)
        load_matrices(b, s_b + (n + low + 8 * high) * ldb + p + 8 * odd);
      else
        load_matrices_transposed(b, s_b + (p + low + 8 * odd) * ldb + n + 8 * high);
      mma_bf16(acc.v + 4 * f, a, b[0], b[1]);
      mma_bf16(acc.v + 4 * f + 4, a, b[2], b[3]);
    }
  }
}

// Elements that fit in 16 bytes, the unit of wide copies.
template <class T>
inline constexpr int kWide = 16 / int(sizeof(T));

template <class T>
__device__ __forceinline__ bool wide_rows(const T* g, int64_t stride) {
  return reinterpret_cast<uintptr_t>(g) % 16 == 0 && stride % kWide<T> == 0;
}

// s[r,c] = g[r,c] for r < rows, c < cols, else 0, over a tile of tile_rows x tile_cols (a multiple
// of 8). Complete after wait_copies() and a barrier.
template <class T>
__device__ __forceinline__ void load_tile(T* s, int ld, int tile_rows, int tile_cols, const T* g,
                                          int64_t stride, int rows, int cols) {
  constexpr int n = kWide<T>;
  const bool wide = wide_rows(g, stride);
  const int per_row = tile_cols / n;
  for (int i = int(threadIdx.x); i < tile_rows * per_row; i += kTileThreads) {
    const int r = i / per_row, c = i % per_row * n;
    T* to = s + r * ld + c;
    const T* from = g + int64_t(r) * stride + c;
    if (wide && r < rows && c + n <= cols) {
      copy_async(to, from);
    } else {
#pragma unroll
      for (int e = 0; e < n; ++e) to[e] = r < rows && c + e < cols ? from[e] : from_float<T>(0.f);
    }
  }
}

// g[r,c] = s[r,c] for r < rows, c < cols.
template <class T>
__device__ __forceinline__ void store_tile(T* g, int64_t stride, const T* s, int ld, int rows,
                                           int cols) {
  constexpr int n = kWide<T>;
  const bool wide = wide_rows(g, stride);
  const int per_row = (cols + n - 1) / n;
  for (int i = int(threadIdx.x); i < rows * per_row; i += kTileThreads) {
    const int r = i / per_row, c = i % per_row * n;
    const T* from = s + r * ld + c;
    T* to = g + int64_t(r) * stride + c;
    if (wide && c + n <= cols) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < n && c + e < cols; ++e) to[e] = from[e];
    }
  }
}

// The dynamic shared memory every supported GPU grants a block.
inline constexpr size_t kSharedLimit = 99 * 1024;

// Launches a kernel of 256 threads per block with an S as its dynamic shared memory.
template <class S, class... P, class... A>
void launch_tiles(void (*kernel)(P...), int64_t blocks, cudaStream_t stream,
                  const A&... arguments) {
  static_assert(sizeof(S) <= kSharedLimit);
  if (blocks <= 0) return;
  if constexpr (sizeof(S) > 48 * 1024)
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(S))),
        "shared memory");
  constexpr int64_t kMaxBlocks = (int64_t(1) << 31) - 1;  // kernels loop over the rest
  kernel<<<unsigned(std::min(blocks, kMaxBlocks)), kTileThreads, sizeof(S), stream>>>(arguments...);
  check_launch();
}

}  // namespace ebb::gpu
