// State-memory attention on tensor cores: the tokens as the gradients of the memories read them
// (cuda/state_memory_fast_memories.cuh).
#include "cuda/state_memory_fast_memories.cuh"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kThreads = 256;

// A block per 64 tokens and head of x [tokens,of,width]: eight lanes per row.
template <int NT, bool HALF>
__global__ void __launch_bounds__(kThreads)
    vector_kernel(FastProblem p, const bf16_t* x, int of, int width, bool normalize,
                  VectorRecord<NT>* records) {
  const TokenTiles<1> tiles(p);
  const int chunk = int(threadIdx.x) % 8;
  for (int64_t item = blockIdx.x; item < tiles.count * of; item += gridDim.x) {
    const TokenTile tile = tiles.at(p, item / of);
    VectorRecord<NT>& to = records[tile.number * of + item % of];
    for (int r = int(threadIdx.x) / 8; r < 64; r += kThreads / 8) {
      float v[NT][8], largest = 0, square = 0;
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const int column = 64 * t + 8 * chunk;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[t][i] = 0.f;
        if (r < tile.rows && column < width) {
          const bf16_t* from = x + ((tile.first + r) * of + item % of) * width + column;
#pragma unroll
          for (int i = 0; i < 8; i += 2) {
            const unsigned pair = *reinterpret_cast<const unsigned*>(from + i);
            v[t][i] = delta::low_half(pair), v[t][i + 1] = delta::high_half(pair);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
          largest = fmaxf(largest, fabsf(v[t][i])), square += v[t][i] * v[t][i];
      }
#pragma unroll
      for (int o = 1; o < 8; o *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
        square += __shfl_xor_sync(0xffffffffu, square, o);
      }
      const float power = HALF ? power_to(largest, 7) : 1.f;
      const auto pack = [&](float low, float high) {
        return HALF ? pack_half(low * power, high * power) : pack_bf16(low, high);
      };
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const uint4 w{pack(v[t][0], v[t][1]), pack(v[t][2], v[t][3]), pack(v[t][4], v[t][5]),
                      pack(v[t][6], v[t][7])};
        store_word(reinterpret_cast<uint4*>(to.tile[t].at(r, 8 * chunk)), w);
      }
      if (chunk == 0) {
        const float inverse = normalize ? 1.f / sqrtf(square / float(width) + p.eps) : 1.f;
        to.factor[r] = inverse_power(power) * inverse;
        to.largest[r] = largest;
      }
    }
  }
}

// A thread per token of a tile and head. With c = c' factor, |c'| < 2^8, |dy| <= √P size and
// |Δ|₂ = D: |V·dy| <= 2^8 √N factor D √P size. The bounds leave out 2^8 √N √P D and the scale.
template <int NT>
__global__ void __launch_bounds__(kThreads)
    number_kernel(FastProblem p, FastUpstream u, const VectorRecord<NT>* q,
                  const VectorRecord<NT>* c, const VectorRecord<1>* e, HeadNumbers* records) {
  const TokenTiles<1> tiles(p);
  const int64_t count = tiles.count * p.heads * 64;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const int head = int(i / 64 % p.heads), r = int(i % 64);
    const TokenTile tile = tiles.at(p, i / 64 / p.heads);
    HeadNumbers& to = records[tile.number * p.heads + head];
    const bool there = r < tile.rows;
    const int64_t t = tile.first + r, at = t * p.heads + head;
    const auto row = [&](const auto* of_all, int of) -> const auto& {
      return of_all[tile.number * of + p.shared_head(head, of)];
    };
    const float gate = there ? p.gate_of(t, head) : 0.f;
    const float value = there ? fabsf(gate) * row(c, p.c_heads).factor[r] * u.size[at] : 0.f;
    const auto& e_row = row(e, p.e_heads);
    const float key = value * row(q, p.q_heads).factor[r] * e_row.factor[r] * e_row.largest[r];
    to.lse[r] = there ? kLog2e * u.lse[at] : 0.f;
    to.through[r] = there ? u.through[at] : 0.f;
    to.gate[r] = gate;
    const float bounds[2] = {warp_max(key), warp_max(value)};
    if (r % 32 == 0) to.bounds[0][r / 32] = bounds[0], to.bounds[1][r / 32] = bounds[1];
  }
}

template <int NT, bool HALF>
Tensor vector_records(const FastProblem& p, const Tensor& x, bool normalize) {
  const int of = int(x.size(2)), width = int(x.size(3));
  const Tensor records =
      Tensor::empty({p.tiles * of, int64_t(sizeof(VectorRecord<NT>))}, DType::u8, x.device());
  const int64_t blocks = std::min<int64_t>(p.tiles * of, int64_t(1) << 30);
  vector_kernel<NT, HALF><<<unsigned(blocks), kThreads, 0, stream_of(x)>>>(
      p, ptr<bf16>(x), of, width, normalize, static_cast<VectorRecord<NT>*>(records.raw()));
  check_launch();
  return records;
}

}  // namespace

TokenRecords token_records(const StateMemoryProblem& problem, const FastProblem& p,
                           const FastUpstream& u) {
  TokenRecords r;
  r.numbers = Tensor::empty({p.tiles * p.heads, int64_t(sizeof(HeadNumbers))}, DType::u8,
                            problem.q.device());
  r.e = vector_records<1, false>(p, problem.e, p.normalize);
  visit_tiles(p.n, [&]<int NT>() {
    r.q = vector_records<NT, true>(p, problem.q, p.normalize);
    r.c = vector_records<NT, true>(p, problem.c, false);
    const int64_t blocks =
        std::min<int64_t>(ceil_div(p.tiles * p.heads * 64, kThreads), int64_t(1) << 30);
    const auto at = [](const Tensor& t) { return static_cast<const VectorRecord<NT>*>(t.raw()); };
    number_kernel<NT><<<unsigned(blocks), kThreads, 0, stream_of(r.numbers)>>>(
        p, u, at(r.q), at(r.c), static_cast<const VectorRecord<1>*>(r.e.raw()),
        static_cast<HeadNumbers*>(r.numbers.raw()));
    check_launch();
  });
  return r;
}

}  // namespace ebb::gpu::state_memory
