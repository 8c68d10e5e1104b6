// Products of a warpgroup (four warps) for tiles [64,64] of bf16 in shared memory: the left operand
// and the f32 sums in registers, 16 rows per warp, fragments as those of mma m16n8k16. On
// compute capability 9.0 by wgmma, which reads the tile once for all four warps and runs beside
// other work:
//   warpgroup_begin();
//   multiply_rows(x, a, tile);  warpgroup_commit();     // x += a · tileᵀ
//   ... what needs neither x nor changes a ...
//   warpgroup_wait<0>();  settle(x);
// Elsewhere the same calls are mma m16n8k16 at once. Tiles are swizzled: 16-byte column c of row r
// lies at c ^ (r mod 8).
#pragma once
#include "cuda/ptx.cuh"

// wgmma exists only in code for one architecture; code for others takes the other road.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EBB_WGMMA 1
#else
#define EBB_WGMMA 0
#endif

namespace ebb::gpu {

struct alignas(1024) SwizzledTile {
  __nv_bfloat16 s[64 * 64];

  // Of row r, columns c..., c a multiple of 8.
  __device__ __forceinline__ __nv_bfloat16* at(int r, int c) {
    return s + r * 64 + ((c >> 3 ^ (r & 7)) << 3);
  }
  __device__ __forceinline__ const __nv_bfloat16* at(int r, int c) const {
    return s + r * 64 + ((c >> 3 ^ (r & 7)) << 3);
  }
};

// The block's dynamic shared memory as an S that holds swizzled tiles.
template <class S>
__device__ __forceinline__ S& swizzled_shared() {
  extern __shared__ __align__(1024) unsigned char s_swizzled_bytes[];
  return *reinterpret_cast<S*>(s_swizzled_bytes);
}

#if EBB_WGMMA
namespace wgmma {

// A thread's 32 sums, as text and as operands of the two products.
#define EBB_SUMS                                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define EBB_SUM_OPERANDS(d)                                                                     \
  "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),     \
      "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), \
      "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), \
      "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), \
      "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), \
      "+f"(d[7][2]), "+f"(d[7][3])

// d[64,64] += a[64,16] b[16,64] of bf16, with F16 of f16; FRESH: without what d held.
template <bool FRESH, int TRANSPOSED, bool F16 = false>
__device__ __forceinline__ void product(float (&d)[8][4], const unsigned (&a)[4], uint64_t b) {
#define EBB_PRODUCT(TYPE)                                                                          \
  asm volatile(                                                                                    \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %38, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE \
      "." TYPE " " EBB_SUMS ", {%32, %33, %34, %35}, %36, p, 1, 1, %37;\n}"                        \
      : EBB_SUM_OPERANDS(d)                                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED), "r"(FRESH ? 0 : 1))
  if constexpr (F16)
    EBB_PRODUCT("f16");
  else
    EBB_PRODUCT("bf16");
#undef EBB_PRODUCT
}
// The same with the left operand in shared memory.
template <bool FRESH, int A_TRANSPOSED, int B_TRANSPOSED, bool F16 = false>
__device__ __forceinline__ void product_of_tiles(float (&d)[8][4], uint64_t a, uint64_t b) {
#define EBB_PRODUCT(TYPE)                                                                          \
  asm volatile(                                                                                    \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %36, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE \
      "." TYPE " " EBB_SUMS ", %32, %33, p, 1, 1, %34, %35;\n}"                                    \
      : EBB_SUM_OPERANDS(d)                                                                        \
      : "l"(a), "l"(b), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED), "r"(FRESH ? 0 : 1))
  if constexpr (F16)
    EBB_PRODUCT("f16");
  else
    EBB_PRODUCT("bf16");
#undef EBB_PRODUCT
}
#undef EBB_SUMS
#undef EBB_SUM_OPERANDS

// The tile from row r on, rows of 128 bytes in groups of eight.
__device__ __forceinline__ uint64_t descriptor(const SwizzledTile& tile) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62, kGroup = uint64_t(1024 >> 4) << 32;
  return kSwizzle128 | kGroup | uint64_t(1) << 16 | (shared_address(tile.s) & 0x3ffff) >> 4;
}

}  // namespace wgmma
#endif

__device__ __forceinline__ void warpgroup_begin() {
#if EBB_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void warpgroup_commit() {
#if EBB_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int PENDING>
__device__ __forceinline__ void warpgroup_wait() {
#if EBB_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}
// Keeps the compiler from moving what it does with sums across the products: call it on sums with
// a value before warpgroup_begin(), on all sums after warpgroup_wait().
template <int N>
__device__ __forceinline__ void settle(float (&x)[N][4]) {
#if EBB_WGMMA
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(x[n][e])::"memory");
#endif
}
// The same for left operands.
__device__ __forceinline__ void settle(unsigned (&a)[4][4]) {
#if EBB_WGMMA
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(a[k][e])::"memory");
#endif
}
// What this thread has written to shared memory becomes visible to products after a barrier. Of
// shared memory only: for all of memory a thread would wait until its writes have reached the GPU.
__device__ __forceinline__ void publish_tiles() {
#if EBB_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Barriers of THREADS threads that reach them at different places of the code, where
// __syncthreads() is not allowed. Ids 0 (which __syncthreads() uses too) to 15.
template <int THREADS>
__device__ __forceinline__ void barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void barrier_wait(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

namespace detail {

// x += a[:, 16k...] b for one step k of 16 inner indices; b = tileᵀ or the tile.
template <bool FRESH, bool TRANSPOSED>
__device__ __forceinline__ void multiply_step(float (&x)[8][4], const unsigned (&a)[4],
                                              const SwizzledTile& tile, int k) {
#if EBB_WGMMA
  // By rows: 32 bytes on along a row; by columns: 16 rows on.
  wgmma::product<FRESH, TRANSPOSED>(x, a, wgmma::descriptor(tile) + (TRANSPOSED ? 128 : 2) * k);
#else
  if (FRESH)
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.f;
  const int lane = int(threadIdx.x) & 31;
  const int low = lane & 7, odd = (lane >> 3) & 1, high = lane >> 4;
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    unsigned b[4];
    if (TRANSPOSED)
      load_matrices_transposed(b, tile.at(16 * k + low + 8 * odd, 8 * n + 8 * high));
    else
      load_matrices(b, tile.at(8 * n + low + 8 * high, 16 * k + 8 * odd));
    mma_bf16(x[n], a, b[0], b[1]);
    mma_bf16(x[n + 1], a, b[2], b[3]);
  }
#endif
}

}  // namespace detail

// x += a tileᵀ; FRESH: x = a tileᵀ, whatever x held.
template <bool FRESH = false>
__device__ __forceinline__ void multiply_rows(float (&x)[8][4], const unsigned (*a)[4],
                                              const SwizzledTile& tile) {
  detail::multiply_step<FRESH, false>(x, a[0], tile, 0);
#pragma unroll
  for (int k = 1; k < 4; ++k) detail::multiply_step<false, false>(x, a[k], tile, k);
}
// x += a tile, or x = a tile.
template <bool FRESH = false>
__device__ __forceinline__ void multiply_columns(float (&x)[8][4], const unsigned (*a)[4],
                                                 const SwizzledTile& tile) {
  detail::multiply_step<FRESH, true>(x, a[0], tile, 0);
#pragma unroll
  for (int k = 1; k < 4; ++k) detail::multiply_step<false, true>(x, a[k], tile, k);
}

// x += a b of two tiles, a stored [row,inner], or [inner,row]; b stored [column,inner], or
// [inner,column]. The warps of a group are numbered 0 to 3.
// Of the four steps of 16 inner indices only FIRST ... LAST − 1 are taken.
enum class Inner { last, first };
template <bool FRESH, Inner A, Inner B, int FIRST = 0, int LAST = 4>
__device__ __forceinline__ void multiply_tiles(float (&x)[8][4], const SwizzledTile& a,
                                               const SwizzledTile& b, int warp) {
  constexpr bool kA = A == Inner::first, kB = B == Inner::first;
#if EBB_WGMMA
  (void)warp;
  const uint64_t da = wgmma::descriptor(a), db = wgmma::descriptor(b);
  wgmma::product_of_tiles<FRESH, kA, kB>(x, da + (kA ? 128 : 2) * FIRST,
                                         db + (kB ? 128 : 2) * FIRST);
#pragma unroll
  for (int k = FIRST + 1; k < LAST; ++k)
    wgmma::product_of_tiles<false, kA, kB>(x, da + (kA ? 128 : 2) * k, db + (kB ? 128 : 2) * k);
#else
  const int lane = int(threadIdx.x) & 31;
  const int low = lane & 7, odd = (lane >> 3) & 1, high = lane >> 4, m0 = 16 * warp;
  unsigned left[4][4];
#pragma unroll
  for (int k = FIRST; k < LAST; ++k) {
    if (kA)
      load_matrices_transposed(left[k], a.at(16 * k + low + 8 * high, m0 + 8 * odd));
    else
      load_matrices(left[k], a.at(m0 + low + 8 * odd, 16 * k + 8 * high));
  }
  detail::multiply_step<FRESH, kB>(x, left[FIRST], b, FIRST);
#pragma unroll
  for (int k = FIRST + 1; k < LAST; ++k) detail::multiply_step<false, kB>(x, left[k], b, k);
#endif
}

}  // namespace ebb::gpu
