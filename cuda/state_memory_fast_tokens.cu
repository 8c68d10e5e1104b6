// State-memory attention on tensor cores: the gradients of the tokens' vectors, and the factors
// that those of the memories are made of (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kReaders = 8, kGroup = 128, kBothGroups = 256;
// Barriers: of a group, and of what one group has made for the other, two turns each.
enum BarrierId { kKeys = 1, kWeightsReady = 2, kValuesReady = 4 };

template <int NT>
struct TokenShared {
  static constexpr int kStages = NT == 1 ? 12 : 8;
  MemoryRecord<NT> memory[kStages];
  SwizzledTile q[NT];       // f16 rows
  uint4 c[4 * NT][kGroup];  // bf16 rows, each thread's own part, as left operands hold it
  // Of every token: logit_unit (base 2), the units of its f16 rows of q and e times 1/rms, and
  // scale times 1/rms of q and of e; of two heads: lse (base 2), R·dy, gate.
  float4 units[64], numbers[2][64];
  float weights[2][64], values[2][64];  // w gate and V·dy of two memories
  Ring<kStages, kReaders> ring;
};

// Tokens of one item, and heads that share all vectors: what both groups go through, memory by
// memory, head by head.
struct TokenWork {
  int64_t first = 0, tile = 0;  // of tokens; among tiles
  int64_t token[2] = {-1, -1};  // of this lane's rows; −1: not there
  int visible[2] = {};
  int row = 0;                           // this lane's first row
  int memories = 0, begin = 0, end = 0;  // heads

  __device__ __forceinline__ void open(const FastProblem& p, const TokenTile& t, int seen) {
    first = t.first, tile = t.number, memories = seen;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + 8 * r;
      const bool there = at < t.rows;
      token[r] = there ? t.first + at : -1;
      visible[r] = there ? t.visible(at, p.run) : 0;
    }
  }
  __device__ __forceinline__ int units() const { return (end - begin) * memories; }
};
// Where one side stands: the index-th memory, of a head.
struct UnitPlace {
  int head, index = 0;

  // Whether it is at another head then.
  __device__ __forceinline__ bool next(const TokenWork& w) {
    if (++index < w.memories) return false;
    index = 0, ++head;
    return true;
  }
};

__device__ __forceinline__ void clear(float (&x)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = 0.f;
}
// What heads of one group have added, to its place among the parts.
__device__ __forceinline__ void flush(const FastProblem& p, const TokenWork& w,
                                      const float (&x)[8][4], const TokenParts& to, int head,
                                      int column0, int columns, const float (&unit)[2],
                                      const Lane& l) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (w.token[r] < 0 || !to.out) continue;
    const int group = p.heads / to.of;
    const int64_t place = head % group / to.heads_per_part;
    float* at =
        to.out + ((w.token[r] * to.of + head / group) * to.parts + place) * to.width + column0;
#pragma unroll
    for (int n = 0; n < 8; ++n)
      if (8 * n + 2 * l.c < columns)
        *reinterpret_cast<float2*>(at + 8 * n + 2 * l.c) =
            float2{x[n][2 * r] * unit[r], x[n][2 * r + 1] * unit[r]};
  }
}
template <int NT>
__device__ __forceinline__ void flush_all(const FastProblem& p, const TokenWork& w,
                                          float (&x)[NT][8][4], const TokenParts& to, int head,
                                          const float (&unit)[2], const Lane& l) {
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    flush(p, w, x[t], to, head, 64 * t, min(64, p.n - 64 * t), unit, l);
    clear(x[t]);
  }
}

// Left operands of sums over memories are f16 rows e, below 2^8, times one factor per row and
// memory. The factors are brought below 2^7 by a power of two per row, the lift, which falls when a
// factor asks for it; what the row has summed falls with it.
constexpr float kLargestFactor = 128.f, kFirstLift = 1.2089258196146292e24f;  // 2^80

// The group that has q and e: dq and dê of a memory when its V·dy is there, then logits and weights
// of the next, which the other group waits for.
template <int NT>
struct KeySide {
  using Shared = TokenShared<NT>;
  using Place = RingPlace<Shared::kStages>;
  float dq[NT][8][4], de[8][4];  // the first times its rows' lifts
  float keys[8][4];              // K'
  unsigned e[4][4];              // f16 rows
  float lift[2], weight[2];
  float lse[2], through[2], gate[2];  // of the head after the next
  unsigned turn = 0;                  // of memories

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int t = 0; t < NT; ++t) clear(dq[t]);
    clear(de);
    lift[0] = lift[1] = kFirstLift;
  }
  __device__ __forceinline__ void load_numbers(const FastProblem& p, const FastUpstream& u,
                                               const TokenWork& w, int head, const Lane& l) {
    if (l.c != 0 || head >= w.end) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t t = w.token[r] < 0 ? w.first : w.token[r];
      lse[r] = u.lse[t * p.heads + head];
      through[r] = u.through[t * p.heads + head];
      gate[r] = p.gate_of(t, head);
    }
  }
  __device__ __forceinline__ void put_numbers(const TokenWork& w, int head, Shared& s,
                                              const Lane& l) const {
    __syncwarp();
    if (l.c == 0 && head < w.end)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        s.numbers[head & 1][w.row + 8 * r] = float4{kLog2e * lse[r], through[r], gate[r], 0.f};
    __syncwarp();
  }
  // A left operand as the rows of tiles.
  __device__ __forceinline__ static void put(SwizzledTile (&s_to)[NT],
                                             const unsigned (&x)[4 * NT][4], int row,
                                             const Lane& l) {
#pragma unroll
    for (int k = 0; k < 4 * NT; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<unsigned*>(
            s_to[k / 4].at(row + 8 * (i & 1), 16 * (k % 4) + 8 * (i >> 1)) + 2 * l.c) = x[k][i];
  }
  __device__ __forceinline__ void load_vectors(const FastProblem& p, const TokenWork& w, Shared& s,
                                               const Lane& l) {
    float q_unit[2], e_unit[2], inverse_q[2], inverse_e[2];
    barrier_wait<kGroup>(kKeys);  // what was there is done with
    unsigned x[4 * NT][4];
    load_rows(x, p, p.q, w.token, w.begin, p.q_heads, p.n, l);
    load_rows(e, p, p.e, w.token, w.begin, p.e_heads, p.p, l);
    inverse_rms(inverse_q, x, p.n, p);
    to_half_rows(x, q_unit, 7);
    put(s.q, x, w.row, l);
    inverse_rms(inverse_e, e, p.p, p);
    to_half_rows(e, e_unit, 7);
    if (l.c == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float q = q_unit[r] * inverse_q[r], of_e = e_unit[r] * inverse_e[r];
        s.units[w.row + 8 * r] =
            float4{kLog2e * p.scale * q * of_e, q, of_e, p.scale * inverse_q[r] * inverse_e[r]};
      }
    publish_tiles();
    barrier_wait<kGroup>(kKeys);
  }

  // K' of a memory, under way when this returns.
  __device__ __forceinline__ void begin_keys(float (&x)[8][4], const MemoryRecord<NT>& m,
                                             const Shared& s) const {
    const int warp = int(threadIdx.x) >> 5 & 3;
    warpgroup_begin();
    multiply_half_tiles<true, Inner::last, Inner::first>(x, s.q[0], m.tile[0], warp);
#pragma unroll
    for (int t = 1; t < NT; ++t)
      multiply_half_tiles<false, Inner::last, Inner::first>(x, s.q[t], m.tile[t], warp);
    warpgroup_commit();
  }
  // w gate of a memory whose K' is there, for the other group too.
  __device__ __forceinline__ void make_weights(const float (&x)[8][4], const TokenWork& w,
                                               const UnitPlace& at, float key_unit, unsigned its,
                                               Shared& s, const Lane& l) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = unpack_half(e[n / 2][2 * (n & 1) + r]);
        sum[0] += x[n][2 * r] * y.x, sum[1] += x[n][2 * r + 1] * y.y;
      }
      const float dot = quad_sum(sum[0] + sum[1]);
      const float4 own = s.numbers[at.head & 1][w.row + 8 * r];
      const float unit = s.units[w.row + 8 * r].x;
      weight[r] =
          at.index < w.visible[r] ? own.z * exp2_approximately(dot * key_unit * unit - own.x) : 0.f;
      if (l.c == 0) s.weights[its & 1][w.row + 8 * r] = weight[r];
    }
    barrier_arrive<kBothGroups>(kWeightsReady + int(its & 1));
  }
  // A row's factor, and its lift where that is too large for it.
  __device__ __forceinline__ void lower(float factor, int r) {
    if (fabsf(factor) * lift[r] <= kLargestFactor) return;
    const float to = power_to(fabsf(factor), 3), ratio = to * inverse_power(lift[r]);
    lift[r] = to;
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int n = 0; n < 8; ++n) dq[t][n][2 * r] *= ratio, dq[t][n][2 * r + 1] *= ratio;
  }

  // One memory, whose K' and weights are there: 1 dℓ, from the other group's V·dy, and dê += dℓ K';
  // 2 K' of the next memory (MORE) begins in its place; 3 dq += (dℓ e) Δ̂ᵀ, beside it the weights
  // of the next memory.
  template <bool MORE>
  __device__ __forceinline__ void take_in(const FastProblem& p, const TokenWork& w,
                                          const UnitPlace& at, const UnitPlace& next, Place& place,
                                          float* pair, Shared& s, const Lane& l) {
    const MemoryRecord<NT>& now = s.memory[place.at];
    const float key_unit = now.key_unit;
    float factor[2], store = 0.f;
    bool above = false;
    Place ahead = place;
    ahead.next();
    barrier_wait<kBothGroups>(kValuesReady + int(turn & 1));  // 1
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 unit = s.units[w.row + 8 * r];
      const float through_row = s.numbers[at.head & 1][w.row + 8 * r].y;
      const float v = s.values[turn & 1][w.row + 8 * r];
      const bool sees = at.index < w.visible[r];
      // A token that sees one memory gives it weight 1 whatever.
      const float change = sees && w.visible[r] > 1 ? weight[r] * (v - through_row) : 0.f;
      if (l.c == r) store = weight[r];
      if (l.c == 2 + r) store = change * unit.w;
      const float dlogit = p.scale * key_unit * change;
      if (sees) {  // else K' may be anything
        const float f = dlogit * unit.y;
#pragma unroll
        for (int n = 0; n < 8; ++n)
          de[n][2 * r] += f * keys[n][2 * r], de[n][2 * r + 1] += f * keys[n][2 * r + 1];
      }
      factor[r] = dlogit * unit.z;
      above = above || !(fabsf(factor[r]) * lift[r] <= kLargestFactor);
    }
    if (pair) *pair = store;
    if (__any_sync(0xffffffffu, above)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) lower(factor[r], r);
    }
    if constexpr (MORE) {  // 2
      ahead.wait_full(s.ring);
      settle(keys);
      begin_keys(keys, s.memory[ahead.at], s);
    }
    unsigned left[4][4], f[2];  // 3
#pragma unroll
    for (int r = 0; r < 2; ++r) f[r] = pack_half(factor[r] * lift[r], factor[r] * lift[r]);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) left[k][i] = multiply_halves(e[k][i], f[i & 1]);
    settle_left(left);
#pragma unroll
    for (int t = 0; t < NT; ++t) settle(dq[t]);
    warpgroup_begin();
#pragma unroll
    for (int t = 0; t < NT; ++t) multiply_half_rows(dq[t], left, now.tile[t]);
    warpgroup_commit();
    if constexpr (MORE) {
      warpgroup_wait<1>();
      settle(keys);
      make_weights(keys, w, next, s.memory[ahead.at].key_unit, turn + 1, s, l);
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int t = 0; t < NT; ++t) settle(dq[t]);
    place.release(s.ring);
    ++turn;
    place = ahead;
  }

  // All memories of the work's heads.
  __device__ __forceinline__ void run(const FastProblem& p, const FastUpstream& u,
                                      const TokenWork& w, const PairFactors& pairs, Place& place,
                                      Shared& s, const Lane& l) {
    load_vectors(p, w, s, l);
    for (int head = w.begin; head < w.begin + 2; ++head) {
      load_numbers(p, u, w, head, l);
      put_numbers(w, head, s, l);
    }
    load_numbers(p, u, w, w.begin + 2, l);
    UnitPlace at{w.begin}, next{w.begin};
    float* pair = nullptr;
    const auto enter = [&] {
      if (pairs.factors)
        pair = pairs.of(p, w.tile, at.head) + (l.c < 2 ? 0 : pairs.half) + w.row + 8 * (l.c & 1);
    };
    enter();
    place.wait_full(s.ring);
    begin_keys(keys, s.memory[place.at], s);
    warpgroup_wait<0>();
    settle(keys);
    make_weights(keys, w, at, s.memory[place.at].key_unit, turn, s, l);
    next.next(w);
    const auto step = [&]<bool MORE>() {
      take_in<MORE>(p, w, at, next, place, pair, s, l);
      next.next(w);
      if (pair) pair += 64;
      if (!at.next(w) || at.head >= w.end) return;
      enter();
      put_numbers(w, at.head + 1, s, l);
      load_numbers(p, u, w, at.head + 2, l);
    };
    int left_over = w.units();
    for (; left_over > 1; --left_over) step.template operator()<true>();
    step.template operator()<false>();
  }

  // After the heads of a work: of every gradient, if the next head (or item) adds to another.
  __device__ __forceinline__ void close(const FastProblem& p, const TokenWork& w, bool end,
                                        const TokenParts& to_q, const TokenParts& to_e,
                                        const Lane& l) {
    if (end || p.opens(w.end, p.q_heads)) {
      const float unit[2] = {inverse_power(lift[0]), inverse_power(lift[1])};
      flush_all(p, w, dq, to_q, w.end - 1, unit, l);
      lift[0] = lift[1] = kFirstLift;
    }
    if (end || p.opens(w.end, p.e_heads)) {
      const float one[2] = {1.f, 1.f};
      flush(p, w, de, to_e, w.end - 1, 0, p.p, one, l);
      clear(de);
    }
  }
};

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
  if (warp >= kReaders) {
    fetcher_registers();
    if (warp > kReaders) return;
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
