// State-memory attention, forward (ops/state_memory_attention.h; models.md 10.2). Blocks of 256
// threads; each loops over its items, should there be more than the grid can hold.
#include "cuda/state_memory_attention.cuh"
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {
namespace {

// out[row] = 1/sqrt(mean x[row]² + eps), a warp per row.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    row_scale_kernel(const T* x, int64_t rows, int width, float eps, float* out) {
  const int lane = int(threadIdx.x) & 31;
  const int64_t warps = int64_t(gridDim.x) * (kTileThreads / 32);
  for (int64_t row = int64_t(blockIdx.x) * (kTileThreads / 32) + (threadIdx.x >> 5); row < rows;
       row += warps) {
    float sum = 0;
    for (int i = lane; i < width; i += 32) {
      const float v = to_float(x[row * width + i]);
      sum += v * v;
    }
    sum = warp_sum(sum);
    if (lane == 0) out[row] = 1.f / sqrtf(sum / float(width) + eps);
  }
}

Tensor row_scales(const Tensor& x, double eps) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const Tensor out = Tensor::empty({rows}, DType::f32, x.device());
  if (rows == 0) return out;
  const int64_t blocks = std::min<int64_t>(ceil_div(rows, kTileThreads / 32),
                                           int64_t(32) * multiprocessors(x.device()));
  visit_compute(x.dtype(), [&]<class Host>() {
    row_scale_kernel<device_t<Host>><<<unsigned(blocks), kTileThreads, 0, stream_of(x)>>>(
        ptr<Host>(x), rows, int(width), float(eps), ptr<float>(out));
  });
  check_launch();
  return out;
}

// x = to + rest, each rounded to bf16.
__global__ void __launch_bounds__(kTileThreads)
    split_kernel(const float* x, int64_t count, __nv_bfloat16* to, __nv_bfloat16* rest) {
  for (int64_t i = int64_t(blockIdx.x) * kTileThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kTileThreads) {
    to[i] = from_float<__nv_bfloat16>(x[i]);
    rest[i] = from_float<__nv_bfloat16>(x[i] - to_float(to[i]));
  }
}

template <class T>
struct Shared {
  T e[64 * slab_ld<T>()], c[64 * slab_ld<T>()], m[64 * slab_ld<T>()];
  float parts[2][64];
  float logit[64], largest[64], total[64], keep[64], weight[64];
};

// 3. One more logit for row r: the running maximum and sum, and what they make of what is there.
template <class T>
__device__ __forceinline__ void take_in(Shared<T>& s, int r, float logit) {
  const float before = s.largest[r];
  // A NaN stays, so that everything after it is NaN too.
  const float largest = logit > before || isnan(logit) ? logit : before;
  s.keep[r] = before == largest ? 1.f : expf(before - largest);
  s.weight[r] = expf(logit - largest);
  s.largest[r] = largest;
  s.total[r] = s.total[r] * s.keep[r] + s.weight[r];
}

// Item (tile of tokens, head), the last tiles, which see most, first. R [64,64·SLABS] is held in
// registers. Per memory Δ: over its slabs 1 F = Δ e and V = Δᵀ c, of Δ and then of its rest, 2 the
// logit q̂·(ρ∘F)/rms(e). 3 The
// running softmax. 4 R = keep R + weight V. At the end: 5 r, lse, o. Operands enter the products as
// they are stored; what scales them is f32.
template <class T, int SLABS>
__global__ void __launch_bounds__(kTileThreads)
    forward_kernel(Attention<T> p, const T* base, T* o, float* g_r, float* lse) {
  auto& s = dynamic_shared<Shared<T>>();
  constexpr int ld = slab_ld<T>();
  const int t = int(threadIdx.x), slabs_n = (p.n + 63) / 64;
  const int64_t items = p.tiles * p.heads;
  for (int64_t item = items - 1 - blockIdx.x; item >= 0; item -= gridDim.x) {
    const Tile tile = tile_of(p, item / p.heads);
    const int head = int(item % p.heads);
    const Span span = tile.span;
    if (span.rows == 0) continue;
    Accumulator<T, 64> sum[SLABS], value[SLABS];
#pragma unroll
    for (auto& x : sum) x.clear();
    if (t < 64) s.largest[t] = -INFINITY, s.total[t] = 0.f;
    for (int64_t m = tile.first_memory; m < tile.memory; ++m) {
      const bool opens = m == tile.first_memory;
      if (t < 64) s.logit[t] = 0.f;
#pragma unroll
      for (auto& x : value) x.clear();
      for (int k = 0; k < slabs_n; ++k) {
        Accumulator<T, 64> keys;
        keys.clear();
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {  // 1
          __syncthreads();
          if (opens || SLABS > 1) load_vectors(s.e, p.e, p, span, head, p.e_heads, p.p, slab);
          if (slab == 0 && (opens || slabs_n > 1))
            load_vectors(s.c, p.c, p, span, head, p.c_heads, p.n, k);
          const T* memories = p.memories;
#pragma unroll 1
          while (memories) {
            load_memory(s.m, memories, p, m, head, k, slab);
            wait_copies();
            __syncthreads();
            multiply<Stored::rows, Stored::columns>(keys, s.e, ld, s.m, ld, 64);
            multiply<Stored::rows, Stored::rows>(value[slab], s.c, ld, s.m, ld, 64);
            memories = memories == p.rest ? nullptr : p.rest;
            if (memories) __syncthreads();
          }
        }
        key_sums(keys, &s.parts[0][0], p, span, m, head, k);  // 2
        __syncthreads();
        if (t < 64) s.logit[t] += s.parts[0][t] + s.parts[1][t];
      }
      if (t < 64)  // 3; rows that are not there stay finite
        take_in(s, t, t < span.rows ? logit_of(p, span.first + t, head, s.logit[t]) : 0.f);
      __syncthreads();
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab)  // 4
#pragma unroll
        for (int i = 0; i < sum[slab].kCount; ++i) {
          const int r = sum[slab].row(i);
          sum[slab].v[i] = s.keep[r] * sum[slab].v[i] + s.weight[r] * value[slab].v[i];
        }
    }
    __syncthreads();
    const bool sees = tile.memory > tile.first_memory;  // 5
    if (t < span.rows)
      lse[(span.first + t) * p.heads + head] = sees ? s.largest[t] + logf(s.total[t]) : 0.f;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
      sum[slab].each([&](int r, int c, float& v) {
        const int column = 64 * slab + c;
        if (r >= span.rows || column >= p.p) return;
        const int64_t at = p.row_at(span.first + r, head) + column;
        const float x = sees ? v / s.total[r] : 0.f;
        g_r[at] = x;
        if (o)
          o[at] = from_float<T>((base ? to_float(base[at]) : 0.f) +
                                p.gate_of(span.first + r, head) * x);
      });
    __syncthreads();
  }
}

// Of sequences that go on: the runs that have tokens here, the first of which may be open.
void count_runs(const StateMemoryProblem& p, Scales* s) {
  std::vector<int64_t> offsets{0};
  for (int64_t n = 0; n < int64_t(p.before.size()); ++n) {
    const int64_t tokens = p.layout.end(n, p.time()) - p.layout.begin(n, p.time());
    const int64_t past = p.before[size_t(n)], first = past / p.memory_chunk;
    const int64_t runs = tokens ? ceil_div(past + tokens, p.memory_chunk) - first : 0;
    offsets.push_back(offsets.back() + runs);
  }
  const Device device = p.q.device();
  s->runs = offsets.back();
  s->run_before = Tensor::from(offsets, {int64_t(offsets.size())}, device);
  s->before = Tensor::from(p.before, {int64_t(p.before.size())}, device);
}

}  // namespace

StateMemoryProblem with_narrow_memories(StateMemoryProblem p, Tensor* rest) {
  if (p.memories.dtype() == p.q.dtype()) return p;
  const Tensor wide = p.memories;
  p.memories = Tensor::empty(wide.shape(), DType::bf16, wide.device());
  *rest = Tensor::empty(wide.shape(), DType::bf16, wide.device());
  if (wide.numel() == 0) return p;
  const int64_t blocks = std::min<int64_t>(ceil_div(wide.numel(), kTileThreads),
                                           int64_t(16) * multiprocessors(wide.device()));
  split_kernel<<<unsigned(blocks), kTileThreads, 0, stream_of(wide)>>>(
      ptr<float>(wide), wide.numel(), ptr<bf16>(p.memories), ptr<bf16>(*rest));
  check_launch();
  return p;
}

Scales make_scales(const StateMemoryProblem& p, const Tensor& rest) {
  Scales s;
  s.rest = rest;
  if (p.normalize) {
    s.q = row_scales(p.q, p.eps), s.e = row_scales(p.e, p.eps);
    s.rho = row_scales(p.memories, p.eps_row);
  }
  s.runs = p.memories.size(0);
  if (!p.before.empty())
    count_runs(p, &s);
  else if (p.layout.is_packed())
    s.run_before = p.layout.chunk_offsets(p.batch(), p.time(), p.memory_chunk, p.q.device());
  return s;
}

template <class T>
Attention<device_t<T>> make_attention(const StateMemoryProblem& p, const Scales& scales) {
  Attention<device_t<T>> a;
  a.q = ptr<T>(p.q), a.e = ptr<T>(p.e), a.c = ptr<T>(p.c), a.memories = ptr<T>(p.memories);
  a.rest = ptr<T>(scales.rest);
  a.gate = ptr<T>(p.gate);
  a.q_scale = ptr<float>(scales.q), a.e_scale = ptr<float>(scales.e);
  a.rho = ptr<float>(scales.rho);
  a.scale = float(p.scale);
  a.heads = int(p.heads()), a.n = int(p.state_dim()), a.p = int(p.value_dim());
  a.q_heads = int(p.q.size(2)), a.e_heads = int(p.e.size(2)), a.c_heads = int(p.c.size(2));
  a.gate_heads = p.gate ? int(p.gate.size(2)) : a.heads;
  const int64_t longest = p.layout.is_packed() ? p.layout.max_length() : p.time();
  const int64_t reach = std::min(p.memory_chunk, std::max<int64_t>(1, longest));
  a.pieces = int(ceil_div(reach, 64));
  a.rows = int(ceil_div(reach, a.pieces));
  a.run = p.memory_chunk;
  a.tiles = scales.runs * a.pieces;
  a.runs_per_row = std::max<int64_t>(1, ceil_div(p.time(), p.memory_chunk));
  a.run_before = ptr<int64_t>(scales.run_before);
  a.before = ptr<int64_t>(scales.before);
  a.room = p.room;
  a.cursor = sequence_cursor(p.layout.is_packed() ? p.layout.device_offsets() : Tensor(), p.batch(),
                             p.time());
  return a;
}
template Attention<float> make_attention<float>(const StateMemoryProblem&, const Scales&);
template Attention<__nv_bfloat16> make_attention<bf16>(const StateMemoryProblem&, const Scales&);

}  // namespace ebb::gpu::state_memory

namespace ebb::gpu {

Tensor state_memory_attention_fwd(const StateMemoryProblem& given, const Tensor& o, const Tensor& r,
                                  const Tensor& lse) {
  using namespace state_memory;
  if (r.numel() == 0) return {};
  if (fast_path(given)) return fast_fwd(given, o, r, lse);
  Tensor rest;
  const StateMemoryProblem problem = with_narrow_memories(given, &rest);
  const Scales scales = make_scales(given, rest);
  visit_compute(problem.q.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    const Attention<T> p = make_attention<Host>(problem, scales);
    visit_slabs(p.p, [&]<int SLABS>() {
      launch_tiles<Shared<T>>(forward_kernel<T, SLABS>, p.tiles * p.heads, stream_of(r), p,
                              static_cast<const T*>(ptr<Host>(problem.base)), ptr<Host>(o),
                              ptr<float>(r), ptr<float>(lse));
    });
  });
  return {};
}

}  // namespace ebb::gpu
