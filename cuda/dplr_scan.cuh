// The roles of a block of dplr's scans (dplr_fast_scan.cu, dplr_wide_scan.cu): one warp fetches,
// four multiply, four store results, with a ring of buffers on either side of those that multiply.
#pragma once
#include "cuda/delta_scan.cuh"
#include "cuda/dplr_chunk.cuh"
#include "cuda/mbarrier.cuh"

namespace ebb::gpu::low_rank {

inline constexpr int kWarpsOfRole = 4, kRoleThreads = 32 * kWarpsOfRole;
inline constexpr int kThreads = 2 * kRoleThreads + 32;
// Registers are given and taken by whole groups of four warps.
inline constexpr int kSharingThreads = 3 * kRoleThreads;

// Results of four warps for four others.
template <int OUTS>
struct Outputs {
  Mbarrier full[OUTS], empty[OUTS];

  __device__ __forceinline__ void init() {  // by one thread
    for (int i = 0; i < OUTS; ++i) full[i].init(kRoleThreads), empty[i].init(kRoleThreads);
  }
};
template <int OUTS>
struct OutputPlace : RingPlace<OUTS> {
  __device__ __forceinline__ void wait_empty(Outputs<OUTS>& s) const {
    if (this->round) s.empty[this->at].wait(this->round & 1 ^ 1);
  }
  __device__ __forceinline__ void wait_full(Outputs<OUTS>& s) const {
    s.full[this->at].wait(this->round & 1);
  }
  // By all lanes of a warp that has written, or read, its part.
  __device__ __forceinline__ static void arrive(Mbarrier& s) {
    __syncwarp();
    s.arrive();
  }
};

// SLOTS: inputs of a step; where there are several, the warps that multiply have more registers.
template <class Input, class Output, int INS, int OUTS, int SLOTS = 1>
struct StepShared {
  static constexpr int kIns = INS, kOuts = OUTS, kSlots = SLOTS;
  static constexpr bool kShares = SLOTS > 1;
  Input in[INS];
  Output out[OUTS];
  Ring<INS, kWarpsOfRole> ring;
  Outputs<OUTS> outputs;
};
// x += the warp's 16 rows of a tile, as accumulators hold them.
__device__ __forceinline__ void add_rows(float (&x)[8][4], const SwizzledTile& s, int m0,
                                         const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 y = pair_at(s, m0, n, half, l);
      x[n][2 * half] += y.x, x[n][2 * half + 1] += y.y;
    }
}
// x [16 columns of V, tokens] += the warp's columns of a tile [tokens,V].
__device__ __forceinline__ void add_columns(float (&x)[8][4], const SwizzledTile& s, int warp,
                                            const Lane& l) {
  unsigned y[4][4];
  load_values(y, s, warp, l);
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 z = pair_of(y[n / 2][2 * (n % 2) + half]);
      x[n][2 * half] += z.x, x[n][2 * half + 1] += z.y;
    }
}
// Values [16 columns of V, tokens] without what lies behind the sequence's end.
__device__ __forceinline__ void cut_tokens(unsigned (&x)[4][4], int rows, const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int t = 16 * k + 8 * (e >> 1) + 2 * l.c;
      x[k][e] = t + 1 < rows ? x[k][e] : t < rows ? x[k][e] & 0xffffu : 0u;
    }
}

// By the warps that store.
__device__ __forceinline__ void store_tile(SwizzledTile& g, const SwizzledTile& s) {
  const int at = 8 * (int(threadIdx.x) & (kRoleThreads - 1));
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store_word(reinterpret_cast<uint4*>(g.s + at + 8 * kRoleThreads * i),
               *reinterpret_cast<const uint4*>(s.s + at + 8 * kRoleThreads * i));
}
__device__ __forceinline__ void store_values(bf16_t* g, int64_t stride, const SwizzledTile& s,
                                             int rows, int cols) {
  const int t = int(threadIdx.x) & (kRoleThreads - 1), r = t / 8, c = t % 8 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (r + 16 * i < rows && c < cols)
      store_word(reinterpret_cast<uint4*>(g + (r + 16 * i) * stride + c),
                 *reinterpret_cast<const uint4*>(s.at(r + 16 * i, c)));
}

// The roles of a block: multiply(item, place of inputs, place of outputs), store(item, token,
// chunk, rows, output), fetch(item, token, chunk, slot, input, barrier).
template <bool ENDS, bool REVERSE, class Shared, class Multiply, class Store, class Fetch>
__device__ __forceinline__ void run_roles(const FastProblem& p, const Segments& segments, Shared& s,
                                          Multiply&& multiply, Store&& store, Fetch&& fetch) {
  if (threadIdx.x == 0) s.outputs.init(), s.ring.init();
  __syncthreads();
  const int role = int(threadIdx.x) / kRoleThreads;
  const int64_t items = ScanItem::count(p, segments, ENDS);
  const auto each = [&](auto&& f) {
    for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
      const ScanItem item(p, segments, ENDS, at);
      // Nobody starts from the end of the last segment, in the order of the scan.
      if (ENDS && item.segment == (REVERSE ? 0 : segments.count - 1)) continue;
      f(item);
    }
  };
  const auto each_step = [&](const ScanItem& item, auto&& f) {
    for (int step = 0; step < int(item.steps); ++step) {
      const int64_t chunk = chunk_of_step<REVERSE>(item, step);
      f(step, item.walk.begin + chunk * kChunk, item.walk.first + chunk);
    }
  };
  if (role == 0) {
    if constexpr (Shared::kShares) take_registers();
    RingPlace<Shared::kIns> in;
    OutputPlace<Shared::kOuts> to;
    each([&](const ScanItem& item) { multiply(item, in, to); });
  } else if (role == 1) {
    if constexpr (Shared::kShares) give_registers();
    OutputPlace<Shared::kOuts> from;
    if (ENDS) return;
    each([&](const ScanItem& item) {
      each_step(item, [&](int step, int64_t token, int64_t chunk) {
        const int rows = step == (REVERSE ? 0 : int(item.steps) - 1) ? item.last_rows() : kChunk;
        from.wait_full(s.outputs);
        store(item, token, chunk, rows, s.out[from.at]);
        decltype(from)::arrive(s.outputs.empty[from.at]);
        from.next();
      });
    });
  } else {
    if constexpr (Shared::kShares) {
      give_registers();
      if (int(threadIdx.x) >= kThreads) return;
    }
    RingPlace<Shared::kIns> to;
    each([&](const ScanItem& item) {
      each_step(item, [&](int, int64_t token, int64_t chunk) {
#pragma unroll 1
        for (int slot = 0; slot < Shared::kSlots; ++slot) {
          to.wait_empty(s.ring);
          fetch(item, token, chunk, slot, s.in[to.at], s.ring.full[to.at]);
          to.next();
        }
      });
    });
  }
}

inline dim3 scan_grid(const FastProblem& p, const Segments& segments, bool ends) {
  return grid_of(ScanItem::count(p, segments, ends));
}

}  // namespace ebb::gpu::low_rank
