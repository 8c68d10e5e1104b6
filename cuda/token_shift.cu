// Token shift (ops/token_shift.h). A thread owns V neighbouring channels and walks along a run of
// tokens: forward keeps the previous token in registers, backward (from a run's end to its start)
// what the later token hands back. M: the most mixes a kernel has room for; 0 is δ alone.
#include "cuda/ordered_sum.cuh"
#include "cuda/walk.cuh"
#include "ops/token_shift.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 32;

// One tensor per mix; the one of δ stands at 0.
template <class T>
struct Tensors {
  T* g[kMaxMixes];
};

template <class T>
struct Input {
  const T* g_x;
  int64_t stride;
  const float* g_last;  // [N,D] or null
  Tensors<const float> mu;
  int mixes;
  int64_t tokens, d;
  SequenceCursor first;
};

template <class T, int V>
__device__ __forceinline__ void load_last(float (&r)[V], const Input<T>& in,
                                          const SequenceCursor& s, int64_t c) {
#pragma unroll
  for (int v = 0; v < V; ++v) r[v] = in.g_last ? in.g_last[s.n * in.d + c + v] : 0.f;
}

template <int V, int M>
struct Mixes {
  float r[M > 0 ? M : 1][V];  // unused for δ
  template <class T>
  __device__ __forceinline__ Mixes(const Input<T>& in, int64_t c) {
#pragma unroll
    for (int m = 0; m < M; ++m)
      if (m < in.mixes)
#pragma unroll
        for (int v = 0; v < V; ++v) r[m][v] = in.mu.g[m][c + v];
  }
};

// grid (channel blocks × token groups), block (lanes, 256/lanes).
// 1 U rows of x.  2 δ.  3 one row per mix.
template <class T, int V, int M, int U>
__global__ void __launch_bounds__(kThreads)
    fwd_kernel(const Input<T> in, Tensors<T> out, int64_t channel_blocks, int64_t run) {
  const WalkPosition at = walk_position<V>(channel_blocks, run);
  if (at.c >= in.d || at.f0 >= in.tokens) return;
  const int64_t f1 = min(at.f0 + run, in.tokens);
  const Mixes<V, M> mu(in, at.c);
  SequenceCursor s = in.first;
  s.seek(at.f0);
  float r_old[V];
  if (at.f0 > s.begin)
    load_pack(r_old, in.g_x + (at.f0 - 1) * in.stride + at.c);
  else
    load_last(r_old, in, s, at.c);
  for (int64_t f = at.f0; f < f1; f += U) {
    float r_x[U][V];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (f + u < f1) load_pack(r_x[u], in.g_x + (f + u) * in.stride + at.c);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (f + u >= f1) break;
      if (f + u == s.end) {
        s.next();
        load_last(r_old, in, s, at.c);
      }
      const int64_t row = (f + u) * in.d + at.c;
      float r_y[V];
      if constexpr (M == 0) {
#pragma unroll
        for (int v = 0; v < V; ++v) r_y[v] = r_old[v] - r_x[u][v];
        store_pack(out.g[0] + row, r_y);
      } else {
#pragma unroll
        for (int m = 0; m < M; ++m) {
          if (m >= in.mixes) break;
#pragma unroll
          for (int v = 0; v < V; ++v) r_y[v] = fmaf(r_old[v] - r_x[u][v], mu.r[m][v], r_x[u][v]);
          store_pack(out.g[m] + row, r_y);
        }
      }
#pragma unroll
      for (int v = 0; v < V; ++v) r_old[v] = r_x[u][v];
    }
  }
}

template <class T>
struct Output {
  Tensors<const T> dy;
  const float* g_dfinal;  // [N,D] or null
  T* g_dx;                // [B·T,D] or null
  float* g_partial;       // [groups,mixes,D] or null
};

// What token f hands to the one before it: Σ_m μ_m ⊙ d^m_f, or d_f. r_own: Σ_m d^m_f.
template <class T, int V, int M>
__device__ __forceinline__ void pull_back(float (&r)[V], float (&r_own)[V], float (&r_dy)[M][V],
                                          const Input<T>& in, const Output<T>& out,
                                          const Mixes<V, M>& mu, int64_t f, int64_t c) {
#pragma unroll
  for (int m = 0; m < M; ++m)
    if (m < in.mixes) load_pack(r_dy[m], out.dy.g[m] + f * in.d + c);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    r[v] = r_own[v] = 0.f;
#pragma unroll
    for (int m = 0; m < M; ++m)
      if (m < in.mixes) {
        r[v] = fmaf(mu.r[m][v], r_dy[m][v], r[v]);
        r_own[v] += r_dy[m][v];
      }
  }
}

// Mixes, from a run's end to its start: dx_f = Σ_m d^m_f − s_f + s_{f+1}, s_f = Σ_m μ_m ⊙ d^m_f;
// dμ_m += δ_f ⊙ d^m_f.
template <class T, int V, int M>
__global__ void __launch_bounds__(kThreads)
    bwd_kernel(const Input<T> in, const Output<T> out, int64_t channel_blocks, int64_t run) {
  extern __shared__ float s_sum[];  // [256·M·V]
  const WalkPosition at = walk_position<V>(channel_blocks, run);
  float r_sum[M][V] = {};
  if (at.c < in.d && at.f0 < in.tokens) {
    const int64_t f1 = min(at.f0 + run, in.tokens);
    const Mixes<V, M> mu(in, at.c);
    SequenceCursor s = in.first;
    s.seek(f1 - 1);
    float r_later[V] = {}, r_own[V], r_back[V], r_dy[M][V], r_x[V];
    if (f1 < s.end) pull_back(r_later, r_own, r_dy, in, out, mu, f1, at.c);
    load_pack(r_x, in.g_x + (f1 - 1) * in.stride + at.c);
    for (int64_t f = f1 - 1; f >= at.f0; --f) {
      if (f < s.begin) s.previous();
      // The row before, which the next step needs whatever sequence it belongs to.
      float r_before[V] = {}, r_old[V];
      if (f > 0) load_pack(r_before, in.g_x + (f - 1) * in.stride + at.c);
      pull_back(r_back, r_own, r_dy, in, out, mu, f, at.c);
      if (f == s.begin) {
        load_last(r_old, in, s, at.c);
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v) r_old[v] = r_before[v];
      }
      if (f + 1 == s.end) {
#pragma unroll
        for (int v = 0; v < V; ++v)
          r_later[v] = out.g_dfinal ? out.g_dfinal[s.n * in.d + at.c + v] : 0.f;
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        r_later[v] += r_own[v] - r_back[v];
#pragma unroll
        for (int m = 0; m < M; ++m)
          if (m < in.mixes) r_sum[m][v] = fmaf(r_old[v] - r_x[v], r_dy[m][v], r_sum[m][v]);
      }
      if (out.g_dx) store_pack(out.g_dx + f * in.d + at.c, r_later);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        r_later[v] = r_back[v];
        r_x[v] = r_before[v];
      }
    }
  }
  if (out.g_partial)
    block_partials(r_sum, s_sum, out.g_partial + at.group * in.mixes * in.d, in.d,
                   at.c - int64_t(threadIdx.x) * V, in.mixes);
}

// δ alone: dx_f = d_{f+1} − d_f.
template <class T, int V, int U>
__global__ void __launch_bounds__(kThreads)
    delta_bwd_kernel(const Input<T> in, const Output<T> out, int64_t channel_blocks, int64_t run) {
  const WalkPosition at = walk_position<V>(channel_blocks, run);
  if (at.c >= in.d || at.f0 >= in.tokens) return;
  const int64_t f1 = min(at.f0 + run, in.tokens);
  const T* g_dy = out.dy.g[0] + at.c;
  SequenceCursor s = in.first;
  s.seek(at.f0);
  float r[U + 1][V];
  load_pack(r[0], g_dy + at.f0 * in.d);
  for (int64_t f = at.f0; f < f1; f += U) {
#pragma unroll
    for (int u = 1; u <= U; ++u)
      if (f + u < in.tokens) load_pack(r[u], g_dy + (f + u) * in.d);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (f + u >= f1) break;
      if (f + u == s.end) s.next();
      float r_dx[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float later = f + u + 1 < s.end ? r[u + 1][v] : 0.f;
        if (f + u + 1 == s.end && out.g_dfinal) later = out.g_dfinal[s.n * in.d + at.c + v];
        r_dx[v] = later - r[u][v];
      }
      store_pack(out.g_dx + (f + u) * in.d + at.c, r_dx);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) r[0][v] = r[U][v];
  }
}

// One thread per (sequence, channel).
template <class T>
__global__ void last_kernel(const Input<T> in, float* g_out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= in.first.count * in.d) return;
  SequenceCursor s = in.first;
  s.select(i / in.d);
  float v = 0;
  if (s.begin < s.end)
    v = to_float(in.g_x[(s.end - 1) * in.stride + i % in.d]);
  else if (in.g_last)
    v = in.g_last[i];
  g_out[i] = v;
}

template <class T>
__global__ void last_grad_kernel(const Input<T> in, const Output<T> out, float* g_dlast) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= in.first.count * in.d) return;
  SequenceCursor s = in.first;
  s.select(i / in.d);
  const int64_t c = i % in.d, at = s.begin * in.d + c;
  float v = 0;
  if (s.begin == s.end)
    v = out.g_dfinal ? out.g_dfinal[i] : 0.f;
  else if (in.mixes == 0)
    v = to_float(out.dy.g[0][at]);
  else
    for (int m = 0; m < in.mixes; ++m) v = fmaf(in.mu.g[m][c], to_float(out.dy.g[m][at]), v);
  g_dlast[i] = v;
}

template <class T>
Input<device_t<T>> input_of(const TokenShiftArgs& a) {
  Input<device_t<T>> in{.g_x = ptr<T>(a.x.t),
                        .stride = a.x.stride,
                        .g_last = ptr<float>(a.last),
                        .mu = {},
                        .mixes = int(a.mu.size()),
                        .tokens = a.x.count,
                        .d = a.x.width,
                        .first = a.first};
  for (size_t m = 0; m < a.mu.size(); ++m) in.mu.g[m] = ptr<float>(a.mu[m]);
  return in;
}

template <class T, class P>
Tensors<P> tensors(const std::vector<Tensor>& t) {
  Tensors<P> r{};
  for (size_t m = 0; m < t.size(); ++m) r.g[m] = ptr<T>(t[m]);
  return r;
}

bool aligned(const TokenShiftArgs& a, const std::vector<Tensor>& dense) {
  bool ok = rows_aligned(a.x, 4);
  for (const Tensor& t : dense) ok = ok && rows_aligned({t, a.x.count, a.x.width, a.x.width}, 4);
  return ok;
}

// fn<V, M>
template <class F>
void visit_mixes(int mixes, bool wide, F&& f) {
  if (!wide) return mixes ? f.template operator()<1, 8>() : f.template operator()<1, 0>();
  if (mixes == 0) return f.template operator()<4, 0>();
  if (mixes == 1) return f.template operator()<4, 1>();
  if (mixes <= 6) return f.template operator()<4, 6>();
  return f.template operator()<4, 8>();
}

struct PutMix {
  Tensors<float> dmu;
  int64_t d;
  __device__ void operator()(int64_t col, double sum) const {
    dmu.g[col / d][col % d] = float(sum);
  }
};

}  // namespace

void token_shift_fwd(const TokenShiftArgs& a, const std::vector<Tensor>& out) {
  if (out[0].numel() == 0) return;
  visit_compute(a.x.t.dtype(), [&]<class T>() {
    visit_mixes(int(a.mu.size()), aligned(a, out), [&]<int V, int M>() {
      constexpr int U = M == 0 ? 8 : 4;
      const WalkShape shape = walk_shape(a.x.count, a.x.width / V, U, kRun, 98304);
      fwd_kernel<device_t<T>, V, M, U>
          <<<unsigned(shape.blocks), shape.block(), 0, stream_of(out[0])>>>(
              input_of<T>(a), tensors<T, device_t<T>>(out), shape.channel_blocks, shape.run);
      check_launch();
    });
  });
}

void token_shift_last(const TokenShiftArgs& a, const Tensor& out) {
  if (out.numel() == 0) return;
  visit_compute(a.x.t.dtype(), [&]<class T>() {
    last_kernel<<<unsigned(ceil_div(out.numel(), kThreads)), kThreads, 0, stream_of(out)>>>(
        input_of<T>(a), ptr<float>(out));
    check_launch();
  });
}

namespace {

template <class T, int V, int M>
void launch_bwd(const TokenShiftArgs& a, Output<device_t<T>> out, const TokenShiftGrads& g,
                cudaStream_t stream) {
  const int64_t d = a.x.width, tokens = a.x.count, mixes = int64_t(a.mu.size());
  const bool sums = M > 0 && !g.dmu.empty();
  int64_t groups = 0;
  Tensor partial;
  if (tokens * d > 0 && (sums || g.dx)) {
    const WalkShape shape = walk_shape(tokens, d / V, 8, kRun, 98304);
    groups = shape.groups;
    if (sums) partial = Tensor::empty({groups, mixes, d}, DType::f32, a.x.t.device());
    out.g_partial = ptr<float>(partial);
    if constexpr (M == 0)
      delta_bwd_kernel<device_t<T>, V, 8><<<unsigned(shape.blocks), shape.block(), 0, stream>>>(
          input_of<T>(a), out, shape.channel_blocks, shape.run);
    else
      bwd_kernel<device_t<T>, V, M>
          <<<unsigned(shape.blocks), shape.block(),
             sums ? size_t(kThreads) * M * V * sizeof(float) : 0, stream>>>(
              input_of<T>(a), out, shape.channel_blocks, shape.run);
    check_launch();
  }
  if (sums)
    ordered_sum(out.g_partial, groups, mixes * d, stream, PutMix{tensors<float, float>(g.dmu), d});
}

}  // namespace

void token_shift_bwd(const TokenShiftArgs& a, const std::vector<Tensor>& dy, const Tensor& dfinal,
                     const TokenShiftGrads& g) {
  const cudaStream_t stream = stream_of(a.x.t);
  visit_compute(a.x.t.dtype(), [&]<class T>() {
    const Output<device_t<T>> out{.dy = tensors<T, const device_t<T>>(dy),
                                  .g_dfinal = ptr<float>(dfinal),
                                  .g_dx = ptr<T>(g.dx),
                                  .g_partial = nullptr};
    if (g.dlast && g.dlast.numel() > 0) {
      last_grad_kernel<<<unsigned(ceil_div(g.dlast.numel(), kThreads)), kThreads, 0, stream>>>(
          input_of<T>(a), out, ptr<float>(g.dlast));
      check_launch();
    }
    visit_mixes(int(a.mu.size()), aligned(a, dy),
                [&]<int V, int M>() { launch_bwd<T, V, M>(a, out, g, stream); });
  });
}

}  // namespace ebb::gpu
