// Shared by dplr_fast_gradients.cu, whose head has the formulas, and dplr_steep_gradients.cu: what
// of a chunk lies in shared memory, and what two groups of warps make of it, one of the rows of the
// scores' gradients and one of their columns. Shared is a GradientTiles and has `centred`, `kept`
// and `carry`; PARTS = 4: `inside`, the gradients of scores inside a part.
#pragma once
#include "cuda/dplr_chunk.cuh"

namespace ebb::gpu::low_rank {

inline constexpr int kSumRow = 72;  // f32 rows of 64, padded

struct Values {
  SwizzledTile d_o, v, state, dstate;  // the states as [V,K]
  SwizzledTile y, z;                   // first what the inverse multiplies
};
struct Scores {
  SwizzledTile pv, py, mv, my;
};
template <class Sums>
struct GradientTiles {
  CentredTiles in;  // at the end dr, da, dk, db
  union {
    Values values;
    Scores scores;
    Sums sums;
  };
  union {
    SwizzledTile inverse, dv;
    SwizzledTile low_pv;  // once dV is stored: what rounding took of dP_v
  };
};
template <class Shared>
__device__ __forceinline__ void fetch_values(const FastProblem& p, Span span, int64_t chunk,
                                             int head, Shared& s) {
  const TilePlace at;
  const int64_t value = p.value_at(span.first, head), tile = p.tile_at(chunk, head);
  at.fetch(s.values.d_o, p.d_o + value, p.value_stride(), span.rows, p.value_dim);
  at.fetch(s.values.v, p.v + value, p.value_stride(), span.rows, p.value_dim);
  fetch_whole(s.values.state, p.chunk_states[tile]);
  fetch_whole(s.values.dstate, p.dstates[tile]);
  fetch_whole(s.inverse, p.inverse[tile]);
}

// <S,D> by channel: a thread's two of them, over an eighth of the columns of V.
template <class Shared>
__device__ __forceinline__ void add_carry(float2& sum, const Shared& s) {
  const int d = 2 * (int(threadIdx.x) & 31), part = int(threadIdx.x) >> 5;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto pair = [&](const SwizzledTile& tile) {
      return pair_of(*reinterpret_cast<const unsigned*>(tile.at(8 * part + i, d & ~7) + (d & 7)));
    };
    const float2 x = times(pair(s.values.state), pair(s.values.dstate));
    sum.x += x.x, sum.y += x.y;
  }
}
template <class Shared>
__device__ __forceinline__ void put_carry(float2 sum, Shared& s) {
  const int d = 2 * (int(threadIdx.x) & 31), part = int(threadIdx.x) >> 5;
  *reinterpret_cast<float2*>(&s.carry[part][d]) = sum;
}
template <class Shared>
__device__ __forceinline__ void write_carry(Shared& s) {
  float2 sum = {};
  add_carry(sum, s);
  put_carry(sum, s);
}

// What a warp makes of its 16 rows, tokens i (by rows) or j (by columns).
// LOW: with what rounding took of dP_v, of which dr and dk mostly consist.
template <int PARTS, class Shared, bool LOW = false>
struct Side {
  float x[8][4], y[8][4];              // x_r and x_a; x_k and x_b
  unsigned first[4][4], second[4][4];  // dP_v and dM_v; dP_y and dM_y

  // By rows: scores with V; dO S and Z S, decayed from the start to the first centre.
  __device__ __forceinline__ void rows(Shared& s, const Place& at) {
    const Lane& l = at.l;
    const int warp = at.warp;
    scores(s, s.values.v, 0, warp, l);
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::first>(x, s.values.d_o, s.values.state, warp);
    multiply_tiles<true, Inner::last, Inner::first>(y, s.values.z, s.values.state, warp);
    finish_state(s.centred.from_start[0], l);
  }
  // By columns: scores with Y; V Dᵀ and Y Dᵀ, decayed from the last centre to the end.
  __device__ __forceinline__ void columns(Shared& s, const Place& at) {
    const Lane& l = at.l;
    const int warp = at.warp;
    scores(s, s.values.y, 1, warp, l);
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::first>(x, s.values.v, s.values.dstate, warp);
    multiply_tiles<true, Inner::last, Inner::first>(y, s.values.y, s.values.dstate, warp);
    finish_state(s.centred.to_end[1], l);
    sum_kept(s, warp, l);
  }
  __device__ __forceinline__ void scores(Shared& s, const SwizzledTile& values, int which, int warp,
                                         const Lane& l) {
    score(s.values.d_o, values, warp);
    keep<Triangle::lower>(x, 16 * warp, l);
    if constexpr (PARTS == 4) take_inside(s, which, warp, l);
    values_as_left(first, x);
    if constexpr (LOW)
      if (which == 0) put_rest(s.low_pv, x, first, 16 * warp, l);
    score(s.values.z, values, warp);
    keep<Triangle::below>(x, 16 * warp, l);
    if constexpr (PARTS == 4) take_inside(s, 2 + which, warp, l);
    values_as_left(second, x);
  }
  // The block of the warp's own part, which is summed apart.
  __device__ __forceinline__ void take_inside(Shared& s, int which, int warp, const Lane& l) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (n / 2 != warp) continue;
        s.inside[warp][l.g + 8 * (e >> 1)][8 * (n % 2) + 2 * l.c + (e & 1)][which] = x[n][e];
        x[n][e] = 0.f;
      }
  }
  __device__ __forceinline__ void score(const SwizzledTile& left, const SwizzledTile& values,
                                        int warp) {
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::last>(x, left, values, warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x);
  }
  // PARTS = 4: what they refer to is where the sums over parts begin.
  __device__ __forceinline__ void finish_state(const float* s_decay, const Lane& l) {
    finish_products();
    decay_state(s_decay, l);
  }
  __device__ __forceinline__ void decay_state(const float* s_decay, const Lane& l) {
    if (PARTS == 4) return;
    scale_columns(x, s_decay, l);
    scale_columns(y, s_decay, l);
  }
  __device__ __forceinline__ void finish_products() {
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x), settle(y);
  }
  // Of K∘x + B∘y so far, sums over the warp's rows.
  __device__ __forceinline__ void sum_kept(Shared& s, int warp, const Lane& l) const {
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
      if constexpr (PARTS == 2) {
        if (warp < 2)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            sum = times(sum,
                        *reinterpret_cast<const float2*>(s.centred.between[h] + 8 * n + 2 * l.c));
      }
      if constexpr (PARTS == 4)
        sum =
            times(sum, *reinterpret_cast<const float2*>(s.centred.to_end[warp] + 8 * n + 2 * l.c));
      if (l.g == 0) *reinterpret_cast<float2*>(&s.kept[warp][8 * n + 2 * l.c]) = sum;
    }
  }

  // Inner indices [16 FIRST, 16 LAST) of the products with the score gradients.
  template <int FIRST, int LAST>
  __device__ __forceinline__ void add_rows(const Shared& s, int warp) {
    constexpr Inner kA = Inner::last, kB = Inner::first;
    settle(x), settle(y);
    warpgroup_begin();
    multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.scores.pv, s.in.k, warp);
    if constexpr (LOW) multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.low_pv, s.in.k, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.scores.py, s.in.b, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(y, s.scores.mv, s.in.k, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(y, s.scores.my, s.in.b, warp);
    finish_products();
  }
  template <int FIRST, int LAST>
  __device__ __forceinline__ void add_columns(const Shared& s, int warp) {
    constexpr Inner kA = Inner::first, kB = Inner::first;
    settle(x), settle(y);
    warpgroup_begin();
    multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.scores.pv, s.in.r, warp);
    if constexpr (LOW) multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.low_pv, s.in.r, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(x, s.scores.mv, s.in.a, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(y, s.scores.py, s.in.r, warp);
    multiply_tiles<false, kA, kB, FIRST, LAST>(y, s.scores.my, s.in.a, warp);
    finish_products();
  }
  // What has been summed so far lies in the other half, if the warp's rows are of half `mine`.
  __device__ __forceinline__ void cross(const Shared& s, int warp, int mine, const Lane& l) {
    if (warp / 2 != mine) return;
    scale_between(x, s.centred, l);
    scale_between(y, s.centred, l);
  }
  // PARTS = 4: what has been summed so far lies on the far side of a part, if the warp's rows do.
  __device__ __forceinline__ void pass(const Shared& s, int part, bool far, const Lane& l) {
    if (!far) return;
    scale_columns(x, s.centred.over[part], l);
    scale_columns(y, s.centred.over[part], l);
  }
  __device__ __forceinline__ void add_to_rows(const Shared& s, const Place& at) {
    const Lane& l = at.l;
    const int warp = at.warp;
    if constexpr (PARTS == 1) {
      add_rows<0, 4>(s, warp);
    } else if constexpr (PARTS == 2) {
      add_rows<0, 2>(s, warp);
      cross(s, warp, 1, l);
      add_rows<2, 4>(s, warp);
    } else {
      pass(s, 0, warp > 0, l);
      add_rows<0, 1>(s, warp);
      pass(s, 1, warp > 1, l);
      add_rows<1, 2>(s, warp);
      pass(s, 2, warp > 2, l);
      add_rows<2, 3>(s, warp);
    }
  }
  __device__ __forceinline__ void add_to_columns(const Shared& s, const Place& at) {
    const Lane& l = at.l;
    const int warp = at.warp;
    if constexpr (PARTS == 1) {
      add_columns<0, 4>(s, warp);
    } else if constexpr (PARTS == 2) {
      add_columns<2, 4>(s, warp);
      cross(s, warp, 0, l);
      add_columns<0, 2>(s, warp);
    } else {
      pass(s, 3, warp < 3, l);
      add_columns<3, 4>(s, warp);
      pass(s, 2, warp < 2, l);
      add_columns<2, 3>(s, warp);
      pass(s, 1, warp < 1, l);
      add_columns<1, 2>(s, warp);
    }
  }

  __device__ __forceinline__ void put_scores(SwizzledTile& p, SwizzledTile& m,
                                             const Place& at) const {
    put_rows(p, first, 16 * at.warp, at.l);
    put_rows(m, second, 16 * at.warp, at.l);
    publish_tiles();
  }

  // R∘x_r and A∘x_a to the sums; then dr and da in place of R and A.
  __device__ __forceinline__ void finish_rows(Shared& s, float scale, const Place& place) {
    const Lane& l = place.l;
    const int m0 = 16 * place.warp;
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
        const int from = PARTS == 2 && i == 32 ? at + 33 * kSumRow : at;  // the row before
        const float2 earlier = *reinterpret_cast<const float2*>(s.up + from);
        const float2 now = *reinterpret_cast<const float2*>(s.up + at + kSumRow);
        x0 *= scale * now.x, x1 *= scale * now.y;
        y0 *= earlier.x, y1 *= earlier.y;
      }
    __syncwarp();
    put_rows(s.in.r, x, m0, l);
    put_rows(s.in.a, y, m0, l);
  }
  // dk and db in place of K and B; x keeps K∘x_k + B∘x_b.
  __device__ __forceinline__ void finish_columns(Shared& s, const Place& place) {
    const Lane& l = place.l;
    const int m0 = 16 * place.warp;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = m0 + l.g + 8 * half, at = (j + 1) * kSumRow + 8 * n + 2 * l.c;
        const float2 k = pair_at(s.in.k, m0, n, half, l), b = pair_at(s.in.b, m0, n, half, l);
        const float2 up = *reinterpret_cast<const float2*>(s.up + at);
        const float2 down = {reciprocal(up.x), reciprocal(up.y)};
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
  __device__ __forceinline__ void subtract_columns(Shared& s, const Place& at) const {
    const Lane& l = at.l;
    const int warp = at.warp;
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

// dr, da, dk, db from where the keys were.
template <class P, class Shared>
__device__ __forceinline__ void store_key_gradients(const P& p, const Shared& s, Span span,
                                                    int head, const TilePlace& at) {
  const int64_t stride = p.key_stride(), key = p.key_at(span.first, head) + at.r * stride + at.c;
  const bool valid = at.r < span.rows && at.c < p.key_dim;
  const bool valid32 = at.r + 32 < span.rows && at.c < p.key_dim;
  const int offset = int(s.in.r.at(at.r, at.c) - s.in.r.s);
  const auto store = [&](bf16_t* g, const SwizzledTile& tile) {
    if (!g) return;
    const auto put = [&](bf16_t* to, int from) {
      store_word(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(tile.s + from));
    };
    if (valid) put(g + key, offset);
    if (valid32) put(g + key + 32 * stride, offset + 32 * 64);
  };
  store(p.dr, s.in.r), store(p.da, s.in.a), store(p.dk, s.in.k), store(p.db, s.in.b);
}
// And dV.
template <class Shared>
__device__ __forceinline__ void store_gradients(const FastProblem& p, const Shared& s, Span span,
                                                int head) {
  const TilePlace at(thread_again());
  store_key_gradients(p, s, span, head, at);
  if (p.dv)
    at.store(p.dv + p.value_at(span.first, head), p.value_stride(), s.dv, span.rows, p.value_dim);
}

// Sums over the tokens after, a thread with 16 of one channel. s.carry and s.kept have their parts.
// from_zero: the first token has nothing to decay, and sums that cancel would leave their rounding.
template <int PARTS, class P, class Shared>
__device__ __forceinline__ void write_decay_gradients(const P& p, Shared& s, Span span, int head,
                                                      bool from_zero) {
  const int thread = thread_again(), d = thread & 63, part = thread >> 6, row = 16 * part;
  float all = s.centred.from_start[0][d] * s.centred.to_end[0][d], carry = 0;
  if constexpr (PARTS == 4) all *= s.centred.over[0][d];
#pragma unroll
  for (int i = 0; i < 8; ++i) carry += s.carry[i][d];
  all = all * carry + (s.kept[0][d] + s.kept[1][d] + s.kept[2][d] + s.kept[3][d]);
  float until[16], before[16], own = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    until[i] = s.sums.until[(row + i) * kSumRow + d],
    before[i] = s.sums.before[(row + i) * kSumRow + d];
    own += until[i] + before[i];
  }
  __syncthreads();  // the parts have been read
  s.carry[part][d] = own;
  __syncthreads();
  for (int later = 3; later > part; --later) all += s.carry[later][d];
  if (!p.dw || d >= p.key_dim) return;
  const int64_t stride = p.key_stride() * int64_t(sizeof(float));
  char* g_dw = reinterpret_cast<char*>(p.dw + p.key_at(span.first + row, head) + d) + 15 * stride;
  const int rows = span.rows - row;
#pragma unroll
  for (int i = 15; i >= 0; --i, g_dw -= stride) {
    all += until[i];
    const float x = i == 0 && row == 0 && from_zero ? 0 * all : all;  // NaN stays
    if (i < rows) *reinterpret_cast<float*>(g_dw) = x;
    all += before[i];
  }
}

}  // namespace ebb::gpu::low_rank
