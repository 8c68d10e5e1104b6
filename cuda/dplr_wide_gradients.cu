// dplr of wide heads on tensor cores, backward: dr, dw, dk, da, db of every chunk and panel of 64
// channels, from the states, their gradients, Y, Z and the score gradients (formulas in
// dplr_fast_gradients.cu and dplr_steep_gradients.cu; cuda/dplr_wide.cuh).
#include "cuda/dplr_centred_gradients.cuh"
#include "cuda/dplr_steep_pairs.cuh"
#include "cuda/dplr_wide.cuh"

namespace ebb::gpu::low_rank {
namespace {

template <int PARTS>
using KeysShared = std::conditional_t<PARTS == 4, SteepShared, GradientShared>;
template <int PARTS>
using KeysSide = Side < PARTS,
      KeysShared<PARTS>, PARTS<4>;

// Where a block is.
struct KeysItem {
  Span span;
  int64_t at;
  int head, panel;
};

// What 64 columns of V bring along, by all threads.
template <class Shared>
__device__ __forceinline__ void fetch_columns(const WideProblem& p, const KeysItem& item, int block,
                                              Shared& s) {
  fetch_block(p, p.d_o, item.span, item.head, block, s.values.d_o);
  fetch_block(p, p.v, item.span, item.head, block, s.values.v);
  const ChunkValues& values = p.chunk_values[item.at * p.blocks + block];
  fetch_whole(s.values.y, values.y);
  fetch_whole(s.values.z, values.z);
  const int64_t state = p.state_tile(item.at, block, item.panel);
  fetch_whole(s.values.state, p.chunk_states[state]);
  fetch_whole(s.values.dstate, p.dstates[state]);
  commit_copies();
}
template <int GROUP>
__device__ __forceinline__ void wait_fetched() {
  wait_copy_groups<0>();
  publish_tiles();
  meet<GROUP>();
}
// The score gradients, where the values were.
template <int GROUP, class Shared>
__device__ __forceinline__ void fetch_score_gradients(const WideProblem& p, int64_t at, Shared& s) {
  meet<GROUP>();
  const ScoreGradients& g = p.score_gradients[at];
  fetch_whole(s.scores.pv, g.pv), fetch_whole(s.scores.py, g.py);
  fetch_whole(s.scores.mv, g.mv), fetch_whole(s.scores.my, g.my);
  commit_copies();
  wait_fetched<GROUP>();
}

// Products with the states over all of V: x, y += {dO, Z} S by rows, {V, Y} Dᵀ by columns; and the
// thread's part of <S,D>, for write_carry().
template <int GROUP, class Shared, class SideOf>
__device__ __forceinline__ void multiply_states(const WideProblem& p, const KeysItem& item,
                                                Shared& s, SideOf& side, float2& carry, int warp) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) side.x[n][e] = side.y[n][e] = 0.f;
#pragma unroll 1
  for (int block = 0; block < p.blocks; ++block) {
    if (block > 0) {
      meet<GROUP>();
      fetch_columns(p, item, block, s);
      wait_fetched<GROUP>();
    }
    add_carry(carry, s);
    constexpr Inner kA = Inner::last, kB = Inner::first;
    settle(side.x), settle(side.y);
    warpgroup_begin();
    if (GROUP == 0) {
      multiply_tiles<false, kA, kB>(side.x, s.values.d_o, s.values.state, warp);
      multiply_tiles<false, kA, kB>(side.y, s.values.z, s.values.state, warp);
    } else {
      multiply_tiles<false, kA, kB>(side.x, s.values.v, s.values.dstate, warp);
      multiply_tiles<false, kA, kB>(side.y, s.values.y, s.values.dstate, warp);
    }
    side.finish_products();
  }
}

// The ways of the two groups through steps 2 to 4.
template <int PARTS>
__device__ __forceinline__ void rows_way(const WideProblem& p, const KeysItem& item,
                                         KeysShared<PARTS>& s) {
  KeysSide<PARTS> side;
  float2 carry = {};
  multiply_states<0>(p, item, s, side, carry, Place().warp);
  put_carry(carry, s);
  side.decay_state(s.centred.from_start[0], Place().l);
  fetch_score_gradients<0>(p, item.at, s);
  side.add_to_rows(s, Place());
  meet<0>();
  if constexpr (PARTS == 4) {
    const Place at;
    put_sums(s.sums.until, side.x, at.warp, at.l);
    put_sums(s.sums.before, side.y, at.warp, at.l);
  } else {
    side.finish_rows(s, p.scale, Place());
    meet<0>();
  }
}
template <int PARTS>
__device__ __forceinline__ void columns_way(const WideProblem& p, const KeysItem& item,
                                            KeysShared<PARTS>& s) {
  KeysSide<PARTS> side;
  float2 carry = {};
  multiply_states<1>(p, item, s, side, carry, Place().warp);
  put_carry(carry, s);
  side.decay_state(s.centred.to_end[PARTS == 4 ? 3 : 1], Place().l);
  side.sum_kept(s, Place().warp, Place().l);
  fetch_score_gradients<1>(p, item.at, s);
  side.add_to_columns(s, Place());
  meet<1>();
  if constexpr (PARTS == 4) {
    const Place at;
    put_sums(s.sums.k, side.x, at.warp, at.l);
    put_sums(s.sums.b, side.y, at.warp, at.l);
  } else {
    side.finish_columns(s, Place());
    meet<1>();
    side.subtract_columns(s, Place());
  }
}

// Block (panel and head, chunk − first) of two warpgroups, rows and columns. 1 what there is, with
// its decays. 2 products with the states. 3 products with the score gradients. 4 terms of dw; the
// gradients; PARTS = 4: with the pairs inside the parts. 5 out.
template <int PARTS>
__global__ void __launch_bounds__(kFastThreads, PARTS == 4 ? 1 : 2)
    keys_kernel(WideProblem p, int64_t first) {
  auto& s = swizzled_shared<KeysShared<PARTS>>();
  const int64_t chunk = p.by_place(first + blockIdx.y);
  // Panels of a head side by side: they read the same values.
  const int panels = (p.key_dim + 63) / 64, head = int(blockIdx.x) / panels;
  const KeysItem item{span_of(p, chunk), p.tile_at(chunk, head), head,
                      int(blockIdx.x) - head * panels};
  if (item.span.rows == 0) return;
  const KeyPanel keys(p, item.panel);
  {
    fetch_keys(keys, item.span, item.head, s.in);  // 1
    commit_copies();
    if constexpr (PARTS == 4) {
      const float* from = &p.inside_gradients[item.at][0][0][0][0];
      fetch_floats<kFastThreads>(&s.inside[0][0][0][0], from, 4 * 16 * 16 * 4);
    }
    if constexpr (PARTS < 4) fetch_whole(s.low_pv, p.score_gradients[item.at].low_pv);
    fetch_columns(p, item, 0, s);
    const CentredRows<PARTS> rows(keys, item.span, item.head, s.total, s.centred);
    rows.centre(keys, s.in);
    if constexpr (PARTS < 4) write_factors(rows, s.up);
  }
  wait_copy_groups<0>();
  publish_tiles();
  __syncthreads();
  if (threadIdx.x < kFastThreads / 2)
    rows_way<PARTS>(p, item, s);
  else
    columns_way<PARTS>(p, item, s);
  __syncthreads();
  if constexpr (PARTS == 4) {
    Own own(keys, item.span, item.head);
    own.sum_pairs(s);
    own.finish(s, p.scale);
    __syncthreads();
  }
  store_key_gradients(keys, s, item.span, item.head, TilePlace(thread_again()));  // 5
  write_decay_gradients<PARTS>(keys, s, item.span, item.head, p.from_zero(chunk, item.span));
}

}  // namespace

void wide_gradients(const WideProblem& p, int parts, cudaStream_t stream) {
  const auto launch = [&]<int PARTS>() {
    each_grid(p, (p.key_dim + 63) / 64, [&](int64_t first, dim3 grid) {
      launch_fast<KeysShared<PARTS>>(keys_kernel<PARTS>, kFastThreads, grid, stream, p, first);
    });
  };
  if (parts == 1) launch.template operator()<1>();
  if (parts == 2) launch.template operator()<2>();
  if (parts == 4) launch.template operator()<4>();
}

}  // namespace ebb::gpu::low_rank
