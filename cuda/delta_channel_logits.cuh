// What the options of the delta rule with a decay per channel make of raw inputs, inside the
// kernels on tensor cores (delta_fast_channel_prepare.cu, delta_fast_channel_gradients.cu): rows of
// q, k and of the logits may lie apart, q and k are normalised (K <= 64), decays and strengths come
// from their logits. Every part may also be finished. Kernels have instances of their own for it.
//
// Gates from logits in bf16: relative errors near 1e-5, a few instructions each.
#pragma once
#include <type_traits>

#include "cuda/delta_fast.cuh"
#include "cuda/delta_rule_channel.cuh"

namespace ebb::gpu::delta {

struct RawGates {
  bool gated = false;                       // an erase and a write gate, not β
  bool normalize = false;                   // q and k to length 1
  bool sigmoid = false;                     // β, or erase and write, are logits
  int64_t key_step = 0;                     // elements between tokens of q and k
  const bf16_t* decays = {};                // [tokens,HV,K]; null: finished log decays
  const bf16_t *erases = {}, *writes = {};  // [tokens,HV,K], [tokens,HV,V]; null: finished
  int64_t decay_step = 0, erase_step = 0, write_step = 0;
  Logits strengths = {};                   // β
  const float *A_log = {}, *dt_bias = {};  // [HV]; [HV,K] or null
  float lower_bound = 0, beta_scale = 1;
  float2* lengths = {};  // [chunks,HV,64] reciprocal lengths of query and key; null: not kept
};
template <class P>
inline constexpr bool kOfLogits = std::is_base_of_v<RawGates, P>;

struct LogitChannel : Channel<bf16_t>, RawGates {
  __host__ __device__ int64_t key_at(int64_t t, int hv) const {
    return t * key_step + int64_t(hv / (value_heads / heads)) * key_dim;
  }
  __device__ __forceinline__ float strength(int64_t t, int hv) const {  // β
    const float b = strengths.at(t, hv);
    return sigmoid ? beta_scale * exact_sigmoid(b) : b;
  }
  __device__ __forceinline__ float erase_strength(int64_t t, int hv) const {
    return strength(t, hv);
  }
  __device__ __forceinline__ float write_strength(int64_t t, int hv) const {
    return gated ? 1.f : strength(t, hv);
  }
};

struct LogitChannelBackward : ChannelBackward<bf16_t>, RawGates {
  int64_t dkey_step = 0;                               // elements between tokens of dq and dk
  bf16_t *ddecays = {}, *derases = {}, *dwrites = {};  // dense; null: not wanted
  void* dstrengths = {};                               // of β's dtype; with one slab
  float* gate_sums = {};  // [chunks,HV·K + slabs·HV]: Σ da, Σ of dA_log's summands; or null

  __host__ __device__ int64_t key_at(int64_t t, int hv) const {
    return t * key_step + int64_t(hv / (value_heads / heads)) * key_dim;
  }
  __host__ __device__ int64_t key_stride() const { return key_step; }
  __host__ __device__ int64_t dkey_at(int64_t t, int hv) const {
    return t * dkey_step + int64_t(hv / (value_heads / heads)) * key_dim;
  }
};

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// e^x up to 2^120; NaN stays.
__device__ __forceinline__ float bounded_exp(float x) {
  const float y = 1.44269504f * x;
  return exp2_fast(y > 120.f ? 120.f : y);
}
// σ(x) and σ(−x).
__device__ __forceinline__ float2 sigmoids(float x) {
  const float e = bounded_exp(-x), s = reciprocal_fast(1.f + e);
  return {s, e * s};
}
// log2(1 + t), for t = eˣ: linear in x above 20.
__device__ __forceinline__ float softplus2(float x, float t) {
  constexpr float kLog2e = 1.44269504f;
  const float small = t * fmaf(t, fmaf(t, kLog2e / 3, -kLog2e / 2), kLog2e);
  const float y = t < 0.015625f ? small : log2_fast(1.f + t);
  return x > 20.f ? kLog2e * x : y;
}

// The gate of a head from a raw value with its bias, y; see cuda/decay_formula.cuh.
struct HeadGate {
  float scale, bound;  // exp(A_log); 0: softplus

  __device__ __forceinline__ HeadGate(const RawGates& p, int hv)
      : scale(expf(p.A_log[hv])), bound(p.lower_bound) {}
  // log2 of the decay.
  __device__ __forceinline__ float log2_decay(float y) const {
    if (bound < 0.f) return 1.44269504f * bound * sigmoids(scale * y).x;
    return -scale * softplus2(y, bounded_exp(y));
  }
  // Of eight at once; 0 where there is no token.
  __device__ __forceinline__ void log2_decays(float (&y)[8], bool inside) const {
    const float by = inside ? -scale : 0.f, most = inside ? 1.44269504f * bound : 0.f;
    if (bound < 0.f) {
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] = most * sigmoids(scale * y[e]).x;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] = by * softplus2(y[e], bounded_exp(y[e]));
    }
  }
  // dg -> da of eight; `log` grows by the summands of dA_log.
  __device__ __forceinline__ void slopes(const float (&y)[8], float (&dg)[8], float& log) const {
    if (bound < 0.f) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float2 s = sigmoids(scale * y[e]);
        const float du = bound * s.x * s.y * dg[e];
        log += du * (scale * y[e]);
        dg[e] = scale * du;
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float t = bounded_exp(y[e]), by = -scale * dg[e];
        log += by * (0.693147181f * softplus2(y[e], t));
        dg[e] = by * (t * reciprocal_fast(1.f + t));
      }
    }
  }
};

// Eight neighbouring values of bf16.
struct Eight {
  unsigned x[4];

  __device__ __forceinline__ explicit Eight(const uint4& y) : x{y.x, y.y, y.z, y.w} {}
  __device__ __forceinline__ float at(int i) const {
    return i % 2 ? high_half(x[i / 2]) : low_half(x[i / 2]);
  }
};
__device__ __forceinline__ uint4 load_eight(const bf16_t* g) {
  return *reinterpret_cast<const uint4*>(g);
}
__device__ __forceinline__ uint4 pack_eight(const float (&x)[8]) {
  return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
          pack_bf16(x[6], x[7])};
}

// 1/sqrt(Σx² + 1e-6) (ops/l2_norm.h), never silently zero.
__device__ __forceinline__ float reciprocal_of(float sum) {
  return sum > 3.4e38f ? __int_as_float(0x7fffffff) : rsqrtf(sum + 1e-6f);
}

// Of a problem that is `in_place`.
RawGates raw_gates(const DeltaRuleProblem& p);
// The backward pass of one but for the sums over groups of heads and slabs of K
// (delta_channel_logits.cu).
void raw_backward(const ChannelBackward<bf16_t>& p, const DeltaRuleProblem& problem,
                  const DeltaRuleGradients& grads, cudaStream_t stream);
void channel_fast_prepare(const LogitChannel& p, Prepare what, cudaStream_t stream);
void channel_fast_gradients(const LogitChannelBackward& p, cudaStream_t stream);

}  // namespace ebb::gpu::delta
