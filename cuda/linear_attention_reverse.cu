// Gated linear attention in bf16 on tensor cores: the scans that only carry the state
// (cuda/linear_attention_scan.cuh). Backward, S's gradient from the last chunk to the first; in
// both directions the first pass over segments.
#include "cuda/linear_attention_carry.cuh"

namespace ebb::gpu::linear_attention {
namespace {

constexpr int kCarryThreads = 256;

template <int SLABS, bool RUN>
struct CarryShared {
  static constexpr int kStages = SLABS == 1 || !RUN ? 6 : 4, kKeys = 1;
  ScanStage<SLABS, 1, RUN> stage[kStages];
  SwizzledTile states[2][SLABS];  // [V,K]
  alignas(16) FastGates gates[kStages];
  uint64_t arrived[kStages];
};

// The runs of an item, as [K,V].
template <int SLABS>
__device__ __forceinline__ void store_runs(const FastAttention& p, const AttentionItem& item,
                                           CarryShared<SLABS, false>& s, const TileTarget& to) {
  constexpr int kStored = 128 + kScanStoreThreads;
  const int64_t first = (item.first_chunk + item.first) / p.pieces;
  const int runs = (item.steps + p.pieces - 1) / p.pieces;
  for (int run = 0; run < runs; ++run) {
    barrier_wait<kStored>(kStateReady + (run & 1));
    to.store<true>(s.states[run & 1], (first + run) * p.value_heads + item.h, item.v0);
    if (run + 2 < runs) barrier_arrive<kStored>(kStateFree + (run & 1));
  }
}

// Block (sequence, segment, head, 64 columns of V). given, last: f32 [N,H,K,V] before the first
// chunk of the scan, and after its last; either may be null. Contributions go to states, or in f32
// to last.
template <int SLABS, Carry C>
__global__ void __launch_bounds__(kCarryThreads, 1)
    carry_kernel(FastAttention p, AttentionSegments cut,
                 const __grid_constant__ ScanSources<1> sources,
                 const __grid_constant__ TileTarget states, const float* given, float* last) {
  constexpr bool kRuns = C == Carry::reverse_runs;
  auto& s = swizzled_shared<CarryShared<SLABS, kRuns>>();
  open_stages(s.arrived);
  if (threadIdx.x < 128) {
    Arrivals arrivals;
    each_attention_item<0, 128, 128>(p, cut, [&](const AttentionItem& item) {
      carry_state<SLABS, C, 0>(p, item, cut, s, arrivals, given, last);
    });
  } else {
    each_attention_item<1, 128, 128>(p, cut, [&](const AttentionItem& item) {
      if (threadIdx.x < 128 + kScanFetchThreads)
        fetch_steps<128, is_reverse(C), kRuns, SLABS, false>(p, item, sources, s);
      else if constexpr (C == Carry::contributions) {
        if (!last) store_runs<SLABS>(p, item, s, states);
      } else if constexpr (is_written(C))
        store_states<SLABS, true, 0>(p, item, s, states);
    });
  }
}

template <Carry C>
void launch_carry(const FastAttention& p, const AttentionSegments& cut,
                  const ScanSources<1>& sources, const TileTarget& states, const float* given,
                  float* last, cudaStream_t stream) {
  visit_fast_slabs(p.key_dim, [&]<int SLABS>() {
    launch_fast<CarryShared<SLABS, C == Carry::reverse_runs>>(
        carry_kernel<SLABS, C>, kCarryThreads, grid_of(AttentionItem::count(p, cut)), stream, p,
        cut, sources, states, given, last);
  });
}

// A thread per element of the states: from one segment to the next.
__global__ void __launch_bounds__(256)
    chain_kernel(FastAttention p, AttentionSegments cut, const float* given, bool reverse) {
  const int64_t size = int64_t(p.key_dim) * p.value_dim, heads = p.value_heads;
  const int64_t step = int64_t(gridDim.x) * 256;
  for (int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x; i < p.sequences * heads * size;
       i += step) {
    const int64_t at = i % size, head = i / size, n = head / heads, h = head % heads;
    const int64_t v = at / p.key_dim, k = at % p.key_dim;
    float x = given ? given[head * size + k * p.value_dim + v] : 0.f;
    for (int j = 0; j < cut.count; ++j) {
      const int segment = reverse ? cut.count - 1 - j : j;
      const int64_t place = (n * cut.count + segment) * heads + h;
      cut.starts[place * size + at] = x;
      x = cut.decays[place] * x + cut.ends[place * size + at];
    }
  }
}

}  // namespace

TileSource token_source(const FastAttention& p, const bf16_t* g, int columns, int heads,
                        int64_t step, Device device) {
  const int64_t rows = p.tokens, stride = rows <= 1 ? int64_t(columns) * heads : step;
  return {stride > 0 ? tile_map(g, columns, heads, columns, rows, stride, device) : CUtensorMap{},
          g, columns, stride, columns};
}

TileTarget tile_target(bf16_t* g, int64_t heads, int64_t rows, int64_t columns, Device device) {
  return {tile_map(g, columns, heads, rows * columns, rows, columns, device), g, int(rows),
          int(columns)};
}

AttentionSegments cut_sequences(const FastAttention& p, Device device, Tensor (&buffers)[3]) {
  AttentionSegments cut;
  const int64_t items = AttentionItem::count(p, cut);
  if (items == 0 || p.chunks == 0) return cut;
  // A first pass and its chain must be worth their time.
  const int64_t count = std::min(multiprocessors(device) / items, p.chunks / p.sequences / 16);
  if (count < 2) return cut;
  const int64_t heads = p.sequences * count * p.value_heads;
  for (int i = 0; i < 2; ++i)
    buffers[i] = Tensor::empty({heads, p.value_dim, p.key_dim}, DType::f32, device);
  buffers[2] = Tensor::empty({heads}, DType::f32, device);
  cut.count = int(count);
  cut.ends = ptr<float>(buffers[0]), cut.starts = ptr<float>(buffers[1]);
  cut.decays = ptr<float>(buffers[2]);
  return cut;
}

void begin_segments(const FastAttention& p, const AttentionSegments& cut,
                    const ScanSources<1>& sources, const float* given, bool reverse,
                    cudaStream_t stream) {
  if (reverse)
    launch_carry<Carry::reverse_ends>(p, cut, sources, {}, nullptr, nullptr, stream);
  else
    launch_carry<Carry::forward_ends>(p, cut, sources, {}, nullptr, nullptr, stream);
  const int64_t elements = p.sequences * p.value_heads * p.key_dim * p.value_dim;
  chain_kernel<<<unsigned(std::min<int64_t>(ceil_div(elements, 256), 65536)), 256, 0, stream>>>(
      p, cut, given, reverse);
  check_launch();
}

void write_contributions(const FastAttention& p, const AttentionSegments& cut,
                         const ScanSources<1>& sources, const Tensor& contributions,
                         cudaStream_t stream) {
  const bool wide = contributions.dtype() == DType::f32;
  TileTarget to{};
  if (!wide)
    to = tile_target(ptr<bf16>(contributions), p.chunks / p.pieces * p.value_heads, p.key_dim,
                     p.value_dim, contributions.device());
  launch_carry<Carry::contributions>(p, cut, sources, to, nullptr,
                                     wide ? ptr<float>(contributions) : nullptr, stream);
}

void reverse_scan(const FastAttention& p, const AttentionSegments& cut,
                  const ScanSources<1>& sources, const float* dht, const TileTarget& dstates,
                  float* dh0, cudaStream_t stream) {
  if (cut.count > 1) begin_segments(p, cut, sources, dht, true, stream);
  if (sources.run.g)
    launch_carry<Carry::reverse_runs>(p, cut, sources, dstates, dht, dh0, stream);
  else
    launch_carry<Carry::reverse>(p, cut, sources, dstates, dht, dh0, stream);
}

}  // namespace ebb::gpu::linear_attention
