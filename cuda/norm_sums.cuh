// Sums and weights of the normalisations: over the threads of a row (statistics), over the rows of
// a column (weight gradients). Rows on threads: cuda/norm_rows.cuh.
//
// A block adds up its own rows, in registers and then over its slots, and writes one row of partial
// sums [blocks, groups·width], zeros if it met no token. sum_partials adds those in an order fixed
// by the shapes. No atomics: bitwise equal reruns.
#pragma once
#include "cuda/norm_rows.cuh"

namespace ebb::gpu {

// out[c] = Σ_b partial[b,c] for partial read as [.., out.numel()], in an order fixed by the shapes.
// Second: the same for another pair. Undefined outputs are skipped.
void sum_partials(const Tensor& partial, const Tensor& out, const Tensor& partial2 = {},
                  const Tensor& out2 = {});

#ifdef __CUDACC__

// The thread's columns of g [weight_groups, width] in pack p, and all of them; `absent` if g is
// null.
template <int N, bool kWide>
__device__ __forceinline__ void load_column_pack(float (&w)[N], const float* g,
                                                 const RowWalk<N, kWide>& at, int64_t tile, int p,
                                                 float absent) {
  const auto c = at.column(p, tile);
  Packed<float, N> values;
  const bool there = g && c < at.width;
  if (there) values.load(g + int64_t(at.weight_group) * at.width + c);
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = there ? values.at(i) : absent;
}
template <int N, bool kWide>
__device__ __forceinline__ void load_columns(float (&w)[kRowValues], const float* g,
                                             const RowWalk<N, kWide>& at, int64_t tile,
                                             float absent) {
#pragma unroll
  for (int p = 0; p < kRowValues / N; ++p) {
    float part[N];
    load_column_pack(part, g, at, tile, p, absent);
#pragma unroll
    for (int i = 0; i < N; ++i) w[p * N + i] = part[i];
  }
}

// A thread's weights where registers are short: parked in shared memory, those of wide rows left in
// global memory. Value v lies in float4 v/4, neighbouring threads side by side; only the thread
// itself reads them, so no barrier is needed.
template <int N, bool kWide>
struct ParkedWeights {
  const float* g_w;  // [weight_groups, width] or null (1)
  float4* s;         // [kRowValues / 4][kRowThreads]

  __device__ ParkedWeights(const float* w, float* buffer, const RowWalk<N, kWide>& at)
      : g_w(w), s(reinterpret_cast<float4*>(buffer)) {
    if (kWide) return;
    float all[kRowValues];
    load_columns(all, g_w, at, 0, 1.f);
#pragma unroll
    for (int i = 0; i < kRowValues; i += 4)
      s[i / 4 * kRowThreads + threadIdx.x] =
          make_float4(all[i], all[i + 1], all[i + 2], all[i + 3]);
  }
  // The weights of pack p.
  __device__ __forceinline__ void get(float (&w)[N], const RowWalk<N, kWide>& at, int64_t tile,
                                      int p) const {
    if constexpr (kWide) {
      load_column_pack(w, g_w, at, tile, p, 1.f);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int v = p * N + i;
        const float4& q = s[v / 4 * kRowThreads + threadIdx.x];
        w[i] = v % 4 == 0 ? q.x : v % 4 == 1 ? q.y : v % 4 == 2 ? q.z : q.w;
      }
    }
  }
};

// Sums of K values over the threads of a row, the same in each of them. Call from all threads.
template <int K>
struct RowSums {
  float (*scratch)[kRowThreads / 32][K];  // [2]: calls alternate, so one barrier each suffices
  int parity = 0;

  template <class Walk>
  __device__ __forceinline__ void operator()(float (&v)[K], const Walk& at) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1)
      if (at.lanes > o) {
#pragma unroll
        for (int k = 0; k < K; ++k) v[k] += __shfl_xor_sync(0xffffffffu, v[k], o);
      }
    if (at.lanes <= 32) return;
    const int warps = at.lanes / 32, first = at.slot * warps;
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int k = 0; k < K; ++k) scratch[parity][threadIdx.x / 32][k] = v[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) v[k] = 0;
    for (int i = first; i < first + warps; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) v[k] += scratch[parity][i][k];
    parity ^= 1;
  }
};

// 1/sqrt(m + eps) of a mean (or sum) of squares. A sum beyond f32 must not pass for a row of zeros.
__device__ __forceinline__ float rstd_of(float m, float eps) {
  return isinf(m) ? __int_as_float(0x7fc00000) : rsqrtf(m + eps);
}

// Sums over rows for the thread's columns, on their way to partial [blocks, groups·width].
template <int N, bool kWide>
struct ColumnSums {
  float sum[kRowValues] = {};
  float* g_partial = nullptr;  // the block's row, from the thread's group on; null: not wanted

  __device__ ColumnSums(float* partial, const RowWalk<N, kWide>& at) {
    if (!partial) return;
    g_partial = partial + (int64_t(at.block) * at.groups + at.group) * at.width;
    if (kWide)
      for (int64_t t = 0; t < at.tiles(); ++t) store(at, t, false);
  }
  __device__ __forceinline__ void add(int v, float x) { sum[v] += x; }
  // Wide rows: adds the tile's sums to the block's row, which no other block touches.
  __device__ __forceinline__ void end_tile(const RowWalk<N, kWide>& at, int64_t tile) {
    if (kWide && g_partial) {
      store(at, tile, true);
      each_value([&](int v) { sum[v] = 0; });
    }
  }
  // Adds the block's slots of each column in order. s_sum: kRowThreads·16 floats, all threads.
  __device__ void finish(const RowWalk<N, kWide>& at, float* s_sum) {
    if (kWide || !g_partial) return;
    if (at.token_slots == 1) return store(at, 0, false);
    const int pitch = at.lanes * kRowValues;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kRowValues / N; ++p) {
      Packed<float, N> out;
      out.fill([&](int i) { return sum[p * N + i]; });
      out.store(s_sum + at.slot * pitch + int(at.column(p, 0)));
    }
    __syncthreads();
    float* g_first = g_partial - at.slot % at.span * at.width;
    const int width = int(at.width);
    for (int c = threadIdx.x; c < at.span * width; c += blockDim.x) {
      const float* column = s_sum + c / width * pitch + c % width;
      float total = 0;
      for (int t = 0; t < at.token_slots; ++t) total += column[t * at.span * pitch];
      g_first[c] = total;
    }
  }

 private:
  __device__ __forceinline__ void store(const RowWalk<N, kWide>& at, int64_t tile, bool onto) {
#pragma unroll
    for (int p = 0; p < kRowValues / N; ++p) {
      const auto c = at.column(p, tile);
      if (c >= at.width) continue;
      Packed<float, N> before{}, out;
      if (onto) before.load(g_partial + c);
      out.fill([&](int i) { return before.at(i) + sum[p * N + i]; });
      out.store(g_partial + c);
    }
  }
};

#endif

}  // namespace ebb::gpu
