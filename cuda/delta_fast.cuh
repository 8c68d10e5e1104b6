// The tensor-core kernels of the gated delta rule in bf16, for heads whose sizes are multiples of
// 8, in chunks of 64 tokens: delta_fast_prepare.cu (what needs no state), delta_fast_fwd.cu and
// delta_fast_bwd.cu (the scans), delta_fast_gradients.cu. Notation of cuda/delta_rule.cuh. The
// scans hold the transposed state: a warp owns 16 columns of V and keeps Sᵀ [16,K] as accumulators
// of mma m16n8k16, whose layout is that of a left operand, so that neither the state nor the values
// of a chunk leave its registers.
#pragma once
#include "cuda/decay_formula.cuh"
#include "cuda/delta_rule.cuh"
#include "cuda/warpgroup.cuh"

namespace ebb::gpu::delta {

using bf16_t = __nv_bfloat16;

inline constexpr int kFastTile = 64;  // columns of V per scanning block

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Per chunk and head, in this order: what scans read of the gates, then G/ln 2 as high + low, whose
// differences stay exact to f32 however large the sums are.
struct FastGates {
  float gamma[kChunk], tail[kChunk], beta[kChunk];
  float total[4];  // one value, padded
  float high[kChunk], low[kChunk];

  __device__ __forceinline__ float decay(int i, int j) const {  // Γ_ij, j <= i
    return exp2_fast((high[i] - high[j]) + (low[i] - low[j]));
  }
};
inline constexpr int kGateFloats = int(sizeof(FastGates) / sizeof(float));

// The same of the delta rule. Where q and k come as they are, the reciprocals of their lengths go
// into what the tokens are multiplied with anyway, so that no normalised copy is ever made.
struct RuleGates {
  float gamma[kChunk], tail[kChunk], beta[kChunk];  // γ, τ times the reciprocal length of the key
  float total[4];                                   // one value, padded
  float read[kChunk];                               // γ times the reciprocal length of the query
  float high[kChunk], low[kChunk];
  float key[kChunk], query[kChunk];  // reciprocal lengths

  __device__ __forceinline__ float decay(int i, int j) const {  // Γ_ij, j <= i
    return exp2_fast((high[i] - high[j]) + (low[i] - low[j]));
  }
};
inline constexpr int kRuleGateFloats = int(sizeof(RuleGates) / sizeof(float));
// What scans read of them; γ of the reads only where it is not that of the keys (never for K >
// 128).
constexpr int scan_gate_floats(bool reads) { return (reads ? 4 : 3) * kChunk + 4; }

// A number per token and head, in rows that may lie apart; f32 or bf16.
struct Logits {
  const void* g = nullptr;
  int64_t step = 0;  // elements between tokens
  bool half = false;

  __device__ __forceinline__ float at(int64_t token, int hv) const {
    const int64_t i = token * step + hv;
    return half ? to_float(static_cast<const bf16_t*>(g)[i]) : static_cast<const float*>(g)[i];
  }
};

// The gradient of one.
__device__ __forceinline__ void put_logit(void* g, int64_t at, float x, bool half) {
  if (half)
    static_cast<bf16_t*>(g)[at] = from_float<bf16_t>(x);
  else
    static_cast<float*>(g)[at] = x;
}

struct FastProblem : Problem<bf16_t> {
  // a: [HV,tokens,128], A beside P = scale·Γ∘QKᵀ; states: [chunks,HV,V,K].
  static constexpr bool kLogits = false;
  RuleGates* gates = nullptr;  // [chunks,HV]
  // Of LogitProblem; `logits` says that it is one.
  bool logits = false, sigmoid = false, normalize = false;
  int64_t key_step = 0, value_step = 0;    // elements between tokens of q and k, of v
  Logits decays = {}, strengths = {};      // g and β, or what they are made of:
  const float *A_log = {}, *dt_bias = {};  // [HV]; A_log null: finished log decays; dt_bias: 0
  float lower_bound = 0, beta_scale = 1;

  __host__ __device__ int64_t input_at(int64_t t, int hv) const { return value_at(t, hv); }  // of v
  __device__ __forceinline__ float log_decay_at(int64_t t, int hv) const {
    return g[t * value_heads + hv];
  }
  __device__ __forceinline__ float strength_at(int64_t t, int hv) const {
    return beta[t * value_heads + hv];
  }
};
// The same where tokens lie apart, gates are logits or q and k not normalised: kernels have
// instances of their own for it, since dense finished inputs need fewer registers.
template <class Base>
struct LogitsOf : Base {
  static constexpr bool kLogits = true;

  __host__ __device__ int64_t key_at(int64_t t, int hv) const {
    return t * this->key_step + int64_t(hv / (this->value_heads / this->heads)) * this->key_dim;
  }
  __host__ __device__ int64_t key_stride() const { return this->key_step; }
  __host__ __device__ int64_t input_at(int64_t t, int hv) const {
    return t * this->value_step + int64_t(hv) * this->value_dim;
  }
  __device__ __forceinline__ float log_decay_at(int64_t t, int hv) const {
    const float a = this->decays.at(t, hv);
    if (!this->A_log) return a;
    const float y = a + (this->dt_bias ? this->dt_bias[hv] : 0.f), scale = expf(this->A_log[hv]);
    return this->lower_bound < 0.f ? log_decay<true>(y, scale, this->lower_bound)
                                   : log_decay<false>(y, scale, 0.f);
  }
  __device__ __forceinline__ float strength_at(int64_t t, int hv) const {
    const float b = this->strengths.at(t, hv);
    return this->sigmoid ? this->beta_scale * exact_sigmoid(b) : b;
  }
};
using LogitProblem = LogitsOf<FastProblem>;

__device__ __forceinline__ void copy_async_or_zero(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void fetch_floats(float* s, const float* g, int count) {
  for (int i = int(threadIdx.x); i < count / 4; i += THREADS)
    copy_async_or_zero(s + 4 * i, g + 4 * i, true);
}

// Where the 16 bytes of each of 256 threads lie in tiles [64,64]: rows r and r+32, columns c....
struct TilePlace {
  int r, c;

  __device__ __forceinline__ TilePlace() : TilePlace(int(threadIdx.x)) {}
  __device__ __forceinline__ explicit TilePlace(int thread) : r(thread / 8), c(thread % 8 * 8) {}
  __device__ __forceinline__ void fetch(SwizzledTile& s, const bf16_t* g, int64_t stride, int rows,
                                        int cols) const {
    bf16_t* to = s.at(r, c);
    const bf16_t* from = g + r * stride + c;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool valid = r + 32 * i < rows && c < cols;
      copy_async_or_zero(to + 32 * i * 64, valid ? from + 32 * i * stride : g, valid);
    }
  }
  __device__ __forceinline__ void store(bf16_t* g, int64_t stride, const SwizzledTile& s, int rows,
                                        int cols) const {
    const bf16_t* from = s.at(r, c);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (r + 32 * i < rows && c < cols)
        store_word(reinterpret_cast<uint4*>(g + (r + 32 * i) * stride + c),
                   *reinterpret_cast<const uint4*>(from + 32 * i * 64));
  }
};

// Where a lane stands in the fragments: accumulators hold rows g, g+8 and columns 2c, 2c+1.
struct Lane {
  int g, c;            // row, column pair
  int low, odd, high;  // row of an 8x8 matrix and which of four, for ldmatrix
  __device__ __forceinline__ Lane() {
    const int lane = int(threadIdx.x) & 31;
    g = lane >> 2, c = lane & 3;
    low = lane & 7, odd = (lane >> 3) & 1, high = lane >> 4;
  }
};

// Two neighbouring accumulators [16,8] as one left operand [16,16].
__device__ __forceinline__ void as_left(unsigned (&a)[4], const float (&x)[4],
                                        const float (&y)[4]) {
  a[0] = pack_bf16(x[0], x[1]), a[1] = pack_bf16(x[2], x[3]);
  a[2] = pack_bf16(y[0], y[1]), a[3] = pack_bf16(y[2], y[3]);
}
// All of [16, 64].
__device__ __forceinline__ void values_as_left(unsigned (&a)[4][4], const float (&x)[8][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) as_left(a[k], x[2 * k], x[2 * k + 1]);
}
__device__ __forceinline__ float low_half(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_half(unsigned x) { return __uint_as_float(x & 0xffff0000u); }

// Four 8x8 matrices to shared memory, as they are or transposed: lane l names where row l%8 of
// matrix l/8 goes.
template <bool TRANSPOSED>
__device__ __forceinline__ void store_matrices(bf16_t* row, const unsigned (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (TRANSPOSED)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     shared_address(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  else
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
#else
  const int lane = int(threadIdx.x) & 31;
  const unsigned mine = shared_address(row);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    unsigned t = r[m];
    if constexpr (TRANSPOSED)
      asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(r[m]));
    const unsigned to = __shfl_sync(0xffffffffu, mine, 8 * m + (lane >> 2));
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + 4 * (lane & 3)), "r"(t) : "memory");
  }
#endif
}

// The warp's transposed state from and to f32 [K,V] in memory, columns v... of V; null: zero.
template <int SLABS>
__device__ __forceinline__ void read_transposed(float (&state)[SLABS][8][4], const float* g,
                                                int key_dim, int value_dim, int v, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * l.c + (e & 1), col = v + l.g + 8 * (e >> 1);
      state[n / 8][n % 8][e] =
          g && k < key_dim && col < value_dim ? g[int64_t(k) * value_dim + col] : 0.f;
    }
}
template <int SLABS>
__device__ __forceinline__ void write_transposed(float* g, const float (&state)[SLABS][8][4],
                                                 int key_dim, int value_dim, int v, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * l.c + (e & 1), col = v + l.g + 8 * (e >> 1);
      if (k < key_dim && col < value_dim) g[int64_t(k) * value_dim + col] = state[n / 8][n % 8][e];
    }
}

// f.operator()<SLABS>(): 64-channel slabs that hold K <= 128.
template <class F>
void visit_fast_slabs(int64_t key_dim, F&& f) {
  if (key_dim <= 64)
    f.template operator()<1>();
  else
    f.template operator()<2>();
}

template <class S, class... P, class... A>
void launch_fast(void (*kernel)(P...), int threads, dim3 grid, cudaStream_t stream,
                 const A&... arguments) {
  if (grid.x == 0 || grid.y == 0) return;
  if constexpr (sizeof(S) > 48 * 1024)
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(S))),
        "shared memory");
  kernel<<<grid, unsigned(threads), sizeof(S), stream>>>(arguments...);
  check_launch();
}
// Kernels loop over what a grid cannot hold.
inline dim3 grid_of(int64_t blocks) {
  return dim3(unsigned(std::min(blocks, (int64_t(1) << 31) - 1)));
}
inline dim3 chunk_grid(const FastProblem& p) {  // (head, chunk)
  return dim3(unsigned(p.value_heads), unsigned(std::min<int64_t>(p.chunks, 65535)));
}

// Where a state, transposed, lies in memory: row 0 and the distance of its rows.
struct StateRows {
  bf16_t* at;
  int64_t stride;
};

struct FastBackward : FastProblem {
  const bf16_t* d_o = {};  // [tokens,HV,V]
  const float* dht = {};   // [N,HV,K,V] or null
  bf16_t* x = {};          // X [tokens,HV,V]; dv takes its place
  bf16_t* dstates = {};    // Dᵀ after each chunk, see dstate_at
  bool in_keys = false;
  bf16_t *dq = {}, *dk = {}, *dv = {};   // null: not wanted (or, with grouped heads, as f32 terms)
  float *dq_terms = {}, *dk_terms = {};  // [tokens,HV,K]
  void *dg = {}, *dbeta = {};            // [tokens,HV], of the dtype of what they are gradients of
  float* dh0 = {};
  double* gate_sums = {};                  // [chunks,2,HV]: Σ da, Σ of dA_log's summands; or null
  int64_t dkey_step = 0, dvalue_step = 0;  // elements between tokens of dq and dk, of dv and X

  __host__ __device__ int64_t dkey_at(int64_t t, int hv) const { return key_at(t, hv); }
  __host__ __device__ int64_t dkey_stride() const { return key_stride(); }
  __host__ __device__ int64_t x_at(int64_t t, int hv) const { return value_at(t, hv); }
  __host__ __device__ int64_t x_stride() const { return value_stride(); }
};
struct LogitBackward : LogitsOf<FastBackward> {
  __host__ __device__ int64_t dkey_at(int64_t t, int hv) const {
    return t * dkey_step + int64_t(hv / (value_heads / heads)) * key_dim;
  }
  __host__ __device__ int64_t dkey_stride() const { return dkey_step; }
  __host__ __device__ int64_t x_at(int64_t t, int hv) const {
    return t * dvalue_step + int64_t(hv) * value_dim;
  }
  __host__ __device__ int64_t x_stride() const { return dvalue_step; }
};

// Rows v0...v0+63 of Dᵀ after a chunk. in_keys: in the rows of dq (of dk for the second 64) that
// the chunk's block writes once it has read D, and dstates has only the chunks that are not whole,
// [N,HV,V,K]; else [chunks,HV,V,K].
template <class P>
__device__ __forceinline__ StateRows dstate_at(const P& p, const Span& span, int64_t index, int hv,
                                               int v0) {
  if (p.in_keys && span.rows == kChunk)
    return {(v0 == 0 ? p.dq : p.dk) + p.dkey_at(span.first, hv), p.dkey_stride()};
  return {p.dstates + p.state_at(p.in_keys ? span.sequence : index, hv) + int64_t(v0) * p.key_dim,
          p.key_dim};
}

// f.operator()<SLABS>() for K <= 256.
template <class F>
void visit_rule_slabs(int64_t key_dim, F&& f) {
  if (key_dim <= 128)
    visit_fast_slabs(key_dim, f);
  else
    f.template operator()<4>();
}

// Gates, A and P of every chunk.
void prepare_chunks(const FastProblem& p, cudaStream_t stream);
// dq, dk (or their terms), dg and dbeta of every chunk, from X and the states.
void chunk_gradients(const FastBackward& p, cudaStream_t stream);
void wide_chunk_gradients(const FastBackward& p, cudaStream_t stream);  // K > 128

// Whether the device has the shared memory of the scans, for K <= 128 or above.
bool scans_fit(Device device, bool wide = false);
// Whether these kernels take problems of these sizes, and this one.
bool fast_sizes(const DeltaRuleProblem& p);
bool fast_path(const DeltaRuleProblem& p);
DeltaRuleSaved fast_fwd(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht);
void fast_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& d_o,
              const Tensor& dht, const DeltaRuleGradients& grads);
FastProblem make_fast_problem(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                              const Tensor& chunk_before);

}  // namespace ebb::gpu::delta
