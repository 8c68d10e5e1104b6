// f16 pairs, and products of f16 tiles by a warpgroup: the calls of cuda/warpgroup.cuh with half
// operands. f16 has three bits more than bf16 where its range (2^-14...2^15) is enough: operands
// that the caller has brought to a size of about one, row by row.
#pragma once
#include "cuda/warpgroup.cuh"

namespace ebb::gpu {

// Two values rounded to f16, the first in the low half.
__device__ __forceinline__ unsigned pack_half(float low, float high) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float2 unpack_half(unsigned x) {
  float2 r;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(r.x), "=f"(r.y)
      : "r"(x));
  return r;
}
// Both products, rounded to f16.
__device__ __forceinline__ unsigned multiply_halves(unsigned a, unsigned b) {
  unsigned r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ float exp2_approximately(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// d[16,8] += a[16,16] b[16,8], f16 in, f32 sums.
__device__ __forceinline__ void mma_half(float* d, const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if EBB_WGMMA
namespace wgmma {

// Descriptors of tiles as one number, the same for the whole warp, so that it and what is added to
// it stay in the registers that the instruction reads; the upper half is the same for all.
__device__ __forceinline__ unsigned descriptor_base(const SwizzledTile& tile) {
  return __shfl_sync(0xffffffffu, unsigned(descriptor(tile)), 0);
}
__device__ __forceinline__ uint64_t descriptor_at(unsigned base, int units) {
  constexpr uint64_t kUpper = uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32;
  return kUpper | (base + unsigned(units));
}

}  // namespace wgmma
#endif

namespace detail {

// x (+)= a b, b = tileᵀ or the tile.
template <bool FRESH, bool TRANSPOSED>
__device__ __forceinline__ void multiply_halves_by(float (&x)[8][4], const unsigned (*a)[4],
                                                   const SwizzledTile& tile) {
#if EBB_WGMMA
  // By rows: 32 bytes on along a row; by columns: 16 rows on.
  constexpr int kStep = TRANSPOSED ? 128 : 2;
  const unsigned base = wgmma::descriptor_base(tile);
  wgmma::product<FRESH, TRANSPOSED, true>(x, a[0], wgmma::descriptor_at(base, 0));
#pragma unroll
  for (int k = 1; k < 4; ++k)
    wgmma::product<false, TRANSPOSED, true>(x, a[k], wgmma::descriptor_at(base, kStep * k));
#else
  if (FRESH)
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.f;
  const int lane = int(threadIdx.x) & 31;
  const int low = lane & 7, odd = (lane >> 3) & 1, high = lane >> 4;
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      unsigned b[4];
      if (TRANSPOSED)
        load_matrices_transposed(b, tile.at(16 * k + low + 8 * odd, 8 * n + 8 * high));
      else
        load_matrices(b, tile.at(8 * n + low + 8 * high, 16 * k + 8 * odd));
      mma_half(x[n], a[k], b[0], b[1]);
      mma_half(x[n + 1], a[k], b[2], b[3]);
    }
#endif
}

}  // namespace detail

// x += a tileᵀ; FRESH: x = a tileᵀ, whatever x held.
template <bool FRESH = false>
__device__ __forceinline__ void multiply_half_rows(float (&x)[8][4], const unsigned (*a)[4],
                                                   const SwizzledTile& tile) {
  detail::multiply_halves_by<FRESH, false>(x, a, tile);
}
// x += a tile, or x = a tile.
template <bool FRESH = false>
__device__ __forceinline__ void multiply_half_columns(float (&x)[8][4], const unsigned (*a)[4],
                                                      const SwizzledTile& tile) {
  detail::multiply_halves_by<FRESH, true>(x, a, tile);
}

// multiply_tiles of cuda/warpgroup.cuh for tiles of f16.
template <bool FRESH, Inner A, Inner B>
__device__ __forceinline__ void multiply_half_tiles(float (&x)[8][4], const SwizzledTile& a,
                                                    const SwizzledTile& b, int warp) {
  constexpr bool kA = A == Inner::first, kB = B == Inner::first;
#if EBB_WGMMA
  (void)warp;
  constexpr int kStepA = kA ? 128 : 2, kStepB = kB ? 128 : 2;
  const unsigned da = wgmma::descriptor_base(a), db = wgmma::descriptor_base(b);
  wgmma::product_of_tiles<FRESH, kA, kB, true>(x, wgmma::descriptor_at(da, 0),
                                               wgmma::descriptor_at(db, 0));
#pragma unroll
  for (int k = 1; k < 4; ++k)
    wgmma::product_of_tiles<false, kA, kB, true>(x, wgmma::descriptor_at(da, kStepA * k),
                                                 wgmma::descriptor_at(db, kStepB * k));
#else
  const int lane = int(threadIdx.x) & 31;
  const int low = lane & 7, odd = (lane >> 3) & 1, high = lane >> 4, m0 = 16 * warp;
  unsigned left[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (kA)
      load_matrices_transposed(left[k], a.at(16 * k + low + 8 * high, m0 + 8 * odd));
    else
      load_matrices(left[k], a.at(m0 + low + 8 * odd, 16 * k + 8 * high));
  }
  detail::multiply_halves_by<FRESH, kB>(x, left, b);
#endif
}

// Left operands are worked out before what comes next.
template <int N>
__device__ __forceinline__ void settle_left(unsigned (&a)[N][4]) {
#if EBB_WGMMA
#pragma unroll
  for (int k = 0; k < N; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(a[k][e])::"memory");
#endif
}

}  // namespace ebb::gpu
