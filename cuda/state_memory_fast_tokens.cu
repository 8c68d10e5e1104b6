// State-memory attention on tensor cores: the gradients of the tokens' vectors
// (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kReaders = 8, kMultiplyThreads = 32 * kReaders;

template <int NT>
struct TokenShared {
  static constexpr int kStages = NT == 1 ? 6 : 4;
  MemoryRecord<NT> memory[kStages];
  // Each thread's own part of c and q: what registers cannot hold.
  uint4 c[4][kMultiplyThreads], q[4][kMultiplyThreads];
  float2 parts[2][2][64];  // logits and values of both halves of N, two turns
  Ring<kStages, kReaders> ring;
};

// What a row of tokens needs besides its vectors.
struct RowState {
  int64_t token;  // −1: not there
  int visible;
  float logit_unit, lse, gate, through;  // base 2; R·dy
  float q_unit, e_unit, dy_unit;         // of the f16 rows, the first two times 1/rms
};

// 64 tokens and 64 of N: a warp has rows 16·warp + g and + g + 8 of them.
template <int NT>
struct TokenGradients {
  unsigned e[4][4], dy[4][4];          // f16 rows
  float dq[8][4], dc[8][4], de[8][4];  // de: what these 64 of N give
  RowState row[2];
  float inverse_q[2], inverse_e[2];
  int half, wide;  // which 64 of N, how many of them there are

  __device__ __forceinline__ static void clear(float (&x)[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = 0.f;
  }

  __device__ __forceinline__ void open(const FastProblem& p, const TokenTile& tile, int begin,
                                       int which, const Lane& l) {
    half = which, wide = min(64, p.n - 64 * half);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = begin + l.g + 8 * r;
      const bool there = at < tile.rows;
      row[r].token = there ? tile.first + at : -1;
      row[r].visible = there ? tile.visible(at, p.run) : 0;
    }
  }
  __device__ __forceinline__ void rows_of(const bf16_t* (&at)[2], const FastProblem& p,
                                          const bf16_t* x, int head, int of, int width) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      at[r] = row[r].token < 0 ? nullptr : p.vector(x, row[r].token, head, of, width);
  }
  __device__ __forceinline__ static void put(uint4 (&s_to)[4][kMultiplyThreads],
                                             const unsigned (&x)[4][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) s_to[k][threadIdx.x] = uint4{x[k][0], x[k][1], x[k][2], x[k][3]};
  }
  // q, e and c of a head; q and c go to the thread's place in shared memory.
  __device__ __forceinline__ void load_vectors(const FastProblem& p, int head, TokenShared<NT>& s,
                                               const Lane& l) {
    const bf16_t* at[2];
    float unit[2];
    unsigned own[4][4];
    rows_of(at, p, p.q, head, p.q_heads, p.n);
    {  // norm and unit are those of all of N
      unsigned all[4 * NT][4];
      load_left(all, at[0], at[1], p.n, l);
      inverse_rms(inverse_q, all, p.n, p);
      to_half_rows(all, unit, 7);
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) own[k][i] = half ? all[4 * (NT - 1) + k][i] : all[k][i];
    }
    put(s.q, own);
    row[0].q_unit = unit[0], row[1].q_unit = unit[1];
    rows_of(at, p, p.e, head, p.e_heads, p.p);
    load_left(e, at[0], at[1], p.p, l);
    inverse_rms(inverse_e, e, p.p, p);
    to_half_rows(e, unit, 7);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r].e_unit = unit[r] * inverse_e[r], row[r].q_unit *= inverse_q[r];
      row[r].logit_unit = kLog2e * p.scale * row[r].q_unit * row[r].e_unit;
    }
    rows_of(at, p, p.c, head, p.c_heads, p.n);
    load_left(own, at[0] ? at[0] + 64 * half : nullptr, at[1] ? at[1] + 64 * half : nullptr, wide,
              l);
    put(s.c, own);
  }
  __device__ __forceinline__ void load_head(const FastProblem& p, const FastUpstream& u, int head,
                                            const Lane& l) {
    const bf16_t* at[2];
    float unit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t token = row[r].token < 0 ? 0 : row[r].token;
      at[r] = row[r].token < 0 ? nullptr : u.dy + p.row_at(token, head);
      row[r].lse = kLog2e * u.lse[token * p.heads + head];
      row[r].through = u.through[token * p.heads + head];
      row[r].gate = p.gate_of(token, head);
    }
    load_left(dy, at[0], at[1], p.p, l);
    to_half_rows(dy, unit, 7);
    row[0].dy_unit = unit[0], row[1].dy_unit = unit[1];
  }

  // x = D ∘ 1/ρ, and its row dots with c.
  __device__ __forceinline__ void scale_values(float (&x)[8][4], float (&dot)[2],
                                               const MemoryRecord<NT>& m,
                                               const uint4 (&s_c)[4][kMultiplyThreads],
                                               const Lane& l) const {
    dot[0] = dot[1] = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 w =
          *reinterpret_cast<const uint4*>(m.inverse_rho + m.rho_pair(8 * half + 4 * i, l.c));
      const unsigned pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 y = s_c[2 * i + k][threadIdx.x];
        const unsigned c[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float2 f = unpack_half(pairs[2 * k + j]);
          float(&v)[4] = x[4 * i + 2 * k + j];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            v[2 * r] *= f.x, v[2 * r + 1] *= f.y;
            dot[r] += v[2 * r] * delta::low_half(c[2 * j + r]);
            dot[r] += v[2 * r + 1] * delta::high_half(c[2 * j + r]);
          }
        }
      }
    }
    dot[0] = quad_sum(dot[0]), dot[1] = quad_sum(dot[1]);
  }
  // Adds what the other half of N has.
  __device__ __forceinline__ void exchange(float (&logit)[2], float (&value)[2],
                                           float2 (&s_parts)[2][64], int first, const Lane& l) {
    if constexpr (NT == 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (l.c == 0) s_parts[half][first + l.g + 8 * r] = float2{logit[r], value[r]};
      barrier_wait<kMultiplyThreads>(1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 other = s_parts[half ^ 1][first + l.g + 8 * r];
        // The same sum on both sides: halves in order.
        logit[r] = half ? other.x + logit[r] : logit[r] + other.x;
        value[r] = half ? other.y + value[r] : value[r] + other.y;
      }
    }
  }

  // One memory: 1 K' = q Δ̂ and D = dy Δ̂ᵀ; 2 their row dots; 3 w and dℓ; 4 de += dℓ K', dc += w D;
  // 5 dq += dℓ F, F = e Δ̂ᵀ. release() when the record is done with.
  template <class F>
  __device__ __forceinline__ void take_in(const FastProblem& p, const MemoryRecord<NT>& m,
                                          int index, TokenShared<NT>& s, int turn, int first,
                                          const Lane& l, F&& release) {
    const SwizzledTile& tile = m.tile[NT == 1 ? 0 : half];
    float keys[8][4], values[8][4], logit[2], value[2];
    unsigned q[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 x = s.q[k][threadIdx.x];
      q[k][0] = x.x, q[k][1] = x.y, q[k][2] = x.z, q[k][3] = x.w;
    }
    warpgroup_begin();  // 1
    multiply_half_columns<true>(keys, q, tile);
    warpgroup_commit();
    multiply_half_rows<true>(values, dy, tile);
    warpgroup_commit();
    warpgroup_wait<1>();
    settle(keys);
    half_row_dots(logit, keys, e);  // 2
    warpgroup_wait<0>();
    settle(values);
    scale_values(values, value, m, s.c, l);
    exchange(logit, value, s.parts[turn & 1], first, l);
    float weight[2], dlogit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // 3; a token that sees one memory gives it weight 1 whatever
      const RowState& x = row[r];
      const bool sees = index < x.visible;
      const float w =
          sees ? x.gate * exp2_approximately(logit[r] * m.key_unit * x.logit_unit - x.lse) : 0.f;
      const float unit = m.value_unit * x.dy_unit;
      weight[r] = w * unit;
      dlogit[r] =
          sees && x.visible > 1 ? p.scale * m.key_unit * w * (value[r] * unit - x.through) : 0.f;
    }
    add_rows(de, keys, dlogit[0] * row[0].q_unit, dlogit[1] * row[1].q_unit, index);  // 4
    settle(keys);
    warpgroup_begin();
    multiply_half_rows<true>(keys, e, tile);
    warpgroup_commit();
    add_rows(dc, values, weight[0], weight[1], index);
    warpgroup_wait<0>();
    settle(keys);
    release();
    add_rows(dq, keys, dlogit[0] * row[0].e_unit, dlogit[1] * row[1].e_unit, index);  // 5
  }
  // to += f x, but for rows that do not see: there x may be anything.
  __device__ __forceinline__ void add_rows(float (&to)[8][4], const float (&x)[8][4], float f0,
                                           float f1, int index) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (index >= row[r].visible) continue;
      const float f = r ? f1 : f0;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) to[n][i] += f * x[n][i];
    }
  }

  // What heads of one group have added, to its place among the parts; and begins again.
  __device__ __forceinline__ void flush(float (&x)[8][4], const TokenParts& to, int head,
                                        int head_count, int extra, int extras, int column0,
                                        int columns, const Lane& l) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row[r].token < 0 || !to.out) continue;
      const int group = head_count / to.of;
      const int64_t part = int64_t(head % group / to.heads_per_part) * extras + extra;
      float* at =
          to.out + ((row[r].token * to.of + head / group) * to.parts + part) * to.width + column0;
#pragma unroll
      for (int n = 0; n < 8; ++n)
        if (8 * n + 2 * l.c < columns)
          *reinterpret_cast<float2*>(at + 8 * n + 2 * l.c) = float2{x[n][2 * r], x[n][2 * r + 1]};
    }
    clear(x);
  }
};

// Item (tokens, block of heads): with NT = 1 two groups of warps have 64 tokens each; with NT = 2
// both have the same 64 tokens, and each one half of N. Sums over the heads of a block stay in
// registers; what they come to is one part of a gradient.
template <int NT>
__global__ void __launch_bounds__(kFedThreads, 1)
    token_kernel(FastProblem p, FastUpstream u, int heads_per_item, TokenParts dq, TokenParts de,
                 TokenParts dc) {
  auto& s = swizzled_shared<TokenShared<NT>>();
  constexpr int kStages = TokenShared<NT>::kStages, kParts = NT == 1 ? 2 : 1;
  const int warp = int(threadIdx.x) >> 5, blocks = p.heads / heads_per_item;
  if (threadIdx.x == 0) s.ring.init();
  __syncthreads();
  const TokenTiles<kParts> tiles(p);
  RingPlace<kStages> place;
  const auto visits = [&](const TokenTile& tile) {
    return max(tile.seen(0, p.run), tile.seen(64 * (kParts - 1), p.run));
  };
  if (warp >= kReaders) {
    fetcher_registers();
    if (warp > kReaders) return;
    each_item(tiles.count * blocks, [&](int64_t item) {
      const TokenTile tile = tiles.at(p, item / blocks);
      const int first = int(item % blocks) * heads_per_item, all = visits(tile);
      for (int head = first; head < first + heads_per_item; ++head)
        for (int i = 0; i < all; ++i, place.next()) {
          place.wait_empty(s.ring);
          fetch_runs<1>({{&s.memory[place.at], &p.record<NT>(tile.memory + i, head),
                          MemoryRecord<NT>::kStreamed}},
                        s.ring.full[place.at]);
        }
    });
    return;
  }
  multiplier_registers();
  const Lane l;
  const int group = warp / 4, begin = NT == 1 ? 64 * group : 0, row0 = 16 * (warp & 3);
  TokenGradients<NT> rows;
  rows.clear(rows.dq), rows.clear(rows.dc), rows.clear(rows.de);
  int turn = 0;
  const auto changes = [&](int head, int of) { return head % (p.heads / of) == 0; };
  each_item(tiles.count * blocks, [&](int64_t item) {
    const TokenTile tile = tiles.at(p, item / blocks);
    const int first = int(item % blocks) * heads_per_item, last = first + heads_per_item;
    const int mine = tile.seen(begin, p.run), all = visits(tile);
    rows.open(p, tile, begin + row0, NT == 1 ? 0 : group, l);
    for (int head = first; head < last; ++head) {
      if (head == first || changes(head, p.q_heads) || changes(head, p.e_heads) ||
          changes(head, p.c_heads))
        rows.load_vectors(p, head, s, l);
      rows.load_head(p, u, head, l);
      for (int i = 0; i < all; ++i, place.next()) {
        place.wait_full(s.ring);
        if (i < mine)
          rows.take_in(p, s.memory[place.at], i, s, turn++, row0, l,
                       [&] { place.release(s.ring); });
        else
          place.release(s.ring);
      }
      const bool end = head + 1 == last;
      if (end || changes(head + 1, p.q_heads))
        rows.flush(rows.dq, dq, head, p.heads, 0, 1, 64 * rows.half, rows.wide, l);
      if (end || changes(head + 1, p.c_heads))
        rows.flush(rows.dc, dc, head, p.heads, 0, 1, 64 * rows.half, rows.wide, l);
      if (end || changes(head + 1, p.e_heads))
        rows.flush(rows.de, de, head, p.heads, rows.half, NT, 0, p.p, l);
    }
  });
}

}  // namespace

void token_gradients(const FastProblem& p, const FastUpstream& u, int heads_per_item,
                     const TokenParts& dq, const TokenParts& de, const TokenParts& dc,
                     const Tensor& on) {
  const int64_t blocks = p.heads / heads_per_item;
  visit_tiles(p.n, [&]<int NT>() {
    const int64_t dense = ceil_div(p.tiles_per_row, NT == 1 ? 2 : 1) * p.cursor.count;
    launch_persistent<TokenShared<NT>>(token_kernel<NT>, kFedThreads,
                                       std::max(p.tiles, dense) * blocks, on, p, u, heads_per_item,
                                       dq, de, dc);
  });
}

}  // namespace ebb::gpu::state_memory
