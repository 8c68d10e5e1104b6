// Gated delta rule in bf16 on tensor cores, forward, in two kernels: 1 what needs no state, chunk
// by chunk (gates, A, P); 2 the scan over chunks with the read-out (cuda/delta_fast.cuh).
#include "cuda/delta_fast.cuh"
#include "tensor/device_flags.h"

namespace ebb::gpu::delta {
namespace {

constexpr int kThreads = 128;
constexpr int kFloatRow = 68;

template <int SLABS>
struct PrepareShared {
  FastGates gates;
  float m[64 * kFloatRow];  // M, below the diagonal
  float a[64 * kFloatRow];  // A, on and below
  bf16_t k[64 * key_row(SLABS)];
  bf16_t q[64 * key_row(SLABS)];  // then P
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
    s.high[i] = float(through[e]);
    s.low[i] = float(through[e] - double(s.high[i]));
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

// A21 = −A22 M21 A11 for blocks of 8·N rows at `base`: the warp's 16 rows m0 of the block (whose
// A22 ends after DEPTH·8 columns) and its 8·COLUMNS columns from n0.
template <int N, int COLUMNS>
__device__ __forceinline__ void merge(const float* s_m, float* s_a, int base, int m0, int n0,
                                      const Lane& l) {
  const int half = base + 8 * N;
  float t[N][4] = {}, a[4], b[2];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (8 * k > m0 + 15) continue;
    left_f32(a, s_a, half + m0, half + 8 * k, l);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      right_f32(b, s_m, half + 8 * k, base + 8 * n, l);
      mma_f32(t[n], a, b);
    }
  }
  float r[COLUMNS][4] = {};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (8 * k + 7 < n0) continue;
    const float x[4] = {t[k][0], t[k][2], t[k][1], t[k][3]};
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      right_f32(b, s_a, base + 8 * k, base + n0 + 8 * n, l);
      mma_f32(r[n], x, b);
    }
  }
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s_a[(half + m0 + l.g + 8 * (e >> 1)) * kFloatRow + base + n0 + 8 * n + 2 * l.c + (e & 1)] =
          -r[n][e];
}

// s_a = (I + s_m)⁻¹ on and below the diagonal, in f32: a 16x16 leaf per warp by forward
// substitution, then 16→32→64. Each warp has just written its rows of s_m.
__device__ __forceinline__ void invert(const float* s_m, float* s_a) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, lane = int(threadIdx.x) & 31;
  const int b = 16 * warp, col = lane & 15;
  __syncwarp();
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == col ? 1.f : 0.f, other = 0.f;
#pragma unroll
    for (int j = 0; j < i; ++j) {
      const float term = s_m[(b + i) * kFloatRow + b + j] * x[j];
      if (j & 1)
        other += term;
      else
        sum -= term;
    }
    x[i] = sum - other;
    if (lane < 16) s_a[(b + i) * kFloatRow + b + col] = x[i];
  }
  __syncthreads();
  merge<2, 1>(s_m, s_a, 32 * (warp >> 1), 0, 8 * (warp & 1), l);
  __syncthreads();
  merge<4, 2>(s_m, s_a, 0, 16 * (warp & 1), 16 * (warp >> 1), l);
  __syncthreads();
}

// Item (chunk, head). Warp w has rows 16w.... 1 gates; flag a positive decay. 2 KKᵀ, QKᵀ below the
// diagonal. 3 M = stril(β KKᵀ∘Γ), P = scale QKᵀ∘Γ. 4 A = (I+M)⁻¹. 5 store.
template <int SLABS>
__global__ void __launch_bounds__(kThreads, SLABS == 1 ? 4 : 3) prepare_kernel(FastProblem p) {
  auto& s = dynamic_shared<PrepareShared<SLABS>>();
  constexpr int ld = key_row(SLABS);
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, m0 = 16 * warp;
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads; item += gridDim.x) {
    const int hv = int(item % p.value_heads);
    const Span span = span_of(p, item / p.value_heads);
    if (span.rows == 0) return;
    const int64_t key = p.key_at(span.first, hv);
    fetch_tile<64 * SLABS, kThreads>(s.k, ld, p.k + key, p.key_stride(), span.rows, p.key_dim);
    fetch_tile<64 * SLABS, kThreads>(s.q, ld, p.q + key, p.key_stride(), span.rows, p.key_dim);
    commit_copies();
    if (warp == 0) work_out_gates(p, span, hv, s.gates);  // 1
    wait_copy_groups<0>();
    __syncthreads();
    for (int i = int(threadIdx.x); i < kGateFloats / 4; i += kThreads)
      reinterpret_cast<float4*>(p.gates + item)[i] = reinterpret_cast<const float4*>(&s.gates)[i];
    float kk[8][4] = {}, qk[8][4] = {};  // 2
#pragma unroll
    for (int k = 0; k < 4 * SLABS; ++k) {
      unsigned ak[4], aq[4], b[4];
      left(ak, s.k, ld, m0, 16 * k, l);
      left(aq, s.q, ld, m0, 16 * k, l);
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (n <= warp) {
          right(b, s.k, ld, 16 * k, 16 * n, l);
          mma(kk[2 * n], ak, b[0], b[1]);
          mma(kk[2 * n + 1], ak, b[2], b[3]);
          mma(qk[2 * n], aq, b[0], b[1]);
          mma(qk[2 * n + 1], aq, b[2], b[3]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; ++n) {  // 3
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = m0 + l.g + 8 * half, c = 8 * n + 2 * l.c;
        float score[2] = {}, inner[2] = {};
        if (n <= 2 * warp + 1)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float decay = c + e <= r ? s.gates.decay(r, c + e) : 0.f;
            score[e] = p.scale * decay * qk[n][2 * half + e];
            inner[e] = c + e < r ? s.gates.beta[r] * decay * kk[n][2 * half + e] : 0.f;
          }
        *reinterpret_cast<float2*>(s.m + r * kFloatRow + c) = {inner[0], inner[1]};
        *reinterpret_cast<unsigned*>(s.q + r * ld + c) = pack_bf16(score[0], score[1]);
      }
    }
    invert(s.m, s.a);                                    // 4
    bf16_t* g_a = p.a + p.row_at(span.first, hv) * 128;  // 5
    for (int i = int(threadIdx.x); i < span.rows * 8; i += kThreads) {
      const int r = i >> 3, c = 8 * (i & 7);
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = c + e <= r ? s.a[r * kFloatRow + c + e] : 0.f;
      store_pack<bf16_t>(g_a + r * 128 + c, x);
      *reinterpret_cast<uint4*>(g_a + r * 128 + 64 + c) =
          *reinterpret_cast<const uint4*>(s.q + r * ld + c);
    }
    __syncthreads();
  }
}

template <int SLABS>
struct ScanStage {
  bf16_t k[64 * key_row(SLABS)], q[64 * key_row(SLABS)];
  bf16_t ap[64 * kPairRow];
  bf16_t v[64 * kRow];
  float gates[kScanGateFloats];
};
template <int SLABS, int STAGES>
struct ScanShared {
  ScanStage<SLABS> stage[STAGES];
  Staging<SLABS> staging[4];
};

template <int SLABS>
__device__ __forceinline__ void fetch_stage(const FastProblem& p, Span span, int64_t chunk, int hv,
                                            int v0, ScanStage<SLABS>& s) {
  const int64_t key = p.key_at(span.first, hv);
  constexpr int ld = key_row(SLABS);
  fetch_tile<64 * SLABS, kThreads>(s.k, ld, p.k + key, p.key_stride(), span.rows, p.key_dim);
  fetch_tile<64, kThreads>(s.v, kRow, p.v + p.value_at(span.first, hv) + v0, p.value_stride(),
                           span.rows, p.value_dim - v0);
  fetch_tile<128, kThreads>(s.ap, kPairRow, p.a + p.row_at(span.first, hv) * 128, 128, span.rows,
                            128);
  fetch_tile<64 * SLABS, kThreads>(s.q, ld, p.q + key, p.key_stride(), span.rows, p.key_dim);
  fetch_floats<kThreads>(s.gates,
                         reinterpret_cast<const float*>(p.gates + chunk * p.value_heads + hv),
                         kScanGateFloats);
}

// x [16, 64 tokens] scaled token by token.
__device__ __forceinline__ void scale_tokens(float (&x)[8][4], const float* s_scale, float factor,
                                             const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 f = *reinterpret_cast<const float2*>(s_scale + 8 * n + 2 * l.c);
    x[n][0] *= factor * f.x, x[n][1] *= factor * f.y;
    x[n][2] *= factor * f.x, x[n][3] *= factor * f.y;
  }
}

// Item (sequence, head, 64 columns of V); warp w has 16 of the columns. Per chunk: 1 store S.
// 2 K S and Q S. 3 Y = β (V − γ K S). 4 V' = A Y, stored. 5 o = scale γ Q S + P V', stored.
// 6 S = γ_n S + Kᵀ (τ V'). At the end: 7 ht. Chunks are fetched STAGES−1 ahead.
template <int SLABS, int STAGES>
__global__ void __launch_bounds__(kThreads) scan_kernel(FastProblem p, bf16_t* o, float* ht) {
  auto& s = dynamic_shared<ScanShared<SLABS, STAGES>>();
  constexpr int ld = key_row(SLABS);
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  const int64_t tiles = (p.value_dim + kFastTile - 1) / kFastTile;
  for (int64_t item = blockIdx.x; item < p.sequences * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * kFastTile, hv = int(item / tiles % p.value_heads);
    const int64_t n_seq = item / tiles / p.value_heads;
    const int vw = v0 + 16 * warp, cols = p.value_dim - vw;  // of this warp; perhaps none
    const ChunkWalk walk(p, n_seq);
    const int64_t state_of = (n_seq * p.value_heads + hv) * p.key_dim * p.value_dim;
    float state[8 * SLABS][4];
    read_transposed<SLABS>(state, p.h0 ? p.h0 + state_of : nullptr, p.key_dim, p.value_dim, vw, l);
    auto fetch = [&](int64_t i) {
      if (i < walk.count)
        fetch_stage(p, walk.span(p, i), walk.first + i, hv, v0, s.stage[i % STAGES]);
      commit_copies();
    };
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    for (int64_t i = 0; i < walk.count; ++i) {
      wait_copy_groups<STAGES - 2>();
      __syncthreads();
      fetch(i + STAGES - 1);
      if (cols <= 0) continue;
      const ScanStage<SLABS>& now = s.stage[i % STAGES];
      const float *gamma = now.gates, *tail = gamma + kChunk, *beta = tail + kChunk;
      const Span span = walk.span(p, i);

      unsigned sa[4 * SLABS][4];  // 1
#pragma unroll
      for (int k = 0; k < 4 * SLABS; ++k) as_left(sa[k], state[2 * k], state[2 * k + 1]);
      float y[8][4] = {}, out[8][4] = {};  // 2
#pragma unroll
      for (int k = 0; k < 4 * SLABS; ++k)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          unsigned b[4];
          right(b, now.k, ld, 16 * k, 16 * n, l);
          mma(y[2 * n], sa[k], b[0], b[1]);
          mma(y[2 * n + 1], sa[k], b[2], b[3]);
        }
      s.staging[warp].write_state(
          p.states + p.state_at(walk.first + i, hv) + int64_t(vw) * p.key_dim, p.key_dim, sa, cols);
      unsigned ya[4][4];  // 3
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        unsigned v[4];
        load_matrices_transposed(
            v, now.v + (16 * n + l.low + 8 * l.high) * kRow + 16 * warp + 8 * l.odd);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int t = 8 * (2 * n + h) + 2 * l.c;
          const float2 b = *reinterpret_cast<const float2*>(beta + t);
          const float2 g = *reinterpret_cast<const float2*>(gamma + t);
          float(&x)[4] = y[2 * n + h];
          x[0] = b.x * (low_half(v[2 * h]) - g.x * x[0]);
          x[1] = b.y * (high_half(v[2 * h]) - g.y * x[1]);
          x[2] = b.x * (low_half(v[2 * h + 1]) - g.x * x[2]);
          x[3] = b.y * (high_half(v[2 * h + 1]) - g.y * x[3]);
        }
        as_left(ya[n], y[2 * n], y[2 * n + 1]);
      }
      float vp[8][4] = {};  // 4
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int n = k; n < 4; ++n) {
          unsigned b[4];
          right(b, now.ap, kPairRow, 16 * k, 16 * n, l);
          mma(vp[2 * n], ya[k], b[0], b[1]);
          mma(vp[2 * n + 1], ya[k], b[2], b[3]);
        }
#pragma unroll
      for (int k = 0; k < 4 * SLABS; ++k)  // 2
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          unsigned b[4];
          right(b, now.q, ld, 16 * k, 16 * n, l);
          mma(out[2 * n], sa[k], b[0], b[1]);
          mma(out[2 * n + 1], sa[k], b[2], b[3]);
        }
      unsigned va[4][4], vt[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) as_left(va[k], vp[2 * k], vp[2 * k + 1]);
      scale_tokens(vp, tail, 1.f, l);
#pragma unroll
      for (int k = 0; k < 4; ++k) as_left(vt[k], vp[2 * k], vp[2 * k + 1]);
      const float total = now.gates[3 * kChunk];  // 6
#pragma unroll
      for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[n][e] *= total;
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int n = 0; n < 4 * SLABS; ++n) {
          unsigned b[4];
          right_transposed(b, now.k, ld, 16 * k, 16 * n, l);
          mma(state[2 * n], vt[k], b[0], b[1]);
          mma(state[2 * n + 1], vt[k], b[2], b[3]);
        }
      s.staging[warp].write_values(p.values + p.row_at(span.first, hv) * p.value_dim + vw,
                                   p.value_dim, va, span.rows, cols);
      scale_tokens(out, gamma, p.scale, l);  // 5
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int n = k; n < 4; ++n) {
          unsigned b[4];
          right(b, now.ap + 64, kPairRow, 16 * k, 16 * n, l);
          mma(out[2 * n], va[k], b[0], b[1]);
          mma(out[2 * n + 1], va[k], b[2], b[3]);
        }
#pragma unroll
      for (int k = 0; k < 4; ++k) as_left(va[k], out[2 * k], out[2 * k + 1]);
      s.staging[warp].write_values(o + p.value_at(span.first, hv) + vw, p.value_stride(), va,
                                   span.rows, cols);
    }
    if (ht)  // 7
      write_transposed<SLABS>(ht + state_of, state, p.key_dim, p.value_dim, vw, l);
    wait_copy_groups<0>();
    __syncthreads();
  }
}

template <int SLABS, int STAGES>
void launch_scan(const FastProblem& p, bf16_t* o, float* ht, cudaStream_t stream) {
  using Shared = ScanShared<SLABS, STAGES>;
  launch_fast<Shared>(scan_kernel<SLABS, STAGES>, kThreads,
                      p.sequences * p.value_heads * ceil_div(p.value_dim, kFastTile), stream, p, o,
                      ht);
}

}  // namespace

bool fast_path(const DeltaRuleProblem& p) {
  const auto aligned = [](const Tensor& t) {
    return !t.defined() || reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
  };
  return p.v.dtype() == DType::bf16 && p.chunk >= kChunk && p.key_dim() <= 128 &&
         p.key_dim() % 8 == 0 && p.value_dim() % 8 == 0 && aligned(p.q) && aligned(p.k) &&
         aligned(p.v);
}

FastProblem make_fast_problem(const DeltaRuleProblem& problem, const DeltaRuleSaved& saved,
                              const Tensor& before) {
  FastProblem p{make_problem<bf16>(problem, saved, before)};
  p.gates = reinterpret_cast<FastGates*>(ptr<float>(saved.gates));
  return p;
}

DeltaRuleSaved fast_fwd(const DeltaRuleProblem& problem, const Tensor& o, const Tensor& ht) {
  const Device device = problem.v.device();
  const int64_t hv = problem.value_heads(), tokens = problem.batch() * problem.time();
  const int64_t k = problem.key_dim(), v = problem.value_dim();
  const int64_t chunks = problem.layout.chunk_count(problem.batch(), problem.time(), kChunk);
  const DeltaRuleSaved saved{Tensor::empty({hv, tokens, 2 * kChunk}, DType::bf16, device),
                             Tensor::empty({chunks, hv, v, k}, DType::bf16, device),
                             Tensor::empty({hv, tokens, v}, DType::bf16, device),
                             Tensor::empty({chunks, hv, kGateFloats}, DType::f32, device)};
  const Tensor before = chunk_offsets(problem);
  const cudaStream_t stream = stream_of(o);
  const FastProblem p = make_fast_problem(problem, saved, before);
  visit_fast_slabs(k, [&]<int SLABS>() {
    launch_fast<PrepareShared<SLABS>>(prepare_kernel<SLABS>, kThreads, chunks * hv, stream, p);
    launch_scan<SLABS, 2>(p, ptr<bf16>(o), ptr<float>(ht), stream);
  });
  return saved;
}

}  // namespace ebb::gpu::delta
