// Gated delta rule in bf16 on tensor cores: what needs no state, chunk by chunk (gates, A, P;
// cuda/delta_fast.cuh).
#include "cuda/delta_fragments.cuh"

namespace ebb::gpu::delta {
namespace {

constexpr int kThreads = 64;
constexpr int kFloatRow = 68;  // rows of M and A, padded

template <int SLABS>
struct PrepareShared {
  FastGates gates;
  bf16_t q[64 * key_row(SLABS)];  // then P
  union {
    bf16_t k[64 * key_row(SLABS)];
    float m[64 * kFloatRow];  // M below the diagonal, then A on and below
  };
};

// Warp 0: the gates of a chunk; lane l has rows 2l and 2l+1. Sums in f64: kept as high + low, their
// differences are exact to f32.
__device__ void work_out_gates(const FastProblem& p, Span span, int hv, FastGates& s) {
  const int lane = int(threadIdx.x) & 31;
  float g[2], beta[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    const int64_t at = (span.first + i) * p.value_heads + hv;
    g[e] = i < span.rows ? p.g[at] : 0.f;
    beta[e] = i < span.rows ? p.beta[at] : 0.f;
  }
  if (g[0] > 0.f || g[1] > 0.f) *p.positive_decay = 1;
  double x[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) x[e] = double(g[e] < -1000.f ? -1000.f : g[e]);  // −inf: e^-1000 = 0
  double sum = x[0] + x[1];
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const double before = __shfl_up_sync(0xffffffffu, sum, o);
    if (lane >= o) sum += before;
  }
  const double total = __shfl_sync(0xffffffffu, sum, 31);
  const double through[2] = {sum - x[1], sum};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    const double log2 = through[e] * 1.4426950408889634;
    s.high[i] = float(log2);
    s.low[i] = float(log2 - double(s.high[i]));
    s.gamma[i] = __expf(float(through[e]));
    s.tail[i] = __expf(float(total - through[e]));
    s.beta[i] = beta[e];
  }
  if (lane < 4) s.total[lane] = __expf(float(total));
}

__device__ __forceinline__ unsigned to_tf32(float x) {
  unsigned r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d[16,8] += a[16,8] b[8,8] in f32, each factor as the sum of two tf32 numbers. The order of the
// eight inner indices is 0, 2, 4, 6, 1, 3, 5, 7, so that an accumulator serves as a: its element e
// is the operand's {0, 2, 1, 3}[e].
__device__ __forceinline__ void mma_f32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  unsigned a_high[4], a_low[4], b_high[2], b_low[2];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    a_high[e] = to_tf32(a[e]);
    a_low[e] = to_tf32(a[e] - __uint_as_float(a_high[e]));
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    b_high[e] = to_tf32(b[e]);
    b_low[e] = to_tf32(b[e] - __uint_as_float(b_high[e]));
  }
  mma_tf32(d, a_low, b_high);
  mma_tf32(d, a_high, b_low);
  mma_tf32(d, a_high, b_high);
}
__device__ __forceinline__ void left_f32(float (&a)[4], const float* s, int m0, int k0,
                                         const Lane& l) {
  const float2 top = *reinterpret_cast<const float2*>(s + (m0 + l.g) * kFloatRow + k0 + 2 * l.c);
  const float2 bottom =
      *reinterpret_cast<const float2*>(s + (m0 + 8 + l.g) * kFloatRow + k0 + 2 * l.c);
  a[0] = top.x, a[1] = bottom.x, a[2] = top.y, a[3] = bottom.y;
}
__device__ __forceinline__ void right_f32(float (&b)[2], const float* s, int k0, int n0,
                                          const Lane& l) {
  b[0] = s[(k0 + 2 * l.c) * kFloatRow + n0 + l.g];
  b[1] = s[(k0 + 2 * l.c + 1) * kFloatRow + n0 + l.g];
}

// A21 = −A22 M21 A11 for blocks of 8·N rows at `base`, in place, 16 rows m0 of the block by a warp.
// SHARED: by two warps, which read before either writes.
template <int N, bool SHARED>
__device__ __forceinline__ void merge(float* s, int base, int m0, const Lane& l) {
  const int half = base + 8 * N;
  float t[N][4] = {}, a[4], b[2];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (8 * k > m0 + 15) continue;
    left_f32(a, s, half + m0, half + 8 * k, l);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      right_f32(b, s, half + 8 * k, base + 8 * n, l);
      mma_f32(t[n], a, b);
    }
  }
  float r[N][4] = {};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float x[4] = {t[k][0], t[k][2], t[k][1], t[k][3]};
#pragma unroll
    for (int n = 0; n <= (k | 1); ++n) {  // what lies above the leaves of A11 is not there
      right_f32(b, s, base + 8 * k, base + 8 * n, l);
      mma_f32(r[n], x, b);
    }
  }
  if (SHARED)
    __syncthreads();
  else
    __syncwarp();
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(s + (half + m0 + l.g + 8 * h) * kFloatRow + base + 8 * n +
                                 2 * l.c) = {-r[n][2 * h], -r[n][2 * h + 1]};
}

// s = (I + s)⁻¹ on and below the diagonal, in f32 (what lies above in the 16x16 leaves becomes 0,
// elsewhere it stays): a leaf per half warp by forward substitution, then 16→32→64.
__device__ __forceinline__ void invert(float* s) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, lane = int(threadIdx.x) & 31;
  const int col = lane & 15;
  float* leaf = s + (32 * warp + (lane & 16)) * (kFloatRow + 1);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == col ? 1.f : 0.f, other = 0.f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 m = *reinterpret_cast<const float4*>(leaf + i * kFloatRow + j);
      sum -= m.x * x[j];
      if (j + 1 < i) other -= m.y * x[j + 1];
      if (j + 2 < i) sum -= m.z * x[j + 2];
      if (j + 3 < i) other -= m.w * x[j + 3];
    }
    x[i] = sum + other;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) leaf[i * kFloatRow + col] = x[i];
  __syncwarp();
  merge<2, false>(s, 32 * warp, 0, l);
  __syncthreads();
  merge<4, true>(s, 0, 16 * warp, l);
  __syncthreads();
}

// The 16-row block ROWS of QKᵀ and KKᵀ, up to the diagonal.
template <int ROWS>
struct Scores {
  static constexpr int kTiles = 2 * ROWS + 2;
  float qk[kTiles][4] = {}, kk[kTiles][4] = {};

  template <int SLABS>
  __device__ __forceinline__ void multiply(const PrepareShared<SLABS>& s, const Lane& l) {
    constexpr int ld = key_row(SLABS);
#pragma unroll
    for (int k = 0; k < 4 * SLABS; ++k) {
      unsigned q[4], own[4], b[4];
      left(q, s.q, ld, 16 * ROWS, 16 * k, l);
      left(own, s.k, ld, 16 * ROWS, 16 * k, l);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        right(b, s.k, ld, 16 * k, 8 * n, l);
        mma(qk[n], q, b[0], b[1]);
        mma(qk[n + 1], q, b[2], b[3]);
        mma(kk[n], own, b[0], b[1]);
        mma(kk[n + 1], own, b[2], b[3]);
      }
    }
  }
  // P = scale QKᵀ∘Γ over the rows of q, M = stril(β KKᵀ∘Γ).
  template <int SLABS>
  __device__ __forceinline__ void put(PrepareShared<SLABS>& s, float scale, const Lane& l) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 16 * ROWS + l.g + 8 * half;
      const float beta = s.gates.beta[r], high = s.gates.high[r], low = s.gates.low[r];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int c = 8 * n + 2 * l.c;
        float score[2] = {}, inner[2] = {};
        if (n < kTiles) {
          const float2 h = *reinterpret_cast<const float2*>(s.gates.high + c);
          const float2 w = *reinterpret_cast<const float2*>(s.gates.low + c);
          const float decay[2] = {exp2_fast((high - h.x) + (low - w.x)),
                                  exp2_fast((high - h.y) + (low - w.y))};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            score[e] = c + e <= r ? scale * decay[e] * qk[n % kTiles][2 * half + e] : 0.f;
            inner[e] = c + e < r ? beta * decay[e] * kk[n % kTiles][2 * half + e] : 0.f;
          }
          *reinterpret_cast<float2*>(s.m + r * kFloatRow + c) = {inner[0], inner[1]};
        }
        *reinterpret_cast<unsigned*>(s.q + r * key_row(SLABS) + c) = pack_bf16(score[0], score[1]);
      }
    }
  }
};
template <int FIRST, int SECOND, int SLABS>
__device__ __forceinline__ void put_scores(PrepareShared<SLABS>& s, float scale, const Lane& l) {
  Scores<FIRST> first;
  Scores<SECOND> second;
  first.multiply(s, l);
  second.multiply(s, l);
  __syncthreads();
  first.put(s, scale, l);
  second.put(s, scale, l);
}

// Block (head, chunk) of two warps; 16-row blocks 0 and 3 are one's, 1 and 2 the other's, the same
// number of products. 1 gates; flag a positive decay. 2 P and M. 3 A = (I+M)⁻¹. 4 store.
template <int SLABS>
__global__ void __launch_bounds__(kThreads, SLABS == 1 ? 8 : 5) prepare_kernel(FastProblem p) {
  auto& s = dynamic_shared<PrepareShared<SLABS>>();
  constexpr int ld = key_row(SLABS);
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, hv = int(blockIdx.x);
  for (int64_t chunk = blockIdx.y; chunk < p.chunks; chunk += gridDim.y) {
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    const int64_t key = p.key_at(span.first, hv);
    fetch_tile<64 * SLABS, kThreads>(s.k, ld, p.k + key, p.key_stride(), span.rows, p.key_dim);
    fetch_tile<64 * SLABS, kThreads>(s.q, ld, p.q + key, p.key_stride(), span.rows, p.key_dim);
    commit_copies();
    if (warp == 0) work_out_gates(p, span, hv, s.gates);  // 1
    wait_copy_groups<0>();
    __syncthreads();
    float4* g_gates = reinterpret_cast<float4*>(p.gates + chunk * p.value_heads + hv);
    for (int i = int(threadIdx.x); i < kGateFloats / 4; i += kThreads)
      g_gates[i] = reinterpret_cast<const float4*>(&s.gates)[i];
    if (warp == 0)  // 2
      put_scores<3, 0>(s, p.scale, l);
    else
      put_scores<2, 1>(s, p.scale, l);
    __syncthreads();
    invert(s.m);                                         // 3
    bf16_t* g_a = p.a + p.row_at(span.first, hv) * 128;  // 4
    for (int i = int(threadIdx.x); i < span.rows * 8; i += kThreads) {
      const int r = i >> 3, c = 8 * (i & 7);
      float a[8] = {};
      if (c <= r) load_pack<float>(a, s.m + r * kFloatRow + c);
#pragma unroll
      for (int e = 0; e < 8; ++e) a[e] = c + e <= r ? a[e] : 0.f;
      store_pack<bf16_t>(g_a + r * 128 + c, a);
      *reinterpret_cast<uint4*>(g_a + r * 128 + 64 + c) =
          *reinterpret_cast<const uint4*>(s.q + r * ld + c);
    }
    __syncthreads();
  }
}

}  // namespace

void prepare_chunks(const FastProblem& p, cudaStream_t stream) {
  visit_fast_slabs(p.key_dim, [&]<int SLABS>() {
    launch_fast<PrepareShared<SLABS>>(prepare_kernel<SLABS>, kThreads, chunk_grid(p), stream, p);
  });
}

}  // namespace ebb::gpu::delta
