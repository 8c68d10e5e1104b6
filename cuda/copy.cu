// Strided copies, conversions, fills and sums (tensor/tensor.h).
//   dense, same dtype: cudaMemcpyAsync
//   a dimension dense in the source and another in the destination: 2-D tiles through shared memory
//   otherwise: one thread per unit, a unit being as many bytes as alignment and strides allow
#include <cstring>

#include "cuda/strided.cuh"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

struct alignas(16) Bytes16 {
  uint64_t lo, hi;
};

template <class D, class S>
__device__ __forceinline__ D convert(S v) {
  if constexpr (std::is_same_v<D, S>)
    return v;
  else if constexpr (std::is_same_v<S, __nv_bfloat16>)
    return convert<D>(__bfloat162float(v));
  else if constexpr (std::is_same_v<D, __nv_bfloat16>)
    return __float2bfloat16_rn(float(v));
  else if constexpr (std::is_integral_v<D> && std::is_floating_point_v<S>)
    return float_to_int<D>(v);
  else
    return D(v);
}

struct Assign {
  template <class D, class S>
  __device__ static D apply(D, S s) {
    return convert<D>(s);
  }
  static constexpr bool reads_destination = false;
};
struct Add {  // in f64 for f64 destinations, else in f32
  template <class D, class S>
  __device__ static D apply(D d, S s) {
    using A = std::conditional_t<std::is_same_v<D, double>, double, float>;
    return convert<D>(convert<A>(d) + convert<A>(s));
  }
  static constexpr bool reads_destination = true;
};

// Thread t of block b handles units b·1024 + t + 256k, k < 4, so that four loads are in flight.
template <class D, class S, int N, class Op, class I>
__global__ void strided_kernel(D* g_d, const S* g_s, Walk<I> walk, int64_t units) {
  using PackD = Pack<D, N>;
  using PackS = Pack<S, N>;
  const int64_t first = int64_t(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  PackS r_s[kUnroll];
  PackD r_d[kUnroll];
  int64_t to[kUnroll];
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= units) break;
    int64_t from;
    walk.locate(I(i), &to[k], &from);
    r_s[k] = reinterpret_cast<const PackS*>(g_s)[from];
    if constexpr (Op::reads_destination) r_d[k] = reinterpret_cast<const PackD*>(g_d)[to[k]];
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    if (first + k * kThreads >= units) break;
#pragma unroll
    for (int j = 0; j < N; ++j) r_d[k].v[j] = Op::apply(r_d[k].v[j], r_s[k].v[j]);
    reinterpret_cast<PackD*>(g_d)[to[k]] = r_d[k];
  }
}

template <class D, class S, int N, class Op>
void launch_strided(D* dst, const S* src, const Plan& p, cudaStream_t stream) {
  const int64_t units = p.count();
  const unsigned grid = unsigned(ceil_div(units, kThreads * kUnroll));
  if (units <= kMax32)
    strided_kernel<D, S, N, Op, uint32_t>
        <<<grid, kThreads, 0, stream>>>(dst, src, Walk<uint32_t>(p), units);
  else
    strided_kernel<D, S, N, Op, uint64_t>
        <<<grid, kThreads, 0, stream>>>(dst, src, Walk<uint64_t>(p), units);
  check_launch();
}

// As packs of N where the layout allows it; a dense vector also when only its tail does not.
template <class D, class S, int N, class Op>
void run_packed(D* dst, const S* src, const Plan& p, cudaStream_t stream) {
  if constexpr (N > 1) {
    if (packs(p, N, sizeof(D), sizeof(S), dst, src))
      return launch_strided<D, S, N, Op>(dst, src, in_packs(p, N), stream);
    Plan body = p;
    body.n[0] -= body.n[0] % N;
    if (p.rank == 1 && body.n[0] > 0 && packs(body, N, sizeof(D), sizeof(S), dst, src)) {
      launch_strided<D, S, N, Op>(dst, src, in_packs(body, N), stream);
      Plan tail = p;
      tail.n[0] -= body.n[0];
      return launch_strided<D, S, 1, Op>(dst + body.n[0], src + body.n[0], tail, stream);
    }
  }
  launch_strided<D, S, 1, Op>(dst, src, p, stream);
}

// Tiles. The destination is dense along x, the source along y; the other dimensions are `walk`.
// A block of 32×8 threads moves one tile of 32·V × 32·V elements, V consecutive ones at a time.
// grid: tiles_x · tiles_y · outer.  1 load rows along y into s_tile[x][y].  2 store rows along x.
template <class D, class S, int V, class I>
__global__ void transpose_kernel(D* g_d, const S* g_s, int64_t nx, int64_t ny, int64_t sx,
                                 int64_t dy, int64_t tiles_x, int64_t tiles_y, Walk<I> outer) {
  constexpr int kTile = 32 * V;
  __shared__ S s_tile[kTile][kTile + V];
  int64_t block = blockIdx.x;
  const int64_t x0 = block % tiles_x * kTile;
  block /= tiles_x;
  const int64_t y0 = block % tiles_y * kTile;
  block /= tiles_y;
  int64_t to = 0, from = 0;
  outer.locate(I(block), &to, &from);
  const int lane = threadIdx.x * V;
  for (int row = threadIdx.y; row < kTile; row += 8) {  // 1
    const int64_t x = x0 + row, y = y0 + lane;
    if (x >= nx || y >= ny) continue;
    const auto pack = *reinterpret_cast<const Pack<S, V>*>(g_s + from + x * sx + y);
#pragma unroll
    for (int j = 0; j < V; ++j) s_tile[row][lane + j] = pack.v[j];
  }
  __syncthreads();
  for (int row = threadIdx.y; row < kTile; row += 8) {  // 2
    const int64_t x = x0 + lane, y = y0 + row;
    if (x >= nx || y >= ny) continue;
    Pack<D, V> pack;
#pragma unroll
    for (int j = 0; j < V; ++j) pack.v[j] = convert<D>(s_tile[lane + j][row]);
    *reinterpret_cast<Pack<D, V>*>(g_d + to + y * dy + x) = pack;
  }
}

template <class D, class S, int V>
bool launch_transpose(D* dst, const S* src, const Plan& p, int y, cudaStream_t stream) {
  const auto fits = [](const void* at, size_t pack) {
    return reinterpret_cast<uintptr_t>(at) % pack == 0;
  };
  bool ok =
      fits(dst, sizeof(D) * V) && fits(src, sizeof(S) * V) && p.n[0] % V == 0 && p.n[y] % V == 0;
  Plan outer;
  for (int i = 0; i < p.rank; ++i) {
    if (i != 0) ok &= p.ds[i] % V == 0;
    if (i != y) ok &= p.ss[i] % V == 0;
    if (i == 0 || i == y) continue;
    outer.add(p.n[i], p.ds[i], p.ss[i]);
  }
  const int64_t tiles_x = ceil_div(p.n[0], 32 * V), tiles_y = ceil_div(p.n[y], 32 * V);
  const int64_t blocks = tiles_x * tiles_y * outer.count();
  if (!ok || blocks > kMax32) return false;
  transpose_kernel<D, S, V, uint32_t><<<unsigned(blocks), dim3(32, 8), 0, stream>>>(
      dst, src, p.n[0], p.n[y], p.ss[0], p.ds[y], tiles_x, tiles_y, Walk<uint32_t>(outer));
  check_launch();
  return true;
}

// Same dtype: only the item size matters, and dense runs move as wider items.
template <class U>
void copy_items(void* dst, const void* src, const Plan& p, cudaStream_t stream) {
  auto* d = static_cast<U*>(dst);
  const auto* s = static_cast<const U*>(src);
  if (const int y = transpose_partner(p)) {
    constexpr int V = sizeof(U) < 4 ? int(4 / sizeof(U)) : 1;
    if (V > 1 && launch_transpose<U, U, V>(d, s, p, y, stream)) return;
    if (launch_transpose<U, U, 1>(d, s, p, y, stream)) return;
  }
  launch_strided<U, U, 1, Assign>(d, s, p, stream);
}

void copy_same_type(void* dst, const void* src, Plan p, int64_t item, cudaStream_t stream) {
  int64_t unit = 16;
  while (unit > item && !packs(p, unit / item, item, item, dst, src)) unit /= 2;
  if (unit > item) p = in_packs(p, unit / item);
  switch (unit) {
    case 16:
      return copy_items<Bytes16>(dst, src, p, stream);
    case 8:
      return copy_items<uint64_t>(dst, src, p, stream);
    case 4:
      return copy_items<uint32_t>(dst, src, p, stream);
    case 2:
      return copy_items<uint16_t>(dst, src, p, stream);
    default:
      return copy_items<uint8_t>(dst, src, p, stream);
  }
}

template <class D, class S>
void convert_copy(D* dst, const S* src, const Plan& p, cudaStream_t stream) {
  // Packs and tiles for the conversions training makes all the time.
  constexpr bool hot = (std::is_same_v<D, float> && std::is_same_v<S, __nv_bfloat16>) ||
                       (std::is_same_v<S, float> && std::is_same_v<D, __nv_bfloat16>);
  if constexpr (hot)
    if (const int y = transpose_partner(p))
      if (launch_transpose<D, S, 1>(dst, src, p, y, stream)) return;
  run_packed<D, S, hot ? 4 : 1, Assign>(dst, src, p, stream);
}

template <class U, class I>
__global__ void fill_kernel(U* g_d, U value, Walk<I> walk, int64_t units) {
  const int64_t first = int64_t(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= units) break;
    int64_t to, unused;
    walk.locate(I(i), &to, &unused);
    g_d[to] = value;
  }
}

template <class U>
void fill_items(void* dst, const void* pattern, const Plan& p, cudaStream_t stream) {
  U value;
  std::memcpy(&value, pattern, sizeof(U));
  auto* d = static_cast<U*>(dst);
  const int64_t units = p.count();
  const unsigned grid = unsigned(ceil_div(units, kThreads * kUnroll));
  if (units <= kMax32)
    fill_kernel<<<grid, kThreads, 0, stream>>>(d, value, Walk<uint32_t>(p), units);
  else
    fill_kernel<<<grid, kThreads, 0, stream>>>(d, value, Walk<uint64_t>(p), units);
  check_launch();
}

}  // namespace

void copy_strided(const Tensor& dst, const Tensor& src) {
  if (dst.numel() == 0) return;
  const cudaStream_t stream = stream_of(dst);
  const Plan p = make_plan(dst.shape(), dst.strides(), src.strides());
  if (dst.dtype() == src.dtype()) {
    if (p.dense())
      cuda_check(cudaMemcpyAsync(dst.raw(), src.raw(), size_t(dst.nbytes()),
                                 cudaMemcpyDeviceToDevice, stream),
                 "copy");
    else
      copy_same_type(dst.raw(), src.raw(), p, item_size(dst.dtype()), stream);
    return;
  }
  visit_any(dst.dtype(), [&]<class D>() {
    visit_any(src.dtype(), [&]<class S>() {
      if constexpr (!std::is_same_v<D, S>) convert_copy(ptr<D>(dst), ptr<S>(src), p, stream);
    });
  });
}

void fill(const Tensor& t, double value) {
  if (t.numel() == 0) return;
  const cudaStream_t stream = stream_of(t);
  const int64_t item = item_size(t.dtype());
  unsigned char pattern[16];  // the value's bytes, repeated
  visit_any(t.dtype(), [&]<class T>() {
    T v;
    if constexpr (std::is_integral_v<T>)
      v = float_to_int<T>(value);
    else
      v = T(value);
    for (size_t at = 0; at < sizeof pattern; at += sizeof v)
      std::memcpy(pattern + at, &v, sizeof v);
  });
  Plan p = make_plan(t.shape(), t.strides(), t.strides());
  bool uniform = true;
  for (const unsigned char b : pattern) uniform &= b == pattern[0];
  if (uniform && p.dense()) {
    cuda_check(cudaMemsetAsync(t.raw(), pattern[0], size_t(t.nbytes()), stream), "fill");
    return;
  }
  int64_t unit = 16;
  while (unit > item && !packs(p, unit / item, item, item, t.raw(), t.raw())) unit /= 2;
  if (unit > item) p = in_packs(p, unit / item);
  switch (unit) {
    case 16:
      return fill_items<Bytes16>(t.raw(), pattern, p, stream);
    case 8:
      return fill_items<uint64_t>(t.raw(), pattern, p, stream);
    case 4:
      return fill_items<uint32_t>(t.raw(), pattern, p, stream);
    case 2:
      return fill_items<uint16_t>(t.raw(), pattern, p, stream);
    default:
      return fill_items<uint8_t>(t.raw(), pattern, p, stream);
  }
}

void add_into(const Tensor& dst, const Tensor& src) {
  if (dst.numel() == 0) return;
  const cudaStream_t stream = stream_of(dst);
  const Plan p = make_plan(dst.shape(), dst.strides(), src.strides());
  visit_float(dst.dtype(), [&]<class D>() {
    visit_float(src.dtype(), [&]<class S>() {
      constexpr bool hot = sizeof(D) <= 4 && sizeof(S) <= 4;
      run_packed<device_t<D>, device_t<S>, hot ? 4 : 1, Add>(ptr<D>(dst), ptr<S>(src), p, stream);
    });
  });
}

}  // namespace ebb::gpu
