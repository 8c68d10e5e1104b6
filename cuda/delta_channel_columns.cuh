// The half of delta_fast_channel_gradients.cu that owns the columns of the scores: r, the gradient
// of k as it is written.
#pragma once
#include "cuda/delta_channel_warp.cuh"

namespace ebb::gpu::delta {

// 1 over tiles of V: dP, dM, D V', <S,D>. PLAIN: no dM.
template <bool PLAIN>
struct ColumnProducts {
  static constexpr int kGroup = 1;
  float dp[8][4], dm[8][4], dk[8][4];  // dk: r
  float product[2][4] = {};            // S Dᵀ of the first and of the last 8 channels
  float sums[4];                       // unused

  __device__ __forceinline__ ColumnProducts() {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[n][e] = dm[n][e] = dk[n][e] = 0.f;
  }
  __device__ __forceinline__ void settle_all() {
    settle(dp), settle(dk);
    if constexpr (!PLAIN) settle(dm);
  }
  template <bool GATED, class P>
  __device__ __forceinline__ void values(const P&, const ChannelItem&, const ChannelStage& stage,
                                         int) {
    const Lane l;
    const int warp = (int(threadIdx.x) >> 5) & 3;
    warpgroup_begin();
    multiply_tiles<false, Inner::last, Inner::last>(dp, stage.d_o, stage.values, warp);
    if constexpr (!PLAIN)
      multiply_tiles<false, Inner::last, Inner::last>(dm, stage.x, stage.values, warp);
    multiply_tiles<false, Inner::first, Inner::last>(dk, stage.dstate, stage.values, warp);
    warpgroup_commit();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned a[4], b[4];
      const int row = 16 * k + l.low, column = 16 * warp;
      load_matrices_transposed(a, stage.state.at(row + 8 * l.high, column + 8 * l.odd));
      load_matrices_transposed(b, stage.dstate.at(row + 8 * l.odd, column + 8 * l.high));
      mma(product[0], a, b[0], b[1]);
      mma(product[1], a, b[2], b[3]);
    }
  }
};

// 2 dP and dM, masked; PLAIN: dP in two parts. 3 r through the state. 4 the tree. 5 dk, with b∘p
// from the other warps, and the part of dg for them.
template <bool GATED, class P>
struct ColumnGradients : WarpChannels<GATED, P> {
  using Base = WarpChannels<GATED, P>;
  static constexpr bool kLogits = kOfLogits<P>;
  using Base::c, Base::g, Base::high, Base::kErases, Base::low, Base::odd, Base::odd_pair, Base::p,
      Base::s, Base::second_half, Base::warp;
  ColumnProducts<!kErases>& x;
  float (&dk)[8][4];
  float dg[8][4] = {};  // first, in [0] and [2], what earlier groups add
  float carry[2];

  __device__ __forceinline__ ColumnGradients(const P& p, ChannelShared& s,
                                             ColumnProducts<!kErases>& x)
      : Base{p, s, thread_again()}, x(x), dk(x.dk) {}

  // Step 2.
  __device__ __forceinline__ void prepare(const float (&)[4], float, const ChannelItem&) {
    if (c == g / 2) {
      s.now.carry[16 * warp + g] = g & 1 ? x.product[0][1] : x.product[0][0];
      s.now.carry[16 * warp + 8 + g] = g & 1 ? x.product[1][3] : x.product[1][2];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 16 * warp + g + 8 * (e >> 1), column = 8 * n + 2 * c + (e & 1);
        const float dp = p.scale * x.dp[n][e], dm = kErases ? -x.dm[n][e] : 0.f;
        if (n % 2 == e >> 1 && n / 2 == warp) {
          if (column == row) s.now.diagonal[row] = dp;
          if (e % 2 == 0 && column + 1 == row) s.now.below[column / 2] = {dp, dm};
        }
        x.dp[n][e] = column < row ? dp : 0.f, x.dm[n][e] = column < row ? dm : 0.f;
      }
    unsigned a[4][4];
    values_as_left(a, x.dp);
    put_rows(s.now.dp, a);
    if constexpr (!kErases)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const unsigned y = a[n / 2][2 * (n % 2) + e / 2];
          x.dm[n][e] = x.dp[n][e] - (e % 2 ? high_half(y) : low_half(y));
        }
    values_as_left(a, x.dm);
    put_rows(s.now.dm, a);
  }
  __device__ __forceinline__ void put_rows(SwizzledTile& tile, const unsigned (&a)[4][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (k <= warp)
        store_matrices<false>(tile.at(16 * warp + low + 8 * odd, 16 * k + 8 * high), a[k]);
  }
  // Step 3.
  __device__ __forceinline__ void through_state() {
    float after[2] = {1.f, 1.f}, f[4];
#pragma unroll
    for (int n = 7; n >= 0; --n) {
      this->tail(f, n);
      this->scale(f, after);
      this->multiply(dk[n], f);
      this->times_total(after, n);
    }
    carry[0] = after[0] * s.now.carry[16 * warp + g];
    carry[1] = after[1] * s.now.carry[16 * warp + 8 + g];
  }

  // As in RowGradients, the other way.
  template <int HALF>
  __device__ __forceinline__ void terms_of_lower(int first) {
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const int n = first + i;
      float k[4];
      this->group(k, s.k, n);
      sum[0] += k[0] * dk[n][0] + k[1] * dk[n][1];
      sum[1] += k[2] * dk[n][2] + k[3] * dk[n][3];
    }
#pragma unroll
    for (int i = HALF; i < 2 * HALF; ++i) dg[first + i][0] += sum[0], dg[first + i][2] += sum[1];
  }
  template <int HALF>
  __device__ __forceinline__ void level(int first) {
    float f[HALF][2];
    unsigned qa[HALF / 2][4], ba[HALF / 2][4];
    this->template totals_before<HALF>(f, first + HALF);
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const int n = first + HALF + i, at = i % 2 * 2;
      float q[4], b[4], decay[4];
      operands(q, b, n);
      this->head(decay, n);
      this->scale(decay, f[i]);
      pack_both(qa[i / 2] + at, ba[i / 2] + at, q, b, decay);
    }
    this->template totals_after<HALF>(f, first);
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const int n = first + i;
      float k[4] = {}, decay[4];
#pragma unroll
      for (int j = 0; j < HALF / 2; ++j) {
        unsigned r[4];
        this->columns_of_scores(r, first + HALF + 2 * j, n);
        mma(k, qa[j], r[0], r[1]);
        mma(k, kErases ? ba[j] : qa[j], r[2], r[3]);
        if constexpr (!kErases) mma(k, ba[j], r[0], r[1]);
      }
      this->tail(decay, n);
      this->scale(decay, f[i]);
      this->add_product(dk[n], decay, k);
    }
  }
  __device__ __forceinline__ void operands(float (&q)[4], float (&b)[4], int n) const {
    this->group(q, s.q, n);
    if constexpr (kErases) {
      float k[4];
      this->group(k, s.k, n);
      this->erase(b, n);
      this->multiply(b, k);
    }
  }
  // q and b by decays. PLAIN: instead of b what rounding has cut off q.
  __device__ __forceinline__ static void pack_both(unsigned* qa, unsigned* ba, const float (&q)[4],
                                                   const float (&b)[4], const float (&decay)[4]) {
    Base::pack(qa, q, decay);
    if constexpr (kErases)
      Base::pack(ba, b, decay);
    else
      Base::pack_rest(ba, qa, q, decay);
  }
  __device__ __forceinline__ void pair(int n) {
    terms_of_lower<1>(n);
    float q[4], b[4], decay[4];
    unsigned r[4];
    operands(q, b, n + 1);
    this->head(decay, n + 1);
    this->columns_of_scores(r, n, n);
    keep(n, q, b, decay, r[1], r[3], [&](float(&y)[4]) { this->tail(y, n); });
    inside(n);
    inside(n + 1);
  }
  // Group n is read by queries of a group by blocks dp, dm; decay_from: from the times of n on.
  template <class F>
  __device__ __forceinline__ void keep(int n, const float (&q)[4], const float (&b)[4],
                                       const float (&decay)[4], unsigned dp, unsigned dm,
                                       F&& decay_from) {
    unsigned qa[2], ba[2];
    pack_both(qa, ba, q, b, decay);
    float k[4] = {}, from[4];
    mma_k8(k, qa[0], qa[1], dp);
    mma_k8(k, kErases ? ba[0] : qa[0], kErases ? ba[1] : qa[1], dm);
    if constexpr (!kErases) mma_k8(k, ba[0], ba[1], dp);
    decay_from(from);
    this->add_product(dk[n], from, k);
  }
  __device__ __forceinline__ void inside(int n) {
    const GroupDecays decays(*this, n);
    unsigned r[4];
    this->columns_of_scores(r, n & ~1, n);
    const unsigned dp = r[n % 2], dm = r[2 + n % 2];  // [i,j]
    const bool in8 = g < 4 && c >= 2, in4 = odd_pair && !(g & 2) && g >> 2 == c >> 1;
    float q[4], k[4], b[4], decay[4], earlier[2];
    this->group(k, s.k, n);
    operands(q, b, n);
    const auto term = [&](int e) { return k[e] * dk[n][e]; };
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // from earlier groups; the first half to the second
      const float groups = dg[n][2 * half] + from_lane(dg[n][2 * half], 1);
      float own = term(2 * half) + term(2 * half + 1);
      own += from_lane(own, 1);
      earlier[half] = groups + from_lane(second_half ? groups : groups + own, 2) + carry[half];
    }
    const auto same = [&](float(&y)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = decay[i];
    };
    decays.by8(decay, c);
    keep(n, q, b, decay, in8 ? dp : 0u, in8 ? dm : 0u, same);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own = term(2 * half) + term(2 * half + 1), other = from_lane(own, 1);
      earlier[half] += odd_pair ? other : 0.f;
    }
    decays.by4(decay, odd_pair);
    keep(n, q, b, decay, in4 ? dp : 0u, in4 ? dm : 0u, same);
    const float2 below = s.now.below[4 * this->place(n) + c];
    const float2 diagonal =
        *reinterpret_cast<const float2*>(s.now.diagonal + 8 * this->place(n) + 2 * c);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {  // the pair of the lane's two times
      dg[n][i] = earlier[i / 2];
      dg[n][i + 1] = earlier[i / 2] + term(i);
      float pair = below.x * q[i + 1];
      if constexpr (kErases) pair += below.y * b[i + 1];
      dk[n][i] += decays.alpha[i + 1] * pair;
      dk[n][i] += diagonal.x * q[i], dk[n][i + 1] += diagonal.y * q[i + 1];
    }
  }

  // The upper half of the chunk first.
  __device__ __forceinline__ void tree() {
    through_state();
    terms_of_lower<4>(0);
#pragma unroll 1
    for (;;) {
      terms_of_lower<2>(4);
      level<2>(4);
      if (this->half_flip) meet<1>();
#pragma unroll 1
      for (;;) {
        pair(6);
        if (this->pair_flip) break;
        this->template swap_groups<2>(dk, 4, 8), this->template swap_groups<2>(dg, 4, 8);
        this->pair_flip = 2;
      }
      this->pair_flip = 0;
      if (this->half_flip) break;
      level<4>(0);
      this->template swap_groups<4>(dk, 0, 8), this->template swap_groups<4>(dg, 0, 8);
      this->half_flip = 4;
    }
    this->half_flip = 4, this->pair_flip = 2;
    meet<1>();
  }
  __device__ __forceinline__ void put_tile() {
    unsigned packed[8][2];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if constexpr (kErases) {
        float other[4];
        this->spread(other, this->from_rows(n));
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[n][e] += other[e];
      }
      if (p.dk_terms) this->write(p.dk_terms, dk[n], n);
      packed[n][0] = pack_bf16(dk[n][0], dk[n][1]), packed[n][1] = pack_bf16(dk[n][2], dk[n][3]);
      this->from_columns(n) = {dg[n][0], dg[n][1], dg[n][2], dg[n][3]};
    }
    this->put(kLogits ? s.now.dm : s.k, packed);
  }
  __device__ __forceinline__ void last() {  // dβ, a thread a time
    const ChannelScores& y = s.now;
    const int t = this->thread - kGradientThreads / 2;
    if (!kErases || (kLogits && GATED) || !(p.dbeta || raw_gradients(p)) || t >= y.item.span.rows)
      return;
    if constexpr (kLogits) return put_raw(y, t);
    p.dbeta[(y.item.slab * p.tokens + y.item.span.first + t) * p.value_heads + y.item.hv] =
        y.value_part[t] + y.key_part[0][t] + y.key_part[1][t] + y.key_part[2][t] + y.key_part[3][t];
  }
  __device__ __forceinline__ void put_raw(const ChannelScores& y, int t) {
    const int64_t token = y.item.span.first + t;
    float dbeta =
        y.value_part[t] + y.key_part[0][t] + y.key_part[1][t] + y.key_part[2][t] + y.key_part[3][t];
    if (p.sigmoid) {
      const float2 b = sigmoids(p.strengths.at(token, y.item.hv));
      dbeta *= p.beta_scale * b.x * b.y;
    }
    if (p.dstrengths)
      put_logit(p.dstrengths, token * p.value_heads + y.item.hv, dbeta, p.strengths.half);
    else
      p.dbeta[(y.item.slab * p.tokens + token) * p.value_heads + y.item.hv] = dbeta;
  }
};

}  // namespace ebb::gpu::delta
