// Delta rule with a decay per channel: what is the same for both passes (ops/delta_rule_channel.h;
// Kimi Linear 2025, chunked form). One kernel turns the decays of a chunk into operands that are
// ordinary matrices, and works out its scores P and inverse A; the scans never see a decay again
// but for γ_n.
#include "cuda/delta_rule_channel.cuh"

#include "cuda/delta_inverse.cuh"

namespace ebb::gpu::delta {
namespace {

struct PrepareShared {
  double sums[kSubs][64];             // log decays of a sub-chunk
  float gap[3][64];                   // e^{R_I−E_J} of the pairs that are not neighbours
  float x[4][kTileRows * kFloatRow];  // a slab of e^g, q, b∘k, k; last M, P, A and scratch
};

__device__ __forceinline__ float4 scaled(float4 x, float4 f) {
  return {x.x * f.x, x.y * f.y, x.z * f.z, x.w * f.w};
}
__device__ __forceinline__ float dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
__device__ __forceinline__ float4 read4(const float* s) {
  return *reinterpret_cast<const float4*>(s);
}

// The 17 pairs (i, j), j <= i, of one sub-chunk that eight threads share, eight channels each: rows
// from j down for column j = 0...7, then for column 15−j. f(step, i, column).
template <class F>
__device__ __forceinline__ void each_pair(F&& f) {
  const int j = (int(threadIdx.x) >> 3) & 7;
#pragma unroll
  for (int step = 0; step < 17; ++step) {
    const bool second = step >= 16 - j;
    f(step, second ? step - 1 : j + step, second ? 15 - j : j);
  }
}

// Adds a slab's part of M (without its mask) and P inside the sub-chunks.
__device__ __forceinline__ void diagonal_scores(const PrepareShared& s, float (&m)[17],
                                                float (&score)[17]) {
  const int at = kSub * (int(threadIdx.x) >> 6) * kFloatRow + 4 * (int(threadIdx.x) & 7);
  const float *s_a = s.x[0] + at, *s_q = s.x[1] + at, *s_b = s.x[2] + at, *s_k = s.x[3] + at;
  float4 low{}, high{};  // k_j e^{G_i−G_j}
  each_pair([&](int step, int i, int j) {
    const int row = i * kFloatRow;
    if (i == j) {
      low = read4(s_k + row), high = read4(s_k + row + 32);
    } else {
      low = scaled(low, read4(s_a + row)), high = scaled(high, read4(s_a + row + 32));
    }
    m[step] += dot(read4(s_b + row), low) + dot(read4(s_b + row + 32), high);
    score[step] += dot(read4(s_q + row), low) + dot(read4(s_q + row + 32), high);
  });
}

// Warps 0...5 have a pair of sub-chunks (I, J < I) each, a lane two rows and four columns of it.
struct Pair {
  int row, column, gap;  // gap < 0: neighbours
};
__device__ __forceinline__ Pair pair_of(int warp, int lane) {
  const int apart = warp < 3 ? 1 : warp < 5 ? 2 : 3, J = warp < 3 ? warp : warp < 5 ? warp - 3 : 0;
  return {kSub * (J + apart) + 2 * (lane >> 2), kSub * J + (lane & 3), warp - 3};
}

// Adds a slab's part of M and P between sub-chunks; q and b∘k by now times head, k times tail.
__device__ __forceinline__ void pair_scores(const PrepareShared& s, float (&m)[8],
                                            float (&score)[8]) {
  const int warp = int(threadIdx.x) >> 5, lane = int(threadIdx.x) & 31;
  if (warp >= 6) return;
  const Pair pair = pair_of(warp, lane);
  for (int d = 0; d < 64; d += 4) {
    const float4 gap = pair.gap < 0 ? float4{1.f, 1.f, 1.f, 1.f} : read4(s.gap[pair.gap] + d);
    float4 k[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) k[c] = read4(s.x[3] + (pair.column + 4 * c) * kFloatRow + d);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 q = scaled(read4(s.x[1] + (pair.row + r) * kFloatRow + d), gap);
      const float4 b = scaled(read4(s.x[2] + (pair.row + r) * kFloatRow + d), gap);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        m[4 * r + c] += dot(b, k[c]);
        score[4 * r + c] += dot(q, k[c]);
      }
    }
  }
}

// One slab: the operands to memory and, for the scores, to s.x.
template <class T, bool SCORES>
__device__ __forceinline__ void prepare_slab(const Channel<T>& p, Span span, int64_t chunk, int hv,
                                             int slab, PrepareShared& s) {
  const int a = own_sub(), d = own_channel(), channel = 64 * slab + d;
  const bool inside = channel < p.key_dim;
  float g[kSub], q[kSub], k[kSub], b[kSub], head[kSub], tail[kSub];
  load_own(g, p.g + p.gate_at(span.first, hv) + channel, p.gate_stride(), span.rows, inside);
  load_own(q, p.q + p.key_at(span.first, hv) + channel, p.key_stride(), span.rows, inside);
  load_own(k, p.k + p.key_at(span.first, hv) + channel, p.key_stride(), span.rows, inside);
  load_own_erased(b, k, p, span, hv, channel, inside);
#pragma unroll
  for (int i = 0; i < kSub; ++i)
    if (g[i] > 0.f) *p.positive_decay = 1;
  s.sums[a][d] = own_decays<T>(g, head, tail);
  __syncthreads();
  const float before = decay_over<T>(s.sums, 0, a), after = decay_over<T>(s.sums, a + 1, kSubs);
  const int64_t at = p.row_at(span.first, hv) * p.key_dim + channel;
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    const int r = kSub * a + i;
    if (!inside || r >= span.rows) continue;
    p.queries[at + int64_t(r) * p.key_dim] = from_float<T>(p.scale * q[i] * (head[i] * before));
    p.erased[at + int64_t(r) * p.key_dim] = from_float<T>(b[i] * (head[i] * before));
    p.kept[at + int64_t(r) * p.key_dim] = from_float<T>(k[i] * (tail[i] * after));
  }
  if (a == 0 && inside) p.total[p.total_at(chunk, hv) + channel] = decay_over<T>(s.sums, 0, kSubs);
  if (a == 1 && slab == 0)
    p.total[p.total_at(chunk, hv) + p.key_dim + d] = d >= span.rows ? 0.f
                                                     : p.erase
                                                         ? 1.f
                                                         : p.write_strength(span.first + d, hv);
  if (!SCORES) return;
  if (a > 0) s.gap[a - 1][d] = decay_over<T>(s.sums, a == 2 ? 2 : 1, a == 1 ? 2 : 3);
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    const int to = (kSub * a + i) * kFloatRow + d;
    s.x[0][to] = decay_exp<T>(g[i]);
    s.x[1][to] = q[i], s.x[2][to] = b[i], s.x[3][to] = k[i];
  }
}

// q and b∘k times head, k times tail, by running products.
__device__ __forceinline__ void apply_decays(PrepareShared& s) {
  const int at = kSub * own_sub() * kFloatRow + own_channel();
  float run = 1;
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    const int to = at + i * kFloatRow;
    run *= s.x[0][to];
    s.x[1][to] *= run, s.x[2][to] *= run;
  }
  run = 1;
#pragma unroll
  for (int i = kSub - 1; i >= 0; --i) {
    s.x[3][at + i * kFloatRow] *= run;
    run *= s.x[0][at + i * kFloatRow];
  }
}

// Item (chunk, head). Per slab of 64 channels: 1 sums of log decays by sub-chunk; the operands,
// stored. 2 M and P inside the sub-chunks, channel by channel in f32. 3 between them, as products.
// Then 4 A = (I+M)⁻¹. 5 store.
template <class T, bool SCORES>
__global__ void __launch_bounds__(kTileThreads, 2) prepare_kernel(Channel<T> p) {
  auto& s = dynamic_shared<PrepareShared>();
  const int t = int(threadIdx.x);
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads; item += gridDim.x) {
    const int hv = int(item % p.value_heads);
    const int64_t chunk = item / p.value_heads;
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    float m[17] = {}, score[17] = {}, pair_m[8] = {}, pair_score[8] = {};
    for (int slab = 0; 64 * slab < p.key_dim; ++slab) {
      prepare_slab<T, SCORES>(p, span, chunk, hv, slab, s);  // 1
      __syncthreads();
      if (!SCORES) continue;
      diagonal_scores(s, m, score);  // 2
      __syncthreads();
      apply_decays(s);
      __syncthreads();
      pair_scores(s, pair_m, pair_score);  // 3
      __syncthreads();
    }
    if (!SCORES) continue;
    float *s_m = s.x[0], *s_p = s.x[1], *s_a = s.x[2];
    for (int i = t; i < kTileRows * kFloatRow; i += kTileThreads) s_m[i] = s_p[i] = 0.f;
    __syncthreads();
    each_pair([&](int step, int i, int j) {
#pragma unroll
      for (int o = 1; o < 8; o *= 2) {
        m[step] += __shfl_xor_sync(0xffffffffu, m[step], o);
        score[step] += __shfl_xor_sync(0xffffffffu, score[step], o);
      }
      if ((t & 7) != (step & 7)) return;
      const int base = kSub * (t >> 6), at = (base + i) * kFloatRow + base + j;
      s_m[at] = i > j ? m[step] : 0.f;
      s_p[at] = p.scale * score[step];
    });
    if (t < 6 * 32) {
      const Pair pair = pair_of(t >> 5, t & 31);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at = (pair.row + i / 4) * kFloatRow + pair.column + 4 * (i % 4);
        s_m[at] = pair_m[i];
        s_p[at] = p.scale * pair_score[i];
      }
    }
    __syncthreads();
    invert(s_m, s_a, s.x[3]);                               // 4
    const int64_t at = p.row_at(span.first, hv) * p.chunk;  // 5
    for (int i = t; i < span.rows * p.chunk; i += kTileThreads) {
      const int from = i / p.chunk * kFloatRow + i % p.chunk;
      p.a[at + i] = from_float<T>(s_a[from]);
      p.scores[at + i] = from_float<T>(s_p[from]);
    }
    __syncthreads();
  }
}

}  // namespace

ChannelOperands make_operands(const DeltaRuleProblem& p, const DeltaRuleGradients& grads,
                              bool plain) {
  const Device device = p.v.device();
  const int64_t chunks = p.layout.chunk_count(p.batch(), p.time(), chunk_of(p));
  const Shape shape{p.value_heads(), p.batch() * p.time(), p.key_dim()};
  int64_t taken = 0;  // elements of the one matrix of all gradients, where dq is columns of it
  const bool columns = grads.dq && grads.dk && grads.dv && !grads.dq.is_contiguous();
  const int64_t room = columns ? 2 * grads.dq.numel() + grads.dv.numel() : 0;
  const auto operand = [&](const Tensor& place) {
    if (columns && taken + shape.numel() <= room) {
      const Tensor part = Tensor::wrap(grads.dq.storage(), p.v.dtype(), {shape.numel()}, {1},
                                       grads.dq.offset() + taken);
      taken += shape.numel();
      return part.view(shape);
    }
    const bool fits = !columns && place.defined() && place.numel() == shape.numel();
    return fits ? place.view(shape) : Tensor::empty(shape, p.v.dtype(), device);
  };
  const Tensor queries = operand(grads.dq);
  return {queries, plain ? queries : operand(grads.dk), operand({}), Tensor(),
          Tensor::empty({chunks, p.value_heads(), p.key_dim() + kChunk}, DType::f32, device)};
}

template <class T>
Channel<device_t<T>> make_channel(const DeltaRuleProblem& p, const DeltaRuleSaved& saved,
                                  const ChannelOperands& operands, const Tensor& chunk_before) {
  Channel<device_t<T>> d{make_problem<T>(p, saved, chunk_before)};
  if (p.in_place && !p.A_log) d.g = ptr<float>(p.g);
  if (p.in_place && !p.sigmoid) d.beta = ptr<float>(p.beta);
  if (!p.sigmoid) d.erase = ptr<float>(p.erase), d.write = ptr<float>(p.write);
  d.scores = ptr<T>(saved.scores);
  d.queries = ptr<T>(operands.queries), d.erased = ptr<T>(operands.erased);
  d.kept = ptr<T>(operands.kept), d.written = ptr<T>(operands.written);
  d.total = ptr<float>(operands.total);
  if (!p.v.is_contiguous()) d.value_step = token_step(p.v, 2);
  return d;
}
template Channel<float> make_channel<float>(const DeltaRuleProblem&, const DeltaRuleSaved&,
                                            const ChannelOperands&, const Tensor&);
template Channel<__nv_bfloat16> make_channel<bf16>(const DeltaRuleProblem&, const DeltaRuleSaved&,
                                                   const ChannelOperands&, const Tensor&);

template <class T>
void prepare(const Channel<T>& p, Prepare what, cudaStream_t stream) {
  const int64_t items = p.chunks * p.value_heads;
  if (what == Prepare::everything)
    launch_tiles<PrepareShared>(prepare_kernel<T, true>, items, stream, p);
  else
    launch_tiles<PrepareShared>(prepare_kernel<T, false>, items, stream, p);
}
template void prepare<float>(const Channel<float>&, Prepare, cudaStream_t);
template void prepare<__nv_bfloat16>(const Channel<__nv_bfloat16>&, Prepare, cudaStream_t);

}  // namespace ebb::gpu::delta
