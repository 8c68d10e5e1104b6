// One decoding step of the delta rule, with a decay per head (ops/delta_rule.h) or per channel
// (ops/delta_rule_channel.h): bound by the state, which is read and written once.
#include "cuda/delta_rule_step.cuh"

namespace ebb::gpu {
namespace {

using namespace delta;

template <class T>
struct Step {
  const T *q, *k, *v;          // [B,H,K], [B,HV,V]
  const float *g, *beta;       // [B,HV] or [B,HV,K]; [B,HV]
  const float *erase, *write;  // [B,HV,K], [B,HV,V]; null: beta; all three: 0 and 1
  float* state;                // [B,HV,K,V]
  T* o;                        // [B,HV,V]
  int32_t* positive_decay;     // device flag
  float scale;
  int heads, value_heads, key_dim, value_dim;
  bool by_channel;
  int64_t first;  // sequence of the grid's first head
};

// What a row of the state needs; lane i holds it for row y+8i of its warp.
struct RowFactors {
  float alpha = 0, erase = 0, k = 0, q = 0;  // e^g; b∘k∘e^g

  template <class T>
  __device__ __forceinline__ RowFactors(const Step<T>& p, const StepPlace& at, int r, float beta) {
    if (r >= p.key_dim) return;
    const int64_t key = (at.batch * p.heads + at.hv / (p.value_heads / p.heads)) * p.key_dim;
    const int64_t gate = at.head * p.key_dim + r;
    const float g = p.g[p.by_channel ? gate : at.head];
    k = to_float(p.k[key + r]), q = to_float(p.q[key + r]);
    if (g > 0.f) *p.positive_decay = 1;
    alpha = expf(g);
    erase = (p.erase ? p.erase[gate] : beta) * k * alpha;
  }
};

// Block (32,8) of a value head and 32·V columns: warp y holds rows y, y+8, ... of the state in
// registers, ROWS of them, a lane V columns. 1 read S. 2 u = w∘v − Sᵀ(b∘k∘α). 3 S = α∘S + k uᵀ,
// written; o = scale Sᵀq.
template <class T, int ROWS, int V>
__global__ void __launch_bounds__(kLanes* kGroups, kStepBlocks<ROWS>) step_kernel(Step<T> p) {
  __shared__ __align__(16) float s_read[kGroups][kLanes][V], s_out[kGroups][kLanes][V];
  wait_for_earlier_kernels();
  const StepPlace at(p);
  const int first = int(threadIdx.y);
  for (unsigned tile = blockIdx.y; tile * (kLanes * V) < unsigned(p.value_dim); tile += gridDim.y) {
    const int column = int(tile * (kLanes * V) + V * threadIdx.x);
    const bool inside = column < p.value_dim;
    float* state = p.state + (at.head * p.key_dim + first) * p.value_dim + column;
    const int64_t step = int64_t(kGroups) * p.value_dim;
    Pack<float, V> r_s[ROWS];  // 1
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      r_s[i] = {};
      if (inside && first + kGroups * i < p.key_dim) r_s[i] = load_raw<float, V>(state + step * i);
    }
    const float beta = p.beta ? p.beta[at.head] : 0.f;
    const RowFactors row(p, at, first + kGroups * int(threadIdx.x), beta);
    const int64_t value = at.head * p.value_dim + column;
    float v[V] = {};  // w∘v
    if (inside) {
      load_pack(v, p.v + value);
      float w[V];
      if (p.write) load_pack(w, p.write + value);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] *= p.write ? w[e] : p.beta ? beta : 1.f;
    }
    float u[V] = {};  // 2
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float erase = of_row(row.erase, i);
#pragma unroll
      for (int e = 0; e < V; ++e) u[e] += erase * r_s[i].v[e];
    }
    sum_columns<V>(u, s_read);
#pragma unroll
    for (int e = 0; e < V; ++e) u[e] = v[e] - u[e];
    float out[V] = {};  // 3
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float alpha = of_row(row.alpha, i), k = of_row(row.k, i), q = of_row(row.q, i);
      float next[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        next[e] = alpha * r_s[i].v[e] + k * u[e];
        out[e] += q * next[e];
      }
      if (inside && first + kGroups * i < p.key_dim) store_pack(state + step * i, next);
    }
    sum_columns<V>(out, s_out);
#pragma unroll
    for (int e = 0; e < V; ++e) out[e] *= p.scale;
    if (inside && first == 0) store_pack(p.o + value, out);
  }
}

template <class T, int V>
void launch(const Step<T>& p, int64_t batch, cudaStream_t stream) {
  visit_step<V>(p, batch, [&]<int ROWS>(const Step<T>& part, dim3 grid) {
    launch_dependent<step_kernel<T, ROWS, V>>(grid, dim3(kLanes, kGroups), 0, stream, part);
  });
}

// Whether every input is finished and dense.
bool is_finished(const DeltaRuleStep& p) {
  if (p.normalize || p.sigmoid || p.A_log) return false;
  for (const Rows* r : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.erase, &p.write})
    if (r->t && r->count > 1 && r->stride != r->width) return false;
  return true;
}

template <class T>
Step<device_t<T>> make_step(const DeltaRuleStep& from, const Tensor& state, const Tensor& o) {
  Step<device_t<T>> p{};
  p.q = ptr<T>(from.q.t), p.k = ptr<T>(from.k.t), p.v = ptr<T>(from.v.t), p.o = ptr<T>(o);
  p.g = ptr<float>(from.g.t), p.beta = ptr<float>(from.beta.t);
  p.erase = ptr<float>(from.erase.t), p.write = ptr<float>(from.write.t);
  set_sizes(p, from, state, o);
  return p;
}

}  // namespace

void delta_rule_step(const DeltaRuleStep& from, const Tensor& state, const Tensor& o) {
  if (o.numel() == 0) return;
  if (!is_finished(from)) return logit_step(from, state, o);
  visit_compute(o.dtype(), [&]<class T>() {
    const Step<device_t<T>> p = make_step<T>(from, state, o);
    // Four columns a thread where rows of V and their addresses allow.
    if (delta::in_quads<T>(p) && delta::aligned(p.write, 16))
      launch<device_t<T>, 4>(p, state.size(0), stream_of(o));
    else
      launch<device_t<T>, 1>(p, state.size(0), stream_of(o));
  });
}

}  // namespace ebb::gpu
