// The products of the gradients of a chunk, for delta_fast_gradients.cuh: what the two groups of
// warps find in shared memory, how it comes there, and the sums that each of them holds.
#pragma once
#include "cuda/delta_gradient_sums.cuh"
#include "cuda/meet.cuh"

namespace ebb::gpu::delta::rule {

inline constexpr int kRuleThreads = 256;
// Where the two groups of warps, each on a way of its own, wait for one another.
template <int GROUP>
__device__ __forceinline__ void meet() {
  barrier_meet<GROUP, kRuleThreads / 2, kRuleThreads / 2>(1);
}

template <int SLABS>
struct ValueStage {                                          // 64 columns of V
  SwizzledTile d_o, x, values, state[SLABS], dstate[SLABS];  // the states as [V,K]
};
template <int SLABS>
struct GradientShared {
  static constexpr int kSlabs = SLABS;
  ValueStage<SLABS> stage[2];
  SwizzledTile q[SLABS], k[SLABS], scores;  // scores: P
  RuleGates gates;
  float row_z[2][64], reads[2][64], kept[64];  // sums over rows of columns, by group
  float column_z[8][64];                       // over the rows of a warp
  float value_p[64], key_p[64];                // of dβ: X_i·V_i, and the rest
  float carry[8];

  // After the products with V:
  __device__ __forceinline__ SwizzledTile& ds() { return stage[0].d_o; }
  __device__ __forceinline__ SwizzledTile& dm() { return stage[0].x; }
  __device__ __forceinline__ SwizzledTile (&dq())[SLABS] { return stage[0].state; }
  __device__ __forceinline__ SwizzledTile (&dk())[SLABS] { return stage[0].dstate; }
  __device__ __forceinline__ float4* exchange() { return reinterpret_cast<float4*>(&stage[1]); }
  // x = KKᵀ, by a group of warps.
  __device__ __forceinline__ void multiply_keys(float (&x)[8][4], int warp) const {
    multiply_tiles<true, Inner::last, Inner::last>(x, k[0], k[0], warp);
#pragma unroll
    for (int j = 1; j < SLABS; ++j)
      multiply_tiles<false, Inner::last, Inner::last>(x, k[j], k[j], warp);
  }
};

// Of the states the slabs from `first` on.
template <int SLABS, class P>
__device__ __forceinline__ void fetch_values(const P& p, Span span, int64_t chunk, int hv, int v0,
                                             int first, ValueStage<SLABS>& s) {
  const TilePlace at;
  const int cols = p.value_dim - v0;
  const int64_t row = p.row_at(span.first, hv) * p.value_dim + v0;
  const int64_t state = p.state_at(chunk, hv) + int64_t(v0) * p.key_dim;
  const StateRows dstate = dstate_at(p, span, chunk, hv, v0);
  at.fetch(s.d_o, p.d_o + p.value_at(span.first, hv) + v0, p.value_stride(), span.rows, cols);
  at.fetch(s.values, p.values + row, p.value_dim, span.rows, cols);
  at.fetch(s.x, p.x + p.x_at(span.first, hv) + v0, p.x_stride(), span.rows, cols);
#pragma unroll
  for (int j = 0; j < SLABS; ++j) {
    const int k0 = 64 * (first + j);
    at.fetch(s.state[j], p.states + state + k0, p.key_dim, cols, p.key_dim - k0);
    at.fetch(s.dstate[j], dstate.at + k0, dstate.stride, cols, p.key_dim - k0);
  }
}
// Slabs of q or k from `first` on.
template <int SLABS, class P>
__device__ __forceinline__ void fetch_keys(const P& p, const bf16_t* g, Span span, int hv,
                                           int first, SwizzledTile (&s)[SLABS]) {
  const TilePlace at;
  const bf16_t* from = g + p.key_at(span.first, hv);
#pragma unroll
  for (int j = 0; j < SLABS; ++j) {
    const int k0 = 64 * (first + j);
    at.fetch(s[j], from + k0, p.key_stride(), span.rows, p.key_dim - k0);
  }
}
template <class P, class Shared>
__device__ __forceinline__ void fetch_chunk(const P& p, Span span, int64_t chunk, int hv,
                                            Shared& s) {
  const TilePlace at;
  at.fetch(s.scores, p.a + p.row_at(span.first, hv) * 128 + 64, 128, span.rows, 64);
  auto* to = reinterpret_cast<float*>(&s.gates);
  const auto* gates = reinterpret_cast<const float*>(p.gates + chunk * p.value_heads + hv);
  if constexpr (P::kLogits) {
    fetch_floats<kRuleThreads>(to, gates, kRuleGateFloats);
  } else {  // without the γ of reads and the lengths, which nobody has written
    constexpr int kRest = scan_gate_floats(true);
    fetch_floats<kRuleThreads>(to, gates, scan_gate_floats(false));
    fetch_floats<kRuleThreads>(to + kRest, gates + kRest, 2 * kChunk);
  }
}

template <bool ADD>
__device__ __forceinline__ void put_sum(float& to, float x) {
  to = ADD ? to + x : x;
}
// Scales rows of x and sums them against the same rows of a tile.
template <int SLABS>
__device__ __forceinline__ void scale_rows(float (&x)[SLABS][8][4], const float (&factor)[2],
                                           const SwizzledTile (&against)[SLABS], float (&sums)[2],
                                           int m0, const Lane& l) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = pair_at(against[j], m0, n, half, l);
        float &first = x[j][n][2 * half], &second = x[j][n][2 * half + 1];
        first *= factor[half], second *= factor[half];
        sum += first * y.x + second * y.y;
      }
    sums[half] = quad_sum(sum);
  }
}
// Gradients x = r dŷ of rows y of unit length ŷ = r y become those of y: x − y r² (y·x).
template <int SLABS>
__device__ __forceinline__ void project_rows(float (&x)[SLABS][8][4],
                                             const SwizzledTile (&rows)[SLABS],
                                             const float* s_reciprocal, int m0, const Lane& l) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float r = s_reciprocal[m0 + l.g + 8 * half];
    float sum = 0;
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = pair_at(rows[j], m0, n, half, l);
        sum += x[j][n][2 * half] * y.x + x[j][n][2 * half + 1] * y.y;
      }
    const float along = quad_sum(sum) * r * r;
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = pair_at(rows[j], m0, n, half, l);
        x[j][n][2 * half] -= along * y.x, x[j][n][2 * half + 1] -= along * y.y;
      }
  }
}
// s_column[c] = Σ over the warp's 16 rows, for the two columns c of fragment n.
__device__ __forceinline__ void write_column_sums(float* s_column, float2 z, int n, const Lane& l) {
#pragma unroll
  for (int o = 4; o < 32; o *= 2) {
    z.x += __shfl_xor_sync(0xffffffffu, z.x, o);
    z.y += __shfl_xor_sync(0xffffffffu, z.y, o);
  }
  if (l.g == 0) *reinterpret_cast<float2*>(s_column + 8 * n + 2 * l.c) = z;
}
// A tile from accumulators given as left operands.
__device__ __forceinline__ void put_rows(SwizzledTile& s, const unsigned (&x)[4][4], int m0,
                                         const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    store_matrices<false>(s.at(m0 + l.low + 8 * l.odd, 16 * k + 8 * l.high), x[k]);
}
template <int SLABS, class P>
__device__ __forceinline__ void write_terms(const P& p, float* g_terms,
                                            const float (&x)[SLABS][8][4], Span span, int hv,
                                            int k0, int m0, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = m0 + l.g + 8 * half, c = k0 + 8 * n + 2 * l.c;
      if (r < span.rows && c < p.key_dim)
        *reinterpret_cast<float2*>(g_terms + ((span.first + r) * p.value_heads + hv) * p.key_dim +
                                   c) = {x[n / 8][n % 8][2 * half], x[n / 8][n % 8][2 * half + 1]};
    }
}

// The first group of four warps. 1 dP = dO V'ᵀ, S dO, D V' over tiles of V. 2 ds = scale Γ∘dP; sums
// of z = dP∘P below the diagonal. 3 row sums with q and k. 4 dq = scale γ S dO + ds K, and
// τ D V' + dsᵀ Q, its part of dk, handed to the other group.
template <int SLABS>
struct ReadGradients {
  static constexpr int kGroup = 0;
  float ds[8][4], dq[SLABS][8][4], dk[SLABS][8][4];

  template <bool SCORES>
  __device__ __forceinline__ void values(const ValueStage<SLABS>& s, int warp) {
    warpgroup_begin();
    if (SCORES) multiply_tiles<false, Inner::last, Inner::last>(ds, s.d_o, s.values, warp);
#pragma unroll
    for (int j = 0; j < SLABS; ++j) {
      multiply_tiles<false, Inner::last, Inner::first>(dq[j], s.d_o, s.state[j], warp);
      multiply_tiles<false, Inner::last, Inner::first>(dk[j], s.values, s.dstate[j], warp);
    }
    warpgroup_commit();
  }
  template <bool SCORES>
  __device__ __forceinline__ void settle_all() {
    if (SCORES) settle(ds);
#pragma unroll
    for (int j = 0; j < SLABS; ++j) settle(dq[j]), settle(dk[j]);
  }
  template <bool LOGITS, class Shared>
  __device__ __forceinline__ void scores(Shared& s, float scale, unsigned (&a)[4][4], int warp,
                                         const Lane& l) {
    const int m0 = 16 * warp;
    float sums[2] = {}, by[2] = {scale, scale};
    if constexpr (LOGITS) by[0] *= s.gates.query[m0 + l.g], by[1] *= s.gates.query[m0 + l.g + 8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 column = {};
      if (n <= 2 * warp + 1) {
        float2 key = {1.f, 1.f};
        if constexpr (LOGITS) key = *reinterpret_cast<const float2*>(s.gates.key + 8 * n + 2 * l.c);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = m0 + l.g + 8 * half, c = 8 * n + 2 * l.c;
          const float2 y = pair_at(s.scores, m0, n, half, l);
          float &first = ds[n][2 * half], &second = ds[n][2 * half + 1];
          const float z0 = c < r ? first * y.x : 0.f, z1 = c + 1 < r ? second * y.y : 0.f;
          sums[half] += z0 + z1, column.x += z0, column.y += z1;
          first = c <= r ? by[half] * key.x * s.gates.decay(r, c) * first : 0.f;
          second = c + 1 <= r ? by[half] * key.y * s.gates.decay(r, c + 1) * second : 0.f;
        }
      } else {
        ds[n][0] = ds[n][1] = ds[n][2] = ds[n][3] = 0.f;
      }
      write_column_sums(s.column_z[warp], column, n, l);
    }
    values_as_left(a, ds);
    put_rows(s.ds(), a, m0, l);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(sums[half]);
      if (l.c == 0) s.row_z[0][m0 + l.g + 8 * half] = sum;
    }
  }
  // ADD: to those of earlier slabs.
  template <bool LOGITS, bool ADD, class Shared>
  __device__ __forceinline__ void row_sums(Shared& s, float scale, int warp, const Lane& l) {
    const int r = 16 * warp + l.g;
    const float* g = LOGITS ? s.gates.read : s.gates.gamma;
    const float gamma[2] = {scale * g[r], scale * g[r + 8]};
    const float tail[2] = {s.gates.tail[r], s.gates.tail[r + 8]};
    float reads[2], kept[2];
    scale_rows<SLABS>(dq, gamma, s.q, reads, 16 * warp, l);
    scale_rows<SLABS>(dk, tail, s.k, kept, 16 * warp, l);
    if (l.c == 0)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        put_sum<ADD>(s.reads[0][r + 8 * half], reads[half]),
            put_sum<ADD>(s.kept[r + 8 * half], kept[half]);
  }
  template <class Shared>
  __device__ __forceinline__ void keys(Shared& s, const unsigned (&a)[4][4], int warp) {
    settle_all<false>();
    warpgroup_begin();
#pragma unroll
    for (int j = 0; j < SLABS; ++j) {
      multiply_tiles<false, Inner::first, Inner::first>(dk[j], s.ds(), s.q[j], warp);
      multiply_columns(dq[j], a, s.k[j]);
    }
    warpgroup_commit();
    warpgroup_wait<0>();
    settle_all<false>();
  }
};

// The second group. 1 dM = X V'ᵀ, S X. 2 KKᵀ; dm = −β Γ∘dM; sums of z = dm∘KKᵀ. 3 row sums with k.
// 4 dk = −β γ S X + dm K + dmᵀ K, without the other group's part.
template <int SLABS>
struct EraseGradients {
  static constexpr int kGroup = 1;
  float dm[8][4], dk[SLABS][8][4];

  template <bool SCORES>
  __device__ __forceinline__ void values(const ValueStage<SLABS>& s, int warp) {
    warpgroup_begin();
    if (SCORES) multiply_tiles<false, Inner::last, Inner::last>(dm, s.x, s.values, warp);
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
      multiply_tiles<false, Inner::last, Inner::first>(dk[j], s.x, s.state[j], warp);
    warpgroup_commit();
  }
  template <bool SCORES>
  __device__ __forceinline__ void settle_all() {
    if (SCORES) settle(dm);
#pragma unroll
    for (int j = 0; j < SLABS; ++j) settle(dk[j]);
  }
  // Leaves in key_p what β's gradient has from the keys, so far inside the chunk.
  template <bool LOGITS, class Shared>
  __device__ __forceinline__ void scores(Shared& s, unsigned (&a)[4][4], float (&key_p)[2],
                                         int warp, const Lane& l) {
    const int m0 = 16 * warp;
    float kk[8][4];
    warpgroup_begin();
    s.multiply_keys(kk, warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(kk);
    float sums[2] = {};
    key_p[0] = key_p[1] = 0.f;
    const float beta[2] = {s.gates.beta[m0 + l.g], s.gates.beta[m0 + l.g + 8]};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float column[2] = {};
      if (n <= 2 * warp + 1) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int half = e >> 1, r = m0 + l.g + 8 * half, c = 8 * n + 2 * l.c + (e & 1);
          float& x = dm[n][e];
          const float lengths = LOGITS ? s.gates.key[r] * s.gates.key[c] : 1.f;
          const float inner = c < r ? -s.gates.decay(r, c) * lengths * x : 0.f;
          const float product = inner * kk[n][e];
          key_p[half] += product;
          sums[half] += beta[half] * product, column[e & 1] += beta[half] * product;
          x = beta[half] * inner;
        }
      } else {
        dm[n][0] = dm[n][1] = dm[n][2] = dm[n][3] = 0.f;
      }
      write_column_sums(s.column_z[4 + warp], {column[0], column[1]}, n, l);
    }
    values_as_left(a, dm);
    put_rows(s.dm(), a, m0, l);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(sums[half]);
      if (l.c == 0) s.row_z[1][m0 + l.g + 8 * half] = sum;
    }
  }
  template <bool ADD, class Shared>
  __device__ __forceinline__ void row_sums(Shared& s, const float (&key_p)[2], int warp,
                                           const Lane& l) {
    const int r = 16 * warp + l.g;
    const float gamma[2] = {-s.gates.gamma[r], -s.gates.gamma[r + 8]};
    float reads[2];
    scale_rows<SLABS>(dk, gamma, s.k, reads, 16 * warp, l);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float beta = s.gates.beta[r + 8 * half], inside = quad_sum(key_p[half]);
      if (l.c == 0) {
        put_sum<ADD>(s.key_p[r + 8 * half], inside + reads[half]);
        put_sum<ADD>(s.reads[1][r + 8 * half], beta * reads[half]);
      }
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) dk[j][n][2 * half + e] *= beta;
    }
  }
  template <class Shared>
  __device__ __forceinline__ void keys(Shared& s, const unsigned (&a)[4][4], int warp) {
    settle_all<false>();
    warpgroup_begin();
#pragma unroll
    for (int j = 0; j < SLABS; ++j) {
      multiply_tiles<false, Inner::first, Inner::first>(dk[j], s.dm(), s.k[j], warp);
      multiply_columns(dk[j], a, s.k[j]);
    }
    warpgroup_commit();
    warpgroup_wait<0>();
    settle_all<false>();
  }
};

}  // namespace ebb::gpu::delta::rule
