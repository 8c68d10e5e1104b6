// dplr of wide heads on tensor cores, backward: Y, Z, dV and the score gradients of every chunk
// (formulas in dplr_fast_gradients.cu; cuda/dplr_wide.cuh).
#include "cuda/dplr_wide.cuh"

namespace ebb::gpu::low_rank {
namespace {

constexpr Inner kLast = Inner::last, kFirst = Inner::first;

// Panels of the states that are there at once, the first ones in the beginning; each group fetches
// its further ones itself.
template <int PANELS>
constexpr int kHeld = PANELS < 2 ? PANELS : 2;

// What 64 columns of V bring along; the next ones are on their way meanwhile, where there is room.
template <int PANELS>
struct Columns {
  SwizzledTile v, d_o, state[kHeld<PANELS>], dstate[kHeld<PANELS>];  // the states as [V,K]
};
template <int PANELS>
struct ValuesShared {
  static constexpr int kBuffers = PANELS > 2 ? 1 : 2;
  SwizzledTile a[PANELS], b[PANELS], k[PANELS], inverse;
  ChunkScores scores;
  Columns<PANELS> columns[kBuffers];
  SwizzledTile y, z;  // first what the inverse multiplies
  GroupTotals total[PANELS];
};
static_assert(sizeof(ValuesShared<2>) + 1024 <= 227 * 1024);
static_assert(sizeof(ValuesShared<4>) + 1024 <= 227 * 1024);

// Asks for a block of columns, if there is one, by all threads.
template <int PANELS>
__device__ __forceinline__ void fetch_columns(const WideProblem& p, Span span, int64_t at, int head,
                                              int block, ValuesShared<PANELS>& shared) {
  if (block < p.blocks) {
    Columns<PANELS>& s = shared.columns[block % ValuesShared<PANELS>::kBuffers];
    fetch_block(p, p.v, span, head, block, s.v);
    fetch_block(p, p.d_o, span, head, block, s.d_o);
#pragma unroll
    for (int i = 0; i < kHeld<PANELS>; ++i) {
      fetch_whole(s.state[i], p.chunk_states[p.state_tile(at, block, i)]);
      fetch_whole(s.dstate[i], p.dstates[p.state_tile(at, block, i)]);
    }
  }
  commit_copies();
}
// At the beginning of later blocks, by the group.
template <int GROUP, int PANELS>
__device__ __forceinline__ void next_columns(const WideProblem& p, Span span, int64_t at, int head,
                                             int block, ValuesShared<PANELS>& s) {
  constexpr int kAhead = ValuesShared<PANELS>::kBuffers - 1;
  if (block == 0) return;
  meet<GROUP>();
  fetch_columns(p, span, at, head, block + kAhead, s);
  wait_copy_groups<kAhead>();
  publish_tiles();
  meet<GROUP>();
}

// Later panels of a state, by the group of four warps that reads it.
template <int HELD>
__device__ __forceinline__ void next_panels(SwizzledTile (&s)[HELD], const SwizzledTile* g,
                                            int group) {
  meet_group(group);
#pragma unroll
  for (int j = 0; j < HELD; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * ((int(threadIdx.x) & 127) + 128 * i);
      copy_async_or_zero(s[j].s + at, g[j].s + at, true);
    }
  commit_copies();
  wait_copy_groups<0>();
  publish_tiles();
  meet_group(group);
}
// Y, by the columns' group. `state`: panels in memory.
template <int PANELS>
__device__ __forceinline__ void make_y(ValuesShared<PANELS>& s, Columns<PANELS>& in,
                                       const SwizzledTile* state, int warp, const Lane& l) {
  constexpr int kThere = kHeld<PANELS>;
  float x[8][4];
  warpgroup_begin();
  multiply_tiles<true, kLast, kFirst>(x, s.scores.ak, in.v, warp);
#pragma unroll
  for (int first = 0; first < PANELS; first += kThere) {
    if (first > 0) {
      next_panels(in.state, state + first, 1);
      settle(x);
      warpgroup_begin();
    }
#pragma unroll
    for (int i = 0; i < kThere; ++i)
      multiply_tiles<false, kLast, kLast>(x, s.a[first + i], in.state[i], warp);
    finish(x);
  }
  put_rows(s.y, x, 16 * warp, l);
  float y[8][4];
  apply_inverse<kLast>(s.y, y, s.inverse, 1, warp, l);
}
// Z, by the rows' group, and dV but for the part of Z.
template <int PANELS>
__device__ __forceinline__ void make_z(ValuesShared<PANELS>& s, Columns<PANELS>& in,
                                       const SwizzledTile* dstate, float (&dv)[8][4], int warp,
                                       const Lane& l) {
  constexpr int kThere = kHeld<PANELS>;
  float x[8][4];
  warpgroup_begin();
  multiply_tiles<true, kFirst, kFirst>(x, s.scores.rb, in.d_o, warp);
  multiply_tiles<true, kFirst, kFirst>(dv, s.scores.rk, in.d_o, warp);
#pragma unroll
  for (int first = 0; first < PANELS; first += kThere) {
    if (first > 0) {
      next_panels(in.dstate, dstate + first, 0);
      settle(x), settle(dv);
      warpgroup_begin();
    }
#pragma unroll
    for (int i = 0; i < kThere; ++i) {
      multiply_tiles<false, kLast, kLast>(x, s.b[first + i], in.dstate[i], warp);
      multiply_tiles<false, kLast, kLast>(dv, s.k[first + i], in.dstate[i], warp);
    }
    finish(x);
    settle(dv);
  }
  put_rows(s.z, x, 16 * warp, l);
  float z[8][4];
  apply_inverse<kFirst>(s.z, z, s.inverse, 0, warp, l);
}
// And that; out by way of `scratch`.
template <int PANELS>
__device__ __forceinline__ void store_value_gradient(const WideProblem& p, float (&dv)[8][4],
                                                     const ValuesShared<PANELS>& s,
                                                     SwizzledTile& scratch, Span span, int head,
                                                     int block, int warp, const Lane& l) {
  settle(dv);
  warpgroup_begin();
  multiply_tiles<false, kFirst, kFirst>(dv, s.scores.ak, s.z, warp);
  finish(dv);
  put_rows(scratch, dv, 16 * warp, l);
  __syncwarp();
  const int lane = int(threadIdx.x) & 31, c = lane % 8 * 8;
  bf16_t* g = p.dv + p.value_at(span.first, head) + 64 * block + c;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 16 * warp + lane / 8 + 4 * i;
    if (row < span.rows && c < p.value_dim - 64 * block)
      store_word(reinterpret_cast<uint4*>(g + row * p.value_stride()),
                 *reinterpret_cast<const uint4*>(scratch.at(row, c)));
  }
}

// x, y += {dO, Z}·valuesᵀ.
template <int PANELS>
__device__ __forceinline__ void add_score_gradients(float (&x)[8][4], float (&y)[8][4],
                                                    const ValuesShared<PANELS>& s,
                                                    const SwizzledTile& d_o,
                                                    const SwizzledTile& values, int warp) {
  settle(x), settle(y);
  warpgroup_begin();
  multiply_tiles<false, kLast, kLast>(x, d_o, values, warp);
  multiply_tiles<false, kLast, kLast>(y, s.z, values, warp);
  warpgroup_commit();
  warpgroup_wait<0>();
  settle(x), settle(y);
}
// One of the four of a pair of tokens inside a part: out, and left out of x.
__device__ __forceinline__ void take_inside(float (&x)[8][4], InsideGradients& g, int which,
                                            int warp, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (n / 2 != warp) continue;
      g[warp][l.g + 8 * (e >> 1)][8 * (n % 2) + 2 * l.c + (e & 1)][which] = x[n][e];
      x[n][e] = 0.f;
    }
}
// The group's score gradients, by way of `scratch`. WHICH: 0 with V, 1 with Y.
template <int WHICH>
__device__ __forceinline__ void store_score_gradients(const WideProblem& p, float (&x)[8][4],
                                                      float (&y)[8][4], SwizzledTile& scratch,
                                                      int64_t at, int warp, const Lane& l) {
  const int m0 = 16 * warp;
  keep<Triangle::lower>(x, m0, l);
  keep<Triangle::below>(y, m0, l);
  if (p.inside_gradients) {
    take_inside(x, p.inside_gradients[at], WHICH, warp, l);
    take_inside(y, p.inside_gradients[at], 2 + WHICH, warp, l);
  }
  ScoreGradients& g = p.score_gradients[at];
  unsigned rounded[4][4];
  values_as_left(rounded, x);
  store_by(scratch, WHICH == 0 ? g.pv : g.py, rounded, m0, l);
  if (WHICH == 0 && !p.inside_gradients) {
    __syncwarp();
    put_rest(scratch, x, rounded, m0, l);
    copy_rows(g.low_pv, scratch, m0);
  }
  store_by(scratch, WHICH == 0 ? g.mv : g.my, y, m0, l);
}

// The ways of the two groups through the blocks of V.
template <int PANELS>
__device__ __forceinline__ void rows_way(const WideProblem& p, ValuesShared<PANELS>& s, Span span,
                                         int64_t at, int head, int warp, const Lane& l) {
  float pv[8][4] = {}, mv[8][4] = {};
#pragma unroll 1
  for (int block = 0; block < p.blocks; ++block) {
    next_columns<0>(p, span, at, head, block, s);
    float dv[8][4];
    Columns<PANELS>& in = s.columns[block % ValuesShared<PANELS>::kBuffers];
    make_z(s, in, p.dstates + p.state_tile(at, block, 0), dv, warp, l);
    copy_rows(p.chunk_values[at * p.blocks + block].z, s.z, 16 * warp);
    meet<0>();
    add_score_gradients(pv, mv, s, in.d_o, in.v, warp);
    if (p.dv) store_value_gradient(p, dv, s, in.dstate[0], span, head, block, warp, l);
  }
  meet<0>();
  store_score_gradients<0>(p, pv, mv, s.z, at, warp, l);
}
template <int PANELS>
__device__ __forceinline__ void columns_way(const WideProblem& p, ValuesShared<PANELS>& s,
                                            Span span, int64_t at, int head, int warp,
                                            const Lane& l) {
  float py[8][4] = {}, my[8][4] = {};
#pragma unroll 1
  for (int block = 0; block < p.blocks; ++block) {
    next_columns<1>(p, span, at, head, block, s);
    Columns<PANELS>& in = s.columns[block % ValuesShared<PANELS>::kBuffers];
    make_y(s, in, p.chunk_states + p.state_tile(at, block, 0), warp, l);
    copy_rows(p.chunk_values[at * p.blocks + block].y, s.y, 16 * warp);
    meet<1>();
    add_score_gradients(py, my, s, in.d_o, s.y, warp);
  }
  meet<1>();
  store_score_gradients<1>(p, py, my, s.y, at, warp, l);
}

// Block (head, chunk − first) of two warpgroups, rows and columns of the score gradients. 1 rows
// with their decays. Per 64 columns of V: 2 Y, Z. 3 score gradients; dV. At the end: 4 the score
// gradients.
template <int PANELS>
__global__ void __launch_bounds__(kFastThreads, 1) values_kernel(WideProblem p, int64_t first) {
  auto& s = swizzled_shared<ValuesShared<PANELS>>();
  const Lane l;
  const int head = int(blockIdx.x), warp = (int(threadIdx.x) >> 5) & 3;
  const int64_t chunk = p.by_place(first + blockIdx.y);
  const int64_t at = p.tile_at(chunk, head);
  const Span span = span_of(p, chunk);
  if (span.rows == 0) return;
  {
    const TilePlace place;
    PlainDecays decays[PANELS];
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      const KeyPanel keys(p, i);
      const int64_t key = keys.key_at(span.first, head);
      place.fetch(s.a[i], keys.low_a + key, keys.stride, span.rows, keys.key_dim);
      place.fetch(s.b[i], keys.low_b + key, keys.stride, span.rows, keys.key_dim);
      place.fetch(s.k[i], keys.k + key, keys.stride, span.rows, keys.key_dim);
    }
    commit_copies();
    fetch_whole(s.inverse, p.inverse[at]);
    fetch_whole(s.scores.ak, p.scores[at].ak);
    fetch_whole(s.scores.rb, p.scores[at].rb);
    fetch_whole(s.scores.rk, p.scores[at].rk);
    constexpr int kBuffers = ValuesShared<PANELS>::kBuffers;
    fetch_columns(p, span, at, head, 0, s);
    if (kBuffers > 1) fetch_columns(p, span, at, head, 1, s);
#pragma unroll
    for (int i = 0; i < PANELS; ++i) decays[i].load(KeyPanel(p, i), span, head, s.total[i]);
    wait_copy_groups<kBuffers>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {  // 1
      decays[i].from_start(s.a[i], s.total[i]);
      decays[i].to_end(s.total[i], s.b[i], s.k[i]);
    }
    wait_copy_groups<kBuffers - 1>();
    publish_tiles();
    __syncthreads();
  }
  if (threadIdx.x < kFastThreads / 2)
    rows_way(p, s, span, at, head, warp, l);
  else
    columns_way(p, s, span, at, head, warp, l);
}

}  // namespace

void wide_values(const WideProblem& p, cudaStream_t stream) {
  visit_panels(p, [&]<int PANELS>() {
    each_grid(p, 1, [&](int64_t first, dim3 grid) {
      launch_fast<ValuesShared<PANELS>>(values_kernel<PANELS>, kFastThreads, grid, stream, p,
                                        first);
    });
  });
}

}  // namespace ebb::gpu::low_rank
