// One decoding step of the delta rule with a decay per channel (ops/delta_rule_channel.h): bound by
// the state, which is read and written once.
#include "cuda/common.cuh"
#include "ops/delta_rule_channel.h"

namespace ebb::gpu {
namespace {

constexpr int kColumns = 32, kGroups = 8;  // columns of V of a block; row groups sharing a column

template <class T>
struct Step {
  const T *q, *k, *v;          // [B,H,K], [B,HV,V]
  const float *g, *beta;       // [B,HV,K], [B,HV]
  const float *erase, *write;  // [B,HV,K], [B,HV,V]; null: beta
  float* state;                // [B,HV,K,V]
  T* o;                        // [B,HV,V]
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
// column x in registers, ROWS of them. 1 read S; e^g, q, k, b∘k∘e^g. 2 u = w∘v − Sᵀ(b∘k∘e^g).
// 3 S = Diag(e^g) S + k uᵀ, written; o = scale Sᵀq.
template <class T, int ROWS>
__global__ void __launch_bounds__(kColumns* kGroups) channel_step_kernel(Step<T> p) {
  __shared__ float s_alpha[256], s_erase[256], s_k[256], s_q[256], s_sum[kGroups][kColumns];
  const int64_t tiles = (p.value_dim + kColumns - 1) / kColumns;
  const int thread = int(threadIdx.y) * kColumns + int(threadIdx.x);
  for (int64_t item = blockIdx.x; item < p.batch * p.value_heads * tiles; item += gridDim.x) {
    const int64_t head = item / tiles;  // of all sequences
    const int64_t key =
        (head / p.value_heads * p.heads + head % p.value_heads / (p.value_heads / p.heads)) *
        p.key_dim;
    const int column = int(item % tiles) * kColumns + int(threadIdx.x);
    const bool inside = column < p.value_dim;
    float* state = p.state + head * p.key_dim * p.value_dim + column;
    float r_s[ROWS];  // 1
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int r = int(threadIdx.y) + kGroups * i;
      r_s[i] = inside && r < p.key_dim ? state[int64_t(r) * p.value_dim] : 0.f;
    }
    if (thread < p.key_dim) {
      const int64_t gate = head * p.key_dim + thread;
      const float k = to_float(p.k[key + thread]), alpha = expf(p.g[gate]);
      s_k[thread] = k;
      s_q[thread] = to_float(p.q[key + thread]);
      s_alpha[thread] = alpha;
      s_erase[thread] = (p.erase ? p.erase[gate] : p.beta[head]) * k * alpha;
    }
    __syncthreads();
    float read = 0;  // 2
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int r = int(threadIdx.y) + kGroups * i;
      if (r < p.key_dim) read += s_erase[r] * r_s[i];
    }
    read = column_sum(read, s_sum);
    const int64_t value = head * p.value_dim + column;
    float u = 0;
    if (inside) u = (p.write ? p.write[value] : p.beta[head]) * to_float(p.v[value]) - read;
    float out = 0;  // 3
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int r = int(threadIdx.y) + kGroups * i;
      if (r >= p.key_dim) continue;
      const float next = s_alpha[r] * r_s[i] + s_k[r] * u;
      if (inside) state[int64_t(r) * p.value_dim] = next;
      out += s_q[r] * next;
    }
    out = column_sum(out, s_sum);
    if (inside && threadIdx.y == 0) p.o[value] = from_float<T>(p.scale * out);
  }
}

template <class T>
void launch(const Step<T>& p, int64_t blocks, cudaStream_t stream) {
  const unsigned grid = unsigned(std::min<int64_t>(blocks, (int64_t(1) << 31) - 1));
  const dim3 block(kColumns, kGroups);
  if (p.key_dim <= 64)
    channel_step_kernel<T, 8><<<grid, block, 0, stream>>>(p);
  else if (p.key_dim <= 128)
    channel_step_kernel<T, 16><<<grid, block, 0, stream>>>(p);
  else
    channel_step_kernel<T, 32><<<grid, block, 0, stream>>>(p);
  check_launch();
}

}  // namespace

void channel_delta_rule_step(const DeltaRuleProblem& problem, const Tensor& state,
                             const Tensor& o) {
  if (o.numel() == 0) return;
  visit_compute(o.dtype(), [&]<class Host>() {
    Step<device_t<Host>> p{};
    p.q = ptr<Host>(problem.q), p.k = ptr<Host>(problem.k), p.v = ptr<Host>(problem.v);
    p.g = ptr<float>(problem.g), p.beta = ptr<float>(problem.beta);
    p.erase = ptr<float>(problem.erase), p.write = ptr<float>(problem.write);
    p.state = ptr<float>(state), p.o = ptr<Host>(o);
    p.scale = float(problem.scale);
    p.heads = int(problem.heads()), p.value_heads = int(problem.value_heads());
    p.key_dim = int(problem.key_dim()), p.value_dim = int(problem.value_dim());
    p.batch = problem.batch();
    launch(p, p.batch * p.value_heads * ceil_div(p.value_dim, kColumns), stream_of(o));
  });
}

}  // namespace ebb::gpu
