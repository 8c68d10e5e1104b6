// Shared memory of gradients from centred rows (dplr_fast_gradients.cu, dplr_wide_gradients.cu).
#pragma once
#include "cuda/dplr_gradient_sides.cuh"

namespace ebb::gpu::low_rank {

struct CentredTerms {
  float until[64 * kSumRow], before[64 * kSumRow];  // terms of tokens i >= t, of i > t
};
struct GradientShared : GradientTiles<CentredTerms> {
  union {
    GroupTotals total;
    float up[66 * kSumRow];  // row i + 1; row 0: before the first token, row 65: before the second
                             // half's
  };
  CentredSums centred;
  OwnScores own;
  float kept[4][64], carry[8][64];  // sums over the rows of a warp, over an eighth of V
  Span span;                        // here, so that it takes no registers
};
static_assert(2 * (sizeof(GradientShared) + 1024) <= 228 * 1024);  // two blocks per multiprocessor

template <int PARTS>
__device__ __forceinline__ void write_factors(const CentredRows<PARTS>& rows, float* s_up) {
  float* to = s_up + (8 * rows.warp + 1) * kSumRow + rows.channel;
#pragma unroll
  for (int i = 0; i < 8; ++i) *reinterpret_cast<float2*>(to + i * kSumRow) = rows.up(i);
  if (rows.warp % 4 == 0)
    *reinterpret_cast<float2*>(s_up + (rows.warp ? 65 * kSumRow : 0) + rows.channel) =
        rows.up_before(0);
}

}  // namespace ebb::gpu::low_rank
