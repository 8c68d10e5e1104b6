// dplr of wide heads on tensor cores: what chunks make of states and what they add to them and to
// the outputs, from their scores (cuda/dplr_wide.cuh).
#include "cuda/dplr_wide.cuh"

namespace ebb::gpu::low_rank {
namespace {

constexpr Inner kLast = Inner::last, kFirst = Inner::first;

template <int PANELS>
struct KeysShared {
  SwizzledTile r[PANELS], low_r[PANELS];  // and what rounding took of it
  SwizzledTile a[PANELS], b[PANELS];      // W takes the place of A
  SwizzledTile inverse, rb;
  GroupTotals total[PANELS];
};
template <int PANELS>
struct TermsShared {
  SwizzledTile k[PANELS], b[PANELS], inverse;
  ChunkScores scores;
  SwizzledTile v[2], x[2];  // of each group: V; A_ak V, then U
  GroupTotals total[PANELS];
};
static_assert(2 * (sizeof(KeysShared<2>) + 1024) <= 228 * 1024);  // two blocks per multiprocessor
static_assert(2 * (sizeof(TermsShared<2>) + 1024) <= 228 * 1024);

// By a group of four warps: W, B̄ᵀ W and ε∘R + A_rb W of the channels of a panel.
template <int PANELS>
__device__ __forceinline__ void make_step(KeysShared<PANELS>& s, WideStep<PANELS>& g, int panel,
                                          int group, int warp, const Lane& l) {
  const int m0 = 16 * warp;
  SwizzledTile &w = s.a[panel], &r = s.r[panel];
  float x[8][4];
  warpgroup_begin();
  multiply_tiles<true, kLast, kFirst>(x, s.inverse, w, warp);
  finish(x);
  meet_group(group);  // nobody else reads A
  put_rows(w, x, m0, l);
  publish_tiles();
  meet_group(group);
  warpgroup_begin();
  multiply_tiles<true, kLast, kFirst>(x, s.rb, w, warp);
  finish(x);
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 y = pair_at(r, m0, n, half, l), low = pair_at(s.low_r[panel], m0, n, half, l);
      x[n][2 * half] += y.x + low.x, x[n][2 * half + 1] += y.y + low.y;
    }
  store_by(r, g.read[panel], x, m0, l);
#pragma unroll
  for (int i = 0; i < PANELS; ++i) {
    warpgroup_begin();
    multiply_tiles<true, kFirst, kFirst>(x, s.b[i], w, warp);
    finish(x);
    store_by(r, g.move[i][panel], x, m0, l);
  }
}

// Block (head, chunk from the last on − first) of two warpgroups. 1 rows with their decays. 2 each
// group with every other panel.
template <int PANELS>
__global__ void __launch_bounds__(kFastThreads, PANELS > 2 ? 1 : 2)
    keys_kernel(WideProblem p, int64_t first) {
  auto& s = swizzled_shared<KeysShared<PANELS>>();
  const Lane l;
  const int head = int(blockIdx.x), warp = (int(threadIdx.x) >> 5) & 3;
  const int64_t chunk = p.by_place(p.chunks - 1 - (first + blockIdx.y));
  const int64_t at = p.tile_at(chunk, head);
  const Span span = span_of(p, chunk);
  if (span.rows == 0) return;
  WideStep<PANELS>& step = p.template step<PANELS>(at);
  const TilePlace place;
  PlainDecays decays[PANELS];
#pragma unroll
  for (int i = 0; i < PANELS; ++i) {
    const KeyPanel keys(p, i);
    const int64_t key = keys.key_at(span.first, head);
    place.fetch(s.r[i], keys.q + key, keys.stride, span.rows, keys.key_dim);
    place.fetch(s.a[i], keys.low_a + key, keys.stride, span.rows, keys.key_dim);
    place.fetch(s.b[i], keys.low_b + key, keys.stride, span.rows, keys.key_dim);
  }
  fetch_whole(s.inverse, p.inverse[at]);
  fetch_whole(s.rb, p.scores[at].rb);
  commit_copies();
#pragma unroll
  for (int i = 0; i < PANELS; ++i) decays[i].load(KeyPanel(p, i), span, head, s.total[i]);
  wait_copy_groups<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PANELS; ++i) {  // 1
    const PlainDecays& d = decays[i];
    d.from_start(s.r[i], s.low_r[i], s.a[i], p.scale, s.total[i]);
    d.to_end(s.total[i], s.b[i]);
    if (d.warp == 0)
      *reinterpret_cast<float2*>(step.decay + 64 * i + d.channel) =
          exp2_pair(d.sum(s.total[i], 0, 8));
  }
  publish_tiles();
  __syncthreads();
  const int group = int(threadIdx.x) / 128;
#pragma unroll 1
  for (int panel = group; panel < PANELS; panel += 2)  // 2
    make_step<PANELS>(s, step, panel, group, warp, l);
}

// The warp's 16 rows as a left operand.
__device__ __forceinline__ void load_left(unsigned (&a)[4][4], const SwizzledTile& s, int m0,
                                          const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    load_matrices(a[k], s.at(m0 + l.low + 8 * l.odd, 16 * k + 8 * l.high));
}

// By a group of four warps: U, (K̄ᵀ V + B̄ᵀ U)ᵀ and A_rk V + A_rb U of 64 columns of V.
template <int PANELS>
__device__ __forceinline__ void make_terms(TermsShared<PANELS>& s, WideTerms<PANELS>& g,
                                           unsigned (&ak)[4][4], unsigned (&rk)[4][4], int group,
                                           int warp, const Lane& l) {
  const int m0 = 16 * warp;
  SwizzledTile &v = s.v[group], &u = s.x[group];
  SwizzledTile& scratch = group ? s.scores.rk : s.scores.ak;
  float x[8][4];
  settle(ak), settle(rk);
  warpgroup_begin();
  multiply_columns<true>(x, ak, v);
  finish(x);
  put_rows(u, x, m0, l);
  publish_tiles();
  meet_group(group);
  warpgroup_begin();
  multiply_tiles<true, kLast, kFirst>(x, s.inverse, u, warp);
  finish(x);
  meet_group(group);  // nobody else reads A_ak V
  put_rows(u, x, m0, l);
  publish_tiles();
  meet_group(group);
  warpgroup_begin();
  multiply_columns<true>(x, rk, v);
  multiply_tiles<false, kLast, kFirst>(x, s.scores.rb, u, warp);
  finish(x);
  store_by(scratch, g.out, x, m0, l);
#pragma unroll
  for (int i = 0; i < PANELS; ++i) {
    warpgroup_begin();
    multiply_tiles<true, kFirst, kFirst>(x, v, s.k[i], warp);
    multiply_tiles<false, kFirst, kFirst>(x, u, s.b[i], warp);
    finish(x);
    unsigned added[4][4];
    round_terms(added, g.units[i], x, m0, l);
    store_by(scratch, g.state[i], added, m0, l);
  }
}

// Block (head, chunk from the last on − first) of two warpgroups. 1 rows with their decays. 2 each
// group with every other 64 columns of V.
template <int PANELS>
__global__ void __launch_bounds__(kFastThreads, PANELS > 2 ? 1 : 2)
    terms_kernel(WideProblem p, int64_t first) {
  auto& s = swizzled_shared<TermsShared<PANELS>>();
  const Lane l;
  const int head = int(blockIdx.x), warp = (int(threadIdx.x) >> 5) & 3;
  const int64_t chunk = p.by_place(p.chunks - 1 - (first + blockIdx.y));
  const int64_t at = p.tile_at(chunk, head);
  const Span span = span_of(p, chunk);
  if (span.rows == 0) return;
  const TilePlace place;
  const auto fetch = [&](int block) {
    fetch_block(p, p.v, span, head, block, s.v[0]);
    if (block + 1 < p.blocks) fetch_block(p, p.v, span, head, block + 1, s.v[1]);
    commit_copies();
  };
  PlainDecays decays[PANELS];
#pragma unroll
  for (int i = 0; i < PANELS; ++i) {
    const KeyPanel keys(p, i);
    const int64_t key = keys.key_at(span.first, head);
    place.fetch(s.k[i], keys.k + key, keys.stride, span.rows, keys.key_dim);
    place.fetch(s.b[i], keys.low_b + key, keys.stride, span.rows, keys.key_dim);
  }
  fetch_whole(s.inverse, p.inverse[at]);
  fetch_whole(s.scores.ak, p.scores[at].ak);
  fetch_whole(s.scores.rb, p.scores[at].rb);
  fetch_whole(s.scores.rk, p.scores[at].rk);
  fetch(0);
#pragma unroll
  for (int i = 0; i < PANELS; ++i) decays[i].load(KeyPanel(p, i), span, head, s.total[i]);
  wait_copy_groups<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PANELS; ++i) decays[i].to_end(s.total[i], s.k[i], s.b[i]);  // 1
  unsigned ak[4][4], rk[4][4];
  load_left(ak, s.scores.ak, 16 * warp, l);
  load_left(rk, s.scores.rk, 16 * warp, l);
  publish_tiles();
  __syncthreads();
  const int group = int(threadIdx.x) / 128;
#pragma unroll 1
  for (int block = 0; block < p.blocks; block += 2) {  // 2
    if (block > 0) {
      __syncthreads();
      fetch(block);
      wait_copy_groups<0>();
      publish_tiles();
      __syncthreads();
    }
    if (block + group < p.blocks)
      make_terms<PANELS>(s, p.template term<PANELS>(at, block + group), ak, rk, group, warp, l);
  }
}

}  // namespace

void wide_prepare(const WideProblem& p, cudaStream_t stream) {
  visit_panels(p, [&]<int PANELS>() {
    each_grid(p, 1, [&](int64_t first, dim3 grid) {
      launch_fast<KeysShared<PANELS>>(keys_kernel<PANELS>, kFastThreads, grid, stream, p, first);
    });
    each_grid(p, 1, [&](int64_t first, dim3 grid) {
      launch_fast<TermsShared<PANELS>>(terms_kernel<PANELS>, kFastThreads, grid, stream, p, first);
    });
  });
}

}  // namespace ebb::gpu::low_rank
