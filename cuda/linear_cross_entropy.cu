// The in-place softmax gradient of a chunk of logits (ops/linear_cross_entropy.h).
//
// One block per row. A row of up to 65,536 bf16 logits stays in registers: one read, one write, one
// exchange between the warps, one exponential per logit. Longer rows take the two kernels of
// cross_entropy (two reads, one write).
#include <algorithm>

#include "cuda/softmax_rows.cuh"
#include "ops/linear_cross_entropy.h"

namespace ebb::gpu {
namespace {

// Sixteen bytes of a row as stored, kept in registers.
template <class T>
struct Held {
  static constexpr int N = RowPacks<T>::N;
  uint4 bits;
  __device__ __forceinline__ void unpack(float (&out)[N]) const {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 2) {
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        out[i] = __uint_as_float(words[i]);
      }
    }
  }
  // The largest of its values and `so_far`. bf16 in pairs: unpacked values shared with the step
  // that follows would not fit into the registers.
  __device__ __forceinline__ float max_with(float so_far) const {
    if constexpr (sizeof(T) == 2) {
      const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
      __nv_bfloat162 pair[4];
      memcpy(pair, words, sizeof pair);
      const __nv_bfloat162 top = __hmax2(__hmax2(pair[0], pair[1]), __hmax2(pair[2], pair[3]));
      return fmaxf(so_far, fmaxf(__low2float(top), __high2float(top)));
    } else {
      const float a = fmaxf(__uint_as_float(bits.x), __uint_as_float(bits.y));
      const float b = fmaxf(__uint_as_float(bits.z), __uint_as_float(bits.w));
      return fmaxf(so_far, fmaxf(a, b));
    }
  }
  __device__ __forceinline__ void pack(const float (&in)[N]) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 2) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        memcpy(&words[i], &pair, 4);
      } else {
        words[i] = __float_as_uint(in[i]);
      }
    }
    bits = {words[0], words[1], words[2], words[3]};
  }
};

// kWhole: every row starts and ends at 16-byte boundaries, so no pack hangs over.
template <class T, bool kWhole>
struct HeldRow {
  static constexpr int N = RowPacks<T>::N;
  T* g_row;
  int v, shift, packs;
  __device__ HeldRow(T* row, int size)
      : g_row(row),
        v(size),
        shift(kWhole ? 0 : int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T))),
        packs((size + shift + N - 1) / N) {}
  __device__ bool hangs_over(int q) const {
    return !kWhole && (q * N < shift || (q + 1) * N - shift > v);
  }
  __device__ __forceinline__ void load(Held<T>& held, int q) const {
    if (q < packs && !hangs_over(q)) {
      held.bits = *reinterpret_cast<const uint4*>(g_row + (q * N - shift));
      return;
    }
    float z[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int j = q * N - shift + i;
      z[i] = q < packs && j >= 0 && j < v ? to_float(g_row[j]) : -INFINITY;
    }
    held.pack(z);
  }
  __device__ __forceinline__ void store(const Held<T>& held, int q) const {
    if (q >= packs) return;
    if (!hangs_over(q)) {
      *reinterpret_cast<uint4*>(g_row + (q * N - shift)) = held.bits;
      return;
    }
    float z[N];
    held.unpack(z);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int j = q * N - shift + i;
      if (j >= 0 && j < v) g_row[j] = from_float<T>(z[i]);
    }
  }
};

// grid (rows). kThreads·P packs of 16 bytes hold the row; thread t has packs t, t + kThreads, ...
// 1 load (−inf beyond the row).  2 thread maximum m.  3 z ← exp(z − m) as stored, summed in f32
// before rounding.  4 max and sum of the row.  5 z ← z·g·exp(m − max)/sum.  6 the label's value
// again, from its logit in f32.
template <class T, int kThreads, int P, bool kWhole>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    softmax_gradient_kernel(T* g_z /*[rows,V]*/, const int64_t* g_label /*[rows]*/, int v,
                            int64_t ignore_index, RowFactors factors, float* g_lse,
                            float* g_token_loss, int32_t* g_flags) {
  __shared__ float scratch[64];
  constexpr int N = RowPacks<T>::N;
  const int thread = int(threadIdx.x);
  const HeldRow<T, kWhole> row(g_z + int64_t(blockIdx.x) * v, v);
  Held<T> r_z[P];
#pragma unroll
  for (int p = 0; p < P; ++p) row.load(r_z[p], thread + p * kThreads);  // 1
  const int64_t label = g_label[blockIdx.x];
  const bool kept = label >= 0 && label < v && label != ignore_index;
  // Read before step 4's barrier, hence before anyone writes.
  const float z_label = kept ? to_float(row.g_row[label]) : 0.f;
  float m = -INFINITY;
#pragma unroll
  for (int p = 0; p < P; ++p) m = r_z[p].max_with(m);  // 2
  const float shift = shift_of(m);
  float sum = 0;
#pragma unroll
  for (int p = 0; p < P; ++p) {  // 3
    float z[N];
    r_z[p].unpack(z);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += z[i] = __expf(z[i] - shift);
    r_z[p].pack(z);
  }
  const MaxSum all = block_max_sum({m, sum}, scratch);  // 4
  const float g = kept ? factors.of(blockIdx.x) : 0.f;
  const float factor = g * rescale(m, all.max) / all.sum;
#pragma unroll
  for (int p = 0; p < P; ++p) {  // 5
    float z[N];
    r_z[p].unpack(z);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = kept ? z[i] * factor : 0.f;
    r_z[p].pack(z);
    row.store(r_z[p], thread + p * kThreads);
  }
  const float max = shift_of(all.max), log_sum = logf(all.sum);
  if (kept && thread == (int(label) + row.shift) / N % kThreads)  // 6, by whoever stored that pack
    row.g_row[label] = from_float<T>(g * (__expf((z_label - max) - log_sum) - 1.f));
  if (thread != 0) return;
  g_lse[blockIdx.x] = max + log_sum;
  g_token_loss[blockIdx.x] =
      is_class(label, v, ignore_index, g_flags) ? log_sum + (max - z_label) : 0.f;
}

template <class T, int kThreads, int P>
void launch(const Tensor& logits, const Tensor& labels, int64_t ignore_index, const RowScale& scale,
            const Tensor& lse, const Tensor& token_loss) {
  const int64_t v = logits.size(1);
  const auto run = [&](auto kernel) {
    kernel<<<unsigned(labels.numel()), kThreads, 0, stream_of(logits)>>>(
        reinterpret_cast<T*>(logits.raw()), labels.data<int64_t>(), int(v), ignore_index,
        RowFactors(scale), ptr<float>(lse), ptr<float>(token_loss),
        gpu::device_flags(logits.device()));
    check_launch();
  };
  if (v % RowPacks<T>::N == 0 && reinterpret_cast<uintptr_t>(logits.raw()) % 16 == 0)
    run(softmax_gradient_kernel<T, kThreads, P, true>);
  else
    run(softmax_gradient_kernel<T, kThreads, P, false>);
}

template <class T, int N>
__global__ void __launch_bounds__(256)
    scaled_kernel(const T* g_x, const float* g_scale, T* g_out, int64_t n, bool accumulate) {
  const float scale = *g_scale;
  const int64_t step = int64_t(gridDim.x) * blockDim.x * N;
  for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N; i < n; i += step) {
    float x[N], out[N] = {};
    load_pack<T, N>(x, g_x + i);
    if (accumulate) load_pack<T, N>(out, g_out + i);
#pragma unroll
    for (int e = 0; e < N; ++e) out[e] = accumulate ? fmaf(scale, x[e], out[e]) : scale * x[e];
    store_pack<T, N>(g_out + i, out);
  }
}

template <class T>
__global__ void __launch_bounds__(256)
    add_at_kernel(T* g_x, const int64_t* g_index, const T* g_value, int64_t rows, int64_t v,
                  float factor, const float* g_count) {
  const float divisor = g_count ? *g_count : 1.f;
  if (divisor == 0.f) return;
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < rows;
       n += int64_t(gridDim.x) * blockDim.x) {
    T& to = g_x[n * v + g_index[n]];
    to = from_float<T>(to_float(to) + factor / divisor * to_float(g_value[n]));
  }
}

}  // namespace

void add_at(const Tensor& x, const Tensor& index, const Tensor& value, double factor,
            const Tensor& count) {
  const int64_t rows = x.size(0);
  if (rows == 0) return;
  visit_compute(x.dtype(), [&]<class Host>() {
    add_at_kernel<<<unsigned(std::min<int64_t>(ceil_div(rows, 256), 65536)), 256, 0,
                    stream_of(x)>>>(ptr<Host>(x), index.data<int64_t>(), ptr<Host>(value), rows,
                                    x.size(1), float(factor), ptr<float>(count));
    check_launch();
  });
}

void softmax_gradient(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                      const RowScale& scale, const Tensor& lse, const Tensor& token_loss) {
  const int64_t n = labels.numel(), v = logits.size(1);
  if (n == 0) return;
  visit_compute(logits.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    constexpr int N = RowPacks<T>::N;
    const int64_t packs = (v + N - 1 + N - 1) / N;  // at the worst alignment
    const auto run = [&](auto launcher) {
      launcher(logits, labels, ignore_index, scale, lse, token_loss);
    };
    if (packs <= 128 * 4) return run(launch<T, 128, 4>);
    if (packs <= 256 * 8) return run(launch<T, 256, 8>);
    if (packs <= 512 * 8) return run(launch<T, 512, 8>);
    if (packs <= 1024 * 8) return run(launch<T, 1024, 8>);
    const Tensor scratch = Tensor::empty({2, n}, DType::f32, logits.device());
    const RowStatistics rows{scratch.select(0, 0), scratch.select(0, 1), lse, token_loss};
    cross_entropy_fwd(logits, labels, ignore_index, rows);
    cross_entropy_bwd(logits, labels, ignore_index, rows, scale, logits);
  });
}

void scaled(const Tensor& x, const Tensor& scale, const Tensor& out, bool accumulate) {
  const int64_t n = x.numel();
  if (n == 0) return;
  visit_compute(x.dtype(), [&]<class Host>() {
    using T = device_t<Host>;
    constexpr int N = 16 / int(sizeof(T));
    const bool packs = n % N == 0 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(out.raw()) % 16 == 0;
    const auto run = [&](auto kernel, int64_t per_thread) {
      const int64_t blocks = std::min<int64_t>(ceil_div(n, 256 * per_thread),
                                               8 * int64_t(multiprocessors(x.device())));
      kernel<<<unsigned(blocks), 256, 0, stream_of(x)>>>(ptr<Host>(x), ptr<float>(scale),
                                                         ptr<Host>(out), n, accumulate);
      check_launch();
    };
    if (packs)
      run(scaled_kernel<T, N>, N);
    else
      run(scaled_kernel<T, 1>, 1);
  });
}

}  // namespace ebb::gpu
