// State-memory attention on tensor cores: the gradients of the tokens' vectors
// (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kReaders = 4 * kTokenParts, kMultiplyThreads = 32 * kReaders;

template <int NT>
struct TokenShared {
  static constexpr int kStages = NT == 1 ? 6 : 3;
  struct Stage {
    MemoryRecord<NT> memory;
    ValueRecord<NT> values;
  };
  Stage stage[kStages];
  SwizzledTile q[kTokenParts][NT], c[kTokenParts][NT];  // f16 rows
  // Each thread's own part of the f16 rows of e and dy, as left operands hold it.
  uint4 e[4][kMultiplyThreads], dy[4][kMultiplyThreads];
  // Of every token: logit_unit (base 2), and the units of its f16 rows of q, e, c, the first two
  // times 1/rms; of the head: lse (base 2), R·dy, gate, the unit of its row of dy.
  float4 units[64 * kTokenParts], numbers[64 * kTokenParts];
  float inverse[64 * kTokenParts];  // scale times 1/rms of q and of e
  Ring<kStages, kReaders> ring;
};

// Left operands of sums over memories are f16 rows e (or dy), below 2^8, times one factor per row
// and memory. The factors are brought below 2^7 by a power of two per row, the lift, which falls
// when a factor asks for it; what the row has summed falls with it.
constexpr float kLargestFactor = 128.f, kFirstLift = 1.2089258196146292e24f;  // 2^80

// 64 tokens: a warp has rows 16·warp + g and + g + 8 of them.
template <int NT>
struct TokenGradients {
  using Shared = TokenShared<NT>;
  using Stage = typename Shared::Stage;
  float dq[NT][8][4], dc[NT][8][4], de[8][4];  // the first two times their rows' lifts
  float q_lift[2], c_lift[2];
  int64_t token[2];  // −1: not there
  int visible[2];
  int part, row;  // which 64 tokens; this lane's first row among all
  // Where this lane's factor of the head's next memory goes: of its row (c even) or the one eight
  // on; c below 2: w gate, else dℓ'.
  float* pair;

  __device__ __forceinline__ static void clear(float (&x)[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = 0.f;
  }
  __device__ __forceinline__ static void clear(float (&x)[NT][8][4], float (&lift)[2]) {
#pragma unroll
    for (int t = 0; t < NT; ++t) clear(x[t]);
    lift[0] = lift[1] = kFirstLift;
  }

  __device__ __forceinline__ void open(const FastProblem& p, const TokenTile& tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + 8 * r;
      const bool there = at < tile.rows;
      token[r] = there ? tile.first + at : -1;
      visible[r] = there ? tile.visible(at, p.run) : 0;
    }
  }
  __device__ __forceinline__ static void put(uint4 (&s_to)[4][kMultiplyThreads],
                                             const unsigned (&x)[4][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) s_to[k][threadIdx.x] = uint4{x[k][0], x[k][1], x[k][2], x[k][3]};
  }
  // A left operand as the rows of tiles.
  __device__ __forceinline__ void put(SwizzledTile (&s_to)[NT], const unsigned (&x)[4 * NT][4],
                                      const Lane& l) const {
#pragma unroll
    for (int k = 0; k < 4 * NT; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<unsigned*>(
            s_to[k / 4].at((row & 63) + 8 * (i & 1), 16 * (k % 4) + 8 * (i >> 1)) + 2 * l.c) =
            x[k][i];
  }
  // q, e and c of a head.
  __device__ __forceinline__ void load_vectors(const FastProblem& p, int head, Shared& s,
                                               const Lane& l) const {
    float q_unit[2], e_unit[2], c_unit[2], inverse_q[2], inverse[2];
    barrier_wait<128>(2 + part);  // what was there is done with
    {
      unsigned x[4 * NT][4];
      load_rows(x, p, p.q, token, head, p.q_heads, p.n, l);
      inverse_rms(inverse_q, x, p.n, p);
      to_half_rows(x, q_unit, 7);
      put(s.q[part], x, l);
      q_unit[0] *= inverse_q[0], q_unit[1] *= inverse_q[1];
      load_rows(x, p, p.c, token, head, p.c_heads, p.n, l);
      to_half_rows(x, c_unit, 7);
      put(s.c[part], x, l);
    }
    unsigned e[4][4];
    load_rows(e, p, p.e, token, head, p.e_heads, p.p, l);
    inverse_rms(inverse, e, p.p, p);
    to_half_rows(e, e_unit, 7);
    put(s.e, e);
    e_unit[0] *= inverse[0], e_unit[1] *= inverse[1];
    if (l.c == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s.units[row + 8 * r] =
            float4{kLog2e * p.scale * q_unit[r] * e_unit[r], q_unit[r], e_unit[r], c_unit[r]};
        s.inverse[row + 8 * r] = p.scale * inverse_q[r] * inverse[r];
      }
    publish_tiles();
    barrier_wait<128>(2 + part);
  }
  __device__ __forceinline__ void load_head(const FastProblem& p, const FastUpstream& u, int head,
                                            bool more, Shared& s, const Lane& l) const {
    const bf16_t* at[2];
    float unit[2], lse[2], through[2], gate[2];
    unsigned dy[4][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t t = token[r] < 0 ? 0 : token[r];
      at[r] = token[r] < 0 ? nullptr : u.dy + p.row_at(t, head);
      lse[r] = u.lse[t * p.heads + head];
      through[r] = u.through[t * p.heads + head];
      gate[r] = p.gate_of(t, head);
    }
    load_left(dy, at[0], at[1], p.p, l);
    if (more && l.c == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (at[r]) fetch_ahead(at[r] + p.p);
    to_half_rows(dy, unit, 7);
    put(s.dy, dy);
    __syncwarp();
    if (l.c == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        s.numbers[row + 8 * r] = float4{kLog2e * lse[r], through[r], gate[r], unit[r]};
    __syncwarp();
  }

  // x = a b of the tiles, [64,N] and [N,P], under way when this returns.
  __device__ __forceinline__ void begin_product(float (&x)[8][4], const SwizzledTile (&a)[NT],
                                                const SwizzledTile (&b)[NT]) const {
    const int warp = int(threadIdx.x) >> 5 & 3;
    warpgroup_begin();
    multiply_half_tiles<true, Inner::last, Inner::first>(x, a[0], b[0], warp);
#pragma unroll
    for (int t = 1; t < NT; ++t)
      multiply_half_tiles<false, Inner::last, Inner::first>(x, a[t], b[t], warp);
    warpgroup_commit();
  }
  // x += (rows times factors) bᵀ, [64,P] and [N,P], under way when this returns.
  __device__ __forceinline__ static void begin_sum(float (&x)[NT][8][4], unsigned (&a)[4][4],
                                                   const uint4 (&s_rows)[4][kMultiplyThreads],
                                                   const float (&factor)[2],
                                                   const SwizzledTile (&b)[NT]) {
    const unsigned f[2] = {pack_half(factor[0], factor[0]), pack_half(factor[1], factor[1])};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 y = s_rows[k][threadIdx.x];
      a[k][0] = multiply_halves(y.x, f[0]), a[k][1] = multiply_halves(y.y, f[1]);
      a[k][2] = multiply_halves(y.z, f[0]), a[k][3] = multiply_halves(y.w, f[1]);
    }
    settle_left(a);
#pragma unroll
    for (int t = 0; t < NT; ++t) settle(x[t]);
    warpgroup_begin();
#pragma unroll
    for (int t = 0; t < NT; ++t) multiply_half_rows(x[t], a, b[t]);
    warpgroup_commit();
  }
  // Row dots of sums [64,64] with f16 rows, over the quad.
  __device__ __forceinline__ static void row_dots_with(float (&dot)[2], const float (&x)[8][4],
                                                       const uint4 (&s_rows)[4][kMultiplyThreads]) {
    float sum[2][2] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 y = s_rows[k][threadIdx.x];
      const unsigned pairs[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_half(pairs[i]);
        const int n = 2 * k + (i >> 1), r = i & 1;
        sum[r][0] += x[n][2 * r] * v.x;
        sum[r][1] += x[n][2 * r + 1] * v.y;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) dot[r] = quad_sum(sum[r][0] + sum[r][1]);
  }
  // A row's factor, and its lift where that is too large for it.
  __device__ __forceinline__ static void lower(float factor, float& lift, float (&x)[NT][8][4],
                                               int r) {
    if (fabsf(factor) * lift <= kLargestFactor) return;
    const float to = power_to(fabsf(factor), 3), ratio = to * inverse_power(lift);
    lift = to;
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int n = 0; n < 8; ++n) x[t][n][2 * r] *= ratio, x[t][n][2 * r + 1] *= ratio;
  }

  // V·dy of a memory, with nothing beside it.
  __device__ __forceinline__ void first_value(float (&value)[2], const Stage& of,
                                              const Shared& s) const {
    float x[8][4];
    begin_product(x, s.c[part], of.values.tile);
    warpgroup_wait<0>();
    settle(x);
    row_dots_with(value, x, s.dy);
  }
  // One memory whose V·dy is there: 1 K' = q Δ̂, its row dots with e, w and dℓ; 2 de += dℓ K'; 3
  // dc += (w dy) Δᵀ, with V of the next memory begun beside it; 4 dq += (dℓ e) Δ̂ᵀ; 5 V·dy of the
  // next. next(): its stage; release(): this one is done with.
  template <bool MORE, class N, class F>
  __device__ __forceinline__ void take_in(const FastProblem& p, const Stage& now, int index,
                                          float (&value)[2], Shared& s, const Lane& l, N&& next,
                                          F&& release) {
    float x[8][4], logit[2], q_factor[2], c_factor[2];
    unsigned a[4][4];
    begin_product(x, s.q[part], now.memory.tile);  // 1
    const float value_unit = now.memory.value_unit, key_unit = now.memory.key_unit;
    warpgroup_wait<0>();
    settle(x);
    row_dots_with(logit, x, s.e);
    bool above = false;
    float factor;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 unit = s.units[row + 8 * r], own = s.numbers[row + 8 * r];
      const bool sees = index < visible[r];
      const float w = sees ? own.z * exp2_approximately(logit[r] * key_unit * unit.x - own.x) : 0.f;
      const float v = value[r] * value_unit * own.w * unit.w;
      // A token that sees one memory gives it weight 1 whatever.
      const float change = sees && visible[r] > 1 ? w * (v - own.y) : 0.f;
      const float dlogit = p.scale * key_unit * change;
      if (l.c == r) factor = w;
      if (l.c == 2 + r) factor = change * s.inverse[row + 8 * r];
      if (sees) {  // 2; else K' may be anything
        const float f = dlogit * unit.y;
#pragma unroll
        for (int n = 0; n < 8; ++n)
          de[n][2 * r] += f * x[n][2 * r], de[n][2 * r + 1] += f * x[n][2 * r + 1];
      }
      q_factor[r] = dlogit * unit.z, c_factor[r] = w * value_unit * own.w;
      above = above || !(fabsf(q_factor[r]) * q_lift[r] <= kLargestFactor &&
                         fabsf(c_factor[r]) * c_lift[r] <= kLargestFactor);
    }
    if (pair) *pair = factor, pair += 64;
    if (__any_sync(0xffffffffu, above)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lower(q_factor[r], q_lift[r], dq, r);
        lower(c_factor[r], c_lift[r], dc, r);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) q_factor[r] *= q_lift[r], c_factor[r] *= c_lift[r];
    begin_sum(dc, a, s.dy, c_factor, now.values.tile);  // 3
    if constexpr (MORE) {
      const Stage& then = next();
      settle(x);
      begin_product(x, s.c[part], then.values.tile);
    }
    warpgroup_wait<MORE ? 1 : 0>();                    // what a holds
    begin_sum(dq, a, s.e, q_factor, now.memory.tile);  // 4
    warpgroup_wait<0>();
#pragma unroll
    for (int t = 0; t < NT; ++t) settle(dq[t]), settle(dc[t]);
    release();
    if constexpr (MORE) {
      settle(x);
      row_dots_with(value, x, s.dy);  // 5
    }
  }

  // What heads of one group have added, to its place among the parts.
  __device__ __forceinline__ void flush(const float (&x)[8][4], const TokenParts& to, int head,
                                        int head_count, int column0, int columns,
                                        const float (&lift)[2], const Lane& l) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (token[r] < 0 || !to.out) continue;
      const int group = head_count / to.of;
      const int64_t place = head % group / to.heads_per_part;
      float* at =
          to.out + ((token[r] * to.of + head / group) * to.parts + place) * to.width + column0;
      const float unit = inverse_power(lift[r]);
#pragma unroll
      for (int n = 0; n < 8; ++n)
        if (8 * n + 2 * l.c < columns)
          *reinterpret_cast<float2*>(at + 8 * n + 2 * l.c) =
              float2{x[n][2 * r] * unit, x[n][2 * r + 1] * unit};
    }
  }
  // After a head: of every gradient, if the next head (or item) adds to another.
  __device__ __forceinline__ void close(const FastProblem& p, int head, bool end,
                                        const TokenParts& to_q, const TokenParts& to_e,
                                        const TokenParts& to_c, const Lane& l) {
    const auto all = [&](float(&x)[NT][8][4], float(&lift)[2], const TokenParts& to) {
#pragma unroll
      for (int t = 0; t < NT; ++t)
        flush(x[t], to, head, p.heads, 64 * t, min(64, p.n - 64 * t), lift, l);
      clear(x, lift);
    };
    if (end || p.opens(head + 1, p.q_heads)) all(dq, q_lift, to_q);
    if (end || p.opens(head + 1, p.c_heads)) all(dc, c_lift, to_c);
    if (end || p.opens(head + 1, p.e_heads)) {
      const float one[2] = {1.f, 1.f};
      flush(de, to_e, head, p.heads, 0, p.p, one, l);
      clear(de);
    }
  }
};

// Sums over the heads of an item stay in registers; what they come to is one part of a gradient.
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
    fetch_memories(p, heads_per_item, s.ring, [&](int place, int64_t memory, int head) {
      auto& to = s.stage[place];
      fetch_runs<2>({{&to.memory, &p.record<NT>(memory, head), MemoryRecord<NT>::kStreamed},
                     {&to.values, &p.value_record<NT>(memory, head), int(sizeof(to.values))}},
                    s.ring.full[place]);
    });
    return;
  }
  multiplier_registers();
  const Lane l;
  RingPlace<Shared::kStages> place;
  TokenGradients<NT> rows;
  rows.part = warp / 4, rows.row = 16 * warp + l.g;
  rows.clear(rows.dq, rows.q_lift), rows.clear(rows.dc, rows.c_lift), rows.clear(rows.de);
  each_token_item(p, heads_per_item, [&](const TokenTile& tile, int first, int all) {
    const int last = first + heads_per_item, mine = tile.seen(64 * rows.part, p.run);
    rows.open(p, tile);
    for (int head = first; head < last; ++head) {
      if (mine > 0) {  // else the sums are zero
        if (head == first || p.opens_any(head)) rows.load_vectors(p, head, s, l);
        rows.load_head(p, u, head, head + 1 < last, s, l);
        rows.pair = !pairs.factors
                        ? nullptr
                        : pairs.of(p, tile.number + rows.part, head) + (l.c < 2 ? 0 : pairs.half) +
                              (rows.row & 63) + 8 * (l.c & 1);
        float value[2];
        place.wait_full(s.ring);
        rows.first_value(value, s.stage[place.at], s);
        RingPlace<Shared::kStages> next = place;
        const auto release = [&] { place.release(s.ring); };
        const auto next_stage = [&]() -> const typename Shared::Stage& {
          next.next();
          next.wait_full(s.ring);
          return s.stage[next.at];
        };
        for (int i = 0; i + 1 < mine; ++i) {
          rows.template take_in<true>(p, s.stage[place.at], i, value, s, l, next_stage, release);
          place = next;
        }
        rows.template take_in<false>(p, s.stage[place.at], mine - 1, value, s, l, next_stage,
                                     release);
        place.next();
      }
      for (int i = mine; i < all; ++i, place.next()) {
        place.wait_full(s.ring);
        place.release(s.ring);
      }
      rows.close(p, head, head + 1 == last, dq, de, dc, l);
    }
  });
}

}  // namespace

void token_gradients(const FastProblem& p, const FastUpstream& u, int heads_per_item,
                     const TokenParts& dq, const TokenParts& de, const TokenParts& dc,
                     const PairFactors& pairs, const Tensor& on) {
  visit_tiles(p.n, [&]<int NT>() {
    launch_persistent<TokenShared<NT>>(token_kernel<NT>, kFedThreads,
                                       token_items(p, heads_per_item), on, p, u, heads_per_item, dq,
                                       de, dc, pairs);
  });
}

}  // namespace ebb::gpu::state_memory
