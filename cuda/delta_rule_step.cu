// One decoding step of the gated delta rule (ops/delta_rule.h): bound by the state, which is read
// and written once.
#include "cuda/common.cuh"
#include "ops/delta_rule.h"

namespace ebb::gpu {
namespace {

constexpr int kColumns = 32, kGroups = 8;  // columns of V of a block; row groups sharing a column

template <class T>
struct Step {
  const T *q, *k, *v;     // [B,H,K], [B,HV,V]
  const float *g, *beta;  // [B,HV]
  float* state;           // [B,HV,K,V]
  T* o;                   // [B,HV,V]
  float scale;
  int heads, value_heads, key_dim, value_dim;
  int64_t batch;
};

// Sum over the kGroups threads of a column, in order; the same value in each.
__device__ __forceinline__ float column_sum(float v, float (*s)[kColumns]) {
  s[threadIdx.y][threadIdx.x] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int y = 0; y < kGroups; ++y) sum += s[y][threadIdx.x];
  __syncthreads();
  return sum;
}

// grid (batch, value head, 32 columns of V), block (32,8): thread (x,y) holds rows y, y+8, ... of
// column x in registers, ROWS of them. 1 read S. 2 u = β (v − e^g Sᵀk). 3 S = e^g S + k uᵀ,
// written; o = scale Sᵀq.
template <class T, int ROWS>
__global__ void __launch_bounds__(kColumns* kGroups) step_kernel(Step<T> p) {
  __shared__ float s_k[256], s_q[256], s_sum[kGroups][kColumns];
  const int64_t tiles = (p.value_dim + kColumns - 1) / kColumns;
  const int thread = int(threadIdx.y) * kColumns + int(threadIdx.x);
  for (int64_t item = blockIdx.x; item < p.batch * p.value_heads * tiles; item += gridDim.x) {
    const int64_t head = item / tiles;  // of all sequences
    const int64_t key =
        (head / p.value_heads * p.heads + head % p.value_heads / (p.value_heads / p.heads)) *
        p.key_dim;
    const int column = int(item % tiles) * kColumns + int(threadIdx.x);
    const bool inside = column < p.value_dim;
    if (thread < p.key_dim) {
      s_k[thread] = to_float(p.k[key + thread]);
      s_q[thread] = to_float(p.q[key + thread]);
    }
    __syncthreads();
    float* state = p.state + head * p.key_dim * p.value_dim + column;
    float r_s[ROWS], read = 0;  // 1
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int r = int(threadIdx.y) + kGroups * i;
      r_s[i] = inside && r < p.key_dim ? state[int64_t(r) * p.value_dim] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int r = int(threadIdx.y) + kGroups * i;
      if (r < p.key_dim) read += s_k[r] * r_s[i];
    }
    read = column_sum(read, s_sum);
    const float alpha = expf(p.g[head]);  // 2
    const float v = inside ? to_float(p.v[head * p.value_dim + column]) : 0.f;
    const float u = p.beta[head] * (v - alpha * read);
    float out = 0;  // 3
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int r = int(threadIdx.y) + kGroups * i;
      if (r >= p.key_dim) continue;
      const float next = alpha * r_s[i] + s_k[r] * u;
      if (inside) state[int64_t(r) * p.value_dim] = next;
      out += s_q[r] * next;
    }
    out = column_sum(out, s_sum);
    if (inside && threadIdx.y == 0) p.o[head * p.value_dim + column] = from_float<T>(p.scale * out);
  }
}

template <class T>
void launch(const Step<T>& p, int64_t blocks, cudaStream_t stream) {
  const unsigned grid = unsigned(std::min<int64_t>(blocks, (int64_t(1) << 31) - 1));
  const dim3 block(kColumns, kGroups);
  if (p.key_dim <= 64)
    step_kernel<T, 8><<<grid, block, 0, stream>>>(p);
  else if (p.key_dim <= 128)
    step_kernel<T, 16><<<grid, block, 0, stream>>>(p);
  else
    step_kernel<T, 32><<<grid, block, 0, stream>>>(p);
  check_launch();
}

}  // namespace

void gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                           const Tensor& beta, const Tensor& state, double scale, const Tensor& o) {
  if (o.numel() == 0) return;
  visit_compute(v.dtype(), [&]<class Host>() {
    Step<device_t<Host>> p{};
    p.q = ptr<Host>(q), p.k = ptr<Host>(k), p.v = ptr<Host>(v), p.o = ptr<Host>(o);
    p.g = ptr<float>(g), p.beta = ptr<float>(beta), p.state = ptr<float>(state);
    p.scale = float(scale);
    p.heads = int(q.size(1)), p.value_heads = int(v.size(1));
    p.key_dim = int(q.size(2)), p.value_dim = int(v.size(2));
    p.batch = v.size(0);
    launch(p, p.batch * p.value_heads * ceil_div(p.value_dim, kColumns), stream_of(o));
  });
}

}  // namespace ebb::gpu
