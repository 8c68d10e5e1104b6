// What delta_fast_channel_gradients.cu keeps in shared memory for one chunk, head and slab of 64
// channels, how it gets there, and the gradients of v and w, which need no decay.
#pragma once
#include "cuda/delta_channel_logits.cuh"
#include "cuda/delta_fragments.cuh"
#include "cuda/meet.cuh"

namespace ebb::gpu::delta {

using FastChannelBackward = ChannelBackward<bf16_t>;
// Of a problem that erases nothing: X is dv, which the reverse scan has written.
struct PlainChannelBackward : FastChannelBackward {};
template <class P>
inline constexpr bool kPlain = std::is_same_v<P, PlainChannelBackward>;

inline constexpr int kGradientThreads = 256;
// Where the two groups of warps of the gradients wait for one another.
template <int GROUP>
__device__ __forceinline__ void meet() {
  barrier_meet<GROUP, kGradientThreads / 2, kGradientThreads / 2>(8);
}

// f32 [64 times, 64 channels], read where lanes hold accumulators [channels, times]: channel c of
// time t lies at c ^ 8·(t/2 mod 4), so that the 32 values of a warp are in 32 banks.
struct alignas(16) FloatTile {
  float s[64 * 64];

  __device__ __forceinline__ float* at(int t, int c) {
    return s + t * 64 + (c ^ ((t >> 1) & 3) << 3);
  }
  // By 256 threads; zeros around the chunk and the slab.
  __device__ __forceinline__ void fetch(const float* g, int64_t stride, int rows, int cols) {
    const int r = int(threadIdx.x) / 16, c = int(threadIdx.x) % 16 * 4;
    float* to = at(r, c);
    const float* from = g + r * stride + c;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool valid = r + 16 * i < rows && c < cols;
      copy_async_or_zero(to + 16 * i * 64, valid ? from + 16 * i * stride : g, valid);
    }
  }
};

// What a block works on: a chunk, a head, 64 channels.
struct ChannelItem {
  Span span;
  int64_t chunk;
  int hv, slab;

  // Of block (head and slab, chunk − first).
  __device__ __forceinline__ ChannelItem(const FastChannelBackward& p, int64_t first, unsigned x,
                                         unsigned y) {
    const int bits = (p.key_dim > 64) + (p.key_dim > 128);  // of a slab's number
    chunk = first + y, hv = int(x) >> bits, slab = int(x) & ((1 << bits) - 1);
    span = span_of(p, chunk);
  }
  // Of the slab's first channel.
  template <class P>
  __device__ __forceinline__ int64_t key_at(const P& p) const {
    return p.key_at(span.first, hv) + 64 * slab;
  }
  __device__ __forceinline__ int64_t gate_at(const FastChannelBackward& p) const {
    return p.gate_at(span.first, hv) + 64 * slab;
  }
  __device__ __forceinline__ int channels(const FastChannelBackward& p) const {
    return p.key_dim - 64 * slab;  // more than 64 where another slab follows
  }
};

struct ChannelStage {                          // 64 columns of V
  SwizzledTile d_o, x, values, state, dstate;  // the states as [V,K]
};
// After the products with V. Times are in groups of 8; [warp][group]: the 16 channels of a warp.
struct ChannelScores {
  SwizzledTile dp, dm;                    // dP, dM below the diagonal [i,j]; where nothing is
                                          // erased dP and what rounding has cut off it
  float4 head[4][8][32], tail[4][8][32];  // decay from a group's start through t; from t on to its
                                          // end; by lane, as accumulators
  FloatTile erase;                        // b, where it is a gate by channel
  float2 total[4][8][8];                  // of a group, of channels g and g+8
  float beta[64];                         // b, where it is not
  float diagonal[64];                     // dP_tt
  float2 below[32];                       // dP_ij, dM_ij of i = 2m+1, j = 2m
  float carry[64];                        // <S, D> by channel
  float value_part[64], key_part[4][64];  // of dβ: v·X; k·p over a warp's channels
  ChannelItem item;                       // here, so that it takes no registers
  SwizzledTile raw;                       // logits of b, then the gradients of b
};
struct ChannelShared {
  union {
    ChannelStage stage[2];
    ChannelScores now;
  };
  SwizzledTile q, k;  // at the end dq, dk
  FloatTile g;        // then e^g

  __device__ __forceinline__ SwizzledTile& raw_decays() {
    return *reinterpret_cast<SwizzledTile*>(&g);
  }
};
static_assert(sizeof(ChannelScores) <= 2 * sizeof(ChannelStage));
static_assert(2 * (sizeof(ChannelShared) + 1024) <= 228 * 1024);  // two blocks per multiprocessor

template <class P>
__device__ __forceinline__ void fetch_values(const P& p, const ChannelItem& item, int v0,
                                             ChannelStage& s) {
  const TilePlace at;
  const Span span = item.span;
  const int cols = p.value_dim - v0, keys = item.channels(p);
  const int64_t row = p.row_at(span.first, item.hv) * p.value_dim + v0;
  const int64_t state = p.state_at(item.chunk, item.hv) + int64_t(v0) * p.key_dim + 64 * item.slab;
  at.fetch(s.d_o, p.d_o + p.value_at(span.first, item.hv) + v0, p.value_stride(), span.rows, cols);
  at.fetch(s.values, p.values + row, p.value_dim, span.rows, cols);
  if constexpr (!kPlain<P>) at.fetch(s.x, p.x + row, p.value_dim, span.rows, cols);
  at.fetch(s.state, p.states + state, p.key_dim, cols, keys);
  at.fetch(s.dstate, p.dstates + state, p.key_dim, cols, keys);
}
// The item's rows of logits by channel of K.
__device__ __forceinline__ const bf16_t* raw_at(const FastChannelBackward& p,
                                                const ChannelItem& item, const bf16_t* g,
                                                int64_t step) {
  return g + item.span.first * step + int64_t(item.hv) * p.key_dim + 64 * item.slab;
}
// Two stages, each a group of copies; nothing where V ends.
template <class P>
__device__ __forceinline__ void fetch_stages(const P& p, const ChannelItem& item, int v0,
                                             ChannelShared& s) {
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (v0 + 64 * i < p.value_dim) fetch_values(p, item, v0 + 64 * i, s.stage[i]);
    if (i == 0) commit_copies();
  }
}
// Raw decays come as a tile of bf16 to where their exponentials will be.
template <class P>
__device__ __forceinline__ void fetch_keys(const P& p, const ChannelItem& item, ChannelShared& s) {
  const TilePlace at;
  at.fetch(s.q, p.q + item.key_at(p), p.key_stride(), item.span.rows, item.channels(p));
  at.fetch(s.k, p.k + item.key_at(p), p.key_stride(), item.span.rows, item.channels(p));
  if constexpr (kOfLogits<P>)
    if (p.decays)
      return at.fetch(s.raw_decays(), raw_at(p, item, p.decays, p.decay_step), p.decay_step,
                      item.span.rows, item.channels(p));
  s.g.fetch(p.g + item.gate_at(p), p.gate_stride(), item.span.rows, item.channels(p));
}

// Whether gradients of the logits of β or w are wanted.
template <class P>
__device__ __forceinline__ bool raw_gradients(const P& p) {
  if constexpr (kOfLogits<P>) return p.dwrites || p.dstrengths;
  return false;
}
// β of row `row` of a chunk, as the first kernel of the backward pass has made it.
__device__ __forceinline__ float made_strength(const LogitChannelBackward& p, int64_t chunk, int hv,
                                               int row) {
  return p.total[p.total_at(chunk, hv) + p.key_dim + row];
}
// The gradients of v and of the logits of w, one row of eight columns.
__device__ __forceinline__ void raw_write_gradients(const LogitChannelBackward& p, int64_t token,
                                                    int hv, int column, const bf16_t* s_x) {
  const Eight v(load_eight(p.v + p.v_at(token, hv) + column));
  const Eight w(load_eight(p.writes + token * p.write_step + int64_t(hv) * p.value_dim + column));
  const Eight x(load_eight(s_x));
  float dv[8], dw[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float2 s = sigmoids(w.at(e));
    dv[e] = s.x * x.at(e);
    dw[e] = s.x * s.y * v.at(e) * x.at(e);
  }
  const int64_t dwrite = p.value_at(token, hv) + column;
  if (p.dv)
    store_word(reinterpret_cast<uint4*>(p.dv + p.dv_at(token, hv) + column), pack_eight(dv));
  if (p.dwrites) store_word(reinterpret_cast<uint4*>(p.dwrites + dwrite), pack_eight(dw));
}

// β of row `row` of a chunk, or 1.
template <class P>
__device__ __forceinline__ float strength_of(const P& p, Span span, int64_t chunk, int hv,
                                             int row) {
  if constexpr (kOfLogits<P>)
    return made_strength(p, chunk, hv, row);
  else
    return p.write_strength(span.first + row, hv);
}
// value_gradients of β, in a loop: there is little room for more code (see make_decays in
// delta_channel_rows.cuh). After four steps every sum is back in its place.
template <class P>
__device__ __forceinline__ void strength_gradients(const P& p, Span span, int64_t chunk, int hv,
                                                   int column, int r0, int c,
                                                   const SwizzledTile& s_x, float (&sums)[4]) {
#pragma unroll 1
  for (int r = r0; r < 64; r += 32) {
    uint4 v[2] = {};
    float w[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (r + 16 * i >= span.rows) continue;
      v[i] = load_eight(p.v + p.v_at(span.first + r + 16 * i, hv) + column);
      w[i] = strength_of(p, span, chunk, hv, r + 16 * i);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Eight x(load_eight(s_x.at(r + 16 * i, c))), y(v[i]);
      float dv[8], sum = sums[i];
#pragma unroll
      for (int e = 0; e < 8; ++e) dv[e] = w[i] * x.at(e), sum += y.at(e) * x.at(e);
      sums[i] = sums[i + 2], sums[i + 2] = sum;
      if (p.dv && r + 16 * i < span.rows)
        store_word(reinterpret_cast<uint4*>(p.dv + p.dv_at(span.first + r + 16 * i, hv) + column),
                   pack_eight(dv));
    }
  }
}

// The gradients of v and w, one row of eight columns.
__device__ __forceinline__ void write_gradients(const FastChannelBackward& p, int64_t token, int hv,
                                                int column, const bf16_t* s_x) {
  const Eight v(load_eight(p.v + p.v_at(token, hv) + column)), x(load_eight(s_x));
  const int64_t at = p.value_at(token, hv) + column;
  float w[8], dw[8];
  load_pack(w, p.write + at);
#pragma unroll
  for (int e = 0; e < 8; ++e) w[e] *= x.at(e), dw[e] = v.at(e) * x.at(e);
  if (p.dv) store_pack(p.dv + p.dv_at(token, hv) + column, w);
  if (p.dwrite) store_pack(p.dwrite + at, dw);
}

// By 128 threads: dv = w∘X and dw = v∘X of 64 columns of V; sums[i] grows by the thread's part of
// v·X of row t/8 + 16 i.
template <bool GATED, class P>
__device__ __forceinline__ void value_gradients(const P& p, Span span, int64_t chunk, int hv,
                                                int v0, const SwizzledTile& s_x, float (&sums)[4]) {
  const int r0 = int(threadIdx.x) / 8, c = int(threadIdx.x) % 8 * 8;
  if (v0 + c >= p.value_dim) return;
  if constexpr (GATED) {
#pragma unroll 1
    for (int r = r0; r < span.rows; r += 16)
      if constexpr (kOfLogits<P>)
        raw_write_gradients(p, span.first + r, hv, v0 + c, s_x.at(r, c));
      else
        write_gradients(p, span.first + r, hv, v0 + c, s_x.at(r, c));
  } else {
    strength_gradients(p, span, chunk, hv, v0 + c, r0, c, s_x, sums);
  }
}

}  // namespace ebb::gpu::delta
