// How a warp of delta_fast_channel_gradients.cu holds its 16 channels: accumulators [channels,
// times] of mma m16n8k16, a lane with channels g, g+8 and times 2c, 2c+1 of each group of 8, as g,
// c are in cuda/delta_fast.cuh. Accumulators then have the layout of left operands.
#pragma once
#include "cuda/delta_channel_block.cuh"

namespace ebb::gpu::delta {

__device__ __forceinline__ float from_lane(float x, int xor_mask) {
  return __shfl_xor_sync(0xffffffffu, x, xor_mask);
}
// Read anew: what was derived from them before need not stay in registers.
__device__ __forceinline__ int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
// Arrays of 4: a lane's values of one group, times 2c, 2c+1 of channel g, then of g+8.
template <bool GATED, class P>
struct WarpChannels {
  static constexpr bool kErases = !kPlain<P>;
  const P& p;
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
  // Halves of a chunk, four groups each, and pairs of groups in a half are gone through by the same
  // code, or the instruction cache would not hold it: the arrays of the second one take the
  // registers of the first, and group n of registers is group n ^ half ^ pair of the chunk.
  int half_flip = 0, pair_flip = 0;  // 0 or 4, 0 or 2

  __device__ __forceinline__ int place(int n) const {
    return n + (n & 4 ? -half_flip : half_flip) + (n & 2 ? -pair_flip : pair_flip);
  }
  // Groups n and n ^ BY of registers trade places.
  template <int BY, class T, int N>
  __device__ __forceinline__ static void swap_groups(T (&x)[8][N], int first, int last) {
#pragma unroll
    for (int n = first; n < last; ++n) {
      if (n & BY) continue;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const T y = x[n][e];
        x[n][e] = x[n + BY][e], x[n + BY][e] = y;
      }
    }
  }

  // Groups n and n+1 of a tile [times, channels] as a left operand [channels, times].
  __device__ __forceinline__ void load(unsigned (&r)[4], const SwizzledTile& x, int n) const {
    load_matrices_transposed(r, x.s + key_row + 512 * place(n));
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
    return x.s + (e < 2 ? float_at : float_at ^ 8) + 512 * place(n) + 64 * (e & 1);
  }
  __device__ __forceinline__ void erase(float (&b)[4], int n) const {
    if constexpr (GATED) {
#pragma unroll
      for (int e = 0; e < 4; ++e) b[e] = *at(s.now.erase, n, e);
    } else {
      const float2 beta = *reinterpret_cast<const float2*>(s.now.beta + 8 * place(n) + 2 * c);
      b[0] = b[2] = beta.x, b[1] = b[3] = beta.y;
    }
  }
  __device__ __forceinline__ void head(float (&x)[4], int n) const {
    spread(x, s.now.head[warp][place(n)][lane]);
  }
  __device__ __forceinline__ void tail(float (&x)[4], int n) const {
    spread(x, s.now.tail[warp][place(n)][lane]);
  }
  __device__ __forceinline__ void times_total(float (&f)[2], int n) const {
    const float2 t = s.now.total[warp][place(n)][g];
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
    load_matrices(r, s.now.dp.s + (score_row ^ 8 * place(j)) + 512 * place(i));
  }
  __device__ __forceinline__ void columns_of_scores(unsigned (&r)[4], int i, int j) const {
    load_matrices_transposed(r, s.now.dp.s + (score_column ^ 8 * place(j)) + 512 * place(i));
  }
  // x times f as half of a left operand.
  __device__ __forceinline__ static void pack(unsigned* a, const float (&x)[4],
                                              const float (&f)[4]) {
    a[0] = pack_bf16(x[0] * f[0], x[1] * f[1]), a[1] = pack_bf16(x[2] * f[2], x[3] * f[3]);
  }
  // What rounding has cut off such a half, a.
  __device__ __forceinline__ static void pack_rest(unsigned* rest, const unsigned* a,
                                                   const float (&x)[4], const float (&f)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      rest[h] = pack_bf16(x[2 * h] * f[2 * h] - low_half(a[h]),
                          x[2 * h + 1] * f[2 * h + 1] - high_half(a[h]));
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
    const int t = 8 * place(n) + 2 * c, d = 16 * warp + g, channels = item.channels(p);
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
      store_matrices<true>(x.s + key_row + 512 * place(n),
                           {packed[n][0], packed[n][1], packed[n + 1][0], packed[n + 1][1]});
  }
  // Where the groups of warps hand sums to each other once the decays there are used up.
  __device__ __forceinline__ float4& from_rows(int n) const {
    return n % 2 ? s.now.tail[warp][place(n)][lane] : s.now.head[warp][place(n)][lane];
  }
  __device__ __forceinline__ float4& from_columns(int n) const {
    return n % 2 ? s.now.head[warp][place(n)][lane] : s.now.tail[warp][place(n)][lane];
  }
};

// Decays inside a group of 8 times.
struct GroupDecays {
  float alpha[4], other[2];  // of the lane's times; of its neighbour's two

  template <bool GATED, class P>
  __device__ __forceinline__ GroupDecays(const WarpChannels<GATED, P>& w, int n) {
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

}  // namespace ebb::gpu::delta
