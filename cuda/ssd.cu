// Δ and A Δ of SSD, forward and backward (ops/ssd.h). A thread owns V neighbouring heads, so that A
// and dt_bias stay in registers, and walks along a run of tokens.
#include "cuda/ordered_sum.cuh"
#include "cuda/ssd_gate.cuh"
#include "cuda/walk.cuh"
#include "tensor/device_flags.h"

namespace ebb::gpu {
namespace {

struct Input {
  StepSource steps;
  int64_t tokens, heads;
  int32_t* positive_decay;

  explicit Input(const SsdGateArgs& in)
      : steps(in),
        tokens(in.dt.count),
        heads(in.A.numel()),
        positive_decay(ebb::device_flags(in.A.device()) + int(DeviceFlag::positive_decay)) {}
};

template <int V>
struct Heads {
  float r_A[V], r_bias[V];

  __device__ Heads(const StepSource& in, int64_t c) {
#pragma unroll
    for (int v = 0; v < V; ++v) r_A[v] = in.rate(int(c) + v), r_bias[v] = in.offset(int(c) + v);
  }
};

// grid (head blocks × token groups), block (lanes, 256/lanes).
template <class T, int V>
__global__ void __launch_bounds__(256)
    fwd_kernel(const Input in, float* g_step, float* g_decay, int64_t head_blocks, int64_t run) {
  const WalkPosition at = walk_position<V>(head_blocks, run);
  if (at.c >= in.heads) return;
  const Heads<V> h(in.steps, at.c);
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (h.r_A[v] > 0.f) *in.positive_decay = 1;
  const int64_t f1 = min(at.f0 + run, in.tokens);
  for (int64_t f = at.f0; f < f1; ++f) {
    float r[V], r_decay[V], slope;
    load_pack(r, static_cast<const T*>(in.steps.dt) + f * in.steps.stride + at.c);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      r[v] = in.steps.step(r[v] + h.r_bias[v], slope);
      r_decay[v] = h.r_A[v] * r[v];
    }
    store_pack(g_step + f * in.heads + at.c, r);
    store_pack(g_decay + f * in.heads + at.c, r_decay);
  }
}

// 1 ddt. 2 sums over the run in f64. 3 block sums. g_partial: f64 [groups,2,H], Σ ddt then Σ Δ da;
// null: not wanted.
template <class T, int V>
__global__ void __launch_bounds__(256)
    bwd_kernel(const Input in, const float* g_dstep, const float* g_ddecay, T* g_ddt,
               double* g_partial, int64_t head_blocks, int64_t run) {
  extern __shared__ double s_sum[];  // [256·2·V]
  const WalkPosition at = walk_position<V>(head_blocks, run);
  double r_sum[2][V] = {};
  if (at.c < in.heads) {
    const Heads<V> h(in.steps, at.c);
    const int64_t f1 = min(at.f0 + run, in.tokens);
    for (int64_t f = at.f0; f < f1; ++f) {
      float r_dt[V], r_dstep[V], r_ddecay[V];
      load_pack(r_dt, static_cast<const T*>(in.steps.dt) + f * in.steps.stride + at.c);
      load_pack(r_dstep, g_dstep + f * in.heads + at.c);
      load_pack(r_ddecay, g_ddecay + f * in.heads + at.c);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float slope;
        const float step = in.steps.step(r_dt[v] + h.r_bias[v], slope);
        r_dt[v] = slope * (r_dstep[v] + h.r_A[v] * r_ddecay[v]);
        r_sum[0][v] += double(r_dt[v]);
        r_sum[1][v] += double(step * r_ddecay[v]);
      }
      if (g_ddt) store_pack(g_ddt + f * in.heads + at.c, r_dt);
    }
  }
  if (g_partial)
    block_partials(r_sum, s_sum, g_partial + at.group * 2 * in.heads, in.heads,
                   at.c - int64_t(threadIdx.x) * V);
}

struct PutHeads {
  float *g_dbias, *g_dA;
  const float* g_A;
  int64_t heads;
  bool log_A;
  __device__ void operator()(int64_t col, double sum) const {
    if (col < heads) {
      if (g_dbias) g_dbias[col] = float(sum);
    } else if (g_dA) {
      const float A = log_A ? -expf(g_A[col - heads]) : 1.f;
      g_dA[col - heads] = float(double(A) * sum);
    }
  }
};

// f<V>(): four heads per thread where rows allow.
template <class F>
void visit_width(const SsdGateArgs& in, F&& f) {
  if (rows_aligned(in.dt, 4))
    f.template operator()<4>();
  else
    f.template operator()<1>();
}

}  // namespace

void ssd_gate_fwd(const SsdGateArgs& in, const Tensor& step, const Tensor& decay) {
  if (step.numel() == 0) return;
  visit_compute(in.dt.t.dtype(), [&]<class T>() {
    visit_width(in, [&]<int V>() {
      const WalkShape shape = walk_shape(in.dt.count, in.dt.width / V, 4, 64, 98304);
      fwd_kernel<device_t<T>, V><<<unsigned(shape.blocks), shape.block(), 0, stream_of(step)>>>(
          Input(in), ptr<float>(step), ptr<float>(decay), shape.channel_blocks, shape.run);
      check_launch();
    });
  });
}

void ssd_gate_bwd(const SsdGateArgs& in, const Tensor& dstep, const Tensor& ddecay,
                  const SsdGateGrads& out) {
  const int64_t heads = in.A.numel();
  const bool sums = out.dA.defined() || out.dbias.defined();
  const cudaStream_t stream = stream_of(in.A);
  int64_t groups = 0;
  Tensor partial;  // f64 [groups,2,H]
  if (dstep.numel() > 0) {
    visit_compute(in.dt.t.dtype(), [&]<class T>() {
      visit_width(in, [&]<int V>() {
        const WalkShape shape = walk_shape(in.dt.count, heads / V, 8, 256, 65536);
        groups = shape.groups;
        if (sums) partial = Tensor::empty({groups, 2, heads}, DType::f64, in.A.device());
        const size_t shared = sums ? 256 * 2 * V * sizeof(double) : 0;
        bwd_kernel<device_t<T>, V><<<unsigned(shape.blocks), shape.block(), shared, stream>>>(
            Input(in), ptr<float>(dstep), ptr<float>(ddecay), ptr<T>(out.ddt), ptr<double>(partial),
            shape.channel_blocks, shape.run);
        check_launch();
      });
    });
  }
  if (!sums) return;
  ordered_sum(
      ptr<double>(partial), groups, 2 * heads, stream,
      PutHeads{ptr<float>(out.dbias), ptr<float>(out.dA), ptr<float>(in.A), heads, in.log_A});
}

}  // namespace ebb::gpu
