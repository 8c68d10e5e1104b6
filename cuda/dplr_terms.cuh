// What a chunk adds to the transposed state, between dplr_fast_prepare.cu and dplr_fast_scan.cu: in
// half precision, each row, a column of V, in a unit of its own. It is all there is of the state
// where decays are strong, and bf16 would double the error that products leave there.
#pragma once
#include <cuda_fp16.h>

#include "cuda/dplr_chunk.cuh"

namespace ebb::gpu::low_rank {

// The largest number of a row becomes one of [2^14, 2^15): numbers down to 2^-28 of it keep eleven
// bits. Inf and NaN stay what they are.
__device__ __forceinline__ void round_terms(unsigned (&a)[4][4], float* g_units,
                                            const float (&x)[8][4], int m0, const Lane& l) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned most = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n)
      most = max(most, max(__float_as_uint(fabsf(x[n][2 * half])),
                           __float_as_uint(fabsf(x[n][2 * half + 1]))));
#pragma unroll
    for (int o = 1; o < 4; o *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, o));
    const unsigned exponent = max(most >> 23, 15u);
    const float up = __uint_as_float((268 - exponent) << 23);  // 2^14 / 2^(exponent − 127)
    if (l.c == 0) g_units[m0 + l.g + 8 * half] = __uint_as_float((exponent - 14) << 23);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const __half2 y = __floats2half2_rn(up * x[n][2 * half], up * x[n][2 * half + 1]);
      a[n / 2][2 * (n % 2) + half] = *reinterpret_cast<const unsigned*>(&y);
    }
  }
}
// x += the warp's 16 rows of them, as accumulators hold them.
__device__ __forceinline__ void add_terms(float (&x)[8][4], const SwizzledTile& s,
                                          const float* s_units, int m0, const Lane& l) {
  const float unit[2] = {s_units[m0 + l.g], s_units[m0 + l.g + 8]};
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 y = __half22float2(
          *reinterpret_cast<const __half2*>(s.at(m0 + l.g + 8 * half, 8 * n) + 2 * l.c));
      x[n][2 * half] += unit[half] * y.x, x[n][2 * half + 1] += unit[half] * y.y;
    }
}

}  // namespace ebb::gpu::low_rank
