// What the kernels of cuda/dplr_fast.cuh make of a chunk's rows and decays in shared memory, and
// the scores they get from there.
#pragma once
#include <type_traits>

#include "cuda/dplr_fast.cuh"
#include "cuda/meet.cuh"

namespace ebb::gpu::low_rank {

struct CentredTiles {
  SwizzledTile r, a, k, b;
};
using GroupTotals = float[8][64];  // log2 of the decay over a warp's eight tokens
// scale r·k of each token, in f32 from what they are: a score of a token with itself has no decay.
// It is all that the first token of a sequence reads, and where r and k are nearly orthogonal,
// factors that are rounded before they cancel would leave noise.
using OwnScores = float[64];
struct CentredSums {
  float from_start[2][64];  // from the chunk's start to each half's centre; of one centre: ε
  float to_end[2][64];      // from there to the chunk's end
  float between[2][64];     // δ in two factors: on its own it may be no float
};
struct SteepSums {          // PARTS = 4
  float from_start[4][64];  // from the chunk's start to each part's
  float to_end[4][64];      // from each part's end to the chunk's
  float over[4][64];        // over each part
  float middle[64];         // over the second and the third
  float half[8][64];        // half of a leaf's
};
template <int PARTS>
using SumsOf = std::conditional_t<PARTS == 4, SteepSums, CentredSums>;
// Which entry of `from_start` and `to_end` holds for the 16 rows of a warp.
template <int PARTS>
__device__ __forceinline__ int part_of(int warp) {
  return PARTS == 4 ? warp : warp >> 1;
}

// Where a thread stands, worked out anew: it need not stay in registers between steps.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
struct Place {
  int warp;  // of its group
  Lane l;

  __device__ __forceinline__ Place() {
    const int thread = thread_again(), lane = thread & 31;
    warp = thread >> 5 & 3;
    l.g = lane >> 2, l.c = lane & 3;
    l.low = lane & 7, l.odd = lane >> 3 & 1, l.high = lane >> 4;
  }
};
// Where the two groups of four warps, each on a way of its own, wait for one another; and where the
// warps of one group do.
template <int GROUP>
__device__ __forceinline__ void meet() {
  barrier_meet<GROUP, kFastThreads / 2, kFastThreads / 2>(1);
}
__device__ __forceinline__ void meet_group(int group) { barrier_wait<kFastThreads / 2>(3 + group); }

// A lane's two channels.
__device__ __forceinline__ float2 pair_of(unsigned x) { return {low_half(x), high_half(x)}; }
__device__ __forceinline__ float2 times(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ __forceinline__ float2 exp2_pair(float2 x) { return {exp2_fast(x.x), exp2_fast(x.y)}; }
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ unsigned pack_pair(float2 x) { return pack_bf16(x.x, x.y); }
// What is left of x beside its rounded values.
__device__ __forceinline__ unsigned pack_rest(float2 x, unsigned rounded) {
  return pack_pair({x.x - low_half(rounded), x.y - high_half(rounded)});
}

// Asks for r, a, k and b of a chunk, as they are, where their centred rows will lie.
template <class P>
__device__ __forceinline__ void fetch_keys(const P& p, Span span, int head, CentredTiles& s) {
  const TilePlace at;
  const int64_t key = p.key_at(span.first, head), stride = p.key_stride();
  at.fetch(s.r, p.q + key, stride, span.rows, p.key_dim);
  at.fetch(s.a, p.low_a + key, stride, span.rows, p.key_dim);
  at.fetch(s.k, p.k + key, stride, span.rows, p.key_dim);
  at.fetch(s.b, p.low_b + key, stride, span.rows, p.key_dim);
}

__device__ __forceinline__ void fetch_whole(SwizzledTile& s, const SwizzledTile& g) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = 8 * (int(threadIdx.x) + kFastThreads * i);
    copy_async_or_zero(s.s + at, g.s + at, true);
  }
}

// A warp's eight tokens, a lane's two channels of them: sums of log2 decays from their centre on.
// TWICE: r, a, k and b are kept, for factors of two kinds.
template <int PARTS, bool TWICE = false>
struct CentredRows {
  // Log decays, by two: e^-100 is 0 in f32; inside a leaf.
  static constexpr float kLog2e = 1.4426950408889634f, kLeast = -100 * kLog2e,
                         kLeafLeast = -16 * kLog2e;
  int warp = int(threadIdx.x) >> 5, lane = int(threadIdx.x) & 31, channel = 2 * lane;
  float2 before, sum[8];  // of the token before the warp's first, of each
  float2 total;           // PARTS = 4: over the warp's part
  unsigned inputs[4][TWICE ? 8 : 1];

  // All 256 threads; two barriers, after which s_total is used no more and fetch_keys(), all groups
  // of copies but the last, is done.
  template <class P>
  __device__ __forceinline__ CentredRows(const P& p, Span span, int head, GroupTotals& s_total,
                                         SumsOf<PARTS>& s) {
    load_decays(p, span, head, sum);
    float2 x = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 w = sum[i];
      if (w.x > 0.f || w.y > 0.f) *p.positive_decay = 1;
      if (w.x < p.least || w.y < p.least) *p.unbounded_decay = 1;
      const float2 g = log2_of(w, kLeast);
      x.x += g.x, x.y += g.y;
      sum[i] = x;
    }
    *reinterpret_cast<float2*>(&s_total[warp][channel]) = x;
    __syncthreads();
    if constexpr (PARTS == 4)
      refer_to_borders(s_total, s);
    else
      refer_to_centres(s_total, s);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = {sum[i].x + before.x, sum[i].y + before.y};
    wait_copy_groups<1>();
    __syncthreads();
  }
  __device__ __forceinline__ void refer_to_centres(const GroupTotals& s_total, CentredSums& s) {
    float2 start = {}, first = {}, second = {};  // decays before the warp, over the halves
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 t = *reinterpret_cast<const float2*>(&s_total[i][channel]);
      if (i < warp) start.x += t.x, start.y += t.y;
      float2& half = i < 4 ? first : second;
      half.x += t.x, half.y += t.y;
    }
    const float2 all = {first.x + second.x, first.y + second.y};
    float2 c[2] = {centre_of(all, all), centre_of(all, all)};
    if (PARTS == 2) c[0] = centre_of(first, first), c[1] = centre_of(all, second);
    const float2 own = warp < 4 ? c[0] : c[1];
    before = {start.x - own.x, start.y - own.y};
    if (warp % 4 == 0) {
      put(s.from_start[warp / 4], exp2_pair(own));
      put(s.to_end[warp / 4], exp2_pair({all.x - own.x, all.y - own.y}));
    }
    if (warp == 1) {
      put(s.between[0], exp2_pair({first.x - c[0].x, first.y - c[0].y}));
      put(s.between[1], exp2_pair({c[1].x - first.x, c[1].y - first.y}));
    }
  }
  // About the middle of what ends at `end`, a power of two before that: k and b of the last token,
  // which make most of the state where decays are strong, are rounded to themselves.
  __device__ __forceinline__ static float2 centre_of(float2 end, float2 length) {
    return {end.x - rintf(0.5f * length.x), end.y - rintf(0.5f * length.y)};
  }
  __device__ __forceinline__ void refer_to_borders(const GroupTotals& s_total, SteepSums& s) {
    const int first = warp & ~1;               // of the part's two warps
    float2 start = {}, end = {}, middle = {};  // decays before the part, after it; over two parts
    before = total = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 t = *reinterpret_cast<const float2*>(&s_total[i][channel]);
      if (i < first) start.x += t.x, start.y += t.y;
      if (i > first + 1) end.x += t.x, end.y += t.y;
      if (i == first || i == first + 1) total.x += t.x, total.y += t.y;
      if (i >= 2 && i < 6) middle.x += t.x, middle.y += t.y;
      if (i == first && i < warp) before = t;
    }
    if (warp > first) return;
    put(s.from_start[warp / 2], exp2_pair(start));
    put(s.to_end[warp / 2], exp2_pair(end));
    put(s.over[warp / 2], exp2_pair(total));
    if (warp == 0) put(s.middle, exp2_pair(middle));
  }
  __device__ __forceinline__ void put(float* s_row, float2 x) const {
    *reinterpret_cast<float2*>(s_row + channel) = x;
  }
  // Log decays; none outside.
  template <class P>
  __device__ __forceinline__ void load_decays(const P& p, Span span, int head,
                                              float2 (&w)[8]) const {
    const float* g_w = p.g + p.key_at(span.first + 8 * warp, head) + channel;
    const int64_t stride = p.key_stride();
    const int rows = channel < p.key_dim ? span.rows - 8 * warp : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i, g_w += stride) {
      w[i] = {};
      if (i < rows) w[i] = *reinterpret_cast<const float2*>(g_w);
    }
  }
  __device__ __forceinline__ static float log2_of(float w, float least = kLeast) {
    const float g = kLog2e * w;
    return PARTS == 4 && g < least ? least : g;  // NaN stays
  }
  __device__ __forceinline__ static float2 log2_of(float2 w, float least) {
    return {log2_of(w.x, least), log2_of(w.y, least)};
  }
  // TWICE, before anything else: all threads.
  __device__ __forceinline__ void keep_inputs(CentredTiles& s) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      inputs[0][i] = *place(s.r, i), inputs[1][i] = *place(s.a, i);
      inputs[2][i] = *place(s.k, i), inputs[3][i] = *place(s.b, i);
    }
  }
  __device__ __forceinline__ unsigned* place(SwizzledTile& tile, int i) const {
    return reinterpret_cast<unsigned*>(tile.at(8 * warp + i, channel & ~7) + (channel & 7));
  }
  // e^{G_i−c}, e^{Gx_i−c}, e^{c−G_i} for centres; for borders from the first and to the last.
  __device__ __forceinline__ float2 up(int i) const { return exp2_pair(sum[i]); }
  __device__ __forceinline__ float2 up_before(int i) const {
    return exp2_pair(i == 0 ? before : sum[i == 0 ? 0 : i - 1]);
  }
  __device__ __forceinline__ float2 down(int i) const {
    if constexpr (PARTS == 4) return exp2_pair({total.x - sum[i].x, total.y - sum[i].y});
    return exp2_pair({-sum[i].x, -sum[i].y});
  }

  // Of the warp's tokens, four lanes each, before anything is done to their rows. MORE: beside what
  // there is.
  template <class P>
  __device__ __forceinline__ void own_scores(const P& p, CentredTiles& s, OwnScores& s_own,
                                             bool more = false) const {
    const int token = 8 * warp + lane / 4, first = 16 * (lane % 4);
    float sum = 0;
#pragma unroll 1
    for (int c = first; c < first + 16; c += 8) {
      float r[8], k[8];
      load_pack(r, s.r.at(token, c));
      load_pack(k, s.k.at(token, c));
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += r[i] * k[i];
    }
#pragma unroll
    for (int o = 1; o < 4; o *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane % 4 == 0) s_own[token] = more ? s_own[token] + p.scale * sum : p.scale * sum;
    __syncwarp();
  }
  // Rows times their factors, in place. low_r: also what r loses to rounding.
  template <class P>
  __device__ __forceinline__ void centre(const P& p, CentredTiles& s,
                                         SwizzledTile* low_r = nullptr) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) put_row(p, s, i, up(i), up_before(i), down(i), low_r);
  }
  // The same for leaves centred on their own.
  template <class P>
  __device__ __forceinline__ void centre_leaf(const P& p, Span span, int head, CentredTiles& s,
                                              SteepSums& s_sums) const {
    float2 g[8], all = {};
    load_decays(p, span, head, g);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      g[i] = log2_of(g[i], kLeafLeast);
      all.x += g[i].x, all.y += g[i].y;
    }
    put(s_sums.half[warp], exp2_pair({0.5f * all.x, 0.5f * all.y}));
    float2 x = {-0.5f * all.x, -0.5f * all.y};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 earlier = exp2_pair(x);
      x.x += g[i].x, x.y += g[i].y;
      put_row(p, s, i, exp2_pair(x), earlier, exp2_pair({-x.x, -x.y}));
    }
  }
  template <class P>
  __device__ __forceinline__ void put_row(const P& p, CentredTiles& s, int i, float2 up,
                                          float2 up_before, float2 down,
                                          SwizzledTile* low_r = nullptr) const {
    const auto put = [&](SwizzledTile& tile, int which, float2 f, SwizzledTile* low = nullptr) {
      unsigned* at = place(tile, i);
      const float2 x = times(pair_of(TWICE ? inputs[which][i] : *at), f);
      *at = pack_pair(x);
      if (low) *place(*low, i) = pack_rest(x, pack_pair(x));
    };
    put(s.r, 0, {p.scale * up.x, p.scale * up.y}, low_r);
    put(s.a, 1, up_before);
    put(s.k, 2, down);
    put(s.b, 3, down);
  }
};

// The two values at an accumulator's place: fragment n, rows g or g+8 of the warp's 16.
__device__ __forceinline__ float2 pair_at(const SwizzledTile& s, int m0, int n, int half,
                                          const Lane& l) {
  return pair_of(*reinterpret_cast<const unsigned*>(s.at(m0 + l.g + 8 * half, 8 * n) + 2 * l.c));
}
// A warp's 16 rows of a tile from accumulators given as left operands.
__device__ __forceinline__ void put_rows(SwizzledTile& s, const unsigned (&x)[4][4], int m0,
                                         const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    store_matrices<false>(s.at(m0 + l.low + 8 * l.odd, 16 * k + 8 * l.high), x[k]);
}
__device__ __forceinline__ void put_rows(SwizzledTile& s, const float (&x)[8][4], int m0,
                                         const Lane& l) {
  unsigned a[4][4];
  values_as_left(a, x);
  put_rows(s, a, m0, l);
}
// A warp's 16 rows of a tile to the same place in memory, once the warp has written them.
__device__ __forceinline__ void copy_rows(SwizzledTile& g, const SwizzledTile& s, int m0) {
  __syncwarp();
  const int lane = int(threadIdx.x) & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = 64 * m0 + 8 * (lane + 32 * i);
    store_word(reinterpret_cast<uint4*>(g.s + at), *reinterpret_cast<const uint4*>(s.s + at));
  }
}
// What is left of a warp's 16 rows beside their rounded values.
__device__ __forceinline__ void put_rest(SwizzledTile& s, const float (&x)[8][4],
                                         const unsigned (&rounded)[4][4], int m0, const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    unsigned a[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float(&from)[4] = x[2 * k + e / 2];
      a[e] = pack_rest({from[2 * (e % 2)], from[2 * (e % 2) + 1]}, rounded[k][e]);
    }
    store_matrices<false>(s.at(m0 + l.low + 8 * l.odd, 16 * k + 8 * l.high), a);
  }
}
// x by row: times f, [64] in shared memory.
__device__ __forceinline__ void scale_rows(float (&x)[8][4], const float* s_f, int m0,
                                           const Lane& l) {
  const float f[2] = {s_f[m0 + l.g], s_f[m0 + l.g + 8]};
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] *= f[e >> 1];
}
// x by column: times f, [64] in shared memory.
__device__ __forceinline__ void scale_columns(float (&x)[8][4], const float* s_f, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 f = *reinterpret_cast<const float2*>(s_f + 8 * n + 2 * l.c);
    x[n][0] *= f.x, x[n][1] *= f.y, x[n][2] *= f.x, x[n][3] *= f.y;
  }
}
// x by column times δ.
__device__ __forceinline__ void scale_between(float (&x)[8][4], const CentredSums& s,
                                              const Lane& l) {
  scale_columns(x, s.between[0], l);
  scale_columns(x, s.between[1], l);
}
// The warp's 16 rows of a tile as left operands, pairs of columns c, c+1 as f(pair, c).
template <class F>
__device__ __forceinline__ void load_scaled(unsigned (&a)[4][4], const SwizzledTile& s, int m0,
                                            const Lane& l, F&& f) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    load_matrices(a[k], s.at(m0 + l.low + 8 * l.odd, 16 * k + 8 * l.high));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      a[k][e] = pack_pair(f(pair_of(a[k][e]), 16 * k + 8 * (e >> 1) + 2 * l.c));
    }
  }
}
__device__ __forceinline__ void finish(float (&x)[8][4]) {
  warpgroup_commit();
  warpgroup_wait<0>();
  settle(x);
}
// What the inverse of the scores makes of a tile, in its place, by a group of four warps each of
// which has put its 16 rows there.
template <Inner INVERSE>
__device__ __forceinline__ void apply_inverse(SwizzledTile& tile, float (&x)[8][4],
                                              const SwizzledTile& inverse, int group, int warp,
                                              const Lane& l) {
  publish_tiles();
  meet_group(group);
  warpgroup_begin();
  multiply_tiles<true, INVERSE, Inner::first>(x, inverse, tile, warp);
  finish(x);
  meet_group(group);
  put_rows(tile, x, 16 * warp, l);
  publish_tiles();
}
// x = left·rightᵀ over channels, by the warps of a group: scores of centred rows. PARTS = 2: with
// δ between rows of different halves (which of the two is the later one does not matter).
template <int PARTS>
__device__ __forceinline__ void multiply_centred(float (&x)[8][4], const SwizzledTile& left,
                                                 const SwizzledTile& right, const CentredSums& s,
                                                 int warp, const Lane& l) {
  warpgroup_begin();
  multiply_tiles<true, Inner::last, Inner::last>(x, left, right, warp);
  finish(x);
  if constexpr (PARTS == 2) {
    float y[8][4];
    unsigned a[4][4];
    load_scaled(a, left, 16 * warp, l, [&](float2 v, int c) {
      const float2 f = *reinterpret_cast<const float2*>(s.between[0] + c);
      return times(times(v, f), *reinterpret_cast<const float2*>(s.between[1] + c));
    });
    settle(a);
    warpgroup_begin();
    multiply_rows<true>(y, a, right);
    finish(y);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (n / 4 != warp / 2) x[n][e] = y[n][e];
  }
}

// Which part of a square of scores is kept: selected, since what is left out may be huge.
enum class Triangle { lower, below, upper, above };  // with the diagonal or without it
template <Triangle PART>
__device__ __forceinline__ void keep(float (&x)[8][4], int m0, const Lane& l) {
  const int row = m0 + l.g - 2 * l.c;  // less the lane's column
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * n + (e & 1) - 8 * (e >> 1);
      const bool kept = PART == Triangle::lower   ? column <= row
                        : PART == Triangle::below ? column < row
                        : PART == Triangle::upper ? column >= row
                                                  : column > row;
      x[n][e] = kept ? x[n][e] : 0.f;
    }
}
// Scores of the warp's 16 tokens with themselves, where their square lies as a left operand.
__device__ __forceinline__ void put_own(unsigned (&a)[4][4], const float* s_own, int warp,
                                        const Lane& l) {
  const unsigned own = pack_bf16(s_own[16 * warp + l.g], s_own[16 * warp + 8 + l.g]);
  const bool here = l.c == l.g / 2;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k != warp || !here) continue;
    a[k][0] = l.g % 2 ? __byte_perm(a[k][0], own, 0x5410) : __byte_perm(a[k][0], own, 0x3254);
    a[k][3] = l.g % 2 ? __byte_perm(a[k][3], own, 0x7610) : __byte_perm(a[k][3], own, 0x3276);
  }
}

}  // namespace ebb::gpu::low_rank
