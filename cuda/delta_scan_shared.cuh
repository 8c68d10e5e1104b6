// Shared memory, barriers and shares of work of the scans (cuda/delta_scan.cuh).
#pragma once
#include "cuda/delta_fast.cuh"
#include "cuda/tensor_map.h"

namespace ebb::gpu::delta {

inline constexpr int kMultiplyThreads = 128, kFetchThreads = 128, kStoreThreads = 128;
inline constexpr int kScanThreads = kMultiplyThreads + kFetchThreads + kStoreThreads;

// Two scans exist: with a decay per head (KEYS = 2: k, q), and with one per channel (KEYS = 3: the
// operands k for the erasing, q for the reading and k for the writing that
// delta_fast_channel_prepare.cu has multiplied with their decays).
template <int SLABS, int KEYS>
struct ScanInputs {
  SwizzledTile keys[KEYS][SLABS], a, p, v;  // v: V or dO
  // With a decay per head γ, τ, β, γ_n and, for K <= 128, γ of the reads; else γ_n by channel and
  // β.
  float numbers[KEYS == 2 ? scan_gate_floats(SLABS <= 2) : 64 * SLABS + kChunk];

  __device__ __forceinline__ const SwizzledTile (&k() const)[SLABS] { return keys[0]; }
  __device__ __forceinline__ const SwizzledTile (&q() const)[SLABS] { return keys[1]; }
  __device__ __forceinline__ const SwizzledTile (&kept() const)[SLABS] { return keys[KEYS - 1]; }
  __device__ __forceinline__ const float* gamma() const { return numbers; }
  __device__ __forceinline__ const float* tail() const { return numbers + kChunk; }
  __device__ __forceinline__ const float* beta() const { return numbers + 2 * kChunk; }
  __device__ __forceinline__ float total() const { return numbers[3 * kChunk]; }
  // Of the reads: apart, or as that of the keys.
  __device__ __forceinline__ const float* read(bool apart) const {
    return SLABS <= 2 && apart ? numbers + 3 * kChunk + 4 : numbers;
  }
};
struct ValueOutputs {
  SwizzledTile values, other;  // [tokens,V]
};
template <int SLABS, int KEYS>
struct ScanShared {
  static constexpr int kStages = SLABS == 1 || (SLABS == 2 && KEYS == 2) ? 3 : 2;
  static constexpr int kOuts = SLABS == 1 ? 2 : 1, kStates = SLABS > 2 ? 1 : 2;
  ScanInputs<SLABS, KEYS> in[kStages];
  SwizzledTile states[kStates][SLABS];  // [V,K]
  ValueOutputs out[kOuts];
  uint64_t arrived[kStages];
};

// What a scan reads: matrices in memory, coordinates (column, head, token), keys of head hv/group.
template <int KEYS>
struct ScanMaps {
  CUtensorMap keys[KEYS], v, a, p;
  int group = 1;
};
// The same at one token and chunk of a head, for copies by threads.
template <int KEYS>
struct ScanSource {
  static constexpr int64_t kPairStride = KEYS == 2 ? 2 * kChunk : kChunk;  // rows of a and p

  const bf16_t *keys[KEYS], *v, *a, *p;
  const float* numbers;
  int64_t key_stride, value_stride;
  int number_count;
};

// The multiplying warps need more registers than a block of twelve warps has for each; the others
// need fewer. Called by all four warps of a group.
__device__ __forceinline__ void take_registers() {
#if EBB_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#endif
}
__device__ __forceinline__ void give_registers() {
#if EBB_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
#endif
}
// First ids of the barriers, each between the 128 multiplying threads and some of the others.
inline constexpr int kDone = 1, kFree = 4, kReady = 6, kFreeValues = 8;
inline constexpr int kStatePut = 10;    // of the multiplying threads alone
inline constexpr int kStateReady = 11;  // with the storing ones, where states have one place
inline constexpr int kItemDone = 12;    // of the three roles, and the two after it

// A stage's arrivals: half of the fetching threads, and the bytes that one of them announces.
__device__ __forceinline__ void expect_arrivals(uint64_t* arrived) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(arrived)),
               "n"(kFetchThreads / 2)
               : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* arrived) {
  asm volatile(
      "{\n.reg .b64 t;\nmbarrier.arrive.shared.b64 t, [%0];\n}" ::"r"(shared_address(arrived))
      : "memory");
}
#if EBB_WGMMA
__device__ __forceinline__ void arrive_with_bytes(uint64_t* arrived, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(arrived)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void fetch_box(SwizzledTile& tile, const CUtensorMap& map, int column,
                                          int head, int64_t row, uint64_t* arrived) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(tile.s)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(head), "r"(int(row)),
      "r"(shared_address(arrived))
      : "memory");
}
// A multiple of 16 bytes, aligned to 16.
__device__ __forceinline__ void fetch_run(void* shared, const void* global, int bytes,
                                          uint64_t* arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(arrived))
      : "memory");
}
#endif
// What the multiplying warps wait with; it counts how often each stage has been filled.
struct Arrivals {
  unsigned phases = 0;  // a bit per stage

  __device__ __forceinline__ void wait(uint64_t* arrived, int stage) {
    const unsigned phase = phases >> stage & 1, address = shared_address(arrived + stage);
    unsigned ready = 0;
    while (!ready) {
#if __CUDA_ARCH__ >= 900
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(ready)
          : "r"(address), "r"(phase)
          : "memory");
#else
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(ready)
          : "r"(address), "r"(phase)
          : "memory");
#endif
    }
    phases ^= 1u << stage;
  }
};

// How sequences are cut: the same number of segments each, of equal length (the last may be
// shorter, or empty). ends: what the first pass leaves, f32 [N,segments,HV,rows,K], rows of V and
// then of M; starts: [N,segments,HV,V,K], transposed states.
struct Segments {
  int count = 1;
  float *ends = nullptr, *starts = nullptr;
};

// One block's share: a segment of a sequence, a head, 64 columns of V. ENDS: the first pass, where
// columns from the next multiple of 64 behind V on are the unit vectors of K.
struct ScanItem {
  int v0, hv, segment;
  int64_t sequence;
  int64_t first, steps;  // chunk of the sequence, how many
  ChunkWalk walk;

  __device__ __forceinline__ ScanItem(const Problem<bf16_t>& p, const Segments& segments, bool ends,
                                      int64_t item)
      : v0(int(item % tiles(p, ends)) * kFastTile),
        hv(int(item / tiles(p, ends) % p.value_heads)),
        segment(int(item / tiles(p, ends) / p.value_heads % segments.count)),
        sequence(item / tiles(p, ends) / p.value_heads / segments.count),
        walk(p, sequence) {
    const int64_t length = (walk.count + segments.count - 1) / segments.count;
    first = segment * length;
    const int64_t left = walk.count - first;
    steps = left < 0 ? 0 : (left < length ? left : length);
  }
  __host__ __device__ __forceinline__ static int tiles(const Problem<bf16_t>& p, bool ends) {
    const int values = (p.value_dim + kFastTile - 1) / kFastTile;
    return values + (ends ? (p.key_dim + 63) / 64 : 0);
  }
  __host__ __device__ __forceinline__ static int64_t count(const Problem<bf16_t>& p,
                                                           const Segments& segments, bool ends) {
    return p.sequences * segments.count * p.value_heads * tiles(p, ends);
  }
  // Of the f32 states [N,HV,K,V].
  __device__ __forceinline__ int64_t state_at(const Problem<bf16_t>& p) const {
    return (sequence * p.value_heads + hv) * p.key_dim * p.value_dim;
  }
  // Row 0 of this item's place in Segments::ends or ::starts.
  __device__ __forceinline__ int64_t segment_row(const Problem<bf16_t>& p, const Segments& segments,
                                                 int rows) const {
    return ((sequence * segments.count + segment) * p.value_heads + hv) * rows;
  }
  __device__ __forceinline__ int last_rows() const {
    const int64_t left = walk.end - walk.begin - (first + steps - 1) * kChunk;
    return int(left < kChunk ? left : kChunk);
  }
};

// The place of a step among `SIZE` buffers.
struct Turn {
  int at = 0;
  template <int SIZE>
  __device__ __forceinline__ void next(int by = 1) {
    at += by;
    if (at >= SIZE) at -= SIZE;
  }
};

// Where an item begins: its first chunk, in reverse its last, and `back` steps from there.
template <bool REVERSE>
__device__ __forceinline__ int64_t chunk_of_step(const ScanItem& item, int step) {
  return item.first + (REVERSE ? item.steps - 1 - step : step);
}

}  // namespace ebb::gpu::delta
