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
#include "cuda/dplr_gradient_sides.cuh"

namespace ebb::gpu::low_rank {
namespace {

constexpr int kPart = 16;

struct Sums {  // x_r, x_a, x_k, x_b; then in the first two terms of dw of tokens i >= t, of i > t
  float until[64 * kSumRow], before[64 * kSumRow], k[64 * kSumRow], b[64 * kSumRow];
};
struct SteepShared : GradientTiles<Sums> {
  ChunkScores kept_scores;
  float inside[4][kPart][kPart][4];  // of part, i, j: dP_v, dP_y, dM_v, dM_y
  SteepSums centred;
  GroupTotals total;
  float kept[4][64], carry[8][64];  // sums over the rows of a warp, over an eighth of V
};
static_assert(sizeof(SteepShared) + 1024 <= 227 * 1024);

using Rows = Side<4, SteepShared>;

// Y, by the columns' group, and Z, by the rows'.
__device__ __forceinline__ void make_y(SteepShared& s, int warp, const Lane& l) {
  float x[8][4];
  unsigned read[4][4];
  load_scaled(read, s.in.a, 16 * warp, l, [&](float2 v, int c) {
    return times(v, *reinterpret_cast<const float2*>(s.centred.from_start[warp] + c));
  });
  settle(read);
  warpgroup_begin();
  multiply_tiles<true, Inner::last, Inner::first>(x, s.kept_scores.ak, s.values.v, warp);
  multiply_rows(x, read, s.values.state);
  finish(x);
  put_rows(s.values.y, x, 16 * warp, l);
  publish_tiles();
  meet_group(1);
  warpgroup_begin();
  multiply_tiles<true, Inner::last, Inner::first>(x, s.inverse, s.values.y, warp);
  finish(x);
  meet_group(1);
  put_rows(s.values.y, x, 16 * warp, l);
  publish_tiles();
}
__device__ __forceinline__ void make_z(SteepShared& s, int warp, const Lane& l) {
  float x[8][4];
  unsigned kept[4][4];
  load_scaled(kept, s.in.b, 16 * warp, l, [&](float2 v, int c) {
    return times(v, *reinterpret_cast<const float2*>(s.centred.to_end[warp] + c));
  });
  settle(kept);
  warpgroup_begin();
  multiply_tiles<true, Inner::first, Inner::first>(x, s.kept_scores.rb, s.values.d_o, warp);
  multiply_rows(x, kept, s.values.dstate);
  finish(x);
  put_rows(s.values.z, x, 16 * warp, l);
  publish_tiles();
  meet_group(0);
  warpgroup_begin();
  multiply_tiles<true, Inner::first, Inner::first>(x, s.inverse, s.values.z, warp);
  finish(x);
  meet_group(0);
  put_rows(s.values.z, x, 16 * warp, l);
  publish_tiles();
}
__device__ __forceinline__ void value_gradient(SteepShared& s, int warp, const Lane& l) {
  float x[8][4];
  unsigned kept[4][4];
  load_scaled(kept, s.in.k, 16 * warp, l, [&](float2 v, int c) {
    return times(v, *reinterpret_cast<const float2*>(s.centred.to_end[warp] + c));
  });
  settle(kept);
  warpgroup_begin();
  multiply_tiles<true, Inner::first, Inner::first>(x, s.kept_scores.rk, s.values.d_o, warp);
  multiply_tiles<false, Inner::first, Inner::first>(x, s.kept_scores.ak, s.values.z, warp);
  multiply_rows(x, kept, s.values.dstate);
  finish(x);
  put_rows(s.dv, x, 16 * warp, l);
}

// Sums of a warp's rows for the threads that own channels.
__device__ __forceinline__ void put_sums(float* s, const float (&x)[8][4], int warp,
                                         const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(s + (16 * warp + l.g + 8 * half) * kSumRow + 8 * n + 2 * l.c) = {
          x[n][2 * half], x[n][2 * half + 1]};
}

// The ways of the two groups.
__device__ __forceinline__ void rows_way(SteepShared& s, int warp, const Lane& l) {
  make_z(s, warp, l);
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
  make_y(s, warp, l);
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

// A thread's channel of a part.
struct Own {
  int part = int(threadIdx.x) >> 6, d = int(threadIdx.x) & 63, row = kPart * part;
  float r[kPart], a[kPart], k[kPart], b[kPart], alpha[kPart];  // r times scale
  float in_r[kPart], in_a[kPart], in_k[kPart], in_b[kPart];    // sums over pairs in the part

  __device__ __forceinline__ Own(const FastProblem& p, Span span, int head) {
    const int64_t at = p.key_at(span.first + row, head) + d;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const bool valid = row + i < span.rows && d < p.key_dim;
      const int64_t from = at + i * p.key_stride();
      r[i] = valid ? p.scale * to_float(p.q[from]) : 0.f;
      a[i] = valid ? to_float(p.low_a[from]) : 0.f;
      k[i] = valid ? to_float(p.k[from]) : 0.f;
      b[i] = valid ? to_float(p.low_b[from]) : 0.f;
      alpha[i] = valid ? exp2_fast(CentredRows<4>::log2_of(p.g[from])) : 1.f;
      in_r[i] = in_a[i] = in_k[i] = in_b[i] = 0.f;
    }
  }
  // Pairs of different tokens.
  __device__ __forceinline__ void sum_pairs(const SteepShared& s) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      float decay = 1.f;  // from j to before i
      float k_j = k[j], b_j = b[j];
#pragma unroll
      for (int i = j + 1; i < kPart; ++i) {
        const float4 f = *reinterpret_cast<const float4*>(s.inside[part][i][j]);
        in_a[i] += f.z * k_j + f.w * b_j;
        in_k[j] += decay * (f.z * a[i]), in_b[j] += decay * (f.w * a[i]);
        k_j *= alpha[i], b_j *= alpha[i], decay *= alpha[i];
        in_r[i] += f.x * k_j + f.y * b_j;
        in_k[j] += decay * (f.x * r[i]), in_b[j] += decay * (f.y * r[i]);
      }
    }
  }
  // Then terms of dw to s.sums, and the gradients to s.in, in place of what is looked at there.
  __device__ __forceinline__ void finish(SteepShared& s, float scale) {
    float down = 1.f;  // of rows after i
#pragma unroll
    for (int i = kPart - 1; i >= 0; --i) {
      const int at = (row + i) * kSumRow + d;
      const float x_k = s.sums.k[at], x_b = s.sums.b[at];
      bf16_t &s_k = s.in.k.at(row + i, d & ~7)[d & 7], &s_b = s.in.b.at(row + i, d & ~7)[d & 7];
      float until = to_float(s_k) * x_k + to_float(s_b) * x_b;
      until += k[i] * in_k[i] + b[i] * in_b[i];
      const float4 f = *reinterpret_cast<const float4*>(s.inside[part][i][i]);
      s_k = from_float<bf16_t>(down * x_k + in_k[i] + f.x * r[i]);
      s_b = from_float<bf16_t>(down * x_b + in_b[i] + f.y * r[i]);
      in_k[i] = until;
      down *= alpha[i];
    }
    float up = 1.f;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const int at = (row + i) * kSumRow + d;
      const float x_r = s.sums.until[at], x_a = s.sums.before[at];
      bf16_t &s_r = s.in.r.at(row + i, d & ~7)[d & 7], &s_a = s.in.a.at(row + i, d & ~7)[d & 7];
      s.sums.until[at] = to_float(s_r) * x_r + r[i] * in_r[i] - in_k[i];
      s.sums.before[at] = to_float(s_a) * x_a + a[i] * in_a[i];
      const float4 f = *reinterpret_cast<const float4*>(s.inside[part][i][i]);
      s_a = from_float<bf16_t>(up * x_a + in_a[i]);
      up *= alpha[i];
      s_r = from_float<bf16_t>(scale * (up * x_r + in_r[i] + f.x * k[i] + f.y * b[i]));
    }
  }
};

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
  write_decay_gradients<4>(p, s, span, head);
}

}  // namespace

void steep_gradients(const FastProblem& p, cudaStream_t stream) {
  for (int64_t first = 0; first < p.chunks; first += kMostChunks) {
    const dim3 grid(unsigned(p.heads), unsigned(std::min(p.chunks - first, kMostChunks)));
    launch_fast<SteepShared>(steep_kernel, kFastThreads, grid, stream, p, first);
  }
}

}  // namespace ebb::gpu::low_rank
