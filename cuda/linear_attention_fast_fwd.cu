// Gated linear attention in bf16 on tensor cores, forward: the gates of every chunk, then one scan
// with the read-out (cuda/linear_attention_fast.cuh).
#include "cuda/linear_attention_fast.cuh"
#include "ops/rows.h"

namespace ebb::gpu::linear_attention {
namespace {

constexpr int kThreads = 256;

// A warp per chunk and head; lane l has tokens 2l and 2l+1. Sums in f64: kept as high + low, their
// differences are exact to f32.
__global__ void __launch_bounds__(kThreads) gate_kernel(FastAttention p) {
  const int lane = int(threadIdx.x) & 31;
  const int64_t warps = int64_t(gridDim.x) * (kThreads / 32);
  for (int64_t item = int64_t(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5);
       item < p.chunks * p.value_heads; item += warps) {
    const int h = int(item % p.value_heads);
    const Span span = chunk_span(p, item / p.value_heads);
    double x[2], sum = 0;
    float weight[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane + e;
      const int64_t at = p.gate_at(span.first + i, h);
      const float g = i < span.rows ? p.g[at] : 0.f;
      weight[e] = i < span.rows ? (p.beta ? p.beta[at] : 1.f) : 0.f;
      if (g > 0.f) *p.positive_decay = 1;
      x[e] = double(g < -1000.f ? -1000.f : g);  // −inf: e^-1000 = 0
      sum += x[e];
    }
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, sum, o);
      if (lane >= o) sum += before;
    }
    const double total = __shfl_sync(0xffffffffu, sum, 31);
    const double through[2] = {sum - x[1], sum};
    FastGates& s = p.gates[item];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane + e;
      const double log2 = through[e] * 1.4426950408889634;
      s.high[i] = float(log2);
      s.low[i] = float(log2 - double(float(log2)));
      s.gamma[i] = __expf(float(through[e]));
      s.tail[i] = __expf(float(total - through[e]));
      s.beta[i] = weight[e];
    }
    if (lane < 4) s.total[lane] = __expf(float(total));
  }
}

template <int SLABS>
struct Stage {
  SwizzledTile q[SLABS], k[SLABS], v;
  FastGates gates;
};
template <int SLABS>
struct ReadScanShared {
  Stage<SLABS> stage[3];
  SwizzledTile scores[2], out[2];  // P, o
  SwizzledTile states[2][SLABS];   // [V,K]
};

// The first group of four warps, 16 columns of V each; the state Sᵀ [V,K] in registers.
template <int SLABS>
struct Reader {
  float state[SLABS][8][4];

  // 1 q S; S out meanwhile. 2 o = scale γ q S + P v, S = γ_n S + kᵀ (τ w v).
  __device__ __forceinline__ void step(const FastAttention& p, const Stage<SLABS>& now,
                                       const SwizzledTile& scores, SwizzledTile (&states)[SLABS],
                                       SwizzledTile& result, int warp, const Lane& l) {
    unsigned sa[4 * SLABS][4], v[4][4], kept[4][4];
    float out[8][4];
    state_as_left<SLABS>(sa, state);  // 1
    warpgroup_begin();
    multiply_rows<true>(out, sa, now.q[0]);
#pragma unroll
    for (int j = 1; j < SLABS; ++j) multiply_rows(out, sa + 4 * j, now.q[j]);
    warpgroup_commit();
    put_state<SLABS>(states, sa, warp);
    load_values(v, now.v, warp, l);
    scale_left(kept, v, l, [&](int t) {
      const float2 tail = pair(now.gates.tail, t), weight = pair(now.gates.beta, t);
      return float2{tail.x * weight.x, tail.y * weight.y};
    });
    scale_state<SLABS>(state, now.gates.total[0]);
    warpgroup_wait<0>();
    settle(out);
    scale_tokens(out, now.gates.gamma, p.scale, l);  // 2
    settle(out);
    warpgroup_begin();
    multiply_rows(out, v, scores);
    warpgroup_commit();
#pragma unroll
    for (int j = 0; j < SLABS; ++j) multiply_columns(state[j], kept, now.k[j]);
    warpgroup_commit();
    warpgroup_wait<1>();
    settle(out);
    unsigned a[4][4];
    values_as_left(a, out);
    put_values(result, a, warp);
    warpgroup_wait<0>();
    settle_state<SLABS>(state);
  }
};

// s = P = scale·(q kᵀ∘Γ)·w, skip on the diagonal, by the second group of four warps.
template <int SLABS>
__device__ __forceinline__ void write_scores(const FastAttention& p, const Stage<SLABS>& now,
                                             float skip, SwizzledTile& s, int warp, const Lane& l) {
  const int m0 = 16 * warp;
  float x[8][4];
  warpgroup_begin();
  multiply_tiles<true, Inner::last, Inner::last>(x, now.q[0], now.k[0], warp);
#pragma unroll
  for (int j = 1; j < SLABS; ++j)
    multiply_tiles<false, Inner::last, Inner::last>(x, now.q[j], now.k[j], warp);
  warpgroup_commit();
  warpgroup_wait<0>();
  settle(x);
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = m0 + l.g + 8 * (e >> 1), c = 8 * n + 2 * l.c + (e & 1);
      float& y = x[n][e];
      y = c <= r ? p.scale * now.gates.decay(r, c) * now.gates.beta[c] * y : 0.f;
      if (c == r) y += skip;
    }
  unsigned a[4][4];
  values_as_left(a, x);
  put_tile_rows(s, a, m0, l);
}

// Block (sequence, head, 64 columns of V). While the first group multiplies chunk i, the second
// works out P of chunk i+1, fetches chunk i+2 and stores what came of chunk i−1; one barrier a
// step.
template <int SLABS>
__global__ void __launch_bounds__(kThreads, 1) scan_kernel(FastAttention p, bf16_t* o, float* ht) {
  auto& s = swizzled_shared<ReadScanShared<SLABS>>();
  const Lane l;
  const int warp = (int(threadIdx.x) >> 5) & 3;
  const bool reads = threadIdx.x < kThreads / 2;
  const TileMover<kThreads / 2> mover(int(threadIdx.x) & (kThreads / 2 - 1));
  const int64_t tiles = (p.value_dim + 63) / 64;
  for (int64_t item = blockIdx.x; item < p.sequences * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * 64, cols = p.value_dim - v0;
    const int h = int(item / tiles % p.value_heads);
    const int64_t n = item / tiles / p.value_heads;
    const int64_t state_at = (n * p.value_heads + h) * p.key_dim * p.value_dim;
    const PieceWalk walk(p, n);
    const int steps = int(walk.count);
    const float skip = p.skip ? p.skip[h] : 0.f;
    const auto fetch = [&](int i) {
      Stage<SLABS>& to = s.stage[i % 3];
      const Span span = walk.span(p, i);
#pragma unroll
      for (int j = 0; j < SLABS; ++j) {
        const int width = p.key_dim - 64 * j;
        mover.fetch(to.q[j], p.q_row(span.first, h) + 64 * j, p.q_step, span.rows, width);
        mover.fetch(to.k[j], p.k_row(span.first, h) + 64 * j, p.k_step, span.rows, width);
      }
      mover.fetch(to.v, p.v_row(span.first, h) + v0, p.v_step, span.rows, cols);
      mover.fetch_gates(to.gates, p.gates_of(walk.first + i, h));
    };
    const auto store = [&](int i) {
      const Span span = walk.span(p, i);
      mover.store(o + p.value_at(span.first, h) + v0, p.value_stride(), s.out[i & 1], span.rows,
                  cols);
      bf16_t* state = p.states + p.state_at(walk.first + i, h) + int64_t(v0) * p.key_dim;
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
        mover.store(state + 64 * j, p.key_dim, s.states[i & 1][j], cols, p.key_dim - 64 * j);
    };
    Reader<SLABS> reader;
    if (reads) {
      read_transposed<SLABS>(reader.state, p.h0 ? p.h0 + state_at : nullptr, p.key_dim, p.value_dim,
                             v0 + 16 * warp, l);
    } else {
      for (int i = 0; i < min(2, steps); ++i) fetch(i);
    }
    wait_copies();
    publish_tiles();
    __syncthreads();
    if (!reads && steps > 0) write_scores(p, s.stage[0], skip, s.scores[0], warp, l);
    for (int i = 0; i < steps; ++i) {
      wait_copies();
      publish_tiles();
      __syncthreads();
      if (reads) {
        reader.step(p, s.stage[i % 3], s.scores[i & 1], s.states[i & 1], s.out[i & 1], warp, l);
      } else {
        if (i + 2 < steps) fetch(i + 2);
        if (i + 1 < steps)
          write_scores(p, s.stage[(i + 1) % 3], skip, s.scores[(i + 1) & 1], warp, l);
        if (i > 0) store(i - 1);
      }
    }
    __syncthreads();
    if (!reads && steps > 0) store(steps - 1);
    if (reads && ht)
      write_transposed<SLABS>(ht + state_at, reader.state, p.key_dim, p.value_dim, v0 + 16 * warp,
                              l);
    __syncthreads();
  }
}

constexpr int kRunThreads = 128;

template <int SLABS>
struct RunStage {
  SwizzledTile k[SLABS], v;
  FastGates gates;
};
template <int SLABS>
struct RunShared {
  RunStage<SLABS> stage[2];
  SwizzledTile out[SLABS];  // [K,V]
};

// Block (run, head): what the run's chunks write, in order, as if it began with an empty state.
template <int SLABS>
__global__ void __launch_bounds__(kRunThreads) run_kernel(FastAttention p, bf16_t* contributions) {
  auto& s = swizzled_shared<RunShared<SLABS>>();
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  const TileMover<kRunThreads> mover{int(threadIdx.x)};
  for (int64_t item = blockIdx.x; item < p.chunks / p.pieces * p.value_heads; item += gridDim.x) {
    const int h = int(item % p.value_heads);
    const int64_t first = item / p.value_heads * p.pieces;
    const auto fetch = [&](int i) {
      RunStage<SLABS>& to = s.stage[i & 1];
      const Span span = chunk_span(p, first + i);
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
        mover.fetch(to.k[j], p.k_row(span.first, h) + 64 * j, p.k_step, span.rows,
                    p.key_dim - 64 * j);
      mover.fetch(to.v, p.v_row(span.first, h), p.v_step, span.rows, p.value_dim);
      mover.fetch_gates(to.gates, p.gates_of(first + i, h));
    };
    float state[SLABS][8][4];
#pragma unroll
    for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[n / 8][n % 8][e] = 0.f;
    fetch(0);
    for (int i = 0; i < p.pieces; ++i) {
      wait_copies();
      publish_tiles();
      __syncthreads();
      if (i + 1 < p.pieces) fetch(i + 1);
      const RunStage<SLABS>& now = s.stage[i & 1];
      unsigned v[4][4], kept[4][4];
      load_values(v, now.v, warp, l);
      scale_left(kept, v, l, [&](int t) {
        const float2 tail = pair(now.gates.tail, t), weight = pair(now.gates.beta, t);
        return float2{tail.x * weight.x, tail.y * weight.y};
      });
      scale_state<SLABS>(state, now.gates.total[0]);
      warpgroup_begin();
#pragma unroll
      for (int j = 0; j < SLABS; ++j) multiply_columns(state[j], kept, now.k[j]);
      warpgroup_commit();
      warpgroup_wait<0>();
      settle_state<SLABS>(state);
    }
#pragma unroll
    for (int j = 0; j < SLABS; ++j) {
      unsigned a[4][4];
      values_as_left(a, state[j]);
      put_values(s.out[j], a, warp);
    }
    __syncthreads();
    bf16_t* to = contributions + item * p.key_dim * p.value_dim;
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
      mover.store(to + int64_t(64 * j) * p.value_dim, p.value_dim, s.out[j], p.key_dim - 64 * j,
                  p.value_dim);
    __syncthreads();
  }
}

}  // namespace

bool fast_attention(const LinearAttentionProblem& p) {
  const auto aligned = [](const Tensor& t) {
    Rows r;
    rows_in_place(t, 2, &r);
    return rows_aligned(r, 8);
  };
  return p.v.dtype() == DType::bf16 && scans_fit(p.v.device()) && p.chunk >= kChunk &&
         p.memory_chunk % kChunk == 0 && p.key_dim() <= 128 && p.key_dim() % 8 == 0 &&
         p.value_dim() <= 64 && p.value_dim() % 8 == 0 && aligned(p.q) && aligned(p.k) &&
         aligned(p.v);
}

FastAttention make_fast_attention(const LinearAttentionProblem& problem, const Cut& cut,
                                  const LinearAttentionSaved& saved, const Tensor& before) {
  FastAttention p{make_attention<bf16>(problem, cut, saved, before)};
  p.gates = reinterpret_cast<FastGates*>(ptr<float>(saved.gates));
  return p;
}

LinearAttentionSaved fast_attention_fwd(const LinearAttentionProblem& problem, const Tensor& o,
                                        const Tensor& ht, const Tensor& contributions) {
  const Device device = problem.v.device();
  const int64_t h = problem.heads(), k = problem.key_dim(), v = problem.value_dim();
  const Cut cut(problem);
  const LinearAttentionSaved saved{
      .states = Tensor::empty({cut.chunks, h, v, k}, DType::bf16, device),
      .gates = Tensor::empty({cut.chunks, h, kGateFloats}, DType::f32, device)};
  const Tensor before = run_offsets(problem, cut);
  const cudaStream_t stream = stream_of(o);
  const FastAttention p = make_fast_attention(problem, cut, saved, before);
  if (cut.chunks > 0) {
    const int64_t blocks = std::min<int64_t>(ceil_div(cut.chunks * h, kThreads / 32), 65536);
    gate_kernel<<<unsigned(blocks), kThreads, 0, stream>>>(p);
    check_launch();
  }
  visit_fast_slabs(k, [&]<int SLABS>() {
    launch_fast<ReadScanShared<SLABS>>(scan_kernel<SLABS>, kThreads,
                                       grid_of(p.sequences * h * ceil_div(v, 64)), stream, p,
                                       ptr<bf16>(o), ptr<float>(ht));
    if (contributions)
      launch_fast<RunShared<SLABS>>(run_kernel<SLABS>, kRunThreads,
                                    grid_of(cut.chunks / cut.pieces * h), stream, p,
                                    ptr<bf16>(contributions));
  });
  return saved;
}

}  // namespace ebb::gpu::linear_attention
