// The tensor-core kernels of the gated delta rule in bf16 (delta_fast_fwd.cu, delta_fast_bwd.cu),
// for heads of at most 128 channels whose sizes are multiples of 8, in chunks of 64 tokens.
// Notation of cuda/delta_rule.cuh. The scans hold the transposed state: a warp owns 16 columns of V
// and keeps Sᵀ [16,K] as accumulators of mma m16n8k16, whose layout is that of a left operand, so
// that neither the state nor the values of a chunk leave its registers.
#pragma once
#include "cuda/delta_rule.cuh"

namespace ebb::gpu::delta {

using bf16_t = __nv_bfloat16;

inline constexpr int kFastTile = 64;                         // columns of V per scanning block
inline constexpr int kRow = 72;                              // tile rows of 64 values, padded
inline constexpr int kPairRow = 136;                         // rows of A and P, side by side
constexpr int key_row(int slabs) { return 64 * slabs + 8; }  // of q, k, Sᵀ

// Per chunk and head, in this order: what scans read of the gates, then G.
struct FastGates {
  float gamma[kChunk], tail[kChunk], beta[kChunk];
  float total[4];  // one value, padded
  float high[kChunk], low[kChunk];

  __device__ __forceinline__ float decay(int i, int j) const {  // Γ_ij, j <= i
    return __expf((high[i] - high[j]) + (low[i] - low[j]));
  }
};
inline constexpr int kGateFloats = int(sizeof(FastGates) / sizeof(float));
inline constexpr int kScanGateFloats = 3 * kChunk + 4;

struct FastProblem : Problem<bf16_t> {
  // a: [HV,tokens,128], A beside P = scale·Γ∘QKᵀ; states: [chunks,HV,V,K].
  FastGates* gates = nullptr;  // [chunks,HV]
};

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

// s [64,COLS] = rows of g, zeros beyond `rows` and `cols` (a multiple of 8).
template <int COLS, int THREADS>
__device__ __forceinline__ void fetch_tile(bf16_t* s, int ld, const bf16_t* g, int64_t stride,
                                           int rows, int cols) {
  constexpr int kPerRow = COLS / 8, kStep = THREADS / kPerRow;
  static_assert(THREADS % kPerRow == 0 && 64 % kStep == 0);
  const int r0 = int(threadIdx.x) / kPerRow, c = int(threadIdx.x) % kPerRow * 8;
  const bf16_t* from = g + int64_t(r0) * stride + c;
#pragma unroll
  for (int i = 0; i < 64 / kStep; ++i) {
    const int r = r0 + i * kStep;
    const bool valid = r < rows && c < cols;
    copy_async_or_zero(s + r * ld + c, valid ? from : g, valid);
    from += int64_t(kStep) * stride;
  }
}
template <int THREADS>
__device__ __forceinline__ void fetch_floats(float* s, const float* g, int count) {
  for (int i = int(threadIdx.x); i < count / 4; i += THREADS)
    copy_async_or_zero(s + 4 * i, g + 4 * i, true);
}

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

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

// Left operand [16,16] at s[m0..,k0..]; stored transposed: s[k0..,m0..].
__device__ __forceinline__ void left(unsigned (&a)[4], const bf16_t* s, int ld, int m0, int k0,
                                     const Lane& l) {
  load_matrices(a, s + (m0 + l.low + 8 * l.odd) * ld + k0 + 8 * l.high);
}
__device__ __forceinline__ void left_transposed(unsigned (&a)[4], const bf16_t* s, int ld, int m0,
                                                int k0, const Lane& l) {
  load_matrices_transposed(a, s + (k0 + l.low + 8 * l.high) * ld + m0 + 8 * l.odd);
}
// Right operand [16,16], two fragments of 8 columns: stored [n,k], or [k,n].
__device__ __forceinline__ void right(unsigned (&b)[4], const bf16_t* s, int ld, int k0, int n0,
                                      const Lane& l) {
  load_matrices(b, s + (n0 + l.low + 8 * l.high) * ld + k0 + 8 * l.odd);
}
__device__ __forceinline__ void right_transposed(unsigned (&b)[4], const bf16_t* s, int ld, int k0,
                                                 int n0, const Lane& l) {
  load_matrices_transposed(b, s + (k0 + l.low + 8 * l.odd) * ld + n0 + 8 * l.high);
}

// Two neighbouring accumulators [16,8] as one left operand [16,16].
__device__ __forceinline__ void as_left(unsigned (&a)[4], const float (&x)[4],
                                        const float (&y)[4]) {
  a[0] = pack_bf16(x[0], x[1]), a[1] = pack_bf16(x[2], x[3]);
  a[2] = pack_bf16(y[0], y[1]), a[3] = pack_bf16(y[2], y[3]);
}
__device__ __forceinline__ float low_half(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_half(unsigned x) { return __uint_as_float(x & 0xffff0000u); }

// Four 8x8 matrices to shared memory, transposed: lane l names where row l%8 of matrix l/8 goes.
__device__ __forceinline__ void store_matrices_transposed(bf16_t* row, const unsigned (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#else
  const int lane = int(threadIdx.x) & 31;
  const unsigned mine = shared_address(row);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    unsigned t;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(r[m]));
    const unsigned to = __shfl_sync(0xffffffffu, mine, 8 * m + (lane >> 2));
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + 4 * (lane & 3)), "r"(t) : "memory");
  }
#endif
}

// A warp's corner of shared memory, through which it writes to global memory in rows.
template <int SLABS>
struct Staging {
  static constexpr int kTokenRow = 24;  // 16 values, padded
  static constexpr int kSize = 64 * kTokenRow > 16 * key_row(SLABS) ? 64 * kTokenRow
                                                                    : 16 * key_row(SLABS);
  bf16_t s[kSize];

  // g[token, 0..16) = xᵀ for x [16, 64 tokens] given as left operands.
  __device__ __forceinline__ void write_values(bf16_t* g, int64_t stride, const unsigned (&x)[4][4],
                                               int rows, int cols) {
    const int lane = int(threadIdx.x) & 31;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      store_matrices_transposed(
          s + (16 * k + 8 * (lane >> 4) + (lane & 7)) * kTokenRow + 8 * ((lane >> 3) & 1), x[k]);
    __syncwarp();
    const int c = 8 * (lane & 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = 16 * i + (lane >> 1);
      if (t < rows && c < cols)
        *reinterpret_cast<uint4*>(g + int64_t(t) * stride + c) =
            *reinterpret_cast<const uint4*>(s + t * kTokenRow + c);
    }
  }
  // g [16,K] = the transposed state, given as left operands.
  __device__ __forceinline__ void write_state(bf16_t* g, int key_dim,
                                              const unsigned (&x)[4 * SLABS][4], int cols) {
    constexpr int ld = key_row(SLABS);
    const Lane l;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4 * SLABS; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        *reinterpret_cast<unsigned*>(s + (l.g + 8 * (e & 1)) * ld + 16 * k + 8 * (e >> 1) +
                                     2 * l.c) = x[k][e];
    __syncwarp();
    const int lane = int(threadIdx.x) & 31;
#pragma unroll
    for (int i = 0; i < 4 * SLABS; ++i) {
      const int at = 32 * i + lane, r = at / (8 * SLABS), c = at % (8 * SLABS) * 8;
      if (r < cols && c < key_dim)
        *reinterpret_cast<uint4*>(g + int64_t(r) * key_dim + c) =
            *reinterpret_cast<const uint4*>(s + r * ld + c);
    }
  }
};

// The warp's transposed state from and to f32 [K,V] in memory, columns v... of V; null: zero.
template <int SLABS>
__device__ __forceinline__ void read_transposed(float (&state)[8 * SLABS][4], const float* g,
                                                int key_dim, int value_dim, int v, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * l.c + (e & 1), col = v + l.g + 8 * (e >> 1);
      state[n][e] = g && k < key_dim && col < value_dim ? g[int64_t(k) * value_dim + col] : 0.f;
    }
}
template <int SLABS>
__device__ __forceinline__ void write_transposed(float* g, const float (&state)[8 * SLABS][4],
                                                 int key_dim, int value_dim, int v, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * l.c + (e & 1), col = v + l.g + 8 * (e >> 1);
      if (k < key_dim && col < value_dim) g[int64_t(k) * value_dim + col] = state[n][e];
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
void launch_fast(void (*kernel)(P...), int threads, int64_t blocks, cudaStream_t stream,
                 const A&... arguments) {
  if (blocks <= 0) return;
  if constexpr (sizeof(S) > 48 * 1024)
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(S))),
        "shared memory");
  constexpr int64_t kMaxBlocks = (int64_t(1) << 31) - 1;  // kernels loop over the rest
  kernel<<<unsigned(std::min(blocks, kMaxBlocks)), unsigned(threads), sizeof(S), stream>>>(
      arguments...);
  check_launch();
}

// Whether these kernels take the problem; `values` are the tensors they read 16 bytes at a time.
bool fast_path(const DeltaRuleProblem& p);
DeltaRuleSaved fast_fwd(const DeltaRuleProblem& p, const Tensor& o, const Tensor& ht);
void fast_bwd(const DeltaRuleProblem& p, const DeltaRuleSaved& saved, const Tensor& d_o,
              const Tensor& dht, const DeltaRuleGradients& grads);
FastProblem make_fast_problem(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                              const Tensor& chunk_before);

}  // namespace ebb::gpu::delta
