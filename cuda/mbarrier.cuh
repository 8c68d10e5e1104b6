// Barriers in shared memory that count arrivals and bytes, and copies that report to them: how a
// warp that fetches feeds warps that multiply. One phase after the other; who waits names the
// parity of the phase whose end it waits for. Every lane of a warp arrives: that costs no more than
// one for all, and racecheck of compute-sanitizer follows it.
#pragma once
#include "cuda/tensor_map.h"
#include "cuda/warpgroup.cuh"

namespace ebb::gpu {

struct Mbarrier {
  uint64_t state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile(
        "{\n.reg .b64 t;\nmbarrier.arrive.shared.b64 t, [%0];\n}" ::"r"(shared_address(&state))
        : "memory");
  }
  __device__ __forceinline__ void wait(unsigned parity) {
    const unsigned address = shared_address(&state);
    unsigned ready = 0;
    while (!ready) {
#if __CUDA_ARCH__ >= 900
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(ready)
          : "r"(address), "r"(parity)
          : "memory");
#else
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(ready)
          : "r"(address), "r"(parity)
          : "memory");
#endif
    }
  }
};

// After init() and before the block's first barrier.
__device__ __forceinline__ void publish_barriers() {
#if EBB_WGMMA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A run of bytes to shared memory, a multiple of 16 and aligned to 16.
struct Run {
  void* to;
  const void* from;
  int bytes;
};
#if EBB_WGMMA
// By one thread: the arrival, and how many bytes complete the phase with it.
__device__ __forceinline__ void arrive_expecting(Mbarrier& arrived, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&arrived.state)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void fetch_run(const Run& run, Mbarrier& arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(run.to)),
      "l"(__cvta_generic_to_global(run.from)), "r"(run.bytes), "r"(shared_address(&arrived.state))
      : "memory");
}
// 64 rows and columns of a matrix.
__device__ __forceinline__ void fetch_box(SwizzledTile& to, const CUtensorMap& map, int column,
                                          int head, int64_t row, Mbarrier& arrived) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to.s)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(head), "r"(int(row)),
      "r"(shared_address(&arrived.state))
      : "memory");
}
#endif
// Runs by all lanes of one warp; `arrived`, which counts their arrivals, completes when they are
// there. On compute capability 9.0 the copy engine does it.
template <int N>
__device__ __forceinline__ void fetch_runs(const Run (&runs)[N], Mbarrier& arrived) {
  const int lane = int(threadIdx.x) & 31;
#if EBB_WGMMA
  if (lane != 0) return arrived.arrive();
  int bytes = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) bytes += runs[i].bytes;
  arrive_expecting(arrived, bytes);
#pragma unroll
  for (int i = 0; i < N; ++i) fetch_run(runs[i], arrived);
#else
#pragma unroll
  for (int i = 0; i < N; ++i)
    for (int at = 16 * lane; at < runs[i].bytes; at += 16 * 32)
      copy_async(static_cast<char*>(runs[i].to) + at, static_cast<const char*>(runs[i].from) + at);
  wait_copies();
  arrived.arrive();
#endif
}

// Blocks of two groups of four warps that multiply and one group of which one warp fetches: the
// registers of a multiprocessor, 168 for each of 384 threads, are shared out anew. By all four
// warps of a group.
inline constexpr int kFedThreads = 384;
template <int COUNT = 232>
__device__ __forceinline__ void multiplier_registers() {
#if EBB_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT = 40>
__device__ __forceinline__ void fetcher_registers() {
#if EBB_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// A ring of COUNT places, filled by one warp and read by READERS warps.
template <int COUNT, int READERS>
struct Ring {
  Mbarrier full[COUNT], empty[COUNT];

  __device__ __forceinline__ void init() {  // by one thread
    for (int i = 0; i < COUNT; ++i) full[i].init(32), empty[i].init(32 * READERS);
    publish_barriers();
  }
};
// Where one side stands in it.
template <int COUNT>
struct RingPlace {
  int at = 0;
  unsigned round = 0;

  __device__ __forceinline__ void next() {
    if (++at == COUNT) at = 0, ++round;
  }
  template <int READERS>
  __device__ __forceinline__ void wait_full(Ring<COUNT, READERS>& ring) const {
    ring.full[at].wait(round & 1);
  }
  template <int READERS>
  __device__ __forceinline__ void wait_empty(Ring<COUNT, READERS>& ring) const {
    if (round) ring.empty[at].wait(round & 1 ^ 1);
  }
  // By all lanes of a reading warp when it needs the place no more.
  template <int READERS>
  __device__ __forceinline__ void release(Ring<COUNT, READERS>& ring) const {
    __syncwarp();
    ring.empty[at].arrive();
  }
};

}  // namespace ebb::gpu
