// State-memory attention on tensor cores: the gradients of the tokens' vectors, and the factors
// that those of the memories are made of (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast_keys.cuh"

namespace ebb::gpu::state_memory {
namespace {

// The group that has c and dy: U = dy Δᵀ of a memory, [64,N], which is both what dc sums, dc += w
// gate U, and what V·dy is made of, V·dy = U·c row by row.
template <int NT>
struct ValueSide {
  using Shared = TokenShared<NT>;
  using Place = RingPlace<Shared::kStages>;
  float dc[NT][8][4];
  float u[NT][8][4];                  // dy Δ̂ᵀ, then over the units of dy and the memory, U
  unsigned dy[4][4], dy_after[4][4];  // f16; bf16 of the next head
  float dy_unit[2], unit[2];          // of dy; of U
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
  __device__ __forceinline__ void begin_slab(int t, const MemoryRecord<NT>& m) {
    settle(u[t]);
    warpgroup_begin();
    multiply_half_rows<true>(u[t], dy, m.tile[t]);
    warpgroup_commit();
  }
  // u of 64 columns of N, which is there, times 1/ρ; its dots with c.
  __device__ __forceinline__ void take_dots(int t, const MemoryRecord<NT>& m, float (&sum)[2][2],
                                            const Shared& s, const Lane& l) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 y =
          *reinterpret_cast<const uint4*>(m.inverse_rho + m.rho_pair(8 * t + 4 * i, l.c));
      const unsigned pairs[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 z = s.c[4 * t + 2 * i + k][threadIdx.x % kGroup];
        const unsigned c[2][2] = {{z.x, z.y}, {z.z, z.w}};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = 4 * i + 2 * k + h;
          const float2 rho = unpack_half(pairs[2 * k + h]);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            u[t][n][2 * r] *= rho.x, u[t][n][2 * r + 1] *= rho.y;
            sum[r][0] += u[t][n][2 * r] * delta::low_half(c[h][r]);
            sum[r][1] += u[t][n][2 * r + 1] * delta::high_half(c[h][r]);
          }
        }
      }
    }
  }

  // U and V·dy of a memory whose u is under way; its place in the ring is done with.
  __device__ __forceinline__ void make_values(const TokenWork& w, Place& place, Shared& s,
                                              const Lane& l) {
    const MemoryRecord<NT>& now = s.memory[place.at];
    float sum[2][2] = {};
    if constexpr (NT == 2) {
      warpgroup_wait<1>();
      settle(u[0]);
      take_dots(0, now, sum, s, l);
    }
    warpgroup_wait<0>();
    settle(u[NT - 1]);
    take_dots(NT - 1, now, sum, s, l);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unit[r] = now.value_unit * dy_unit[r];
      const float value = quad_sum(sum[r][0] + sum[r][1]) * unit[r];
      if (l.c == 0) s.values[turn & 1][w.row + 8 * r] = value;
    }
    barrier_arrive<kBothGroups>(kValuesReady + int(turn & 1));
    place.release(s.ring);
    place.next();
  }
  // dc += w gate U, with the weights of the other group; u of the next memory begins (MORE).
  template <bool MORE>
  __device__ __forceinline__ void add_values(const TokenWork& w, int index, const Place& place,
                                             Shared& s) {
    barrier_wait<kBothGroups>(kWeightsReady + int(turn & 1));
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = s.weights[turn & 1][w.row + 8 * r] * unit[r];
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (index < w.visible[r])  // else U may be anything
#pragma unroll
          for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; ++i) dc[t][n][i] += factor[r] * u[t][n][i];
      if constexpr (MORE) begin_slab(t, s.memory[place.at]);
    }
    ++turn;
  }

  __device__ __forceinline__ void run(const FastProblem& p, const FastUpstream& up,
                                      const TokenWork& w, Place& place, Shared& s, const Lane& l) {
    {
      unsigned c[4 * NT][4];
      load_rows(c, p, p.c, w.token, w.begin, p.c_heads, p.n, l);
#pragma unroll
      for (int k = 0; k < 4 * NT; ++k)
        s.c[k][threadIdx.x % kGroup] = uint4{c[k][0], c[k][1], c[k][2], c[k][3]};
    }
    ask_for(p, up, w, w.begin, l);
    turn_to_next_head();
    ask_for(p, up, w, w.begin + 1, l);
    UnitPlace at{w.begin};
    place.wait_full(s.ring);
#pragma unroll
    for (int t = 0; t < NT; ++t) begin_slab(t, s.memory[place.at]);
    make_values(w, place, s, l);
    for (int left_over = w.units(); left_over > 1; --left_over) {
      const int index = at.index;
      if (at.next(w)) {
        turn_to_next_head();
        ask_for(p, up, w, at.head + 1, l);
      }
      place.wait_full(s.ring);
      add_values<true>(w, index, place, s);
      make_values(w, place, s, l);
    }
    add_values<false>(w, at.index, place, s);
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
