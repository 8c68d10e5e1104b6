// The state of gated linear attention carried along a sequence by four warps, and its way to
// memory: part of all scans (cuda/linear_attention_scan.cuh). Of the block's shared memory they
// want
//   stage[].keys, stage[].v, gates[], arrived[]; states[2][SLABS], as [V,K].
#pragma once
#include "cuda/linear_attention_scan.cuh"

namespace ebb::gpu::linear_attention {

// a = the left operands of state + decay·run.
template <int SLABS, int RUNS>
__device__ __forceinline__ void add_run(unsigned (&a)[4 * SLABS][4],
                                        const float (&state)[SLABS][8][4],
                                        const unsigned (&run)[RUNS][4][4], float decay) {
#pragma unroll
  for (int k = 0; k < 4 * SLABS; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float(&x)[4] = state[k / 4][2 * k % 8 + (e >> 1)];
      const unsigned y = run[RUNS == 1 ? 0 : k / 4][k % 4][e];
      const int i = 2 * (e & 1);
      a[k][e] = pack_bf16(x[i] + decay * low_half(y), x[i + 1] + decay * high_half(y));
    }
}

// What a state is carried for.
enum class Carry {
  forward,       // S, written before each chunk is added
  forward_ends,  // S from zero, nothing written but what it ends with
  reverse_ends,  // D from zero, the same
  reverse,       // D, written before each chunk is added
  reverse_runs,  // the same with the gradients of contributions
  contributions  // S from zero in each run, written at its end
};
constexpr bool is_ends(Carry c) { return c == Carry::forward_ends || c == Carry::reverse_ends; }
constexpr bool is_reverse(Carry c) {
  return c == Carry::reverse_ends || c == Carry::reverse || c == Carry::reverse_runs;
}
// Whether the state before each chunk is written.
constexpr bool is_written(Carry c) { return !is_ends(c) && c != Carry::contributions; }

template <int SLABS>
__device__ __forceinline__ void clear_state(float (&state)[SLABS][8][4]) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) state[n / 8][n % 8][e] = 0.f;
}

// The factors of a chunk's tokens in what it adds to the state.
template <Carry C>
__device__ __forceinline__ void scale_added(unsigned (&to)[4][4], const SwizzledTile& v,
                                            const FastGates& gates, float scale, int warp,
                                            const Lane& l) {
  unsigned x[4][4];
  load_values(x, v, warp, l);
  scale_left(to, x, l, [&](int t) {
    const float2 a = pair(is_reverse(C) ? gates.gamma : gates.tail, t);
    if (is_reverse(C)) return float2{scale * a.x, scale * a.y};
    const float2 weight = pair(gates.beta, t);
    return float2{a.x * weight.x, a.y * weight.y};
  });
}

// What rounding has left of those of scale_added<Carry::contributions>, as more of them: a sharp
// softmax over contributions in f32 shows it.
__device__ __forceinline__ void scale_rest(unsigned (&to)[4][4], const SwizzledTile& v,
                                           const FastGates& gates, int warp, const Lane& l) {
  load_values(to, v, warp, l);
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int t = 16 * k + 8 * (e / 2) + 2 * l.c;
      const float2 tail = pair(gates.tail, t), weight = pair(gates.beta, t);
      const float x = tail.x * weight.x * low_half(to[k][e]);
      const float y = tail.y * weight.y * high_half(to[k][e]);
      const unsigned rounded = pack_bf16(x, y);
      to[k][e] = pack_bf16(x - low_half(rounded), y - high_half(rounded));
    }
}

// The multiplying warps, 16 columns of V each, state transposed in registers. Per chunk, in
// reverse: 1 D+E out, where E is the gradient of the run's contribution times the decay up to the
// run's end. 2 D = γ_n D + qᵀ (scale γ dO). Forward: 1 S out. 2 S = γ_n S + kᵀ (τ w v); or, of
// values in two parts, out at a run's end. READERS more threads read a stage and the states that
// leave. Nothing is worked out between a product and the wait for it: the compiler takes the
// registers of its left operands.
template <int SLABS, Carry C, int READERS, class Shared>
__device__ __forceinline__ void carry_state(const FastAttention& p, const AttentionItem& item,
                                            const AttentionSegments& cut, Shared& s,
                                            Arrivals& arrivals, const float* given, float* last) {
  constexpr bool kRuns = C == Carry::reverse_runs;
  constexpr int kStored = 128 + kScanStoreThreads, kFreed = kStored + READERS;
  constexpr int kUsers = 128 + READERS + kScanFetchThreads;
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  float state[SLABS][8][4] = {};
  if (is_written(C)) read_begin<SLABS>(state, p, item, cut, given, warp, l);
  unsigned run[kRuns ? SLABS : 1][4][4];  // as left operands
  float decay = 1, through = 1;
  Turn turn;
  for (int step = 0; step < item.steps; ++step) {
    arrivals.wait(s.arrived, turn.at);
    const auto& now = s.stage[turn.at];
    const float total = s.gates[turn.at].total[0];
    if constexpr (is_written(C)) {  // 1
      unsigned a[4 * SLABS][4];
      state_as_left<SLABS>(a, state);
      if constexpr (kRuns) {
        if (step == 0 || (item.first + item.steps - step) % p.pieces == 0) {
          decay = 1;
#pragma unroll
          for (int j = 0; j < SLABS; ++j) load_values(run[j], now.run[j], warp, l);
        }
        add_run<SLABS>(a, state, run, decay);
        decay *= total;
      }
      if (step >= 2) barrier_wait<kFreed>(kStateFree + (step & 1));
      put_state<SLABS>(s.states[step & 1], a, warp);
      publish_tiles();
      if constexpr (READERS > 0) barrier_arrive<128 + READERS>(kStateReadable + (step & 1));
      barrier_arrive<kStored>(kStateReady + (step & 1));
    }
    unsigned x[4][4], rest[4][4];
    scale_added<C>(x, now.v, s.gates[turn.at], p.scale, warp, l);
    if constexpr (C == Carry::contributions) scale_rest(rest, now.v, s.gates[turn.at], warp, l);
    through *= total;
    if (C == Carry::contributions && step % p.pieces == 0) clear_state<SLABS>(state);
    scale_state<SLABS>(state, total);
    warpgroup_begin();  // 2
#pragma unroll
    for (int j = 0; j < SLABS; ++j) multiply_columns(state[j], x, now.keys[Shared::kKeys - 1][j]);
    if constexpr (C == Carry::contributions)
#pragma unroll
      for (int j = 0; j < SLABS; ++j)
        multiply_columns(state[j], rest, now.keys[Shared::kKeys - 1][j]);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle_state<SLABS>(state);
    barrier_arrive<kUsers>(kStageDone + turn.at);
    if constexpr (C == Carry::contributions) {
      if ((step + 1) % p.pieces == 0 || step + 1 == item.steps) {
        const int run = step / p.pieces;
        if (last) {
          const int64_t at = (item.first_chunk + item.first) / p.pieces + run;
          write_transposed<SLABS>(last + p.state_at(at, item.h), state, p.key_dim, p.value_dim,
                                  item.v0 + 16 * warp, l);
        } else {
          if (run >= 2) barrier_wait<kFreed>(kStateFree + (run & 1));
#pragma unroll
          for (int j = 0; j < SLABS; ++j) {
            values_as_left(x, state[j]);
            put_values(s.states[run & 1][j], x, warp);
          }
          publish_tiles();
          barrier_arrive<kStored>(kStateReady + (run & 1));
        }
      }
    }
    turn.next<Shared::kStages>();
  }
  if constexpr (is_ends(C)) {
    const int64_t at = item.segment_at(p, cut);
    if (threadIdx.x == 0 && item.v0 == 0) cut.decays[at] = through;
    float* to = cut.ends + at * p.key_dim * p.value_dim;
    each_pair<SLABS>(p, item.v0 + 16 * warp, l, [&](int n, int half, bool inside, int64_t i) {
      const float(&y)[4] = state[n / 8][n % 8];
      if (inside) *reinterpret_cast<float2*>(to + i) = {y[2 * half], y[2 * half + 1]};
    });
  } else if (is_written(C) && last && item.segment == (is_reverse(C) ? 0 : cut.count - 1)) {
    write_transposed<SLABS>(last + item.state_at(p), state, p.key_dim, p.value_dim,
                            item.v0 + 16 * warp, l);
  }
}

// The storing warps: the states before each chunk, (READERS as above).
template <int SLABS, bool REVERSE, int READERS, class Shared>
__device__ __forceinline__ void store_states(const FastAttention& p, const AttentionItem& item,
                                             Shared& s, const TileTarget& states) {
  constexpr int kStored = 128 + kScanStoreThreads;
  for (int step = 0; step < item.steps; ++step) {
    const int64_t place =
        (item.first_chunk + item.template chunk<REVERSE>(step)) * p.value_heads + item.h;
    barrier_wait<kStored>(kStateReady + (step & 1));
    states.store<false>(s.states[step & 1], place, item.v0);
    if (step + 2 < item.steps) barrier_arrive<kStored + READERS>(kStateFree + (step & 1));
  }
}

}  // namespace ebb::gpu::linear_attention
