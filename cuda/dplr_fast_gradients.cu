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
  float exponent[66 * kSumRow];  // log2 of up, row i + 1; row 0: before the first token, row 65:
                                 // before the second half's
  CentredSums centred;
  float kept[4][64], carry[4][64];  // sums over the rows of a warp, over a quarter of V
  Span span;                        // here, so that it takes no registers
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

template <int HALVES>
__device__ __forceinline__ void write_exponents(const CentredRows<HALVES>& rows, float* s) {
  float* to = s + (8 * rows.warp + 1) * kSumRow + rows.channel;
#pragma unroll
  for (int i = 0; i < 8; ++i) *reinterpret_cast<float2*>(to + i * kSumRow) = rows.sum[i];
  if (rows.warp % 4 == 0)
    *reinterpret_cast<float2*>(s + (rows.warp ? 65 * kSumRow : 0) + rows.channel) = rows.before;
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

// dV of the warp's 16 tokens, from the transposed scores.
template <int HALVES>
__device__ __forceinline__ void value_gradient(GradientShared& s, int warp, const Lane& l) {
  const int m0 = 16 * warp;
  float x[8][4];
  unsigned rk[4][4], ak[4][4], kept[4][4];
  multiply_centred<HALVES>(x, s.in.k, s.in.r, s.centred, warp, l);
  mask(x, m0, l, [](int j, int i) { return i >= j; });
  values_as_left(rk, x);
  multiply_centred<HALVES>(x, s.in.k, s.in.a, s.centred, warp, l);
  mask(x, m0, l, [](int j, int i) { return i > j; });
  values_as_left(ak, x);
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
}

// What a warp makes of its 16 rows, tokens i (by rows) or j (by columns).
template <int HALVES>
struct Side {
  float x[8][4], y[8][4];              // x_r and x_a; x_k and x_b
  unsigned first[4][4], second[4][4];  // dP_v and dM_v; dP_y and dM_y

  // By rows: scores with V; dO S and Z S, decayed from the start to the first centre.
  __device__ __forceinline__ void rows(const GradientShared& s, int warp, const Lane& l) {
    scores(s, s.values.v, warp, l);
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::first>(x, s.values.d_o, s.values.state, warp);
    multiply_tiles<true, Inner::last, Inner::first>(y, s.values.z, s.values.state, warp);
    finish_state(s.centred.from_start[0], l);
  }
  // By columns: scores with Y; V Dᵀ and Y Dᵀ, decayed from the last centre to the end.
  __device__ __forceinline__ void columns(GradientShared& s, int warp, const Lane& l) {
    scores(s, s.values.y, warp, l);
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::first>(x, s.values.v, s.values.dstate, warp);
    multiply_tiles<true, Inner::last, Inner::first>(y, s.values.y, s.values.dstate, warp);
    finish_state(s.centred.to_end[1], l);
    sum_kept(s, warp, l);
  }
  __device__ __forceinline__ void scores(const GradientShared& s, const SwizzledTile& values,
                                         int warp, const Lane& l) {
    score(s.values.d_o, values, warp);
    mask(x, 16 * warp, l, [](int i, int j) { return j <= i; });
    values_as_left(first, x);
    score(s.values.z, values, warp);
    mask(x, 16 * warp, l, [](int i, int j) { return j < i; });
    values_as_left(second, x);
  }
  __device__ __forceinline__ void score(const SwizzledTile& left, const SwizzledTile& values,
                                        int warp) {
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::last>(x, left, values, warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x);
  }
  __device__ __forceinline__ void finish_state(const float* s_decay, const Lane& l) {
    finish_products();
    scale_columns(x, s_decay, l);
    scale_columns(y, s_decay, l);
  }
  __device__ __forceinline__ void finish_products() {
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x), settle(y);
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
      if (HALVES == 2 && warp < 2)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          sum =
              times(sum, *reinterpret_cast<const float2*>(s.centred.between[h] + 8 * n + 2 * l.c));
      if (l.g == 0) *reinterpret_cast<float2*>(&s.kept[warp][8 * n + 2 * l.c]) = sum;
    }
  }

  // Inner indices [16 FIRST, 16 LAST) of the products with the score gradients.
  template <int FIRST, int LAST>
  __device__ __forceinline__ void add_rows(const GradientShared& s, int warp) {
    constexpr Inner kA = Inner::last, kB = Inner::first;
    settle(x), settle(y);
    warpgroup_begin();
    multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.scores.pv, s.in.k, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.scores.py, s.in.b, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(y, s.scores.mv, s.in.k, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(y, s.scores.my, s.in.b, warp);
    finish_products();
  }
  template <int FIRST, int LAST>
  __device__ __forceinline__ void add_columns(const GradientShared& s, int warp) {
    constexpr Inner kA = Inner::first, kB = Inner::first;
    settle(x), settle(y);
    warpgroup_begin();
    multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.scores.pv, s.in.r, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.scores.mv, s.in.a, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(y, s.scores.py, s.in.r, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(y, s.scores.my, s.in.a, warp);
    finish_products();
  }
  // What has been summed so far lies in the other half, if the warp's rows are of half `mine`.
  __device__ __forceinline__ void cross(const GradientShared& s, int warp, int mine,
                                        const Lane& l) {
    if (warp / 2 != mine) return;
    scale_between(x, s.centred, l);
    scale_between(y, s.centred, l);
  }
  __device__ __forceinline__ void add_to_rows(const GradientShared& s, int warp, const Lane& l) {
    if constexpr (HALVES == 1) return add_rows<0, 4>(s, warp);
    add_rows<0, 2>(s, warp);
    cross(s, warp, 1, l);
    add_rows<2, 4>(s, warp);
  }
  __device__ __forceinline__ void add_to_columns(const GradientShared& s, int warp, const Lane& l) {
    if constexpr (HALVES == 1) return add_columns<0, 4>(s, warp);
    add_columns<2, 4>(s, warp);
    cross(s, warp, 0, l);
    add_columns<0, 2>(s, warp);
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
        const int from = HALVES == 2 && i == 32 ? at + 33 * kSumRow : at;  // the row before
        const float2 earlier = exp2_pair(*reinterpret_cast<const float2*>(s.exponent + from));
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
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = m0 + l.g + 8 * half, at = (j + 1) * kSumRow + 8 * n + 2 * l.c;
        const float2 k = pair_at(s.in.k, m0, n, half, l), b = pair_at(s.in.b, m0, n, half, l);
        const float2 e = *reinterpret_cast<const float2*>(s.exponent + at);
        const float2 down = exp2_pair({-e.x, -e.y});
        float &x0 = x[n][2 * half], &x1 = x[n][2 * half + 1];
        const float y0 = y[n][2 * half], y1 = y[n][2 * half + 1];
        first[n / 2][2 * (n % 2) + half] = pack_bf16(down.x * x0, down.y * x1);
        second[n / 2][2 * (n % 2) + half] = pack_bf16(down.x * y0, down.y * y1);
        x0 = k.x * x0 + b.x * y0, x1 = k.y * x1 + b.y * y1;
      }
    __syncwarp();
    put_rows(s.in.k, first, m0, l);
    put_rows(s.in.b, second, m0, l);
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
  float all = s.centred.from_start[0][d] * s.centred.to_end[0][d];
  all *= s.carry[0][d] + s.carry[1][d] + s.carry[2][d] + s.carry[3][d];
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

// The ways of the two groups through steps 2 to 5.
template <int HALVES>
__device__ __forceinline__ void rows_way(GradientShared& s, float scale, int warp, const Lane& l) {
  Side<HALVES> side;
  side.rows(s, warp, l);
  meet();
  put_rows(s.scores.pv, side.first, 16 * warp, l);
  put_rows(s.scores.mv, side.second, 16 * warp, l);
  publish_tiles();
  meet();
  side.add_to_rows(s, warp, l);
  meet();
  side.finish_rows(s, scale, warp, l);
  meet();
}
template <int HALVES>
__device__ __forceinline__ void columns_way(GradientShared& s, bool values, int warp,
                                            const Lane& l) {
  if (values) value_gradient<HALVES>(s, warp, l);
  Side<HALVES> side;
  side.columns(s, warp, l);
  meet();
  put_rows(s.scores.py, side.first, 16 * warp, l);
  put_rows(s.scores.my, side.second, 16 * warp, l);
  publish_tiles();
  meet();
  side.add_to_columns(s, warp, l);
  meet();
  side.finish_columns(s, warp, l);
  meet();
  side.subtract_columns(s, warp, l);
}

// Block (head, chunk − first) of two warpgroups, rows and columns. 1 what there is, centred. 2 dV;
// score gradients; products with the states. 3 score gradients to shared memory. 4 their products.
// 5 terms of dw; the gradients. 6 out.
template <int HALVES>
__global__ void __launch_bounds__(kFastThreads, 2) gradient_kernel(FastProblem p, int64_t first) {
  auto& s = swizzled_shared<GradientShared>();
  const Lane l;
  const int hv = int(blockIdx.x), warp = (int(threadIdx.x) >> 5) & 3;
  {
    const int64_t chunk = first + blockIdx.y;  // 1
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    if (threadIdx.x == 0) s.span = span;
    fetch_values(p, span, chunk, hv, s.values);
    const CentredRows<HALVES> rows(p, span, hv, s.centred);
    rows.centre(p, span, &s.in, [](int, float2, float2, float2, float2) {});
    write_exponents(rows, s.exponent);
  }
  wait_copy_groups<0>();
  publish_tiles();
  __syncthreads();
  write_carry(s);
  if (threadIdx.x < kFastThreads / 2)
    rows_way<HALVES>(s, p.scale, warp, l);
  else
    columns_way<HALVES>(s, p.dv != nullptr, warp, l);
  __syncthreads();
  const Span span = s.span;
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

void fast_gradients(const FastProblem& p, int halves, cudaStream_t stream) {
  for (int64_t first = 0; first < p.chunks; first += kMostChunks) {
    const dim3 grid(unsigned(p.value_heads), unsigned(std::min(p.chunks - first, kMostChunks)));
    launch_fast<GradientShared>(halves == 2 ? gradient_kernel<2> : gradient_kernel<1>, kFastThreads,
                                grid, stream, p, first);
  }
}

}  // namespace ebb::gpu::low_rank
