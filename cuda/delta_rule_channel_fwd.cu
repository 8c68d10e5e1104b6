// Delta rule with a decay per channel, forward, in three kernels: 1 operands, scores and inverse of
// every chunk (delta_rule_channel.cu), 2 the scan over chunks, 3 the read-out of every chunk;
// or 2 and 3 as one kernel on tensor cores (delta_fast_channel.cu).
// Blocks of 256 threads; each loops over its items, should there be more than the grid can hold.
#include "cuda/delta_channel_logits.cuh"

namespace ebb::gpu::delta {
namespace {

// What one chunk of a scan reads.
template <class T, int SLABS>
struct ScanStage {
  static constexpr bool kAllSlabs = all_slabs_fit<T, SLABS>(2);  // else slab by slab
  static constexpr int kHeld = kAllSlabs ? SLABS : 1;
  T erased[kHeld][kTileRows * row_length<T>(64)];  // K̂
  T kept[kHeld][kTileRows * row_length<T>(64)];    // K̄
  T a[kTileRows * row_length<T>(64)];
  T v[kTileRows * row_length<T>(kScanColumns)];  // V, then w∘V − K̂ S, then V'
  float total[64 * SLABS];                       // γ_n
};
template <class T, int SLABS>
struct ScanShared {
  static constexpr int kTile = kTileRows * row_length<T>(kScanColumns);
  static constexpr int kStages = stages_beside<ScanStage<T, SLABS>>(kTile * sizeof(T));
  ScanStage<T, SLABS> stage[kStages];
  T state[kTile];  // a slab of S
};

template <class T, int SLABS>
__device__ void load_stage(const Channel<T>& p, Span span, int64_t chunk, int hv, int v0,
                           ScanStage<T, SLABS>& s) {
  if constexpr (ScanStage<T, SLABS>::kAllSlabs)
    for (int slab = 0; slab < SLABS; ++slab) {
      load_operand(p.erased, p, span, hv, slab, s.erased[slab]);
      load_operand(p.kept, p, span, hv, slab, s.kept[slab]);
    }
  load_square(p.a, p, span, hv, s.a);
  load_tile(s.v, row_length<T>(kScanColumns), kTileRows, kScanColumns,
            p.v + p.value_at(span.first, hv) + v0, p.value_stride(), span.rows,
            min(kScanColumns, p.value_dim - v0));
  load_tile(s.total, 64 * SLABS, 1, 64 * SLABS, p.total + p.total_at(chunk, hv), p.key_dim + kChunk,
            1, p.key_dim);
}

// w∘ (β) of the elements that the thread has in an accumulator.
template <class T>
__device__ __forceinline__ void load_weights(const Channel<T>& p, Span span, int hv, int v0,
                                             float (&w)[Accumulator<T, kScanColumns>::kCount]) {
  using Acc = Accumulator<T, kScanColumns>;
#pragma unroll
  for (int i = 0; i < Acc::kCount; ++i) {
    const int r = Acc::row(i), c = Acc::col(i);
    w[i] = 0.f;
    if (r >= span.rows || v0 + c >= p.value_dim) continue;
    w[i] = p.write ? p.write[p.value_at(span.first + r, hv) + v0 + c]
                   : p.write_strength(span.first + r, hv);
  }
}

// Item (sequence, head, 32 columns of V). The state is held in registers, [64·SLABS,32] f32. Per
// chunk: 1 store S. 2 Y = w∘V − K̂ S. 3 V' = A Y, stored. 4 S = Diag(γ_n) S + K̄ᵀ V'. The next
// chunk's tiles are on their way meanwhile, where two stages fit. At the end: 5 ht.
template <class T, int SLABS>
__global__ void __launch_bounds__(kTileThreads) scan_kernel(Channel<T> p, float* ht) {
  using Shared = ScanShared<T, SLABS>;
  using Stage = ScanStage<T, SLABS>;
  using Acc = Accumulator<T, kScanColumns>;
  auto& s = dynamic_shared<Shared>();
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  const int64_t tiles = (p.value_dim + kScanColumns - 1) / kScanColumns;
  for (int64_t item = blockIdx.x; item < p.sequences * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * kScanColumns, cols = min(kScanColumns, p.value_dim - v0);
    const int hv = int(item / tiles % p.value_heads);
    const int64_t n = item / tiles / p.value_heads;
    const ChunkWalk walk(p, n);
    Acc state[SLABS];
    read_state(state, p.h0, n * p.value_heads + hv, v0, p);
    if (walk.count > 0) load_stage<T, SLABS>(p, walk.span(p, 0), walk.first, hv, v0, s.stage[0]);
    for (int64_t i = 0; i < walk.count; ++i) {
      Stage& now = s.stage[i % Shared::kStages];
      const Span span = walk.span(p, i);
      const int rows = (span.rows + 15) & ~15;
      float weight[Acc::kCount];
      load_weights(p, span, hv, v0, weight);
      wait_copies();
      __syncthreads();
      const bool more = i + 1 < walk.count;
      if (more && Shared::kStages > 1)
        load_stage<T, SLABS>(p, walk.span(p, i + 1), walk.first + i + 1, hv, v0,
                             s.stage[(i + 1) % Shared::kStages]);

      Acc acc;  // 1, 2
      acc.clear();
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        if (!Stage::kAllSlabs) load_operand(p.erased, p, span, hv, slab, now.erased[0]);
        state[slab].put(s.state, ld_v, [](int, int, float v) { return v; });
        if (!Stage::kAllSlabs) wait_copies();
        __syncthreads();
        store_state(p.states + p.state_at(walk.first + i, hv), p, slab, v0, cols, s.state);
        multiply<Stored::rows, Stored::rows>(acc, now.erased[Stage::kAllSlabs ? slab : 0], ld,
                                             s.state, ld_v, 64);
        __syncthreads();
      }
#pragma unroll
      for (int e = 0; e < Acc::kCount; ++e)
        acc.v[e] = weight[e] * to_float(now.v[Acc::row(e) * ld_v + Acc::col(e)]) - acc.v[e];
      acc.put(now.v, ld_v, [](int, int, float v) { return v; });
      __syncthreads();

      acc.clear();  // 3
      multiply<Stored::rows, Stored::rows>(acc, now.a, ld, now.v, ld_v, rows);
      __syncthreads();
      acc.put(now.v, ld_v, [](int, int, float v) { return v; });
      if (!Stage::kAllSlabs) {
        load_operand(p.kept, p, span, hv, 0, now.kept[0]);
        wait_copies();
      }
      __syncthreads();
      store_tile(p.values + p.row_at(span.first, hv) * p.value_dim + v0, p.value_dim, now.v, ld_v,
                 span.rows, cols);

#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {  // 4
        if (!Stage::kAllSlabs && slab > 0) {
          __syncthreads();
          load_operand(p.kept, p, span, hv, slab, now.kept[0]);
          wait_copies();
          __syncthreads();
        }
        state[slab].each([&](int r, int, float& v) { v *= now.total[64 * slab + r]; });
        multiply<Stored::columns, Stored::rows>(state[slab], now.kept[Stage::kAllSlabs ? slab : 0],
                                                ld, now.v, ld_v, rows);
      }
      if (more && Shared::kStages == 1) {
        __syncthreads();
        load_stage<T, SLABS>(p, walk.span(p, i + 1), walk.first + i + 1, hv, v0, now);
      }
    }
    if (ht) write_state(ht, state, n * p.value_heads + hv, v0, p);  // 5
    __syncthreads();
  }
}

template <class T>
struct ReadShared {
  T q[kTileRows * row_length<T>(64)];  // a slab of scale q∘γ, then P
  T s[kTileRows * row_length<T>(64)];  // a slab of S; V'; o
};

// Item (chunk, head, 64 columns of V). o = Q̃ S over slabs of K, + P V'.
template <class T>
__global__ void __launch_bounds__(kTileThreads) read_kernel(Channel<T> p, T* o) {
  auto& s = dynamic_shared<ReadShared<T>>();
  constexpr int ld = row_length<T>(64);
  const int64_t tiles = (p.value_dim + 63) / 64;
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * 64, cols = min(64, p.value_dim - v0);
    const int hv = int(item / tiles % p.value_heads);
    const int64_t chunk = item / tiles / p.value_heads;
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    Accumulator<T, 64> out;
    out.clear();
    for (int slab = 0; 64 * slab < p.key_dim; ++slab) {
      load_operand(p.queries, p, span, hv, slab, s.q);
      load_tile(s.s, ld, 64, 64,
                p.states + p.state_at(chunk, hv) + int64_t(64 * slab) * p.value_dim + v0,
                p.value_dim, slab_width(p, slab), cols);
      wait_copies();
      __syncthreads();
      multiply<Stored::rows, Stored::rows>(out, s.q, ld, s.s, ld, 64);
      __syncthreads();
    }
    load_square(p.scores, p, span, hv, s.q);
    load_tile(s.s, ld, kTileRows, 64, p.values + p.row_at(span.first, hv) * p.value_dim + v0,
              p.value_dim, span.rows, cols);
    wait_copies();
    __syncthreads();
    multiply<Stored::rows, Stored::rows>(out, s.q, ld, s.s, ld, (span.rows + 15) & ~15);
    __syncthreads();
    out.put(s.s, ld, [](int, int, float v) { return v; });
    __syncthreads();
    store_tile(o + p.value_at(span.first, hv) + v0, p.value_stride(), s.s, ld, span.rows, cols);
    __syncthreads();
  }
}

}  // namespace
}  // namespace ebb::gpu::delta

namespace ebb::gpu {

bool channel_delta_rule_reads_rows(const DeltaRuleProblem& problem) {
  return delta::channel_fast_sizes(problem);
}
bool channel_delta_rule_normalizes(const DeltaRuleProblem& problem) {
  return delta::channel_fast_sizes(problem) && problem.key_dim() <= 64 &&
         problem.heads() == problem.value_heads();
}

DeltaRuleSaved channel_delta_rule_fwd(const DeltaRuleProblem& problem, const Tensor& o,
                                      const Tensor& ht) {
  using namespace delta;
  const DType dtype = problem.v.dtype();
  const Device device = problem.v.device();
  const int64_t hv = problem.value_heads(), tokens = problem.batch() * problem.time();
  const int64_t k = problem.key_dim(), v = problem.value_dim(), c = chunk_of(problem);
  const int64_t chunks = problem.layout.chunk_count(problem.batch(), problem.time(), c);
  const bool fast = channel_fast_path(problem);
  const bool plain = fast && is_plain(problem);  // A is then not looked at
  DeltaRuleSaved saved{plain ? Tensor() : Tensor::empty({hv, tokens, c}, dtype, device),
                       Tensor::empty({chunks, hv, fast ? v : k, fast ? k : v}, dtype, device),
                       Tensor::empty({hv, tokens, v}, dtype, device)};
  saved.scores = Tensor::empty({hv, tokens, c}, dtype, device);
  if (plain) saved.a = saved.scores;
  ChannelOperands operands = make_operands(problem, {}, plain);
  if (fast) saved.gates = operands.total;  // tells backward how the states lie
  if (fast && problem.write) operands.written = Tensor::empty({hv, tokens, v}, dtype, device);
  const Tensor before = chunk_offsets(problem);
  const cudaStream_t stream = stream_of(o);
  visit_compute(dtype, [&]<class Host>() {
    using T = device_t<Host>;
    Channel<T> p = make_channel<Host>(problem, saved, operands, before);
    p.plain = plain;
    if constexpr (sizeof(T) == 2)
      if (fast) {
        if (problem.in_place)
          channel_fast_prepare(LogitChannel{p, raw_gates(problem)}, Prepare::everything, stream);
        else
          channel_fast_prepare(p, Prepare::everything, stream);
        return channel_fast_scan(p, ptr<Host>(o), ptr<float>(ht), device, stream);
      }
    prepare(p, Prepare::everything, stream);
    visit_slabs(k, [&]<int SLABS>() {
      launch_tiles<ScanShared<T, SLABS>>(scan_kernel<T, SLABS>, scan_blocks(p.sequences, hv, v),
                                         stream, p, ptr<float>(ht));
    });
    launch_tiles<ReadShared<T>>(read_kernel<T>, chunks * hv * ceil_div(v, 64), stream, p,
                                ptr<Host>(o));
  });
  return saved;
}

}  // namespace ebb::gpu
