// What the two groups of warps of state_memory_fast_tokens.cu share: the block's memory, the tokens
// and heads that they go through, and where sums go.
#pragma once
#include "cuda/state_memory_fast.cuh"

namespace ebb::gpu::state_memory {

inline constexpr int kTokenReaders = 8, kGroup = 128, kBothGroups = 256;
// Barriers: of a group, and of what one group has made for the other, two turns each.
enum BarrierId { kKeys = 1, kWeightsReady = 2, kValuesReady = 4 };

template <int NT>
struct TokenShared {
  static constexpr int kStages = NT == 1 ? 12 : 8;
  // Memories that both groups take in at a time: as many as fill two tiles, since one product of
  // [64,64] at a time leaves the groups waiting for each other.
  static constexpr int kAtOnce = 2 / NT;
  MemoryRecord<NT> memory[kStages];
  SwizzledTile q[NT];       // f16 rows
  uint4 c[4 * NT][kGroup];  // f16 rows, each thread's own part, as left operands hold it
  // Of every token: logit_unit (base 2), the units of its f16 rows of q and e times 1/rms, and
  // scale times 1/rms of q and of e; of two heads: lse (base 2), R·dy, gate.
  float4 units[64], numbers[2][64];
  float weights[2][kAtOnce][64], values[2][kAtOnce][64];  // w gate and V·dy of two turns
  Ring<kStages, kTokenReaders> ring;
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
};
// Where one side stands: at the index-th memory of a head, and those that it takes in with it.
template <int AT_ONCE>
struct TurnPlace {
  int head, index = 0;

  // Whether it is at another head then.
  __device__ __forceinline__ bool next(const TokenWork& w) {
    index += AT_ONCE;
    if (index < w.memories) return false;
    index = 0, ++head;
    return true;
  }
  __device__ __forceinline__ static int turns(const TokenWork& w) {
    return (w.end - w.begin) * ((w.memories + AT_ONCE - 1) / AT_ONCE);
  }
};
// Where the memories of a turn lie in the ring. The last turn of a head may have fewer: the place
// of the one before stands for what is missing, which no token sees.
template <int STAGES, int AT_ONCE>
struct TurnMemories {
  RingPlace<STAGES> of[AT_ONCE];
  int count = 0;

  // Those from `place` on, which moves behind them.
  __device__ __forceinline__ void take(RingPlace<STAGES>& place, const TokenWork& w, int index) {
    count = min(AT_ONCE, w.memories - index);
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      of[j] = j < count ? place : of[j > 0 ? j - 1 : 0];
      if (j < count) place.next();
    }
  }
  template <int READERS>
  __device__ __forceinline__ void wait_full(Ring<STAGES, READERS>& ring) const {
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) of[j].wait_full(ring);
  }
  template <int READERS>
  __device__ __forceinline__ void release(Ring<STAGES, READERS>& ring) const {
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (j < count) of[j].release(ring);
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

}  // namespace ebb::gpu::state_memory
