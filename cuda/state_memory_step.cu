// One decoding step of state-memory attention (ops/state_memory_cache.h): bound by the memories,
// each of which is read once.
#include "cuda/common.cuh"
#include "ops/state_memory_cache.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
struct Step {
  const T *q, *e, *c, *gate, *base, *memories;  // [B,*,N], [B,*,P], [B,*,N], ..., [B,C,H,N,P]
  const int64_t* runs;                          // [B]
  T* o;                                         // [B,H,P]
  float scale, eps, eps_row;
  bool normalize;
  int heads, n, p, q_heads, e_heads, c_heads, gate_heads;
  int64_t batch, room;

  __device__ __forceinline__ int64_t vector_at(int64_t b, int head, int of, int width) const {
    return (b * of + head / (heads / of)) * width;
  }
};

// s_x[i] = x[i] over the root mean square, for the block. `scratch`: 32 floats.
template <class T>
__device__ __forceinline__ void load_unit(float* s_x, const T* x, int width, const Step<T>& p,
                                          float* scratch) {
  const int t = int(threadIdx.x);
  const float v = t < width ? to_float(x[t]) : 0.f;
  const float mean = block_sum(v * v, scratch) / float(width);
  if (t < width) s_x[t] = p.normalize ? v / sqrtf(mean + p.eps) : v;
}

// Item (sequence, head). Per memory: 1 a warp takes every 8th of its rows: their scale ρ, their dot
// with ê and what they add to the value. 2 The logit and the value, summed over the warps in order;
// the running softmax. At the end: 3 o = base + gate R.
template <class T>
__global__ void __launch_bounds__(kThreads) step_kernel(Step<T> p) {
  __shared__ float s_q[256], s_e[256], s_c[256], s_value[kWarps][256], s_logit[kWarps], s_sums[32];
  const int t = int(threadIdx.x), lane = t & 31, warp = t >> 5;
  for (int64_t item = blockIdx.x; item < p.batch * p.heads; item += gridDim.x) {
    const int64_t b = item / p.heads;
    const int head = int(item % p.heads);
    load_unit(s_q, p.q + p.vector_at(b, head, p.q_heads, p.n), p.n, p, s_sums);
    load_unit(s_e, p.e + p.vector_at(b, head, p.e_heads, p.p), p.p, p, s_sums);
    if (t < p.n) s_c[t] = to_float(p.c[p.vector_at(b, head, p.c_heads, p.n) + t]);
    __syncthreads();
    float largest = -INFINITY, total = 0.f, sum = 0.f;  // sum: column t of Σ w V
    for (int64_t m = 0; m < p.runs[b]; ++m) {
      const T* memory = p.memories + ((b * p.room + m) * p.heads + head) * p.n * p.p;
      float value[8] = {}, logit = 0.f;
      for (int row = warp; row < p.n; row += kWarps) {  // 1
        float square = 0.f, key = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int column = lane + 32 * j;
          if (column >= p.p) break;
          const float x = to_float(memory[int64_t(row) * p.p + column]);
          square += x * x;
          key += x * s_e[column];
          value[j] += s_c[row] * x;
        }
        square = warp_sum(square);
        key = warp_sum(key);
        logit +=
            s_q[row] * key * (p.normalize ? 1.f / sqrtf(square / float(p.p) + p.eps_row) : 1.f);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (lane + 32 * j < p.p) s_value[warp][lane + 32 * j] = value[j];
      if (lane == 0) s_logit[warp] = logit;
      __syncthreads();
      logit = 0.f;  // 2
      float v = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        logit += s_logit[w];
        if (t < p.p) v += s_value[w][t];
      }
      logit *= p.scale;
      // A NaN stays in `largest`, so that everything after it is NaN too.
      const float before = largest;
      largest = logit > before || isnan(logit) ? logit : before;
      const float keep = before == largest ? 1.f : expf(before - largest);
      const float weight = expf(logit - largest);
      total = total * keep + weight;
      sum = sum * keep + weight * v;
      __syncthreads();
    }
    if (t < p.p) {  // 3
      const int64_t at = item * p.p + t;
      const float gate = p.gate ? to_float(p.gate[p.vector_at(b, head, p.gate_heads, 1)]) : 1.f;
      const float r = p.runs[b] > 0 ? sum / total : 0.f;
      p.o[at] = from_float<T>((p.base ? to_float(p.base[at]) : 0.f) + gate * r);
    }
    __syncthreads();
  }
}

}  // namespace

void state_memory_attention_step(const StateMemoryStepProblem& in, const Tensor& o) {
  if (o.numel() == 0) return;
  visit_compute(o.dtype(), [&]<class Host>() {
    Step<device_t<Host>> p;
    p.q = ptr<Host>(in.q), p.e = ptr<Host>(in.e), p.c = ptr<Host>(in.c);
    p.gate = ptr<Host>(in.gate), p.base = ptr<Host>(in.base), p.memories = ptr<Host>(in.memories);
    p.runs = ptr<int64_t>(in.runs);
    p.o = ptr<Host>(o);
    p.scale = float(in.scale), p.eps = float(in.eps), p.eps_row = float(in.eps_row);
    p.normalize = in.normalize;
    p.heads = int(o.size(1)), p.n = int(in.memories.size(3)), p.p = int(o.size(2));
    p.q_heads = int(in.q.size(1)), p.e_heads = int(in.e.size(1)), p.c_heads = int(in.c.size(1));
    p.gate_heads = in.gate ? int(in.gate.size(1)) : p.heads;
    p.batch = o.size(0), p.room = in.memories.size(1);
    const int64_t blocks = std::min<int64_t>(p.batch * p.heads, (int64_t(1) << 31) - 1);
    step_kernel<device_t<Host>><<<unsigned(blocks), kThreads, 0, stream_of(o)>>>(p);
  });
  check_launch();
}

}  // namespace ebb::gpu
