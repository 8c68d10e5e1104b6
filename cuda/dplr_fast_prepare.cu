// dplr in bf16 on tensor cores: what needs no state, chunk by chunk (cuda/dplr_fast.cuh).
#include "cuda/delta_fast_inverse.cuh"
#include "cuda/dplr_part_scores.cuh"
#include "cuda/dplr_terms.cuh"

namespace ebb::gpu::low_rank {
namespace {

constexpr Inner kLast = Inner::last, kFirst = Inner::first;

template <int PARTS>
struct PrepareShared {
  CentredTiles in;    // W takes the place of A
  SwizzledTile v, x;  // V; A_ak V, then U
  union {
    SwizzledTile low_r;  // what rounding took of R
    SwizzledTile rk;     // A_rk
  };
  union {
    GroupTotals total;
    float m[64 * kInverseRow];  // −A_ab, then the inverse
    SwizzledTile inverse;       // rounded
  };
  SumsOf<PARTS> sums;
  OwnScores own;
};
// Blocks per multiprocessor.
static_assert(3 * (sizeof(PrepareShared<1>) + 1024) <= 228 * 1024);
static_assert(2 * (sizeof(PrepareShared<4>) + 1024) <= 228 * 1024);

// Scores of rows in shared memory; PARTS = 4: with those inside a part given.
template <int PARTS>
__device__ __forceinline__ void multiply_scores(float (&x)[8][4], const SwizzledTile& left,
                                                const SwizzledTile& right, const SumsOf<PARTS>& s,
                                                const PartScores& inside, int warp, const Lane& l) {
  if constexpr (PARTS == 4)
    multiply_borders(x, left, right, s, inside, warp, l);
  else
    multiply_centred<PARTS>(x, left, right, s, warp, l);
}
// The warp's 16 rows of a tile in memory.
__device__ __forceinline__ void store_rows(SwizzledTile& g, const float (&x)[8][4], int m0,
                                           const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<unsigned*>(g.at(m0 + l.g + 8 * half, 8 * n) + 2 * l.c) =
          pack_bf16(x[n][2 * half], x[n][2 * half + 1]);
}

// x = scores times V.
__device__ __forceinline__ void multiply_values(float (&x)[8][4], const SwizzledTile& v) {
  unsigned a[4][4];
  values_as_left(a, x);
  settle(a);
  warpgroup_begin();
  multiply_columns<true>(x, a, v);
  finish(x);
}

// The inverse rounded, zeros above its diagonal, in its place and to memory. By 128 threads.
template <int PARTS>
__device__ __forceinline__ void round_inverse(PrepareShared<PARTS>& s, SwizzledTile& g) {
  uint4 rounded[4];
  const int c = 8 * (int(threadIdx.x) & 7), r0 = int(threadIdx.x) >> 3;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = r0 + 16 * i;
    float x[8] = {};
    if (c <= r) load_pack<float>(x, s.m + r * kInverseRow + c);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = c + e <= r ? x[e] : 0.f;
    rounded[i] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                  pack_bf16(x[6], x[7])};
  }
  meet_group(0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(s.inverse.at(r0 + 16 * i, c)) = rounded[i];
    store_word(reinterpret_cast<uint4*>(g.at(r0 + 16 * i, c)), rounded[i]);
  }
}

// x = Σ over parts of 64/PARTS tokens of add(part), each times the decay between it and the ones
// after it (FROM_LAST: before it): scale(part) is that over a part (PARTS = 2: between two).
template <int PARTS, bool FROM_LAST, class Scale, class Add>
__device__ __forceinline__ void sum_parts(float (&x)[8][4], Scale&& scale, Add&& add) {
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const int part = FROM_LAST ? PARTS - 1 - i : i;
    if (i > 0) {
      scale(part);
      settle(x);
    }
    warpgroup_begin();
    add(part, i == 0);
    finish(x);
  }
}
// x += a b over the tokens of a part, or x = a b.
template <int PARTS, Inner A>
__device__ __forceinline__ void multiply_part(float (&x)[8][4], const SwizzledTile& a,
                                              const SwizzledTile& b, int part, bool fresh,
                                              int warp) {
  constexpr int kSteps = 4 / PARTS;
  const auto run = [&]<int PART>() {
    if (PART != part) return;
    if (fresh)
      multiply_tiles<true, A, kFirst, PART * kSteps, PART * kSteps + kSteps>(x, a, b, warp);
    else
      multiply_tiles<false, A, kFirst, PART * kSteps, PART * kSteps + kSteps>(x, a, b, warp);
  };
  run.template operator()<0>();
  if constexpr (PARTS > 1) run.template operator()<1>();
  if constexpr (PARTS > 2) run.template operator()<2>(), run.template operator()<3>();
}
// f(decays [64]) for the decay over a part, or between two.
template <int PARTS, class F>
__device__ __forceinline__ void each_factor(const SumsOf<PARTS>& s, int part, F&& f) {
  if constexpr (PARTS == 4) f(s.over[part]);
  if constexpr (PARTS == 2) f(s.between[0]), f(s.between[1]);
}

// W of the warp's 16 tokens.
template <int PARTS>
__device__ __forceinline__ void multiply_reads(float (&w)[8][4], const PrepareShared<PARTS>& s,
                                               int warp, const Lane& l) {
  const auto scale = [&](const float* f) { scale_columns(w, f, l); };
  sum_parts<PARTS, true>(
      w, [&](int part) { each_factor<PARTS>(s.sums, part, scale); },
      [&](int part, bool fresh) {
        multiply_part<PARTS, kLast>(w, s.inverse, s.in.a, part, fresh, warp);
      });
  if constexpr (PARTS < 4) scale(s.sums.from_start[0]);
}
// B̄ᵀ W, the warp's 16 channels.
template <int PARTS>
__device__ __forceinline__ void multiply_move(float (&x)[8][4], const PrepareShared<PARTS>& s,
                                              int warp, const Lane& l) {
  const auto scale = [&](const float* f) { scale_rows(x, f, 16 * warp, l); };
  sum_parts<PARTS, false>(
      x, [&](int part) { each_factor<PARTS>(s.sums, part, scale); },
      [&](int part, bool fresh) {
        multiply_part<PARTS, kFirst>(x, s.in.b, s.in.a, part, fresh, warp);
      });
  if constexpr (PARTS < 4) scale(s.sums.to_end[1]);
}
// (K̄ᵀ V + B̄ᵀ U)ᵀ, the warp's 16 columns of V.
template <int PARTS>
__device__ __forceinline__ void multiply_added(float (&x)[8][4], const PrepareShared<PARTS>& s,
                                               int warp, const Lane& l) {
  const auto scale = [&](const float* f) { scale_columns(x, f, l); };
  sum_parts<PARTS, false>(
      x, [&](int part) { each_factor<PARTS>(s.sums, part, scale); },
      [&](int part, bool fresh) {
        multiply_part<PARTS, kFirst>(x, s.v, s.in.k, part, fresh, warp);
        multiply_part<PARTS, kFirst>(x, s.x, s.in.b, part, false, warp);
      });
  if constexpr (PARTS < 4) scale(s.sums.to_end[1]);
}

// The first group: the inverse, most of it by two warps; W; what moves and what adds to the state.
template <int PARTS>
__device__ __forceinline__ void state_way(const FastProblem& p, PrepareShared<PARTS>& s, int64_t at,
                                          const PartScores& ab, int warp, const Lane& l) {
  const int m0 = 16 * warp;
  float x[8][4];
  multiply_scores<PARTS>(x, s.in.a, s.in.b, s.sums, ab, warp, l);
  keep<Triangle::below>(x, m0, l);
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
  round_inverse(s, p.inverse[at]);
  publish_tiles();
  meet<0>();  // the inverse and A_ak V
  multiply_reads<PARTS>(x, s, warp, l);
  meet_group(0);  // nobody else reads A
  put_rows(s.in.a, x, m0, l);
  publish_tiles();
  meet<0>();  // W and U
  unsigned move[4][4];
  multiply_move<PARTS>(x, s, warp, l);
  values_as_left(move, x);
  multiply_added<PARTS>(x, s, warp, l);
  unsigned added[4][4];
  round_terms(added, p.terms[at].units, x, m0, l);
  meet_group(0);  // nobody else reads B
  put_rows(s.in.b, move, m0, l);
  copy_rows(p.steps[at].move, s.in.b, m0);
  __syncwarp();
  put_rows(s.in.b, added, m0, l);
  copy_rows(p.terms[at].state, s.in.b, m0);
}

// x += ε∘R, the warp's 16 rows, as it was before it was rounded.
template <int PARTS>
__device__ __forceinline__ void add_reads(float (&x)[8][4], const PrepareShared<PARTS>& s, int warp,
                                          const Lane& l) {
  const int m0 = 16 * warp;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 f =
        *reinterpret_cast<const float2*>(&s.sums.from_start[part_of<PARTS>(warp)][8 * n + 2 * l.c]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 r = pair_at(s.in.r, m0, n, half, l), low = pair_at(s.low_r, m0, n, half, l);
      x[n][2 * half] += f.x * (r.x + low.x), x[n][2 * half + 1] += f.y * (r.y + low.y);
    }
  }
}

// The second: A_ak V, A_rb; U.
template <int PARTS>
__device__ __forceinline__ void values_way(const FastProblem& p, PrepareShared<PARTS>& s,
                                           int64_t at, const PartScores (&inside)[3],
                                           unsigned (&rb)[4][4], const Place& place) {
  const Lane& l = place.l;
  const int warp = place.warp, m0 = 16 * warp;
  float x[8][4];
  multiply_scores<PARTS>(x, s.in.a, s.in.k, s.sums, inside[0], warp, l);
  keep<Triangle::below>(x, m0, l);
  if constexpr (PARTS == 4) store_rows(p.scores[at].ak, x, m0, l);
  multiply_values(x, s.v);
  put_rows(s.x, x, m0, l);
  multiply_scores<PARTS>(x, s.in.r, s.in.b, s.sums, inside[2], warp, l);
  keep<Triangle::lower>(x, m0, l);
  if constexpr (PARTS == 4) store_rows(p.scores[at].rb, x, m0, l);
  values_as_left(rb, x);
  publish_tiles();
  meet<1>();
  warpgroup_begin();
  multiply_tiles<true, kLast, kFirst>(x, s.inverse, s.x, warp);
  finish(x);
  meet_group(1);  // nobody else reads A_ak V
  put_rows(s.x, x, m0, l);
  publish_tiles();
  meet<1>();
}
// Then what reads the state; A_rk and the rest of the outputs.
template <int PARTS>
__device__ __forceinline__ void read_way(const FastProblem& p, PrepareShared<PARTS>& s, int64_t at,
                                         const PartScores& inside, unsigned (&rb)[4][4],
                                         const Place& place) {
  const Lane& l = place.l;
  const int warp = place.warp, m0 = 16 * warp;
  float x[8][4];
  settle(rb);
  warpgroup_begin();
  multiply_columns<true>(x, rb, s.in.a);
  finish(x);
  add_reads<PARTS>(x, s, warp, l);
  put_rows(s.inverse, x, m0, l);  // which nobody reads any more
  copy_rows(p.steps[at].read, s.inverse, m0);
  multiply_scores<PARTS>(x, s.in.r, s.in.k, s.sums, inside, warp, l);
  keep<Triangle::lower>(x, m0, l);
  {
    unsigned rk[4][4];
    values_as_left(rk, x);
    put_own(rk, s.own, warp, l);
    put_rows(s.rk, rk, m0, l);
  }
  if constexpr (PARTS == 4) copy_rows(p.scores[at].rk, s.rk, m0);
  publish_tiles();
  meet_group(1);
  settle(rb);
  warpgroup_begin();
  multiply_tiles<true, kLast, kFirst>(x, s.rk, s.v, warp);
  multiply_columns(x, rb, s.x);
  finish(x);
  put_rows(s.inverse, x, m0, l);
  copy_rows(p.terms[at].out, s.inverse, m0);
}

// Block (head, chunk from the last on − first) of two warpgroups. 1 rows with their decays; PARTS =
// 4: scores inside the parts before that. 2 each group on its way. No loop over chunks: what all
// have in common would stay in registers.
template <int PARTS>
__global__ void __launch_bounds__(kFastThreads, PARTS == 1 ? 3 : 2)
    prepare_kernel(FastProblem p, int64_t first) {
  auto& s = swizzled_shared<PrepareShared<PARTS>>();
  const Lane l;
  const int head = int(blockIdx.x), warp = (int(threadIdx.x) >> 5) & 3;
  const int64_t chunk = p.by_place(p.chunks - 1 - (first + blockIdx.y));  // the first ones last
  const int64_t at = p.tile_at(chunk, head);
  const Span span = span_of(p, chunk);
  if (span.rows == 0) return;
  fetch_keys(p, span, head, s.in);
  commit_copies();
  TilePlace().fetch(s.v, p.v + p.value_at(span.first, head), p.value_stride(), span.rows,
                    p.value_dim);
  commit_copies();
  const bool state = threadIdx.x < kFastThreads / 2;
  PartScores inside[3];
  {
    CentredRows<PARTS, PARTS == 4> rows(p, span, head, s.total, s.sums);  // 1
    rows.own_scores(p, s.in, s.own);
    if constexpr (PARTS == 4) {
      rows.keep_inputs(s.in);
      rows.centre_leaf(p, span, head, s.in, s.sums);
      __syncthreads();
      multiply_leaves(inside[0], s.in.a, state ? s.in.b : s.in.k, s.sums, warp, l);
      if (!state) multiply_leaves(inside[1], s.in.r, s.in.k, s.sums, warp, l);
      if (!state) multiply_leaves(inside[2], s.in.r, s.in.b, s.sums, warp, l);
      __syncthreads();
    }
    rows.centre(p, s.in, &s.low_r);
  }
  if (threadIdx.x < 64) {
    const int t = int(threadIdx.x);
    float decay = s.sums.from_start[0][t] * s.sums.to_end[0][t];
    if constexpr (PARTS == 4) decay *= s.sums.over[0][t];
    p.steps[at].decay[t] = decay;
  }
  wait_copy_groups<0>();
  publish_tiles();
  __syncthreads();
  if (state) {  // 2
    state_way<PARTS>(p, s, at, inside[0], warp, l);
  } else {
    unsigned rb[4][4];
    values_way<PARTS>(p, s, at, inside, rb, Place());
    read_way<PARTS>(p, s, at, inside[1], rb, Place());
  }
}

}  // namespace

void fast_prepare(const FastProblem& p, int parts, cudaStream_t stream) {
  const auto launch = [&]<int PARTS>() {
    for (int64_t first = 0; first < p.chunks; first += kMostChunks) {
      const dim3 grid(unsigned(p.heads), unsigned(std::min(p.chunks - first, kMostChunks)));
      launch_fast<PrepareShared<PARTS>>(prepare_kernel<PARTS>, kFastThreads, grid, stream, p,
                                        first);
    }
  };
  if (parts == 1) launch.template operator()<1>();
  if (parts == 2) launch.template operator()<2>();
  if (parts == 4) launch.template operator()<4>();
}

}  // namespace ebb::gpu::low_rank
