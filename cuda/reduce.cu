// Reductions of dense x [outer,n,inner] over n (ops/reduce.h), without atomics. n is cut into
// `splits` chunks by its size alone; with more than one, partial states go to memory and a second
// round of the same kernels reduces them in order.
// inner = 1: a row (or a chunk of one) per group of lanes, 8 consecutive elements per lane and
// step. inner > 1: 8 consecutive columns per thread; blocks of tx × ty threads, ty rows at a time,
// then a tree over ty in shared memory. grid: one group or block per (outer, chunk, column tile).
#include "cuda/reduce.cuh"
#include "ops/reduce.h"

namespace ebb::gpu {
namespace {

// Where values come from; put() adds the n <= 8 values at i to as many states.
template <class T>
struct Values {
  const T* x;
  float sign;
  bool aligned;
  template <class S>
  __device__ void put(S (&acc)[kPack], int64_t i, int n, int64_t at, int64_t at_step) const {
    float v[kPack];
    load_some(v, x + i, n, aligned);
#pragma unroll
    for (int e = 0; e < kPack; ++e)
      if (e < n) acc[e].add(sign * v[e], at + e * at_step);
  }
};
template <class A, class B>
struct Products {
  const A* a;
  const B* b;
  bool aligned;
  template <class S>
  __device__ void put(S (&acc)[kPack], int64_t i, int n, int64_t at, int64_t at_step) const {
    float v[kPack], w[kPack];
    load_some(v, a + i, n, aligned);
    load_some(w, b + i, n, aligned);
#pragma unroll
    for (int e = 0; e < kPack; ++e)
      if (e < n) acc[e].add(v[e] * w[e], at + e * at_step);
  }
};
template <class P>
struct Partials {
  const P* state;
  template <class S>
  __device__ void put(S (&acc)[kPack], int64_t i, int n, int64_t, int64_t) const {
#pragma unroll
    for (int e = 0; e < kPack; ++e)
      if (e < n) acc[e].merge(state[i + e]);
  }
};

// Where results go.
struct Sink {
  void* values = nullptr;
  DType dtype = DType::f32;
  int64_t* index = nullptr;
  float sign = 1, divisor = 1;
};
__device__ void emit(const Sink& k, int64_t i, const SumState<float>& s) {
  store_any(k.values, k.dtype, i, s.sum / k.divisor);
}
__device__ void emit(const Sink& k, int64_t i, const MaxState<float>& s) {
  if (k.values) store_any(k.values, k.dtype, i, k.sign * s.value);
  if (k.index) k.index[i] = s.index;
}
__device__ void emit(const Sink& k, int64_t i, const LogSumExpState<float>& s) {
  store_any(k.values, k.dtype, i, s.value());
}

struct Plan {
  int64_t outer, n, inner;
  int64_t chunk, splits;
  int width;  // rows: lanes per row. columns: threads along the columns (tx).
};

template <class S, class Source>
__global__ void __launch_bounds__(kReduceThreads)
    row_kernel(Source src, Plan p, S* g_partial, Sink sink) {
  __shared__ S scratch[kReduceThreads / 32];
  const int groups = kReduceThreads / p.width, group = threadIdx.x / p.width;
  const int lane = threadIdx.x % p.width;
  const int64_t tasks = p.outer * p.splits;
  for (int64_t base = int64_t(blockIdx.x) * groups; base < tasks;
       base += int64_t(gridDim.x) * groups) {
    const int64_t task = base + group, row = task / p.splits, split = task - row * p.splits;
    S acc[kPack];
#pragma unroll
    for (S& a : acc) a = S::empty();
    if (task < tasks) {
      const int64_t end = ::min(p.n, (split + 1) * p.chunk);
#pragma unroll 2
      for (int64_t j = split * p.chunk + lane * kPack; j < end; j += p.width * kPack)
        src.put(acc, row * p.n + j, int(::min(int64_t(kPack), end - j)), j, 1);
    }
#pragma unroll
    for (int e = 1; e < kPack; ++e) acc[0].merge(acc[e]);
    const S total = group_reduce(acc[0], p.width, scratch);
    if (lane == 0 && task < tasks) {
      if (g_partial)
        g_partial[task] = total;
      else
        emit(sink, task, total);
    }
  }
}

template <class S, class Source>
__global__ void __launch_bounds__(kReduceThreads)
    column_kernel(Source src, Plan p, S* g_partial, Sink sink) {
  __shared__ S s_acc[kPack][kReduceThreads];
  const int tx = p.width, ty = kReduceThreads / tx, x = threadIdx.x % tx, y = threadIdx.x / tx;
  const int64_t tiles = (p.inner + tx * kPack - 1) / (tx * kPack);
  const int64_t tasks = p.outer * p.splits * tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task / tiles, o = part / p.splits, split = part - o * p.splits;
    const int64_t c = ((task - part * tiles) * tx + x) * kPack;
    const int n = int(::max(int64_t(0), ::min(int64_t(kPack), p.inner - c)));
    S acc[kPack];
#pragma unroll
    for (S& a : acc) a = S::empty();
    const int64_t end = n > 0 ? ::min(p.n, (split + 1) * p.chunk) : 0;
#pragma unroll 4
    for (int64_t r = split * p.chunk + y; r < end; r += ty)
      src.put(acc, (o * p.n + r) * p.inner + c, n, r, 0);
#pragma unroll
    for (int e = 0; e < kPack; ++e) s_acc[e][threadIdx.x] = acc[e];
    for (int half = ty / 2; half > 0; half /= 2) {
      __syncthreads();
      if (y < half) {
#pragma unroll
        for (int e = 0; e < kPack; ++e)
          s_acc[e][threadIdx.x].merge(s_acc[e][threadIdx.x + half * tx]);
      }
    }
    if (y == 0) {  // these threads wrote the sums themselves: no barrier in between
      for (int e = 0; e < n; ++e) {
        const int64_t at = part * p.inner + c + e;
        if (g_partial)
          g_partial[at] = s_acc[e][threadIdx.x];
        else
          emit(sink, at, s_acc[e][threadIdx.x]);
      }
    }
    __syncthreads();
  }
}

// Enough chunks to fill the device, of a worthwhile size, and so many that no running f32 sum
// takes more than 512 terms. Depends on the shape only: results are the same on every GPU.
Plan plan_for(ReduceShape s) {
  Plan p{s.outer, s.n, s.inner, s.n, 1, 1};
  int64_t unit = 1;
  if (s.inner == 1) {
    p.width = lanes_for(s.n);
    if (p.width < kReduceThreads) return p;
    p.splits = std::min(ceil_div(1024, s.outer), ceil_div(s.n, 16384));
    p.splits = std::max(p.splits, ceil_div(s.n, 512 * kReduceThreads * kPack));
    unit = kReduceThreads * kPack;
  } else {
    while (p.width < 32 && p.width * kPack < s.inner) p.width *= 2;
    const int64_t rows = kReduceThreads / p.width, tiles = ceil_div(s.inner, p.width * kPack);
    p.splits = std::min(ceil_div(1056, s.outer * tiles), ceil_div(s.n, 8 * rows));
    p.splits = std::max(p.splits, ceil_div(s.n, 512 * rows));
  }
  p.chunk = ceil_div(ceil_div(s.n, p.splits), unit) * unit;
  p.splits = ceil_div(s.n, p.chunk);
  return p;
}

template <class S, class Source>
void reduce(const Source& src, ReduceShape s, const Sink& sink, Device device) {
  const Plan p = plan_for(s);
  const auto stream = static_cast<cudaStream_t>(ebb::current_stream(device).handle);
  const int64_t states = p.outer * p.splits * p.inner;
  const Tensor memory =
      p.splits > 1 ? Tensor::empty({states, int64_t(sizeof(S))}, DType::u8, device) : Tensor();
  S* partial = memory ? static_cast<S*>(memory.raw()) : nullptr;
  const int64_t tasks = s.inner == 1 ? ceil_div(p.outer * p.splits, kReduceThreads / p.width)
                                     : p.outer * p.splits * ceil_div(s.inner, p.width * kPack);
  const unsigned blocks = unsigned(std::min<int64_t>(tasks, 1 << 30));
  if (s.inner == 1)
    row_kernel<S><<<blocks, kReduceThreads, 0, stream>>>(src, p, partial, sink);
  else
    column_kernel<S><<<blocks, kReduceThreads, 0, stream>>>(src, p, partial, sink);
  check_launch();
  if (p.splits > 1) reduce<S>(Partials<S>{partial}, {p.outer, p.splits, p.inner}, sink, device);
}

template <class S>
void reduce_values(const Tensor& x, ReduceShape s, const Sink& sink) {
  const bool aligned = packs_aligned(x, s.inner > 1 ? s.inner : s.outer > 1 ? s.n : 0);
  visit_compute(x.dtype(), [&]<class T>() {
    reduce<S>(Values<device_t<T>>{ptr<T>(x), sink.sign, aligned}, s, sink, x.device());
  });
}

// Raises *g_bad when a word of 16 bytes, or an element of the tail, has all exponent bits of one
// of its elements set. Bits: an unsigned type of the element's size.
template <class Bits>
__global__ void __launch_bounds__(kReduceThreads)
    finite_kernel(const Bits* g_x, int64_t n, Bits exponent, bool aligned, int32_t* g_bad) {
  constexpr int kWord = 16 / sizeof(Bits);
  const int64_t words = aligned ? n / kWord : 0, step = int64_t(gridDim.x) * kReduceThreads;
  const int64_t first = int64_t(blockIdx.x) * kReduceThreads + threadIdx.x;
  bool bad = false;
  for (int64_t w = first; w < words; w += step) {
    const uint4 word = reinterpret_cast<const uint4*>(g_x)[w];
    Bits element[kWord];
    memcpy(element, &word, sizeof word);
#pragma unroll
    for (int e = 0; e < kWord; ++e) bad |= (element[e] & exponent) == exponent;
  }
  for (int64_t i = words * kWord + first; i < n; i += step) bad |= (g_x[i] & exponent) == exponent;
  if (bad) *g_bad = 1;  // every writer stores the same value
}

template <class Bits>
void launch_finite(const Tensor& x, Bits exponent, const Tensor& bad) {
  const int64_t blocks = ceil_div(x.nbytes(), 16 * kReduceThreads * 4);
  finite_kernel<<<unsigned(std::min<int64_t>(blocks, 16384)), kReduceThreads, 0, stream_of(x)>>>(
      static_cast<const Bits*>(x.raw()), x.numel(), exponent,
      reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0, bad.data<int32_t>());
  check_launch();
}

}  // namespace

void sum(const Tensor& x, const Tensor& factor, ReduceShape s, double divisor, const Tensor& y) {
  const Sink sink{.values = y.raw(), .dtype = y.dtype(), .divisor = float(divisor)};
  if (!factor) return reduce_values<SumState<float>>(x, s, sink);
  const int64_t row = s.inner > 1 ? s.inner : s.outer > 1 ? s.n : 0;
  const bool aligned = packs_aligned(x, row) && packs_aligned(factor, row);
  visit_compute(x.dtype(), [&]<class A>() {
    visit_compute(factor.dtype(), [&]<class B>() {
      reduce<SumState<float>>(
          Products<device_t<A>, device_t<B>>{ptr<A>(x), ptr<B>(factor), aligned}, s, sink,
          x.device());
    });
  });
}

void max(const Tensor& x, ReduceShape s, bool negate, const Tensor& y, const Tensor& index) {
  reduce_values<MaxState<float>>(x, s,
                                 {.values = y ? y.raw() : nullptr,
                                  .dtype = x.dtype(),
                                  .index = index ? index.data<int64_t>() : nullptr,
                                  .sign = negate ? -1.f : 1.f});
}

void logsumexp(const Tensor& x, ReduceShape s, const Tensor& y) {
  reduce_values<LogSumExpState<float>>(x, s, {.values = y.raw(), .dtype = y.dtype()});
}

bool all_finite(const Tensor& t) {
  Tensor x = t;
  for (int d = 0; d < x.dim(); ++d)  // repeated values are looked at once
    if (x.stride(d) == 0 && x.size(d) > 1) x = x.slice(d, 0, 1);
  if (!is_float(x.dtype()) || x.numel() == 0) return true;
  x = x.contiguous();
  const Tensor bad = Tensor::zeros({1}, DType::i32, x.device());
  switch (x.dtype()) {
    case DType::f32:
      launch_finite<uint32_t>(x, 0x7f800000u, bad);
      break;
    case DType::bf16:
      launch_finite<uint16_t>(x, 0x7f80u, bad);
      break;
    default:
      launch_finite<uint64_t>(x, 0x7ff0000000000000ull, bad);
  }
  return bad.item() == 0;
}

}  // namespace ebb::gpu
