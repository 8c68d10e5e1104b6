// One decoding step of the delta rule from the logits of its gates, from q and k before their
// normalisation, and from rows that may lie apart (ops/delta_rule.h, ops/delta_rule_channel.h): as
// delta_rule_step.cu, with lengths and gates worked out on the way.
#include "cuda/delta_fast.cuh"
#include "cuda/delta_rule_step.cuh"

namespace ebb::gpu::delta {
namespace {

template <class T>
struct LogitStep {
  const T *q, *k, *v;  // [B,H,K], [B,HV,V]; rows of a sequence `_step` elements apart
  int64_t q_step, k_step, v_step;
  Logits g, beta;                // [B,HV] or [B,HV,K]; [B,HV]
  Logits erase, write;           // [B,HV,K], [B,HV,V]; null: beta; all three: 0 and 1
  float* state;                  // [B,HV,K,V]
  T* o;                          // [B,HV,V]
  int32_t* positive_decay;       // device flag
  const float *A_log, *dt_bias;  // of raw g; [HV]; [HV] or [HV,K], null: 0
  float scale, beta_scale, lower_bound;
  int heads, value_heads, group, key_dim, value_dim;  // group: value heads that share q and k
  bool by_channel, normalize, sigmoid;
  int64_t first;   // of the grid's sequences
  int first_head;  // of the grid's value heads

  // Of channel r of a value head.
  __device__ __forceinline__ float log_decay_of(int64_t b, int hv, int r) const {
    const int at = by_channel ? hv * key_dim + r : hv;
    const float x = g.at(b, at);
    if (!A_log) return x;
    const float y = x + (dt_bias ? dt_bias[at] : 0.f), rate = expf(A_log[hv]);
    return lower_bound < 0.f ? log_decay<true>(y, rate, lower_bound)
                             : log_decay<false>(y, rate, 0.f);
  }
  __device__ __forceinline__ float strength(float x, float by) const {
    return sigmoid ? by * exact_sigmoid(x) : x;
  }
};

// The reciprocal length of a row of n values (ops/l2_norm.h), by a warp.
template <class T>
__device__ __forceinline__ float reciprocal_length(const T* g_x, int n) {
  float sum = 0;
  for (int i = int(threadIdx.y * blockDim.x + threadIdx.x) % 32; i < n; i += 32) {
    const float x = to_float(g_x[i]);
    sum += x * x;
  }
  sum = warp_sum(sum);
  return sum > 3.4e38f ? __int_as_float(0x7fffffff) : rsqrtf(sum + 1e-6f);  // never silently zero
}

struct LogitFactors : RowFactors {
  template <class T, class Place>
  __device__ __forceinline__ LogitFactors(const LogitStep<T>& p, const Place& at, int r,
                                          float beta) {
    const int64_t b = at.batch;
    const int hv = at.hv, key = at.key_head(p) * p.key_dim;
    const T *g_k = p.k + b * p.k_step + key, *g_q = p.q + b * p.q_step + key;
    float key_length = 1, query_length = 1;
    if (p.normalize) {
      key_length = reciprocal_length(g_k, p.key_dim);
      query_length = reciprocal_length(g_q, p.key_dim);
    }
    if (r >= p.key_dim) return;
    const float g = p.log_decay_of(b, hv, r);
    k = to_float(g_k[r]) * key_length, q = to_float(g_q[r]) * query_length;
    positive = g > 0.f;
    alpha = expf(g);
    const float by = p.erase.g ? p.strength(p.erase.at(b, hv * p.key_dim + r), p.beta_scale) : beta;
    erase = by * k * alpha;
  }
};

// Block (kLanes,8) of a value head and kLanes·V columns: group y holds rows y, y+8, ... of the
// state in registers, ROWS of them, a thread V columns.
template <class T, int ROWS, int V, bool FULL>
__global__ void __launch_bounds__(kStepThreads<ROWS>, kStepBlocks<ROWS>)
    logit_step_kernel(LogitStep<T> p) {
  wait_for_earlier_kernels();
  const StepPlace<ROWS, V> at(p);
  HeldState<ROWS, V, FULL> state(p, at);
  const int value = at.hv * p.value_dim + at.column;
  const bool inside = FULL || at.inside;
  Pack<T, V> r_v;
  if (inside) r_v = load_raw<T, V>(p.v + at.batch * p.v_step + value);
  const float beta = p.beta.g ? p.strength(p.beta.at(at.batch, at.hv), p.beta_scale) : 0.f;
  const LogitFactors row(p, at, int(threadIdx.y + kGroups * threadIdx.x), beta);
  float v[V];
  unpack(v, r_v);
#pragma unroll
  for (int e = 0; e < V; ++e)
    v[e] *= !p.write.g ? (p.beta.g ? beta : 1.f)
            : inside   ? p.strength(p.write.at(at.batch, value + e), 1.f)
                       : 0.f;
  state.advance(p, at, row, v);
  if (row.positive) *p.positive_decay = 1;
}

template <class T, int V>
void launch(const LogitStep<T>& p, int64_t batch, cudaStream_t stream) {
  visit_step<V>(p, batch, [&]<int ROWS, bool FULL>(const LogitStep<T>& part, dim3 grid) {
    launch_dependent<logit_step_kernel<T, ROWS, V, FULL>>(grid, dim3(kLanes<ROWS>, kGroups), 0,
                                                          stream, part);
  });
}

template <class T>
LogitStep<device_t<T>> make_step(const DeltaRuleStep& from, const Tensor& state, const Tensor& o) {
  const auto logits = [](const Rows& r) {
    return r.t ? Logits{r.t.raw(), r.stride, r.t.dtype() == DType::bf16} : Logits{};
  };
  LogitStep<device_t<T>> p{};
  p.q = ptr<T>(from.q.t), p.k = ptr<T>(from.k.t), p.v = ptr<T>(from.v.t), p.o = ptr<T>(o);
  p.q_step = from.q.stride, p.k_step = from.k.stride, p.v_step = from.v.stride;
  p.g = logits(from.g), p.beta = logits(from.beta);
  p.erase = logits(from.erase), p.write = logits(from.write);
  p.A_log = ptr<float>(from.A_log), p.dt_bias = ptr<float>(from.dt_bias);
  p.beta_scale = float(from.beta_scale);
  p.lower_bound = float(from.lower_bound);
  p.normalize = from.normalize, p.sigmoid = from.sigmoid;
  set_sizes(p, from, state, o);
  return p;
}

}  // namespace

void logit_step(const DeltaRuleStep& from, const Tensor& state, const Tensor& o) {
  visit_compute(o.dtype(), [&]<class T>() {
    const LogitStep<device_t<T>> p = make_step<T>(from, state, o);
    if (in_quads<T>(p) && p.v_step % 4 == 0)
      launch<device_t<T>, 4>(p, state.size(0), stream_of(o));
    else
      launch<device_t<T>, 1>(p, state.size(0), stream_of(o));
  });
}

}  // namespace ebb::gpu::delta
