// Log decays, forward and backward (ops/decay_gate.h). A thread owns V neighbouring channels, so
// that exp(A_log) and dt_bias stay in registers, and walks along a run of tokens, U at a time.
#include "cuda/decay_formula.cuh"
#include "cuda/ordered_sum.cuh"
#include "cuda/walk.cuh"
#include "ops/decay_gate.h"

namespace ebb::gpu {
namespace {

constexpr int kTile = 4;

template <class T>
struct Input {
  const T* g_a;
  int64_t stride;
  const float* g_A_log;  // [H]
  const float* g_bias;   // [H·K] or null
  int64_t tokens, channels, per_head;
  float lower_bound;
};

template <class T>
Input<device_t<T>> input_of(const DecayGateArgs& in) {
  return {.g_a = ptr<T>(in.a.t),
          .stride = in.a.stride,
          .g_A_log = ptr<float>(in.A_log),
          .g_bias = ptr<float>(in.dt_bias),
          .tokens = in.a.count,
          .channels = in.a.width,
          .per_head = in.a.width / in.A_log.numel(),
          .lower_bound = float(in.lower_bound)};
}

template <int V, bool kBounded>
struct Channels {
  float r_scale[V], r_bias[V], bound;

  template <class T>
  __device__ Channels(const Input<T>& in, int64_t c) : bound(in.lower_bound) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      r_scale[v] = expf(in.g_A_log[(c + v) / in.per_head]);
      r_bias[v] = in.g_bias ? in.g_bias[c + v] : 0.f;
    }
  }
  __device__ __forceinline__ float gate(int v, float a) const {
    return log_decay<kBounded>(a + r_bias[v], r_scale[v], bound);
  }
  // dg -> da; `log` receives the summand of dA_log.
  __device__ __forceinline__ float slope(int v, float a, float dg, float& log) const {
    return log_decay_slope<kBounded>(a + r_bias[v], r_scale[v], bound, dg, log);
  }
};

// grid (channel blocks × token groups), block (lanes, 256/lanes).
template <class T, int V, bool kBounded>
__global__ void __launch_bounds__(256)
    fwd_kernel(const Input<T> in, float* g_g, int64_t channel_blocks, int64_t run) {
  const WalkPosition at = walk_position<V>(channel_blocks, run);
  if (at.c >= in.channels) return;
  const Channels<V, kBounded> ch(in, at.c);
  const int64_t f1 = min(at.f0 + run, in.tokens);
  for (int64_t f = at.f0; f < f1; f += kTile) {
    float r[kTile][V];
#pragma unroll
    for (int u = 0; u < kTile; ++u)
      if (f + u < f1) load_pack(r[u], in.g_a + (f + u) * in.stride + at.c);
#pragma unroll
    for (int u = 0; u < kTile; ++u) {
      if (f + u >= f1) break;
#pragma unroll
      for (int v = 0; v < V; ++v) r[u][v] = ch.gate(v, r[u][v]);
      store_pack(g_g + (f + u) * in.channels + at.c, r[u]);
    }
  }
}

// 1 da.  2 sums over the tile in f32, over the run in f64.  3 block sums. g_partial: f64
// [groups,2,H·K], Σ da then Σ of dA_log's summands; null: not wanted.
template <class T, int V, bool kBounded>
__global__ void __launch_bounds__(256)
    bwd_kernel(const Input<T> in, const float* g_dg, T* g_da, double* g_partial,
               int64_t channel_blocks, int64_t run) {
  extern __shared__ double s_sum[];  // [256·2·V]
  const WalkPosition at = walk_position<V>(channel_blocks, run);
  double r_sum[2][V] = {};
  if (at.c < in.channels) {
    const Channels<V, kBounded> ch(in, at.c);
    const int64_t f1 = min(at.f0 + run, in.tokens);
    for (int64_t f = at.f0; f < f1; f += kTile) {
      float r_a[kTile][V], r_g[kTile][V], r_tile[2][V] = {};
#pragma unroll
      for (int u = 0; u < kTile; ++u) {
        if (f + u >= f1) break;
        load_pack(r_a[u], in.g_a + (f + u) * in.stride + at.c);
        load_pack(r_g[u], g_dg + (f + u) * in.channels + at.c);
      }
#pragma unroll
      for (int u = 0; u < kTile; ++u) {
        if (f + u >= f1) break;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          float log;
          r_g[u][v] = ch.slope(v, r_a[u][v], r_g[u][v], log);
          r_tile[0][v] += r_g[u][v];
          r_tile[1][v] += log;
        }
        if (g_da) store_pack(g_da + (f + u) * in.channels + at.c, r_g[u]);
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        r_sum[0][v] += double(r_tile[0][v]);
        r_sum[1][v] += double(r_tile[1][v]);
      }
    }
  }
  if (g_partial)
    block_partials(r_sum, s_sum, g_partial + at.group * 2 * in.channels, in.channels,
                   at.c - int64_t(threadIdx.x) * V);
}

// Sums over the tokens: ddt_bias is done, dA_log's go to [K,H] for the sum over a head's channels.
struct PutChannels {
  float* g_ddt_bias;
  double* g_log;
  int64_t channels, heads, per_head;
  __device__ void operator()(int64_t col, double sum) const {
    if (col < channels) {
      if (g_ddt_bias) g_ddt_bias[col] = float(sum);
    } else if (g_log) {
      const int64_t c = col - channels;
      g_log[c % per_head * heads + c / per_head] = sum;
    }
  }
};
struct PutHeads {
  float* g_dA_log;
  __device__ void operator()(int64_t head, double sum) const { g_dA_log[head] = float(sum); }
};

// fn<V, bounded>
template <class F>
void visit_variant(const DecayGateArgs& in, bool wide, F&& f) {
  if (in.lower_bound < 0)
    wide ? f.template operator()<4, true>() : f.template operator()<1, true>();
  else
    wide ? f.template operator()<4, false>() : f.template operator()<1, false>();
}

bool aligned(const DecayGateArgs& in, const Tensor& dense) {
  return rows_aligned(in.a, 4) && rows_aligned({dense, in.a.count, in.a.width, in.a.width}, 4);
}

}  // namespace

void decay_gate_fwd(const DecayGateArgs& in, const Tensor& g) {
  if (g.numel() == 0) return;
  visit_compute(in.a.t.dtype(), [&]<class T>() {
    visit_variant(in, aligned(in, g), [&]<int V, bool kBounded>() {
      const WalkShape shape = walk_shape(in.a.count, in.a.width / V, kTile, 64, 98304);
      fwd_kernel<device_t<T>, V, kBounded>
          <<<unsigned(shape.blocks), shape.block(), 0, stream_of(g)>>>(
              input_of<T>(in), ptr<float>(g), shape.channel_blocks, shape.run);
      check_launch();
    });
  });
}

void decay_gate_bwd(const DecayGateArgs& in, const Tensor& dg, const DecayGateGrads& out) {
  const int64_t channels = in.a.width, heads = in.A_log.numel();
  const bool sums = out.dA_log.defined() || out.ddt_bias.defined();
  const cudaStream_t stream = stream_of(in.A_log);
  const bool wide = aligned(in, dg) && (!out.da || aligned(in, out.da));
  int64_t groups = 0;
  Tensor partial;  // f64 [groups,2,H·K]
  if (dg.numel() > 0) {
    visit_compute(in.a.t.dtype(), [&]<class T>() {
      visit_variant(in, wide, [&]<int V, bool kBounded>() {
        const WalkShape shape = walk_shape(in.a.count, channels / V, 16, 256, 65536);
        groups = shape.groups;
        if (sums) partial = Tensor::empty({groups, 2, channels}, DType::f64, in.A_log.device());
        const size_t shared = sums ? 256 * 2 * V * sizeof(double) : 0;
        bwd_kernel<device_t<T>, V, kBounded>
            <<<unsigned(shape.blocks), shape.block(), shared, stream>>>(
                input_of<T>(in), ptr<float>(dg), ptr<T>(out.da), ptr<double>(partial),
                shape.channel_blocks, shape.run);
        check_launch();
      });
    });
  }
  if (!sums) return;
  const Tensor log =
      out.dA_log ? Tensor::empty({channels}, DType::f64, in.A_log.device()) : Tensor();
  ordered_sum(
      ptr<double>(partial), groups, 2 * channels, stream,
      PutChannels{ptr<float>(out.ddt_bias), ptr<double>(log), channels, heads, channels / heads});
  if (out.dA_log)
    ordered_sum(ptr<double>(log), channels / heads, heads, stream,
                PutHeads{ptr<float>(out.dA_log)});
}

}  // namespace ebb::gpu
