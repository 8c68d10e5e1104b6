// The scans of the delta rule with a decay per channel in bf16 on tensor cores for heads of 136 to
// 256 channels (delta_fast_channel.cu has the narrower ones): the state lies in registers as four
// slabs of 64 channels, and once a chunk in shared memory, where the products read it.
#include "cuda/delta_channel_ring.cuh"

namespace ebb::gpu::delta {
namespace {

constexpr int kSlabs = 4;

// Y = β V − K̂ S as left operands in `v`, where V was (β is 1 where V came with its gate).
__device__ __forceinline__ void subtract_erased(unsigned (&v)[4][4], float (&y)[8][4],
                                                const float* beta, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 b = *reinterpret_cast<const float2*>(beta + 8 * n + 2 * l.c);
    const unsigned top = v[n / 2][2 * (n % 2)], bottom = v[n / 2][2 * (n % 2) + 1];
    y[n][0] = b.x * low_half(top) - y[n][0], y[n][1] = b.y * high_half(top) - y[n][1];
    y[n][2] = b.x * low_half(bottom) - y[n][2], y[n][3] = b.y * high_half(bottom) - y[n][3];
  }
  values_as_left(v, y);
}

// By the warps that multiply. Per chunk: 1 S to shared memory, K̂ S and Q̃ S. 2 Y = β V − K̂ S. 3 V' =
// A Y. 4 S = Diag(γ_n) S + K̄ᵀ V', and o = Q̃ S + P V'; V' out meanwhile, then o. At the end: 5 ht.
// ENDS: the state only, written for chain_segments. PLAIN: nothing is erased, V' = V.
template <bool ENDS, bool PLAIN>
__device__ void scan(const Channel<bf16_t>& p, const ScanItem& item, const Segments& segments,
                     RingShared& s, Arrivals& arrivals, float* ht) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  float state[kSlabs][8][4];
  read_start<kSlabs, ENDS>(state, p, item, segments, p.h0, warp, l);
  RingTurn ring;
  for (int step = 0; step < int(item.steps); ++step) {
    const float* numbers = s.numbers[ring.stage];
    const RingTiles& now = s.tiles[ring.stage];
    unsigned v[4][4];
    float y[8][4], out[8][4];
    if constexpr (!ENDS || !PLAIN) {  // 1
      if (step > 0) wait_for_state<!ENDS>();
      publish_state<kSlabs, !ENDS>(s.states[0], state, warp);
    }
    if constexpr (!PLAIN) {
      const auto& erased = ring.wait(s, arrivals);
      warpgroup_begin();
      multiply_state<kSlabs>(y, s.states[0], erased, warp);
      warpgroup_commit();
    }
    if constexpr (!ENDS) {
      const auto& queries = PLAIN ? ring.wait(s, arrivals) : ring.wait_next(s, arrivals);
      warpgroup_begin();
      multiply_state<kSlabs>(out, s.states[0], queries, warp);
      warpgroup_commit();
    }
    ring.wait_tiles(s, arrivals);
    load_values(v, now.v, warp, l);
    if constexpr (!PLAIN) {
      warpgroup_wait<ENDS ? 0 : 1>();
      settle(y);
      ring.done();
      subtract_erased(v, y, numbers + p.key_dim, l);  // 2
      float values[8][4];                             // 3
      settle(v);
      warpgroup_begin();
      multiply_rows<true>(values, v, now.a);
      warpgroup_commit();
      decay_state<kSlabs>(state, numbers, p.key_dim, l);
      warpgroup_wait<0>();
      settle(v), settle(values);
      values_as_left(v, values);
    } else {
      warpgroup_wait<0>();
      decay_state<kSlabs>(state, numbers, p.key_dim, l);
    }
    if constexpr (!ENDS) settle(out), ring.done();
    const auto& kept = ring.wait(s, arrivals);
    settle(v);
    warpgroup_begin();  // 4
    if constexpr (!ENDS) {
      multiply_rows(out, v, now.p);
      warpgroup_commit();
    }
    add_to_state<kSlabs>(state, v, kept);
    warpgroup_commit();
    if constexpr (!ENDS) {
      wait_for_values<1>(step);
      put_values(s.out[0].values, v, warp);
      warpgroup_wait<1>();
      settle(out);
      unsigned o[4][4];
      values_as_left(o, out);
      put_values(s.out[0].other, o, warp);
      barrier_arrive<256>(kReady + (step & 1));
    }
    warpgroup_wait<0>();
    settle(v), settle_state<kSlabs>(state);
    ring.done();
    ring.stage_done();
  }
  if (ENDS)
    write_end<kSlabs>(state, p, item, segments, warp, l);
  else if (ht && item.segment == segments.count - 1)  // 5
    write_transposed<kSlabs>(ht + item.state_at(p), state, p.key_dim, p.value_dim,
                             item.v0 + 16 * warp, l);
}

template <bool ENDS, bool PLAIN>
__global__ void __launch_bounds__(kScanThreads, 1)
    wide_scan_kernel(Channel<bf16_t> p, Segments segments, const __grid_constant__ ScanMaps<3> maps,
                     bf16_t* o, float* ht) {
  auto& s = swizzled_shared<RingShared>();
  run_ring_scan<false, ENDS, PLAIN>(
      p, segments, maps, s,
      [&](const ScanItem& item, Arrivals& arrivals) {
        scan<ENDS, PLAIN>(p, item, segments, s, arrivals, ht);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk) {
        const bf16_t* v = p.written ? p.written + p.row_at(token, item.hv) * p.value_dim
                                    : p.v + p.v_at(token, item.hv);
        return channel_source(p, v, p.written ? p.value_dim : p.v_stride(), item.hv, token, chunk);
      },
      [&](const ScanItem& item) {
        ScanStore<kSlabs, 3, false>(p, item, s, p.values, o, p.value_stride())
            .run(ChunkStates{p, item, p.states});
      });
}

// By the warps that multiply; Dᵀ in registers. Per chunk, from the last: 1 D to shared memory, dV'
// = K̄ D + Pᵀ dO. 2 X = Aᵀ dV'. 3 D = Diag(γ_n) D + Q̃ᵀ dO − K̂ᵀ X; X out meanwhile. At the end: 4
// dh0. ENDS, PLAIN (X = dV') as above.
template <bool ENDS, bool PLAIN>
__device__ void reverse_scan(const ChannelBackward<bf16_t>& p, const ScanItem& item,
                             const Segments& segments, RingShared& s, Arrivals& arrivals) {
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  float state[kSlabs][8][4];
  read_start<kSlabs, ENDS>(state, p, item, segments, p.dht, warp, l);
  RingTurn ring;
  for (int step = 0; step < int(item.steps); ++step) {
    const float* numbers = s.numbers[ring.stage];
    const RingTiles& now = s.tiles[ring.stage];
    unsigned doa[4][4], xa[4][4], minus[4][4];  // minus: −X
    float dv[8][4];
    if (step > 0) wait_for_state<!ENDS>();  // 1
    publish_state<kSlabs, !ENDS>(s.states[0], state, warp);
    ring.wait_tiles(s, arrivals);
    load_values(doa, now.v, warp, l);
    const auto& kept = ring.wait(s, arrivals);
    settle(doa);
    warpgroup_begin();
    multiply_state<kSlabs>(dv, s.states[0], kept, warp);
    multiply_columns(dv, doa, now.p);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(dv);
    ring.done();
    values_as_left(xa, dv);
    if constexpr (PLAIN) {
      decay_state<kSlabs>(state, numbers, p.key_dim, l);
    } else {
      float x[8][4];  // 2
      settle(xa);
      warpgroup_begin();
      multiply_columns<true>(x, xa, now.a);
      warpgroup_commit();
      decay_state<kSlabs>(state, numbers, p.key_dim, l);
      warpgroup_wait<0>();
      settle(xa), settle(x);
      values_as_left(xa, x);
    }
    const auto& queries = ring.wait(s, arrivals);
    warpgroup_begin();  // 3
    add_to_state<kSlabs>(state, doa, queries);
    warpgroup_commit();
    if constexpr (!ENDS) {
      wait_for_values<1>(step);
      put_values(PLAIN ? s.out[0].other : s.out[0].values, xa, warp);
      barrier_arrive<256>(kReady + (step & 1));
    }
    if constexpr (!PLAIN) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) minus[k][e] = xa[k][e] ^ 0x80008000u;
      settle(minus);
      const auto& erased = ring.wait_next(s, arrivals);
      warpgroup_begin();
      add_to_state<kSlabs>(state, minus, erased);
      warpgroup_commit();
      warpgroup_wait<1>();
      ring.done();
    }
    warpgroup_wait<0>();
    if constexpr (!PLAIN) settle(minus);
    settle(doa), settle_state<kSlabs>(state);
    ring.done();
    ring.stage_done();
  }
  if (ENDS)
    write_end<kSlabs>(state, p, item, segments, warp, l);
  else if (p.dh0 && item.segment == 0)  // 4
    write_transposed<kSlabs>(p.dh0 + item.state_at(p), state, p.key_dim, p.value_dim,
                             item.v0 + 16 * warp, l);
}

template <bool ENDS, bool PLAIN>
__global__ void __launch_bounds__(kScanThreads, 1)
    wide_reverse_kernel(ChannelBackward<bf16_t> p, Segments segments,
                        const __grid_constant__ ScanMaps<3> maps) {
  auto& s = swizzled_shared<RingShared>();
  run_ring_scan<true, ENDS, PLAIN>(
      p, segments, maps, s,
      [&](const ScanItem& item, Arrivals& arrivals) {
        reverse_scan<ENDS, PLAIN>(p, item, segments, s, arrivals);
      },
      [&](const ScanItem& item, int64_t token, int64_t chunk) {
        return channel_source(p, p.d_o + p.value_at(token, item.hv), p.value_stride(), item.hv,
                              token, chunk);
      },
      [&](const ScanItem& item) {
        ScanStore<kSlabs, 3, true>(p, item, s, PLAIN ? nullptr : p.x, PLAIN ? p.dv : nullptr,
                                   p.dv_step())
            .run(ChunkStates{p, item, p.dstates});
      });
}

template <bool ENDS, class P, class... P2, class... A>
void launch(void (*kernel)(P2...), const P& p, const Segments& segments, cudaStream_t stream,
            const A&... more) {
  launch_fast<RingShared>(kernel, kScanThreads, grid_of(ScanItem::count(p, segments, ENDS)), stream,
                          p, segments, more...);
}

template <bool PLAIN>
void run_forward(const Channel<bf16_t>& p, const Segments& segments, const ScanMaps<3>& maps,
                 bf16_t* o, float* ht, cudaStream_t stream) {
  if (segments.count > 1) {
    launch<true>(wide_scan_kernel<true, PLAIN>, p, segments, stream, maps, o, ht);
    chain_segments(p, segments, p.h0, false, stream);
  }
  launch<false>(wide_scan_kernel<false, PLAIN>, p, segments, stream, maps, o, ht);
}
template <bool PLAIN>
void run_reverse(const ChannelBackward<bf16_t>& p, const Segments& segments,
                 const ScanMaps<3>& maps, cudaStream_t stream) {
  if (segments.count > 1) {
    launch<true>(wide_reverse_kernel<true, PLAIN>, p, segments, stream, maps);
    chain_segments(p, segments, p.dht, true, stream);
  }
  launch<false>(wide_reverse_kernel<false, PLAIN>, p, segments, stream, maps);
}

}  // namespace

void wide_channel_scan(const Channel<bf16_t>& p, const Segments& segments, const ScanMaps<3>& maps,
                       bf16_t* o, float* ht, cudaStream_t stream) {
  (p.plain ? run_forward<true> : run_forward<false>)(p, segments, maps, o, ht, stream);
}

void wide_channel_reverse(const ChannelBackward<bf16_t>& p, const Segments& segments,
                          const ScanMaps<3>& maps, cudaStream_t stream) {
  (p.plain ? run_reverse<true> : run_reverse<false>)(p, segments, maps, stream);
}

}  // namespace ebb::gpu::delta
