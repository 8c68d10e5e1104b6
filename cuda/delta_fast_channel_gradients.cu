// Delta rule with a decay per channel in bf16 on tensor cores: the gradients of every chunk, head
// and slab of 64 channels from X, V' and the states and their gradients
// (ops/delta_rule_channel_cpu_bwd.cpp). With E_ij = e^{G_i−G_j} by channel,
//   dq_i = scale e^{G_i}∘(S dO_i)  + Σ_{j<=i} dP_ij k_j∘E_ij
//   p_i  =     − e^{G_i}∘(S X_i)   + Σ_{j<i} dM_ij k_j∘E_ij
//   r_j  =  e^{G_n−G_j}∘(D V'_j)   + Σ_{i>=j} dP_ij q_i∘E_ij + Σ_{i>j} dM_ij (b_i k_i)∘E_ij
// E does not factor over the chunk within the range of floats. So pairs j < i are taken by a tree:
// blocks of 64, 32, ..., 2 times, in each the pairs of its upper with its lower half, for which E
// is the decay from j to the middle times that from the middle to i: products of numbers <= 1. And
// dg_t, the terms z_i = q_i∘dq_i + (b_i k_i)∘p_i and y_j = k_j∘r_j whose exponent contains g_t, is
//   e^{G_n}∘<S,D> + Σ of z_i over i >= t and of y_j over j < t, each level inside its half blocks
// so that nothing ever cancels: with the levels from the largest down, z of what has been summed so
// far goes at each level from the upper half to all of the lower one, and y the other way.
//
// Everything is held transposed, accumulators [channels, times] of mma m16n8k16: a warp has 16
// channels, a lane channels g, g+8 and times 2c, 2c+1 of each group of 8. Accumulators then have
// the layout of left operands, and decays work on registers. Warps 0-3 own dq and p of the 64
// channels, warps 4-7 own r.
#include "cuda/delta_fast_channel_gradients.cuh"

namespace ebb::gpu::delta {
namespace {

using Backward = FastChannelBackward;
constexpr int kThreads = 256;

__device__ __forceinline__ float from_lane(float x, int xor_mask) {
  return __shfl_xor_sync(0xffffffffu, x, xor_mask);
}
// Read anew: what was derived from them before need not stay in registers.
__device__ __forceinline__ int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ unsigned block_again() {
  unsigned x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// A warp's 16 channels after the products with V. Arrays of 4: a lane's values of one group, times
// 2c, 2c+1 of channel g, then of g+8.
template <bool GATED>
struct WarpChannels {
  const Backward& p;
  ChannelShared& s;
  int thread;
  int lane = thread & 31, warp = thread >> 5 & 3;
  int g = lane >> 2, c = lane & 3;
  int low = lane & 7, odd = lane >> 3 & 1, high = lane >> 4;  // for ldmatrix
  bool odd_pair = c & 1, second_half = c >> 1;                // of a half group; of a group
  // Where the lane's rows begin: in tiles [times, channels]; in dP for blocks of one row of blocks
  // and of one column; in f32 tiles.
  int key_row = (8 * high + low) * 64 + ((2 * warp + odd) ^ low) * 8;
  int score_row = high * 4096 + low * 64 + (odd ^ low) * 8;
  int score_column = high * 4096 + (8 * odd + low) * 64 + low * 8;
  int float_at = 2 * c * 64 + ((16 * warp + g) ^ 8 * c);

  // Groups n and n+1 of a tile [times, channels] as a left operand [channels, times].
  __device__ __forceinline__ void load(unsigned (&r)[4], const SwizzledTile& x, int n) const {
    load_matrices_transposed(r, x.s + key_row + 512 * n);
  }
  __device__ __forceinline__ static void widen(float (&x)[4], unsigned first, unsigned second) {
    x[0] = low_half(first), x[1] = high_half(first);
    x[2] = low_half(second), x[3] = high_half(second);
  }
  __device__ __forceinline__ static void spread(float (&x)[4], const float4& y) {
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
  // Group n of such a tile.
  __device__ __forceinline__ void group(float (&x)[4], const SwizzledTile& tile, int n) const {
    unsigned r[4];
    load(r, tile, n & ~1);
    widen(x, r[n % 2 * 2], r[n % 2 * 2 + 1]);
  }
  __device__ __forceinline__ float* at(FloatTile& x, int n, int e) const {
    return x.s + (e < 2 ? float_at : float_at ^ 8) + 512 * n + 64 * (e & 1);
  }
  __device__ __forceinline__ void erase(float (&b)[4], int n) const {
    if constexpr (GATED) {
#pragma unroll
      for (int e = 0; e < 4; ++e) b[e] = *at(s.now.erase, n, e);
    } else {
      const float2 beta = *reinterpret_cast<const float2*>(s.now.beta + 8 * n + 2 * c);
      b[0] = b[2] = beta.x, b[1] = b[3] = beta.y;
    }
  }
  __device__ __forceinline__ void head(float (&x)[4], int n) const {
    spread(x, s.now.head[warp][n][lane]);
  }
  __device__ __forceinline__ void tail(float (&x)[4], int n) const {
    spread(x, s.now.tail[warp][n][lane]);
  }
  __device__ __forceinline__ void times_total(float (&f)[2], int n) const {
    const float2 t = s.now.total[warp][n][g];
    f[0] *= t.x, f[1] *= t.y;
  }
  // f[i] = the decay over groups [first, first+i); over (first+i, first+COUNT).
  template <int COUNT>
  __device__ __forceinline__ void totals_before(float (&f)[COUNT][2], int first) const {
    f[0][0] = f[0][1] = 1.f;
#pragma unroll
    for (int i = 1; i < COUNT; ++i) {
      f[i][0] = f[i - 1][0], f[i][1] = f[i - 1][1];
      times_total(f[i], first + i - 1);
    }
  }
  template <int COUNT>
  __device__ __forceinline__ void totals_after(float (&f)[COUNT][2], int first) const {
    f[COUNT - 1][0] = f[COUNT - 1][1] = 1.f;
#pragma unroll
    for (int i = COUNT - 2; i >= 0; --i) {
      f[i][0] = f[i + 1][0], f[i][1] = f[i + 1][1];
      times_total(f[i], first + i + 1);
    }
  }
  // Blocks [8,8] of dP (r[0], r[1]) and dM (r[2], r[3]): of rows i, columns j and j+1 for an even
  // j, as right operands [j,i]; of rows i and i+1, column j, as right operands [i,j].
  __device__ __forceinline__ void rows_of_scores(unsigned (&r)[4], int i, int j) const {
    load_matrices(r, s.now.dp.s + (score_row ^ 8 * j) + 512 * i);
  }
  __device__ __forceinline__ void columns_of_scores(unsigned (&r)[4], int i, int j) const {
    load_matrices_transposed(r, s.now.dp.s + (score_column ^ 8 * j) + 512 * i);
  }
  // x times f as half of a left operand.
  __device__ __forceinline__ static void pack(unsigned* a, const float (&x)[4],
                                              const float (&f)[4]) {
    a[0] = pack_bf16(x[0] * f[0], x[1] * f[1]), a[1] = pack_bf16(x[2] * f[2], x[3] * f[3]);
  }
  __device__ __forceinline__ static void scale(float (&x)[4], const float (&f)[2]) {
    x[0] *= f[0], x[1] *= f[0], x[2] *= f[1], x[3] *= f[1];
  }
  __device__ __forceinline__ static void add_product(float (&x)[4], const float (&f)[4],
                                                     const float (&y)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] += f[e] * y[e];
  }
  __device__ __forceinline__ static void multiply(float (&x)[4], const float (&f)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] *= f[e];
  }
  // Group n of f32 rows [tokens,HV,K] in memory.
  __device__ __forceinline__ void write(float* g_x, const float (&x)[4], int n) const {
    const ChannelItem& item = s.now.item;
    const int t = 8 * n + 2 * c, d = 16 * warp + g, channels = item.channels(p);
    const int64_t stride = p.gate_stride();
    float* to = g_x + item.gate_at(p) + t * stride + d;
    const bool inside = d < channels, inside8 = d + 8 < channels;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (t + e < item.span.rows) {
        if (inside) to[0] = x[e];
        if (inside8) to[8] = x[2 + e];
      }
      to += stride;
    }
  }
  // All groups, packed, to a tile [times, channels].
  __device__ __forceinline__ void put(SwizzledTile& x, const unsigned (&packed)[8][2]) const {
#pragma unroll
    for (int n = 0; n < 8; n += 2)
      store_matrices<true>(x.s + key_row + 512 * n,
                           {packed[n][0], packed[n][1], packed[n + 1][0], packed[n + 1][1]});
  }
  // Where the groups of warps hand sums to each other once the decays there are used up.
  __device__ __forceinline__ float4& from_rows(int n) const {
    return n % 2 ? s.now.tail[warp][n][lane] : s.now.head[warp][n][lane];
  }
  __device__ __forceinline__ float4& from_columns(int n) const {
    return n % 2 ? s.now.head[warp][n][lane] : s.now.tail[warp][n][lane];
  }
};

// Decays inside a group of 8 times.
struct GroupDecays {
  float alpha[4], other[2];  // of the lane's times; of its neighbour's two

  template <bool GATED>
  __device__ __forceinline__ GroupDecays(const WarpChannels<GATED>& w, int n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) alpha[e] = *w.at(w.s.g, n, e);
    other[0] = from_lane(alpha[0] * alpha[1], 1), other[1] = from_lane(alpha[2] * alpha[3], 1);
  }
  // Between each time and the middle of its half of the group; of the group.
  __device__ __forceinline__ void by4(float (&x)[4], bool odd_pair) const {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      x[e] = odd_pair ? alpha[e] : alpha[e + 1];
      x[e + 1] = odd_pair ? alpha[e] * alpha[e + 1] : 1.f;
    }
  }
  __device__ __forceinline__ void by8(float (&x)[4], int c) const {
    by4(x, c >> 1);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] *= c == 0 || c == 3 ? other[e / 2] : 1.f;
  }
};

// By the first four warps. 1 over tiles of V: S dO, S X; dv and dw.
struct RowProducts {
  float dq[8][4], db[8][4];  // db: p
  float sums[4] = {};        // v·X

  __device__ __forceinline__ RowProducts() {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[n][e] = db[n][e] = 0.f;
  }
  __device__ __forceinline__ void settle_all() { settle(dq), settle(db); }
  template <bool GATED>
  __device__ __forceinline__ void values(const Backward& p, const ChannelItem& item,
                                         const ChannelStage& stage, int v0) {
    const int warp = int(threadIdx.x) >> 5;
    warpgroup_begin();
    multiply_tiles<false, Inner::first, Inner::last>(dq, stage.state, stage.d_o, warp);
    multiply_tiles<false, Inner::first, Inner::last>(db, stage.state, stage.x, warp);
    warpgroup_commit();
    if (item.slab == 0 && (p.dv || p.dwrite || p.dbeta))
      value_gradients<GATED>(p, item.span, item.hv, v0, stage.x, sums);
  }
};

// 2 the decays. 3 dq and p through the state. 4 the tree. 5 dq, db, dg out.
template <bool GATED>
struct RowGradients : WarpChannels<GATED> {
  using Base = WarpChannels<GATED>;
  using Base::c, Base::g, Base::lane, Base::odd_pair, Base::p, Base::s, Base::second_half,
      Base::warp;
  float (&dq)[8][4];
  float (&db)[8][4];
  float dg[8][4] = {};    // first, in [0] and [2], what later groups add to all of the group
  unsigned packed[8][2];  // dq

  __device__ __forceinline__ RowGradients(const Backward& p, ChannelShared& s, RowProducts& x)
      : Base{p, s, thread_again()}, dq(x.dq), db(x.db) {}

  // Step 2; in place of g its exponentials.
  __device__ __forceinline__ void prepare(const float (&sums)[4], float beta) {
    constexpr float kLog2E = 1.4426950408889634f;
    const int t = this->thread;
    if (!GATED && t < 64) s.now.beta[t] = beta;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = sums[i] + from_lane(sums[i], 1);
      sum += from_lane(sum, 2);
      sum += from_lane(sum, 4);
      if (t % 8 == 0) s.now.value_part[t / 8 + 16 * i] = sum;
    }
#pragma unroll
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
      for (int e = 0; e < 4; ++e) dq[n][e] *= p.scale * f[e], db[n][e] *= -f[e];
      this->times_total(before, n);
    }
  }

  // z of the sums so far: of a time; of the lane's two times of each channel.
  __device__ __forceinline__ float term(const float (&q)[4], const float (&b)[4], int n,
                                        int e) const {
    return q[e] * dq[n][e] + b[e] * db[n][e];
  }
  __device__ __forceinline__ void add_terms(float (&sum)[2], int n) const {
    float q[4], k[4], b[4];
    this->group(q, s.q, n);
    this->group(k, s.k, n);
    this->erase(b, n);
    this->multiply(b, k);
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
    unsigned a[HALF / 2][4];
    this->template totals_after<HALF>(f, first);
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      float k[4], decay[4];
      this->group(k, s.k, first + i);
      this->tail(decay, first + i);
      this->scale(decay, f[i]);
      this->pack(a[i / 2] + i % 2 * 2, k, decay);
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
        mma(q, a[j], r[0], r[1]);
        mma(b, a[j], r[2], r[3]);
      }
      this->head(decay, n);
      this->scale(decay, f[i]);
      this->add_product(dq[n], decay, q);
      this->add_product(db[n], decay, b);
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
    mma_k8(b, a[0], a[1], dm);
    decay_to(to);
    this->add_product(dq[n], to, q);
    this->add_product(db[n], to, b);
  }
  // The last three levels, in group n, and the diagonal.
  __device__ __forceinline__ void inside(int n) {
    const GroupDecays decays(*this, n);
    unsigned r[4];
    this->rows_of_scores(r, n, n & ~1);
    const unsigned dp = r[n % 2], dm = r[2 + n % 2];  // [j,i]
    const bool in8 = g >= 4 && c < 2, in4 = (g & 2) && c == (g >> 2) * 2;
    float q[4], k[4], e[4], b[4], decay[4], later[2];
    this->group(q, s.q, n);
    this->group(k, s.k, n);
    this->erase(e, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = e[i] * k[i];
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
    const float2 below = s.now.below[4 * n + c];
    const float2 diagonal = *reinterpret_cast<const float2*>(s.now.diagonal + 8 * n + 2 * c);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {  // the pair of the lane's two times
      dg[n][i] = later[i / 2] + term(q, b, n, i) + term(q, b, n, i + 1);
      const float key = decays.alpha[i + 1] * k[i];
      dq[n][i + 1] += below.x * key, db[n][i + 1] += below.y * key;
      dg[n][i + 1] = later[i / 2] + term(q, b, n, i + 1);
      dq[n][i] += diagonal.x * k[i], dq[n][i + 1] += diagonal.y * k[i + 1];
    }
    finish(n, e, k);
  }
  // What is known of group n goes out; db becomes b∘p, for the other warps.
  __device__ __forceinline__ void finish(int n, const float (&erase)[4], const float (&k)[4]) {
    if (p.dq_terms) this->write(p.dq_terms, dq[n], n);
    packed[n][0] = pack_bf16(dq[n][0], dq[n][1]), packed[n][1] = pack_bf16(dq[n][2], dq[n][3]);
    float product[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) product[e] = k[e] * db[n][e];
    if (GATED && p.derase) this->write(p.derase, product, n);
    if (!GATED && p.dbeta) sum_key_part(product, n);
    this->multiply(db[n], erase);
  }
  // Of group n, Σ over the warp's channels of x = k·p.
  __device__ __forceinline__ void sum_key_part(const float (&x)[4], int n) const {
    const bool upper = lane & 16;
    const float first = x[0] + x[2], second = x[1] + x[3];
    float sum = (upper ? second : first) + from_lane(upper ? first : second, 16);
    sum += from_lane(sum, 8);
    sum += from_lane(sum, 4);
    if ((lane & 12) == 0) s.now.key_part[warp][8 * n + 2 * c + upper] = sum;
  }
  __device__ __forceinline__ void hand_over(int n) const {
    this->from_rows(n) = {db[n][0], db[n][1], db[n][2], db[n][3]};
  }

  // The lower half of the chunk first, which is then done with: nothing reads its sums.
  __device__ __forceinline__ void tree() {
    through_state();
    terms_of_upper<4>(0);
    terms_of_upper<2>(0);
    level<2>(0);
    pair(0);
    pair(2);
    level<4>(0);
    terms_of_upper<2>(4);
    level<2>(4);
    __syncthreads();  // the decays that from_rows() lies over are used up
#pragma unroll
    for (int n = 0; n < 4; ++n) hand_over(n);
    pair(4);
    pair(6);
#pragma unroll
    for (int n = 4; n < 8; ++n) hand_over(n);
    __syncthreads();
  }
  __device__ __forceinline__ void put_tile() { this->put(s.q, packed); }
  __device__ __forceinline__ void last() {
    if (!p.dg) return;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float other[4];
      this->spread(other, this->from_columns(n));
#pragma unroll
      for (int e = 0; e < 4; ++e) dg[n][e] += other[e];
      this->write(p.dg, dg[n], n);
    }
  }
};

// By the other four warps. 1 over tiles of V: dP, dM, D V', <S,D>.
struct ColumnProducts {
  float dp[8][4], dm[8][4], dk[8][4];  // dk: r
  float product[2][4] = {};            // S Dᵀ of the first and of the last 8 channels
  float sums[4];                       // unused

  __device__ __forceinline__ ColumnProducts() {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[n][e] = dm[n][e] = dk[n][e] = 0.f;
  }
  __device__ __forceinline__ void settle_all() { settle(dp), settle(dm), settle(dk); }
  template <bool GATED>
  __device__ __forceinline__ void values(const Backward&, const ChannelItem&,
                                         const ChannelStage& stage, int) {
    const Lane l;
    const int warp = (int(threadIdx.x) >> 5) & 3;
    warpgroup_begin();
    multiply_tiles<false, Inner::last, Inner::last>(dp, stage.d_o, stage.values, warp);
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

// 2 dP and dM, masked. 3 r through the state. 4 the tree. 5 dk, with b∘p from the other warps, and
// the part of dg for them.
template <bool GATED>
struct ColumnGradients : WarpChannels<GATED> {
  using Base = WarpChannels<GATED>;
  using Base::c, Base::g, Base::high, Base::low, Base::odd, Base::odd_pair, Base::p, Base::s,
      Base::second_half, Base::warp;
  ColumnProducts& x;
  float (&dk)[8][4];
  float dg[8][4] = {};  // first, in [0] and [2], what earlier groups add
  float carry[2];

  __device__ __forceinline__ ColumnGradients(const Backward& p, ChannelShared& s, ColumnProducts& x)
      : Base{p, s, thread_again()}, x(x), dk(x.dk) {}

  // Step 2.
  __device__ __forceinline__ void prepare(const float (&)[4], float) {
    if (c == g / 2) {
      s.now.carry[16 * warp + g] = g & 1 ? x.product[0][1] : x.product[0][0];
      s.now.carry[16 * warp + 8 + g] = g & 1 ? x.product[1][3] : x.product[1][2];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 16 * warp + g + 8 * (e >> 1), column = 8 * n + 2 * c + (e & 1);
        const float dp = p.scale * x.dp[n][e], dm = -x.dm[n][e];
        if (n % 2 == e >> 1 && n / 2 == warp) {
          if (column == row) s.now.diagonal[row] = dp;
          if (e % 2 == 0 && column + 1 == row) s.now.below[column / 2] = {dp, dm};
        }
        x.dp[n][e] = column < row ? dp : 0.f, x.dm[n][e] = column < row ? dm : 0.f;
      }
    unsigned a[4][4];
    values_as_left(a, x.dp);
    put_rows(s.now.dp, a);
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
      this->pack(qa[i / 2] + at, q, decay);
      this->pack(ba[i / 2] + at, b, decay);
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
        mma(k, ba[j], r[2], r[3]);
      }
      this->tail(decay, n);
      this->scale(decay, f[i]);
      this->add_product(dk[n], decay, k);
    }
  }
  __device__ __forceinline__ void operands(float (&q)[4], float (&b)[4], int n) const {
    float k[4];
    this->group(q, s.q, n);
    this->group(k, s.k, n);
    this->erase(b, n);
    this->multiply(b, k);
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
    this->pack(qa, q, decay);
    this->pack(ba, b, decay);
    float k[4] = {}, from[4];
    mma_k8(k, qa[0], qa[1], dp);
    mma_k8(k, ba[0], ba[1], dm);
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
    this->group(q, s.q, n);
    this->group(k, s.k, n);
    this->erase(b, n);
    this->multiply(b, k);
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
    const float2 below = s.now.below[4 * n + c];
    const float2 diagonal = *reinterpret_cast<const float2*>(s.now.diagonal + 8 * n + 2 * c);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {  // the pair of the lane's two times
      dg[n][i] = earlier[i / 2];
      dg[n][i + 1] = earlier[i / 2] + term(i);
      dk[n][i] += decays.alpha[i + 1] * (below.x * q[i + 1] + below.y * b[i + 1]);
      dk[n][i] += diagonal.x * q[i], dk[n][i + 1] += diagonal.y * q[i + 1];
    }
  }

  // The upper half of the chunk first.
  __device__ __forceinline__ void tree() {
    through_state();
    terms_of_lower<4>(0);
    terms_of_lower<2>(4);
    level<2>(4);
    pair(6);
    pair(4);
    level<4>(0);
    terms_of_lower<2>(0);
    level<2>(0);
    __syncthreads();
    pair(2);
    pair(0);
    __syncthreads();
  }
  __device__ __forceinline__ void put_tile() {
    unsigned packed[8][2];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float other[4];
      this->spread(other, this->from_rows(n));
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] += other[e];
      if (p.dk_terms) this->write(p.dk_terms, dk[n], n);
      packed[n][0] = pack_bf16(dk[n][0], dk[n][1]), packed[n][1] = pack_bf16(dk[n][2], dk[n][3]);
      this->from_columns(n) = {dg[n][0], dg[n][1], dg[n][2], dg[n][3]};
    }
    this->put(s.k, packed);
  }
  __device__ __forceinline__ void last() {  // dβ, a thread a time
    const ChannelScores& y = s.now;
    const int t = this->thread - kThreads / 2;
    if (!p.dbeta || t >= y.item.span.rows) return;
    p.dbeta[(y.item.slab * p.tokens + y.item.span.first + t) * p.value_heads + y.item.hv] =
        y.value_part[t] + y.key_part[0][t] + y.key_part[1][t] + y.key_part[2][t] + y.key_part[3][t];
  }
};

// Four warps' way through an item. All eight meet at the barriers.
template <bool GATED, class Products, template <bool> class Gradients>
__device__ __forceinline__ void run(const Backward& p, const ChannelItem& item, int64_t first,
                                    ChannelShared& s) {
  float beta = 0;
  if (!GATED && int(threadIdx.x) < item.span.rows)
    beta = p.beta[(item.span.first + threadIdx.x) * p.value_heads + item.hv];
  Products x;
  x.settle_all();
  for (int v0 = 0; v0 < p.value_dim; v0 += 64) {
    const int i = v0 / 64 % 2;
    if (i == 0 && v0 > 0) {
      __syncthreads();
      fetch_stages(p, ChannelItem(p, first + block_again()), v0, s);
      commit_copies();
    }
    if (i == 0)
      wait_copy_groups<1>();
    else
      wait_copy_groups<0>();
    publish_tiles();
    __syncthreads();
    x.template values<GATED>(p, item, s.stage[i], v0);
    warpgroup_wait<0>();
    x.settle_all();
  }
  wait_copy_groups<0>();
  __syncthreads();
  if (GATED)
    s.now.erase.fetch(p.erase + item.gate_at(p), p.gate_stride(), item.span.rows, item.channels(p));
  commit_copies();
  if (threadIdx.x == 0) s.now.item = item;
  Gradients<GATED> side(p, s, x);
  side.prepare(x.sums, beta);
  wait_copy_groups<0>();
  __syncthreads();
  side.tree();
  side.put_tile();
  __syncthreads();
  side.last();
}

// Block `first` + blockIdx.x of all: item (chunk, head, slab of 64 channels). No loop over items:
// the compiler would keep what all of them share in registers.
template <bool GATED>
__global__ void __launch_bounds__(kThreads, 2) gradient_kernel(Backward p, int64_t first) {
  auto& s = swizzled_shared<ChannelShared>();
  const ChannelItem item(p, first + blockIdx.x);
  if (item.span.rows == 0) return;
  fetch_stages(p, item, 0, s);
  fetch_keys(p, item, s);
  commit_copies();
  if (threadIdx.x < kThreads / 2)
    run<GATED, RowProducts, RowGradients>(p, item, first, s);
  else
    run<GATED, ColumnProducts, ColumnGradients>(p, item, first, s);
  const TilePlace at(thread_again());
  const ChannelItem& now = s.now.item;
  const int rows = now.span.rows, cols = now.channels(p);
  if (p.dq) at.store(p.dq + now.key_at(p), p.key_stride(), s.q, rows, cols);
  if (p.dk) at.store(p.dk + now.key_at(p), p.key_stride(), s.k, rows, cols);
}

}  // namespace

void channel_fast_gradients(const FastChannelBackward& p, cudaStream_t stream) {
  const int64_t items = p.chunks * p.value_heads * ((p.key_dim + 63) / 64);
  constexpr int64_t kMost = (int64_t(1) << 31) - 1;
  for (int64_t first = 0; first < items; first += kMost)
    launch_fast<ChannelShared>(p.erase ? gradient_kernel<true> : gradient_kernel<false>, kThreads,
                               grid_of(items - first), stream, p, first);
}

}  // namespace ebb::gpu::delta
