// dplr in bf16 on tensor cores, for heads of at most 64 channels whose log decays are bounded
// (DplrOptions::lower_bound): a chunk of 64 tokens is centred on half of its decay,
//   R_i = scale r_i∘e^{G_i−c}   A_i = a_i∘e^{Gx_i−c}   K_j = k_j∘e^{c−G_j}   B_j = b_j∘e^{c−G_j}
// with c = G_n/2 by channel, so that no exponent exceeds 40 and every score is an element of a
// product of these (ops/dplr.h): A_rk = tril(R Kᵀ), A_ab = stril(A Bᵀ), ... With ε = e^c, ε∘R is r
// as it meets the state before the chunk, ε∘K is k as it reaches the one after it, and ε² is the
// decay over the chunk.
// Where decays are so strong that this would leave the range of floats, each half of the chunk, 32
// tokens, is centred on its own (HALVES = 2): scores inside a half are as above, those of the later
// half with the earlier one have a factor δ = e^{c'−c} by channel between the two centres.
//
// dplr_fast_prepare.cu makes what needs no state, the scans are those of the delta rule with a
// decay per channel (delta_fast_channel.cu), whose V' is Y here; dplr_fast_gradients.cu does the
// rest.
#pragma once
#include "cuda/delta_fast.cuh"
#include "cuda/delta_rule_channel.cuh"
#include "cuda/dplr.cuh"

namespace ebb::gpu::low_rank {

using namespace delta;

inline constexpr int kFastThreads = 256;
inline constexpr int64_t kMostChunks = 65535;  // of one launch
// Half of the log decay over a part with one centre: e^70 leaves room for sums of products.
inline constexpr double kMostExponent = 70;

// r, k, v, w are the Channel's q, k, v, g; erased, queries and kept are −ε∘A, ε∘R, ε∘B.
struct FastProblem : ChannelBackward<bf16_t> {
  const bf16_t *low_a = {}, *low_b = {};  // a, b [tokens,H,K]
  int32_t* unbounded_decay = {};
  float least = {};
  bf16_t *y0 = {}, *add = {}, *out = {};  // A_ak V, as `written`; what lies at `added` and `local`
  bf16_t *da = {}, *db = {};
  float* dw = {};
};

struct CentredTiles {
  SwizzledTile r, a, k, b;
};
struct CentredSums {
  float total[8][64];       // log2 of the decay over a warp's eight tokens
  float from_start[2][64];  // from the chunk's start to each half's centre; of one centre: ε
  float to_end[2][64];      // from there to the chunk's end
  float between[2][64];     // δ in two factors: on its own it may be no float
};

// Where the two groups of four warps, each on a way of its own, wait for one another; and where the
// warps of one group do.
__device__ __forceinline__ void meet() { barrier_wait<kFastThreads>(2); }
__device__ __forceinline__ void meet_group(int group) { barrier_wait<kFastThreads / 2>(3 + group); }

// A lane's two channels.
__device__ __forceinline__ float2 pair_of(unsigned x) { return {low_half(x), high_half(x)}; }
__device__ __forceinline__ float2 times(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ __forceinline__ float2 exp2_pair(float2 x) { return {exp2_fast(x.x), exp2_fast(x.y)}; }
__device__ __forceinline__ unsigned pack_pair(float2 x) { return pack_bf16(x.x, x.y); }

// A warp's eight tokens, a lane's two channels of them: sums of log2 decays from their centre on.
template <int HALVES>
struct CentredRows {
  int warp = int(threadIdx.x) >> 5, lane = int(threadIdx.x) & 31, channel = 2 * lane;
  float2 before, sum[8];      // of the token before the warp's first, of each
  float2 from_start, to_end;  // of the warp's half
  int64_t key;                // of the warp's first token

  // All 256 threads; two barriers.
  __device__ __forceinline__ CentredRows(const FastProblem& p, Span span, int hv, CentredSums& s)
      : key(p.key_at(span.first + 8 * warp, hv) + channel) {
    constexpr float kLog2e = 1.4426950408889634f;
    float2 x = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float2 w = {};
      if (inside(p, span, i)) w = *reinterpret_cast<const float2*>(p.g + at(p, i));
      if (w.x > 0.f || w.y > 0.f) *p.positive_decay = 1;
      if (w.x < p.least || w.y < p.least) *p.unbounded_decay = 1;
      x.x += kLog2e * w.x, x.y += kLog2e * w.y;
      sum[i] = x;
    }
    *reinterpret_cast<float2*>(&s.total[warp][channel]) = x;
    __syncthreads();
    float2 start = {}, first = {}, second = {};  // decays before the warp, over the halves
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 t = *reinterpret_cast<const float2*>(&s.total[i][channel]);
      if (i < warp) start.x += t.x, start.y += t.y;
      float2& half = i < 4 ? first : second;
      half.x += t.x, half.y += t.y;
    }
    const float2 all = {first.x + second.x, first.y + second.y};
    float2 c[2] = {{0.5f * all.x, 0.5f * all.y}, {0.5f * all.x, 0.5f * all.y}};
    if (HALVES == 2) {
      c[0] = {0.5f * first.x, 0.5f * first.y};
      c[1] = {first.x + 0.5f * second.x, first.y + 0.5f * second.y};
    }
    const float2 own = warp < 4 ? c[0] : c[1];
    before = {start.x - own.x, start.y - own.y};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = {sum[i].x + before.x, sum[i].y + before.y};
    from_start = exp2_pair(own), to_end = exp2_pair({all.x - own.x, all.y - own.y});
    if (warp % 4 == 0) {
      *reinterpret_cast<float2*>(&s.from_start[warp / 4][channel]) = from_start;
      *reinterpret_cast<float2*>(&s.to_end[warp / 4][channel]) = to_end;
    }
    if (warp == 1) {
      *reinterpret_cast<float2*>(&s.between[0][channel]) =
          exp2_pair({0.5f * first.x, 0.5f * first.y});
      *reinterpret_cast<float2*>(&s.between[1][channel]) =
          exp2_pair({0.5f * second.x, 0.5f * second.y});
    }
    __syncthreads();
  }
  __device__ __forceinline__ bool inside(const FastProblem& p, Span span, int i) const {
    return 8 * warp + i < span.rows && channel < p.key_dim;
  }
  __device__ __forceinline__ int64_t at(const FastProblem& p, int i) const {
    return key + i * p.key_stride();
  }
  // e^{G_i−c}, e^{Gx_i−c}, e^{c−G_i}.
  __device__ __forceinline__ float2 up(int i) const { return exp2_pair(sum[i]); }
  __device__ __forceinline__ float2 up_before(int i) const {
    return exp2_pair(i == 0 ? before : sum[i == 0 ? 0 : i - 1]);
  }
  __device__ __forceinline__ float2 down(int i) const { return exp2_pair({-sum[i].x, -sum[i].y}); }

  // Centred rows to the tiles; f(i, r, a, k, b) sees them in f32. Zeros outside.
  template <class F>
  __device__ __forceinline__ void centre(const FastProblem& p, Span span, CentredTiles* s,
                                         F&& f) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float2 r = {}, a = {}, k = {}, b = {};
      if (inside(p, span, i)) {
        const auto read = [&](const bf16_t* g) {
          return pair_of(*reinterpret_cast<const unsigned*>(g + at(p, i)));
        };
        const float2 u = up(i), d = down(i);
        r = times(read(p.q), {p.scale * u.x, p.scale * u.y});
        a = times(read(p.low_a), up_before(i));
        k = times(read(p.k), d), b = times(read(p.low_b), d);
        f(i, r, a, k, b);
      }
      if (i % 4 == 3) asm volatile("" ::: "memory");  // rows in fours: registers are scarce
      if (!s) continue;
      const auto put = [&](SwizzledTile& tile, float2 x) {
        *reinterpret_cast<unsigned*>(tile.at(8 * warp + i, channel & ~7) + (channel & 7)) =
            pack_pair(x);
      };
      put(s->r, r), put(s->a, a), put(s->k, k), put(s->b, b);
    }
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
// x = left·rightᵀ over channels, by the warps of a group: scores of centred rows. HALVES = 2: with
// δ between rows of different halves (which of the two is the later one does not matter).
template <int HALVES>
__device__ __forceinline__ void multiply_centred(float (&x)[8][4], const SwizzledTile& left,
                                                 const SwizzledTile& right, const CentredSums& s,
                                                 int warp, const Lane& l) {
  warpgroup_begin();
  multiply_tiles<true, Inner::last, Inner::last>(x, left, right, warp);
  warpgroup_commit();
  warpgroup_wait<0>();
  settle(x);
  if constexpr (HALVES == 2) {
    float y[8][4];
    unsigned a[4][4];
    load_scaled(a, left, 16 * warp, l, [&](float2 v, int c) {
      const float2 f = *reinterpret_cast<const float2*>(s.between[0] + c);
      return times(times(v, f), *reinterpret_cast<const float2*>(s.between[1] + c));
    });
    settle(a);
    warpgroup_begin();
    multiply_rows<true>(y, a, right);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(y);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (n / 4 != warp / 2) x[n][e] = y[n][e];
  }
}
// Keeps what `wanted(row, column)` admits; selected, since what is left out may be huge.
template <class F>
__device__ __forceinline__ void mask(float (&x)[8][4], int m0, const Lane& l, F&& wanted) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!wanted(m0 + l.g + 8 * (e >> 1), 8 * n + 2 * l.c + (e & 1))) x[n][e] = 0.f;
}

// The operands of the scans and, FORWARD, scores, inverse and the parts that need no state.
void fast_prepare(const FastProblem& p, bool forward, int halves, cudaStream_t stream);
// dr, dw, dk, dv, da, db of every chunk, from Y, Z and the states and their gradients.
void fast_gradients(const FastProblem& p, int halves, cudaStream_t stream);

}  // namespace ebb::gpu::low_rank
