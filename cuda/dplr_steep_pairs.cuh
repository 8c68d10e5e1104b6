// Shared memory of gradients from rows that refer to borders, and the sums over pairs of tokens
// inside a part (dplr_steep_gradients.cu, whose head has the formulas; dplr_wide_gradients.cu).
#pragma once
#include "cuda/dplr_gradient_sides.cuh"

namespace ebb::gpu::low_rank {

inline constexpr int kPart = 16;

struct SteepTerms {  // x_r, x_a, x_k, x_b; then in the first two terms of dw of tokens i >= t, of i
                     // > t
  float until[64 * kSumRow], before[64 * kSumRow], k[64 * kSumRow], b[64 * kSumRow];
};
struct SteepShared : GradientTiles<SteepTerms> {
  ChunkScores kept_scores;
  float inside[4][kPart][kPart][4];  // of part, i, j: dP_v, dP_y, dM_v, dM_y
  SteepSums centred;
  GroupTotals total;
  float kept[4][64], carry[8][64];  // sums over the rows of a warp, over an eighth of V
};
static_assert(sizeof(SteepShared) + 1024 <= 227 * 1024);

// Sums of a warp's rows for the threads that own channels.
__device__ __forceinline__ void put_sums(float* s, const float (&x)[8][4], int warp,
                                         const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(s + (16 * warp + l.g + 8 * half) * kSumRow + 8 * n + 2 * l.c) = {
          x[n][2 * half], x[n][2 * half + 1]};
}

// A thread's channel of a part.
struct Own {
  int part = int(threadIdx.x) >> 6, d = int(threadIdx.x) & 63, row = kPart * part;
  float r[kPart], a[kPart], k[kPart], b[kPart], alpha[kPart];  // r times scale
  float in_r[kPart], in_a[kPart], in_k[kPart], in_b[kPart];    // sums over pairs in the part

  template <class P>
  __device__ __forceinline__ Own(const P& p, Span span, int head) {
    const int64_t at = p.key_at(span.first + row, head) + d;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const bool valid = row + i < span.rows && d < p.key_dim;
      const int64_t from = at + i * p.key_stride();
      r[i] = valid ? p.scale * to_float(p.q[from]) : 0.f;
      a[i] = valid ? to_float(p.low_a[from]) : 0.f;
      k[i] = valid ? to_float(p.k[from]) : 0.f;
      b[i] = valid ? to_float(p.low_b[from]) : 0.f;
      alpha[i] = valid ? exp2_fast(CentredRows<4>::log2_of(p.g[from])) : 1.f;
      in_r[i] = in_a[i] = in_k[i] = in_b[i] = 0.f;
    }
  }
  // Pairs of different tokens.
  __device__ __forceinline__ void sum_pairs(const SteepShared& s) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      float decay = 1.f;  // from j to before i
      float k_j = k[j], b_j = b[j];
#pragma unroll
      for (int i = j + 1; i < kPart; ++i) {
        const float4 f = *reinterpret_cast<const float4*>(s.inside[part][i][j]);
        in_a[i] += f.z * k_j + f.w * b_j;
        in_k[j] += decay * (f.z * a[i]), in_b[j] += decay * (f.w * a[i]);
        k_j *= alpha[i], b_j *= alpha[i], decay *= alpha[i];
        in_r[i] += f.x * k_j + f.y * b_j;
        in_k[j] += decay * (f.x * r[i]), in_b[j] += decay * (f.y * r[i]);
      }
    }
  }
  // Then terms of dw to s.sums, and the gradients to s.in, in place of what is looked at there.
  __device__ __forceinline__ void finish(SteepShared& s, float scale) {
    float down = 1.f;  // of rows after i
#pragma unroll
    for (int i = kPart - 1; i >= 0; --i) {
      const int at = (row + i) * kSumRow + d;
      const float x_k = s.sums.k[at], x_b = s.sums.b[at];
      bf16_t &s_k = s.in.k.at(row + i, d & ~7)[d & 7], &s_b = s.in.b.at(row + i, d & ~7)[d & 7];
      float until = to_float(s_k) * x_k + to_float(s_b) * x_b;
      until += k[i] * in_k[i] + b[i] * in_b[i];
      const float4 f = *reinterpret_cast<const float4*>(s.inside[part][i][i]);
      s_k = from_float<bf16_t>(down * x_k + in_k[i] + f.x * r[i]);
      s_b = from_float<bf16_t>(down * x_b + in_b[i] + f.y * r[i]);
      in_k[i] = until;
      down *= alpha[i];
    }
    float up = 1.f;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const int at = (row + i) * kSumRow + d;
      const float x_r = s.sums.until[at], x_a = s.sums.before[at];
      bf16_t &s_r = s.in.r.at(row + i, d & ~7)[d & 7], &s_a = s.in.a.at(row + i, d & ~7)[d & 7];
      s.sums.until[at] = to_float(s_r) * x_r + r[i] * in_r[i] - in_k[i];
      s.sums.before[at] = to_float(s_a) * x_a + a[i] * in_a[i];
      const float4 f = *reinterpret_cast<const float4*>(s.inside[part][i][i]);
      s_a = from_float<bf16_t>(up * x_a + in_a[i]);
      up *= alpha[i];
      s_r = from_float<bf16_t>(scale * (up * x_r + in_r[i] + f.x * k[i] + f.y * b[i]));
    }
  }
};

}  // namespace ebb::gpu::low_rank
