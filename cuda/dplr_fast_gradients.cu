// dplr in bf16 on tensor cores: the gradients of every chunk, from the states S and their gradients
// D (ops/dplr_cpu_bwd.cpp; centred operands R, A, K, B and ε of cuda/dplr_fast.cuh, up and down
// their factors). With T = (I − A_ab)⁻¹,
//   Y = T (A_ak V + (ε∘A) S)     Z = Tᵀ (A_rbᵀ dO + (ε∘B) D)
// and with dP_v, dP_y = tril(dO {V,Y}ᵀ) and dM_v, dM_y = stril(Z {V,Y}ᵀ),
//   x_r = dP_v K + dP_y B + ε∘(dO S)     dr = scale up∘x_r     x_k = dP_vᵀ R + dM_vᵀ A + ε∘(V Dᵀ)
//   x_a = dM_v K + dM_y B + ε∘(Z S)      da = up_before∘x_a    x_b = dP_yᵀ R + dM_yᵀ A + ε∘(Y Dᵀ)
//   dk = down∘x_k     db = down∘x_b      dV = A_rkᵀ dO + A_akᵀ Z + (ε∘K) D
//   dw_t = Σ_{i>=t} (R∘x_r − K∘x_k − B∘x_b)_i + Σ_{i>t} (A∘x_a)_i
//        + Σ_j (ε∘(K∘V Dᵀ + B∘Y Dᵀ))_j + ε²∘<S,D>
// What cancels in the sums of dw, pairs of tokens on one side of t, are sums of the same products
// of the same rounded numbers, so that it does cancel.
#include "cuda/dplr_centred_gradients.cuh"

namespace ebb::gpu::low_rank {
namespace {

// Y, by the columns' group: A with K below the diagonal, V, A from the start, S; Z, by the rows': B
// with R from the diagonal on, dO, B until the end, D. `left` and `right`: whose scores; `decays`:
// of `left` by half.
template <int PARTS, Triangle KEPT, Inner INVERSE>
__device__ __forceinline__ void make_values(GradientShared& s, const SwizzledTile& left,
                                            const SwizzledTile& right, const float (&decays)[2][64],
                                            const SwizzledTile& values, const SwizzledTile& state,
                                            SwizzledTile& out, int group, const Place& at) {
  const Lane& l = at.l;
  const int m0 = 16 * at.warp;
  float x[8][4];
  unsigned scores[4][4], read[4][4];
  multiply_centred<PARTS>(x, left, right, s.centred, at.warp, l);
  keep<KEPT>(x, m0, l);
  values_as_left(scores, x);
  load_scaled(read, left, m0, l, [&](float2 v, int c) {
    return times(v, *reinterpret_cast<const float2*>(decays[at.warp >> 1] + c));
  });
  settle(scores), settle(read);
  warpgroup_begin();
  multiply_columns<true>(x, scores, values);
  multiply_rows(x, read, state);
  finish(x);
  put_rows(out, x, m0, l);
  apply_inverse<INVERSE>(out, x, s.inverse, group, at.warp, l);
}

// The warp's 16 rows of dV to memory, from where what is left of dP_v comes next.
__device__ __forceinline__ void store_value_rows(const FastProblem& p, const GradientShared& s,
                                                 const Place& at) {
  __syncwarp();
  const Span span = s.span;
  const int lane = thread_again() & 31, c = lane % 8 * 8;
  bf16_t* g = p.dv + p.value_at(span.first, int(blockIdx.x)) + c;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 16 * at.warp + 4 * i + lane / 8;
    if (r < span.rows && c < p.value_dim)
      store_word(reinterpret_cast<uint4*>(g + r * p.value_stride()),
                 *reinterpret_cast<const uint4*>(s.dv.at(r, c)));
  }
  __syncwarp();
}
// dV of the warp's 16 tokens, from the transposed scores.
template <int PARTS>
__device__ __forceinline__ void value_gradient(const FastProblem& p, GradientShared& s,
                                               const Place& at) {
  const Lane& l = at.l;
  const int warp = at.warp, m0 = 16 * warp;
  float x[8][4];
  unsigned rk[4][4], ak[4][4], kept[4][4];
  multiply_centred<PARTS>(x, s.in.k, s.in.a, s.centred, warp, l);
  keep<Triangle::above>(x, m0, l);
  values_as_left(ak, x);
  multiply_centred<PARTS>(x, s.in.k, s.in.r, s.centred, warp, l);
  keep<Triangle::upper>(x, m0, l);
  values_as_left(rk, x);
  // With two centres the products need the registers: dV keeps that rounding.
  if constexpr (PARTS == 1) put_own(rk, s.own, warp, l);
  load_scaled(kept, s.in.k, m0, l, [&](float2 v, int c) {
    return times(v, *reinterpret_cast<const float2*>(s.centred.to_end[warp >> 1] + c));
  });
  settle(rk), settle(ak), settle(kept);
  warpgroup_begin();
  multiply_columns<true>(x, rk, s.values.d_o);
  multiply_columns(x, ak, s.values.z);
  multiply_rows(x, kept, s.values.dstate);
  warpgroup_commit();
  warpgroup_wait<0>();
  settle(x);
  put_rows(s.dv, x, m0, l);
  store_value_rows(p, s, at);
}

// The ways of the two groups through steps 2 to 5.
template <int PARTS>
__device__ __forceinline__ void rows_way(const FastProblem& p, GradientShared& s) {
  make_values<PARTS, Triangle::upper, Inner::first>(
      s, s.in.b, s.in.r, s.centred.to_end, s.values.d_o, s.values.dstate, s.values.z, 0, Place());
  meet<0>();
  if (p.dv) value_gradient<PARTS>(p, s, Place());
  Side<PARTS, GradientShared, true> side;
  side.rows(s, Place());
  meet<0>();
  side.put_scores(s.scores.pv, s.scores.mv, Place());
  meet<0>();
  side.add_to_rows(s, Place());
  meet<0>();
  side.finish_rows(s, p.scale, Place());
  meet<0>();
}
template <int PARTS>
__device__ __forceinline__ void columns_way(GradientShared& s) {
  make_values<PARTS, Triangle::below, Inner::last>(
      s, s.in.a, s.in.k, s.centred.from_start, s.values.v, s.values.state, s.values.y, 1, Place());
  meet<1>();
  Side<PARTS, GradientShared, true> side;
  side.columns(s, Place());
  meet<1>();
  side.put_scores(s.scores.py, s.scores.my, Place());
  meet<1>();
  side.add_to_columns(s, Place());
  meet<1>();
  side.finish_columns(s, Place());
  meet<1>();
  side.subtract_columns(s, Place());
}

// Block (head, chunk − first) of two warpgroups, rows and columns. 1 what there is, centred. 2 Y,
// Z; dV; score gradients; products with the states. 3 score gradients to shared memory. 4 their
// products. 5 terms of dw; the gradients. 6 out.
template <int PARTS>
__global__ void __launch_bounds__(kFastThreads, 2) gradient_kernel(FastProblem p, int64_t first) {
  auto& s = swizzled_shared<GradientShared>();
  const int head = int(blockIdx.x);
  {
    const int64_t chunk = first + blockIdx.y;  // 1
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    if (threadIdx.x == 0) s.span = span;
    fetch_keys(p, span, head, s.in);
    commit_copies();
    fetch_values(p, span, chunk, head, s);
    commit_copies();
    const CentredRows<PARTS> rows(p, span, head, s.total, s.centred);
    if constexpr (PARTS == 1) rows.own_scores(p, s.in, s.own);
    rows.centre(p, s.in);
    write_factors(rows, s.up);
  }
  wait_copy_groups<0>();
  publish_tiles();
  __syncthreads();
  write_carry(s);
  if (threadIdx.x < kFastThreads / 2)
    rows_way<PARTS>(p, s);
  else
    columns_way<PARTS>(s);
  __syncthreads();
  const Span span = s.span;
  store_key_gradients(p, s, span, head, TilePlace(thread_again()));  // 6
  write_decay_gradients<PARTS>(p, s, span, head, p.from_zero(first + blockIdx.y, span));
}

}  // namespace

void fast_gradients(const FastProblem& p, int parts, cudaStream_t stream) {
  for (int64_t first = 0; first < p.chunks; first += kMostChunks) {
    const dim3 grid(unsigned(p.heads), unsigned(std::min(p.chunks - first, kMostChunks)));
    launch_fast<GradientShared>(parts == 2 ? gradient_kernel<2> : gradient_kernel<1>, kFastThreads,
                                grid, stream, p, first);
  }
}

}  // namespace ebb::gpu::low_rank
