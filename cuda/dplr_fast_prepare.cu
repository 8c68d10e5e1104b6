// dplr in bf16 on tensor cores: what needs no state, chunk by chunk (cuda/dplr_fast.cuh).
#include "cuda/delta_fast_inverse.cuh"
#include "cuda/dplr_fast.cuh"

namespace ebb::gpu::low_rank {
namespace {

struct PrepareShared {
  CentredTiles in;
  SwizzledTile v;
  float m[64 * kInverseRow];  // −A_ab, then the inverse
  CentredSums sums;
};

// γ_n and the ones that stand for β.
__device__ __forceinline__ void write_total(const FastProblem& p, const CentredSums& s, Span span,
                                            int64_t chunk, int hv) {
  const int t = int(threadIdx.x);
  float* g_total = p.total + p.total_at(chunk, hv);
  if (t < p.key_dim) g_total[t] = s.from_start[0][t] * s.to_end[0][t];
  if (t >= 64 && t < 128) g_total[p.key_dim + t - 64] = t - 64 < span.rows ? 1.f : 0.f;
}

// The warp's 16 rows from accumulators to memory: no detour through shared memory, which two blocks
// more fill, and the halves of a sector meet in the cache.
__device__ __forceinline__ void store_rows(bf16_t* g, int64_t stride, const float (&x)[8][4],
                                           int rows, int cols, int warp, const Lane& l) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = 16 * warp + l.g + 8 * half;
    bf16_t* to = g + r * stride + 2 * l.c;
#pragma unroll
    for (int n = 0; n < 8; ++n)
      if (r < rows && 8 * n < cols)
        *reinterpret_cast<unsigned*>(to + 8 * n) = pack_bf16(x[n][2 * half], x[n][2 * half + 1]);
  }
}

// added = Vᵀ times K as it reaches the chunk's end.
template <int HALVES>
__device__ __forceinline__ void multiply_added(float (&added)[8][4], const PrepareShared& s,
                                               int warp, const Lane& l) {
  constexpr Inner kFirst = Inner::first;
  warpgroup_begin();
  if constexpr (HALVES == 2) {
    multiply_tiles<true, kFirst, kFirst, 0, 2>(added, s.v, s.in.k, warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(added);
    scale_between(added, s.sums, l);
    settle(added);
    warpgroup_begin();
    multiply_tiles<false, kFirst, kFirst, 2, 4>(added, s.v, s.in.k, warp);
  } else {
    multiply_tiles<true, kFirst, kFirst>(added, s.v, s.in.k, warp);
  }
  warpgroup_commit();
  warpgroup_wait<0>();
  settle(added);
  scale_columns(added, s.sums.to_end[1], l);
}

// x = scores times V.
__device__ __forceinline__ void multiply_values(float (&x)[8][4], const PrepareShared& s) {
  unsigned a[4][4];
  values_as_left(a, x);
  settle(a);
  warpgroup_begin();
  multiply_columns<true>(x, a, s.v);
  warpgroup_commit();
  warpgroup_wait<0>();
  settle(x);
}

// The first group: −A_ab and, by two warps, the inverse.
template <int HALVES>
__device__ __forceinline__ void inverse_way(const FastProblem& p, PrepareShared& s, int64_t row,
                                            int rows, int warp, const Lane& l) {
  float x[8][4];
  multiply_centred<HALVES>(x, s.in.a, s.in.b, s.sums, warp, l);
  keep<Triangle::below>(x, 16 * warp, l);
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(s.m + (16 * warp + l.g + 8 * half) * kInverseRow + 8 * n +
                                 2 * l.c) = {-x[n][2 * half], -x[n][2 * half + 1]};
  meet_group(0);
  if (warp < 2) invert_half(s.m, warp, l);
  meet_group(0);
  float r[4][4] = {};
  if (warp < 2) merge<4>(r, s.m, 0, 16 * warp, l);
  meet_group(0);
  if (warp < 2) put_merged<4>(s.m, r, 0, 16 * warp, l);
  meet_group(0);
  for (int i = int(threadIdx.x); i < rows * 8; i += kFastThreads / 2) {
    const int r = i >> 3, c = 8 * (i & 7);
    float out[8] = {};
    if (c <= r) load_pack<float>(out, s.m + r * kInverseRow + c);
#pragma unroll
    for (int e = 0; e < 8; ++e) out[e] = c + e <= r ? out[e] : 0.f;
    store_pack<bf16_t>(p.a + (row + r) * kChunk + c, out);
  }
}

// The second: A_rb, A_ak V, A_rk V, and (K to the end)ᵀ V.
template <int HALVES>
__device__ __forceinline__ void values_way(const FastProblem& p, const PrepareShared& s, Span span,
                                           int64_t chunk, int64_t row, int hv, int warp,
                                           const Lane& l) {
  const int m0 = 16 * warp, rows = span.rows, v = p.value_dim;
  float x[8][4];
  multiply_centred<HALVES>(x, s.in.r, s.in.b, s.sums, warp, l);
  keep<Triangle::lower>(x, m0, l);
  store_rows(p.scores + row * kChunk, kChunk, x, rows, kChunk, warp, l);
  multiply_centred<HALVES>(x, s.in.a, s.in.k, s.sums, warp, l);
  keep<Triangle::below>(x, m0, l);
  multiply_values(x, s);
  store_rows(p.y0 + row * v, v, x, rows, v, warp, l);
  multiply_centred<HALVES>(x, s.in.r, s.in.k, s.sums, warp, l);
  keep<Triangle::lower>(x, m0, l);
  multiply_values(x, s);
  store_rows(p.out + p.value_at(span.first, hv), p.value_stride(), x, rows, v, warp, l);
  multiply_added<HALVES>(x, s, warp, l);
  store_rows(p.add + p.state_at(chunk, hv), p.key_dim, x, v, p.key_dim, warp, l);
}

// Block (head, chunk − first) of two warpgroups. 1 centred rows, the scans' operands. 2 each group
// on its way. Without FORWARD only 1, and no tiles. No loop over chunks: what all have in common
// would stay in registers.
template <bool FORWARD, int HALVES>
__global__ void __launch_bounds__(kFastThreads, HALVES == 1 ? 3 : 2)
    prepare_kernel(FastProblem p, int64_t first) {
  auto& s = swizzled_shared<PrepareShared>();
  const Lane l;
  const int hv = int(blockIdx.x), warp = (int(threadIdx.x) >> 5) & 3;
  const int64_t chunk = first + blockIdx.y;
  const Span span = span_of(p, chunk);
  if (span.rows == 0) return;
  if (FORWARD) {
    TilePlace().fetch(s.v, p.v + p.value_at(span.first, hv), p.value_stride(), span.rows,
                      p.value_dim);
    commit_copies();
  }
  const CentredRows<HALVES, true> rows(p, span, hv, s.sums);  // 1
  const int64_t operand = p.row_at(span.first + 8 * rows.warp, hv) * p.key_dim + rows.channel;
  rows.centre(p, span, FORWARD ? &s.in : nullptr, [&](int i, float2 r, float2 a, float2, float2 b) {
    const int64_t at = operand + i * p.key_dim;
    const float2 minus = {-rows.from_start.x, -rows.from_start.y};
    *reinterpret_cast<unsigned*>(p.queries + at) = pack_pair(times(r, rows.from_start));
    *reinterpret_cast<unsigned*>(p.erased + at) = pack_pair(times(a, minus));
    *reinterpret_cast<unsigned*>(p.kept + at) = pack_pair(times(b, rows.to_end));
  });
  write_total(p, s.sums, span, chunk, hv);
  if (!FORWARD) return;
  wait_copy_groups<0>();
  publish_tiles();
  __syncthreads();
  const int64_t row = p.row_at(span.first, hv);
  if (threadIdx.x < kFastThreads / 2)  // 2
    inverse_way<HALVES>(p, s, row, span.rows, warp, l);
  else
    values_way<HALVES>(p, s, span, chunk, row, hv, warp, l);
}

}  // namespace

void fast_prepare(const FastProblem& p, bool forward, int halves, cudaStream_t stream) {
  const auto kernel = halves == 2 ? (forward ? prepare_kernel<true, 2> : prepare_kernel<false, 2>)
                                  : (forward ? prepare_kernel<true, 1> : prepare_kernel<false, 1>);
  for (int64_t first = 0; first < p.chunks; first += kMostChunks) {
    const dim3 grid(unsigned(p.value_heads), unsigned(std::min(p.chunks - first, kMostChunks)));
    launch_fast<PrepareShared>(kernel, kFastThreads, grid, stream, p, first);
  }
}

}  // namespace ebb::gpu::low_rank
