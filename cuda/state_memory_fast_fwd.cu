// State-memory attention on tensor cores, forward (cuda/state_memory_fast.cuh).
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {
namespace {

constexpr int kParts = 2;  // groups of four warps, 64 tokens each
constexpr int kReaders = 4 * kParts;
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
  float keys[8][4];                              // K', under way
  float sum[8][4];                               // Σ weight V, over the units of its rows
  float logit_unit[2], value_unit[2];
  RowSoftmax row[2];
  int64_t token[2];  // −1: not there

  __device__ __forceinline__ void open(const FastProblem& p, const TokenTile& tile, int begin,
                                       const Lane& l) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = begin + l.g + 8 * r;
      const bool there = at < tile.rows;
      token[r] = there ? tile.first + at : -1;
      row[r].visible = there ? tile.visible(at, p.run) : 1 << 30;
    }
  }
  // The vectors of a head, and of those that share them.
  __device__ __forceinline__ void load_vectors(const FastProblem& p, int head, const Lane& l) {
    load_rows(q, p, p.q, token, head, p.q_heads, p.n, l);
    load_rows(e, p, p.e, token, head, p.e_heads, p.p, l);
    load_rows(c, p, p.c, token, head, p.c_heads, p.n, l);
    float inverse_q[2], inverse_e[2], q_unit[2];
    inverse_rms(inverse_q, q, p.n, p);
    inverse_rms(inverse_e, e, p.p, p);
    to_half_rows(q, q_unit, 7);
    to_half_rows(c, value_unit, 7);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      logit_unit[r] = kLog2e * p.scale * inverse_q[r] * inverse_e[r] * q_unit[r];
  }
  __device__ __forceinline__ void begin_head(const FastProblem& p, int head, const bf16_t* base,
                                             const Lane& l) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r].largest = -INFINITY, row[r].total = 0.f;
      if (base && l.c == 0 && token[r] >= 0) fetch_ahead(base + p.row_at(token[r], head));
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = 0.f;
  }

  // K' of a memory, under way when this returns.
  __device__ __forceinline__ void begin_keys(const MemoryRecord<NT>& m) {
    warpgroup_begin();
    multiply_memory<NT>(keys, q, m);
    warpgroup_commit();
  }
  // Memory number `index` of the sequence, whose K' is under way: 1 V; 2 the logits and the running
  // softmax; 3 then(), when the record is done with, which may begin the next keys; 4 sum = keep
  // sum + weight V.
  template <class F>
  __device__ __forceinline__ void take_in(const MemoryRecord<NT>& m, int index, const Lane& l,
                                          F&& then) {
    unsigned scaled[4 * NT][4];
    float values[8][4];
    scale_by_rho<NT>(scaled, c, m, l);  // 1
    const float value = m.value_unit, key = m.key_unit;
    settle_left(scaled);
    warpgroup_wait<0>();
    settle(keys);
    warpgroup_begin();
    multiply_memory<NT>(values, scaled, m);
    warpgroup_commit();
    settle(keys);
    float dot[2];
    row_dots(dot, keys, e);  // 2
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (index < row[r].visible) row[r].take_in(dot[r] * key * logit_unit[r]);
    warpgroup_wait<0>();
    settle(values);
    then();  // 3
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // 4
      if (index >= row[r].visible) continue;
      const float keep = row[r].keep, weight = row[r].weight * value;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i)
          sum[n][i] = keep * sum[n][i] + weight * values[n][i];
    }
  }

  // WHOLE: P is 64. What is read is asked for before anything is written.
  template <bool WHOLE>
  __device__ __forceinline__ void close(const FastProblem& p, int head, const bf16_t* base,
                                        bf16_t* o, float* g_r, float* lse, const Lane& l) const {
    float gate[2];
    unsigned before[2][8] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      gate[r] = o && token[r] >= 0 ? p.gate_of(token[r], head) : 0.f;
      if (base && token[r] >= 0)
#pragma unroll
        for (int n = 0; n < 8; ++n)
          if (WHOLE || 8 * n < p.p)
            before[r][n] = *reinterpret_cast<const unsigned*>(base + p.row_at(token[r], head) +
                                                              2 * l.c + 8 * n);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (token[r] < 0) continue;
      const bool sees = row[r].visible > 0;
      const float factor = sees ? value_unit[r] / row[r].total : 0.f;
      if (l.c == 0)
        lse[token[r] * p.heads + head] = sees ? kLn2 * (row[r].largest + log2f(row[r].total)) : 0.f;
      const int64_t at = p.row_at(token[r], head) + 2 * l.c;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (!WHOLE && 8 * n >= p.p) break;
        const float x = sees ? sum[n][2 * r] * factor : 0.f;
        const float y = sees ? sum[n][2 * r + 1] * factor : 0.f;
        *reinterpret_cast<float2*>(g_r + at + 8 * n) = float2{x, y};
        if (o)
          *reinterpret_cast<unsigned*>(o + at + 8 * n) =
              pack_bf16(delta::low_half(before[r][n]) + gate[r] * x,
                        delta::high_half(before[r][n]) + gate[r] * y);
      }
    }
  }
};

// Item (tile of 128 tokens, block of heads). One warp fetches the memories that any of the tokens
// sees, one after the other and on into the next head and item; two groups of four warps read them,
// 64 tokens each. Rows of one tile may lie in different runs: each stops at the last memory that it
// sees.
template <int NT>
__global__ void __launch_bounds__(kFedThreads, 1)
    forward_kernel(FastProblem p, int heads_per_item, const bf16_t* base, bf16_t* o, float* g_r,
                   float* lse) {
  auto& s = swizzled_shared<ForwardShared<NT>>();
  constexpr int kStages = ForwardShared<NT>::kStages;
  const int warp = int(threadIdx.x) >> 5;
  if (threadIdx.x == 0) s.ring.init();
  __syncthreads();
  if (warp >= kReaders) {
    fetcher_registers();
    if (warp > kReaders) return;
    fetch_memories<kParts>(p, heads_per_item, s.ring, [&](int place, int64_t memory, int head) {
      fetch_runs<1>({{&s.memory[place], &p.record<NT>(memory, head), MemoryRecord<NT>::kStreamed}},
                    s.ring.full[place]);
    });
    return;
  }
  multiplier_registers();
  const Lane l;
  const int begin = 64 * (warp / 4);
  RingPlace<kStages> place;
  TokenRows<NT> rows;
  each_token_item<kParts>(p, heads_per_item, [&](const TokenTile& tile, int first, int all) {
    const int mine = tile.seen(begin, p.run);
    rows.open(p, tile, begin + 16 * (warp & 3), l);
    for (int head = first; head < first + heads_per_item; ++head) {
      if (mine > 0 && (head == first || p.opens_any(head))) rows.load_vectors(p, head, l);
      rows.begin_head(p, head, base, l);
      if (mine > 0) {
        place.wait_full(s.ring);
        rows.begin_keys(s.memory[place.at]);
        for (int i = 0; i + 1 < mine; ++i)
          rows.take_in(s.memory[place.at], i, l, [&] {
            place.release(s.ring);
            place.next();
            place.wait_full(s.ring);
            rows.begin_keys(s.memory[place.at]);
          });
        rows.take_in(s.memory[place.at], mine - 1, l, [&] {
          place.release(s.ring);
          place.next();
        });
      }
      for (int i = mine; i < all; ++i, place.next()) {
        place.wait_full(s.ring);
        place.release(s.ring);
      }
      if (p.p == 64)
        rows.template close<true>(p, head, base, o, g_r, lse, l);
      else
        rows.template close<false>(p, head, base, o, g_r, lse, l);
    }
  });
}

}  // namespace

Tensor fast_fwd(const StateMemoryProblem& problem, const Tensor& o, const Tensor& r,
                const Tensor& lse) {
  const FastView view = prepare(problem);
  const FastProblem& p = view.p;
  const int64_t enough = 3 * int64_t(multiprocessors(r.device()));
  int heads = p.heads;
  while (heads > 1 && (p.heads % heads != 0 || token_items<kParts>(p, heads) < enough)) --heads;
  visit_tiles(p.n, [&]<int NT>() {
    launch_persistent<ForwardShared<NT>>(forward_kernel<NT>, kFedThreads,
                                         token_items<kParts>(p, heads), r, p, heads,
                                         static_cast<const bf16_t*>(ptr<bf16>(problem.base)),
                                         ptr<bf16>(o), ptr<float>(r), ptr<float>(lse));
  });
  return view.records;
}

}  // namespace ebb::gpu::state_memory
