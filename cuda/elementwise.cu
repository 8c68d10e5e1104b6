// The elementwise engine on the GPU (ops/map.h): one kernel for every function and every mix of
// types; both are picked by branches that all threads take alike.
// grid: one thread per N consecutive results, N = 8 where the innermost dimension is dense or
// repeated in every operand and aligned, else 1.
//   1 find the N elements in each operand   2 load, widen   3 apply f   4 round, store.
#include <algorithm>

#include "cuda/any_dtype.cuh"
#include "ops/map.h"
#include "ops/map_formulas.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256;

template <class I, int inputs>
__device__ __forceinline__ void locate(const MapPlan& p, int64_t i, int64_t (&at)[inputs]) {
  I rest = I(i);
  for (int d = p.rank - 1; d >= 0; --d) {
    const I size = I(p.size[d]), next = d ? rest / size : 0, here = rest - next * size;
    rest = next;
#pragma unroll
    for (int k = 0; k < inputs; ++k) at[k] += int64_t(here) * p.stride[k][d];
  }
}

// n of N elements from offset `at` on, `step` (0 or 1) apart; the others are 0.
template <int N>
__device__ __forceinline__ void load(float (&v)[N], const void* p, DType t, int64_t at,
                                     int64_t step, int n) {
  if (N == 1 || step == 0) {
    const float x = load_any(p, t, at);
#pragma unroll
    for (int e = 0; e < N; ++e) v[e] = x;
    return;
  }
  if constexpr (N == kPack) {
    if (n == N) return load_any8(v, p, t, at);
#pragma unroll
    for (int e = 0; e < N; ++e) v[e] = e < n ? load_any(p, t, at + e) : 0.f;
  }
}

template <int N, int inputs>
__global__ void __launch_bounds__(kThreads) map_kernel(const __grid_constant__ MapPlan p) {
  const int64_t packs = (p.numel + N - 1) / N, step = int64_t(gridDim.x) * kThreads;
  const float p0 = float(p.f.p0), p1 = float(p.f.p1);
  for (int64_t pack = int64_t(blockIdx.x) * kThreads + threadIdx.x; pack < packs; pack += step) {
    const int64_t i = pack * N;
    const int n = int(::min(int64_t(N), p.numel - i));
    // 1: 32-bit divisions are several times cheaper
    int64_t at[inputs] = {};
    if (p.numel <= INT32_MAX)
      locate<uint32_t>(p, i, at);
    else
      locate<uint64_t>(p, i, at);
    // 2
    float v[inputs][N], r[N];
#pragma unroll
    for (int k = 0; k < inputs; ++k)
      load<N>(v[k], p.in[k], p.in_dtype[k], at[k], p.stride[k][p.rank - 1], n);
    // 3: functions of fewer operands do not look at the others
    visit_map<inputs, float>(p.f.op, p0, p1, [&](auto f) {
#pragma unroll
      for (int e = 0; e < N; ++e) r[e] = f(v[0][e], v[inputs > 1][e], v[inputs > 2 ? 2 : 0][e]);
    });
    // 4
    if constexpr (N == kPack) {
      if (n == N) {
        store_any8(p.out, p.out_dtype, i, r);
        continue;
      }
    }
#pragma unroll
    for (int e = 0; e < N; ++e)
      if (e < n) store_any(p.out, p.out_dtype, i + e, r[e]);
  }
}

__device__ __forceinline__ int64_t load_integer(const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::i64:
      return static_cast<const int64_t*>(p)[i];
    case DType::i32:
      return static_cast<const int32_t*>(p)[i];
    default:
      return static_cast<const uint8_t*>(p)[i];
  }
}

// Comparisons of integers, which float would round.
__global__ void __launch_bounds__(kThreads) compare_kernel(const __grid_constant__ MapPlan p) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.numel; i += step) {
    int64_t at[2] = {};
    locate<uint64_t>(p, i, at);
    const int64_t a = load_integer(p.in[0], p.in_dtype[0], at[0]);
    const int64_t b = load_integer(p.in[1], p.in_dtype[1], at[1]);
    visit_comparison<int64_t>(
        p.f.op, [&](auto f) { store_any(p.out, p.out_dtype, i, float(f(a, b, int64_t(0)))); });
  }
}

// Whether 8 results at a time can be loaded by vector accesses. Rows must then start on multiples
// of 8; a single row may end anywhere, its remainder is loaded element by element.
bool packable(const MapPlan& p) {
  const int last = p.rank - 1;
  if (p.rank > 1 && p.size[last] % kPack) return false;
  for (int k = 0; k < p.inputs; ++k) {
    if (p.stride[k][last] == 0) continue;
    if (p.stride[k][last] != 1 || reinterpret_cast<uintptr_t>(p.in[k]) % 16) return false;
    for (int d = 0; d < last; ++d)
      if (p.stride[k][d] % kPack) return false;
  }
  return reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
}

unsigned blocks_for(int64_t items) {
  return unsigned(std::min<int64_t>(ceil_div(items, kThreads), 1 << 30));
}

template <int inputs>
void launch(const MapPlan& p, cudaStream_t stream) {
  if (packable(p))
    map_kernel<kPack, inputs><<<blocks_for(ceil_div(p.numel, kPack)), kThreads, 0, stream>>>(p);
  else
    map_kernel<1, inputs><<<blocks_for(p.numel), kThreads, 0, stream>>>(p);
}

}  // namespace

void map(const MapPlan& p, Stream stream) {
  const auto s = static_cast<cudaStream_t>(stream.handle);
  bool integers = true;
  for (int k = 0; k < p.inputs; ++k) integers &= !is_float(p.in_dtype[k]);
  if (p.f.op >= MapOp::eq && integers)
    compare_kernel<<<blocks_for(p.numel), kThreads, 0, s>>>(p);
  else if (p.inputs == 1)
    launch<1>(p, s);
  else if (p.inputs == 2)
    launch<2>(p, s);
  else
    launch<3>(p, s);
  check_launch();
}

}  // namespace ebb::gpu
