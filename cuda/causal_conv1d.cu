// Short causal depthwise convolution (ops/causal_conv1d.h): pre_t = b + Σ_j w_j x_{t−(W−1)+j}.
// A thread owns V neighbouring channels and walks along a run of tokens with the window in
// registers, so that every row is read once (and W−1 rows per run again, from the cache).
// Interior tokens go in tiles of U with all loads issued first and no checks; tokens next to a
// sequence border, a run's ragged rest and tokens of a final state go one at a time.
#include "cuda/causal_conv1d.cuh"
#include "cuda/ordered_sum.cuh"
#include "cuda/walk.cuh"

namespace ebb::gpu {
namespace {

using namespace conv;

// Backward: channels per thread, tokens per tile, blocks per multiprocessor. Measured on an H200 at
// 32768 x 1536: four channels and tiles of 4 are 10 % slower, more blocks spill.
constexpr int kBwdV = 2, kBwdU = 8, kBwdBlocks = 2;

// Borders of the cursor's sequence relative to a run's first token, within the reach of an int.
struct RunBorders {
  int begin, end;
  __device__ RunBorders(const SequenceCursor& s, int64_t f0)
      : begin(clip(s.begin - f0)), end(clip(s.end - f0)) {}
  static __device__ int clip(int64_t v) {
    return int(min(max(v, -(int64_t(1) << 30)), int64_t(1) << 30));
  }
};

// grid (channel blocks × token groups), block (lanes, 256/lanes); run: a multiple of U.
// 1 tile: U rows, W−1 kept from the tile before.  2 y = act(pre).  3 shift.  4 single tokens.
template <class T, int W, int V, int U, bool kSilu>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    fwd_kernel(const Input<T> in, T* g_y, int64_t channel_blocks, int64_t run) {
  const WalkPosition at = walk_position<V>(channel_blocks, run);
  if (at.c >= in.d || at.f0 >= in.tokens) return;
  const Channels<T, W, V, kSilu> ch(in, at.c);
  const int owned = int(min(run, in.tokens - at.f0));
  const T* g_run = in.g_x + at.f0 * in.stride + at.c;
  T* g_out = g_y + at.f0 * in.d + at.c;
  const auto emit = [&](const auto& r_x, int u, T* g) {
    float r_y[V];
    ch.pre(r_y, r_x, u);
    if constexpr (kSilu) {
#pragma unroll
      for (int v = 0; v < V; ++v) r_y[v] *= fast_sigmoid(r_y[v]);
    }
    store_pack(g, r_y);
  };
  SequenceCursor s = in.first;
  s.seek(at.f0);
  RunBorders b(s, at.f0);
  float r_x[W - 1 + U][V];  // rows i−(W−1) … i+U−1
  bool kept = false;        // the first W−1 of them are there already
  for (int i = 0; i < owned;) {
    if (i == b.end) {
      s.next();
      b = RunBorders(s, at.f0);
    }
    if (i - (W - 1) >= b.begin && i + U <= min(owned, b.end)) {
      const T* g_tile = g_run + i * in.stride;
      T* g_tile_out = g_out + i * in.d;
      if (!kept)
#pragma unroll
        for (int k = 1 - W; k < 0; ++k) load_pack(r_x[W - 1 + k], g_tile + k * in.stride);
#pragma unroll
      for (int u = 0; u < U; ++u) load_pack(r_x[W - 1 + u], g_tile + u * in.stride);
#pragma unroll
      for (int u = 0; u < U; ++u) emit(r_x, u, g_tile_out + u * in.d);
#pragma unroll
      for (int k = 0; k < W - 1; ++k)
#pragma unroll
        for (int v = 0; v < V; ++v) r_x[k][v] = r_x[U + k][v];
      kept = true;
      i += U;
    } else {
      float r_window[W][V];
      ch.window(r_window, s, at.f0 + i);
      emit(r_window, 0, g_out + i * in.d);
      kept = false;
      ++i;
    }
  }
}

// Bytes from row to row in the backward pass, where 32 bits hold them: constants of the kernel, so
// that the next row is one addition away.
struct RowSteps {
  unsigned x = 0, dy = 0, dx = 0;
  bool narrow = false;

  template <class T>
  RowSteps(const Input<T>& in, const Output<T>& out)
      : x(unsigned(in.stride * sizeof(T))),
        dy(unsigned(out.dy_stride * sizeof(T))),
        dx(unsigned(in.d * sizeof(T))),
        narrow(std::max({in.stride, out.dy_stride, in.d}) <= int64_t(0xffffffff / sizeof(T))) {}
};
template <class T>
__device__ __forceinline__ const T* rows_before(const T* row, int64_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(row) - bytes);
}
template <class T>
__device__ __forceinline__ T* rows_before(T* row, int64_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(row) - bytes);
}

// As fwd_kernel, but from a run's end to its start, beginning W−1 tokens behind it, whose dpre the
// last dx need. run + W − 1 is a multiple of U.
// 1 tile: rows i−U−(W−1) … i−1 of x, i−U … i−1 of dy.  2 dpre = dy·act'(pre), pre anew.
// 3 dw_j += dpre·x_{t−(W−1)+j}, dbias += dpre.  4 dx_t = Σ_k w_{W−1−k} dpre_{t+k}.  5 block sums.
template <class T, int W, int V, int U, bool kSilu, bool kBias>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? kBwdBlocks : 2)
    bwd_kernel(const Input<T> in, const Output<T> out, const RowSteps steps, int64_t channel_blocks,
               int64_t run) {
  constexpr int kSums = W + kBias;
  extern __shared__ float s_sum[];  // [256·kSums·V]
  const WalkPosition at = walk_position<V>(channel_blocks, run);
  float r_sum[kSums][V] = {};
  if (at.c < in.d && at.f0 < in.tokens) {
    const Channels<T, W, V, kSilu> ch(in, at.c);
    const int owned = int(min(run, in.tokens - at.f0));
    const T* g_run = in.g_x + at.f0 * in.stride + at.c;
    const T* g_dy_run = out.g_dy + at.f0 * out.dy_stride + at.c;
    T* g_dx_run = out.g_dx + at.f0 * in.d + at.c;
    float r_g[W][V] = {};  // dpre of tokens i, i+1, …; row 0 is the current one
    // Steps 2-4 for a token whose dy stands in r_g[0] and whose window starts at row u of r_x.
    const auto token = [&](const auto& r_x, int u, bool own, T* g_dx, const float* g_extra) {
      ch.dpre(r_g[0], r_x, u);
      if (own) {
        float r_dx[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          r_dx[v] = g_extra ? g_extra[v * W] : 0.f;
#pragma unroll
          for (int k = 0; k < W; ++k) {
            r_sum[k][v] = fmaf(r_g[0][v], r_x[u + k][v], r_sum[k][v]);
            r_dx[v] = fmaf(ch.r_w[W - 1 - k][v], r_g[k][v], r_dx[v]);
          }
          if constexpr (kBias) r_sum[W][v] += r_g[0][v];
        }
        store_pack(g_dx, r_dx);
      }
#pragma unroll
      for (int k = W - 1; k > 0; --k)
#pragma unroll
        for (int v = 0; v < V; ++v) r_g[k][v] = r_g[k - 1][v];
    };
    SequenceCursor s = in.first;
    s.seek(at.f0 + owned - 1);
    RunBorders b(s, at.f0);
    float r_x[W - 1 + U][V];               // rows i−U−(W−1) … i−1
    bool kept = false;                     // the last W−1 of them are there already
    Pack<T, V> r_next_x[U], r_next_dy[U];  // the tile to come, as stored
    bool fetched = false;                  // it is on its way
    // The rows to come, which follow from tile to tile: of x and dy the next to be fetched, of dx
    // the next to be written. And the row of a tile to be fetched later that this lane brings to
    // the L2 cache.
    const T *g_x_row = nullptr, *g_dy_row = nullptr, *g_near = nullptr;
    T* g_dx_row = nullptr;
    const int row = int(threadIdx.x);
    const int64_t near_step = int64_t(U) * (row < U ? steps.x : steps.dy);
    const auto start = [&](int i) {
      g_x_row = g_run + (i - W) * in.stride;
      g_dy_row = g_dy_run + (i - 1) * out.dy_stride;
      g_dx_row = g_dx_run + (i - 1) * in.d;
      const int t = i - 3 * U + row % U;
      g_near =
          (row < U ? g_run + (t - (W - 1)) * in.stride : g_dy_run + t * out.dy_stride) - row * V;
    };
    const auto fetch_x = [&] {
#pragma unroll
      for (int u = U - 1; u >= 0; --u) {
        r_next_x[u] = load_raw<T, V>(g_x_row);
        g_x_row = rows_before(g_x_row, steps.x);
      }
    };
    const auto fetch_dy = [&](int u) {
      r_next_dy[u] = load_raw<T, V>(g_dy_row);
      g_dy_row = rows_before(g_dy_row, steps.dy);
    };
    // `more`: the tile below is an interior one too; its loads go out before this one's arithmetic.
    const auto tile = [&](int i, auto all_owned, bool more) {
      if (!kept)
#pragma unroll
        for (int k = 1 - W; k < 0; ++k) load_pack(r_x[W - 1 + U + k], g_run + (i + k) * in.stride);
      if (!fetched) {
        start(i);
        fetch_x();
#pragma unroll
        for (int u = U - 1; u >= 0; --u) fetch_dy(u);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) unpack(r_x[u], r_next_x[u]);
      if (!more) start(i);  // the same rows again, which are there, rather than none
      fetch_x();
      if (row < 2 * U && i >= 3 * U + W - 1) asm volatile("prefetch.global.L2 [%0];" ::"l"(g_near));
      g_near = rows_before(g_near, near_step);
      fetched = more;
#pragma unroll
      for (int u = U - 1; u >= 0; --u) {
        unpack(r_g[0], r_next_dy[u]);
        fetch_dy(u);
        token(r_x, u, all_owned.value || i - U + u < owned, g_dx_row, nullptr);
        g_dx_row = rows_before(g_dx_row, steps.dx);
      }
#pragma unroll
      for (int k = W - 2; k >= 0; --k)
#pragma unroll
        for (int v = 0; v < V; ++v) r_x[U + k][v] = r_x[k][v];
    };
    for (int i = min(owned + W - 1, b.end); i > 0;) {
      if (i - 1 < b.begin) {
        s.previous();
        b = RunBorders(s, at.f0);
#pragma unroll
        for (int k = 0; k < W; ++k)
#pragma unroll
          for (int v = 0; v < V; ++v) r_g[k][v] = 0.f;
      }
      const int tail = out.g_dfinal ? b.end - W : b.end;  // the final state holds tokens from here
      if (steps.narrow && i >= U && i - U - (W - 1) >= b.begin && i <= tail) {
        const bool more = i >= 2 * U && i - 2 * U - (W - 1) >= b.begin;
        if (i <= owned)
          tile(i, std::true_type{}, more);
        else
          tile(i, std::false_type{}, more);
        kept = true;
        i -= U;
      } else {
        --i;
        float r_window[W][V];
        ch.window(r_window, s, at.f0 + i);
        load_pack(r_g[0], g_dy_run + i * out.dy_stride);
        const bool last = out.g_dfinal && i >= tail;
        token(r_window, 0, i < owned, g_dx_run + i * in.d,
              last ? out.g_dfinal + (s.n * in.d + at.c) * W + i - tail : nullptr);
        kept = false;
      }
    }
  }
  if (out.g_partial)
    block_partials(r_sum, s_sum, out.g_partial + at.group * kSums * in.d, in.d,
                   at.c - int64_t(threadIdx.x) * V);
}

bool aligned16(const Tensor& t) {
  return !t.defined() || reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
}

// Tokens a thread of the backward pass owns: what lets the blocks fill an H200 a whole number of
// times at the least cost. The walk, W−1 tokens longer, comes out as whole tiles of U. The GPU is a
// constant here, so that sums keep their order on any.
int64_t backward_run(int64_t tokens, const WalkShape& shape, int width, int tile) {
  constexpr int64_t kResident = 132 * kBwdBlocks;
  const int64_t rows = shape.rows, least = 16;
  int64_t best = 0, best_cost = 0;
  for (int64_t waves = 1; waves <= 8; ++waves) {
    const int64_t groups = std::max<int64_t>(1, waves * kResident / shape.channel_blocks);
    const int64_t walk =
        std::max(least, ceil_div(ceil_div(tokens, groups * rows) + width - 1, tile) * tile);
    const int64_t run = walk - (width - 1);
    const int64_t blocks = ceil_div(tokens, run * rows) * shape.channel_blocks;
    const int64_t cost = ceil_div(blocks, kResident) * (walk + tile);  // a tile's time to begin
    if (best == 0 || cost < best_cost) best = run, best_cost = cost;
  }
  return best;
}

struct PutWeights {
  float *g_dw, *g_dbias;
  bool add_dw, add_dbias;
  int64_t d;
  int width;
  __device__ void operator()(int64_t col, double sum) const {
    const int64_t j = col / d, c = col - j * d;
    if (j < width) {
      if (g_dw) put(g_dw[c * width + j], sum, add_dw);
    } else if (g_dbias) {
      put(g_dbias[c], sum, add_dbias);
    }
  }
  __device__ static void put(float& to, double sum, bool add) {
    to = add ? to + float(sum) : float(sum);
  }
};

}  // namespace

void causal_conv1d_fwd(const ConvArgs& a, const Tensor& y) {
  if (y.numel() == 0) return;
  const bool vector = rows_aligned(a.x, 4) && aligned16(a.w);
  visit_compute(y.dtype(), [&]<class T>() {
    visit_variant<4>(a, vector, [&]<int W, int V, bool kSilu>() {
      constexpr int U = 8;
      const WalkShape shape = walk_shape(a.x.count, ceil_div(a.x.width, V), U, 64, 98304);
      fwd_kernel<device_t<T>, W, V, U, kSilu>
          <<<unsigned(shape.blocks), shape.block(), 0, stream_of(y)>>>(
              input_of<T>(a), ptr<T>(y), shape.channel_blocks, shape.run);
      check_launch();
    });
  });
}

void causal_conv1d_bwd(const ConvArgs& a, const Rows& dy, const Tensor& dfinal,
                       const ConvGrads& g) {
  const int64_t tokens = a.x.count, d = a.x.width;
  const bool vector = rows_aligned(a.x, kBwdV) && rows_aligned(dy, kBwdV) && aligned16(a.w);
  const bool weights = g.dw.defined() || g.dbias.defined();
  const cudaStream_t stream = stream_of(a.w);
  visit_compute(a.x.t.dtype(), [&]<class T>() {
    const Input<device_t<T>> in = input_of<T>(a);
    if (g.dstate) causal_conv1d_dstate(a, dy, dfinal, g.dstate);
    if (!weights && !g.dx) return;
    // Inputs that need no gradient are rare: written all the same instead of twice the instances.
    const Tensor dx = g.dx ? g.dx : Tensor::empty({tokens, d}, a.x.t.dtype(), a.w.device());
    Output<device_t<T>> out = output_of<T>(dy, dfinal, dx);
    const auto run = [&]<int W, int V, bool kSilu, bool kBias>() {
      constexpr int U = kBwdU, kSums = W + kBias;
      int64_t groups = 0;
      Tensor partial;
      if (tokens * d > 0) {
        WalkShape shape = walk_shape(tokens, ceil_div(d, V), 16, 64, 98304);
        shape.run = backward_run(tokens, shape, W, U);
        shape.groups = groups = ceil_div(tokens, shape.run * shape.rows);
        shape.blocks = shape.groups * shape.channel_blocks;
        if (weights) partial = Tensor::empty({groups, kSums, d}, DType::f32, a.w.device());
        out.g_partial = ptr<float>(partial);
        const size_t shared = weights ? size_t(kThreads) * kSums * V * sizeof(float) : 0;
        bwd_kernel<device_t<T>, W, V, U, kSilu, kBias>
            <<<unsigned(shape.blocks), shape.block(), shared, stream>>>(
                in, out, RowSteps(in, out), shape.channel_blocks, shape.run);
        check_launch();
      }
      if (weights)
        ordered_sum(out.g_partial, groups, kSums * d, stream,
                    PutWeights{ptr<float>(g.dw), ptr<float>(g.dbias), g.add_dw, g.add_dbias, d, W});
    };
    visit_variant<kBwdV>(a, vector, [&]<int W, int V, bool kSilu>() {
      if constexpr (V > 1) {  // without a bias, a sum per value less
        if (!g.dbias) return run.template operator()<W, V, kSilu, false>();
      }
      run.template operator()<W, V, kSilu, true>();
    });
  });
}

}  // namespace ebb::gpu
