// Causal softmax attention in f32 arithmetic at any size (ops/attention.h; FlashAttention, Dao et
// al. 2022): tiles of 32 queries by 32 keys, softmax with a running maximum and sum. The checker of
// the tensor-core kernels, and what runs in f32.
//
// A block has 256 threads: thread t has row t/8 of a score tile and its columns t%8 + 8j, j < 4;
// of a [32,P] tile it has row t/8 and channels 4·(t%8) + 32j.
#include "cuda/attention_fast.cuh"

#include <algorithm>

namespace ebb::gpu {
namespace attend {
namespace {

constexpr int kTile = 32, kThreads = 256;

// s [32, 32·SLABS + 4] = rows of g, zeros around them.
template <int SLABS>
constexpr int kRow = 32 * SLABS + 4;

template <class T, int SLABS>
__device__ __forceinline__ void load_tile(float* s, const T* g, int64_t stride, int rows,
                                          int width) {
  for (int i = int(threadIdx.x); i < kTile * 32 * SLABS; i += kThreads) {
    const int r = i / (32 * SLABS), c = i % (32 * SLABS);
    s[r * kRow<SLABS> + c] = r < rows && c < width ? to_float(g[r * stride + c]) : 0.f;
  }
}

// x[j] = a row t/8 · b row t%8 + 8j.
template <int SLABS>
__device__ __forceinline__ void products(float (&x)[4], const float* s_a, const float* s_b) {
  const float* a = s_a + int(threadIdx.x) / 8 * kRow<SLABS>;
  const float* b = s_b + int(threadIdx.x) % 8 * kRow<SLABS>;
#pragma unroll
  for (float& e : x) e = 0.f;
#pragma unroll 4
  for (int d = 0; d < 32 * SLABS; d += 4) {
    const float4 y = *reinterpret_cast<const float4*>(a + d);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 z = *reinterpret_cast<const float4*>(b + 8 * j * kRow<SLABS> + d);
      x[j] += y.x * z.x + y.y * z.y + y.z * z.z + y.w * z.w;
    }
  }
}

// Row t/8 of a [32,P] tile.
template <int SLABS>
struct Row {
  float v[SLABS][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& slab : v)
#pragma unroll
      for (float& e : slab) e = 0.f;
  }
  // += Σ_c f[t/8, c] x[c], f [32,33] in shared memory.
  __device__ __forceinline__ void add(const float* s_f, const float* s_x) {
    const float* f = s_f + int(threadIdx.x) / 8 * 33;
    for (int c = 0; c < kTile; ++c) {
      const float* x = s_x + c * kRow<SLABS> + int(threadIdx.x) % 8 * 4;
#pragma unroll
      for (int j = 0; j < SLABS; ++j) {
        const float4 y = *reinterpret_cast<const float4*>(x + 32 * j);
        v[j][0] += f[c] * y.x, v[j][1] += f[c] * y.y, v[j][2] += f[c] * y.z, v[j][3] += f[c] * y.w;
      }
    }
  }
  template <class T>
  __device__ __forceinline__ void store(T* g, int64_t stride, int rows, int width, float f) const {
    const int r = int(threadIdx.x) / 8, c = int(threadIdx.x) % 8 * 4;
    if (r >= rows) return;
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (32 * j + c + e < width) g[r * stride + 32 * j + c + e] = from_float<T>(v[j][e] * f);
  }
};

// Over the eight threads of a row.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int o = 1; o < 8; o *= 2) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int o = 1; o < 8; o *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}

// Whether a query at `position` sees `key`.
template <class T>
__device__ __forceinline__ bool sees(const Problem<T>& p, int64_t position, int64_t key) {
  return key <= position && key > position - p.window;
}

// Whether a query at `position` sees one key only: the softmax of one score is 1 whatever it is, so
// that no gradient passes, and not a rounded difference.
template <class T>
__device__ __forceinline__ bool sees_one(const Problem<T>& p, int64_t position) {
  return position == 0 || p.window == 1;
}

// The first key of the tiles that queries from `position` on see.
template <class T>
__device__ __forceinline__ int64_t first_key(const Problem<T>& p, int64_t position) {
  const int64_t first = position - p.window + 1;
  return first <= 0 ? 0 : first / kTile * kTile;
}

template <int SLABS>
struct ForwardShared {
  float q[kTile * kRow<SLABS>], k[kTile * kRow<SLABS>], v[kTile * kRow<SLABS>];
  float a[kTile * 33];
};

// Item (tile of queries, head), the latest tiles first. Per tile of keys: 1 scores. 2 maximum and
// sum so far. 3 o = keep·o + a v. Then 4 o / sum, lse.
template <class T, int SLABS>
__global__ void __launch_bounds__(kThreads) forward_kernel(Problem<T> p) {
  extern __shared__ __align__(16) unsigned char s_raw[];
  auto& s = *reinterpret_cast<ForwardShared<SLABS>*>(s_raw);
  const int r = int(threadIdx.x) / 8, c = int(threadIdx.x) % 8;
  for (int64_t item = blockIdx.x; item < p.query.tiles * p.heads; item += gridDim.x) {
    const int h = int(item % p.heads), hk = h / (p.heads / p.key_heads);
    const Tile t = tile_of<kTile>(p, p.query, false, p.query.tiles - 1 - item / p.heads);
    if (t.rows == 0) continue;
    const int64_t position = t.first + t.before();
    __syncthreads();
    load_tile<T, SLABS>(s.q, p.q + p.at(t.query + t.first, h), p.stride(), t.rows, p.width);
    Row<SLABS> out;
    out.clear();
    float top = -INFINITY, total = 0;
    for (int64_t key = first_key(p, position); key < position + t.rows; key += kTile) {
      const int keys = int(::min(int64_t(kTile), t.keys - key));
      __syncthreads();
      load_tile<T, SLABS>(s.k, p.k + p.key_at(t.key + key, hk), p.key_stride(), keys, p.width);
      load_tile<T, SLABS>(s.v, p.v + p.key_at(t.key + key, hk), p.key_stride(), keys, p.width);
      __syncthreads();
      float x[4];
      products<SLABS>(x, s.q, s.k);  // 1
      float now = -INFINITY;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = c + 8 * j;
        x[j] = sees(p, position + r, key + column) && column < keys ? p.scale * x[j] : -INFINITY;
        now = fmaxf(now, x[j]);
      }
      now = fmaxf(top, row_max(now));  // 2
      const float shift = now == -INFINITY ? 0.f : now, keep = expf(top - shift);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = expf(x[j] - shift);
        sum += x[j];
        s.a[r * 33 + c + 8 * j] = x[j];
      }
      total = total * keep + row_sum(sum);
      top = now;
      __syncwarp();
#pragma unroll
      for (auto& slab : out.v)
#pragma unroll
        for (float& e : slab) e *= keep;
      out.add(s.a, s.v);  // 3
    }
    out.store(p.o + p.at(t.query + t.first, h), p.stride(), t.rows, p.width, 1.f / total);  // 4
    if (c == 0 && r < t.rows) p.lse[(t.query + t.first + r) * p.heads + h] = top + logf(total);
  }
}

template <int SLABS>
struct BackwardShared {
  float q[kTile * kRow<SLABS>], d_o[kTile * kRow<SLABS>];
  float k[kTile * kRow<SLABS>], v[kTile * kRow<SLABS>];
  float a[kTile * 33], ds[kTile * 33];
};

template <class T, int SLABS>
__device__ __forceinline__ void load_queries(const Backward<T>& p, const Tile& t, int64_t first,
                                             int rows, int h, BackwardShared<SLABS>& s) {
  load_tile<T, SLABS>(s.q, p.q + p.at(t.query + first, h), p.stride(), rows, p.width);
  load_tile<T, SLABS>(s.d_o, p.d_o + p.at(t.query + first, h), p.stride(), rows, p.width);
}
template <class T, int SLABS>
__device__ __forceinline__ void load_keys(const Backward<T>& p, const Tile& t, int64_t first,
                                          int rows, int hk, BackwardShared<SLABS>& s) {
  load_tile<T, SLABS>(s.k, p.k + p.key_at(t.key + first, hk), p.key_stride(), rows, p.width);
  load_tile<T, SLABS>(s.v, p.v + p.key_at(t.key + first, hk), p.key_stride(), rows, p.width);
}

// Item (tile of queries, head): dq = Σ dS k over the tiles of keys.
template <class T, int SLABS>
__global__ void __launch_bounds__(kThreads) query_kernel(Backward<T> p) {
  extern __shared__ __align__(16) unsigned char s_raw[];
  auto& s = *reinterpret_cast<BackwardShared<SLABS>*>(s_raw);
  const int r = int(threadIdx.x) / 8, c = int(threadIdx.x) % 8;
  for (int64_t item = blockIdx.x; item < p.query.tiles * p.heads; item += gridDim.x) {
    const int h = int(item % p.heads), hk = h / (p.heads / p.key_heads);
    const Tile t = tile_of<kTile>(p, p.query, false, p.query.tiles - 1 - item / p.heads);
    if (t.rows == 0) continue;
    const int64_t position = t.first + t.before();
    __syncthreads();
    load_queries<T, SLABS>(p, t, t.first, t.rows, h, s);
    const int64_t row = (t.query + t.first + r) * p.heads + h;
    const float lse = r < t.rows ? p.lse[row] : 0.f, delta = r < t.rows ? p.delta[row] : 0.f;
    Row<SLABS> dq;
    dq.clear();
    for (int64_t key = first_key(p, position); key < position + t.rows; key += kTile) {
      const int keys = int(::min(int64_t(kTile), t.keys - key));
      __syncthreads();
      load_keys<T, SLABS>(p, t, key, keys, hk, s);
      __syncthreads();
      float x[4], d[4];
      products<SLABS>(x, s.q, s.k);
      products<SLABS>(d, s.d_o, s.v);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = c + 8 * j;
        const bool seen = r < t.rows && column < keys && sees(p, position + r, key + column) &&
                          !sees_one(p, position + r);
        s.ds[r * 33 + column] = seen ? p.scale * expf(p.scale * x[j] - lse) * (d[j] - delta) : 0.f;
      }
      __syncwarp();
      dq.add(s.ds, s.k);
    }
    dq.store(p.dq + p.at(t.query + t.first, h), p.stride(), t.rows, p.width, 1.f);
  }
}

// Item (tile of keys, key head): dk = Σ dSᵀ q, dv = Σ aᵀ dO over the heads of the group and the
// tiles of queries, in order. Rows of the score tile are keys here.
template <class T, int SLABS>
__global__ void __launch_bounds__(kThreads) key_kernel(Backward<T> p) {
  extern __shared__ __align__(16) unsigned char s_raw[];
  auto& s = *reinterpret_cast<BackwardShared<SLABS>*>(s_raw);
  const int r = int(threadIdx.x) / 8, c = int(threadIdx.x) % 8, group = p.heads / p.key_heads;
  for (int64_t item = blockIdx.x; item < p.key.tiles * p.key_heads; item += gridDim.x) {
    const int hk = int(item % p.key_heads);
    const Tile t = tile_of<kTile>(p, p.key, true, item / p.key_heads);
    if (t.rows == 0) continue;
    __syncthreads();
    load_keys<T, SLABS>(p, t, t.first, t.rows, hk, s);
    Row<SLABS> dk, dv;
    dk.clear(), dv.clear();
    // Queries at positions first ... first + rows + window − 2.
    const int64_t begin = ::max(int64_t(0), t.first - t.before()) / kTile * kTile;
    const int64_t end = ::min(t.queries, t.first + t.rows - t.before() + p.window - 1);
    for (int h = hk * group; h < (hk + 1) * group; ++h)
      for (int64_t i = begin; i < end; i += kTile) {
        const int rows = int(::min(int64_t(kTile), t.queries - i));
        __syncthreads();
        load_queries<T, SLABS>(p, t, i, rows, h, s);
        __syncthreads();
        float x[4], d[4];
        products<SLABS>(x, s.k, s.q);
        products<SLABS>(d, s.v, s.d_o);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = c + 8 * j;
          const bool seen =
              r < t.rows && column < rows && sees(p, i + column + t.before(), t.first + r);
          const int64_t row = (t.query + i + column) * p.heads + h;
          const float a = seen ? expf(p.scale * x[j] - p.lse[row]) : 0.f;
          s.a[r * 33 + column] = a;
          s.ds[r * 33 + column] = seen && !sees_one(p, i + column + t.before())
                                      ? p.scale * a * (d[j] - p.delta[row])
                                      : 0.f;
        }
        __syncwarp();
        dk.add(s.ds, s.q);
        dv.add(s.a, s.d_o);
      }
    const int64_t at = p.key_at(t.key + t.first, hk);
    if (p.dk) dk.store(p.dk + at, p.key_stride(), t.rows, p.width, 1.f);
    if (p.dv) dv.store(p.dv + at, p.key_stride(), t.rows, p.width, 1.f);
  }
}

// One warp a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    row_product_kernel(const T* g_a, const T* g_b, int64_t rows, int width, float* g_out) {
  const int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5;
  const int64_t step = int64_t(gridDim.x) * (kThreads / 32);
  for (int64_t r = int64_t(blockIdx.x) * (kThreads / 32) + warp; r < rows; r += step) {
    float sum = 0;
    for (int c = lane; c < width; c += 32)
      sum += to_float(g_a[r * width + c]) * to_float(g_b[r * width + c]);
    sum = warp_sum(sum);
    if (lane == 0) g_out[r] = sum;
  }
}

template <class Shared, class P>
void launch(void (*kernel)(P), const P& p, int64_t items, cudaStream_t stream) {
  if (items == 0) return;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  int(sizeof(Shared))),
             "cudaFuncSetAttribute");
  const unsigned grid = unsigned(std::min<int64_t>(items, (int64_t(1) << 31) - 1));
  kernel<<<grid, kThreads, sizeof(Shared), stream>>>(p);
  check_launch();
}

template <class F>
void visit_slabs(int width, F&& f) {
  if (width <= 32)
    f.template operator()<1>();
  else if (width <= 64)
    f.template operator()<2>();
  else if (width <= 128)
    f.template operator()<4>();
  else
    f.template operator()<8>();
}

Axis axis_of(const SeqLayout& layout, int64_t batch, int64_t time, int64_t tile, Device device,
             Tensor* offsets) {
  Axis a;
  a.cursor = sequence_cursor(layout.is_packed() ? layout.device_offsets() : Tensor(), batch, time);
  a.tiles = layout.chunk_count(batch, time, tile);
  a.tiles_per_row = (time + tile - 1) / tile;
  if (!layout.is_packed()) return a;
  *offsets = layout.chunk_offsets(batch, time, tile, device);
  a.tiles_before = offsets->data<int64_t>();
  return a;
}

}  // namespace

template <class T>
Problem<device_t<T>> make_problem(const AttentionProblem& p, const Tensor& o, const Tensor& lse,
                                  int64_t query_tile, int64_t key_tile, Offsets* offsets) {
  Problem<device_t<T>> d{};
  const Device device = p.q.device();
  d.q = ptr<T>(p.q), d.k = ptr<T>(p.k), d.v = ptr<T>(p.v);
  d.o = ptr<T>(o), d.lse = ptr<float>(lse);
  d.scale = float(p.scale);
  const int64_t most = p.batch() * p.key_time() + 1;
  d.window = p.window > 0 ? std::min(p.window, most) : most;
  d.heads = int(p.heads()), d.key_heads = int(p.key_heads()), d.width = int(p.head_dim());
  d.tokens = p.batch() * p.time(), d.sequences = p.sequences();
  d.query = axis_of(p.layout, p.batch(), p.time(), query_tile, device, &offsets->query);
  d.key = axis_of(p.key_layout, p.batch(), p.key_time(), key_tile, device, &offsets->key);
  return d;
}
template Problem<float> make_problem<float>(const AttentionProblem&, const Tensor&, const Tensor&,
                                            int64_t, int64_t, Offsets*);
template Problem<__nv_bfloat16> make_problem<bf16>(const AttentionProblem&, const Tensor&,
                                                   const Tensor&, int64_t, int64_t, Offsets*);

template <class T>
void row_products(const T* a, const T* b, int64_t rows, int width, float* out,
                  cudaStream_t stream) {
  if (rows == 0) return;
  const int64_t blocks = std::min<int64_t>(ceil_div(rows, kThreads / 32), 1 << 16);
  row_product_kernel<<<unsigned(blocks), kThreads, 0, stream>>>(a, b, rows, width, out);
  check_launch();
}
template void row_products<float>(const float*, const float*, int64_t, int, float*, cudaStream_t);
template void row_products<__nv_bfloat16>(const __nv_bfloat16*, const __nv_bfloat16*, int64_t, int,
                                          float*, cudaStream_t);

}  // namespace attend

void attention_fwd(const AttentionProblem& problem, const Tensor& o, const Tensor& lse) {
  using namespace attend;
  if (o.numel() == 0) return;
  visit_compute(o.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    Offsets offsets;
    if constexpr (sizeof(T) == 2)
      if (fast_path(problem))
        return fast_forward(make_problem<Host>(problem, o, lse, kRows, kRows, &offsets),
                            stream_of(o));
    const Problem<T> p = make_problem<Host>(problem, o, lse, kTile, kTile, &offsets);
    visit_slabs(p.width, [&]<int SLABS>() {
      launch<ForwardShared<SLABS>>(forward_kernel<T, SLABS>, p, p.query.tiles * p.heads,
                                   stream_of(o));
    });
  });
}

void attention_bwd(const AttentionProblem& problem, const Tensor& o, const Tensor& lse,
                   const Tensor& dense_d_o, const AttentionGradients& grads) {
  using namespace attend;
  if (problem.k.numel() == 0) return;
  const Tensor delta = Tensor::empty(lse.shape(), DType::f32, lse.device());
  const cudaStream_t stream = stream_of(o);
  const bool aligned = reinterpret_cast<uintptr_t>(dense_d_o.raw()) % 16 == 0;
  const bool fast = fast_path(problem);
  const Tensor d_o = fast && !aligned ? dense_d_o.clone() : dense_d_o;
  const int64_t tile = fast ? kRows : kTile;
  visit_compute(o.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    Offsets offsets;
    Backward<T> p{make_problem<Host>(problem, o, lse, tile, tile, &offsets)};
    p.d_o = ptr<Host>(d_o), p.delta = ptr<float>(delta);
    p.dq = ptr<Host>(grads.dq), p.dk = ptr<Host>(grads.dk), p.dv = ptr<Host>(grads.dv);
    row_products(p.d_o, static_cast<const T*>(p.o), p.tokens * p.heads, p.width, p.delta, stream);
    if constexpr (sizeof(T) == 2)
      if (fast) return fast_backward(p, stream);
    visit_slabs(p.width, [&]<int SLABS>() {
      if (p.dq)
        launch<BackwardShared<SLABS>>(query_kernel<T, SLABS>, p, p.query.tiles * p.heads, stream);
      if (p.dk || p.dv)
        launch<BackwardShared<SLABS>>(key_kernel<T, SLABS>, p, p.key.tiles * p.key_heads, stream);
    });
  });
}

}  // namespace ebb::gpu
