// dplr in bf16 on tensor cores: what needs no state, chunk by chunk (cuda/dplr_fast.cuh).
#include "cuda/delta_fast_inverse.cuh"
#include "cuda/dplr_fast.cuh"

namespace ebb::gpu::low_rank {
namespace {

struct PrepareShared {
  CentredTiles in;
  SwizzledTile v, scores;     // V; A_rb
  float m[64 * kInverseRow];  // −A_ab, then the inverse
  CentredSums sums;

  // After the products: parts of o and of the next state, and A_ak V.
  __device__ __forceinline__ SwizzledTile& local() { return in.r; }
  __device__ __forceinline__ SwizzledTile& y0() { return in.a; }
  __device__ __forceinline__ SwizzledTile& added() { return in.k; }
};

// γ_n and the ones that stand for β.
__device__ __forceinline__ void write_total(const FastProblem& p, const CentredSums& s, Span span,
                                            int64_t chunk, int hv) {
  const int t = int(threadIdx.x);
  float* g_total = p.total + p.total_at(chunk, hv);
  if (t < p.key_dim) g_total[t] = s.from_start[0][t] * s.to_end[0][t];
  if (t >= 64 && t < 128) g_total[p.key_dim + t - 64] = t - 64 < span.rows ? 1.f : 0.f;
}

// Rows of a tile to memory by the threads from 64 on, beside the two warps of the inverse.
__device__ __forceinline__ void store_beside(bf16_t* g, int64_t stride, const SwizzledTile& s,
                                             int rows, int cols) {
  for (int i = int(threadIdx.x) - 64; i < 64 * 8; i += kFastThreads - 64) {
    const int r = i >> 3, c = 8 * (i & 7);
    if (r < rows && c < cols)
      store_word(reinterpret_cast<uint4*>(g + r * stride + c),
                 *reinterpret_cast<const uint4*>(s.at(r, c)));
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

// The four warps of the reads: A_rb; its part of o, A_rk V, and of the next state, (K to the
// end)ᵀV.
template <int HALVES>
__device__ __forceinline__ void read_products(PrepareShared& s, int warp, const Lane& l) {
  const auto lower = [](int i, int j) { return j <= i; };
  float x[8][4];
  multiply_centred<HALVES>(x, s.in.r, s.in.b, s.sums, warp, l);
  mask(x, 16 * warp, l, lower);
  put_rows(s.scores, x, 16 * warp, l);
  multiply_centred<HALVES>(x, s.in.r, s.in.k, s.sums, warp, l);
  mask(x, 16 * warp, l, lower);
  multiply_values(x, s);
  meet_group(0);  // nobody else reads R
  put_rows(s.local(), x, 16 * warp, l);
  multiply_added<HALVES>(x, s, warp, l);
  meet();
  put_rows(s.added(), x, 16 * warp, l);
}

// The four warps of the low rank: −A_ab for the inverse; A_ak V.
template <int HALVES>
__device__ __forceinline__ void inner_products(PrepareShared& s, int warp, const Lane& l) {
  float y0[8][4];
  const auto below = [](int i, int j) { return j < i; };
  multiply_centred<HALVES>(y0, s.in.a, s.in.b, s.sums, warp, l);
  mask(y0, 16 * warp, l, below);
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(s.m + (16 * warp + l.g + 8 * half) * kInverseRow + 8 * n +
                                 2 * l.c) = {-y0[n][2 * half], -y0[n][2 * half + 1]};
  multiply_centred<HALVES>(y0, s.in.a, s.in.k, s.sums, warp, l);
  mask(y0, 16 * warp, l, below);
  multiply_values(y0, s);
  meet_group(1);  // nobody else reads A
  put_rows(s.y0(), y0, 16 * warp, l);
  meet();
}

// Block (head, chunk − first) of two warpgroups. 1 centred rows, the scans' operands. 2 products. 3
// the inverse by two warps; the others store. 4 the inverse stored. Without FORWARD only 1, and no
// tiles. No loop over chunks: what all have in common would stay in registers.
template <bool FORWARD, int HALVES>
__global__ void __launch_bounds__(kFastThreads, 2) prepare_kernel(FastProblem p, int64_t first) {
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
  const CentredRows<HALVES> rows(p, span, hv, s.sums);  // 1
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
  if (threadIdx.x < kFastThreads / 2)  // 2
    read_products<HALVES>(s, warp, l);
  else
    inner_products<HALVES>(s, warp, l);
  __syncthreads();
  const int64_t row = p.row_at(span.first, hv);
  invert_by_two_warps(s.m, [&] {  // 3
    store_beside(p.scores + row * kChunk, kChunk, s.scores, span.rows, kChunk);
    store_beside(p.y0 + row * p.value_dim, p.value_dim, s.y0(), span.rows, p.value_dim);
    store_beside(p.out + p.value_at(span.first, hv), p.value_stride(), s.local(), span.rows,
                 p.value_dim);
    store_beside(p.add + p.state_at(chunk, hv), p.key_dim, s.added(), p.value_dim, p.key_dim);
  });
  __syncthreads();
  for (int i = int(threadIdx.x); i < span.rows * 8; i += kFastThreads) {  // 4
    const int r = i >> 3, c = 8 * (i & 7);
    float out[8] = {};
    if (c <= r) load_pack<float>(out, s.m + r * kInverseRow + c);
#pragma unroll
    for (int e = 0; e < 8; ++e) out[e] = c + e <= r ? out[e] : 0.f;
    store_pack<bf16_t>(p.a + (row + r) * kChunk + c, out);
  }
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
