// The half of delta_fast_channel_gradients.cu that owns the rows of the scores: dq and p, the
// gradient of b∘k.
#pragma once
#include "cuda/delta_channel_warp.cuh"

namespace ebb::gpu::delta {

// 1 over tiles of V: S dO, S X; dv and dw. PLAIN: S dO only.
template <bool PLAIN>
struct RowProducts {
  static constexpr int kGroup = 0;
  float dq[8][4], db[8][4];  // db: p
  float sums[4] = {};        // v·X

  __device__ __forceinline__ RowProducts() {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[n][e] = db[n][e] = 0.f;
  }
  __device__ __forceinline__ void settle_all() {
    settle(dq);
    if constexpr (!PLAIN) settle(db);
  }
  template <bool GATED, class P>
  __device__ __forceinline__ void values(const P& p, const ChannelItem& item,
                                         const ChannelStage& stage, int v0) {
    const int warp = int(threadIdx.x) >> 5;
    warpgroup_begin();
    multiply_tiles<false, Inner::first, Inner::last>(dq, stage.state, stage.d_o, warp);
    if constexpr (!PLAIN)
      multiply_tiles<false, Inner::first, Inner::last>(db, stage.state, stage.x, warp);
    warpgroup_commit();
    if constexpr (PLAIN) return;
    if (item.slab == 0 && (p.dv || p.dwrite || p.dbeta || raw_gradients(p)))
      value_gradients<GATED>(p, item.span, item.chunk, item.hv, v0, stage.x, sums);
  }
};

// 2 the decays. 3 dq and p through the state. 4 the tree. 5 dq, db, dg out.
template <bool GATED, class P>
struct RowGradients : WarpChannels<GATED, P> {
  using Base = WarpChannels<GATED, P>;
  static constexpr bool kLogits = kOfLogits<P>;
  using Base::c, Base::g, Base::kErases, Base::lane, Base::odd_pair, Base::p, Base::s,
      Base::second_half, Base::warp;
  float (&dq)[8][4];
  float (&db)[8][4];
  float dg[8][4] =
      {};  // of four groups; first, in [0] and [2], what later groups add to all of the group
  unsigned packed[8][2];  // dq

  __device__ __forceinline__ RowGradients(const P& p, ChannelShared& s, RowProducts<!kErases>& x)
      : Base{p, s, thread_again()}, dq(x.dq), db(x.db) {}

  // log2 of the decays in place of their raw values, a row of eight channels at a time. All four
  // warps have read those before any is overwritten. Loops stay loops here: the code of the kernel
  // is as long as the instruction cache can bear.
  __device__ __forceinline__ void make_decays(const ChannelItem& item) {
    const int r0 = this->thread / 8, c0 = this->thread % 8 * 8;
    const HeadGate gate(p, item.hv);
    float bias[8] = {};
    if (p.dt_bias && c0 < item.channels(p))
      load_pack<float>(bias, p.dt_bias + int64_t(item.hv) * p.key_dim + 64 * item.slab + c0);
    uint4 z[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] = load_eight(s.raw_decays().at(r0 + 16 * i, c0));
    barrier_wait<kGradientThreads / 2>(1);
#pragma unroll 1
    for (int r = r0; r < 64; r += 16) {
      const Eight now(z[0]);
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = now.at(e) + bias[e];
      gate.log2_decays(x, r < item.span.rows);
      float4* to = reinterpret_cast<float4*>(s.g.at(r, c0));
      to[0] = {x[0], x[1], x[2], x[3]}, to[1] = {x[4], x[5], x[6], x[7]};
      z[0] = z[1], z[1] = z[2], z[2] = z[3];
    }
    barrier_wait<kGradientThreads / 2>(1);
  }
  // Step 2; in place of g its exponentials.
  __device__ __forceinline__ void prepare(const float (&sums)[4], float beta,
                                          const ChannelItem& item) {
    float kLog2E = 1.4426950408889634f;
    if constexpr (kLogits)
      if (p.decays) make_decays(item), kLog2E = 1.f;
    const int t = this->thread;
    if (!GATED && kErases && t < 64) s.now.beta[t] = beta;
#pragma unroll
    for (int i = 0; kErases && i < 4; ++i) {
      float sum = sums[i] + from_lane(sums[i], 1);
      sum += from_lane(sum, 2);
      sum += from_lane(sum, 4);
      if (t % 8 == 0) s.now.value_part[t / 8 + 16 * i] = sum;
    }
#pragma unroll 1
    for (int n = 0; n < 8; ++n) {
      float head[4], tail[4], total[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float *first = this->at(s.g, n, 2 * half), *second = this->at(s.g, n, 2 * half + 1);
        const float a = exp2_fast(*first * kLog2E), b = exp2_fast(*second * kLog2E);
        *first = a, *second = b;
        const float two = a * b, next = from_lane(two, 1), four = two * next;
        const float rest = from_lane(four, 2);
        const float before = (odd_pair ? next : 1.f) * (second_half ? rest : 1.f);
        const float after = (odd_pair ? 1.f : next) * (second_half ? 1.f : rest);
        head[2 * half] = a * before, head[2 * half + 1] = two * before;
        tail[2 * half] = b * after, tail[2 * half + 1] = after;
        total[half] = four * rest;
      }
      s.now.head[warp][n][lane] = {head[0], head[1], head[2], head[3]};
      s.now.tail[warp][n][lane] = {tail[0], tail[1], tail[2], tail[3]};
      if (c == 0) s.now.total[warp][n][g] = {total[0], total[1]};
    }
  }
  // Step 3.
  __device__ __forceinline__ void through_state() {
    float before[2] = {1.f, 1.f}, f[4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      this->head(f, n);
      this->scale(f, before);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dq[n][e] *= p.scale * f[e];
        if constexpr (kErases) db[n][e] *= -f[e];
      }
      this->times_total(before, n);
    }
  }

  // z of the sums so far: of a time; of the lane's two times of each channel.
  __device__ __forceinline__ float term(const float (&q)[4], const float (&b)[4], int n,
                                        int e) const {
    return kErases ? q[e] * dq[n][e] + b[e] * db[n][e] : q[e] * dq[n][e];
  }
  // q += what rows of scores r bring of keys a, b what dM brings. PLAIN: q alone, of all four parts
  // that a and dP are rounded to but the smallest: dq, dk and dg then have the error of their own
  // rounding and that of the states.
  __device__ __forceinline__ static void multiply_rows(float (&q)[4], float (&b)[4],
                                                       const unsigned (&a)[4],
                                                       const unsigned (&rest)[4],
                                                       const unsigned (&r)[4]) {
    mma(q, a, r[0], r[1]);
    mma(kErases ? b : q, a, r[2], r[3]);
    if constexpr (!kErases) mma(q, rest, r[0], r[1]);
  }
  __device__ __forceinline__ void add_terms(float (&sum)[2], int n) const {
    float q[4], k[4], b[4];
    this->group(q, s.q, n);
    if constexpr (kErases) {
      this->group(k, s.k, n);
      this->erase(b, n);
      this->multiply(b, k);
    }
    sum[0] += term(q, b, n, 0) + term(q, b, n, 1);
    sum[1] += term(q, b, n, 2) + term(q, b, n, 3);
  }
  // Of a block of 2·HALF groups, z of the upper half for the lower one's part of dg.
  template <int HALF>
  __device__ __forceinline__ void terms_of_upper(int first) {
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < HALF; ++i) add_terms(sum, first + HALF + i);
#pragma unroll
    for (int i = 0; i < HALF; ++i) dg[first + i][0] += sum[0], dg[first + i][2] += sum[1];
  }
  // What the upper half of the block reads of the lower one.
  template <int HALF>
  __device__ __forceinline__ void level(int first) {
    float f[HALF][2];
    unsigned a[HALF / 2][4], rest[HALF / 2][4];
    this->template totals_after<HALF>(f, first);
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      float k[4], decay[4];
      this->group(k, s.k, first + i);
      this->tail(decay, first + i);
      this->scale(decay, f[i]);
      this->pack(a[i / 2] + i % 2 * 2, k, decay);
      if constexpr (!kErases)
        this->pack_rest(rest[i / 2] + i % 2 * 2, a[i / 2] + i % 2 * 2, k, decay);
    }
    this->template totals_before<HALF>(f, first + HALF);
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const int n = first + HALF + i;
      float q[4] = {}, b[4] = {}, decay[4];
#pragma unroll
      for (int j = 0; j < HALF / 2; ++j) {
        unsigned r[4];
        this->rows_of_scores(r, n, first + 2 * j);
        multiply_rows(q, b, a[j], rest[j], r);
      }
      this->head(decay, n);
      this->scale(decay, f[i]);
      this->add_product(dq[n], decay, q);
      if constexpr (kErases) this->add_product(db[n], decay, b);
    }
  }
  // The same for groups n and n+1, and inside each.
  __device__ __forceinline__ void pair(int n) {
    terms_of_upper<1>(n);
    float k[4], decay[4];
    unsigned r[4];
    this->group(k, s.k, n);
    this->tail(decay, n);
    this->rows_of_scores(r, n + 1, n);
    read(n + 1, k, decay, r[0], r[2], [&](float(&x)[4]) { this->head(x, n + 1); });
    inside(n);
    inside(n + 1);
  }
  // Group n reads keys of a group by blocks dp, dm; decay_to: from there to the times of n.
  template <class F>
  __device__ __forceinline__ void read(int n, const float (&k)[4], const float (&decay)[4],
                                       unsigned dp, unsigned dm, F&& decay_to) {
    unsigned a[2];
    this->pack(a, k, decay);
    float q[4] = {}, b[4] = {}, to[4];
    mma_k8(q, a[0], a[1], dp);
    mma_k8(kErases ? b : q, a[0], a[1], dm);
    if constexpr (!kErases) {
      unsigned rest[2];
      this->pack_rest(rest, a, k, decay);
      mma_k8(q, rest[0], rest[1], dp);
    }
    decay_to(to);
    this->add_product(dq[n], to, q);
    if constexpr (kErases) this->add_product(db[n], to, b);
  }
  // The last three levels, in group n, and the diagonal.
  __device__ __forceinline__ void inside(int n) {
    const GroupDecays decays(*this, n);
    unsigned r[4];
    this->rows_of_scores(r, n, n & ~1);
    const unsigned dp = r[n % 2], dm = r[2 + n % 2];  // [j,i]
    const bool in8 = g >= 4 && c < 2, in4 = (g & 2) && c == (g >> 2) * 2;
    float q[4], k[4], e[4] = {}, b[4] = {}, decay[4], later[2];
    this->group(q, s.q, n);
    this->group(k, s.k, n);
    if constexpr (kErases) {
      this->erase(e, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = e[i] * k[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // from later groups; the second half to the first
      const float groups = dg[n][2 * half] + from_lane(dg[n][2 * half], 1);
      float own = term(q, b, n, 2 * half) + term(q, b, n, 2 * half + 1);
      own += from_lane(own, 1);
      later[half] = groups + from_lane(second_half ? groups + own : groups, 2);
    }
    const auto same = [&](float(&x)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = decay[i];
    };
    decays.by8(decay, c);
    read(n, k, decay, in8 ? dp : 0u, in8 ? dm : 0u, same);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own = term(q, b, n, 2 * half) + term(q, b, n, 2 * half + 1);
      const float other = from_lane(own, 1);
      later[half] += odd_pair ? 0.f : other;
    }
    decays.by4(decay, odd_pair);
    read(n, k, decay, in4 ? dp : 0u, in4 ? dm : 0u, same);
    const float2 below = s.now.below[4 * this->place(n) + c];
    const float2 diagonal =
        *reinterpret_cast<const float2*>(s.now.diagonal + 8 * this->place(n) + 2 * c);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {  // the pair of the lane's two times
      dg[n][i] = later[i / 2] + term(q, b, n, i) + term(q, b, n, i + 1);
      const float key = decays.alpha[i + 1] * k[i];
      dq[n][i + 1] += below.x * key;
      if constexpr (kErases) db[n][i + 1] += below.y * key;
      dg[n][i + 1] = later[i / 2] + term(q, b, n, i + 1);
      dq[n][i] += diagonal.x * k[i], dq[n][i + 1] += diagonal.y * k[i + 1];
    }
    finish(n, e, k);
  }
  // What is known of group n goes out; db becomes b∘p, for the other warps.
  __device__ __forceinline__ void finish(int n, const float (&erase)[4], const float (&k)[4]) {
    if (p.dq_terms) this->write(p.dq_terms, dq[n], n);
    packed[n][0] = pack_bf16(dq[n][0], dq[n][1]), packed[n][1] = pack_bf16(dq[n][2], dq[n][3]);
    if constexpr (kErases) finish_erased(n, erase, k);
  }
  __device__ __forceinline__ void finish_erased(int n, const float (&erase)[4],
                                                const float (&k)[4]) {
    float product[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) product[e] = k[e] * db[n][e];
    if constexpr (GATED && kLogits)
      put_raw(product, n);
    else if (GATED && p.derase)
      this->write(p.derase, product, n);
    if (!GATED && (p.dbeta || raw_gradients(p))) sum_key_part(product, n);
    this->multiply(db[n], erase);
  }
  // The gradients of b to the tile that its logits have been read from.
  __device__ __forceinline__ void put_raw(const float (&x)[4], int n) const {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s.now.raw.at(8 * this->place(n) + 2 * c + (e & 1), 16 * warp + 8 * (e >> 1))[g] =
          from_float<bf16_t>(x[e]);
  }
  // Of group n, Σ over the warp's channels of x = k·p.
  __device__ __forceinline__ void sum_key_part(const float (&x)[4], int n) const {
    const bool upper = lane & 16;
    const float first = x[0] + x[2], second = x[1] + x[3];
    float sum = (upper ? second : first) + from_lane(upper ? first : second, 16);
    sum += from_lane(sum, 8);
    sum += from_lane(sum, 4);
    if ((lane & 12) == 0) s.now.key_part[warp][8 * this->place(n) + 2 * c + upper] = sum;
  }
  __device__ __forceinline__ void hand_over(int n) const {
    if constexpr (kErases) this->from_rows(n) = {db[n][0], db[n][1], db[n][2], db[n][3]};
  }

  // The lower half of the chunk first, which is then done with: nothing reads its sums.
  __device__ __forceinline__ void tree() {
    through_state();
    terms_of_upper<4>(0);
#pragma unroll 1
    for (;;) {
      terms_of_upper<2>(0);
      level<2>(0);
      if (this->half_flip) {
        meet<0>();  // the decays that from_rows() lies over are used up
        this->pair_flip = 2;
#pragma unroll
        for (int n = 4; n < 8; ++n) hand_over(n);
        this->pair_flip = 0;
      }
#pragma unroll 1
      for (;;) {
        pair(0);
        if (this->pair_flip) break;
        this->template swap_groups<2>(db, 0, 4), this->template swap_groups<2>(dg, 0, 4);
        this->template swap_groups<2>(packed, 0, 4);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) dq[n][e] = dq[n + 2][e];
        this->pair_flip = 2;
      }
      this->pair_flip = 0;
      if (this->half_flip) break;
      level<4>(0);
      this->template swap_groups<4>(db, 0, 8), this->template swap_groups<4>(packed, 0, 8);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float done = dg[n][e];
          dq[n][e] = dq[n + 4][e], dg[n][e] = 0;
          dq[n + 4][e] = done;
        }
      this->half_flip = 4;
    }
    this->half_flip = 4, this->pair_flip = 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) hand_over(n);
    meet<0>();
  }
  // Where inputs are raw, q is still needed.
  __device__ __forceinline__ void put_tile() { this->put(kLogits ? s.now.dp : s.q, packed); }
  __device__ __forceinline__ void last() {
    if (!kLogits && !p.dg) return;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float other[4];
      this->spread(other, this->from_columns(n));
      const float(&done)[4] = n < 4 ? dg[n] : dq[n];
#pragma unroll
      for (int e = 0; e < 4; ++e) other[e] += done[e];
#pragma unroll
      for (int e = 0; e < 4; ++e) *this->at(s.now.erase, n, e) = other[e];
    }
  }
};

}  // namespace ebb::gpu::delta
