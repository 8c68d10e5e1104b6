// What delta_fast_channel_gradients.cu does more where its inputs are raw
// (cuda/delta_channel_logits.cuh): the erase gate from its logits, and at the end, by all threads,
// the gradients of rows of q and k before their normalisation and of the logits by channel. Those
// read q, k and dg from shared memory and the logits once more from memory, eight channels at once.
// Between products and tree q and k become the rows of length 1 that the tree is about.
#pragma once
#include "cuda/delta_channel_warp.cuh"

namespace ebb::gpu::delta {

// The logits of b: erase and write gates are never finished here.
__device__ __forceinline__ void fetch_erase(const LogitChannelBackward& p, const ChannelItem& item,
                                            ChannelShared& s) {
  const int rows = item.span.rows, cols = item.channels(p);
  TilePlace().fetch(s.now.raw, raw_at(p, item, p.erases, p.erase_step), p.erase_step, rows, cols);
}
// b from its logits; by all threads, of group GROUP those that call, which may use it afterwards.
template <int GROUP>
__device__ __forceinline__ void make_erase(const LogitChannelBackward& p, ChannelShared& s) {
  const TilePlace at(thread_again());
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Eight x(load_eight(s.now.raw.at(at.r + 32 * i, at.c)));
    float4* to = reinterpret_cast<float4*>(s.now.erase.at(at.r + 32 * i, at.c));
    float b[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) b[e] = p.beta_scale * sigmoids(x.at(e)).x;
    to[0] = {b[0], b[1], b[2], b[3]}, to[1] = {b[4], b[5], b[6], b[7]};
  }
  meet<GROUP>();
}

// Reciprocal lengths of query and key.
__device__ __forceinline__ float2 lengths_at(const LogitChannelBackward& p, const ChannelItem& item,
                                             int row) {
  return p.lengths[(item.chunk * p.value_heads + item.hv) * kChunk + row];
}
__device__ __forceinline__ void scale_eight(bf16_t* s, float f) {
  float x[8];
  load_pack<bf16_t>(x, s);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= f;
  *reinterpret_cast<uint4*>(s) = pack_eight(x);
}
// q and k to length 1 where they lie; by all threads.
__device__ __forceinline__ void normalize_keys(const LogitChannelBackward& p,
                                               const ChannelItem& item, ChannelShared& s) {
  if (!p.normalize) return;
  const TilePlace at(thread_again());
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int r = at.r + 32 * (i >> 1);
    const float2 length = lengths_at(p, item, r);
    scale_eight((i & 1 ? s.k : s.q).at(r, at.c), i & 1 ? length.y : length.x);
  }
}

// From x = the gradient of a row y of length 1, to memory that of what y was r times: r (x − y
// (y·x)). Eight threads to a row.
__device__ __forceinline__ void store_row_gradient(bf16_t* g, const bf16_t* s_x, const bf16_t* s_y,
                                                   bool normalize, float r, bool inside) {
  float x[8], y[8];
  load_pack<bf16_t>(x, s_x);
  if (normalize) {
    load_pack<bf16_t>(y, s_y);
    float sum = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
#pragma unroll
    for (int o = 1; o < 8; o *= 2) sum += from_lane(sum, o);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = r * (x[e] - sum * y[e]);
  }
  if (inside) store_word(reinterpret_cast<uint4*>(g), pack_eight(x));
}

// Of one row of eight channels: da from dg, to memory; to the sums what dt_bias and A_log want.
__device__ __forceinline__ void decay_gradients(const LogitChannelBackward& p, const HeadGate& gate,
                                                int64_t token, int64_t channel, const float* s_dg,
                                                float (&da_sums)[8], float& log_sum) {
  const Eight z(load_eight(p.decays + token * p.decay_step + channel));
  float da[8], bias[8] = {};
  load_pack<float>(da, s_dg);
  if (p.dt_bias) load_pack<float>(bias, p.dt_bias + channel);
#pragma unroll
  for (int e = 0; e < 8; ++e) bias[e] += z.at(e);
  gate.slopes(bias, da, log_sum);
#pragma unroll
  for (int e = 0; e < 8; ++e) da_sums[e] += da[e];
  if (p.ddecays)
    store_word(reinterpret_cast<uint4*>(p.ddecays + token * p.gate_stride() + channel),
               pack_eight(da));
}
__device__ __forceinline__ void store_finished(float* g, const float* s) {
  float4* to = reinterpret_cast<float4*>(g);
  to[0] = reinterpret_cast<const float4*>(s)[0], to[1] = reinterpret_cast<const float4*>(s)[1];
}
__device__ __forceinline__ void erase_gradients(const LogitChannelBackward& p, int64_t token,
                                                int64_t channel, const bf16_t* s_db) {
  const Eight b(load_eight(p.erases + token * p.erase_step + channel));
  float x[8];
  load_pack<bf16_t>(x, s_db);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float2 s = sigmoids(b.at(e));
    x[e] *= p.beta_scale * s.x * s.y;
  }
  store_word(reinterpret_cast<uint4*>(p.derases + token * p.gate_stride() + channel),
             pack_eight(x));
}

// The block's sums over its tokens, from those of the threads.
__device__ __forceinline__ void store_gate_sums(const LogitChannelBackward& p, ChannelShared& s,
                                                float (&da)[8], float log) {
  struct Sums {
    float da[8][64], log[8];
  };
  static_assert(sizeof(Sums) <= sizeof(s.now.head));
  Sums& sums = *reinterpret_cast<Sums*>(s.now.head);
  const int t = thread_again(), warp = t >> 5, lane = t & 31;
  log = warp_sum(log);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    da[e] += from_lane(da[e], 8);
    da[e] += from_lane(da[e], 16);
    if (lane < 8) sums.da[warp][8 * lane + e] = da[e];
  }
  if (lane == 0) sums.log[warp] = log;
  barrier_wait<kGradientThreads>(0);
  const ChannelItem& item = s.now.item;
  const int64_t channels = int64_t(p.value_heads) * p.key_dim;
  const int slabs = (p.key_dim + 63) / 64;
  float* to = p.gate_sums + item.chunk * (channels + int64_t(slabs) * p.value_heads);
  float sum = 0;
  if (t < 64 && t < item.channels(p)) {
#pragma unroll 1
    for (int w = 0; w < 8; ++w) sum += sums.da[w][t];
    to[int64_t(item.hv) * p.key_dim + 64 * item.slab + t] = sum;
  } else if (t == 64) {
#pragma unroll 1
    for (int w = 0; w < 8; ++w) sum += sums.log[w];
    to[channels + int64_t(item.slab) * p.value_heads + item.hv] = sum;
  }
}

// By all threads, after all else.
template <bool GATED>
__device__ __forceinline__ void store_raw_gradients(const LogitChannelBackward& p,
                                                    ChannelShared& s) {
  barrier_wait<kGradientThreads>(0);
  const TilePlace at(thread_again());
  const ChannelItem& item = s.now.item;
  const int64_t channel = int64_t(item.hv) * p.key_dim + 64 * item.slab + at.c;
  const bool decays = p.decays && (p.ddecays || p.gate_sums);
  float da[8] = {}, log = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int r = at.r + 32 * i;
    const int64_t token = item.span.first + r;
    const bool inside = r < item.span.rows && at.c < item.channels(p);
    float2 length{1.f, 1.f};
    if (p.normalize) length = lengths_at(p, item, r);
    const int64_t key = p.dkey_at(token, item.hv) + 64 * item.slab + at.c;
#pragma unroll 1
    for (int j = 0; j < 2; ++j) {
      bf16_t* g = j ? p.dk : p.dq;
      if (!g) continue;
      store_row_gradient(g + key, (j ? s.now.dm : s.now.dp).at(r, at.c),
                         (j ? s.k : s.q).at(r, at.c), p.normalize, j ? length.y : length.x, inside);
    }
    const float* s_dg = s.now.erase.at(r, at.c);
    if (inside && p.dg) store_finished(p.dg + token * p.gate_stride() + channel, s_dg);
    if (inside && decays) decay_gradients(p, HeadGate(p, item.hv), token, channel, s_dg, da, log);
    if constexpr (GATED)
      if (inside && p.derases) erase_gradients(p, token, channel, s.now.raw.at(r, at.c));
  }
  if (p.gate_sums) store_gate_sums(p, s, da, log);
}

}  // namespace ebb::gpu::delta
