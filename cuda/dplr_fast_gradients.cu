// dplr in bf16 on tensor cores: the gradients of every chunk, from Y, Z and the states and their
// gradients (ops/dplr_cpu_bwd.cpp; centred operands R, A, K, B and ε of cuda/dplr_fast.cuh, up and
// down their factors). With dP_v = tril(dO Vᵀ), dP_y = tril(dO Yᵀ), dM_v = stril(Z Vᵀ), dM_y =
// stril(Z Yᵀ),
//   x_r = dP_v K + dP_y B + ε∘(dO S)     dr = scale up∘x_r     x_k = dP_vᵀ R + dM_vᵀ A + ε∘(V Dᵀ)
//   x_a = dM_v K + dM_y B + ε∘(Z S)      da = up_before∘x_a    x_b = dP_yᵀ R + dM_yᵀ A + ε∘(Y Dᵀ)
//   dk = down∘x_k     db = down∘x_b      dV = A_rkᵀ dO + A_akᵀ Z + (ε∘K) D
//   dw_t = Σ_{i>=t} (R∘x_r − K∘x_k − B∘x_b)_i + Σ_{i>t} (A∘x_a)_i
//        + Σ_j (ε∘(K∘V Dᵀ + B∘Y Dᵀ))_j + ε²∘<S,D>
// What cancels in the sums of dw, pairs of tokens on one side of t, are sums of the same products
// of the same rounded numbers, so that it does cancel.
#include "cuda/dplr_fast.cuh"

namespace ebb::gpu::low_rank {
namespace {

constexpr int kSumRow = 72;  // f32 rows of 64, padded

struct Values {
  SwizzledTile d_o, z, v, y, state, dstate;  // the states as [V,K]
};
struct Scores {
  SwizzledTile pv, py, mv, my;
};
struct Sums {
  float until[64 * kSumRow], before[64 * kSumRow];  // terms of tokens i >= t, of i > t
};
struct GradientShared {
  CentredTiles in;  // at the end dr, da, dk, db
  union {
    Values values;
    Scores scores;
    Sums sums;
  };
  SwizzledTile dv;
  float exponent[65 * kSumRow];  // log2 of up; row 0: before the first token
  CentredSums centred;
  float kept[4][64], carry[4][64];  // sums over the rows of a warp, over a quarter of V
};
static_assert(2 * (sizeof(GradientShared) + 1024) <= 228 * 1024);  // two blocks per multiprocessor

__device__ __forceinline__ void fetch_values(const FastProblem& p, Span span, int64_t chunk, int hv,
                                             Values& s) {
  const TilePlace at;
  const int64_t row = p.row_at(span.first, hv) * p.value_dim, state = p.state_at(chunk, hv);
  const int64_t value = p.value_at(span.first, hv);
  at.fetch(s.d_o, p.d_o + value, p.value_stride(), span.rows, p.value_dim);
  at.fetch(s.v, p.v + value, p.value_stride(), span.rows, p.value_dim);
  at.fetch(s.z, p.x + row, p.value_dim, span.rows, p.value_dim);
  at.fetch(s.y, p.values + row, p.value_dim, span.rows, p.value_dim);
  at.fetch(s.state, p.states + state, p.key_dim, p.value_dim, p.key_dim);
  at.fetch(s.dstate, p.dstates + state, p.key_dim, p.value_dim, p.key_dim);
  commit_copies();
}

__device__ __forceinline__ void write_exponents(const CentredRows& rows, float* s) {
  float* to = s + (8 * rows.warp + 1) * kSumRow + rows.channel;
#pragma unroll
  for (int i = 0; i < 8; ++i) *reinterpret_cast<float2*>(to + i * kSumRow) = rows.sum[i];
  if (rows.warp == 0) *reinterpret_cast<float2*>(s + rows.channel) = rows.before;
}

// <S,D> by channel, a quarter of V each.
__device__ __forceinline__ void write_carry(GradientShared& s) {
  const int d = int(threadIdx.x) & 63, part = int(threadIdx.x) >> 6;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int v = 16 * part + i;
    sum += to_float(s.values.state.at(v, d & ~7)[d & 7]) *
           to_float(s.values.dstate.at(v, d & ~7)[d & 7]);
  }
  s.carry[part][d] = sum;
}

// The warp's 16 rows of ε∘K as left operands.
__device__ __forceinline__ void load_kept(unsigned (&a)[4][4], const GradientShared& s, int m0,
                                          const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    load_matrices(a[k], s.in.k.at(m0 + l.low + 8 * l.odd, 16 * k + 8 * l.high));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* half = s.centred.half + 16 * k + 8 * (e >> 1) + 2 * l.c;
      a[k][e] = pack_pair(times(pair_of(a[k][e]), *reinterpret_cast<const float2*>(half)));
    }
  }
}

// dV of the warp's 16 tokens, from the transposed scores.
__device__ __forceinline__ void value_gradient(GradientShared& s, int warp, const Lane& l) {
  const int m0 = 16 * warp;
  float x[8][4], y[8][4];
  unsigned rk[4][4], ak[4][4], kept[4][4];
  warpgroup_begin();
  multiply_tiles<true, Inner::last, Inner::last>(x, s.in.k, s.in.r, warp);
  multiply_tiles<true, Inner::last, Inner::last>(y, s.in.k, s.in.a, warp);
  warpgroup_commit();
  warpgroup_wait<0>();
  settle(x), settle(y);
  mask(x, m0, l, [](int j, int i) { return i >= j; });
  mask(y, m0, l, [](int j, int i) { return i > j; });
  values_as_left(rk, x);
  values_as_left(ak, y);
  load_kept(kept, s, m0, l);
  settle(rk), settle(ak), settle(kept);
  warpgroup_begin();
  multiply_columns<true>(x, rk, s.values.d_o);
  multiply_columns(x, ak, s.values.z);
  multiply_rows(x, kept, s.values.dstate);
  warpgroup_commit();
  warpgroup_wait<0>();
  settle(x);
  put_rows(s.dv, x, m0, l);
}

// Scores of `left` with two right operands, and left times a state, per warp's 16 rows.
struct Side {
  float x[8][4], y[8][4];              // x_r and x_a; x_k and x_b
  unsigned first[4][4], second[4][4];  // dP_v and dM_v; dP_y and dM_y

  // The warps of the rows: with V. ε∘(dO S), ε∘(Z S).
  __device__ __forceinline__ void rows(const GradientShared& s, int warp, const Lane& l) {
    scores(s, s.values.v, warp, l);
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::first>(x, s.values.d_o, s.values.state, warp);
    multiply_tiles<true, Inner::last, Inner::first>(y, s.values.z, s.values.state, warp);
    finish_state(s, l);
  }
  // The warps of the columns: with Y. ε∘(V Dᵀ), ε∘(Y Dᵀ).
  __device__ __forceinline__ void columns(GradientShared& s, int warp, const Lane& l) {
    scores(s, s.values.y, warp, l);
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::first>(x, s.values.v, s.values.dstate, warp);
    multiply_tiles<true, Inner::last, Inner::first>(y, s.values.y, s.values.dstate, warp);
    finish_state(s, l);
    sum_kept(s, warp, l);
  }
  __device__ __forceinline__ void scores(const GradientShared& s, const SwizzledTile& values,
                                         int warp, const Lane& l) {
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::last>(x, s.values.d_o, values, warp);
    multiply_tiles<true, Inner::last, Inner::last>(y, s.values.z, values, warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x), settle(y);
    mask(x, 16 * warp, l, [](int i, int j) { return j <= i; });
    mask(y, 16 * warp, l, [](int i, int j) { return j < i; });
    values_as_left(first, x);
    values_as_left(second, y);
  }
  __device__ __forceinline__ void finish_state(const GradientShared& s, const Lane& l) {
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x), settle(y);
    scale_columns(x, s.centred.half, l);
    scale_columns(y, s.centred.half, l);
  }
  // Of K∘x + B∘y so far, sums over the warp's rows.
  __device__ __forceinline__ void sum_kept(GradientShared& s, int warp, const Lane& l) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 sum = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 k = pair_at(s.in.k, 16 * warp, n, half, l);
        const float2 b = pair_at(s.in.b, 16 * warp, n, half, l);
        sum.x += k.x * x[n][2 * half] + b.x * y[n][2 * half];
        sum.y += k.y * x[n][2 * half + 1] + b.y * y[n][2 * half + 1];
      }
#pragma unroll
      for (int o = 4; o < 32; o *= 2) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, o);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, o);
      }
      if (l.g == 0) *reinterpret_cast<float2*>(&s.kept[warp][8 * n + 2 * l.c]) = sum;
    }
  }

  __device__ __forceinline__ void add_rows(const GradientShared& s, int warp) {
    settle(x), settle(y);
    warpgroup_begin();
    multiply_tiles<false, Inner::last, Inner::first>(x, s.scores.pv, s.in.k, warp);
    multiply_tiles<false, Inner::last, Inner::first>(x, s.scores.py, s.in.b, warp);
    multiply_tiles<false, Inner::last, Inner::first>(y, s.scores.mv, s.in.k, warp);
    multiply_tiles<false, Inner::last, Inner::first>(y, s.scores.my, s.in.b, warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x), settle(y);
  }
  __device__ __forceinline__ void add_columns(const GradientShared& s, int warp) {
    settle(x), settle(y);
    warpgroup_begin();
    multiply_tiles<false, Inner::first, Inner::first>(x, s.scores.pv, s.in.r, warp);
    multiply_tiles<false, Inner::first, Inner::first>(x, s.scores.mv, s.in.a, warp);
    multiply_tiles<false, Inner::first, Inner::first>(y, s.scores.py, s.in.r, warp);
    multiply_tiles<false, Inner::first, Inner::first>(y, s.scores.my, s.in.a, warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x), settle(y);
  }

  // R∘x_r and A∘x_a to the sums; then dr and da in place of R and A.
  __device__ __forceinline__ void finish_rows(GradientShared& s, float scale, int warp,
                                              const Lane& l) {
    const int m0 = 16 * warp;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = m0 + l.g + 8 * half, at = i * kSumRow + 8 * n + 2 * l.c;
        const float2 r = pair_at(s.in.r, m0, n, half, l), a = pair_at(s.in.a, m0, n, half, l);
        float &x0 = x[n][2 * half], &x1 = x[n][2 * half + 1];
        float &y0 = y[n][2 * half], &y1 = y[n][2 * half + 1];
        *reinterpret_cast<float2*>(s.sums.until + at) = {r.x * x0, r.y * x1};
        *reinterpret_cast<float2*>(s.sums.before + at) = {a.x * y0, a.y * y1};
        const float2 earlier = exp2_pair(*reinterpret_cast<const float2*>(s.exponent + at));
        const float2 now = exp2_pair(*reinterpret_cast<const float2*>(s.exponent + at + kSumRow));
        x0 *= scale * now.x, x1 *= scale * now.y;
        y0 *= earlier.x, y1 *= earlier.y;
      }
    __syncwarp();
    put_rows(s.in.r, x, m0, l);
    put_rows(s.in.a, y, m0, l);
  }
  // dk and db in place of K and B; x keeps K∘x_k + B∘x_b.
  __device__ __forceinline__ void finish_columns(GradientShared& s, int warp, const Lane& l) {
    const int m0 = 16 * warp;
    float dk[8][4];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = m0 + l.g + 8 * half, at = (j + 1) * kSumRow + 8 * n + 2 * l.c;
        const float2 k = pair_at(s.in.k, m0, n, half, l), b = pair_at(s.in.b, m0, n, half, l);
        const float2 e = *reinterpret_cast<const float2*>(s.exponent + at);
        const float2 down = exp2_pair({-e.x, -e.y});
        float &x0 = x[n][2 * half], &x1 = x[n][2 * half + 1];
        float &y0 = y[n][2 * half], &y1 = y[n][2 * half + 1];
        dk[n][2 * half] = down.x * x0, dk[n][2 * half + 1] = down.y * x1;
        x0 = k.x * x0 + b.x * y0, x1 = k.y * x1 + b.y * y1;
        y0 *= down.x, y1 *= down.y;
      }
    __syncwarp();
    put_rows(s.in.k, dk, m0, l);
    put_rows(s.in.b, y, m0, l);
  }
  __device__ __forceinline__ void subtract_columns(GradientShared& s, int warp,
                                                   const Lane& l) const {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2& to = *reinterpret_cast<float2*>(
            s.sums.until + (16 * warp + l.g + 8 * half) * kSumRow + 8 * n + 2 * l.c);
        to.x -= x[n][2 * half], to.y -= x[n][2 * half + 1];
      }
  }
};

// Sums over the tokens after, a thread with 16 of one channel. s.carry and s.kept have their parts.
__device__ __forceinline__ void write_decay_gradients(const FastProblem& p, GradientShared& s,
                                                      Span span, int hv) {
  const int d = int(threadIdx.x) & 63, part = int(threadIdx.x) >> 6;
  float* until = s.sums.until + 16 * part * kSumRow + d;
  float* before = s.sums.before + 16 * part * kSumRow + d;
  const float half = s.centred.half[d];
  float all = half * half * (s.carry[0][d] + s.carry[1][d] + s.carry[2][d] + s.carry[3][d]);
  all += s.kept[0][d] + s.kept[1][d] + s.kept[2][d] + s.kept[3][d];
  float own = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) own += until[i * kSumRow] + before[i * kSumRow];
  __syncthreads();  // the parts have been read
  s.carry[part][d] = own;
  __syncthreads();
  for (int later = 3; later > part; --later) all += s.carry[later][d];
  if (!p.dw || d >= p.key_dim) return;
  float* g_dw = p.dw + p.gate_at(span.first + 16 * part, hv) + d;
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    all += until[i * kSumRow];
    if (16 * part + i < span.rows) g_dw[i * p.gate_stride()] = all;
    all += before[i * kSumRow];
  }
}

// Block (head, chunk − first) of two warpgroups, rows and columns. 1 what there is, centred. 2 dV;
// score gradients; products with the states. 3 score gradients to shared memory. 4 their products.
// 5 terms of dw; the gradients. 6 out.
__global__ void __launch_bounds__(kFastThreads, 2) gradient_kernel(FastProblem p, int64_t first) {
  auto& s = swizzled_shared<GradientShared>();
  const Lane l;
  const int hv = int(blockIdx.x);
  const int64_t chunk = first + blockIdx.y;
  const bool by_rows = threadIdx.x < kFastThreads / 2;
  const int warp = (int(threadIdx.x) >> 5) & 3, m0 = 16 * warp;
  const Span span = span_of(p, chunk);
  if (span.rows == 0) return;
  fetch_values(p, span, chunk, hv, s.values);  // 1
  {
    const CentredRows rows(p, span, hv, s.centred);
    rows.centre(p, span, &s.in, [](int, float2, float2, float2, float2) {});
    write_exponents(rows, s.exponent);
  }
  wait_copy_groups<0>();
  publish_tiles();
  __syncthreads();
  write_carry(s);
  Side side;
  if (by_rows) {  // 2
    side.rows(s, warp, l);
  } else {
    if (p.dv) value_gradient(s, warp, l);
    side.columns(s, warp, l);
  }
  __syncthreads();
  put_rows(by_rows ? s.scores.pv : s.scores.py, side.first, m0, l);  // 3
  put_rows(by_rows ? s.scores.mv : s.scores.my, side.second, m0, l);
  publish_tiles();
  __syncthreads();
  if (by_rows)  // 4
    side.add_rows(s, warp);
  else
    side.add_columns(s, warp);
  __syncthreads();
  if (by_rows)  // 5
    side.finish_rows(s, p.scale, warp, l);
  else
    side.finish_columns(s, warp, l);
  __syncthreads();
  if (!by_rows) side.subtract_columns(s, warp, l);
  __syncthreads();
  const TilePlace at;  // 6
  const int64_t key = p.key_at(span.first, hv);
  const auto store = [&](bf16_t* g, const SwizzledTile& tile) {
    if (g) at.store(g + key, p.key_stride(), tile, span.rows, p.key_dim);
  };
  store(p.dq, s.in.r), store(p.da, s.in.a), store(p.dk, s.in.k), store(p.db, s.in.b);
  if (p.dv)
    at.store(p.dv + p.value_at(span.first, hv), p.value_stride(), s.dv, span.rows, p.value_dim);
  write_decay_gradients(p, s, span, hv);
}

}  // namespace

void fast_gradients(const FastProblem& p, cudaStream_t stream) {
  constexpr int64_t kMost = 65535;
  for (int64_t first = 0; first < p.chunks; first += kMost) {
    const dim3 grid(unsigned(p.value_heads), unsigned(std::min(p.chunks - first, kMost)));
    launch_fast<GradientShared>(gradient_kernel, kFastThreads, grid, stream, p, first);
  }
}

}  // namespace ebb::gpu::low_rank
