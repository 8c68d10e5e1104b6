// Of delta_fast_channel_prepare.cu: a token's row of q, k and decays in the registers of a lane,
// and what one row needs alone. A lane has 16 of the 64 channels of a slab.
#pragma once
#include "cuda/delta_channel_logits.cuh"
#include "cuda/delta_fragments.cuh"
#include "cuda/delta_rule_channel.cuh"

namespace ebb::gpu::delta {

inline constexpr int kOwn = 16;
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLeast = -100.f * kLog2e;     // e^-100 is 0 in f32
inline constexpr float kLeafLeast = -16.f * kLog2e;  // inside a leaf

// Of one token: 16 channels, packed pairs of bf16. b∘k = erase∘k, with one number for all channels
// or one for each.
template <bool GATED>
struct Row {
  unsigned q[kOwn / 2], k[kOwn / 2];
  float erase[GATED ? kOwn : 1];
};

// x = 16 floats of s times f, in place.
__device__ __forceinline__ void times(float (&x)[kOwn], const float* s) {
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    const float4 f = *reinterpret_cast<const float4*>(s + i);
    x[i] *= f.x, x[i + 1] *= f.y, x[i + 2] *= f.z, x[i + 3] *= f.w;
  }
}
__device__ __forceinline__ void scaled(unsigned (&y)[kOwn / 2], const unsigned (&x)[kOwn / 2],
                                       const float (&f)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i)
    y[i] = pack_bf16(low_half(x[i]) * f[2 * i], high_half(x[i]) * f[2 * i + 1]);
}
// What rounding has cut off y.
__device__ __forceinline__ void rest_of_scaled(unsigned (&rest)[kOwn / 2],
                                               const unsigned (&y)[kOwn / 2],
                                               const unsigned (&x)[kOwn / 2],
                                               const float (&f)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i)
    rest[i] = pack_bf16(low_half(x[i]) * f[2 * i] - low_half(y[i]),
                        high_half(x[i]) * f[2 * i + 1] - high_half(y[i]));
}
template <bool GATED>
__device__ __forceinline__ void scaled_erase(unsigned (&y)[kOwn / 2], const Row<GATED>& x,
                                             const float (&f)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i)
    y[i] = pack_bf16(low_half(x.k[i]) * x.erase[GATED ? 2 * i : 0] * f[2 * i],
                     high_half(x.k[i]) * x.erase[GATED ? 2 * i + 1 : 0] * f[2 * i + 1]);
}

// log2 of a token's decays from their raw values, not below `least`. Returns whether some are.
__device__ __forceinline__ bool load_raw_decays(float (&g)[kOwn], const LogitChannel& p,
                                                int64_t token, int hv, int channel, bool inside,
                                                float least) {
  const HeadGate gate(p, hv);
  const int64_t at = int64_t(hv) * p.key_dim + channel;
  const bf16_t* g_z = p.decays + token * p.decay_step + at;
  bool steep = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool valid = inside && channel + 8 * half < p.key_dim;
    const Eight z(valid ? load_eight(g_z + 8 * half) : uint4{});
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      float4 bias{};
      if (valid && p.dt_bias)
        bias = *reinterpret_cast<const float4*>(p.dt_bias + at + 8 * half + i);
      const float y[4] = {z.at(i) + bias.x, z.at(i + 1) + bias.y, z.at(i + 2) + bias.z,
                          z.at(i + 3) + bias.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = g[8 * half + i + e];
        x = valid ? gate.log2_decay(y[e]) : 0.f;
        steep |= x < kLeafLeast;
        x = x < least ? least : x;  // NaN stays
      }
    }
  }
  return steep;
}
// log2 of a token's decays, not below `least`. Returns whether some are.
template <class P>
__device__ __forceinline__ bool load_decays(float (&g)[kOwn], const P& p, int64_t token, int hv,
                                            int channel, bool inside, float least) {
  if constexpr (kOfLogits<P>)
    if (p.decays) return load_raw_decays(g, p, token, hv, channel, inside, least);
  const float4* g_g = reinterpret_cast<const float4*>(p.g + p.gate_at(token, hv) + channel);
  bool positive = false, steep = false;
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    const float4 y =
        inside && channel + (i & 8) < p.key_dim ? g_g[i / 4] : float4{};  // multiples of 8
    g[i] = y.x, g[i + 1] = y.y, g[i + 2] = y.z, g[i + 3] = y.w;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    positive |= g[i] > 0.f;
    g[i] *= kLog2e;
    steep |= g[i] < kLeafLeast;
    g[i] = g[i] < least ? least : g[i];  // NaN stays
  }
  if (positive) *p.positive_decay = 1;
  return steep;
}
template <bool GATED, class P>
__device__ __forceinline__ void load_row(Row<GATED>& x, const P& p, int64_t token, int hv,
                                         int channel, bool inside) {
  const uint4* g_q = reinterpret_cast<const uint4*>(p.q + p.key_at(token, hv) + channel);
  const uint4* g_k = reinterpret_cast<const uint4*>(p.k + p.key_at(token, hv) + channel);
  if (!GATED) x.erase[0] = inside ? p.erase_strength(token, hv) : 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool valid = inside && channel + 8 * half < p.key_dim;
    const uint4 q = valid ? g_q[half] : uint4{}, k = valid ? g_k[half] : uint4{};
    x.q[4 * half] = q.x, x.q[4 * half + 1] = q.y, x.q[4 * half + 2] = q.z, x.q[4 * half + 3] = q.w;
    x.k[4 * half] = k.x, x.k[4 * half + 1] = k.y, x.k[4 * half + 2] = k.z, x.k[4 * half + 3] = k.w;
    if constexpr (GATED && kOfLogits<P>)
      if (p.erases) {
        const int64_t at = token * p.erase_step + int64_t(hv) * p.key_dim + channel + 8 * half;
        const Eight b(valid ? load_eight(p.erases + at) : uint4{});
#pragma unroll
        for (int i = 0; i < 8; ++i) x.erase[8 * half + i] = p.beta_scale * sigmoids(b.at(i)).x;
        continue;
      }
    if constexpr (GATED) {
      const float4* g_erase =
          reinterpret_cast<const float4*>(p.erase + p.gate_at(token, hv) + channel);
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const float4 e = valid ? g_erase[i] : float4{};
        x.erase[4 * i] = e.x, x.erase[4 * i + 1] = e.y;
        x.erase[4 * i + 2] = e.z, x.erase[4 * i + 3] = e.w;
      }
    }
  }
}

// Reciprocal lengths of the lane's query and key, K <= 64.
template <bool GATED>
__device__ __forceinline__ float2 lengths_of(const Row<GATED>& row) {
  float query = 0, key = 0;
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) {
    query = fmaf(low_half(row.q[i]), low_half(row.q[i]), query);
    query = fmaf(high_half(row.q[i]), high_half(row.q[i]), query);
    key = fmaf(low_half(row.k[i]), low_half(row.k[i]), key);
    key = fmaf(high_half(row.k[i]), high_half(row.k[i]), key);
  }
#pragma unroll
  for (int o = 1; o < 4; o *= 2) {
    query += __shfl_xor_sync(0xffffffffu, query, o);
    key += __shfl_xor_sync(0xffffffffu, key, o);
  }
  return {reciprocal_of(query), reciprocal_of(key)};
}

// sum = log decays of the warp's tokens up to the lane's, from its own; total = of all eight.
__device__ __forceinline__ void sums_of(float (&sum)[kOwn], float (&total)[kOwn]) {
  const int lane = int(threadIdx.x) & 31;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    float& x = sum[i];
#pragma unroll
    for (int o = 4; o < 32; o *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, x, o);
      if (lane >= o) x += before;
    }
    total[i] = __shfl_sync(0xffffffffu, x, 28 + (lane & 3));
  }
}

// q_i·k_i of the lane's token, in f32: every lane of its quad has it.
template <bool GATED>
__device__ __forceinline__ float own_score(const Row<GATED>& row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) {
    sum = fmaf(low_half(row.q[i]), low_half(row.k[i]), sum);
    sum = fmaf(high_half(row.q[i]), high_half(row.k[i]), sum);
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

__device__ __forceinline__ void store_row(bf16_t* g, const unsigned (&x)[kOwn / 2], int channel,
                                          int key_dim) {
  if (channel < key_dim) reinterpret_cast<uint4*>(g)[0] = {x[0], x[1], x[2], x[3]};
  if (channel + 8 < key_dim) reinterpret_cast<uint4*>(g)[1] = {x[4], x[5], x[6], x[7]};
}

}  // namespace ebb::gpu::delta
