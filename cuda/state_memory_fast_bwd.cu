// State-memory attention on tensor cores, backward: R·dy, the gate's gradient, and the sums of the
// parts in which the gradients of q̂, ê and c come (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// R·dy of every row, and dgate (null: not wanted), their sums over the heads that share a gate, in
// order. A warp per token: eight lanes per head, eight columns each.
__global__ void __launch_bounds__(kThreads)
    through_kernel(const float* r, const bf16_t* dy, int64_t tokens, int heads, int width,
                   float* through, int gate_heads, bf16_t* dgate) {
  const int lane = int(threadIdx.x) & 31, column = lane % 8 * 8;
  const int64_t warps = int64_t(gridDim.x) * kWarps;
  for (int64_t t = int64_t(blockIdx.x) * kWarps + (threadIdx.x >> 5); t < tokens; t += warps) {
#pragma unroll 4
    for (int first = 0; first < heads; first += 4) {
      const int head = first + lane / 8;
      float sum = 0;
      if (head < heads && column < width) {
        const int64_t at = (t * heads + head) * width + column;
        float x[8], y[8];
        load_pack<float, 8>(x, r + at);
        load_pack<bf16_t, 8>(y, dy + at);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
      }
#pragma unroll
      for (int o = 1; o < 8; o *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
      if (column == 0 && head < heads) through[t * heads + head] = sum;
    }
    if (!dgate) continue;
    __syncwarp();  // the warp reads what its lanes have written
    const int group = heads / gate_heads;
    for (int g = lane; g < gate_heads; g += 32) {
      float sum = 0;
#pragma unroll 4
      for (int h = 0; h < group; ++h) sum += through[t * heads + g * group + h];
      dgate[t * gate_heads + g] = from_float<bf16_t>(sum);
    }
  }
}

// One gradient of sum_kernel: `rows` rows of parts, what they are added to, and the rows x̂ rms that
// were normalised (null: none).
struct PartSum {
  TokenParts d;
  int64_t rows = 0;
  const bf16_t* x = {};
  bf16_t* out = {};
};
struct PartSums {
  PartSum of[3];  // of q, e, c
};

// A warp per row of a gradient, `width` (at most 128) wide: the sum d of its parts, in order; out =
// (d − x̂ mean(d∘x̂))/rms of the row x that was normalised, or d itself where x is null.
__global__ void __launch_bounds__(kThreads) sum_kernel(PartSums sums, int64_t rows, float eps) {
  const int lane = int(threadIdx.x) & 31, column = 4 * lane;
  const int64_t warps = int64_t(gridDim.x) * kWarps;
  for (int64_t i = int64_t(blockIdx.x) * kWarps + (threadIdx.x >> 5); i < rows; i += warps) {
    int64_t row = i;
    int which = 0;
    while (row >= sums.of[which].rows) row -= sums.of[which++].rows;
    const TokenParts& d = sums.of[which].d;
    const bf16_t* x = sums.of[which].x;
    bf16_t* out = sums.of[which].out;
    const bool there = column < d.width;
    float sum[4] = {};
#pragma unroll 4
    for (int part = 0; part < d.parts && there; ++part) {
      float y[4];
      load_pack<float, 4>(y, d.out + (row * d.parts + part) * d.width + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += y[i];
    }
    if (x) {
      float v[4] = {}, square = 0, dot = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (there) v[i] = to_float(x[row * d.width + column + i]);
        square += v[i] * v[i], dot += v[i] * sum[i];
      }
      const float inverse = 1.f / sqrtf(warp_sum(square) / float(d.width) + eps);
      const float mean = warp_sum(dot) * inverse / float(d.width);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = inverse * (sum[i] - v[i] * inverse * mean);
    }
    if (there)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[row * d.width + column + i] = from_float<bf16_t>(sum[i]);
  }
}

unsigned blocks_for(int64_t rows, const Tensor& on) {
  return unsigned(
      std::min<int64_t>(ceil_div(rows, kWarps), int64_t(16) * multiprocessors(on.device())));
}

// As many heads per item as still leave every multiprocessor `rounds` items of `pairs` tiles and
// heads, such that a block's heads are whole groups of those that share a vector, or lie in one.
int most_heads_per_item(const FastProblem& p, int64_t pairs, int rounds, const Tensor& on) {
  const int64_t enough = int64_t(rounds) * multiprocessors(on.device());
  const auto fits = [&](int heads, int of) {
    const int group = p.heads / of;
    return group % heads == 0 || heads % group == 0;
  };
  for (int heads = p.heads; heads > 1; --heads)
    if (p.heads % heads == 0 && fits(heads, p.q_heads) && fits(heads, p.e_heads) &&
        fits(heads, p.c_heads) && pairs / heads >= enough)
      return heads;
  return 1;
}

// The parts of one gradient, and their sum when they are there.
struct Gradient {
  Tensor space;
  TokenParts parts;
  int64_t rows = 0;

  // extras: parts that every block has.
  Gradient(const FastProblem& p, const Tensor& out, int64_t tokens, int of, int width, int heads,
           int extras) {
    if (!out) return;
    const int group = p.heads / of;
    rows = tokens * of;
    parts.of = of, parts.width = width;
    parts.heads_per_part = std::min(heads, group);
    parts.parts = group / parts.heads_per_part * extras;
    space = Tensor::empty({rows, parts.parts, width}, DType::f32, out.device());
    parts.out = ptr<float>(space);
  }
  PartSum sum(const bf16_t* x, const Tensor& out) const { return {parts, rows, x, ptr<bf16>(out)}; }
};

// Room for the factors of pairs, however many tokens, memories and heads there are: as many heads
// at a time as it takes, and where it does not take those of one item, their tiles in strips. (Less
// than a tile of a head is never tried: of 64 tokens with 2^18 memories.)
constexpr int64_t kPairBytes = int64_t(128) << 20;

struct PairSlices {
  int heads_per_item, heads;
  int64_t tiles;  // 0: all
  PairFactors pairs;

  PairSlices(const StateMemoryProblem& problem, const FastProblem& p, bool wanted,
             const Tensor& on) {
    heads_per_item = most_heads_per_item(p, p.tiles * p.heads, 3, on);
    heads = p.heads, tiles = 0;
    if (!wanted) return;
    const int64_t longest =
        problem.layout.is_packed() ? problem.layout.max_length() : problem.time();
    pairs.runs = int(ceil_div(longest, problem.memory_chunk));
    const int64_t room = std::max<int64_t>(1, kPairBytes / (int64_t(512) * pairs.runs));
    if (p.tiles * heads_per_item > room) heads_per_item = most_heads_per_item(p, room, 1, on);
    if (p.tiles * heads_per_item > room)
      heads = heads_per_item, tiles = std::max<int64_t>(1, room / heads);
    else
      while (heads > heads_per_item && (heads % heads_per_item || p.tiles * heads > room)) --heads;
    pairs.half = (tiles ? tiles : p.tiles) * heads * pairs.runs * 64;
  }
};

// dq, de, dc and dΔ.
void vectors_and_memories(const StateMemoryProblem& problem, FastProblem p, const FastUpstream& u,
                          const Tensor& d_o, const StateMemoryGradients& grads, int64_t tokens) {
  PairSlices slices(problem, p, bool(grads.dmemories), d_o);
  const int heads = slices.heads_per_item;
  const Gradient dq(p, grads.dq, tokens, p.q_heads, p.n, heads, 1);
  const Gradient de(p, grads.de, tokens, p.e_heads, p.p, heads, 1);
  const Gradient dc(p, grads.dc, tokens, p.c_heads, p.n, heads, 1);
  Tensor space, dmemories = grads.dmemories;
  if (dmemories) {
    space = Tensor::empty({2 * slices.pairs.half}, DType::f32, d_o.device());
    slices.pairs.factors = ptr<float>(space);
    if (slices.tiles && dmemories.dtype() != DType::f32)
      dmemories = Tensor::empty(dmemories.shape(), DType::f32, dmemories.device());
  }
  for (; p.first_head < p.heads; p.first_head += slices.heads) {
    p.some_heads = std::min(slices.heads, p.heads - p.first_head);
    p.strip_begin = 0;
    do {
      p.strip_end = slices.tiles ? std::min(p.strip_begin + slices.tiles, p.tiles) : 0;
      token_gradients(p, u, heads, dq.parts, de.parts, dc.parts, slices.pairs, d_o);
      if (dmemories) memory_gradients(problem, p, slices.pairs, d_o, dmemories);
      p.strip_begin = p.strip_end;
    } while (p.strip_begin > 0 && p.strip_begin < p.tiles);
  }
  if (grads.dmemories && dmemories.raw() != grads.dmemories.raw()) grads.dmemories.copy_(dmemories);
  const PartSums sums{{dq.sum(p.normalize ? p.q : nullptr, grads.dq),
                       de.sum(p.normalize ? p.e : nullptr, grads.de), dc.sum(nullptr, grads.dc)}};
  const int64_t rows = dq.rows + de.rows + dc.rows;
  if (rows == 0) return;
  sum_kernel<<<blocks_for(rows, d_o), kThreads, 0, stream_of(d_o)>>>(sums, rows, p.eps);
  check_launch();
}

}  // namespace

void fast_bwd(const StateMemoryProblem& problem, const Tensor& r, const Tensor& lse,
              const Tensor& upstream, const StateMemoryGradients& grads) {
  const bool wide = reinterpret_cast<uintptr_t>(upstream.raw()) % 16 == 0;
  const Tensor d_o = wide ? upstream : upstream.clone();
  const FastView view = prepare(problem);
  const FastProblem& p = view.p;
  const int64_t tokens = problem.batch() * problem.time();
  const Tensor through = Tensor::empty({tokens, p.heads}, DType::f32, r.device());
  const FastUpstream u{ptr<bf16>(d_o), ptr<float>(lse), ptr<float>(through)};
  through_kernel<<<blocks_for(tokens, r), kThreads, 0, stream_of(r)>>>(
      ptr<float>(r), u.dy, tokens, p.heads, p.p, ptr<float>(through), p.gate_heads,
      ptr<bf16>(grads.dgate));
  check_launch();
  if (grads.dq || grads.de || grads.dc || grads.dmemories)
    vectors_and_memories(problem, p, u, d_o, grads, tokens);
}

}  // namespace ebb::gpu::state_memory
