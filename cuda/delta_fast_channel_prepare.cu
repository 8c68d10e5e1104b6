// Delta rule with a decay per channel in bf16 on tensor cores: what needs no state, chunk by chunk
// (Kimi Linear 2025, chunked form): the scans' operands q∘γ, b∘k∘γ and k∘τ, the scores P and the
// inverse A.
//
// P_ij and M_ij are sums over channels of q_i or b_i k_i times k_j e^{G_i−G_j}, and only a
// difference of decays is safe. The 64 tokens are a binary tree: where i lies in the right half of
// a node and j in the left, e^{G_i−G_j} is the decay from the middle to i times that from j to the
// middle, both at most 1, and the block is a product of matrices. At the leaves, 8 tokens, factors
// refer to half of the leaf's decay; a token's log decay counts there as at least −16, so that
// none leaves the range of bf16 (what is lost is below e^-16 of the exact score).
//
// A warp owns 8 tokens, a lane one of them and 16 of 64 channels: the order of channels inside a
// product is free, and a lane's values are its fragments of either operand as they are.
#include "cuda/delta_fast_inverse.cuh"
#include "cuda/delta_fragments.cuh"
#include "cuda/delta_rule_channel.cuh"

namespace ebb::gpu::delta {
namespace {

constexpr int kThreads = 256, kOwn = 16;
constexpr int kScoreRow = 72;  // rows of P, padded
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLeast = -100.f * kLog2e;     // e^-100 is 0 in f32
constexpr float kLeafLeast = -16.f * kLog2e;  // inside a leaf

struct PrepareShared {
  float total[8][64];     // decay over a warp's tokens
  uint4 keys[12][2][32];  // right operands: levels of 16, 32 and 64 tokens, four each
  float m[64 * kInverseRow];
  bf16_t p[64 * kScoreRow];
};

// Of one token: 16 channels. Packed pairs are bf16.
struct Row {
  float g[kOwn];  // log2 of the decay
  unsigned q[kOwn / 2], k[kOwn / 2];
  float erase[kOwn];
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
__device__ __forceinline__ void scaled_erase(unsigned (&y)[kOwn / 2], const Row& x,
                                             const float (&f)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i)
    y[i] = pack_bf16(low_half(x.k[i]) * x.erase[2 * i] * f[2 * i],
                     high_half(x.k[i]) * x.erase[2 * i + 1] * f[2 * i + 1]);
}

__device__ __forceinline__ void load_row(Row& x, const Channel<bf16_t>& p, int64_t token, int hv,
                                         int channel, bool inside) {
  const bf16_t *g_q = p.q + p.key_at(token, hv) + channel,
               *g_k = p.k + p.key_at(token, hv) + channel;
  const float* g_g = p.g + p.gate_at(token, hv) + channel;
  const float* g_erase = p.erase ? p.erase + p.gate_at(token, hv) + channel : nullptr;
  const float beta = inside && !p.erase ? p.beta[token * p.value_heads + hv] : 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool valid = inside && channel + 8 * half < p.key_dim;
    const uint4 q = valid ? reinterpret_cast<const uint4*>(g_q)[half] : uint4{};
    const uint4 k = valid ? reinterpret_cast<const uint4*>(g_k)[half] : uint4{};
    x.q[4 * half] = q.x, x.q[4 * half + 1] = q.y, x.q[4 * half + 2] = q.z, x.q[4 * half + 3] = q.w;
    x.k[4 * half] = k.x, x.k[4 * half + 1] = k.y, x.k[4 * half + 2] = k.z, x.k[4 * half + 3] = k.w;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * half + i;
      const float4 g = valid ? reinterpret_cast<const float4*>(g_g)[at] : float4{};
      const float4 e = valid && g_erase ? reinterpret_cast<const float4*>(g_erase)[at]
                                        : float4{beta, beta, beta, beta};
      x.g[4 * at] = g.x, x.g[4 * at + 1] = g.y, x.g[4 * at + 2] = g.z, x.g[4 * at + 3] = g.w;
      x.erase[4 * at] = e.x, x.erase[4 * at + 1] = e.y;
      x.erase[4 * at + 2] = e.z, x.erase[4 * at + 3] = e.w;
    }
  }
}

// sum = log decays of the warp's tokens up to the lane's, total = of all eight.
__device__ __forceinline__ void sums_of(const float (&g)[kOwn], float (&sum)[kOwn],
                                        float (&total)[kOwn]) {
  const int lane = int(threadIdx.x) & 31;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    float x = g[i];
#pragma unroll
    for (int o = 4; o < 32; o *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, x, o);
      if (lane >= o) x += before;
    }
    sum[i] = x;
    total[i] = __shfl_sync(0xffffffffu, x, 28 + (lane & 3));
  }
}

// d += [q; b] kᵀ: rows 0...7 of d are those of q, rows 8...15 those of b.
__device__ __forceinline__ void multiply_row(float (&d)[4], const unsigned (&q)[kOwn / 2],
                                             const unsigned (&b)[kOwn / 2],
                                             const unsigned (&k)[kOwn / 2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned a[4] = {q[2 * i], b[2 * i], q[2 * i + 1], b[2 * i + 1]};
    mma(d, a, k[2 * i], k[2 * i + 1]);
  }
}
__device__ __forceinline__ void put_keys(uint4 (&s)[2][32], const unsigned (&k)[kOwn / 2]) {
  const int lane = int(threadIdx.x) & 31;
  s[0][lane] = {k[0], k[1], k[2], k[3]};
  s[1][lane] = {k[4], k[5], k[6], k[7]};
}
__device__ __forceinline__ void multiply_keys(float (&d)[4], const unsigned (&q)[kOwn / 2],
                                              const unsigned (&b)[kOwn / 2],
                                              const uint4 (&s)[2][32]) {
  const int lane = int(threadIdx.x) & 31;
  const uint4 x = s[0][lane], y = s[1][lane];
  const unsigned k[kOwn / 2] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
  multiply_row(d, q, b, k);
}
__device__ __forceinline__ void store_row(bf16_t* g, const unsigned (&x)[kOwn / 2], int channel,
                                          int key_dim) {
  if (channel < key_dim) reinterpret_cast<uint4*>(g)[0] = {x[0], x[1], x[2], x[3]};
  if (channel + 8 < key_dim) reinterpret_cast<uint4*>(g)[1] = {x[4], x[5], x[6], x[7]};
}

// A warp's scores with its own tokens and those before, tiles [8,8] of P above tiles of M.
struct Scores {
  float leaf[4] = {}, level16[4] = {}, level32[2][4] = {}, level64[4][4] = {};
};

// The leaf, from registers.
__device__ __forceinline__ void multiply_leaf(Scores& x, const Row& row, const float (&sum)[kOwn],
                                              const float (&total)[kOwn]) {
  float s[kOwn], t[kOwn];
  bool steep = false;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) s[i] = sum[i], t[i] = total[i], steep |= row.g[i] < kLeafLeast;
  if (__any_sync(0xffffffffu, steep)) {
    float g[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) g[i] = row.g[i] < kLeafLeast ? kLeafLeast : row.g[i];
    sums_of(g, s, t);
  }
  unsigned q[kOwn / 2], b[kOwn / 2], k[kOwn / 2];
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    s[i] -= 0.5f * t[i], t[i] = exp2_fast(-s[i]), s[i] = exp2_fast(s[i]);
  scaled(q, row.q, s);
  scaled_erase(b, row, s);
  scaled(k, row.k, t);
  multiply_row(x.leaf, q, b, k);
}

// Right operands of the warp's tokens for the nodes in whose left half they lie; then k∘τ, stored.
__device__ __forceinline__ void right_operands(PrepareShared& s, const Row& row,
                                               float (&tail)[kOwn], int warp, int own, bool scores,
                                               bf16_t* g_kept, int channel, int key_dim) {
  unsigned k[kOwn / 2];
  if (!(warp & 1)) {
    if (scores) scaled(k, row.k, tail), put_keys(s.keys[warp / 2], k);
    times(tail, &s.total[warp + 1][own]);
  }
  if (!(warp & 2)) {
    if (scores) scaled(k, row.k, tail), put_keys(s.keys[4 + 2 * (warp >> 2) + (warp & 1)], k);
    const int next = (warp | 1) + 1;
    times(tail, &s.total[next][own]), times(tail, &s.total[next + 1][own]);
  }
  if (!(warp & 4)) {
    if (scores) scaled(k, row.k, tail), put_keys(s.keys[8 + warp], k);
    for (int i = 4; i < 8; ++i) times(tail, &s.total[i][own]);
  }
  if (g_kept) {
    scaled(k, row.k, tail);
    store_row(g_kept, k, channel, key_dim);
  }
}

// Left operands times what lies before, level by level; then scale q∘γ and b∘k∘γ, stored.
__device__ __forceinline__ void left_operands(PrepareShared& s, const Row& row, Scores& x,
                                              float (&head)[kOwn], int warp, int own, bool scores,
                                              float scale, bf16_t* g_queries, bf16_t* g_erased,
                                              int channel, int key_dim) {
  unsigned q[kOwn / 2], b[kOwn / 2];
  if (warp & 1) {
    if (scores) {
      scaled(q, row.q, head), scaled_erase(b, row, head);
      multiply_keys(x.level16, q, b, s.keys[warp / 2]);
    }
    times(head, &s.total[warp - 1][own]);
  }
  if (warp & 2) {
    if (scores) {
      scaled(q, row.q, head), scaled_erase(b, row, head);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        multiply_keys(x.level32[j], q, b, s.keys[4 + 2 * (warp >> 2) + j]);
    }
    const int first = (warp & 4);
    times(head, &s.total[first][own]), times(head, &s.total[first + 1][own]);
  }
  if (warp & 4) {
    if (scores) {
      scaled(q, row.q, head), scaled_erase(b, row, head);
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply_keys(x.level64[j], q, b, s.keys[8 + j]);
    }
    for (int i = 0; i < 4; ++i) times(head, &s.total[i][own]);
  }
  if (!g_queries) return;
  scaled_erase(b, row, head);
  store_row(g_erased, b, channel, key_dim);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) head[i] *= scale;
  scaled(q, row.q, head);
  store_row(g_queries, q, channel, key_dim);
}

// Row 8w+g of P and M, tile `column` of 8 tokens.
__device__ __forceinline__ void put_tile(PrepareShared& s, const float (&x)[4], float scale,
                                         int warp, int column, const Lane& l) {
  const int r = 8 * warp + l.g, c = 8 * column + 2 * l.c;
  const bool last = column == warp;
  const bool first = !last || 2 * l.c <= l.g, second = !last || 2 * l.c + 1 <= l.g;
  *reinterpret_cast<unsigned*>(s.p + r * kScoreRow + c) =
      pack_bf16(first ? scale * x[0] : 0.f, second ? scale * x[1] : 0.f);
  const bool first_inner = !last || 2 * l.c < l.g, second_inner = !last || 2 * l.c + 1 < l.g;
  *reinterpret_cast<float2*>(s.m + r * kInverseRow + c) = {first_inner ? x[2] : 0.f,
                                                           second_inner ? x[3] : 0.f};
}
__device__ __forceinline__ void put_scores(PrepareShared& s, const Scores& x, float scale, int warp,
                                           const Lane& l) {
  put_tile(s, x.leaf, scale, warp, warp, l);
  if (warp & 1) put_tile(s, x.level16, scale, warp, warp - 1, l);
  if (warp & 2)
#pragma unroll
    for (int j = 0; j < 2; ++j) put_tile(s, x.level32[j], scale, warp, (warp & 4) + j, l);
  if (warp & 4)
#pragma unroll
    for (int j = 0; j < 4; ++j) put_tile(s, x.level64[j], scale, warp, j, l);
  const float zero[4] = {};
  for (int column = warp + 1; column < 8; ++column) put_tile(s, zero, 0.f, warp, column, l);
}

// γ_n by channel of a slab, and β (1 where V comes with its gate).
__device__ __forceinline__ void write_total(const PrepareShared& s, const Channel<bf16_t>& p,
                                            Span span, int64_t chunk, int hv, int slab) {
  const int t = int(threadIdx.x);
  float* g_total = p.total + p.total_at(chunk, hv);
  if (t < 64 && 64 * slab + t < p.key_dim) {
    float f = 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) f *= s.total[i][t];
    g_total[64 * slab + t] = f;
  }
  if (slab == 0 && t >= 64 && t < 128) {
    const int r = t - 64;
    g_total[p.key_dim + r] = r >= span.rows ? 0.f
                             : p.erase      ? 1.f
                                            : p.beta[(span.first + r) * p.value_heads + hv];
  }
}

// w∘V of a chunk, by threads `first`....
__device__ __forceinline__ void write_written(const Channel<bf16_t>& p, Span span, int hv,
                                              int first) {
  const int packs = p.value_dim / 8;
  for (int i = int(threadIdx.x) - first; i < span.rows * packs; i += kThreads - first) {
    const int r = i / packs, c = i % packs * 8;
    const int64_t from = p.value_at(span.first + r, hv) + c;
    const uint4 v = *reinterpret_cast<const uint4*>(p.v + from);
    const float4 w = *reinterpret_cast<const float4*>(p.write + from);
    const float4 y = *reinterpret_cast<const float4*>(p.write + from + 4);
    *reinterpret_cast<uint4*>(p.written + p.row_at(span.first + r, hv) * p.value_dim + c) = {
        pack_bf16(low_half(v.x) * w.x, high_half(v.x) * w.y),
        pack_bf16(low_half(v.y) * w.z, high_half(v.y) * w.w),
        pack_bf16(low_half(v.z) * y.x, high_half(v.z) * y.y),
        pack_bf16(low_half(v.w) * y.z, high_half(v.w) * y.w)};
  }
}

// Block (head, chunk) of eight warps. Per slab of 64 channels: 1 decays of the warp's tokens, and
// its leaf. 2 right operands, k∘τ. 3 left operands and their products, q∘γ and b∘k∘γ. Then 4 P and
// M to shared memory. 5 A = (I+M)⁻¹ by two warps; the others store P, and w∘V. 6 A stored.
template <bool SCORES>
__global__ void __launch_bounds__(kThreads, 2) channel_prepare_kernel(Channel<bf16_t> p) {
  auto& s = dynamic_shared<PrepareShared>();
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, hv = int(blockIdx.x), own = kOwn * l.c;
  for (int64_t chunk = blockIdx.y; chunk < p.chunks; chunk += gridDim.y) {
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    const int r = 8 * warp + l.g;
    const int64_t token = span.first + r;
    const bool inside = r < span.rows;
    Scores scores;
    for (int slab = 0; 64 * slab < p.key_dim; ++slab) {
      const int channel = 64 * slab + own;
      Row row;
      load_row(row, p, token, hv, channel, inside);
      bool positive = false;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        positive |= row.g[i] > 0.f;
        row.g[i] *= kLog2e;
        row.g[i] = row.g[i] < kLeast ? kLeast : row.g[i];  // NaN stays
      }
      if (positive) *p.positive_decay = 1;
      float head[kOwn], tail[kOwn];  // 1
      sums_of(row.g, head, tail);
      if (SCORES) multiply_leaf(scores, row, head, tail);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        tail[i] = exp2_fast(tail[i] - head[i]);
        head[i] = exp2_fast(head[i]);
      }
      if (slab > 0) __syncthreads();
      if (l.g == 7)
#pragma unroll
        for (int i = 0; i < kOwn; i += 4)
          *reinterpret_cast<float4*>(&s.total[warp][own + i]) = {head[i], head[i + 1], head[i + 2],
                                                                 head[i + 3]};
      __syncthreads();
      const int64_t at = p.row_at(token, hv) * p.key_dim + channel;
      right_operands(s, row, tail, warp, own, SCORES, inside ? p.kept + at : nullptr, channel,
                     p.key_dim);  // 2
      write_total(s, p, span, chunk, hv, slab);
      if (SCORES) __syncthreads();
      left_operands(s, row, scores, head, warp, own, SCORES, p.scale,
                    inside ? p.queries + at : nullptr, p.erased + at, channel, p.key_dim);  // 3
    }
    if (SCORES) {
      put_scores(s, scores, p.scale, warp, l);  // 4
      __syncthreads();
      const int64_t g_row = p.row_at(span.first, hv);
      if (warp < 2) {  // 5
        invert_by_two_warps(s.m, warp);
      } else {
        for (int i = int(threadIdx.x) - 64; i < span.rows * 8; i += kThreads - 64)
          *reinterpret_cast<uint4*>(p.scores + (g_row + (i >> 3)) * kChunk + 8 * (i & 7)) =
              *reinterpret_cast<const uint4*>(s.p + (i >> 3) * kScoreRow + 8 * (i & 7));
        if (p.written) write_written(p, span, hv, 64);
      }
      __syncthreads();
      for (int i = int(threadIdx.x); i < span.rows * 8; i += kThreads) {  // 6
        const int row = i >> 3, c = 8 * (i & 7);
        float a[8] = {};
        if (c <= row) load_pack<float>(a, s.m + row * kInverseRow + c);
#pragma unroll
        for (int e = 0; e < 8; ++e) a[e] = c + e <= row ? a[e] : 0.f;
        store_pack<bf16_t>(p.a + (g_row + row) * kChunk + c, a);
      }
    }
    __syncthreads();
  }
}

}  // namespace

void channel_fast_prepare(const Channel<bf16_t>& p, Prepare what, cudaStream_t stream) {
  const dim3 grid(unsigned(p.value_heads), unsigned(std::min<int64_t>(p.chunks, 65535)));
  if (what == Prepare::everything)
    launch_fast<PrepareShared>(channel_prepare_kernel<true>, kThreads, grid, stream, p);
  else
    launch_fast<PrepareShared>(channel_prepare_kernel<false>, kThreads, grid, stream, p);
}

}  // namespace ebb::gpu::delta
