// Gated linear attention in bf16 on tensor cores: the scans that only carry the state
// (cuda/linear_attention_scan.cuh). Backward, S's gradient from the last chunk to the first; in
// both directions the first pass over segments.
#include "cuda/linear_attention_scan.cuh"

namespace ebb::gpu::linear_attention {
namespace {

constexpr int kCarryThreads = 256;

template <int SLABS, bool RUN>
struct CarryShared {
  static constexpr int kStages = SLABS == 1 || !RUN ? 6 : 4;
  ScanStage<SLABS, 1, RUN> stage[kStages];
  SwizzledTile states[2][SLABS];  // [V,K]
  alignas(16) FastGates gates[kStages];
  uint64_t arrived[kStages];
};

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

// What a carrying kernel is for.
enum class Carry {
  forward_ends,  // S from zero, nothing written but what it ends with
  reverse_ends,  // D from zero, the same
  reverse,       // D, written before each chunk is added
  reverse_runs,  // the same with the gradients of contributions
  contributions  // S from zero in each run, written at its end
};
constexpr bool is_ends(Carry c) { return c == Carry::forward_ends || c == Carry::reverse_ends; }
constexpr bool is_reverse(Carry c) { return c != Carry::forward_ends && c != Carry::contributions; }

template <int SLABS>
__device__ __forceinline__ void clear_state(float (&state)[SLABS][8][4]) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) state[n / 8][n % 8][e] = 0.f;
}

// The multiplying warps, 16 columns of V each, state transposed in registers. Per chunk, in
// reverse: 1 D+E out, where E is the gradient of the run's contribution times the decay up to the
// run's end. 2 D = γ_n D + qᵀ (scale γ dO). Forward: S = γ_n S + kᵀ (τ w v); out at a run's end.
template <int SLABS, Carry C>
__device__ __forceinline__ void carry_state(const FastAttention& p, const AttentionItem& item,
                                            const AttentionSegments& cut,
                                            CarryShared<SLABS, C == Carry::reverse_runs>& s,
                                            Arrivals& arrivals, const float* given, float* last) {
  constexpr bool kRuns = C == Carry::reverse_runs;
  constexpr int kStored = 128 + kScanStoreThreads;
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  float state[SLABS][8][4] = {};
  if (C == Carry::reverse || kRuns) read_begin<SLABS>(state, p, item, cut, given, warp, l);
  unsigned run[kRuns ? SLABS : 1][4][4];  // as left operands
  float decay = 1, through = 1;
  Turn turn;
  for (int step = 0; step < item.steps; ++step) {
    arrivals.wait(s.arrived, turn.at);
    const auto& now = s.stage[turn.at];
    const FastGates& gates = s.gates[turn.at];
    unsigned x[4][4], scaled[4][4];
    if constexpr (C == Carry::reverse || kRuns) {  // 1
      unsigned a[4 * SLABS][4];
      state_as_left<SLABS>(a, state);
      if constexpr (kRuns) {
        if (step == 0 || (item.first + item.steps - step) % p.pieces == 0) {
          decay = 1;
#pragma unroll
          for (int j = 0; j < SLABS; ++j) load_values(run[j], now.run[j], warp, l);
        }
        add_run<SLABS>(a, state, run, decay);
        decay *= gates.total[0];
      }
      if (step >= 2) barrier_wait<kStored>(kStateFree + 2 * (step & 1));
      put_state<SLABS>(s.states[step & 1], a, warp);
      barrier_arrive<kStored>(kStateReady + 2 * (step & 1));
    }
    load_values(x, now.v, warp, l);  // 2
    scale_left(scaled, x, l, [&](int t) {
      if (!is_reverse(C)) {
        const float2 tail = pair(gates.tail, t), weight = pair(gates.beta, t);
        return float2{tail.x * weight.x, tail.y * weight.y};
      }
      const float2 gamma = pair(gates.gamma, t);
      return float2{p.scale * gamma.x, p.scale * gamma.y};
    });
    through *= gates.total[0];
    if (C == Carry::contributions && step % p.pieces == 0) clear_state<SLABS>(state);
    scale_state<SLABS>(state, gates.total[0]);
    warpgroup_begin();
#pragma unroll
    for (int j = 0; j < SLABS; ++j) multiply_columns(state[j], scaled, now.keys[0][j]);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle_state<SLABS>(state);
    barrier_arrive<128 + kScanFetchThreads>(kStageDone + turn.at);
    if constexpr (C == Carry::contributions) {
      if ((step + 1) % p.pieces == 0 || step + 1 == item.steps) {
        const int run = step / p.pieces;
        if (last) {
          const int64_t at = (item.first_chunk + item.first) / p.pieces + run;
          write_transposed<SLABS>(last + p.state_at(at, item.h), state, p.key_dim, p.value_dim,
                                  item.v0 + 16 * warp, l);
        } else {
          if (run >= 2) barrier_wait<kStored>(kStateFree + 2 * (run & 1));
#pragma unroll
          for (int j = 0; j < SLABS; ++j) {
            values_as_left(x, state[j]);
            put_values(s.states[run & 1][j], x, warp);
          }
          barrier_arrive<kStored>(kStateReady + 2 * (run & 1));
        }
      }
    }
    turn.next<CarryShared<SLABS, kRuns>::kStages>();
  }
  if constexpr (is_ends(C)) {
    const int64_t at = item.segment_at(p, cut);
    if (threadIdx.x == 0 && item.v0 == 0) cut.decays[at] = through;
    float* to = cut.ends + at * p.key_dim * p.value_dim;
    each_pair<SLABS>(p, item.v0 + 16 * warp, l, [&](int n, int half, bool inside, int64_t i) {
      const float(&y)[4] = state[n / 8][n % 8];
      if (inside) *reinterpret_cast<float2*>(to + i) = {y[2 * half], y[2 * half + 1]};
    });
  } else if (is_reverse(C) && last && item.segment == 0) {
    write_transposed<SLABS>(last + item.state_at(p), state, p.key_dim, p.value_dim,
                            item.v0 + 16 * warp, l);
  }
}

template <int SLABS, bool RUN>
__device__ __forceinline__ void store_states(const FastAttention& p, const AttentionItem& item,
                                             CarryShared<SLABS, RUN>& s, bf16_t* states) {
  constexpr int kStored = 128 + kScanStoreThreads;
  const TileMover<kScanStoreThreads> mover(int(threadIdx.x) % kScanStoreThreads);
  for (int step = 0; step < item.steps; ++step) {
    bf16_t* to = states + p.state_at(item.first_chunk + item.template chunk<true>(step), item.h) +
                 int64_t(item.v0) * p.key_dim;
    barrier_wait<kStored>(kStateReady + 2 * (step & 1));
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
      mover.store(to + 64 * j, p.key_dim, s.states[step & 1][j], p.value_dim - item.v0,
                  p.key_dim - 64 * j);
    if (step + 2 < item.steps) barrier_arrive<kStored>(kStateFree + 2 * (step & 1));
  }
}

// The runs of an item, as [K,V].
template <int SLABS>
__device__ __forceinline__ void store_runs(const FastAttention& p, const AttentionItem& item,
                                           CarryShared<SLABS, false>& s, bf16_t* contributions) {
  constexpr int kStored = 128 + kScanStoreThreads;
  const TileMover<kScanStoreThreads> mover(int(threadIdx.x) % kScanStoreThreads);
  const int64_t first = (item.first_chunk + item.first) / p.pieces;
  const int runs = (item.steps + p.pieces - 1) / p.pieces;
  for (int run = 0; run < runs; ++run) {
    bf16_t* to = contributions + p.state_at(first + run, item.h) + item.v0;
    barrier_wait<kStored>(kStateReady + 2 * (run & 1));
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
      mover.store(to + int64_t(64 * j) * p.value_dim, p.value_dim, s.states[run & 1][j],
                  p.key_dim - 64 * j, p.value_dim - item.v0);
    if (run + 2 < runs) barrier_arrive<kStored>(kStateFree + 2 * (run & 1));
  }
}

// Block (sequence, segment, head, 64 columns of V). given, last: f32 [N,H,K,V] before the first
// chunk of the scan, and after its last; either may be null. Contributions go to states, or in f32
// to last.
template <int SLABS, Carry C>
__global__ void __launch_bounds__(kCarryThreads, 1)
    carry_kernel(FastAttention p, AttentionSegments cut,
                 const __grid_constant__ ScanSources<1> sources, const float* given, bf16_t* states,
                 float* last) {
  constexpr bool kRuns = C == Carry::reverse_runs;
  auto& s = swizzled_shared<CarryShared<SLABS, kRuns>>();
  open_stages(s.arrived);
  if (threadIdx.x < 128) {
    Arrivals arrivals;
    each_attention_item<kCarryThreads>(p, cut, [&](const AttentionItem& item) {
      carry_state<SLABS, C>(p, item, cut, s, arrivals, given, last);
    });
  } else {
    each_attention_item<kCarryThreads>(p, cut, [&](const AttentionItem& item) {
      if (threadIdx.x < 128 + kScanFetchThreads)
        fetch_steps<128, is_reverse(C), kRuns, SLABS, false>(p, item, sources, s);
      else if constexpr (C == Carry::contributions) {
        if (!last) store_runs<SLABS>(p, item, s, states);
      } else if constexpr (!is_ends(C))
        store_states<SLABS, kRuns>(p, item, s, states);
    });
  }
}

template <Carry C>
void launch_carry(const FastAttention& p, const AttentionSegments& cut,
                  const ScanSources<1>& sources, const float* given, bf16_t* states, float* last,
                  cudaStream_t stream) {
  visit_fast_slabs(p.key_dim, [&]<int SLABS>() {
    launch_fast<CarryShared<SLABS, C == Carry::reverse_runs>>(
        carry_kernel<SLABS, C>, kCarryThreads, grid_of(AttentionItem::count(p, cut)), stream, p,
        cut, sources, given, states, last);
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
    launch_carry<Carry::reverse_ends>(p, cut, sources, nullptr, nullptr, nullptr, stream);
  else
    launch_carry<Carry::forward_ends>(p, cut, sources, nullptr, nullptr, nullptr, stream);
  const int64_t elements = p.sequences * p.value_heads * p.key_dim * p.value_dim;
  chain_kernel<<<unsigned(std::min<int64_t>(ceil_div(elements, 256), 65536)), 256, 0, stream>>>(
      p, cut, given, reverse);
  check_launch();
}

void write_contributions(const FastAttention& p, const AttentionSegments& cut,
                         const ScanSources<1>& sources, const Tensor& contributions,
                         cudaStream_t stream) {
  const bool wide = contributions.dtype() == DType::f32;
  launch_carry<Carry::contributions>(p, cut, sources, nullptr,
                                     wide ? nullptr : ptr<bf16>(contributions),
                                     wide ? ptr<float>(contributions) : nullptr, stream);
}

void reverse_scan(const FastAttention& p, const AttentionSegments& cut,
                  const ScanSources<1>& sources, const float* dht, bf16_t* dstates, float* dh0,
                  cudaStream_t stream) {
  if (cut.count > 1) begin_segments(p, cut, sources, dht, true, stream);
  if (sources.run.g)
    launch_carry<Carry::reverse_runs>(p, cut, sources, dht, dstates, dh0, stream);
  else
    launch_carry<Carry::reverse>(p, cut, sources, dht, dstates, dh0, stream);
}

}  // namespace ebb::gpu::linear_attention
