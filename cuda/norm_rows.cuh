// How rows are spread over a GPU, shared by rms_norm, gated_rms_norm, layer_norm and l2_norm.
//
// Operands are [tokens, groups, width] (ops/norm_rows.h): a token holds `groups` rows of `width`
// dense values, tokens may lie apart. `lanes` threads share a row and keep 16 of its values each,
// so a row is read once and stays in registers between its statistics and its output. A block works
// on `slots` rows at a time: `span` neighbouring groups of slots/span tokens. The grid is
// persistent: block (r, s) = (b / spans, b % spans), spans = groups/span, walks over the tokens, so
// that a thread always meets the same columns: weights and the sums that become weight gradients
// stay in registers too.
//
// Rows wider than 4096 are walked in tiles, twice (the second time out of L1 or L2). Sums over the
// threads of a row and over the rows of a column: cuda/norm_sums.cuh.
#pragma once
#include <atomic>
#include <initializer_list>
#include <type_traits>

#include "cuda/common.cuh"

namespace ebb::gpu {

constexpr int kRowValues = 16;    // values of a row per thread
constexpr int kRowThreads = 256;  // of a block, and so of a row, at most

struct RowPlan {
  int64_t tokens = 0, groups = 1, width = 0;
  int weight_groups = 1;  // weights [weight_groups, width] repeat over the groups
  int lanes = 1;          // threads per row: a power of two up to 32, then a multiple of 32
  int slots = 1;          // rows in a block at a time
  int token_slots = 1;    // tokens in a block at a time: slots / span
  int span = 1;           // groups in a block; divides slots and groups
  int spans = 1;          // groups / span
  int64_t blocks = 0;     // along the tokens = rows of partial sums
  bool wide = false;      // a row does not fit into the registers of its threads
  bool vector = false;

  int threads() const { return lanes * slots; }
  int64_t grid() const { return blocks * spans; }
};

// For rows of x's shape and weights (or their gradients) [weight_groups·width], of which any may be
// undefined. 16-byte accesses if the width and all places allow. plan.blocks is set by fill_device.
RowPlan plan_rows(const Tensor& x, std::initializer_list<const Tensor*> rows,
                  std::initializer_list<const Tensor*> weights);
// Blocks along the tokens: enough to fill the device, no more than there is work for.
int64_t row_blocks(const RowPlan& plan, int blocks_per_multiprocessor, Device device);
// f.operator()<N, kWide>(): values per access, and whether rows are walked in tiles.
template <class T, class F>
void visit_rows(const RowPlan& plan, F&& f) {
  constexpr int kVector = 16 / int(sizeof(T));
  if (plan.wide)
    f.template operator()<1, true>();
  else if (plan.vector)
    f.template operator()<kVector, false>();
  else
    f.template operator()<1, false>();
}

#ifdef __CUDACC__

// How many blocks of a kernel an SM holds; asked once per kernel and block size.
template <auto kKernel>
int blocks_per_multiprocessor(int threads) {
  static std::atomic<int> known[kRowThreads / 32 + 1];
  std::atomic<int>& n = known[threads / 32];
  if (n == 0) {
    int blocks = 0;
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, threads, 0),
               "occupancy");
    n = blocks > 1 ? blocks : 1;
  }
  return n;
}

// [tokens, groups, width] in memory.
template <class T>
struct Rows {
  T* p = nullptr;
  int64_t stride = 0;  // from token to token
};
template <class T>
Rows<device_t<T>> rows_of(const Tensor& t) {
  return {ptr<T>(t), t.defined() ? t.stride(0) : 0};
}

template <auto kKernel>
void fill_device(RowPlan& plan, Device device) {
  plan.blocks = row_blocks(plan, blocks_per_multiprocessor<kKernel>(plan.threads()), device);
}
template <auto kKernel, class... Args>
void launch_rows(const RowPlan& plan, const Tensor& on, Args... args) {
  kKernel<<<unsigned(plan.grid()), unsigned(plan.threads()), 0, stream_of(on)>>>(plan, args...);
  check_launch();
}

// N values of T as they lie in memory, moved by accesses of at most 16 bytes. Held as 32-bit words:
// nvcc shuffles single bf16 members through byte permutations.
template <class T, int N>
struct Packed {
  static constexpr int kBytes = N * int(sizeof(T)), kUnit = kBytes < 16 ? kBytes : 16;
  static constexpr bool kPairs = sizeof(T) == 2 && N > 1;
  using Word = std::conditional_t<kPairs, uint32_t, T>;
  struct alignas(kUnit) Unit {
    Word word[kUnit / sizeof(Word)];
  };
  static constexpr int kPerUnit = kUnit / int(sizeof(Word));
  Unit unit[kBytes / kUnit];

  __device__ __forceinline__ Word& word(int i) { return unit[i / kPerUnit].word[i % kPerUnit]; }
  __device__ __forceinline__ float at(int i) const {
    const int w = kPairs ? i / 2 : i;
    const Word x = unit[w / kPerUnit].word[w % kPerUnit];
    if constexpr (kPairs)
      return __uint_as_float(i % 2 ? x & 0xffff0000u : x << 16);
    else
      return to_float(x);
  }
  // value(i), i = 0...N-1, rounded.
  template <class F>
  __device__ __forceinline__ void fill(F&& value) {
    if constexpr (kPairs) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(value(2 * i), value(2 * i + 1));
        word(i) = reinterpret_cast<const uint32_t&>(two);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) word(i) = from_float<T>(value(i));
    }
  }
  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < kBytes / kUnit; ++i) unit[i] = reinterpret_cast<const Unit*>(p)[i];
  }
  __device__ __forceinline__ void store(T* p) const {
#pragma unroll
    for (int i = 0; i < kBytes / kUnit; ++i) reinterpret_cast<Unit*>(p)[i] = unit[i];
  }
};

// Whether a kernel fetches its next row while it works on the current one: with vector accesses and
// where the registers suffice (`streams` inputs of type T in the kernel).
template <class T, int N, bool kWide>
constexpr bool fetch_ahead(int streams) {
  return !kWide && N > 1 && streams * int(sizeof(T)) <= 6;
}

// A thread's way through the rows and its place within them.
template <int N, bool kWide>
struct RowWalk {
  static constexpr int kPacks = kRowValues / N;
  using Column = std::conditional_t<kWide, int64_t, int>;

  int lane, lanes, slot, span, token_slots;
  int block;  // along the tokens
  int weight_group;
  Column width;
  int64_t group, groups, tokens, stride;
  int64_t base, token;  // the block's first token in this step; the thread's own

  __device__ explicit RowWalk(const RowPlan& plan)
      : lane(int(threadIdx.x % unsigned(plan.lanes))),
        lanes(plan.lanes),
        slot(int(threadIdx.x / unsigned(plan.lanes))),
        span(plan.span),
        token_slots(plan.token_slots),
        block(int(blockIdx.x / unsigned(plan.spans))),
        width(Column(plan.width)),
        group(int64_t(blockIdx.x % unsigned(plan.spans)) * span + unsigned(slot) % unsigned(span)),
        groups(plan.groups),
        tokens(plan.tokens),
        stride(plan.blocks * plan.token_slots) {
    weight_group = int(unsigned(group) % unsigned(plan.weight_groups));
    base = int64_t(block) * token_slots;
    token = base + unsigned(slot) / unsigned(span);
  }
  // The same number of steps for all threads of a block, so that they may meet at barriers.
  __device__ bool more() const { return base < tokens; }
  __device__ void step() { base += stride, token += stride; }
  __device__ bool active() const { return token < tokens; }
  __device__ int64_t row(int64_t t) const { return t * groups + group; }  // of the statistics
  __device__ int64_t row() const { return row(token); }
  template <class T>
  __device__ T* start(const Rows<T>& g, int64_t t) const {
    return g.p + t * g.stride + group * width;
  }

  __device__ int64_t tiles() const {
    return kWide ? (width + lanes * kRowValues - 1) / (lanes * kRowValues) : 1;
  }
  // First column of pack p; a pack lies inside the row or outside as a whole.
  __device__ Column column(int p, int64_t tile) const {
    return Column((tile * kPacks + p) * lanes + lane) * N;
  }
  __device__ bool inside(int v, int64_t tile) const { return column(v / N, tile) < width; }
};

// Calls f(v) for the 16 values of a thread, f(p, v0) for its packs with v0 the first value of each;
// all are constants to the compiler.
template <class F>
__device__ __forceinline__ void each_value(F&& f) {
#pragma unroll
  for (int v = 0; v < kRowValues; ++v) f(v);
}

template <int N, class F>
__device__ __forceinline__ void each_pack(F&& f) {
#pragma unroll
  for (int p = 0; p < kRowValues / N; ++p) f(p, p * N);
}

// A thread's 16 values of a row; zeros outside the row or for a row that is not there.
template <class T, int N>
struct RowValues {
  Packed<T, N> pack[kRowValues / N];

  template <bool kWide>
  __device__ __forceinline__ void load(const Rows<T>& g, int64_t token, const RowWalk<N, kWide>& at,
                                       int64_t tile = 0) {
    const bool active = token < at.tokens;
    const T* p_row = at.start(g, token);
#pragma unroll
    for (int p = 0; p < kRowValues / N; ++p) {
      const auto c = at.column(p, tile);
      if (active && c < at.width)
        pack[p].load(p_row + c);
      else
        pack[p] = Packed<T, N>{};
    }
  }
  __device__ __forceinline__ float at(int v) const { return pack[v / N].at(v % N); }
  // To the compiler the values are new from here on: it converts bf16 again where they are used
  // next instead of keeping f32 copies in twice the registers.
  __device__ __forceinline__ void forget_copies() {
    if constexpr (Packed<T, N>::kPairs)
#pragma unroll
      for (int i = 0; i < kRowValues / 2; ++i)
        asm volatile("" : "+r"(pack[i * 2 / N].word(i % (N / 2))));
  }
};

// g[row, columns of pack p] = value(v), v counting through the thread's 16 values.
template <class T, int N, bool kWide, class F>
__device__ __forceinline__ void store_row_pack(const Rows<T>& g, const RowWalk<N, kWide>& at,
                                               int64_t tile, int p, F&& value) {
  const auto c = at.column(p, tile);
  if (!at.active() || c >= at.width) return;
  Packed<T, N> out;
  out.fill([&](int i) { return value(p * N + i); });
  out.store(at.start(g, at.token) + c);
}
template <class T, int N, bool kWide, class F>
__device__ __forceinline__ void store_row(const Rows<T>& g, const RowWalk<N, kWide>& at,
                                          int64_t tile, F&& value) {
#pragma unroll
  for (int p = 0; p < kRowValues / N; ++p) store_row_pack(g, at, tile, p, value);
}

#endif

}  // namespace ebb::gpu
