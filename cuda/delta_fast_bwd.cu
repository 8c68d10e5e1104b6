// Gated delta rule in bf16 on tensor cores, backward, in two kernels: 1 the scan from the last
// chunk to the first; 2 the gradients of every chunk; with grouped heads 3, their sums
// (cuda/delta_fast.cuh). The adjoint form of ops/delta_rule_cpu_bwd.cpp: X = Aᵀ dV', no gradient of
// the inverse. dβ_i is X_i·V'_i/β_i (the diagonal of X V'ᵀ), from V where β_i = 0.
#include "cuda/delta_fast.cuh"

namespace ebb::gpu::delta {
namespace {

struct FastBackward : FastProblem {
  const bf16_t* d_o = {};                // [tokens,HV,V]
  const float* dht = {};                 // [N,HV,K,V] or null
  bf16_t *x = {}, *dstates = {};         // X [HV,tokens,V]; Dᵀ after each chunk [chunks,HV,V,K]
  bf16_t *dq = {}, *dk = {}, *dv = {};   // null: not wanted (or, with grouped heads, as f32 terms)
  float *dq_terms = {}, *dk_terms = {};  // [tokens,HV,K]
  float *dg = {}, *dbeta = {}, *dh0 = {};
};

constexpr int kScanThreads = 128;

template <int SLABS>
struct ReverseStage {
  bf16_t k[64 * key_row(SLABS)], q[64 * key_row(SLABS)];
  bf16_t ap[64 * kPairRow];
  bf16_t d_o[64 * kRow];
  float gates[kScanGateFloats];
};
template <int SLABS, int STAGES>
struct ReverseShared {
  ReverseStage<SLABS> stage[STAGES];
  Staging<SLABS> staging[4];
};

template <int SLABS>
__device__ __forceinline__ void fetch_stage(const FastBackward& p, Span span, int64_t chunk, int hv,
                                            int v0, ReverseStage<SLABS>& s) {
  const int64_t key = p.key_at(span.first, hv);
  constexpr int ld = key_row(SLABS);
  fetch_tile<64 * SLABS, kScanThreads>(s.k, ld, p.k + key, p.key_stride(), span.rows, p.key_dim);
  fetch_tile<64, kScanThreads>(s.d_o, kRow, p.d_o + p.value_at(span.first, hv) + v0,
                               p.value_stride(), span.rows, p.value_dim - v0);
  fetch_tile<128, kScanThreads>(s.ap, kPairRow, p.a + p.row_at(span.first, hv) * 128, 128,
                                span.rows, 128);
  fetch_tile<64 * SLABS, kScanThreads>(s.q, ld, p.q + key, p.key_stride(), span.rows, p.key_dim);
  fetch_floats<kScanThreads>(s.gates,
                             reinterpret_cast<const float*>(p.gates + chunk * p.value_heads + hv),
                             kScanGateFloats);
}

// x [16, 64 tokens] as left operands, each value times its token's first·second·factor.
__device__ __forceinline__ void scaled_left(unsigned (&a)[4][4], const float (&x)[8][4],
                                            const float* s_first, const float* s_second,
                                            float factor, const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * k + h, t = 8 * n + 2 * l.c;
      float2 f = *reinterpret_cast<const float2*>(s_first + t);
      if (s_second) {
        const float2 second = *reinterpret_cast<const float2*>(s_second + t);
        f.x *= second.x, f.y *= second.y;
      }
      f.x *= factor, f.y *= factor;
      a[k][2 * h] = pack_bf16(f.x * x[n][0], f.y * x[n][1]);
      a[k][2 * h + 1] = pack_bf16(f.x * x[n][2], f.y * x[n][3]);
    }
}

// Item (sequence, head, 64 columns of V); warp w has 16 of the columns and Dᵀ [16,K] in registers.
// Per chunk, from the last: 1 store D. 2 dV' = τ K D + Pᵀ dO. 3 X = Aᵀ dV', stored; dv = β X,
// stored. 4 D = γ_n D + Qᵀ (scale γ dO) − Kᵀ (γ β X). At the end: 5 dh0.
template <int SLABS, int STAGES>
__global__ void __launch_bounds__(kScanThreads) reverse_kernel(FastBackward p) {
  auto& s = dynamic_shared<ReverseShared<SLABS, STAGES>>();
  constexpr int ld = key_row(SLABS);
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  const int64_t tiles = (p.value_dim + kFastTile - 1) / kFastTile;
  for (int64_t item = blockIdx.x; item < p.sequences * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * kFastTile, hv = int(item / tiles % p.value_heads);
    const int64_t n_seq = item / tiles / p.value_heads;
    const int vw = v0 + 16 * warp, cols = p.value_dim - vw;
    const ChunkWalk walk(p, n_seq);
    const int64_t state_of = (n_seq * p.value_heads + hv) * p.key_dim * p.value_dim;
    float state[8 * SLABS][4];
    read_transposed<SLABS>(state, p.dht ? p.dht + state_of : nullptr, p.key_dim, p.value_dim, vw,
                           l);
    auto fetch = [&](int64_t step) {
      if (step < walk.count) {
        const int64_t i = walk.count - 1 - step;
        fetch_stage(p, walk.span(p, i), walk.first + i, hv, v0, s.stage[step % STAGES]);
      }
      commit_copies();
    };
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    for (int64_t step = 0; step < walk.count; ++step) {
      wait_copy_groups<STAGES - 2>();
      __syncthreads();
      fetch(step + STAGES - 1);
      if (cols <= 0) continue;
      const ReverseStage<SLABS>& now = s.stage[step % STAGES];
      const float *gamma = now.gates, *tail = gamma + kChunk, *beta = tail + kChunk;
      const int64_t i = walk.count - 1 - step;
      const Span span = walk.span(p, i);

      float dv[8][4] = {};  // 2
      {
        unsigned da[4 * SLABS][4];  // 1
#pragma unroll
        for (int k = 0; k < 4 * SLABS; ++k) as_left(da[k], state[2 * k], state[2 * k + 1]);
#pragma unroll
        for (int k = 0; k < 4 * SLABS; ++k)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            unsigned b[4];
            right(b, now.k, ld, 16 * k, 16 * n, l);
            mma(dv[2 * n], da[k], b[0], b[1]);
            mma(dv[2 * n + 1], da[k], b[2], b[3]);
          }
        s.staging[warp].write_state(
            p.dstates + p.state_at(walk.first + i, hv) + int64_t(vw) * p.key_dim, p.key_dim, da,
            cols);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 f = *reinterpret_cast<const float2*>(tail + 8 * n + 2 * l.c);
        dv[n][0] *= f.x, dv[n][1] *= f.y, dv[n][2] *= f.x, dv[n][3] *= f.y;
      }
      unsigned doa[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) left_transposed(doa[k], now.d_o, kRow, 16 * warp, 16 * k, l);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int k = n; k < 4; ++k) {
          unsigned b[4];
          right_transposed(b, now.ap + 64, kPairRow, 16 * k, 16 * n, l);
          mma(dv[2 * n], doa[k], b[0], b[1]);
          mma(dv[2 * n + 1], doa[k], b[2], b[3]);
        }
      unsigned dva[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) as_left(dva[k], dv[2 * k], dv[2 * k + 1]);
      float x[8][4] = {};  // 3
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int k = n; k < 4; ++k) {
          unsigned b[4];
          right_transposed(b, now.ap, kPairRow, 16 * k, 16 * n, l);
          mma(x[2 * n], dva[k], b[0], b[1]);
          mma(x[2 * n + 1], dva[k], b[2], b[3]);
        }
      const float total = now.gates[3 * kChunk];  // 4
#pragma unroll
      for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[n][e] *= total;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int t = 16 * k + 2 * l.c;
        const float2 f = *reinterpret_cast<const float2*>(gamma + t);
        const float2 h = *reinterpret_cast<const float2*>(gamma + t + 8);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 by = e < 2 ? f : h;
          doa[k][e] = pack_bf16(p.scale * by.x * low_half(doa[k][e]),
                                p.scale * by.y * high_half(doa[k][e]));
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int n = 0; n < 4 * SLABS; ++n) {
          unsigned b[4];
          right_transposed(b, now.q, ld, 16 * k, 16 * n, l);
          mma(state[2 * n], doa[k], b[0], b[1]);
          mma(state[2 * n + 1], doa[k], b[2], b[3]);
        }
      unsigned xa[4][4];
      scaled_left(xa, x, gamma, beta, -1.f, l);
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int n = 0; n < 4 * SLABS; ++n) {
          unsigned b[4];
          right_transposed(b, now.k, ld, 16 * k, 16 * n, l);
          mma(state[2 * n], xa[k], b[0], b[1]);
          mma(state[2 * n + 1], xa[k], b[2], b[3]);
        }
#pragma unroll
      for (int k = 0; k < 4; ++k) as_left(xa[k], x[2 * k], x[2 * k + 1]);
      s.staging[warp].write_values(p.x + p.row_at(span.first, hv) * p.value_dim + vw, p.value_dim,
                                   xa, span.rows, cols);
      if (p.dv) {
        scaled_left(xa, x, beta, nullptr, 1.f, l);
        s.staging[warp].write_values(p.dv + p.value_at(span.first, hv) + vw, p.value_stride(), xa,
                                     span.rows, cols);
      }
    }
    if (p.dh0)  // 5
      write_transposed<SLABS>(p.dh0 + state_of, state, p.key_dim, p.value_dim, vw, l);
    wait_copy_groups<0>();
    __syncthreads();
  }
}

constexpr int kGradientThreads = 256;

template <int SLABS>
struct ValueStage {  // 64 columns of V
  bf16_t d_o[64 * kRow], x[64 * kRow], values[64 * kRow];
  bf16_t state[64 * key_row(SLABS)], dstate[64 * key_row(SLABS)];  // [V,K]
};
template <int SLABS>
struct GradientShared {
  ValueStage<SLABS> stage[2];  // afterwards: ds and dm; dq and dk on their way out
  bf16_t q[64 * key_row(SLABS)], k[64 * key_row(SLABS)];
  FastGates gates;
  float parts[4][2][64];  // row sums by half: z, key_p, reads, kept
  float columns[4][64];   // column sums of z by group of 16 rows
  float diagonal[64];     // X_i·V'_i
  float carry[8];
};

template <int SLABS>
__device__ __forceinline__ void fetch_values(const FastBackward& p, Span span, int64_t chunk,
                                             int hv, int v0, ValueStage<SLABS>& s) {
  constexpr int ld = key_row(SLABS), T = kGradientThreads;
  const int cols = p.value_dim - v0;
  const int64_t at = p.row_at(span.first, hv) * p.value_dim + v0;
  const int64_t state = p.state_at(chunk, hv) + int64_t(v0) * p.key_dim;
  fetch_tile<64, T>(s.d_o, kRow, p.d_o + p.value_at(span.first, hv) + v0, p.value_stride(),
                    span.rows, cols);
  fetch_tile<64, T>(s.values, kRow, p.values + at, p.value_dim, span.rows, cols);
  fetch_tile<64, T>(s.x, kRow, p.x + at, p.value_dim, span.rows, cols);
  fetch_tile<64 * SLABS, T>(s.state, ld, p.states + state, p.key_dim, cols, p.key_dim);
  fetch_tile<64 * SLABS, T>(s.dstate, ld, p.dstates + state, p.key_dim, cols, p.key_dim);
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Σ over the columns of f(row half, n, e) into s_part[row] for the warp's rows.
template <int N, class F>
__device__ __forceinline__ void row_sums(float* s_part, int m0, const Lane& l, F&& f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum += f(n, 2 * half + e);
    sum = quad_sum(sum);
    if (l.c == 0) s_part[m0 + l.g + 8 * half] = sum;
  }
}

// The scores' part of dg, and of dβ: from dP = dO V'ᵀ and dM = X V'ᵀ makes ds = scale Γ∘dP and
// dm = −β Γ∘dM [16 rows, 32 columns from n0] and the sums of z = ds∘QKᵀ + dm∘KKᵀ.
template <int SLABS>
__device__ __forceinline__ void score_sums(const FastBackward& p, GradientShared<SLABS>& s,
                                           float (&ds)[4][4], float (&dm)[4][4], int m0, int n0,
                                           const Lane& l) {
  constexpr int ld = key_row(SLABS);
  float qk[4][4] = {}, kk[4][4] = {};
  if (n0 <= m0 + 15) {
#pragma unroll
    for (int k = 0; k < 4 * SLABS; ++k) {
      unsigned aq[4], ak[4], b[4];
      left(aq, s.q, ld, m0, 16 * k, l);
      left(ak, s.k, ld, m0, 16 * k, l);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        right(b, s.k, ld, 16 * k, n0 + 16 * n, l);
        mma(qk[2 * n], aq, b[0], b[1]);
        mma(qk[2 * n + 1], aq, b[2], b[3]);
        mma(kk[2 * n], ak, b[0], b[1]);
        mma(kk[2 * n + 1], ak, b[2], b[3]);
      }
    }
  }
  float column[8] = {};
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = m0 + l.g + 8 * (e >> 1), c = n0 + 8 * n + 2 * l.c + (e & 1);
      if (r == c) s.diagonal[r] = dm[n][e];
      const float decay = c <= r ? s.gates.decay(r, c) : 0.f, beta = s.gates.beta[r];
      const float inner = c < r ? -decay * dm[n][e] : 0.f;
      ds[n][e] = c <= r ? p.scale * decay * ds[n][e] : 0.f;
      dm[n][e] = beta * inner;
      qk[n][e] = c < r ? ds[n][e] * qk[n][e] + dm[n][e] * kk[n][e] : 0.f;
      kk[n][e] *= inner;
      column[2 * n + (e & 1)] += qk[n][e];
    }
  row_sums<4>(s.parts[0][n0 / 32], m0, l, [&](int n, int e) { return qk[n][e]; });
  row_sums<4>(s.parts[1][n0 / 32], m0, l, [&](int n, int e) { return kk[n][e]; });
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float sum = column[i];
#pragma unroll
    for (int o = 4; o < 32; o *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (l.g == 0) s.columns[m0 / 16][n0 + 8 * (i >> 1) + 2 * l.c + (i & 1)] = sum;
  }
}

// s [64, 64·SLABS] bf16 from the warp's accumulators [16, 32·SLABS] at (m0, n0).
template <int N>
__device__ __forceinline__ void put(bf16_t* s, int ld, const float (&x)[N][4], int m0, int n0,
                                    const Lane& l) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<unsigned*>(s + (m0 + l.g + 8 * half) * ld + n0 + 8 * n + 2 * l.c) =
          pack_bf16(x[n][2 * half], x[n][2 * half + 1]);
}

// Rows of a gradient of q or k: as they are in s, or as f32 terms of a group.
template <int SLABS>
__device__ __forceinline__ void write_keys(const FastBackward& p, bf16_t* g, float* g_terms,
                                           const bf16_t* s, const float (&x)[4 * SLABS][4],
                                           Span span, int hv, int m0, int n0, const Lane& l) {
  if (g) {
    g += p.key_at(span.first, hv);
    for (int i = int(threadIdx.x); i < span.rows * 8 * SLABS; i += kGradientThreads) {
      const int r = i / (8 * SLABS), c = i % (8 * SLABS) * 8;
      if (c < p.key_dim)
        *reinterpret_cast<uint4*>(g + r * p.key_stride() + c) =
            *reinterpret_cast<const uint4*>(s + r * key_row(SLABS) + c);
    }
  }
  if (g_terms)
#pragma unroll
    for (int n = 0; n < 4 * SLABS; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = m0 + l.g + 8 * half, c = n0 + 8 * n + 2 * l.c;
        if (r < span.rows && c < p.key_dim)
          *reinterpret_cast<float2*>(g_terms + ((span.first + r) * p.value_heads + hv) * p.key_dim +
                                     c) = {x[n][2 * half], x[n][2 * half + 1]};
      }
}

// Last step of gradient_kernel, warp 0; lane l has tokens 2l and 2l+1:
// dg_t = Σ_{i>=t} (row_i − column_i + reads_i) + Σ_{j<t} kept_j + γ_n <S, D>, where the sums of z
// over rows minus those over columns leave the pairs that cross t.
template <int SLABS>
__device__ void write_gate_gradients(const FastBackward& p, GradientShared<SLABS>& s, Span span,
                                     int hv) {
  const int lane = int(threadIdx.x) & 31;
  float carry = 0;
  for (int w = 0; w < 8; ++w) carry += s.carry[w];
  carry *= s.gates.total[0];
  float after[2], before[2], key_p[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    float column = 0;
    for (int w = 0; w < 4; ++w) column += s.columns[w][t];
    after[e] = s.parts[0][0][t] + s.parts[0][1][t] - column + s.parts[2][0][t] + s.parts[2][1][t];
    before[e] = s.parts[3][0][t] + s.parts[3][1][t];
    key_p[e] = s.parts[1][0][t] + s.parts[1][1][t];
  }
  float suffix = after[0] + after[1], prefix = before[0] + before[1];
  const float own_prefix = prefix;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const float down = __shfl_down_sync(0xffffffffu, suffix, o);
    const float up = __shfl_up_sync(0xffffffffu, prefix, o);
    if (lane + o < 32) suffix += down;
    if (lane >= o) prefix += up;
  }
  const float dg[2] = {suffix + (prefix - own_prefix),
                       suffix - after[0] + (prefix - own_prefix) + before[0]};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    if (t >= span.rows) continue;
    const int64_t at = (span.first + t) * p.value_heads + hv;
    if (p.dg) p.dg[at] = dg[e] + carry;
    if (p.dbeta) {
      const float beta = s.gates.beta[t];
      float sum = key_p[e];
      if (beta == 0.f)
        for (int j = 0; j < p.value_dim; ++j)
          sum += to_float(p.v[p.value_at(span.first + t, hv) + j]) *
                 to_float(p.x[p.row_at(span.first + t, hv) * p.value_dim + j]);
      p.dbeta[at] = beta == 0.f ? sum : s.diagonal[t] / beta;
    }
  }
}

// Item (chunk, head); warps 4x2, each 16 rows by half of the columns. Over tiles of V: 1 dP = dO
// V'ᵀ, dM = X V'ᵀ, S dO, S X, D V', <S, D>. 2 scores' gradients and their sums. 3 row sums of the
// others with q and k. 4 dq += ds K; dk += dm K + dsᵀ Q + dmᵀ K. 5 dg, dβ.
template <int SLABS>
__global__ void __launch_bounds__(kGradientThreads, SLABS == 1 ? 2 : 1)
    gradient_kernel(FastBackward p) {
  auto& s = dynamic_shared<GradientShared<SLABS>>();
  constexpr int ld = key_row(SLABS), kCols = 32 * SLABS, T = kGradientThreads;
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, m0 = 16 * (warp & 3), half = warp >> 2;
  const int n0 = 32 * half, c0 = kCols * half;  // columns of scores, of keys
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads; item += gridDim.x) {
    const int hv = int(item % p.value_heads);
    const int64_t chunk = item / p.value_heads;
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    const int tiles = (p.value_dim + kFastTile - 1) / kFastTile;
    const int64_t key = p.key_at(span.first, hv);
    fetch_values(p, span, chunk, hv, 0, s.stage[0]);
    commit_copies();
    if (tiles > 1) fetch_values(p, span, chunk, hv, kFastTile, s.stage[1]);
    fetch_tile<64 * SLABS, T>(s.q, ld, p.q + key, p.key_stride(), span.rows, p.key_dim);
    fetch_tile<64 * SLABS, T>(s.k, ld, p.k + key, p.key_stride(), span.rows, p.key_dim);
    fetch_floats<T>(reinterpret_cast<float*>(&s.gates),
                    reinterpret_cast<const float*>(p.gates + item), kGateFloats);
    commit_copies();
    float ds[4][4] = {}, dm[4][4] = {};
    float dq[4 * SLABS][4] = {}, dp[4 * SLABS][4] = {}, dk[4 * SLABS][4] = {}, carry = 0;
    for (int tile = 0; tile < tiles; ++tile) {  // 1
      wait_copy_groups<1>();
      __syncthreads();
      const ValueStage<SLABS>& now = s.stage[tile & 1];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        unsigned ao[4], ax[4], av[4], b[4];
        left(ao, now.d_o, kRow, m0, 16 * k, l);
        left(ax, now.x, kRow, m0, 16 * k, l);
        left(av, now.values, kRow, m0, 16 * k, l);
#pragma unroll
        for (int n = 0; n < 2; ++n)
          if (n0 + 16 * n <= m0) {
            right(b, now.values, kRow, 16 * k, n0 + 16 * n, l);
            mma(ds[2 * n], ao, b[0], b[1]);
            mma(ds[2 * n + 1], ao, b[2], b[3]);
            mma(dm[2 * n], ax, b[0], b[1]);
            mma(dm[2 * n + 1], ax, b[2], b[3]);
          }
#pragma unroll
        for (int n = 0; n < 2 * SLABS; ++n) {
          right_transposed(b, now.state, ld, 16 * k, c0 + 16 * n, l);
          mma(dq[2 * n], ao, b[0], b[1]);
          mma(dq[2 * n + 1], ao, b[2], b[3]);
          mma(dp[2 * n], ax, b[0], b[1]);
          mma(dp[2 * n + 1], ax, b[2], b[3]);
          right_transposed(b, now.dstate, ld, 16 * k, c0 + 16 * n, l);
          mma(dk[2 * n], av, b[0], b[1]);
          mma(dk[2 * n + 1], av, b[2], b[3]);
        }
      }
      for (int i = int(threadIdx.x); i < 64 * 8 * SLABS; i += T) {
        const int at = i / (8 * SLABS) * ld + i % (8 * SLABS) * 8;
        float a[8], b[8];
        load_pack<bf16_t>(a, now.state + at);
        load_pack<bf16_t>(b, now.dstate + at);
#pragma unroll
        for (int e = 0; e < 8; ++e) carry += a[e] * b[e];
      }
      __syncthreads();
      if (tile + 2 < tiles)
        fetch_values(p, span, chunk, hv, (tile + 2) * kFastTile, s.stage[tile & 1]);
      commit_copies();
    }
    wait_copy_groups<0>();
    __syncthreads();
    carry = warp_sum(carry);
    if ((threadIdx.x & 31) == 0) s.carry[warp] = carry;
    score_sums(p, s, ds, dm, m0, n0, l);  // 2
    bf16_t *s_ds = s.stage[0].d_o, *s_dm = s.stage[0].x;
    put<4>(s_ds, kRow, ds, m0, n0, l);
    put<4>(s_dm, kRow, dm, m0, n0, l);
#pragma unroll
    for (int n = 0; n < 4 * SLABS; ++n)  // 3
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = m0 + l.g + 8 * (e >> 1);
        dq[n][e] *= p.scale * s.gates.gamma[r];
        dp[n][e] *= -s.gates.gamma[r];
        dk[n][e] *= s.gates.tail[r];
      }
    const auto at = [&](const bf16_t* x, int n, int e) {
      return to_float(x[(m0 + l.g + 8 * (e >> 1)) * ld + c0 + 8 * n + 2 * l.c + (e & 1)]);
    };
    const float beta[2] = {s.gates.beta[m0 + l.g], s.gates.beta[m0 + l.g + 8]};
    row_sums<4 * SLABS>(s.parts[2][half], m0, l, [&](int n, int e) {
      return at(s.q, n, e) * dq[n][e] + beta[e >> 1] * at(s.k, n, e) * dp[n][e];
    });
    row_sums<4 * SLABS>(s.parts[3][half], m0, l,
                        [&](int n, int e) { return at(s.k, n, e) * dk[n][e]; });
    if (p.dbeta) {  // the thread's own rows of parts[1]: this warp has just written them
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 4 * SLABS; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) sum += at(s.k, n, 2 * h + e) * dp[n][2 * h + e];
        sum = quad_sum(sum);
        if (l.c == 0) s.parts[1][half][m0 + l.g + 8 * h] += sum;
      }
    }
#pragma unroll
    for (int n = 0; n < 4 * SLABS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] += beta[e >> 1] * dp[n][e];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 4
      unsigned a[4], am[4], b[4];
      if (16 * k <= m0) {
        left(a, s_ds, kRow, m0, 16 * k, l);
        left(am, s_dm, kRow, m0, 16 * k, l);
#pragma unroll
        for (int n = 0; n < 2 * SLABS; ++n) {
          right_transposed(b, s.k, ld, 16 * k, c0 + 16 * n, l);
          mma(dq[2 * n], a, b[0], b[1]);
          mma(dq[2 * n + 1], a, b[2], b[3]);
          mma(dk[2 * n], am, b[0], b[1]);
          mma(dk[2 * n + 1], am, b[2], b[3]);
        }
      }
      if (16 * k >= m0) {
        left_transposed(a, s_ds, kRow, m0, 16 * k, l);
        left_transposed(am, s_dm, kRow, m0, 16 * k, l);
#pragma unroll
        for (int n = 0; n < 2 * SLABS; ++n) {
          right_transposed(b, s.q, ld, 16 * k, c0 + 16 * n, l);
          mma(dk[2 * n], a, b[0], b[1]);
          mma(dk[2 * n + 1], a, b[2], b[3]);
          right_transposed(b, s.k, ld, 16 * k, c0 + 16 * n, l);
          mma(dk[2 * n], am, b[0], b[1]);
          mma(dk[2 * n + 1], am, b[2], b[3]);
        }
      }
    }
    bf16_t *s_dq = s.stage[1].d_o, *s_dk = s_dq + 64 * ld;
    put<4 * SLABS>(s_dq, ld, dq, m0, c0, l);
    put<4 * SLABS>(s_dk, ld, dk, m0, c0, l);
    if (warp == 0) write_gate_gradients(p, s, span, hv);  // 5
    __syncthreads();
    write_keys<SLABS>(p, p.dq, p.dq_terms, s_dq, dq, span, hv, m0, c0, l);
    write_keys<SLABS>(p, p.dk, p.dk_terms, s_dk, dk, span, hv, m0, c0, l);
    __syncthreads();
  }
}

}  // namespace

void fast_bwd(const DeltaRuleProblem& problem, const DeltaRuleSaved& saved, const Tensor& d_out,
              const Tensor& dht, const DeltaRuleGradients& grads) {
  const Device device = problem.v.device();
  const int64_t hv = problem.value_heads(), k = problem.key_dim();
  const int group = int(hv / problem.heads());
  const bool aligned = reinterpret_cast<uintptr_t>(ptr<bf16>(d_out)) % 16 == 0;
  const Tensor d_o = aligned ? d_out : d_out.clone();
  const Tensor x = Tensor::empty(saved.values.shape(), DType::bf16, device);
  const Tensor dstates = Tensor::empty(saved.states.shape(), DType::bf16, device);
  const Tensor dq_terms = group_terms(problem, grads.dq), dk_terms = group_terms(problem, grads.dk);
  const Tensor before = chunk_offsets(problem);
  const cudaStream_t stream = stream_of(x);
  FastBackward p{make_fast_problem(problem, saved, before)};
  p.d_o = ptr<bf16>(d_o), p.dht = ptr<float>(dht);
  p.x = ptr<bf16>(x), p.dstates = ptr<bf16>(dstates);
  p.dq = group == 1 ? ptr<bf16>(grads.dq) : nullptr;
  p.dk = group == 1 ? ptr<bf16>(grads.dk) : nullptr;
  p.dv = ptr<bf16>(grads.dv);
  p.dq_terms = ptr<float>(dq_terms), p.dk_terms = ptr<float>(dk_terms);
  p.dg = ptr<float>(grads.dg), p.dbeta = ptr<float>(grads.dbeta), p.dh0 = ptr<float>(grads.dh0);
  visit_fast_slabs(k, [&]<int SLABS>() {
    launch_fast<ReverseShared<SLABS, 2>>(reverse_kernel<SLABS, 2>, kScanThreads,
                                         p.sequences * hv * ceil_div(p.value_dim, kFastTile),
                                         stream, p);
    launch_fast<GradientShared<SLABS>>(gradient_kernel<SLABS>, kGradientThreads, p.chunks * hv,
                                       stream, p);
  });
  sum_groups(dq_terms, grads.dq, group);
  sum_groups(dk_terms, grads.dk, group);
}

}  // namespace ebb::gpu::delta
