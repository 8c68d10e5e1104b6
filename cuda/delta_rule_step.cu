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
  int heads, value_heads, group, key_dim, value_dim;  // group: value heads that share q and k
  bool by_channel;
  int64_t first;   // of the grid's sequences
  int first_head;  // of the grid's value heads
};

// All loads go out before the first value is needed: another wait for memory is a tenth of the
// time.
struct FinishedFactors : RowFactors {
  template <class T, class Place>
  __device__ __forceinline__ FinishedFactors(const Step<T>& p, const Place& at, int r, float beta) {
    const int row = min(r, p.key_dim - 1);
    const int64_t key = (at.batch * p.heads + at.key_head(p)) * p.key_dim + row;
    const int64_t gate = at.head * p.key_dim + row;
    const float g = p.g[p.by_channel ? gate : at.head];
    const T g_k = p.k[key], g_q = p.q[key];
    const float by = p.erase ? p.erase[gate] : beta;
    positive = g > 0.f;
    if (r < p.key_dim) {
      k = to_float(g_k), q = to_float(g_q);
      alpha = expf(g);
      erase = by * k * alpha;
    }
  }
};

// Block (kLanes,8) of a value head and kLanes·V columns: group y holds rows y, y+8, ... of the
// state in registers, ROWS of them, a thread V columns.
template <class T, int ROWS, int V, bool FULL>
__global__ void __launch_bounds__(kStepThreads<ROWS>, kStepBlocks<ROWS>) step_kernel(Step<T> p) {
  wait_for_earlier_kernels();
  const StepPlace<ROWS, V> at(p);
  HeldState<ROWS, V, FULL> state(p, at);
  const int64_t value = at.head * p.value_dim + at.column;
  const bool inside = FULL || at.inside;
  Pack<T, V> r_v;
  float w[V] = {};
  if (inside) r_v = load_raw<T, V>(p.v + value);
  if (inside && p.write) load_pack(w, p.write + value);
  const float beta = p.beta ? p.beta[at.head] : 0.f;
  const FinishedFactors row(p, at, int(threadIdx.y + kGroups * threadIdx.x), beta);
  float v[V];
  unpack(v, r_v);
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] *= p.write ? w[e] : p.beta ? beta : 1.f;
  state.advance(p, at, row, v);
  if (row.positive) *p.positive_decay = 1;
}

template <class T, int V>
void launch(const Step<T>& p, int64_t batch, cudaStream_t stream) {
  visit_step<V>(p, batch, [&]<int ROWS, bool FULL>(const Step<T>& part, dim3 grid) {
    launch_dependent<step_kernel<T, ROWS, V, FULL>>(grid, dim3(kLanes<ROWS>, kGroups), 0, stream,
                                                    part);
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
