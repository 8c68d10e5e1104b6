// Gated linear attention in bf16 on tensor cores, backward: after the reverse scan
// (linear_attention_reverse.cu) the gradients of every chunk (cuda/linear_attention_fast.cuh).
// Notation and formulas of ops/gated_linear_attention_cpu_bwd.cpp.
#include "cuda/linear_attention_scan.cuh"

namespace ebb::gpu::linear_attention {
namespace {

constexpr int kThreads = 256;

struct AttentionBackward : FastAttention {
  const bf16_t* d_o = {};               // [tokens,H,V]
  const bf16_t* dcontributions = {};    // [runs,H,K,V] or null
  float* through_run = {};              // [runs,H]: e^{Σ g of the run} <S before it, its gradient>
  bf16_t* dstates = {};                 // (D+E)ᵀ after each chunk [chunks,H,V,K]
  bf16_t *dq = {}, *dk = {}, *dv = {};  // null: not wanted (or as f32 terms)
  float *dq_terms = {}, *dk_terms = {};        // [tokens,G·parts,K]: sums of a part of the heads
  float *dg = {}, *dweight = {}, *dskip = {};  // dskip: [chunks,H]
  int parts = 1;
};

// Block (run, head): e^{Σ g of the run} <S before it, dcontribution>. It is what <S,D+E> holds too
// much at each of the run's chunks, where only <S,D> and what the run itself has written may count.
__global__ void __launch_bounds__(kThreads) run_product_kernel(AttentionBackward p) {
  __shared__ float s_scratch[32];
  const int size = p.key_dim * p.value_dim;
  for (int64_t item = blockIdx.x; item < p.chunks / p.pieces * p.value_heads; item += gridDim.x) {
    const int h = int(item % p.value_heads);
    const int64_t first = item / p.value_heads * p.pieces;
    const bf16_t *state = p.states + p.state_at(first, h), *run = p.dcontributions + item * size;
    float sum = 0;
    for (int i = int(threadIdx.x); i < size; i += kThreads)
      sum += to_float(state[i]) * to_float(run[i % p.key_dim * p.value_dim + i / p.key_dim]);
    sum = block_sum(sum, s_scratch);
    for (int i = 0; i < p.pieces; ++i) sum *= p.gates_of(first + i, h).total[0];
    if (threadIdx.x == 0) p.through_run[item] = sum;
    __syncthreads();
  }
}

// ---- gradients of a chunk ----

template <int SLABS>
struct HeadStage {
  SwizzledTile v, d_o, state[SLABS], dstate[SLABS];  // the states as [V,K]
  FastGates gates;
};
struct Sums {             // of one head
  float row_z[64];        // over the columns
  float column_z[4][64];  // over the rows of a warp
  float reads[64], kept[64];
  float carry[8], through[4];  // of a warp: <S,D>, v·dO
};
template <int SLABS>
struct GradientShared {
  HeadStage<SLABS> stage[2];
  SwizzledTile q[SLABS], k[SLABS];
  SwizzledTile qk, z, scores, dv;  // z: Z; scores: scale·q kᵀ∘Γ
  Sums sums[2];
};

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// A pair of a tile's values where the accumulators of fragment n, rows g or g+8 lie.
__device__ __forceinline__ float2 pair_at(const SwizzledTile& s, int m0, int n, int half,
                                          const Lane& l) {
  const unsigned x = *reinterpret_cast<const unsigned*>(s.at(m0 + l.g + 8 * half, 8 * n) + 2 * l.c);
  return {low_half(x), high_half(x)};
}
// sum += factor·x, row by row; products += factor·x against the same rows of a tile, the thread's
// part.
__device__ __forceinline__ void add_scaled(float (&sum)[8][4], const float (&x)[8][4],
                                           const float (&factor)[2], const SwizzledTile& against,
                                           float (&products)[2], int m0, const Lane& l) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 y = pair_at(against, m0, n, half, l);
      const float first = factor[half] * x[n][2 * half];
      const float second = factor[half] * x[n][2 * half + 1];
      products[half] += first * y.x + second * y.y;
      sum[n][2 * half] += first, sum[n][2 * half + 1] += second;
    }
}
// This thread's part of <S,D>.
template <int SLABS>
__device__ __forceinline__ float state_product(const HeadStage<SLABS>& s) {
  const TileMover<kThreads> at{int(threadIdx.x)};
  float sum = 0;
#pragma unroll
  for (int j = 0; j < SLABS; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float a[8], b[8];
      load_pack<bf16_t>(a, s.state[j].at(at.r + 32 * i, at.c));
      load_pack<bf16_t>(b, s.dstate[j].at(at.r + 32 * i, at.c));
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += a[e] * b[e];
    }
  return sum;
}
template <int SLABS>
__device__ __forceinline__ void settle_slabs(float (&x)[SLABS][8][4]) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) settle(x[j]);
}
// Rows m0... of the warp, from a tile it has written itself.
__device__ __forceinline__ void store_rows(bf16_t* g, int64_t stride, const SwizzledTile& s, int m0,
                                           int rows, int cols) {
  const int lane = int(threadIdx.x) & 31, c = lane % 8 * 8;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = m0 + lane / 8 + 4 * i;
    if (r < rows && c < cols)
      store_word(reinterpret_cast<uint4*>(g + r * stride + c),
                 *reinterpret_cast<const uint4*>(s.at(r, c)));
  }
  __syncwarp();
}

// The first group of four warps, 16 tokens each: dq. Per head 1 dO vᵀ and dO Sᵀ. 2 Z = scale (dO
// vᵀ)∘Γ·w and scale·q kᵀ∘Γ for the other group; sums of Z∘q kᵀ below the diagonal. 3 dq += scale γ
// dO Sᵀ, its rows' products with q; dq += Z k.
template <int SLABS>
struct QuerySide {
  float sum[SLABS][8][4];  // dq

  // Once per chunk: s.qk = q kᵀ.
  __device__ __forceinline__ void start(GradientShared<SLABS>& s, int warp, const Lane& l) {
    float x[8][4];
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::last>(x, s.q[0], s.k[0], warp);
#pragma unroll
    for (int j = 1; j < SLABS; ++j)
      multiply_tiles<false, Inner::last, Inner::last>(x, s.q[j], s.k[j], warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x);
    unsigned a[4][4];
    values_as_left(a, x);
    put_tile_rows(s.qk, a, 16 * warp, l);
    __syncwarp();
  }
  __device__ __forceinline__ void head(const AttentionBackward& p, GradientShared<SLABS>& s,
                                       const HeadStage<SLABS>& now, Sums& sums, Span, int, float,
                                       int64_t, int warp, const Lane& l) {
    const int m0 = 16 * warp;
    float ds[8][4], x[8][4];
    warpgroup_begin();  // 1
    multiply_tiles<true, Inner::last, Inner::last>(ds, now.d_o, now.v, warp);
    warpgroup_commit();
    multiply_tiles<true, Inner::last, Inner::first>(x, now.d_o, now.state[0], warp);
    warpgroup_commit();
    const float carry = warp_sum(state_product<SLABS>(now));
    if ((threadIdx.x & 31) == 0) sums.carry[warp] = carry;
    warpgroup_wait<0>();
    settle(ds);
    settle(x);
    unsigned z[4][4];
    scores(p, s, now.gates, ds, sums, z, m0, warp, l);  // 2
    publish_tiles();
    __syncthreads();
    const float gamma[2] = {p.scale * now.gates.gamma[m0 + l.g],
                            p.scale * now.gates.gamma[m0 + l.g + 8]};
    float reads[2] = {};
    add_scaled(sum[0], x, gamma, s.q[0], reads, m0, l);  // 3
#pragma unroll
    for (int j = 1; j < SLABS; ++j) {
      warpgroup_begin();
      multiply_tiles<true, Inner::last, Inner::first>(x, now.d_o, now.state[j], warp);
      warpgroup_commit();
      warpgroup_wait<0>();
      settle(x);
      add_scaled(sum[j], x, gamma, s.q[j], reads, m0, l);
    }
    reads[0] = quad_sum(reads[0]), reads[1] = quad_sum(reads[1]);
    if (l.c == 0) sums.reads[m0 + l.g] = reads[0], sums.reads[m0 + l.g + 8] = reads[1];
    settle_slabs<SLABS>(sum);
    warpgroup_begin();
#pragma unroll
    for (int j = 0; j < SLABS; ++j) multiply_columns(sum[j], z, s.k[j]);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle_slabs<SLABS>(sum);
  }
  __device__ __forceinline__ void scores(const AttentionBackward& p, GradientShared<SLABS>& s,
                                         const FastGates& gates, float (&ds)[8][4], Sums& sums,
                                         unsigned (&z)[4][4], int m0, int warp, const Lane& l) {
    unsigned scores[4][4];
    float rows[2] = {};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 column = {0.f, 0.f};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = m0 + l.g + 8 * half, c = 8 * n + 2 * l.c;
        const float2 qk = pair_at(s.qk, m0, n, half, l), weight = pair(gates.beta, c);
        const float first = c <= r ? p.scale * gates.decay(r, c) : 0.f;
        const float second = c + 1 <= r ? p.scale * gates.decay(r, c + 1) : 0.f;
        float &d0 = ds[n][2 * half], &d1 = ds[n][2 * half + 1];
        d0 = c <= r ? first * weight.x * d0 : 0.f;
        d1 = c + 1 <= r ? second * weight.y * d1 : 0.f;
        scores[n / 2][2 * (n & 1) + half] = pack_bf16(first * qk.x, second * qk.y);
        const float z0 = c < r ? d0 * qk.x : 0.f, z1 = c + 1 < r ? d1 * qk.y : 0.f;
        rows[half] += z0 + z1, column.x += z0, column.y += z1;
      }
#pragma unroll
      for (int o = 4; o < 32; o *= 2) {
        column.x += __shfl_xor_sync(0xffffffffu, column.x, o);
        column.y += __shfl_xor_sync(0xffffffffu, column.y, o);
      }
      if (l.g == 0) *reinterpret_cast<float2*>(sums.column_z[warp] + 8 * n + 2 * l.c) = column;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float row = quad_sum(rows[half]);
      if (l.c == 0) sums.row_z[m0 + l.g + 8 * half] = row;
    }
    put_tile_rows(s.scores, scores, m0, l);
    values_as_left(z, ds);
    put_tile_rows(s.z, z, m0, l);
  }
};

// The second group: dk, dv, dw. Per head 1 k D and v Dᵀ. 2 dk += τ w v Dᵀ, its rows' products with
// k. 3 U = τ k D + Pᵀ dO, P without w; dk += Zᵀ q. 4 dw = v·U, dv = w U + skip dO.
template <int SLABS>
struct KeySide {
  float sum[SLABS][8][4];  // dk

  __device__ __forceinline__ void start(GradientShared<SLABS>&, int, const Lane&) {}
  __device__ __forceinline__ void head(const AttentionBackward& p, GradientShared<SLABS>& s,
                                       const HeadStage<SLABS>& now, Sums& sums, Span span, int h,
                                       float skip, int64_t value_at, int warp, const Lane& l) {
    const int m0 = 16 * warp;
    float u[8][4], y[8][4];
    warpgroup_begin();  // 1
    multiply_tiles<true, Inner::last, Inner::first>(y, now.v, now.dstate[0], warp);
    warpgroup_commit();
    multiply_tiles<true, Inner::last, Inner::last>(u, s.k[0], now.dstate[0], warp);
#pragma unroll
    for (int j = 1; j < SLABS; ++j)
      multiply_tiles<false, Inner::last, Inner::last>(u, s.k[j], now.dstate[j], warp);
    warpgroup_commit();
    const float carry = warp_sum(state_product<SLABS>(now));
    if ((threadIdx.x & 31) == 0) sums.carry[4 + warp] = carry;
    const int r0 = m0 + l.g;
    const float tail[2] = {now.gates.tail[r0], now.gates.tail[r0 + 8]};
    const float weight[2] = {now.gates.beta[r0], now.gates.beta[r0 + 8]};
    const float factor[2] = {tail[0] * weight[0], tail[1] * weight[1]};
    float kept[2] = {};
    warpgroup_wait<0>();
    settle(y);
    settle(u);
    add_scaled(sum[0], y, factor, s.k[0], kept, m0, l);  // 2
#pragma unroll
    for (int j = 1; j < SLABS; ++j) {
      warpgroup_begin();
      multiply_tiles<true, Inner::last, Inner::first>(y, now.v, now.dstate[j], warp);
      warpgroup_commit();
      warpgroup_wait<0>();
      settle(y);
      add_scaled(sum[j], y, factor, s.k[j], kept, m0, l);
    }
    kept[0] = quad_sum(kept[0]), kept[1] = quad_sum(kept[1]);
    if (l.c == 0) sums.kept[r0] = kept[0], sums.kept[r0 + 8] = kept[1];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) u[n][e] *= tail[e >> 1];
    settle(u);
    settle_slabs<SLABS>(sum);
    __syncthreads();
    warpgroup_begin();  // 3
    multiply_tiles<false, Inner::first, Inner::first>(u, s.scores, now.d_o, warp);
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
      multiply_tiles<false, Inner::first, Inner::first>(sum[j], s.z, s.q[j], warp);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(u);
    settle_slabs<SLABS>(sum);
    values(p, s, now, sums, u, weight, span, h, skip, value_at, warp, l);  // 4
  }
  __device__ __forceinline__ void values(const AttentionBackward& p, GradientShared<SLABS>& s,
                                         const HeadStage<SLABS>& now, Sums& sums, float (&u)[8][4],
                                         const float (&weight)[2], Span span, int h, float skip,
                                         int64_t value_at, int warp, const Lane& l) {
    const int m0 = 16 * warp;
    float through = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float dw = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 v = pair_at(now.v, m0, n, half, l), d = pair_at(now.d_o, m0, n, half, l);
        float &first = u[n][2 * half], &second = u[n][2 * half + 1];
        dw += v.x * first + v.y * second;
        through += v.x * d.x + v.y * d.y;
        first = weight[half] * first + skip * d.x;
        second = weight[half] * second + skip * d.y;
      }
      dw = quad_sum(dw);
      const int r = m0 + l.g + 8 * half;
      if (p.dweight && l.c == 0 && r < span.rows) p.dweight[p.gate_at(span.first + r, h)] = dw;
    }
    through = warp_sum(through);
    if ((threadIdx.x & 31) == 0) sums.through[warp] = through;
    if (!p.dv) return;
    unsigned a[4][4];
    values_as_left(a, u);
    put_tile_rows(s.dv, a, m0, l);
    store_rows(p.dv + value_at, p.value_stride(), s.dv, m0, span.rows, p.value_dim);
  }
};

// One warp; lane l has tokens 2l and 2l+1: dg_t = Σ_{i>=t} (row_i − column_i + reads_i) + Σ_{j<t}
// kept_j + γ_n <S,D>, where the sums of Z∘q kᵀ over rows minus those over columns leave the pairs
// that cross t. And the chunk's part of dskip.
__device__ __forceinline__ void write_gate_gradients(const AttentionBackward& p, const Sums& s,
                                                     float total, Span span, int64_t chunk, int h) {
  const int lane = int(threadIdx.x) & 31;
  float carry = 0;
  for (int w = 0; w < 8; ++w) carry += s.carry[w];
  carry *= total;
  if (p.through_run) carry -= p.through_run[chunk / p.pieces * p.value_heads + h];
  float after[2], before[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    float column = 0;
    for (int w = 0; w < 4; ++w) column += s.column_z[w][t];
    after[e] = s.row_z[t] - column + s.reads[t];
    before[e] = s.kept[t];
  }
  float suffix = after[0] + after[1], prefix = before[0] + before[1];
  const float own_prefix = prefix;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const float down = __shfl_down_sync(0xffffffffu, suffix, o);
    const float up = __shfl_up_sync(0xffffffffu, prefix, o);
    if (lane + o < 32) suffix += down;
    if (lane >= o) prefix += up;
  }
  const float dg[2] = {suffix + (prefix - own_prefix),
                       suffix - after[0] + (prefix - own_prefix) + before[0]};
#pragma unroll
  for (int e = 0; e < 2; ++e)
    if (p.dg && 2 * lane + e < span.rows)
      p.dg[p.gate_at(span.first + 2 * lane + e, h)] = dg[e] + carry;
  if (p.dskip && lane == 0)
    p.dskip[chunk * p.value_heads + h] =
        (s.through[0] + s.through[1]) + (s.through[2] + s.through[3]);
}

// Where a part of the heads of one group and chunk begins.
struct PartOfChunk {
  int64_t chunk, column, columns;  // column of G·parts
  int first, count;                // heads
  Span span;

  __device__ __forceinline__ PartOfChunk(const AttentionBackward& p, int64_t item)
      : columns(int64_t(p.heads) * p.parts) {
    chunk = item / columns, column = item % columns;
    count = p.value_heads / p.heads / p.parts;
    first = int(column) * count;
    span = chunk_span(p, chunk);
  }
};

template <int SLABS>
__device__ __forceinline__ void fetch_head(const AttentionBackward& p, const PartOfChunk& at, int h,
                                           HeadStage<SLABS>& to) {
  const TileMover<kThreads> mover{int(threadIdx.x)};
  const int64_t value = p.value_at(at.span.first, h), state = p.state_at(at.chunk, h);
  mover.fetch(to.v, p.v_row(at.span.first, h), p.v_step, at.span.rows, p.value_dim);
  mover.fetch(to.d_o, p.d_o + value, p.value_stride(), at.span.rows, p.value_dim);
#pragma unroll
  for (int j = 0; j < SLABS; ++j) {
    const int width = p.key_dim - 64 * j;
    mover.fetch(to.state[j], p.states + state + 64 * j, p.key_dim, p.value_dim, width);
    mover.fetch(to.dstate[j], p.dstates + state + 64 * j, p.key_dim, p.value_dim, width);
  }
  mover.fetch_gates(to.gates, p.gates_of(at.chunk, h));
  commit_copies();
}

// One group's way through the heads; both meet at two barriers a head. Then its sum to memory.
template <int SLABS, class Side>
__device__ __forceinline__ void walk_heads(const AttentionBackward& p, const PartOfChunk& at,
                                           GradientShared<SLABS>& s, bf16_t* g, float* g_terms,
                                           SwizzledTile (&tiles)[SLABS], int warp, const Lane& l) {
  Side side;
#pragma unroll
  for (int j = 0; j < SLABS; ++j)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) side.sum[j][n][e] = 0.f;
  float total = 0;
  for (int i = 0; i < at.count; ++i) {
    wait_copy_groups<0>();
    publish_tiles();
    __syncthreads();
    const HeadStage<SLABS>& now = s.stage[i & 1];
    const int h = at.first + i;
    if (i == 0) side.start(s, warp, l);
    if (i + 1 < at.count) fetch_head(p, at, h + 1, s.stage[(i + 1) & 1]);
    if (threadIdx.x < 32 && i > 0)
      write_gate_gradients(p, s.sums[(i - 1) & 1], total, at.span, at.chunk, h - 1);
    total = now.gates.total[0];
    side.head(p, s, now, s.sums[i & 1], at.span, h, p.skip ? p.skip[h] : 0.f,
              p.value_at(at.span.first, h), warp, l);
  }
  __syncthreads();
  if (threadIdx.x < 32)
    write_gate_gradients(p, s.sums[(at.count - 1) & 1], total, at.span, at.chunk,
                         at.first + at.count - 1);
  const int m0 = 16 * warp;
  const int64_t row = at.span.first * at.columns + at.column;
#pragma unroll
  for (int j = 0; j < SLABS; ++j) {
    unsigned a[4][4];
    values_as_left(a, side.sum[j]);
    put_tile_rows(tiles[j], a, m0, l);
    if (g)
      store_rows(g + row * p.key_dim + 64 * j, at.columns * p.key_dim, tiles[j], m0, at.span.rows,
                 p.key_dim - 64 * j);
    if (!g_terms) continue;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = m0 + l.g + 8 * half, c = 64 * j + 8 * n + 2 * l.c;
        if (r < at.span.rows && c < p.key_dim)
          *reinterpret_cast<float2*>(g_terms + (row + r * at.columns) * p.key_dim + c) = {
              side.sum[j][n][2 * half], side.sum[j][n][2 * half + 1]};
      }
  }
}

// Item (chunk, group, part of its heads).
template <int SLABS>
__global__ void __launch_bounds__(kThreads, 1) gradient_kernel(AttentionBackward p) {
  auto& s = swizzled_shared<GradientShared<SLABS>>();
  const Lane l;
  const int warp = (int(threadIdx.x) >> 5) & 3;
  for (int64_t item = blockIdx.x; item < p.chunks * p.heads * p.parts; item += gridDim.x) {
    const PartOfChunk at(p, item);
    if (at.span.rows == 0) {
      for (int i = int(threadIdx.x); p.dskip && i < at.count; i += kThreads)
        p.dskip[at.chunk * p.value_heads + at.first + i] = 0.f;
      continue;
    }
    const TileMover<kThreads> mover{int(threadIdx.x)};
#pragma unroll
    for (int j = 0; j < SLABS; ++j) {
      const int width = p.key_dim - 64 * j;
      mover.fetch(s.q[j], p.q_row(at.span.first, at.first) + 64 * j, p.q_step, at.span.rows, width);
      mover.fetch(s.k[j], p.k_row(at.span.first, at.first) + 64 * j, p.k_step, at.span.rows, width);
    }
    fetch_head(p, at, at.first, s.stage[0]);
    if (threadIdx.x < kThreads / 2)
      walk_heads<SLABS, QuerySide<SLABS>>(p, at, s, p.dq, p.dq_terms, s.stage[0].state, warp, l);
    else
      walk_heads<SLABS, KeySide<SLABS>>(p, at, s, p.dk, p.dk_terms, s.stage[0].dstate, warp, l);
    __syncthreads();
  }
}

}  // namespace

void fast_attention_bwd(const LinearAttentionProblem& problem, const LinearAttentionSaved& saved,
                        const Tensor& given_o, const Tensor& dht, const Tensor& given_contributions,
                        const LinearAttentionGradients& grads) {
  const auto aligned = [](const Tensor& t) {  // as copies and tensor maps want them
    return t && reinterpret_cast<uintptr_t>(t.raw()) % 16 != 0 ? t.clone() : t;
  };
  const Tensor d_o = aligned(given_o), dcontributions = aligned(given_contributions);
  const Device device = problem.v.device();
  const int64_t h = problem.heads(), groups = problem.groups(), k = problem.key_dim();
  const int64_t v = problem.value_dim(), tokens = problem.batch() * problem.time();
  const Cut cut(problem);
  const int parts = parts_of(cut.chunks * groups, h / groups);
  const Tensor dstates = Tensor::empty_like(saved.states);
  const auto terms = [&](const Tensor& grad) {
    return grad && parts > 1 ? Tensor::empty({tokens, groups * parts, k}, DType::f32, device)
                             : Tensor();
  };
  const Tensor dq_terms = terms(grads.dq), dk_terms = terms(grads.dk);
  const Tensor dskip = grads.dskip ? Tensor::empty({cut.chunks, h}, DType::f32, device) : Tensor();
  const int64_t runs = cut.chunks / cut.pieces * h;
  const Tensor through_run = dcontributions ? Tensor::empty({runs}, DType::f32, device) : Tensor();
  const Tensor before = run_offsets(problem, cut);
  const cudaStream_t stream = stream_of(dstates);
  AttentionBackward p{make_fast_attention(problem, cut, saved, before)};
  p.d_o = ptr<bf16>(d_o), p.dstates = ptr<bf16>(dstates);
  p.dq = parts == 1 ? ptr<bf16>(grads.dq) : nullptr;
  p.dk = parts == 1 ? ptr<bf16>(grads.dk) : nullptr;
  p.dv = ptr<bf16>(grads.dv);
  p.dq_terms = ptr<float>(dq_terms), p.dk_terms = ptr<float>(dk_terms);
  p.dg = ptr<float>(grads.dg), p.dweight = ptr<float>(grads.dweight);
  p.dskip = ptr<float>(dskip);
  p.parts = parts;
  p.dcontributions = ptr<bf16>(dcontributions), p.through_run = ptr<float>(through_run);
  if (dcontributions && runs > 0) {
    run_product_kernel<<<grid_of(runs), kThreads, 0, stream>>>(p);
    check_launch();
  }
  Tensor buffers[3];
  const AttentionSegments segments = cut_sequences(p, device, buffers);
  const TileSource q = token_source(p, p.q, k, groups, p.q_step, device);
  const TileSource upstream = token_source(p, p.d_o, v, h, h * v, device);
  TileSource written{};
  if (dcontributions)
    written = {tile_map(p.dcontributions, v, runs, k * v, k, v, device), p.dcontributions, k * v, v,
               int(v)};
  reverse_scan(p, segments, {{q}, upstream, written, can_map({q, upstream})}, ptr<float>(dht),
               ptr<bf16>(dstates), ptr<float>(grads.dh0), stream);
  visit_fast_slabs(k, [&]<int SLABS>() {
    launch_fast<GradientShared<SLABS>>(gradient_kernel<SLABS>, kThreads,
                                       grid_of(p.chunks * groups * parts), stream, p);
  });
  sum_groups(dq_terms, grads.dq, parts);
  sum_groups(dk_terms, grads.dk, parts);
  if (grads.dskip) sum_chunks(dskip, grads.dskip);
}

}  // namespace ebb::gpu::linear_attention
