// State-memory attention on tensor cores, forward (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kReaders = 8;  // warps, in two groups of 64 tokens each
constexpr int kParts = kReaders / 4;
constexpr float kLn2 = 0.6931471805599453f;

template <int NT>
struct ForwardShared {
  static constexpr int kStages = 6;
  MemoryRecord<NT> memory[kStages];
  Ring<kStages, kReaders> ring;
};

// The running softmax of one row, base 2.
struct RowSoftmax {
  float largest, total, keep, weight;
  int visible;

  // One more logit. A NaN stays, so that everything after it is NaN too.
  __device__ __forceinline__ void take_in(float logit) {
    const float before = largest;
    largest = logit > before || isnan(logit) ? logit : before;
    keep = before == largest ? 1.f : exp2_approximately(before - largest);
    weight = exp2_approximately(logit - largest);
    total = total * keep + weight;
  }
};

// 64 tokens of one head: a warp has rows 16·warp + g and + g + 8 of them.
template <int NT>
struct TokenRows {
  unsigned q[4 * NT][4], c[4 * NT][4], e[4][4];  // f16 rows; bf16
  float sum[8][4];                               // Σ weight V, over the units of its rows
  float logit_unit[2], value_unit[2];
  RowSoftmax row[2];
  int64_t token[2];  // −1: not there

  __device__ __forceinline__ void open(const FastProblem& p, const TokenTile& tile, int head,
                                       int begin, const Lane& l) {
    const bf16_t *q_row[2], *c_row[2], *e_row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = begin + l.g + 8 * r;
      const bool there = at < tile.rows;
      token[r] = there ? tile.first + at : -1;
      q_row[r] = there ? p.vector(p.q, token[r], head, p.q_heads, p.n) : nullptr;
      c_row[r] = there ? p.vector(p.c, token[r], head, p.c_heads, p.n) : nullptr;
      e_row[r] = there ? p.vector(p.e, token[r], head, p.e_heads, p.p) : nullptr;
      row[r] = {-INFINITY, 0.f, 1.f, 0.f, there ? tile.visible(at, p.run) : 1 << 30};
    }
    load_left(q, q_row[0], q_row[1], p.n, l);
    load_left(e, e_row[0], e_row[1], p.p, l);
    load_left(c, c_row[0], c_row[1], p.n, l);
    float inverse_q[2], inverse_e[2], q_unit[2];
    inverse_rms(inverse_q, q, p.n, p);
    inverse_rms(inverse_e, e, p.p, p);
    to_half_rows(q, q_unit, 7);
    to_half_rows(c, value_unit, 7);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      logit_unit[r] = kLog2e * p.scale * inverse_q[r] * inverse_e[r] * q_unit[r];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = 0.f;
  }

  // Memory number `index` of the sequence: 1 K' and V; 2 the logits and the running softmax; 3 sum
  // = keep sum + weight V. release() when the record is done with.
  template <class F>
  __device__ __forceinline__ void take_in(const MemoryRecord<NT>& m, int index, const Lane& l,
                                          F&& release) {
    unsigned scaled[4 * NT][4];
    float keys[8][4], values[8][4];
    warpgroup_begin();  // 1
    multiply_memory<NT>(keys, q, m);
    warpgroup_commit();
    scale_by_rho<NT>(scaled, c, m, l);
    const float value = m.value_unit, key = m.key_unit;
    warpgroup_begin();
    multiply_memory<NT>(values, scaled, m);
    warpgroup_commit();
    warpgroup_wait<1>();
    settle(keys);
    float dot[2];
    row_dots(dot, keys, e);  // 2
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (index < row[r].visible) row[r].take_in(dot[r] * key * logit_unit[r]);
    warpgroup_wait<0>();
    settle(values);
    release();
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // 3
      if (index >= row[r].visible) continue;
      const float keep = row[r].keep, weight = row[r].weight * value;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i)
          sum[n][i] = keep * sum[n][i] + weight * values[n][i];
    }
  }

  __device__ __forceinline__ void close(const FastProblem& p, int head, const bf16_t* base,
                                        bf16_t* o, float* g_r, float* lse, const Lane& l) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (token[r] < 0) continue;
      const bool sees = row[r].visible > 0;
      const float factor = sees ? value_unit[r] / row[r].total : 0.f;
      if (l.c == 0)
        lse[token[r] * p.heads + head] = sees ? kLn2 * (row[r].largest + log2f(row[r].total)) : 0.f;
      const float gate = o ? p.gate_of(token[r], head) : 0.f;
      const int64_t at = p.row_at(token[r], head);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int column = 8 * n + 2 * l.c;
        if (column >= p.p) continue;
        const float x = sees ? sum[n][2 * r] * factor : 0.f;
        const float y = sees ? sum[n][2 * r + 1] * factor : 0.f;
        *reinterpret_cast<float2*>(g_r + at + column) = float2{x, y};
        if (!o) continue;
        const unsigned b = base ? *reinterpret_cast<const unsigned*>(base + at + column) : 0u;
        *reinterpret_cast<unsigned*>(o + at + column) =
            pack_bf16(delta::low_half(b) + gate * x, delta::high_half(b) + gate * y);
      }
    }
  }
};

// Item (tile of 128 tokens, head). One warp fetches the memories that any of the tokens sees, one
// after the other and on into the next item; two groups of four warps read them, 64 tokens each.
// Rows of one tile may lie in different runs: each stops at the last memory that it sees.
template <int NT>
__global__ void __launch_bounds__(kFedThreads, 1)
    forward_kernel(FastProblem p, const bf16_t* base, bf16_t* o, float* g_r, float* lse) {
  auto& s = swizzled_shared<ForwardShared<NT>>();
  constexpr int kStages = ForwardShared<NT>::kStages;
  const int warp = int(threadIdx.x) >> 5;
  if (threadIdx.x == 0) s.ring.init();
  __syncthreads();
  const TokenTiles<kParts> tiles(p);
  RingPlace<kStages> place;
  if (warp >= kReaders) {
    fetcher_registers();
    if (warp > kReaders) return;
    each_item(tiles.count * p.heads, [&](int64_t item) {
      const TokenTile tile = tiles.at(p, item / p.heads);
      const int head = int(item % p.heads), count = tile.seen(64 * (kParts - 1), p.run);
      const int all = max(count, tile.seen(0, p.run));
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
  const int begin = 64 * (warp / 4);
  TokenRows<NT> rows;
  each_item(tiles.count * p.heads, [&](int64_t item) {
    const TokenTile tile = tiles.at(p, item / p.heads);
    const int head = int(item % p.heads), mine = tile.seen(begin, p.run);
    const int all = max(tile.seen(0, p.run), tile.seen(64 * (kParts - 1), p.run));
    rows.open(p, tile, head, begin + 16 * (warp & 3), l);
    for (int i = 0; i < all; ++i, place.next()) {
      place.wait_full(s.ring);
      if (i < mine)
        rows.take_in(s.memory[place.at], i, l, [&] { place.release(s.ring); });
      else
        place.release(s.ring);
    }
    rows.close(p, head, base, o, g_r, lse, l);
  });
}

}  // namespace

void fast_fwd(const StateMemoryProblem& problem, const Tensor& o, const Tensor& r,
              const Tensor& lse) {
  const FastView view = prepare(problem);
  const FastProblem& p = view.p;
  const int64_t items = std::max(p.tiles, ceil_div(p.tiles_per_row, kParts) * p.cursor.count);
  visit_tiles(p.n, [&]<int NT>() {
    launch_persistent<ForwardShared<NT>>(forward_kernel<NT>, kFedThreads, items * p.heads, r, p,
                                         static_cast<const bf16_t*>(ptr<bf16>(problem.base)),
                                         ptr<bf16>(o), ptr<float>(r), ptr<float>(lse));
  });
}

}  // namespace ebb::gpu::state_memory
