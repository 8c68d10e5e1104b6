// One decoding step of causal softmax attention (ops/attention.h): bound by the cache, which is
// read once by the heads of a group together.
#include <algorithm>

#include "cuda/common.cuh"
#include "ops/attention.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
struct Step {
  const T *q, *k, *v;        // [N,H,P], [N,Hkv,P]
  T *k_cache, *v_cache, *o;  // [N,C,Hkv,P]; [N,H,P]
  const int64_t* position;   // [N]
  float scale;
  int64_t sequences, capacity, window;
  int heads, key_heads, width;
};

// The token's own keys and values to their row of the caches.
template <class T>
__global__ void __launch_bounds__(kThreads) write_kernel(Step<T> p) {
  const int64_t row = int64_t(p.key_heads) * p.width, count = p.sequences * row;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t n = i / row, at = (n * p.capacity + p.position[n] % p.capacity) * row + i % row;
    p.k_cache[at] = p.k[i];
    p.v_cache[at] = p.v[i];
  }
}

// Block (sequence, head). A warp takes four keys at a time, eight lanes each with channels
// 4·(lane%8) + 32j: 1 scores, 2 maximum, sum and values so far, one for each eight lanes. At the
// end 3 the 32 parts are joined in order.
template <class T, int SLABS>
__global__ void __launch_bounds__(kThreads) step_kernel(Step<T> p, bool wide) {
  __shared__ float s_top[4 * kWarps], s_total[4 * kWarps], s_sum[4 * kWarps][32 * SLABS];
  const int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5, c = lane % 8 * 4;
  const int part = 4 * warp + lane / 8;
  for (int64_t item = blockIdx.x; item < p.sequences * p.heads; item += gridDim.x) {
    const int64_t n = item / p.heads;
    const int hk = int(item % p.heads) / (p.heads / p.key_heads);
    const int64_t last = p.position[n];
    const int64_t count = ::min(last + 1, ::min(p.capacity, p.window));
    const int64_t row = int64_t(p.key_heads) * p.width, base = n * p.capacity * row + hk * p.width;
    const auto read = [&](float(&x)[SLABS][4], const T* g) {
#pragma unroll
      for (int j = 0; j < SLABS; ++j) {
        const int d = 32 * j + c;
        if (wide && d < p.width) {
          load_pack(x[j], g + d);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[j][e] = d + e < p.width ? to_float(g[d + e]) : 0.f;
        }
      }
    };
    float q[SLABS][4], sum[SLABS][4] = {}, top = -INFINITY, total = 0;
    read(q, p.q + item * p.width);
    for (int64_t i0 = 0; i0 < count; i0 += 4 * kWarps) {  // the same for all lanes of a warp
      const int64_t i = i0 + part;
      const bool inside = i < count;
      const int64_t at = base + (inside ? (last - count + 1 + i) % p.capacity : 0) * row;
      float x[SLABS][4], dot = 0;
      read(x, p.k_cache + at);
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) dot += q[j][e] * x[j][e];
#pragma unroll
      for (int o = 1; o < 8; o *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, o);
      if (!inside) continue;  // no shuffles below
      dot *= p.scale;
      read(x, p.v_cache + at);
      const float now = fmaxf(top, dot), keep = expf(top - now), f = expf(dot - now);
      total = total * keep + f;
      top = now;
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[j][e] = sum[j][e] * keep + f * x[j][e];
    }
    if (lane % 8 == 0) s_top[part] = top, s_total[part] = total;
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s_sum[part][32 * j + c + e] = sum[j][e];
    __syncthreads();
    float most = -INFINITY, all = 0;  // 3
    for (int i = 0; i < 4 * kWarps; ++i) most = fmaxf(most, s_top[i]);
    for (int i = 0; i < 4 * kWarps; ++i) all += s_total[i] * expf(s_top[i] - most);
    for (int d = int(threadIdx.x); d < p.width; d += kThreads) {
      float out = 0;
      for (int i = 0; i < 4 * kWarps; ++i) out += s_sum[i][d] * expf(s_top[i] - most);
      p.o[item * p.width + d] = from_float<T>(out / all);
    }
    __syncthreads();
  }
}

bool aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.raw()) % (4 * size_t(item_size(t.dtype()))) == 0;
}

}  // namespace

void attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                    const Tensor& v_cache, const Tensor& position, double scale, int64_t window,
                    const Tensor& o) {
  if (o.numel() == 0) return;
  visit_compute(q.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    Step<T> p{};
    p.q = ptr<Host>(q), p.k = ptr<Host>(k), p.v = ptr<Host>(v), p.o = ptr<Host>(o);
    p.k_cache = ptr<Host>(k_cache), p.v_cache = ptr<Host>(v_cache);
    p.position = position.data<int64_t>();
    p.scale = float(scale);
    p.sequences = q.size(0), p.capacity = k_cache.size(1);
    p.window = window > 0 ? window : p.capacity;
    p.heads = int(q.size(1)), p.key_heads = int(k.size(1)), p.width = int(q.size(2));
    const bool wide = p.width % 4 == 0 && aligned(q) && aligned(k_cache) && aligned(v_cache);
    const auto grid = [](int64_t n) { return unsigned(std::min<int64_t>(n, 1 << 30)); };
    const cudaStream_t stream = stream_of(o);
    write_kernel<<<grid(ceil_div(k.numel(), kThreads)), kThreads, 0, stream>>>(p);
    check_launch();
    const unsigned blocks = grid(p.sequences * p.heads);
    if (p.width <= 32)
      step_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(p, wide);
    else if (p.width <= 64)
      step_kernel<T, 2><<<blocks, kThreads, 0, stream>>>(p, wide);
    else if (p.width <= 128)
      step_kernel<T, 4><<<blocks, kThreads, 0, stream>>>(p, wide);
    else
      step_kernel<T, 8><<<blocks, kThreads, 0, stream>>>(p, wide);
    check_launch();
  });
}

}  // namespace ebb::gpu
