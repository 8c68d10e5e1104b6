// Token cross-entropy (ops/cross_entropy.h). One block per row of logits: forward reads the row
// once (running max and sum per thread, merged over the block), backward reads and writes it once.
#include <algorithm>

#include "cuda/softmax_rows.cuh"

namespace ebb::gpu {
namespace {

constexpr int kAhead = 4;  // packs a thread has in flight

// grid (N).  1 running max and sum per thread.  2 merge.  3 thread 0 writes the row's numbers.
template <class T>
__global__ void __launch_bounds__(512)
    fwd_kernel(const T* g_logits /*[N,V]*/, const int64_t* g_label /*[N]*/, int64_t v,
               int64_t ignore_index, float* g_max, float* g_log_sum, float* g_lse,
               float* g_token_loss, int32_t* g_flags) {
  __shared__ float scratch[64];
  const int64_t row = blockIdx.x;
  const RowPacks<T> packs(g_logits + row * v, v);
  constexpr int N = RowPacks<T>::N;
  MaxSum r;
  for (int64_t q0 = threadIdx.x; q0 < packs.packs; q0 += kAhead * blockDim.x) {  // 1
    float z[kAhead][N];
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (q0 + u * blockDim.x < packs.packs) packs.load(q0 + u * blockDim.x, z[u]);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (q0 + u * blockDim.x >= packs.packs) break;
      float top = r.max;
#pragma unroll
      for (int i = 0; i < N; ++i) top = fmaxf(top, z[u][i]);
      r.sum *= rescale(r.max, top);
      r.max = top;
      const float shift = shift_of(top);
#pragma unroll
      for (int i = 0; i < N; ++i) r.sum += __expf(z[u][i] - shift);
    }
  }
  r = block_max_sum(r, scratch);  // 2
  if (threadIdx.x != 0) return;   // 3
  const float max = shift_of(r.max), log_sum = logf(r.sum);
  const int64_t label = g_label[row];
  g_max[row] = max;
  g_log_sum[row] = log_sum;
  g_lse[row] = max + log_sum;
  g_token_loss[row] = is_class(label, v, ignore_index, g_flags)
                          ? log_sum + (max - to_float(g_logits[row * v + label]))
                          : 0.f;
}

// grid (N). dz = g·(exp(z − m − s) − [label]); in place when g_dlogits is g_logits.
template <class T>
__global__ void __launch_bounds__(512)
    bwd_kernel(const T* g_logits /*[N,V]*/, const int64_t* g_label /*[N]*/, int64_t v,
               int64_t ignore_index, const float* g_max, const float* g_log_sum, RowFactors factors,
               T* g_dlogits /*[N,V]*/) {
  const int64_t row = blockIdx.x, label = g_label[row];
  const RowPacks<T> packs(g_logits + row * v, v);
  constexpr int N = RowPacks<T>::N;
  const bool kept = label >= 0 && label < v && label != ignore_index;
  const float g = kept ? factors.of(row) : 0.f, max = g_max[row], log_sum = g_log_sum[row];
  const int64_t label_pack = kept ? packs.pack_of(label) : -1;
  T* to = g_dlogits + row * v;
  for (int64_t q0 = threadIdx.x; q0 < packs.packs; q0 += kAhead * blockDim.x) {
    float z[kAhead][N];
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (q0 + u * blockDim.x < packs.packs) packs.load(q0 + u * blockDim.x, z[u]);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t q = q0 + u * blockDim.x;
      if (q >= packs.packs) break;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float p = __expf((z[u][i] - max) - log_sum);
        if (q == label_pack && packs.first(q) + i == label) p -= 1.f;
        z[u][i] = kept ? g * p : 0.f;
      }
      packs.store(to, q, z[u]);
    }
  }
}

__global__ void count_kernel(const int64_t* g_label, int64_t n, int64_t ignore_index,
                             unsigned long long* g_count) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int kept = __syncthreads_count(i < n && g_label[i] != ignore_index);
  if (threadIdx.x == 0 && kept) atomicAdd(g_count, static_cast<unsigned long long>(kept));
}

__device__ double block_sum_f64(double v, double* scratch /*[32]*/) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  v = lane < warps ? scratch[lane] : 0;
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

constexpr int64_t kRowsPerPart = 4096;

// grid (parts): weighted sum of 4096 rows each.
__global__ void part_kernel(const float* g_token_loss, const float* g_weights, int64_t n,
                            double* g_part) {
  __shared__ double scratch[32];
  const int64_t begin = blockIdx.x * kRowsPerPart, end = min(n, begin + kRowsPerPart);
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
    sum += double(g_token_loss[i]) * (g_weights ? double(g_weights[i]) : 1.0);
  sum = block_sum_f64(sum, scratch);
  if (threadIdx.x == 0) g_part[blockIdx.x] = sum;
}

// One block: the parts, divided by the count.
__global__ void total_kernel(const double* g_part, int64_t parts, const float* g_count,
                             float* g_loss) {
  __shared__ double scratch[32];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < parts; i += blockDim.x) sum += g_part[i];
  sum = block_sum_f64(sum, scratch);
  if (threadIdx.x != 0) return;
  const double count = g_count ? double(*g_count) : 1.0;
  *g_loss = count == 0 ? 0.f : float(sum / count);
}

// About four packs per thread, from one warp to sixteen.
template <class T>
unsigned threads_for(int64_t v) {
  const int64_t packs = ceil_div(v, RowPacks<T>::N);
  return unsigned(std::clamp<int64_t>(ceil_div(packs, 32 * kAhead) * 32, 32, 512));
}

}  // namespace

void cross_entropy_fwd(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                       const RowStatistics& rows) {
  const int64_t n = labels.numel(), v = logits.size(1);
  if (n == 0) return;
  visit_compute(logits.dtype(), [&]<class T>() {
    fwd_kernel<<<unsigned(n), threads_for<device_t<T>>(v), 0, stream_of(logits)>>>(
        ptr<T>(logits), labels.data<int64_t>(), v, ignore_index, ptr<float>(rows.max),
        ptr<float>(rows.log_sum), ptr<float>(rows.lse), ptr<float>(rows.token_loss),
        gpu::device_flags(logits.device()));
    check_launch();
  });
}

void cross_entropy_bwd(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                       const RowStatistics& rows, const RowScale& scale, const Tensor& dlogits) {
  const int64_t n = labels.numel(), v = logits.size(1);
  if (n == 0) return;
  visit_compute(logits.dtype(), [&]<class T>() {
    bwd_kernel<<<unsigned(n), threads_for<device_t<T>>(v), 0, stream_of(logits)>>>(
        ptr<T>(logits), labels.data<int64_t>(), v, ignore_index, ptr<float>(rows.max),
        ptr<float>(rows.log_sum), RowFactors(scale), ptr<T>(dlogits));
    check_launch();
  });
}

void count_labels(const Tensor& labels, int64_t ignore_index, const Tensor& count) {
  const int64_t n = labels.numel();
  gpu::zero_bytes(count.raw(), count.device(), sizeof(int64_t));
  if (n == 0) return;
  count_kernel<<<unsigned(ceil_div(n, 1024)), 1024, 0, stream_of(labels)>>>(
      labels.data<int64_t>(), n, ignore_index,
      reinterpret_cast<unsigned long long*>(count.data<int64_t>()));
  check_launch();
}

void total_loss(const Tensor& token_loss, const RowScale& scale, const Tensor& loss) {
  const int64_t n = token_loss.numel(), parts = ceil_div(n, kRowsPerPart);
  const Tensor part = Tensor::empty({parts}, DType::f64, loss.device());
  const cudaStream_t stream = stream_of(loss);
  if (parts > 0) {
    part_kernel<<<unsigned(parts), 512, 0, stream>>>(
        ptr<float>(token_loss), ptr<float>(scale.weights), n, part.data<double>());
    check_launch();
  }
  total_kernel<<<1, 512, 0, stream>>>(parts ? part.data<double>() : nullptr, parts,
                                      ptr<float>(scale.count), ptr<float>(loss));
  check_launch();
}

}  // namespace ebb::gpu
