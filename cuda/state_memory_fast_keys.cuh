// The gradients of the tokens' vectors, the group of warps that has the keys: dq, dê and the
// factors of pairs (state_memory_fast_tokens.cu).
#pragma once
#include "cuda/state_memory_fast_tokens.cuh"

namespace ebb::gpu::state_memory {

// Left operands of sums over memories are f16 rows e, below 2^8, times one factor per row and
// memory. The factors are brought below 2^7 by a power of two per row, the lift, which falls when a
// factor asks for it; what the row has summed falls with it.
inline constexpr float kLargestFactor = 128.f, kFirstLift = 1.2089258196146292e24f;  // 2^80

// The group that has q and e: dq and dê of a turn's memories when their V·dy are there, then logits
// and weights of the next turn, which the other group waits for.
template <int NT>
struct KeySide {
  using Shared = TokenShared<NT>;
  static constexpr int kAtOnce = Shared::kAtOnce;
  using Place = RingPlace<Shared::kStages>;
  using Turn = TurnMemories<Shared::kStages, kAtOnce>;
  using At = TurnPlace<kAtOnce>;
  float dq[NT][8][4], de[8][4];  // the first times its rows' lifts
  float keys[kAtOnce][8][4];     // K'
  unsigned e[4][4];              // f16 rows
  float lift[2], weight[kAtOnce][2];
  float lse[2], through[2], gate[2];  // of the head after the next
  unsigned turn = 0;

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

  // K' of a turn, under way when this returns.
  __device__ __forceinline__ void begin_keys(const Turn& its, const Shared& s) {
    const int warp = int(threadIdx.x) >> 5 & 3;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) settle(keys[j]);
    warpgroup_begin();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const MemoryRecord<NT>& m = s.memory[its.of[j].at];
      multiply_half_tiles<true, Inner::last, Inner::first>(keys[j], s.q[0], m.tile[0], warp);
#pragma unroll
      for (int t = 1; t < NT; ++t)
        multiply_half_tiles<false, Inner::last, Inner::first>(keys[j], s.q[t], m.tile[t], warp);
    }
    warpgroup_commit();
  }
  // w gate of a turn, number `number`, whose K' are there, for the other group too.
  __device__ __forceinline__ void make_weights(const TokenWork& w, const At& at, const Turn& its,
                                               unsigned number, Shared& s, const Lane& l) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) settle(keys[j]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum[kAtOnce][2] = {};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = unpack_half(e[n / 2][2 * (n & 1) + r]);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const float(&x)[4] = keys[j][n];
          sum[j][0] += x[2 * r] * y.x, sum[j][1] += x[2 * r + 1] * y.y;
        }
      }
      const float4 own = s.numbers[at.head & 1][w.row + 8 * r];
      const float unit = s.units[w.row + 8 * r].x;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float dot = quad_sum(sum[j][0] + sum[j][1]);
        const float key_unit = s.memory[its.of[j].at].key_unit;
        weight[j][r] = at.index + j < w.visible[r]
                           ? own.z * exp2_approximately(dot * key_unit * unit - own.x)
                           : 0.f;
        if (l.c == 0) s.weights[number & 1][j][w.row + 8 * r] = weight[j][r];
      }
    }
    barrier_arrive<kBothGroups>(kWeightsReady + int(number & 1));
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

  // dℓ of the j-th memory of a turn, from the other group's V·dy, and dê += dℓ K'. factor: of e in
  // what dq is to sum; what the gradients of the memories need of the pair is stored.
  __device__ __forceinline__ void take_values(const FastProblem& p, const TokenWork& w,
                                              const At& at, const Turn& its, int j,
                                              float (&factor)[2], float* pair, const Shared& s,
                                              const Lane& l) {
    const float key_unit = s.memory[its.of[j].at].key_unit;
    float store = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 unit = s.units[w.row + 8 * r];
      const float through_row = s.numbers[at.head & 1][w.row + 8 * r].y;
      const float v = s.values[turn & 1][j][w.row + 8 * r];
      const bool sees = at.index + j < w.visible[r];
      // A token that sees one memory gives it weight 1 whatever.
      const float change = sees && w.visible[r] > 1 ? weight[j][r] * (v - through_row) : 0.f;
      if (l.c == r) store = weight[j][r];
      if (l.c == 2 + r) store = change * unit.w;
      const float dlogit = p.scale * key_unit * change;
      if (sees) {  // else K' may be anything
        const float f = dlogit * unit.y;
#pragma unroll
        for (int n = 0; n < 8; ++n)
          de[n][2 * r] += f * keys[j][n][2 * r], de[n][2 * r + 1] += f * keys[j][n][2 * r + 1];
      }
      factor[r] = dlogit * unit.z;
    }
    if (pair && j < its.count) pair[64 * j] = store;
  }
  // dq += (dℓ e) Δ̂ᵀ of a turn, under way when this returns.
  __device__ __forceinline__ void begin_dq(const float (&factor)[kAtOnce][2], const Turn& its,
                                           unsigned (&left)[kAtOnce][4][4], const Shared& s) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      unsigned f[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) f[r] = pack_half(factor[j][r] * lift[r], factor[j][r] * lift[r]);
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) left[j][k][i] = multiply_halves(e[k][i], f[i & 1]);
      settle_left(left[j]);
    }
#pragma unroll
    for (int t = 0; t < NT; ++t) settle(dq[t]);
    warpgroup_begin();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int t = 0; t < NT; ++t)
        multiply_half_rows(dq[t], left[j], s.memory[its.of[j].at].tile[t]);
    warpgroup_commit();
  }
  // One turn, whose K' and weights are there: 1 dℓ and dê; 2 K' of the next turn (MORE) begin in
  // their place; 3 dq, beside it the weights of the next turn.
  template <bool MORE>
  __device__ __forceinline__ void take_in(const FastProblem& p, const TokenWork& w, const At& at,
                                          const At& next, const Turn& its, const Turn& after,
                                          float* pair, Shared& s, const Lane& l) {
    float factor[kAtOnce][2];
    bool above = false;
    barrier_wait<kBothGroups>(kValuesReady + int(turn & 1));  // 1
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      take_values(p, w, at, its, j, factor[j], pair, s, l);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        above = above || !(fabsf(factor[j][r]) * lift[r] <= kLargestFactor);
    }
    if (__any_sync(0xffffffffu, above)) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) lower(factor[j][r], r);
    }
    if constexpr (MORE) {  // 2
      after.wait_full(s.ring);
      begin_keys(after, s);
    }
    unsigned left[kAtOnce][4][4];
    begin_dq(factor, its, left, s);  // 3
    if constexpr (MORE) {
      warpgroup_wait<1>();
      make_weights(w, next, after, turn + 1, s, l);
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int t = 0; t < NT; ++t) settle(dq[t]);
    its.release(s.ring);
    ++turn;
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
    At at{w.begin}, next{w.begin};
    Turn its, after;
    float* pair = nullptr;
    const auto enter = [&] {
      if (pairs.factors)
        pair = pairs.of(p, w.tile, at.head) + (l.c < 2 ? 0 : pairs.half) + w.row + 8 * (l.c & 1);
    };
    enter();
    its.take(place, w, 0);
    its.wait_full(s.ring);
    begin_keys(its, s);
    warpgroup_wait<0>();
    make_weights(w, at, its, turn, s, l);
    next.next(w);
    const auto step = [&]<bool MORE>() {
      if constexpr (MORE) after.take(place, w, next.index);
      take_in<MORE>(p, w, at, next, its, after, pair, s, l);
      its = after;
      next.next(w);
      if (pair) pair += 64 * kAtOnce;
      if (!at.next(w) || at.head >= w.end) return;
      enter();
      put_numbers(w, at.head + 1, s, l);
      load_numbers(p, u, w, at.head + 2, l);
    };
    int left_over = At::turns(w);
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

}  // namespace ebb::gpu::state_memory
