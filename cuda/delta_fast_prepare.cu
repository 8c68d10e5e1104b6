// Gated delta rule in bf16 on tensor cores: what needs no state, chunk by chunk (gates, A, P;
// cuda/delta_fast.cuh).
#include "cuda/delta_fast_inverse.cuh"
#include "cuda/delta_fragments.cuh"

namespace ebb::gpu::delta {
namespace {

constexpr int kThreads = 64;

template <int SLABS>
struct PrepareShared {
  FastGates gates;                // without the lengths
  bf16_t q[64 * key_row(SLABS)];  // then P; a row's padding holds lengths
  union {
    bf16_t k[64 * key_row(SLABS)];
    float m[64 * kInverseRow];  // M below the diagonal, then A on and below
  };

  // Reciprocal lengths of key and query r.
  __device__ __forceinline__ float2& lengths(int r) {
    return *reinterpret_cast<float2*>(q + r * key_row(SLABS) + 64 * SLABS);
  }
};

// Warp 0: the gates of a chunk; lane l has rows 2l and 2l+1. Sums in f64: kept as high + low, their
// differences are exact to f32.
template <class P>
__device__ __forceinline__ void work_out_gates(const P& p, Span span, int hv, FastGates& s) {
  const int lane = int(threadIdx.x) & 31;
  float g[2], beta[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    g[e] = i < span.rows ? p.log_decay_at(span.first + i, hv) : 0.f;
    beta[e] = i < span.rows ? p.strength_at(span.first + i, hv) : 0.f;
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

// The reciprocal length of a row of 64·SLABS channels (ops/l2_norm.h).
template <int SLABS>
__device__ __forceinline__ float reciprocal_length(const bf16_t* s_row) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < 64 * SLABS; c += 8) {
    float x[8];
    load_pack<bf16_t>(x, s_row + c);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += x[e] * x[e];
  }
  return sum > 3.4e38f ? __int_as_float(0x7fffffff) : rsqrtf(sum + 1e-6f);  // never silently zero
}
// By all threads: the gates to memory. LOGITS: with the lengths, one token each.
template <bool LOGITS, int SLABS>
__device__ __forceinline__ void store_gates(PrepareShared<SLABS>& s, RuleGates& g, int rows,
                                            bool normalize) {
  const int t = int(threadIdx.x);
  if constexpr (!LOGITS) {
    constexpr int kScan = scan_gate_floats(false) / 4, kSkip = kChunk / 4;  // no γ of reads
    float4* to = reinterpret_cast<float4*>(&g);
    for (int i = t; i < kGateFloats / 4; i += kThreads)
      to[i < kScan ? i : i + kSkip] = reinterpret_cast<const float4*>(&s.gates)[i];
    return;
  }
  float key = 1, query = 1;
  if (normalize) {
    key = t < rows ? reciprocal_length<SLABS>(s.k + t * key_row(SLABS)) : 0.f;
    query = t < rows ? reciprocal_length<SLABS>(s.q + t * key_row(SLABS)) : 0.f;
  }
  s.lengths(t) = {key, query};
  g.key[t] = key, g.query[t] = query;
  g.gamma[t] = s.gates.gamma[t] * key, g.tail[t] = s.gates.tail[t] * key;
  g.beta[t] = s.gates.beta[t], g.read[t] = s.gates.gamma[t] * query;
  g.high[t] = s.gates.high[t], g.low[t] = s.gates.low[t];
  if (t < 4) g.total[t] = s.gates.total[t];
}

// QKᵀ and KKᵀ of two 16-row blocks, up to the diagonal: ten tiles, those of block ROWS from FIRST
// on.
struct Scores {
  float qk[10][4] = {}, kk[10][4] = {};

  template <int ROWS, int FIRST, int SLABS>
  __device__ __forceinline__ void multiply(const PrepareShared<SLABS>& s, const Lane& l) {
    constexpr int kTiles = 2 * ROWS + 2;
    constexpr int ld = key_row(SLABS);
#pragma unroll
    for (int k = 0; k < 4 * SLABS; ++k) {
      unsigned q[4], own[4], b[4];
      left(q, s.q, ld, 16 * ROWS, 16 * k, l);
      left(own, s.k, ld, 16 * ROWS, 16 * k, l);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        right(b, s.k, ld, 16 * k, 8 * n, l);
        mma(qk[FIRST + n], q, b[0], b[1]);
        mma(qk[FIRST + n + 1], q, b[2], b[3]);
        mma(kk[FIRST + n], own, b[0], b[1]);
        mma(kk[FIRST + n + 1], own, b[2], b[3]);
      }
    }
  }
  // P = scale QKᵀ∘Γ over the rows of q, M = stril(β KKᵀ∘Γ), LOGITS: times the lengths.
  template <bool LOGITS, int ROWS, int FIRST, int SLABS>
  __device__ __forceinline__ void put(PrepareShared<SLABS>& s, float scale, const Lane& l) const {
    constexpr int kTiles = 2 * ROWS + 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 16 * ROWS + l.g + 8 * half;
      const float high = s.gates.high[r], low = s.gates.low[r];
      float beta = s.gates.beta[r], by = scale;
      if constexpr (LOGITS) beta *= s.lengths(r).x, by *= s.lengths(r).y;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int c = 8 * n + 2 * l.c;
        float score[2] = {}, inner[2] = {};
        if (n < kTiles) {
          const float2 h = *reinterpret_cast<const float2*>(s.gates.high + c);
          const float2 w = *reinterpret_cast<const float2*>(s.gates.low + c);
          float decay[2] = {exp2_fast((high - h.x) + (low - w.x)),
                            exp2_fast((high - h.y) + (low - w.y))};
          if constexpr (LOGITS) decay[0] *= s.lengths(c).x, decay[1] *= s.lengths(c + 1).x;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            score[e] = c + e <= r ? by * decay[e] * qk[FIRST + n % kTiles][2 * half + e] : 0.f;
            inner[e] = c + e < r ? beta * decay[e] * kk[FIRST + n % kTiles][2 * half + e] : 0.f;
          }
          *reinterpret_cast<float2*>(s.m + r * kInverseRow + c) = {inner[0], inner[1]};
        }
        *reinterpret_cast<unsigned*>(s.q + r * key_row(SLABS) + c) = pack_bf16(score[0], score[1]);
      }
    }
  }
};
// Block (head, chunk) of two warps; 16-row blocks 0 and 3 are one's, 1 and 2 the other's, the same
// number of products. 1 gates, from their logits if need be, and lengths; flag a positive decay. 2
// P and M. 3 A = (I+M)⁻¹. 4 store.
template <int SLABS, class P>
__global__ void __launch_bounds__(kThreads, SLABS == 1   ? 8
                                            : SLABS == 2 ? 5
                                                         : 3) prepare_kernel(P p) {
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
    store_gates<P::kLogits>(s, p.gates[chunk * p.value_heads + hv], span.rows, p.normalize);
    Scores x;  // 2
    if (warp == 0) {
      x.multiply<3, 0>(s, l);
      x.multiply<0, 8>(s, l);
    } else {
      x.multiply<2, 0>(s, l);
      x.multiply<1, 6>(s, l);
    }
    __syncthreads();  // M takes the place of the keys
    if (warp == 0) {
      x.template put<P::kLogits, 3, 0>(s, p.scale, l);
      x.template put<P::kLogits, 0, 8>(s, p.scale, l);
    } else {
      x.template put<P::kLogits, 2, 0>(s, p.scale, l);
      x.template put<P::kLogits, 1, 6>(s, p.scale, l);
    }
    __syncthreads();
    invert_by_two_warps(s.m, [] {});  // 3
    __syncthreads();
    bf16_t* g_a = p.a + p.row_at(span.first, hv) * 128;  // 4
    for (int i = int(threadIdx.x); i < span.rows * 8; i += kThreads) {
      const int r = i >> 3, c = 8 * (i & 7);
      float a[8] = {};
      if (c <= r) load_pack<float>(a, s.m + r * kInverseRow + c);
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
  visit_rule_slabs(p.key_dim, [&]<int SLABS>() {
    if constexpr (SLABS <= 2)
      if (p.logits)
        return launch_fast<PrepareShared<SLABS>>(prepare_kernel<SLABS, LogitProblem>, kThreads,
                                                 chunk_grid(p), stream, LogitProblem{p});
    launch_fast<PrepareShared<SLABS>>(prepare_kernel<SLABS, FastProblem>, kThreads, chunk_grid(p),
                                      stream, p);
  });
}

}  // namespace ebb::gpu::delta
