// What the two scans of cuda/delta_fast.cuh have in common. A block of twelve warps has 64 columns
// of V of one segment of a sequence and one head: four warps multiply, 16 columns each; four
// fetch, two into even and two into odd places; four store results. Step s is a chunk, in reverse
// from the end.
//   fetching s                       multiplying s                    storing s
//   wait for done(s−STAGES); ask
//   for in[s mod STAGES], which
//   arrives by itself            ->  wait for arrived[s mod STAGES], free(s−2)  <-  states[s mod 2]
//                                                                                  stored: free(s)
//                                <-  products; done(s), ready(s)  ->  wait for ready(s)
// Whole chunks are fetched by the copy engine (cuda/tensor_map.h), which reports their arrival to
// an mbarrier: all stages are under way while the products run, and no thread works out addresses.
// The ragged chunk at a sequence's end, whose rows go on in the next sequence, is copied by the
// threads (and so are all on other GPUs). The rest are named barriers.
//
// Where sequences and heads are few, a sequence is cut into segments. A first pass finds what each
// makes of a zero state and, in extra columns, of each unit vector: S_end = M S_start + E. The
// states between segments follow one after the other (chain_segments), and the scan proper runs all
// segments at once.
#pragma once
#include "cuda/delta_scan_copies.cuh"
#include "cuda/meet.cuh"

namespace ebb::gpu::delta {

// What a segment starts from, transposed: in the first pass zero or a unit vector per column; of
// one segment the state given by the caller (or zero); else what chain_segments left.
template <int SLABS, bool ENDS>
__device__ __forceinline__ void read_start(float (&state)[SLABS][8][4], const Problem<bf16_t>& p,
                                           const ScanItem& item, const Segments& segments,
                                           const float* given, int warp, const Lane& l) {
  const int v = item.v0 + 16 * warp;
  if (!ENDS && segments.count == 1) {
    read_transposed<SLABS>(state, given ? given + item.state_at(p) : nullptr, p.key_dim,
                           p.value_dim, v, l);
    return;
  }
  const int unit = v - ScanItem::tiles(p, false) * kFastTile;
  const int64_t row = item.segment_row(p, segments, p.value_dim);
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * n + 2 * l.c + (e & 1), r = l.g + 8 * (e >> 1);
      float x = 0;
      if (ENDS)
        x = unit + r == k ? 1.f : 0.f;
      else if (k < p.key_dim && v + r < p.value_dim)
        x = segments.starts[(row + v + r) * p.key_dim + k];
      state[n / 8][n % 8][e] = x;
    }
}
template <int SLABS>
__device__ __forceinline__ void write_end(const float (&state)[SLABS][8][4],
                                          const Problem<bf16_t>& p, const ScanItem& item,
                                          const Segments& segments, int warp, const Lane& l) {
  const int rows = ScanItem::tiles(p, true) * kFastTile, v = item.v0 + 16 * warp;
  const int64_t row = item.segment_row(p, segments, rows);
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = 8 * n + 2 * l.c;
      if (k < p.key_dim)
        *reinterpret_cast<float2*>(segments.ends + (row + v + l.g + 8 * half) * p.key_dim + k) = {
            state[n / 8][n % 8][2 * half], state[n / 8][n % 8][2 * half + 1]};
    }
}
// What a block does: its items one after the other, by role. Each role is a loop of its own, or the
// compiler would not see which of them has the registers.
template <int ROLE, bool ENDS, bool REVERSE, class F>
__device__ __forceinline__ void each_item(const Problem<bf16_t>& p, const Segments& segments,
                                          F&& f) {
  const int64_t items = ScanItem::count(p, segments, ENDS);
  for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
    const ScanItem item(p, segments, ENDS, at);
    // Nobody starts from the end of the last segment, in the order of the scan.
    if (ENDS && item.segment == (REVERSE ? 0 : segments.count - 1)) continue;
    f(item);
    if (at + gridDim.x < items)
      barrier_meet<ROLE, kMultiplyThreads, kFetchThreads, kStoreThreads>(kItemDone);
  }
}

// With a decay per head; v is V or dO, `step` elements from token to token.
__device__ __forceinline__ ScanSource<2> gated_source(const FastProblem& p, const bf16_t* v,
                                                      int64_t step, int hv, int64_t token,
                                                      int64_t chunk) {
  const int64_t key = token * p.key_step + int64_t(hv / (p.value_heads / p.heads)) * p.key_dim;
  const bf16_t* a = p.a + p.row_at(token, hv) * 2 * kChunk;
  return {{p.k + key, p.q + key},
          v + token * step + int64_t(hv) * p.value_dim,
          a,
          a + kChunk,
          reinterpret_cast<const float*>(p.gates + chunk * p.value_heads + hv),
          p.key_step,
          step,
          scan_gate_floats(p.logits)};
}
inline ScanMaps<2> gated_maps(const FastProblem& p, const bf16_t* v, int64_t step, Device device) {
  const auto keys = [&](const bf16_t* g) {
    return tile_map(g, p.key_dim, p.heads, p.key_dim, p.tokens, p.key_step, device);
  };
  const auto square = [&](const bf16_t* g) {
    return tile_map(g, kChunk, p.value_heads, p.tokens * 2 * kChunk, p.tokens, 2 * kChunk, device);
  };
  return {{keys(p.k), keys(p.q)},
          tile_map(v, p.value_dim, p.value_heads, p.value_dim, p.tokens, step, device),
          square(p.a),
          square(p.a + kChunk),
          p.value_heads / p.heads};
}

// A scan's kernel by roles: multiply(item, arrivals), fetch(item) and, unless ENDS, store(item).
template <bool ENDS, bool REVERSE, class Shared, class Multiply, class Fetch, class Store>
__device__ __forceinline__ void run_roles(const Problem<bf16_t>& p, const Segments& segments,
                                          Shared& s, Multiply&& multiply, Fetch&& fetch,
                                          Store&& store) {
  if (threadIdx.x == 0) {
    for (uint64_t& arrived : s.arrived) expect_arrivals(&arrived);
    publish_tiles();
  }
  __syncthreads();
  if (threadIdx.x < kMultiplyThreads) {
    take_registers();
    Arrivals arrivals;
    each_item<0, ENDS, REVERSE>(p, segments,
                                [&](const ScanItem& item) { multiply(item, arrivals); });
  } else if (threadIdx.x < kMultiplyThreads + kFetchThreads) {
    give_registers();
    each_item<1, ENDS, REVERSE>(p, segments, fetch);
  } else {
    give_registers();
    each_item<2, ENDS, REVERSE>(p, segments, [&](const ScanItem& item) {
      if (!ENDS) store(item);
    });
  }
}
// With operands a chunk at a time: source(item, token, chunk); store runs a ScanStore.
template <int SLABS, int KEYS, bool ENDS, bool REVERSE, class Multiply, class Source, class Store>
__device__ __forceinline__ void run_scan(const Problem<bf16_t>& p, const Segments& segments,
                                         const ScanMaps<KEYS>& maps, ScanShared<SLABS, KEYS>& s,
                                         Multiply&& multiply, Source&& source, Store&& store) {
  run_roles<ENDS, REVERSE>(
      p, segments, s, multiply,
      [&](const ScanItem& item) {
        ScanFetch<SLABS, KEYS, REVERSE>{p, item, s, maps}.run(
            [&](int64_t token, int64_t chunk) { return source(item, token, chunk); });
      },
      store);
}

// How many segments fill the GPU, and their buffers; one where it is full anyway.
Segments cut_sequences(const Problem<bf16_t>& p, Device device, Tensor (&buffers)[2]);
// Segments::starts from ::ends and the state before the first segment (after the last, in reverse),
// f32 [N,HV,K,V] or null.
void chain_segments(const Problem<bf16_t>& p, const Segments& segments, const float* given,
                    bool reverse, cudaStream_t stream);

// The multiplying warps write their results: x [16 columns of V, 64 tokens] as left operands, and a
// transposed state.
__device__ __forceinline__ void put_values(SwizzledTile& s, const unsigned (&x)[4][4], int warp) {
  const int lane = int(threadIdx.x) & 31;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    store_matrices<true>(
        s.at(16 * k + 8 * (lane >> 4) + (lane & 7), 16 * warp + 8 * ((lane >> 3) & 1)), x[k]);
}
template <int SLABS>
__device__ __forceinline__ void put_state(SwizzledTile (&s)[SLABS],
                                          const unsigned (&x)[4 * SLABS][4], int warp) {
  const int lane = int(threadIdx.x) & 31;
#pragma unroll
  for (int k = 0; k < 4 * SLABS; ++k)
    store_matrices<false>(
        s[k / 4].at(16 * warp + 8 * ((lane >> 3) & 1) + (lane & 7), 16 * (k % 4) + 8 * (lane >> 4)),
        x[k]);
}
template <int SLABS>
__device__ __forceinline__ void state_as_left(unsigned (&a)[4 * SLABS][4],
                                              const float (&state)[SLABS][8][4]) {
#pragma unroll
  for (int k = 0; k < 4 * SLABS; ++k)
    as_left(a[k], state[k / 4][2 * k % 8], state[k / 4][2 * k % 8 + 1]);
}
template <int SLABS>
__device__ __forceinline__ void scale_state(float (&state)[SLABS][8][4], float factor) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[j][n][e] *= factor;
    settle(state[j]);
  }
}
template <int SLABS>
__device__ __forceinline__ void settle_state(float (&state)[SLABS][8][4]) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) settle(state[j]);
}

// A transposed state of more than 128 channels has no room as left operands beside itself: it goes
// to shared memory slab by slab, where the products find it. By all multiplying threads. STORED:
// and the storing ones.
template <int SLABS, bool STORED = true>
__device__ __forceinline__ void publish_state(SwizzledTile (&s)[SLABS],
                                              const float (&state)[SLABS][8][4], int warp) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j) {
    unsigned a[4][4];
    values_as_left(a, state[j]);
    const int lane = int(threadIdx.x) & 31;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      store_matrices<false>(
          s[j].at(16 * warp + 8 * ((lane >> 3) & 1) + (lane & 7), 16 * k + 8 * (lane >> 4)), a[k]);
  }
  publish_tiles();
  barrier_wait<kMultiplyThreads>(kStatePut);
  if (STORED) barrier_arrive<256>(kStateReady);
}
// Before it is published again, at the second step and later ones.
template <bool STORED>
__device__ __forceinline__ void wait_for_state() {
  if constexpr (STORED)
    barrier_wait<256>(kFree);
  else
    barrier_wait<kMultiplyThreads>(kStatePut);  // the others' products may still read it
}
// x = state · keysᵀ, the state from there.
template <int SLABS>
__device__ __forceinline__ void multiply_state(float (&x)[8][4], const SwizzledTile (&state)[SLABS],
                                               const SwizzledTile (&keys)[SLABS], int warp) {
  multiply_tiles<true, Inner::last, Inner::last>(x, state[0], keys[0], warp);
#pragma unroll
  for (int j = 1; j < SLABS; ++j)
    multiply_tiles<false, Inner::last, Inner::last>(x, state[j], keys[j], warp);
}

// Registers of a [16, 64 tokens] tile scaled token by token.
__device__ __forceinline__ void scale_tokens(float (&x)[8][4], const float* s_scale, float factor,
                                             const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 f = *reinterpret_cast<const float2*>(s_scale + 8 * n + 2 * l.c);
    x[n][0] *= factor * f.x, x[n][1] *= factor * f.y;
    x[n][2] *= factor * f.x, x[n][3] *= factor * f.y;
  }
}
// Left operands [16 columns of V, 64 tokens] of a tile [tokens,V].
__device__ __forceinline__ void load_values(unsigned (&a)[4][4], const SwizzledTile& s, int warp,
                                            const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    load_matrices_transposed(a[k], s.at(16 * k + l.low + 8 * l.high, 16 * warp + 8 * l.odd));
}

}  // namespace ebb::gpu::delta
