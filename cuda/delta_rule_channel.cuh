// Shared by the kernels of the delta rule with a decay per channel (delta_rule_channel*.cu): the
// problem as raw pointers, and how a block holds 64 tokens by 64 channels: thread t owns channel
// t%64 of sub-chunk t/64, 16 rows of it in registers, so that sums along time stay in a thread.
// Notation of ops/delta_rule_channel_cpu.cpp.
#pragma once
#include "cuda/delta_rule.cuh"
#include "ops/delta_rule_channel.h"

namespace ebb::gpu::delta {

inline constexpr int kSub = 16, kSubs = kChunk / kSub;
inline constexpr int kFloatRow = row_length<float>(64);

template <class T>
struct Channel : Problem<T> {  // here g is [tokens,HV,K]
  // [tokens,HV,K], [tokens,HV,V]; null: beta. All three null (gated linear attention): nothing is
  // erased, b = 0, and v is written as it is, w = 1.
  const float *erase = {}, *write = {};
  T* scores = {};                             // P [HV,tokens,C]
  T *queries = {}, *erased = {}, *kept = {};  // scale q∘γ, b∘k∘γ, k∘τ [HV,tokens,K]
  T* written = {};                            // w∘V [HV,tokens,V], or null
  bool plain = false;      // nothing is erased: the kernels on tensor cores leave K̂, M and A out
  float* total = {};       // γ_n, then β (1 where there is w) [chunks,HV,K+64]
  int64_t value_step = 0;  // elements between tokens of v, where they lie apart; else 0

  __host__ __device__ int64_t v_stride() const {
    return value_step ? value_step : this->value_stride();
  }
  __host__ __device__ int64_t v_at(int64_t t, int hv) const {
    return t * v_stride() + int64_t(hv) * this->value_dim;
  }
  __device__ __forceinline__ float erase_strength(int64_t t, int hv) const {
    return this->beta ? this->beta[t * this->value_heads + hv] : 0.f;
  }
  __device__ __forceinline__ float write_strength(int64_t t, int hv) const {
    return this->beta ? this->beta[t * this->value_heads + hv] : 1.f;
  }
  __host__ __device__ int64_t gate_at(int64_t t, int hv) const {
    return (t * this->value_heads + hv) * this->key_dim;
  }
  __host__ __device__ int64_t gate_stride() const {
    return int64_t(this->value_heads) * this->key_dim;
  }
  __host__ __device__ int64_t total_at(int64_t chunk_index, int hv) const {
    return (chunk_index * this->value_heads + hv) * (this->key_dim + kChunk);
  }
};

template <class T>
struct ChannelBackward : Channel<T> {
  const T* d_o = {};               // [tokens,HV,V]
  const float* dht = {};           // [N,HV,K,V] or null
  T *x = {}, *dstates = {};        // X [HV,tokens,V], not where plain; D after each chunk, as the
                                   // states
  T *dq = {}, *dk = {}, *dv = {};  // null: not wanted (or, with grouped heads, wanted as f32 terms)
  float *dq_terms = {}, *dk_terms = {};  // [tokens,HV,K]
  float *dg = {}, *derase = {};          // [tokens,HV,K]
  float* dwrite = {};                    // [tokens,HV,V]
  float* dbeta = {};                     // [slabs,tokens,HV]: what each slab of K adds
  float* dh0 = {};
  int64_t dvalue_step = 0;  // of dv, as value_step

  __host__ __device__ int64_t dv_step() const {
    return dvalue_step ? dvalue_step : this->value_stride();
  }
  __host__ __device__ int64_t dv_at(int64_t t, int hv) const {
    return t * dv_step() + int64_t(hv) * this->value_dim;
  }
};

__device__ __forceinline__ int own_sub() { return int(threadIdx.x) >> 6; }
__device__ __forceinline__ int own_channel() { return int(threadIdx.x) & 63; }

// x = the thread's rows of a matrix whose first row and own channel g points at; zeros outside.
template <class S>
__device__ __forceinline__ void load_own(float (&x)[kSub], const S* g, int64_t stride, int rows,
                                         bool inside) {
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    const int r = kSub * own_sub() + i;
    x[i] = inside && r < rows ? to_float(g[int64_t(r) * stride]) : 0.f;
  }
}

// b∘k of the thread's rows: x holds k, and b is read.
template <class T>
__device__ __forceinline__ void load_own_erased(float (&b)[kSub], const float (&k)[kSub],
                                                const Channel<T>& p, Span span, int hv, int channel,
                                                bool inside) {
  if (p.erase) {
    load_own(b, p.erase + p.gate_at(span.first, hv) + channel, p.gate_stride(), span.rows, inside);
  } else if (p.beta) {
    load_own(b, p.beta + span.first * p.value_heads + hv, p.value_heads, span.rows, true);
  } else {
#pragma unroll
    for (int i = 0; i < kSub; ++i) b[i] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < kSub; ++i) b[i] *= k[i];
}

// head_i = e^{G_i−R}, tail_i = e^{E−G_i} of the thread's rows; returns their sum of log decays.
template <class T>
__device__ __forceinline__ double own_decays(const float (&g)[kSub], float (&head)[kSub],
                                             float (&tail)[kSub]) {
  double sum = 0;
#pragma unroll
  for (int i = kSub - 1; i >= 0; --i) {
    tail[i] = decay_exp<T>(float(sum));
    sum += double(g[i]);
  }
  sum = 0;
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    sum += double(g[i]);
    head[i] = decay_exp<T>(float(sum));
  }
  return sum;
}

// e^(sums of sub-chunks [begin, end)) of the thread's channel.
template <class T>
__device__ __forceinline__ float decay_over(const double (&s_sums)[kSubs][64], int begin, int end) {
  double sum = 0;
  for (int a = begin; a < end; ++a) sum += s_sums[a][own_channel()];
  return decay_exp<T>(float(sum));
}

// s [64, row_length(64)] = a slab of an operand [HV,tokens,K], zeros around it.
template <class T>
__device__ __forceinline__ void load_operand(const T* g_x, const Channel<T>& p, Span span, int hv,
                                             int slab, T* s) {
  load_tile(s, row_length<T>(64), kTileRows, 64,
            g_x + p.row_at(span.first, hv) * p.key_dim + 64 * slab, p.key_dim, span.rows,
            slab_width(p, slab));
}
// s = a matrix [HV,tokens,C] of the chunk: A or P.
template <class T>
__device__ __forceinline__ void load_square(const T* g_x, const Channel<T>& p, Span span, int hv,
                                            T* s) {
  load_tile(s, row_length<T>(64), kTileRows, 64, g_x + p.row_at(span.first, hv) * p.chunk, p.chunk,
            span.rows, p.chunk);
}

// The temporaries of one pass: the operands of the scans; γ_n and β. Backward works out dq and dk
// after its scan has read them: where they have the size, two operands lie in their place till
// then; where dq, dk and dv are columns of one matrix, as many as have room there.
struct ChannelOperands {
  Tensor queries, erased, kept, written, total;
};
// plain: on tensor cores and without erasing, where b∘k∘γ is neither written nor looked at (but its
// place must be memory: that of the queries).
ChannelOperands make_operands(const DeltaRuleProblem& p, const DeltaRuleGradients& grads = {},
                              bool plain = false);
inline bool is_plain(const DeltaRuleProblem& p) { return !p.erase.defined() && !p.beta.defined(); }

// The device's view. `chunk_before` and `operands` must outlive the launches.
template <class T>
Channel<device_t<T>> make_channel(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                                  const ChannelOperands& operands, const Tensor& chunk_before);

// Fills the operands and, where wanted, A and P of every chunk.
enum class Prepare { operands, everything };
template <class T>
void prepare(const Channel<T>& p, Prepare what, cudaStream_t stream);

// The same in bf16 on tensor cores (delta_fast_channel_prepare.cu, delta_fast_channel.cu and, for
// K > 128, delta_fast_channel_wide.cu), for sizes that are multiples of 8 and chunks of 64. The
// operands then include w∘V; the scans keep the states transposed, [chunks,HV,V,K].
bool channel_fast_sizes(const DeltaRuleProblem& p);  // as far as q and v decide
bool channel_fast_path(const DeltaRuleProblem& p);
void channel_fast_prepare(const Channel<__nv_bfloat16>& p, Prepare what, cudaStream_t stream);
void channel_fast_scan(const Channel<__nv_bfloat16>& p, __nv_bfloat16* o, float* ht, Device device,
                       cudaStream_t stream);
void channel_fast_reverse(const ChannelBackward<__nv_bfloat16>& p, Device device,
                          cudaStream_t stream);
// Then the gradients of every chunk (delta_fast_channel_gradients.cu).
void channel_fast_gradients(const ChannelBackward<__nv_bfloat16>& p, cudaStream_t stream);

// The gradients of every chunk from X and the states.
template <class T>
void channel_gradients(const ChannelBackward<T>& p, cudaStream_t stream);

}  // namespace ebb::gpu::delta
