// dplr in bf16 on tensor cores without a bound of the decays: the gradients of every chunk
// (formulas in dplr_fast_gradients.cu). Parts of 16 tokens refer to their borders
// (cuda/dplr_fast.cuh), and sums over pairs in different parts go from part to part, times the
// decay over each on the way. Pairs inside a part, of which no factors exist in the range of
// floats, are summed token by token in f32, a thread with one channel of one part; with e_ij the
// decay after j through i, α_i that of i, and dP, dM the gradients of the four scores,
//   dr_i += Σ_{j<=i} (dP_v k_j + dP_y b_j) e_ij
//   da_i += Σ_{j<i} (dM_v k_j + dM_y b_j) e_ij/α_i
//   dk_j += Σ_{i>=j} (dP_v r_i + dM_v a_i/α_i) e_ij
//   db_j += Σ_{i>=j} (dP_y r_i + dM_y a_i/α_i) e_ij
// where e_ij/α_i is the product that ends before i.
#include "cuda/dplr_steep_pairs.cuh"

namespace ebb::gpu::low_rank {
namespace {

using Rows = Side<4, SteepShared>;

// The warp's 16 rows as a left operand, times decays of its part.
__device__ __forceinline__ void load_decayed(unsigned (&a)[4][4], const SwizzledTile& s,
                                             const float (&decays)[4][64], int warp,
                                             const Lane& l) {
  load_scaled(a, s, 16 * warp, l, [&](float2 v, int c) {
    return times(v, *reinterpret_cast<const float2*>(decays[warp] + c));
  });
}
// Y, by the columns' group: A_ak, V, A from the start, S; Z, by the rows': A_rbᵀ, dO, B until the
// end, D.
template <Inner INNER>
__device__ __forceinline__ void make_values(SteepShared& s, const SwizzledTile& scores,
                                            const SwizzledTile& values, const SwizzledTile& rows,
                                            const float (&decays)[4][64], const SwizzledTile& state,
                                            SwizzledTile& out, int group, int warp, const Lane& l) {
  float x[8][4];
  unsigned read[4][4];
  load_decayed(read, rows, decays, warp, l);
  settle(read);
  warpgroup_begin();
  multiply_tiles<true, INNER, Inner::first>(x, scores, values, warp);
  multiply_rows(x, read, state);
  finish(x);
  put_rows(out, x, 16 * warp, l);
  apply_inverse<INNER>(out, x, s.inverse, group, warp, l);
}
__device__ __forceinline__ void value_gradient(SteepShared& s, int warp, const Lane& l) {
  float x[8][4];
  unsigned kept[4][4];
  load_decayed(kept, s.in.k, s.centred.to_end, warp, l);
  settle(kept);
  warpgroup_begin();
  multiply_tiles<true, Inner::first, Inner::first>(x, s.kept_scores.rk, s.values.d_o, warp);
  multiply_tiles<false, Inner::first, Inner::first>(x, s.kept_scores.ak, s.values.z, warp);
  multiply_rows(x, kept, s.values.dstate);
  finish(x);
  put_rows(s.dv, x, 16 * warp, l);
}

// The ways of the two groups.
__device__ __forceinline__ void rows_way(SteepShared& s, int warp, const Lane& l) {
  make_values<Inner::first>(s, s.kept_scores.rb, s.values.d_o, s.in.b, s.centred.to_end,
                            s.values.dstate, s.values.z, 0, warp, l);
  meet<0>();
  Rows side;
  side.rows(s, Place());
  meet<0>();
  side.put_scores(s.scores.pv, s.scores.mv, Place());
  meet<0>();
  side.add_to_rows(s, Place());
  meet<0>();
  put_sums(s.sums.until, side.x, warp, l);
  put_sums(s.sums.before, side.y, warp, l);
}
__device__ __forceinline__ void columns_way(SteepShared& s, bool values, int warp, const Lane& l) {
  make_values<Inner::last>(s, s.kept_scores.ak, s.values.v, s.in.a, s.centred.from_start,
                           s.values.state, s.values.y, 1, warp, l);
  meet<1>();
  if (values) value_gradient(s, warp, l);
  Rows side;
  side.columns(s, Place());
  meet<1>();
  side.put_scores(s.scores.py, s.scores.my, Place());
  meet<1>();
  side.add_to_columns(s, Place());
  meet<1>();
  put_sums(s.sums.k, side.x, warp, l);
  put_sums(s.sums.b, side.y, warp, l);
}

// Block (head, chunk − first) of two warpgroups, rows and columns. 1 what there is, with its
// decays. 2 Y, Z; dV; score gradients; products with the states. 3 score gradients to shared
// memory. 4 their products. 5 pairs inside the parts; terms of dw; the gradients. 6 out.
__global__ void __launch_bounds__(kFastThreads, 1) steep_kernel(FastProblem p, int64_t first) {
  auto& s = swizzled_shared<SteepShared>();
  const Lane l;
  const int head = int(blockIdx.x), warp = (int(threadIdx.x) >> 5) & 3;
  const int64_t chunk = first + blockIdx.y;  // 1
  const Span span = span_of(p, chunk);
  if (span.rows == 0) return;
  fetch_keys(p, span, head, s.in);
  commit_copies();
  fetch_values(p, span, chunk, head, s);
  const ChunkScores& scores = p.scores[p.tile_at(chunk, head)];
  fetch_whole(s.kept_scores.ak, scores.ak);
  fetch_whole(s.kept_scores.rb, scores.rb);
  fetch_whole(s.kept_scores.rk, scores.rk);
  commit_copies();
  {
    const CentredRows<4> rows(p, span, head, s.total, s.centred);
    rows.centre(p, s.in);
  }
  wait_copy_groups<0>();
  publish_tiles();
  __syncthreads();
  write_carry(s);
  if (threadIdx.x < kFastThreads / 2)
    rows_way(s, warp, l);
  else
    columns_way(s, p.dv != nullptr, warp, l);
  __syncthreads();
  {
    Own own(p, span, head);  // 5
    own.sum_pairs(s);
    own.finish(s, p.scale);
  }
  __syncthreads();
  store_gradients(p, s, span, head);  // 6
  write_decay_gradients<4>(p, s, span, head, p.from_zero(chunk, span));
}

}  // namespace

void steep_gradients(const FastProblem& p, cudaStream_t stream) {
  for (int64_t first = 0; first < p.chunks; first += kMostChunks) {
    const dim3 grid(unsigned(p.heads), unsigned(std::min(p.chunks - first, kMostChunks)));
    launch_fast<SteepShared>(steep_kernel, kFastThreads, grid, stream, p, first);
  }
}

}  // namespace ebb::gpu::low_rank
