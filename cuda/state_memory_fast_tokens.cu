// State-memory attention on tensor cores: the gradients of the tokens' vectors, and the factors
// that those of the memories are made of (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast_keys.cuh"

namespace ebb::gpu::state_memory {
namespace {

// The group that has c and dy: U = dy Δᵀ of a memory, [64,N], which is both what dc sums, dc += w
// gate U, and what V·dy is made of, V·dy = (dy Δ̂ᵀ)·(c/ρ) row by row, with c/ρ rounded as in the
// forward pass: V·dy − R·dy is a small difference where one weight is near 1, of the same V then.
template <int NT>
struct ValueSide {
  using Shared = TokenShared<NT>;
  static constexpr int kAtOnce = Shared::kAtOnce, kSlabs = kAtOnce * NT;
  static_assert(kSlabs == 2);
  using Place = RingPlace<Shared::kStages>;
  using Turn = TurnMemories<Shared::kStages, kAtOnce>;
  float dc[NT][8][4];
  // dy Δ̂ᵀ, then over the units of dy and the memory, U: of 64 columns of N, memory by memory.
  float u[kSlabs][8][4];
  unsigned dy[4][4], dy_after[4][4];              // f16; bf16 of the next head
  float c_unit[2], dy_unit[2], unit[kAtOnce][2];  // of c; of dy; of U
  unsigned turn = 0;

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int t = 0; t < NT; ++t) clear(dc[t]);
  }
  // dy of a head, rows not there zero.
  __device__ __forceinline__ void ask_for(const FastProblem& p, const FastUpstream& up,
                                          const TokenWork& w, int head, const Lane& l) {
    if (head >= w.end) return;
    const bf16_t* at[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      at[r] = w.token[r] < 0 ? nullptr : up.dy + p.row_at(w.token[r], head);
    load_left(dy_after, at[0], at[1], p.p, l);
  }
  __device__ __forceinline__ void turn_to_next_head() {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) dy[k][i] = dy_after[k][i];
    to_half_rows(dy, dy_unit, 7);
    settle_left(dy);
  }
  __device__ __forceinline__ void begin_slab(int k, const Turn& its, const Shared& s) {
    settle(u[k]);
    warpgroup_begin();
    multiply_half_rows<true>(u[k], dy, s.memory[its.of[k / NT].at].tile[k % NT]);
    warpgroup_commit();
  }
  // The dots of the k-th u, which is there, with c/ρ; then it is multiplied with 1/ρ.
  __device__ __forceinline__ void take_dots(int k, const MemoryRecord<NT>& m, float (&sum)[2][2],
                                            const Shared& s, const Lane& l) {
    const int t = k % NT;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 y =
          *reinterpret_cast<const uint4*>(m.inverse_rho + m.rho_pair(8 * t + 4 * i, l.c));
      const unsigned pairs[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint4 z = s.c[4 * t + 2 * i + b][threadIdx.x % kGroup];
        const unsigned c[2][2] = {{z.x, z.y}, {z.z, z.w}};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = 4 * i + 2 * b + h;
          const float2 rho = unpack_half(pairs[2 * b + h]);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 scaled = unpack_half(multiply_halves(c[h][r], pairs[2 * b + h]));
            sum[r][0] += u[k][n][2 * r] * scaled.x;
            sum[r][1] += u[k][n][2 * r + 1] * scaled.y;
            u[k][n][2 * r] *= rho.x, u[k][n][2 * r + 1] *= rho.y;
          }
        }
      }
    }
  }

  // U and V·dy of a turn whose u are under way; its places in the ring are done with.
  __device__ __forceinline__ void make_values(const TokenWork& w, const Turn& its, Shared& s,
                                              const Lane& l) {
    float sum[kAtOnce][2][2] = {};
    warpgroup_wait<1>();
    settle(u[0]);
    take_dots(0, s.memory[its.of[0].at], sum[0], s, l);
    warpgroup_wait<0>();
    settle(u[1]);
    take_dots(1, s.memory[its.of[1 / NT].at], sum[1 / NT], s, l);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unit[j][r] = s.memory[its.of[j].at].value_unit * dy_unit[r];
        const float value = quad_sum(sum[j][r][0] + sum[j][r][1]) * (unit[j][r] * c_unit[r]);
        if (l.c == 0) s.values[turn & 1][j][w.row + 8 * r] = value;
      }
    barrier_arrive<kBothGroups>(kValuesReady + int(turn & 1));
    its.release(s.ring);
  }
  // dc += w gate U of a turn from the index-th memory on, with the weights of the other group; u of
  // the next turn begin (MORE).
  template <bool MORE>
  __device__ __forceinline__ void add_values(const TokenWork& w, int index, const Turn& after,
                                             Shared& s) {
    barrier_wait<kBothGroups>(kWeightsReady + int(turn & 1));
    float factor[kAtOnce][2];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[j][r] = s.weights[turn & 1][j][w.row + 8 * r] * unit[j][r];
#pragma unroll
    for (int k = 0; k < kSlabs; ++k) {
      const int j = k / NT, t = k % NT;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (index + j < w.visible[r])  // else U may be anything
#pragma unroll
          for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; ++i) dc[t][n][i] += factor[j][r] * u[k][n][i];
      if constexpr (MORE) begin_slab(k, after, s);
    }
    ++turn;
  }

  __device__ __forceinline__ void run(const FastProblem& p, const FastUpstream& up,
                                      const TokenWork& w, Place& place, Shared& s, const Lane& l) {
    {
      unsigned c[4 * NT][4];
      load_rows(c, p, p.c, w.token, w.begin, p.c_heads, p.n, l);
      to_half_rows(c, c_unit, 7);
#pragma unroll
      for (int k = 0; k < 4 * NT; ++k)
        s.c[k][threadIdx.x % kGroup] = uint4{c[k][0], c[k][1], c[k][2], c[k][3]};
    }
    ask_for(p, up, w, w.begin, l);
    turn_to_next_head();
    ask_for(p, up, w, w.begin + 1, l);
    TurnPlace<kAtOnce> at{w.begin};
    Turn its;
    its.take(place, w, at.index);
    its.wait_full(s.ring);
#pragma unroll
    for (int k = 0; k < kSlabs; ++k) begin_slab(k, its, s);
    make_values(w, its, s, l);
    for (int left_over = at.turns(w); left_over > 1; --left_over) {
      const int index = at.index;
      if (at.next(w)) {
        turn_to_next_head();
        ask_for(p, up, w, at.head + 1, l);
      }
      its.take(place, w, at.index);
      its.wait_full(s.ring);
      add_values<true>(w, index, its, s);
      make_values(w, its, s, l);
    }
    add_values<false>(w, at.index, its, s);
  }
  __device__ __forceinline__ void close(const FastProblem& p, const TokenWork& w, bool end,
                                        const TokenParts& to_c, const Lane& l) {
    if (!end && !p.opens(w.end, p.c_heads)) return;
    const float one[2] = {1.f, 1.f};
    flush_all(p, w, dc, to_c, w.end - 1, one, l);
  }
};

// The works of all items: f(work, whether it is the last of its item).
template <class F>
__device__ __forceinline__ void each_work(const FastProblem& p, int heads_per_item, F&& f) {
  TokenWork w;
  w.row = 16 * (int(threadIdx.x) >> 5 & 3) + (int(threadIdx.x) & 31) / 4;
  each_token_item<1>(p, heads_per_item, [&](const TokenTile& tile, int first, int all) {
    const int last = first + heads_per_item;
    w.open(p, tile, all);
    for (w.begin = first; w.begin < last; w.begin = w.end) {
      for (w.end = w.begin + 1; w.end < last && !p.opens_any(w.end); ++w.end) {
      }
      f(w, w.end == last);
    }
  });
}

// Item (64 tokens, block of heads): one warp fetches the memories that any of the tokens sees, two
// groups of four warps read them, each with vectors of its own. Sums over the heads of an item stay
// in registers; what they come to is one part of a gradient.
template <int NT>
__global__ void __launch_bounds__(kFedThreads, 1)
    token_kernel(FastProblem p, FastUpstream u, int heads_per_item, TokenParts dq, TokenParts de,
                 TokenParts dc, PairFactors pairs) {
  using Shared = TokenShared<NT>;
  auto& s = swizzled_shared<Shared>();
  const int warp = int(threadIdx.x) >> 5;
  if (threadIdx.x == 0) s.ring.init();
  __syncthreads();
  if (warp >= kTokenReaders) {
    fetcher_registers();
    if (warp > kTokenReaders) return;
    fetch_memories<1>(p, heads_per_item, s.ring, [&](int place, int64_t memory, int head) {
      fetch_runs<1>({{&s.memory[place], &p.record<NT>(memory, head), MemoryRecord<NT>::kStreamed}},
                    s.ring.full[place]);
    });
    return;
  }
  multiplier_registers();
  const Lane l;
  RingPlace<Shared::kStages> place;
  if (warp < 4) {
    KeySide<NT> side;
    side.begin();
    each_work(p, heads_per_item, [&](const TokenWork& w, bool end) {
      if (w.memories > 0) side.run(p, u, w, pairs, place, s, l);
      side.close(p, w, end, dq, de, l);
    });
  } else {
    ValueSide<NT> side;
    side.begin();
    each_work(p, heads_per_item, [&](const TokenWork& w, bool end) {
      if (w.memories > 0) side.run(p, u, w, place, s, l);
      side.close(p, w, end, dc, l);
    });
  }
}

}  // namespace

void token_gradients(const FastProblem& p, const FastUpstream& u, int heads_per_item,
                     const TokenParts& dq, const TokenParts& de, const TokenParts& dc,
                     const PairFactors& pairs, const Tensor& on) {
  visit_tiles(p.n, [&]<int NT>() {
    launch_persistent<TokenShared<NT>>(token_kernel<NT>, kFedThreads,
                                       token_items<1>(p, heads_per_item), on, p, u, heads_per_item,
                                       dq, de, dc, pairs);
  });
}

}  // namespace ebb::gpu::state_memory
