// dplr of wide heads on tensor cores: the scores of every chunk and (I − A_ab)⁻¹
// (cuda/dplr_wide.cuh).
#include "cuda/delta_fast_inverse.cuh"
#include "cuda/dplr_part_scores.cuh"
#include "cuda/dplr_wide.cuh"

namespace ebb::gpu::low_rank {
namespace {

template <int PARTS>
struct ScoresShared {
  CentredTiles in;  // of a panel
  union {
    GroupTotals total;
    float m[64 * kInverseRow];  // −A_ab, then the inverse
  };
  SumsOf<PARTS> sums;
  OwnScores own;
};

// x += the scores of a panel; PARTS = 4: without those inside the parts.
template <int PARTS>
__device__ __forceinline__ void add_scores(float (&x)[8][4], const SwizzledTile& left,
                                           const SwizzledTile& right, const SumsOf<PARTS>& s,
                                           int warp, const Lane& l) {
  if constexpr (PARTS == 4) {
    add_borders(x, left, right, s, warp, l);
  } else {
    float y[8][4];
    multiply_centred<PARTS>(y, left, right, s, warp, l);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] += y[n][e];
  }
}
__device__ __forceinline__ void add_leaves(PartScores& x, const SwizzledTile& left,
                                           const SwizzledTile& right, const SteepSums& s, int warp,
                                           const Lane& l) {
  PartScores y;
  multiply_leaves(y, left, right, s, warp, l);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x.x[n][e] += y.x[n][e];
}
__device__ __forceinline__ void put_inside(float (&x)[8][4], const PartScores& inside, int warp) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = n / 2 == warp ? inside.x[n % 2][e] : x[n][e];
}

// The inverse of I − A_ab, rounded, to memory. By the first group.
template <int PARTS>
__device__ __forceinline__ void store_inverse(ScoresShared<PARTS>& s, const float (&x)[8][4],
                                              SwizzledTile& g, int warp, const Lane& l) {
  const int m0 = 16 * warp;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(s.m + (m0 + l.g + 8 * half) * kInverseRow + 8 * n + 2 * l.c) = {
          -x[n][2 * half], -x[n][2 * half + 1]};
  meet_group(0);
  if (warp < 2) invert_half(s.m, warp, l);
  meet_group(0);
  float r[4][4] = {};
  if (warp < 2) merge<4>(r, s.m, 0, m0, l);
  meet_group(0);
  if (warp < 2) put_merged<4>(s.m, r, 0, m0, l);
  meet_group(0);
  const int c = 8 * (int(threadIdx.x) & 7), r0 = int(threadIdx.x) >> 3;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = r0 + 16 * i;
    float y[8] = {};
    if (c <= row) load_pack<float>(y, s.m + row * kInverseRow + c);
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = c + e <= row ? y[e] : 0.f;
    store_word(reinterpret_cast<uint4*>(g.at(row, c)),
               uint4{pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]),
                     pack_bf16(y[6], y[7])});
  }
}

// Block (head, chunk − first) of two warpgroups, one with A_ab and A_ak, one with A_rb and A_rk.
// Per panel: 1 rows with their decays; PARTS = 4: scores inside the parts before that. 2 scores. At
// the end: 3 out; the inverse.
template <int PARTS>
__global__ void __launch_bounds__(kFastThreads, PARTS == 4 ? 1 : 2)
    scores_kernel(WideProblem p, int64_t first) {
  auto& s = swizzled_shared<ScoresShared<PARTS>>();
  const Lane l;
  const int head = int(blockIdx.x), warp = (int(threadIdx.x) >> 5) & 3;
  const int64_t chunk = p.by_place(first + blockIdx.y);
  const int64_t at = p.tile_at(chunk, head);
  const Span span = span_of(p, chunk);
  if (span.rows == 0) return;
  const bool erase = threadIdx.x < kFastThreads / 2;
  float with_b[8][4] = {}, with_k[8][4] = {};
  PartScores inside_b = {}, inside_k = {};
#pragma unroll 1
  for (int panel = 0; 64 * panel < p.key_dim; ++panel) {
    const KeyPanel keys(p, panel);
    if (panel > 0) __syncthreads();  // the last one's products
    fetch_keys(keys, span, head, s.in);
    commit_copies();
    commit_copies();
    const SwizzledTile& left = erase ? s.in.a : s.in.r;
    {
      CentredRows<PARTS, PARTS == 4> rows(keys, span, head, s.total, s.sums);  // 1
      rows.own_scores(keys, s.in, s.own, panel > 0);
      if constexpr (PARTS == 4) {
        rows.keep_inputs(s.in);
        rows.centre_leaf(keys, span, head, s.in, s.sums);
        __syncthreads();
        add_leaves(inside_b, left, s.in.b, s.sums, warp, l);
        add_leaves(inside_k, left, s.in.k, s.sums, warp, l);
        __syncthreads();
      }
      rows.centre(keys, s.in);
    }
    publish_tiles();
    __syncthreads();
    add_scores<PARTS>(with_b, left, s.in.b, s.sums, warp, l);  // 2
    add_scores<PARTS>(with_k, left, s.in.k, s.sums, warp, l);
  }
  if constexpr (PARTS == 4) put_inside(with_b, inside_b, warp), put_inside(with_k, inside_k, warp);
  __syncthreads();
  const int m0 = 16 * warp;  // 3
  ChunkScores& out = p.scores[at];
  if (erase) {
    keep<Triangle::below>(with_k, m0, l);
    store_by(s.in.k, out.ak, with_k, m0, l);
    keep<Triangle::below>(with_b, m0, l);
    store_inverse(s, with_b, p.inverse[at], warp, l);
  } else {
    keep<Triangle::lower>(with_b, m0, l);
    store_by(s.in.b, out.rb, with_b, m0, l);
    keep<Triangle::lower>(with_k, m0, l);
    unsigned rk[4][4];
    values_as_left(rk, with_k);
    put_own(rk, s.own, warp, l);
    store_by(s.in.b, out.rk, rk, m0, l);
  }
}

}  // namespace

void wide_scores(const WideProblem& p, int parts, cudaStream_t stream) {
  const auto launch = [&]<int PARTS>() {
    each_grid(p, 1, [&](int64_t first, dim3 grid) {
      launch_fast<ScoresShared<PARTS>>(scores_kernel<PARTS>, kFastThreads, grid, stream, p, first);
    });
  };
  if (parts == 1) launch.template operator()<1>();
  if (parts == 2) launch.template operator()<2>();
  if (parts == 4) launch.template operator()<4>();
}

}  // namespace ebb::gpu::low_rank
