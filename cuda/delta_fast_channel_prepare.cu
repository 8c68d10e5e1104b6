// Delta rule with a decay per channel in bf16 on tensor cores: what needs no state, chunk by chunk
// (Kimi Linear 2025, chunked form): the scans' operands q∘γ, b∘k∘γ and k∘τ, the scores P and the
// inverse A.
//
// P_ij and M_ij are sums over channels of q_i or b_i k_i times k_j e^{G_i−G_j}, and only a
// difference of decays is safe. The 64 tokens are a binary tree: where i lies in the right half of
// a node and j in the left, e^{G_i−G_j} is the decay from the middle to i times that from j to the
// middle, both at most 1, and the block is a product of matrices. At the leaves, 8 tokens, factors
// refer to half of the leaf's decay; a token's log decay counts there as at least −16, so that
// none leaves the range of bf16 (what is lost is below e^-16 of the exact score). P_ii has no decay
// and is summed in f32 from q and k as they are: it is all that the first token reads, and where
// q_0 and k_0 are nearly orthogonal a norm behind it would blow up what rounding left.
//
// Where nothing is erased (no b, M and A), operands of P are sums of two numbers in bf16: the other
// half of each product's rows is free for the second one of q. P then has the error of its own
// rounding alone.
//
// A warp owns 8 tokens, a lane one of them and 16 of 64 channels: the order of channels inside a
// product is free, and a lane's values are its fragments of either operand as they are.
//
// Raw inputs (cuda/delta_channel_logits.cuh): q and k stay as they are in bf16, their reciprocal
// lengths go into factors of tokens that are there anyway: that of k_j into τ and the right
// operands, that of k_i into b, that of q_i into the rows of P and into q∘γ.
#include "cuda/delta_channel_prepare_rows.cuh"
#include "cuda/delta_fast_inverse.cuh"

namespace ebb::gpu::delta {
namespace {

constexpr int kThreads = 256;
constexpr int kTotalRow = 80;  // 16 channels and 4 more, so that a quad's reads do not collide
struct PrepareShared {
  float total[8][kTotalRow];  // decay over a warp's tokens
  uint4 keys[12][2][32];      // right operands: levels of 16, 32 and 64 tokens, four each
  float m[64 * kInverseRow], p[64 * kInverseRow];

  // PLAIN, where there is no M: what rounding has cut off the keys.
  __device__ __forceinline__ uint4 (&rest_of_keys(int node))[2][32] {
    return reinterpret_cast<uint4(*)[2][32]>(m)[node];
  }
};
static_assert(sizeof(PrepareShared::keys) <= sizeof(PrepareShared::m));

// d += [q; b] kᵀ: rows 0...7 of d are those of q, rows 8...15 those of b. PLAIN: b is what rounding
// has cut off q; both rows are then one sum.
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
__device__ __forceinline__ void add_parts(float (&d)[4]) { d[0] += d[2], d[1] += d[3]; }
// Row 8w+g of P and, unless PLAIN, M, tile `column` of 8 tokens: put there by the first slab of K,
// else added.
template <bool PLAIN>
__device__ __forceinline__ void put_tile(PrepareShared& s, const float (&x)[4], int warp,
                                         int column, bool add, const Lane& l) {
  const int at = (8 * warp + l.g) * kInverseRow + 8 * column + 2 * l.c;
  float2 *p = reinterpret_cast<float2*>(s.p + at), *m = reinterpret_cast<float2*>(s.m + at);
  const float2 score = add ? *p : float2{}, inner = add && !PLAIN ? *m : float2{};
  const int last = column == warp ? l.g : 8;
  *p = {2 * l.c <= last ? score.x + x[0] : 0.f, 2 * l.c + 1 <= last ? score.y + x[1] : 0.f};
  if (PLAIN) return;
  *m = {2 * l.c < last ? inner.x + x[2] : 0.f, 2 * l.c + 1 < last ? inner.y + x[3] : 0.f};
}
// Its rows in the columns of the keys of a node.
template <bool PLAIN>
__device__ __forceinline__ void put_product(PrepareShared& s, const unsigned (&q)[kOwn / 2],
                                            const unsigned (&b)[kOwn / 2], int node, int warp,
                                            int column, bool add, const Lane& l) {
  float d[4] = {};
  multiply_keys(d, q, b, s.keys[node]);
  if constexpr (PLAIN) multiply_keys(d, q, b, s.rest_of_keys(node)), add_parts(d);
  put_tile<PLAIN>(s, d, warp, column, add, l);
}

// The leaf, from registers; sum and total as of sums_of. LOGITS: `key` is log2 of what the key is
// multiplied with.
template <bool PLAIN, bool LOGITS, bool GATED>
__device__ __forceinline__ void multiply_leaf(float (&d)[4], const Row<GATED>& row,
                                              const float (&sum)[kOwn], const float (&total)[kOwn],
                                              float key) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned q[2], b[2], k[2], rest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int x = 2 * i + h, c = 2 * x;
      const float first = sum[c] - 0.5f * total[c], second = sum[c + 1] - 0.5f * total[c + 1];
      const float up[2] = {exp2_fast(first), exp2_fast(second)};
      const auto rest_of = [](float y, float z, unsigned rounded) {
        return pack_bf16(y - low_half(rounded), z - high_half(rounded));
      };
      const float query[2] = {low_half(row.q[x]) * up[0], high_half(row.q[x]) * up[1]};
      const float kept[2] = {low_half(row.k[x]) * exp2_fast(LOGITS ? key - first : -first),
                             high_half(row.k[x]) * exp2_fast(LOGITS ? key - second : -second)};
      q[h] = pack_bf16(query[0], query[1]), k[h] = pack_bf16(kept[0], kept[1]);
      if constexpr (PLAIN) {
        b[h] = rest_of(query[0], query[1], q[h]), rest[h] = rest_of(kept[0], kept[1], k[h]);
      } else {
        b[h] = pack_bf16(low_half(row.k[x]) * row.erase[GATED ? c : 0] * up[0],
                         high_half(row.k[x]) * row.erase[GATED ? c + 1 : 0] * up[1]);
      }
    }
    mma(d, {q[0], b[0], q[1], b[1]}, k[0], k[1]);
    if constexpr (PLAIN) mma(d, {q[0], b[0], q[1], b[1]}, rest[0], rest[1]);
  }
  if constexpr (PLAIN) add_parts(d);
}

// Right operands of the warp's tokens for the nodes in whose left half they lie; then k∘τ, stored.
template <bool SCORES, bool PLAIN, bool GATED>
__device__ __forceinline__ void right_operands(PrepareShared& s, const Row<GATED>& row,
                                               float (&tail)[kOwn], int warp, int own,
                                               bf16_t* g_kept, int channel, int key_dim) {
  unsigned k[kOwn / 2];
  const auto put = [&](int node) {
    if (!SCORES) return;
    scaled(k, row.k, tail), put_keys(s.keys[node], k);
    if constexpr (PLAIN) {
      unsigned rest[kOwn / 2];
      rest_of_scaled(rest, k, row.k, tail), put_keys(s.rest_of_keys(node), rest);
    }
  };
  if (!(warp & 1)) {
    put(warp / 2);
    times(tail, &s.total[warp + 1][own]);
  }
  if (!(warp & 2)) {
    put(4 + 2 * (warp >> 2) + (warp & 1));
    const int next = (warp | 1) + 1;
    times(tail, &s.total[next][own]), times(tail, &s.total[next + 1][own]);
  }
  if (!(warp & 4)) {
    put(8 + warp);
    for (int i = 4; i < 8; ++i) times(tail, &s.total[i][own]);
  }
  if (g_kept) {
    scaled(k, row.k, tail);
    store_row(g_kept, k, channel, key_dim);
  }
}

// Left operands times what lies before, level by level; then scale q∘γ and b∘k∘γ, stored.
template <bool SCORES, bool PLAIN, bool GATED>
__device__ __forceinline__ void left_operands(PrepareShared& s, const Row<GATED>& row,
                                              float (&head)[kOwn], int warp, int own, bool add,
                                              float scale, bf16_t* g_queries, bf16_t* g_erased,
                                              int channel, int key_dim, const Lane& l) {
  unsigned q[kOwn / 2], b[kOwn / 2] = {};
  const auto erase = [&] {
    if constexpr (PLAIN)
      rest_of_scaled(b, q, row.q, head);
    else
      scaled_erase(b, row, head);
  };
  if (warp & 1) {
    if (SCORES) {
      scaled(q, row.q, head), erase();
      put_product<PLAIN>(s, q, b, warp / 2, warp, warp - 1, add, l);
    }
    times(head, &s.total[warp - 1][own]);
  }
  if (warp & 2) {
    const int first = warp & 4;
    if (SCORES) {
      scaled(q, row.q, head), erase();
#pragma unroll
      for (int j = 0; j < 2; ++j)
        put_product<PLAIN>(s, q, b, 4 + first / 2 + j, warp, first + j, add, l);
    }
    times(head, &s.total[first][own]), times(head, &s.total[first + 1][own]);
  }
  if (warp & 4) {
    if (SCORES) {
      scaled(q, row.q, head), erase();
#pragma unroll
      for (int j = 0; j < 4; ++j) put_product<PLAIN>(s, q, b, 8 + j, warp, j, add, l);
    }
    for (int i = 0; i < 4; ++i) times(head, &s.total[i][own]);
  }
  if (!g_queries) return;
  if constexpr (!PLAIN) {
    erase();
    store_row(g_erased, b, channel, key_dim);
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) head[i] *= scale;
  scaled(q, row.q, head);
  store_row(g_queries, q, channel, key_dim);
}

// Eight numbers of row `row` from column c on as bf16; none beyond the diagonal.
__device__ __forceinline__ void store_lower(bf16_t* g, const float* s, float scale, int row,
                                            int c) {
  float x[8] = {};
  if (c <= row) load_pack<float>(x, s + row * kInverseRow + c);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = c + e <= row ? scale * x[e] : 0.f;
  store_pack<bf16_t>(g + row * kChunk + c, x);
}

// γ_n by channel of a slab, and β (1 where V comes with its gate).
template <class P>
__device__ __forceinline__ void write_total(const PrepareShared& s, const P& p, Span span,
                                            int64_t chunk, int hv, int slab) {
  const int t = int(threadIdx.x);
  float* g_total = p.total + p.total_at(chunk, hv);
  if (t < 64 && 64 * slab + t < p.key_dim) {
    float f = 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) f *= s.total[i][t / kOwn * (kOwn + 4) + t % kOwn];
    g_total[64 * slab + t] = f;
  }
  if (slab == 0 && t >= 64 && t < 128) {
    const int r = t - 64;
    g_total[p.key_dim + r] = r >= span.rows ? 0.f
                             : p.erase      ? 1.f
                                            : p.write_strength(span.first + r, hv);
  }
}

// w∘V of a chunk, by threads `first`....
template <class P>
__device__ __forceinline__ void write_written(const P& p, Span span, int hv, int first) {
  const int packs = p.value_dim / 8;
  for (int i = int(threadIdx.x) - first; i < span.rows * packs; i += kThreads - first) {
    const int r = i / packs, c = i % packs * 8;
    const int64_t from = p.value_at(span.first + r, hv) + c;
    const uint4 v = *reinterpret_cast<const uint4*>(p.v + p.v_at(span.first + r, hv) + c);
    if constexpr (kOfLogits<P>)
      if (p.writes) {
        const Eight raw(
            load_eight(p.writes + (span.first + r) * p.write_step + int64_t(hv) * p.value_dim + c));
        const Eight x(v);
        float y[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] = x.at(e) * sigmoids(raw.at(e)).x;
        *reinterpret_cast<uint4*>(p.written + p.row_at(span.first + r, hv) * p.value_dim + c) =
            pack_eight(y);
        continue;
      }
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
// its leaf. 2 right operands, k∘τ. 3 left operands and their products, q∘γ and b∘k∘γ. Then 4 A =
// (I+M)⁻¹ by two warps; the others store P, and w∘V. 5 A stored. PLAIN: nothing is erased, so that
// there is no b∘k∘γ, M and A.
template <bool SCORES, bool GATED, bool PLAIN, class P = Channel<bf16_t>>
__global__ void __launch_bounds__(kThreads, GATED ? 2 : 3) channel_prepare_kernel(P p) {
  constexpr bool kLogits = kOfLogits<P>;
  auto& s = dynamic_shared<PrepareShared>();
  const Lane l;
  const int warp = int(threadIdx.x) >> 5, hv = int(blockIdx.x), own = (kOwn + 4) * l.c;
  for (int64_t chunk = blockIdx.y; chunk < p.chunks; chunk += gridDim.y) {
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    const int64_t token = span.first + 8 * warp + l.g;
    const bool inside = 8 * warp + l.g < span.rows;
    for (int slab = 0; 64 * slab < p.key_dim; ++slab) {
      const int channel = 64 * slab + kOwn * l.c;
      Row<GATED> row;
      float head[kOwn], tail[kOwn];  // 1
      load_row(row, p, token, hv, channel, inside);
      float2 length{1.f, 1.f};  // reciprocals, of the query and of the key
      float key = 0;
      if constexpr (kLogits)
        if (p.normalize) {
          length = lengths_of(row), key = log2_fast(length.y);
#pragma unroll
          for (float& b : row.erase) b *= length.y;
          if (p.lengths && l.c == 0)
            p.lengths[(chunk * p.value_heads + hv) * kChunk + 8 * warp + l.g] = length;
        }
      const bool steep = load_decays(head, p, token, hv, channel, inside, kLeast);
      float d[4] = {};
      if (SCORES && __any_sync(0xffffffffu, steep)) {
        load_decays(head, p, token, hv, channel, inside, kLeafLeast);
        sums_of(head, tail);
        multiply_leaf<PLAIN, kLogits>(d, row, head, tail, key);
        load_decays(head, p, token, hv, channel, inside, kLeast);
        sums_of(head, tail);
      } else {
        sums_of(head, tail);
        if (SCORES) multiply_leaf<PLAIN, kLogits>(d, row, head, tail, key);
      }
      if (SCORES) {
        float score = own_score(row);
        if (kLogits) score *= length.y;
        if (kLogits && l.c == 0) s.p[(8 * warp + l.g) * kInverseRow + kChunk] = length.x;
        if (2 * l.c == l.g) d[0] = score;
        if (2 * l.c + 1 == l.g) d[1] = score;
        put_tile<PLAIN>(s, d, warp, warp, slab > 0, l);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        tail[i] = exp2_fast(tail[i] - head[i]);
        if (kLogits) tail[i] *= length.y;
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
      right_operands<SCORES, PLAIN>(s, row, tail, warp, own, inside ? p.kept + at : nullptr,
                                    channel,
                                    p.key_dim);  // 2
      write_total(s, p, span, chunk, hv, slab);
      if (SCORES) __syncthreads();
      left_operands<SCORES, PLAIN>(
          s, row, head, warp, own, slab > 0, kLogits ? p.scale * length.x : p.scale,
          inside ? p.queries + at : nullptr, p.erased + at, channel, p.key_dim,
          l);  // 3
    }
    __syncthreads();
    if (!SCORES) continue;
    const int64_t square = p.row_at(span.first, hv) * kChunk;
    constexpr int kFirst = PLAIN ? 0 : 64;  // the others invert
    const auto store = [&] {
      for (int i = int(threadIdx.x) - kFirst; i < span.rows * 8; i += kThreads - kFirst)
        store_lower(p.scores + square, s.p,
                    kLogits ? p.scale * s.p[(i >> 3) * kInverseRow + kChunk] : p.scale, i >> 3,
                    8 * (i & 7));
      if (GATED && p.written) write_written(p, span, hv, 64);
    };
    if constexpr (PLAIN)
      store();
    else
      invert_by_two_warps(s.m, store);  // 4
    __syncthreads();
    for (int i = int(threadIdx.x); !PLAIN && i < span.rows * 8; i += kThreads)  // 5
      store_lower(p.a + square, s.m, 1.f, i >> 3, 8 * (i & 7));
    __syncthreads();
  }
}

}  // namespace

void channel_fast_prepare(const Channel<bf16_t>& p, Prepare what, cudaStream_t stream) {
  const dim3 grid(unsigned(p.value_heads), unsigned(std::min<int64_t>(p.chunks, 65535)));
  const bool scores = what == Prepare::everything;
  launch_fast<PrepareShared>(p.plain   ? scores ? channel_prepare_kernel<true, false, true>
                                                : channel_prepare_kernel<false, false, true>
                               : p.erase ? scores ? channel_prepare_kernel<true, true, false>
                                                  : channel_prepare_kernel<false, true, false>
                               : scores ? channel_prepare_kernel<true, false, false>
                                       : channel_prepare_kernel<false, false, false>,
                             kThreads, grid, stream, p);
}

void channel_fast_prepare(const LogitChannel& p, Prepare what, cudaStream_t stream) {
  const dim3 grid(unsigned(p.value_heads), unsigned(std::min<int64_t>(p.chunks, 65535)));
  const bool scores = what == Prepare::everything;
  using P = LogitChannel;
  launch_fast<PrepareShared>(p.gated  ? scores ? channel_prepare_kernel<true, true, false, P>
                                               : channel_prepare_kernel<false, true, false, P>
                              : scores ? channel_prepare_kernel<true, false, false, P>
                                      : channel_prepare_kernel<false, false, false, P>,
                             kThreads, grid, stream, p);
}

}  // namespace ebb::gpu::delta
