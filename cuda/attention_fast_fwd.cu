// Causal softmax attention in bf16 on tensor cores, forward (cuda/attention_fast.cuh).
#include "cuda/attention_fast.cuh"

namespace ebb::gpu::attend {
namespace {

template <int SLABS>
struct ForwardShared {
  SwizzledTile q[kGroups][SLABS];  // at the end o
  struct Stage {
    SwizzledTile k[SLABS], v[SLABS];
  } stage[2];
};

template <int SLABS>
__device__ __forceinline__ void fetch_keys(typename ForwardShared<SLABS>::Stage& s,
                                           const Problem<bf16_t>& p, const Tile& t, int64_t key,
                                           int hk) {
  const int64_t at = p.key_at(t.key + key, hk);
  fetch_rows(s.k, p.k + at, p.key_stride(), t.keys - key, p.width);
  fetch_rows(s.v, p.v + at, p.key_stride(), t.keys - key, p.width);
}

// Of rows g and g+8 of a warp: maximum (times scale·log2 e) and sum so far.
struct Softmax {
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {};

  // x [16,64] of scores -> e^{x − top}; keep: what becomes of sums up to now. The sums are of the
  // lane's own columns.
  __device__ __forceinline__ void take(float (&x)[8][4], float scale, float (&keep)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float now = -INFINITY;
#pragma unroll
      for (int n = 0; n < 8; ++n) now = fmaxf(now, fmaxf(x[n][2 * r], x[n][2 * r + 1]));
      now = fmaxf(top[r], quad_max(now) * scale);
      const float shift = now == -INFINITY ? 0.f : now;
      keep[r] = delta::exp2_fast(top[r] - shift);
      top[r] = now;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          x[n][e] = delta::exp2_fast(fmaf(x[n][e], scale, -shift));
          sum += x[n][e];
        }
      total[r] = total[r] * keep[r] + sum;
    }
  }
};

// Block (head, tile of 128 queries). Per 64 keys: 1 scores q kᵀ. 2 mask, maximum and sum. 3 o =
// keep o + a v. At the end: 4 o / sum by way of q's tiles, lse.
template <int SLABS>
__global__ void __launch_bounds__(kFastThreads, 2)
    forward_kernel(Problem<bf16_t> p, int64_t first_item) {
  auto& s = swizzled_shared<ForwardShared<SLABS>>();
  const Lane l;
  const int group = int(threadIdx.x) >> 7, warp = int(threadIdx.x) >> 5 & 3;
  const int64_t item = first_item + blockIdx.x;
  const int h = int(item % p.heads), hk = h / (p.heads / p.key_heads);
  const Tile t = tile_of<kRows>(p, p.query, false, tile_index(p.query, false, item / p.heads));
  if (t.rows == 0) return;
  const int64_t position = t.first + t.before(), mine = position + 64 * group;
  const int64_t seen = position - p.window + 1, begin = seen <= 0 ? 0 : seen / kColumns * kColumns;
  const int64_t end = position + t.rows;
  const bf16_t* g_q = p.q + p.at(t.query + t.first, h);
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    fetch_rows(s.q[i], 64 * i < t.rows ? g_q + 64 * i * p.stride() : g_q, p.stride(),
               t.rows - 64 * i, p.width);
  fetch_keys<SLABS>(s.stage[0], p, t, begin, hk);
  delta::commit_copies();

  const float scale = p.scale * kLog2e;
  float out[SLABS][8][4];
  clear(out);
  Softmax softmax;
  int at = 0;
  for (int64_t key = begin; key < end; key += kColumns, at ^= 1) {
    delta::wait_copy_groups<0>();
    publish_tiles();
    __syncthreads();
    if (key + kColumns < end) {
      fetch_keys<SLABS>(s.stage[at ^ 1], p, t, key + kColumns, hk);
      delta::commit_copies();
    }
    const Sight sight = sight_of(p, mine, key);
    if (sight == Sight::none) continue;
    const auto& now = s.stage[at];
    float x[8][4];
    warpgroup_begin();
    multiply_channels(x, s.q[group], now.k, warp);  // 1
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(x);
    if (sight == Sight::some) {  // 2
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!in_sight(p, mine + 16 * warp + l.g + 8 * (e >> 1), key + 8 * n + 2 * l.c + (e & 1)))
            x[n][e] = -INFINITY;
    }
    float keep[2];
    softmax.take(x, scale, keep);
    if (__any_sync(0xffffffffu, keep[0] != 1.f || keep[1] != 1.f)) {
#pragma unroll
      for (auto& slab : out)
#pragma unroll
        for (auto& tile : slab)
#pragma unroll
          for (int e = 0; e < 4; ++e) tile[e] *= keep[e >> 1];
    }
    unsigned a[4][4];
    delta::values_as_left(a, x);
    settle(a);
    settle_all(out);
    warpgroup_begin();
    add_rows(out, a, now.v);  // 3
    warpgroup_commit();
    warpgroup_wait<0>();
    settle_all(out);
  }

  float f[2];  // 4
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = quad_sum(softmax.total[r]);
    f[r] = 1.f / total;
    const int row = 64 * group + 16 * warp + l.g + 8 * r;
    if (l.c == 0 && row < t.rows)
      p.lse[(t.query + t.first + row) * p.heads + h] =
          (softmax.top[r] + log2f(total)) * 0.6931471805599453f;
  }
  __syncthreads();
  put_rows(s.q[group], out, f, warp, l);
  __syncthreads();
  bf16_t* g_o = p.o + p.at(t.query + t.first, h);
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    store_rows(g_o + 64 * i * p.stride(), s.q[i], p.stride(), t.rows - 64 * i, p.width);
}

}  // namespace

bool fast_path(const AttentionProblem& p) {
  const auto aligned = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
  };
  return p.q.dtype() == DType::bf16 && delta::scans_fit(p.q.device()) && p.head_dim() <= 128 &&
         p.head_dim() % 8 == 0 && p.scale > 0 && aligned(p.q) && aligned(p.k) && aligned(p.v);
}

void fast_forward(const Problem<bf16_t>& p, cudaStream_t stream) {
  delta::visit_fast_slabs(p.width, [&]<int SLABS>() {
    launch_all<ForwardShared<SLABS>>(forward_kernel<SLABS>, p, p.query.tiles * p.heads, stream);
  });
}

}  // namespace ebb::gpu::attend
