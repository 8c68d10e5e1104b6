// Running log-sum-exp along time, forward and backward (ops/log_cumsum_exp.h). Sequences are cut
// into chunks of 64 tokens: 1 what each chunk adds, 2 what stands before each (after each, in the
// backward pass), 3 the tokens. A thread owns one channel of one chunk; neighbouring threads have
// neighbouring channels.
#include <algorithm>

#include "cuda/common.cuh"
#include "ops/log_cumsum_exp.h"
#include "ops/sequence_cursor.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 128, kChunk = 64;

struct Layout {
  SequenceCursor cursor = {};
  const int64_t* chunk_before = {};  // [N+1]; null: dense
  int64_t chunks = 0, chunks_per_row = 0, sequences = 0, channels = 0;

  __device__ __forceinline__ int64_t first_chunk(int64_t n) const {
    return chunk_before ? chunk_before[n] : n * chunks_per_row;
  }
};
struct Span {
  int64_t n, begin, end;  // sequence, tokens
  bool first;             // of its sequence
};
__device__ __forceinline__ Span span_of(const Layout& p, int64_t chunk) {
  int64_t n;
  if (p.chunk_before) {
    int64_t low = 0, high = p.sequences;  // the last n with chunk_before[n] <= chunk
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (p.chunk_before[middle] <= chunk)
        low = middle;
      else
        high = middle;
    }
    n = low;
  } else {
    n = chunk / p.chunks_per_row;
  }
  SequenceCursor s = p.cursor;
  s.select(n);
  const int64_t index = chunk - p.first_chunk(n), begin = s.begin + index * kChunk;
  return {n, begin, ::min(s.end, begin + kChunk), index == 0};
}

// The sum e^z = factor·e^top.
struct Sum {
  float top = -INFINITY, factor = 0.f;

  __device__ __forceinline__ void add(const Sum& x) {
    if (x.factor == 0.f) return;
    if (factor == 0.f) {
      *this = x;
      return;
    }
    const float next = fmaxf(top, x.top);
    factor = factor * expf(top - next) + x.factor * expf(x.top - next);
    top = next;
  }
  // Adds e^u; k and g of the token.
  __device__ __forceinline__ void step(float u, float& k, float& g) {
    const bool first = factor == 0.f;
    const float next = first ? u : fmaxf(top, u), added = expf(u - next);
    const float after = (first ? 0.f : factor * expf(top - next)) + added;
    k = first ? 1.f : added / after;
    g = first ? 0.f : k < 0.5f ? log1pf(-k) : top - next + logf(factor / after);
    top = next, factor = after;
  }
};

// Thread (chunk, channel): f(chunk, channel).
template <class F>
__device__ __forceinline__ void each_item(const Layout& p, int64_t rows, F&& f) {
  const int64_t items = rows * p.channels, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < items; i += step)
    f(i / p.channels, i % p.channels);
}

template <class T>
__global__ void __launch_bounds__(kThreads) total_kernel(Layout p, const T* g_u, float2* g_total) {
  each_item(p, p.chunks, [&](int64_t chunk, int64_t c) {
    const Span s = span_of(p, chunk);
    Sum sum;
#pragma unroll 4
    for (int64_t t = s.begin; t < s.end; ++t) sum.add({to_float(g_u[t * p.channels + c]), 1.f});
    g_total[chunk * p.channels + c] = {sum.top, sum.factor};
  });
}

// g_total: what each chunk adds -> what stands before it. g_z: the last value, or null.
__global__ void __launch_bounds__(kThreads)
    prefix_kernel(Layout p, const float* g_z0, float2* g_total, float* g_z) {
  each_item(p, p.sequences, [&](int64_t n, int64_t c) {
    const int64_t first = p.first_chunk(n);
    SequenceCursor s = p.cursor;
    s.select(n);
    const int64_t count = (s.end - s.begin + kChunk - 1) / kChunk;
    Sum sum;
    if (g_z0 && g_z0[n * p.channels + c] != -INFINITY) sum = {g_z0[n * p.channels + c], 1.f};
#pragma unroll 8
    for (int64_t i = 0; i < count; ++i) {
      float2& at = g_total[(first + i) * p.channels + c];
      const Sum added{at.x, at.y};
      at = {sum.top, sum.factor};
      sum.add(added);
    }
    if (g_z) g_z[n * p.channels + c] = sum.top + logf(sum.factor);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    token_kernel(Layout p, const T* g_u, const float2* g_before, T* g_k, float* g_g) {
  each_item(p, p.chunks, [&](int64_t chunk, int64_t c) {
    const Span s = span_of(p, chunk);
    const float2 before = g_before[chunk * p.channels + c];
    Sum sum{before.x, before.y};
#pragma unroll 4
    for (int64_t t = s.begin; t < s.end; ++t) {
      const int64_t at = t * p.channels + c;
      float k, g;
      sum.step(to_float(g_u[at]), k, g);
      g_k[at] = from_float<T>(k);
      g_g[at] = g;
    }
  });
}

template <class T>
struct Backward {
  const T *k, *dk;
  const float *g, *dg, *z0, *dz;  // null: none
  T* du;
  float* dz0;
  float2* part;  // [chunks,C]: what a chunk makes of `later`, factor·later + term; then `later`
};

// One token, from the last: `later` = ρ_{t+1} e^{g_{t+1}} + dg_{t+1} to that of the token before.
template <class T>
__device__ __forceinline__ void step_back(const Backward<T>& b, int64_t at, bool fresh,
                                          float& later, float& factor, T* du) {
  const float k = to_float(b.k[at]), by_key = b.dk ? to_float(b.dk[at]) : 0.f;
  const float by_decay = b.dg && !fresh ? b.dg[at] : 0.f, decay = expf(b.g[at]);
  const float rho = later - by_decay - k * by_key;
  if (du) du[at] = from_float<T>(k * (by_key + rho));
  later = rho * decay + by_decay;
  factor *= decay;
}
template <class T>
__device__ __forceinline__ bool is_fresh(const Layout& p, const Backward<T>& b, int64_t n,
                                         int64_t c) {
  return !b.z0 || isinf(b.z0[n * p.channels + c]);
}
// The tokens of a chunk, from the last.
template <class T>
__device__ __forceinline__ void walk_back(const Layout& p, const Backward<T>& b, int64_t chunk,
                                          int64_t c, float& later, float& factor, T* du) {
  const Span s = span_of(p, chunk);
  const bool fresh = s.first && is_fresh(p, b, s.n, c);
#pragma unroll 4
  for (int64_t t = s.end - 1; t >= s.begin; --t)
    step_back(b, t * p.channels + c, fresh && t == s.begin, later, factor, du);
}

template <class T>
__global__ void __launch_bounds__(kThreads) back_total_kernel(Layout p, Backward<T> b) {
  each_item(p, p.chunks, [&](int64_t chunk, int64_t c) {
    float later = 0, factor = 1;
    walk_back(p, b, chunk, c, later, factor, static_cast<T*>(nullptr));
    b.part[chunk * p.channels + c] = {factor, later};
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) suffix_kernel(Layout p, Backward<T> b) {
  each_item(p, p.sequences, [&](int64_t n, int64_t c) {
    const int64_t first = p.first_chunk(n);
    SequenceCursor s = p.cursor;
    s.select(n);
    const int64_t count = (s.end - s.begin + kChunk - 1) / kChunk;
    float later = b.dz ? b.dz[n * p.channels + c] : 0.f;
#pragma unroll 8
    for (int64_t i = count - 1; i >= 0; --i) {
      float2& at = b.part[(first + i) * p.channels + c];
      const float2 x = at;
      at.x = later;
      later = x.x * later + x.y;
    }
    if (b.dz0) b.dz0[n * p.channels + c] = is_fresh(p, b, n, c) ? 0.f : later;
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) back_token_kernel(Layout p, Backward<T> b) {
  each_item(p, p.chunks, [&](int64_t chunk, int64_t c) {
    float later = b.part[chunk * p.channels + c].x, factor = 1;
    walk_back(p, b, chunk, c, later, factor, b.du);
  });
}

Layout layout_of(const LogCumsumExpProblem& p, Tensor* offsets) {
  Layout d;
  const bool packed = p.layout.is_packed();
  d.cursor = sequence_cursor(packed ? p.layout.device_offsets() : Tensor(), p.batch(), p.time());
  d.chunks = p.layout.chunk_count(p.batch(), p.time(), kChunk);
  d.chunks_per_row = ceil_div(p.time(), kChunk);
  d.sequences = p.sequences(), d.channels = p.channels();
  if (packed) {
    *offsets = p.layout.chunk_offsets(p.batch(), p.time(), kChunk, p.g.device());
    d.chunk_before = offsets->data<int64_t>();
  }
  return d;
}
unsigned blocks_for(int64_t items) {
  return unsigned(std::clamp<int64_t>(ceil_div(items, kThreads), 1, 1 << 30));
}

}  // namespace

void log_cumsum_exp_fwd(const LogCumsumExpProblem& problem, const Tensor& z) {
  Tensor offsets;
  const Layout p = layout_of(problem, &offsets);
  const Tensor total = Tensor::empty({p.chunks, p.channels, 2}, DType::f32, problem.g.device());
  auto* totals = reinterpret_cast<float2*>(ptr<float>(total));
  const cudaStream_t stream = stream_of(problem.g);
  const unsigned blocks = blocks_for(p.chunks * p.channels);
  visit_compute(problem.u.dtype(), [&]<class Host>() {
    total_kernel<<<blocks, kThreads, 0, stream>>>(p, ptr<Host>(problem.u), totals);
    check_launch();
    prefix_kernel<<<blocks_for(p.sequences * p.channels), kThreads, 0, stream>>>(
        p, ptr<float>(problem.z0), totals, ptr<float>(z));
    check_launch();
    token_kernel<<<blocks, kThreads, 0, stream>>>(p, ptr<Host>(problem.u), totals,
                                                  ptr<Host>(problem.k), ptr<float>(problem.g));
    check_launch();
  });
}

void log_cumsum_exp_bwd(const LogCumsumExpProblem& problem, const LogCumsumExpGradients& grads) {
  Tensor offsets;
  const Layout p = layout_of(problem, &offsets);
  const Tensor part = Tensor::empty({p.chunks, p.channels, 2}, DType::f32, problem.g.device());
  const cudaStream_t stream = stream_of(problem.g);
  const unsigned blocks = blocks_for(p.chunks * p.channels);
  visit_compute(problem.k.dtype(), [&]<class Host>() {
    const Backward<device_t<Host>> b{
        ptr<Host>(problem.k), ptr<Host>(grads.dk),    ptr<float>(problem.g),
        ptr<float>(grads.dg), ptr<float>(problem.z0), ptr<float>(grads.dz),
        ptr<Host>(grads.du),  ptr<float>(grads.dz0),  reinterpret_cast<float2*>(ptr<float>(part))};
    back_total_kernel<<<blocks, kThreads, 0, stream>>>(p, b);
    check_launch();
    suffix_kernel<<<blocks_for(p.sequences * p.channels), kThreads, 0, stream>>>(p, b);
    check_launch();
    if (!b.du) return;
    back_token_kernel<<<blocks, kThreads, 0, stream>>>(p, b);
    check_launch();
  });
}

}  // namespace ebb::gpu
