// Causal softmax attention in bf16 on tensor cores, backward (cuda/attention_fast.cuh). Two kernels
// that both make the scores again, so that no sum is taken in an order that chance decides: one
// owns queries and adds up dq, the other owns keys and adds up dk and dv.
#include "cuda/attention_fast.cuh"

namespace ebb::gpu::attend {
namespace {

using delta::exp2_fast;

template <int SLABS>
struct QueryShared {
  SwizzledTile q[kGroups][SLABS], d_o[kGroups][SLABS];  // at the end dq in q
  struct Stage {
    SwizzledTile k[SLABS], v[SLABS];
  } stage[SLABS == 1 ? 2 : 1];
};

template <int SLABS>
__device__ __forceinline__ void fetch_keys(typename QueryShared<SLABS>::Stage& s,
                                           const Backward<bf16_t>& p, const Tile& t, int64_t key,
                                           int hk) {
  const int64_t at = p.key_at(t.key + key, hk);
  fetch_rows(s.k, p.k + at, p.key_stride(), t.keys - key, p.width);
  fetch_rows(s.v, p.v + at, p.key_stride(), t.keys - key, p.width);
}

// Block (head, tile of 128 queries). Per 64 keys: 1 scores and dO vᵀ. 2 dS = a∘(dO vᵀ − D). 3 dq +=
// dS k. At the end: 4 scale dq by way of q's tiles.
template <int SLABS>
__global__ void __launch_bounds__(kFastThreads, SLABS == 1 ? 2 : 1)
    query_kernel(Backward<bf16_t> p, int64_t first_item) {
  constexpr int kStages = SLABS == 1 ? 2 : 1;
  auto& s = swizzled_shared<QueryShared<SLABS>>();
  const Lane l;
  const int group = int(threadIdx.x) >> 7, warp = int(threadIdx.x) >> 5 & 3;
  const int64_t item = first_item + blockIdx.x;
  const int h = int(item % p.heads), hk = h / (p.heads / p.key_heads);
  const Tile t = tile_of<kRows>(p, p.query, false, tile_index(p.query, false, item / p.heads));
  if (t.rows == 0) return;
  const int64_t position = t.first + t.before(), mine = position + 64 * group;
  const int64_t seen = position - p.window + 1, begin = seen <= 0 ? 0 : seen / kColumns * kColumns;
  const int64_t end = position + t.rows, at_q = p.at(t.query + t.first, h);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int64_t rows = 64 * i < t.rows ? 64 * i * p.stride() : 0;
    fetch_rows(s.q[i], p.q + at_q + rows, p.stride(), t.rows - 64 * i, p.width);
    fetch_rows(s.d_o[i], p.d_o + at_q + rows, p.stride(), t.rows - 64 * i, p.width);
  }
  fetch_keys<SLABS>(s.stage[0], p, t, begin, hk);
  delta::commit_copies();
  float lse[2], product[2];  // times log2 e; D
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 64 * group + 16 * warp + l.g + 8 * r;
    const int64_t at = (t.query + t.first + row) * p.heads + h;
    lse[r] = row < t.rows ? p.lse[at] * kLog2e : 0.f;
    product[r] = row < t.rows ? p.delta[at] : 0.f;
  }

  const float scale = p.scale * kLog2e;
  float dq[SLABS][8][4];
  clear(dq);
  int at = 0;
  for (int64_t key = begin; key < end; key += kColumns) {
    delta::wait_copy_groups<0>();
    publish_tiles();
    __syncthreads();
    const bool more = key + kColumns < end;
    if (kStages == 2 && more) {
      fetch_keys<SLABS>(s.stage[(at ^ 1) % kStages], p, t, key + kColumns, hk);
      delta::commit_copies();
    }
    const Sight sight = sight_of(p, mine, key);
    if (sight != Sight::none) {
      const auto& now = s.stage[at];
      float x[8][4], y[8][4];
      warpgroup_begin();
      multiply_channels(x, s.q[group], now.k, warp);  // 1
      multiply_channels(y, s.d_o[group], now.v, warp);
      warpgroup_commit();
      warpgroup_wait<0>();
      settle(x), settle(y);
#pragma unroll
      for (int n = 0; n < 8; ++n)  // 2
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[n][e] = exp2_fast(fmaf(x[n][e], scale, -lse[e >> 1])) * (y[n][e] - product[e >> 1]);
      if (sight == Sight::some || p.window == 1) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int64_t row = mine + 16 * warp + l.g + 8 * (e >> 1);
            const bool one = row == 0 || p.window == 1;  // one key in sight: no gradient
            if (one || !in_sight(p, row, key + 8 * n + 2 * l.c + (e & 1))) x[n][e] = 0.f;
          }
      }
      unsigned a[4][4];
      delta::values_as_left(a, x);
      settle(a);
      settle_all(dq);
      warpgroup_begin();
      add_rows(dq, a, now.k);  // 3
      warpgroup_commit();
      warpgroup_wait<0>();
      settle_all(dq);
    }
    if (kStages == 1 && more) {
      __syncthreads();
      fetch_keys<SLABS>(s.stage[0], p, t, key + kColumns, hk);
      delta::commit_copies();
    }
    if (kStages == 2) at ^= 1;
  }

  const float f[2] = {p.scale, p.scale};  // 4
  __syncthreads();
  put_rows(s.q[group], dq, f, warp, l);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    store_rows(p.dq + at_q + 64 * i * p.stride(), s.q[i], p.stride(), t.rows - 64 * i, p.width);
}

template <int SLABS>
struct KeyShared {
  SwizzledTile k[kGroups][SLABS], v[kGroups][SLABS];  // at the end dk, dv
  struct Stage {
    SwizzledTile q[SLABS], d_o[SLABS];
    float lse[64], product[64];  // lse times log2 e, infinite where there is no query; D
  } stage[SLABS == 1 ? 2 : 1];
};

template <int SLABS>
__device__ __forceinline__ void fetch_queries(typename KeyShared<SLABS>::Stage& s,
                                              const Backward<bf16_t>& p, const Tile& t,
                                              int64_t query, int h) {
  const int64_t at = p.at(t.query + query, h), rows = t.queries - query;
  fetch_rows(s.q, p.q + at, p.stride(), rows, p.width);
  fetch_rows(s.d_o, p.d_o + at, p.stride(), rows, p.width);
  if (threadIdx.x < 64) {
    const int64_t row = (t.query + query + threadIdx.x) * p.heads + h;
    const bool inside = int64_t(threadIdx.x) < rows;
    s.lse[threadIdx.x] = inside ? p.lse[row] * kLog2e : INFINITY;
    s.product[threadIdx.x] = inside ? p.delta[row] : 0.f;
  }
}

// Block (key head, tile of 128 keys). Per head of the group and 64 queries: 1 scores and v dOᵀ,
// keys by rows. 2 a, dS. 3 dv += a dO, dk += dS q. At the end: 4 dv and scale dk by way of the
// tiles of v and k.
template <int SLABS>
__global__ void __launch_bounds__(kFastThreads, 1)
    key_kernel(Backward<bf16_t> p, int64_t first_item) {
  constexpr int kStages = SLABS == 1 ? 2 : 1;
  auto& s = swizzled_shared<KeyShared<SLABS>>();
  const Lane l;
  const int group = int(threadIdx.x) >> 7, warp = int(threadIdx.x) >> 5 & 3;
  const int64_t item = first_item + blockIdx.x;
  const int hk = int(item % p.key_heads), heads = p.heads / p.key_heads;
  const Tile t = tile_of<kRows>(p, p.key, true, tile_index(p.key, true, item / p.key_heads));
  if (t.rows == 0) return;
  const int64_t mine = t.first + 64 * group, at_k = p.key_at(t.key + t.first, hk);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int64_t rows = 64 * i < t.rows ? 64 * i * p.key_stride() : 0;
    fetch_rows(s.k[i], p.k + at_k + rows, p.key_stride(), t.rows - 64 * i, p.width);
    fetch_rows(s.v[i], p.v + at_k + rows, p.key_stride(), t.rows - 64 * i, p.width);
  }
  // Queries at positions first ... first + rows + window − 2, for each head of the group in turn.
  const int64_t begin = ::max(int64_t(0), t.first - t.before()) / kColumns * kColumns;
  const int64_t end = ::min(t.queries, t.first + t.rows - t.before() + p.window - 1);
  const int64_t per_head = end > begin ? (end - begin + kColumns - 1) / kColumns : 0;
  const int64_t steps = per_head * heads;
  const auto fetch = [&](typename KeyShared<SLABS>::Stage& to, int64_t step) {
    fetch_queries<SLABS>(to, p, t, begin + step % per_head * kColumns,
                         hk * heads + int(step / per_head));
  };
  if (steps > 0) fetch(s.stage[0], 0);
  delta::commit_copies();

  const float scale = p.scale * kLog2e;
  float dk[SLABS][8][4], dv[SLABS][8][4];
  clear(dk), clear(dv);
  int at = 0;
  for (int64_t step = 0; step < steps; ++step) {
    delta::wait_copy_groups<0>();
    publish_tiles();
    __syncthreads();
    if (kStages == 2 && step + 1 < steps) {
      fetch(s.stage[(at ^ 1) % kStages], step + 1);
      delta::commit_copies();
    }
    const int64_t position = begin + step % per_head * kColumns + t.before();
    const Sight sight = sight_of(p, position, mine);
    if (sight != Sight::none) {
      const auto& now = s.stage[at];
      float x[8][4], y[8][4];
      warpgroup_begin();
      multiply_channels(x, s.k[group], now.q, warp);  // 1
      warpgroup_commit();
      multiply_channels(y, s.v[group], now.d_o, warp);
      warpgroup_commit();
      warpgroup_wait<1>();
      settle(x);
#pragma unroll
      for (int n = 0; n < 8; ++n) {  // 2
        const float2 lse = *reinterpret_cast<const float2*>(now.lse + 8 * n + 2 * l.c);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[n][e] = exp2_fast(fmaf(x[n][e], scale, -(e & 1 ? lse.y : lse.x)));
      }
      if (sight == Sight::some) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (!in_sight(p, position + 8 * n + 2 * l.c + (e & 1),
                          mine + 16 * warp + l.g + 8 * (e >> 1)))
              x[n][e] = 0.f;
      }
      unsigned a[4][4];
      delta::values_as_left(a, x);
      warpgroup_wait<0>();
      settle(y);
      settle(a);
      settle_all(dv);
      warpgroup_begin();
      add_rows(dv, a, now.d_o);  // 3
      warpgroup_commit();
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 product = *reinterpret_cast<const float2*>(now.product + 8 * n + 2 * l.c);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[n][e] = x[n][e] * (y[n][e] - (e & 1 ? product.y : product.x));
      }
      if (position == 0 || p.window == 1) {  // one key in sight: no gradient
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (p.window == 1 || position + 8 * n + 2 * l.c + (e & 1) == 0) y[n][e] = 0.f;
      }
      unsigned b[4][4];
      delta::values_as_left(b, y);
      settle(b);
      settle_all(dk);
      warpgroup_begin();
      add_rows(dk, b, now.q);
      warpgroup_commit();
      warpgroup_wait<0>();
      settle_all(dv), settle_all(dk);
    }
    if (kStages == 1 && step + 1 < steps) {
      __syncthreads();
      fetch(s.stage[0], step + 1);
      delta::commit_copies();
    }
    if (kStages == 2) at ^= 1;
  }

  const float ones[2] = {1.f, 1.f}, scales[2] = {p.scale, p.scale};  // 4
  delta::wait_copy_groups<0>();
  __syncthreads();
  put_rows(s.v[group], dv, ones, warp, l);
  put_rows(s.k[group], dk, scales, warp, l);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int64_t at_rows = at_k + 64 * i * p.key_stride();
    if (p.dk) store_rows(p.dk + at_rows, s.k[i], p.key_stride(), t.rows - 64 * i, p.width);
    if (p.dv) store_rows(p.dv + at_rows, s.v[i], p.key_stride(), t.rows - 64 * i, p.width);
  }
}

}  // namespace

void fast_backward(const Backward<bf16_t>& p, cudaStream_t stream) {
  delta::visit_fast_slabs(p.width, [&]<int SLABS>() {
    if (p.dq)
      launch_all<QueryShared<SLABS>>(query_kernel<SLABS>, p, p.query.tiles * p.heads, stream);
    if (p.dk || p.dv)
      launch_all<KeyShared<SLABS>>(key_kernel<SLABS>, p, p.key.tiles * p.key_heads, stream);
  });
}

}  // namespace ebb::gpu::attend
