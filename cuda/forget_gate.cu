// Log decays of a sigmoid forget gate, forward and backward (ops/forget_gate.h). A thread owns V
// neighbouring channels, so that bias and lower bound stay in registers, and walks along a run of
// tokens.
#include "cuda/activation.cuh"
#include "cuda/ordered_sum.cuh"
#include "cuda/walk.cuh"
#include "ops/forget_gate.h"

namespace ebb::gpu {
namespace {

template <class T>
struct Input {
  const T* g_z;
  int64_t stride;
  const float *g_bias, *g_lower;  // [C] or null
  int64_t tokens, channels;
  float factor;  // 1 / divisor
};

template <class T>
Input<device_t<T>> input_of(const ForgetGateArgs& in) {
  return {ptr<T>(in.z.t), in.z.stride, ptr<float>(in.bias),  ptr<float>(in.lower),
          in.z.count,     in.z.width,  float(1 / in.divisor)};
}

__device__ __forceinline__ float log_forget(float y, float lower) {
  if (lower == 0.f) return y > 0.f ? -log1pf(expf(-y)) : y - log1pf(expf(y));
  const float rest = (1.f - lower) * exact_sigmoid(-y);  // 1 − f
  return rest < 0.5f ? log1pf(-rest) : logf(lower + (1.f - lower) * exact_sigmoid(y));
}
// d log f / dy; `bound` receives that by the lower bound.
__device__ __forceinline__ float slope(float y, float lower, float& bound) {
  const float down = exact_sigmoid(-y), up = exact_sigmoid(y);
  if (lower == 0.f) {
    bound = down / up;
    return down;
  }
  const float f = lower + (1.f - lower) * up;
  bound = down / f;
  return (1.f - lower) * down * up / f;
}

// grid (channel blocks × token groups), block (lanes, 256/lanes).
template <class T, int V>
__global__ void __launch_bounds__(256)
    fwd_kernel(const Input<T> in, float* g_g, int64_t channel_blocks, int64_t run) {
  const WalkPosition at = walk_position<V>(channel_blocks, run);
  if (at.c >= in.channels) return;
  float bias[V] = {}, lower[V] = {};
  if (in.g_bias) load_pack(bias, in.g_bias + at.c);
  if (in.g_lower) load_pack(lower, in.g_lower + at.c);
  const int64_t f1 = min(at.f0 + run, in.tokens);
#pragma unroll 4
  for (int64_t f = at.f0; f < f1; ++f) {
    float z[V];
    load_pack(z, in.g_z + f * in.stride + at.c);
#pragma unroll
    for (int v = 0; v < V; ++v) z[v] = in.factor * log_forget(z[v] + bias[v], lower[v]);
    store_pack(g_g + f * in.channels + at.c, z);
  }
}

// 1 dz.  2 sums over the run in f64.  3 block sums. g_partial: f64 [groups,2,C], Σ dz then Σ of
// dl's summands; null: not wanted.
template <class T, int V>
__global__ void __launch_bounds__(256)
    bwd_kernel(const Input<T> in, const float* g_dg, T* g_dz, double* g_partial,
               int64_t channel_blocks, int64_t run) {
  extern __shared__ double s_sum[];  // [256·2·V]
  const WalkPosition at = walk_position<V>(channel_blocks, run);
  double sum[2][V] = {};
  if (at.c < in.channels) {
    float bias[V] = {}, lower[V] = {};
    if (in.g_bias) load_pack(bias, in.g_bias + at.c);
    if (in.g_lower) load_pack(lower, in.g_lower + at.c);
    const int64_t f1 = min(at.f0 + run, in.tokens);
#pragma unroll 2
    for (int64_t f = at.f0; f < f1; ++f) {
      float z[V], d[V];
      load_pack(z, in.g_z + f * in.stride + at.c);
      load_pack(d, g_dg + f * in.channels + at.c);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float bound;
        z[v] = in.factor * d[v] * slope(z[v] + bias[v], lower[v], bound);
        sum[0][v] += double(z[v]);
        if (in.g_lower) sum[1][v] += double(in.factor * d[v] * bound);
      }
      if (g_dz) store_pack(g_dz + f * in.channels + at.c, z);
    }
  }
  if (g_partial)
    block_partials(sum, s_sum, g_partial + at.group * 2 * in.channels, in.channels,
                   at.c - int64_t(threadIdx.x) * V);
}

struct Put {
  float *g_dbias, *g_dlower;
  int64_t channels;
  __device__ void operator()(int64_t col, double sum) const {
    if (col < channels) {
      if (g_dbias) g_dbias[col] = float(sum);
    } else if (g_dlower) {
      g_dlower[col - channels] = float(sum);
    }
  }
};

bool aligned(const ForgetGateArgs& in, const Tensor& dense) {
  const auto at16 = [](const Tensor& t) {
    return !t.defined() || reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
  };
  return rows_aligned(in.z, 4) && rows_aligned({dense, in.z.count, in.z.width, in.z.width}, 4) &&
         at16(in.bias) && at16(in.lower);
}

template <class F>
void visit_width(bool wide, F&& f) {
  wide ? f.template operator()<4>() : f.template operator()<1>();
}

}  // namespace

void forget_gate_fwd(const ForgetGateArgs& in, const Tensor& g) {
  if (g.numel() == 0) return;
  visit_compute(in.z.t.dtype(), [&]<class T>() {
    visit_width(aligned(in, g), [&]<int V>() {
      const WalkShape shape = walk_shape(in.z.count, in.z.width / V, 4, 64, 98304);
      fwd_kernel<device_t<T>, V><<<unsigned(shape.blocks), shape.block(), 0, stream_of(g)>>>(
          input_of<T>(in), ptr<float>(g), shape.channel_blocks, shape.run);
      check_launch();
    });
  });
}

void forget_gate_bwd(const ForgetGateArgs& in, const Tensor& dg, const ForgetGateGrads& out) {
  const int64_t channels = in.z.width;
  const bool sums = out.dbias.defined() || out.dlower.defined();
  const cudaStream_t stream = stream_of(dg);
  const bool wide = aligned(in, dg) && (!out.dz || aligned(in, out.dz));
  int64_t groups = 0;
  Tensor partial;  // f64 [groups,2,C]
  if (dg.numel() > 0) {
    visit_compute(in.z.t.dtype(), [&]<class T>() {
      visit_width(wide, [&]<int V>() {
        const WalkShape shape = walk_shape(in.z.count, channels / V, 16, 256, 65536);
        groups = shape.groups;
        if (sums) partial = Tensor::empty({groups, 2, channels}, DType::f64, dg.device());
        const size_t shared = sums ? 256 * 2 * V * sizeof(double) : 0;
        bwd_kernel<device_t<T>, V><<<unsigned(shape.blocks), shape.block(), shared, stream>>>(
            input_of<T>(in), ptr<float>(dg), ptr<T>(out.dz), ptr<double>(partial),
            shape.channel_blocks, shape.run);
        check_launch();
      });
    });
  }
  if (sums)
    ordered_sum(ptr<double>(partial), groups, 2 * channels, stream,
                Put{ptr<float>(out.dbias), ptr<float>(out.dlower), channels});
}

}  // namespace ebb::gpu
