// Gated linear attention in bf16 on tensor cores, forward: one scan with the gates and the read-out
// (cuda/linear_attention_fast.cuh).
#include "cuda/linear_attention_scan.cuh"
#include "ops/rows.h"

namespace ebb::gpu::linear_attention {
namespace {

constexpr int kThreads = 256;

// A warp per chunk and head, where the scan does not work out the gates itself.
__global__ void __launch_bounds__(kThreads) gate_kernel(FastAttention p) {
  const int64_t warps = int64_t(gridDim.x) * (kThreads / 32);
  for (int64_t item = int64_t(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5);
       item < p.chunks * p.value_heads; item += warps) {
    const int h = int(item % p.value_heads);
    const Span span = chunk_span(p, item / p.value_heads);
    LaneGates gates;
    gates.fetch(p, span, h);
    gates.apply_steps(p, span.rows, h);
    gates.write(p, p.gates + item, nullptr);
  }
}

// ---- the scan with the read-out ----

constexpr int kReadThreads = 384;

template <int SLABS>
struct ReadShared {
  static constexpr int kStages = SLABS == 1 ? 6 : 4;
  ScanStage<SLABS, 2> stage[kStages];  // keys: q, k
  SwizzledTile scores[2], out;         // P, o
  SwizzledTile states[SLABS];          // [V,K]
  alignas(16) FastGates gates[kStages];
  uint64_t arrived[kStages];
};

// The first group of four warps, 16 columns of V each; the state Sᵀ [V,K] in registers. Per chunk
// 1 q S; S out meanwhile. 2 S = γ_n S + kᵀ (τ w v). 3 o = scale γ q S + P v.
template <int SLABS>
__device__ __forceinline__ void read_out(const FastAttention& p, const AttentionItem& item,
                                         const AttentionSegments& cut, ReadShared<SLABS>& s,
                                         Arrivals& arrivals, float* ht) {
  constexpr int kUsers = 256 + kScanFetchThreads, kStored = 128 + kScanStoreThreads;
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  float state[SLABS][8][4];
  read_begin<SLABS>(state, p, item, cut, p.h0, warp, l);
  Turn turn;
  for (int step = 0; step < item.steps; ++step) {
    arrivals.wait(s.arrived, turn.at);
    const ScanStage<SLABS, 2>& now = s.stage[turn.at];
    const FastGates& gates = s.gates[turn.at];
    unsigned sa[4 * SLABS][4], v[4][4], kept[4][4];
    float out[8][4];
    state_as_left<SLABS>(sa, state);  // 1
    warpgroup_begin();
    multiply_rows<true>(out, sa, now.keys[0][0]);
#pragma unroll
    for (int j = 1; j < SLABS; ++j) multiply_rows(out, sa + 4 * j, now.keys[0][j]);
    warpgroup_commit();
    if (step > 0) barrier_wait<kStored>(kStateFree);
    put_state<SLABS>(s.states, sa, warp);
    barrier_arrive<kStored>(kStateReady);
    load_values(v, now.v, warp, l);
    scale_left(kept, v, l, [&](int t) {
      const float2 tail = pair(gates.tail, t), weight = pair(gates.beta, t);
      return float2{tail.x * weight.x, tail.y * weight.y};
    });
    scale_state<SLABS>(state, gates.total[0]);
    warpgroup_begin();  // 2
#pragma unroll
    for (int j = 0; j < SLABS; ++j) multiply_columns(state[j], kept, now.keys[1][j]);
    warpgroup_commit();
    warpgroup_wait<1>();
    settle(out);
    scale_tokens(out, gates.gamma, p.scale, l);  // 3
    settle(out);
    barrier_wait<256>(kScoresReady + (step & 1));
    warpgroup_begin();
    multiply_rows(out, v, s.scores[step & 1]);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(out);
    settle_state<SLABS>(state);
    barrier_arrive<kUsers>(kStageDone + turn.at);
    if (step + 2 < item.steps) barrier_arrive<256>(kScoresFree + (step & 1));
    values_as_left(v, out);
    if (step > 0) barrier_wait<kStored>(kOutFree);
    put_values(s.out, v, warp);
    barrier_arrive<kStored>(kOutReady);
    turn.next<ReadShared<SLABS>::kStages>();
  }
  if (ht && item.segment == cut.count - 1)
    write_transposed<SLABS>(ht + item.state_at(p), state, p.key_dim, p.value_dim,
                            item.v0 + 16 * warp, l);
}

// The second group: P = scale·(q kᵀ∘Γ)·w, skip on the diagonal, up to two chunks ahead.
template <int SLABS>
__device__ __forceinline__ void write_scores(const FastAttention& p, const AttentionItem& item,
                                             ReadShared<SLABS>& s, Arrivals& arrivals) {
  constexpr int kUsers = 256 + kScanFetchThreads;
  const Lane l;
  const int warp = (int(threadIdx.x) >> 5) & 3, r = 16 * warp + l.g;
  const float skip = p.skip ? p.skip[item.h] : 0.f;
  Turn turn;
  for (int step = 0; step < item.steps; ++step) {
    arrivals.wait(s.arrived, turn.at);
    const ScanStage<SLABS, 2>& now = s.stage[turn.at];
    const FastGates& gates = s.gates[turn.at];
    float x[8][4];
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::last>(x, now.keys[0][0], now.keys[1][0], warp);
#pragma unroll
    for (int j = 1; j < SLABS; ++j)
      multiply_tiles<false, Inner::last, Inner::last>(x, now.keys[0][j], now.keys[1][j], warp);
    warpgroup_commit();
    const float high[2] = {gates.high[r], gates.high[r + 8]};
    const float low[2] = {gates.low[r], gates.low[r + 8]};
    warpgroup_wait<0>();
    settle(x);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n > 2 * warp + 1) {  // above the diagonal
        x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.f;
        continue;
      }
      const int c = 8 * n + 2 * l.c;
      const float2 h = pair(gates.high, c), d = pair(gates.low, c), weight = pair(gates.beta, c);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e >> 1, row = r + 8 * half, column = c + (e & 1);
        const float decay =
            exp2_fast((high[half] - (e & 1 ? h.y : h.x)) + (low[half] - (e & 1 ? d.y : d.x)));
        float& y = x[n][e];
        y = column <= row ? p.scale * decay * (e & 1 ? weight.y : weight.x) * y : 0.f;
        if (column == row) y += skip;
      }
    }
    barrier_arrive<kUsers>(kStageDone + turn.at);
    unsigned a[4][4];
    values_as_left(a, x);
    if (step >= 2) barrier_wait<256>(kScoresFree + (step & 1));
    put_tile_rows(s.scores[step & 1], a, 16 * warp, l);
    publish_tiles();
    barrier_arrive<256>(kScoresReady + (step & 1));
    turn.next<ReadShared<SLABS>::kStages>();
  }
}

// The storing warps: the state before each chunk, and o.
template <int SLABS>
__device__ __forceinline__ void store_out(const FastAttention& p, const AttentionItem& item,
                                          ReadShared<SLABS>& s, bf16_t* o) {
  constexpr int kStored = 128 + kScanStoreThreads;
  const TileMover<kScanStoreThreads> mover(int(threadIdx.x) % kScanStoreThreads);
  const int cols = p.value_dim - item.v0;
  for (int step = 0; step < item.steps; ++step) {
    const int64_t chunk = item.template chunk<false>(step);
    const Span span = item.span(chunk);
    bf16_t* state =
        p.states + p.state_at(item.first_chunk + chunk, item.h) + int64_t(item.v0) * p.key_dim;
    barrier_wait<kStored>(kStateReady);
#pragma unroll
    for (int j = 0; j < SLABS; ++j)
      mover.store(state + 64 * j, p.key_dim, s.states[j], cols, p.key_dim - 64 * j);
    if (step + 1 < item.steps) barrier_arrive<kStored>(kStateFree);
    barrier_wait<kStored>(kOutReady);
    mover.store(o + p.value_at(span.first, item.h) + item.v0, p.value_stride(), s.out, span.rows,
                cols);
    if (step + 1 < item.steps) barrier_arrive<kStored>(kOutFree);
  }
}

template <int SLABS, bool GATES>
__global__ void __launch_bounds__(kReadThreads, 1)
    read_kernel(FastAttention p, AttentionSegments cut,
                const __grid_constant__ ScanSources<2> sources, bf16_t* o, float* ht) {
  auto& s = swizzled_shared<ReadShared<SLABS>>();
  open_stages(s.arrived);
  Arrivals arrivals;
  if (threadIdx.x < 128) {
    take_registers<240>();
    each_attention_item<kReadThreads>(
        p, cut, [&](const AttentionItem& item) { read_out<SLABS>(p, item, cut, s, arrivals, ht); });
  } else if (threadIdx.x < 256) {
    give_registers<152>();
    each_attention_item<kReadThreads>(
        p, cut, [&](const AttentionItem& item) { write_scores<SLABS>(p, item, s, arrivals); });
  } else {
    give_registers<112>();
    each_attention_item<kReadThreads>(p, cut, [&](const AttentionItem& item) {
      if (threadIdx.x < 256 + kScanFetchThreads)
        fetch_steps<256, false, false, SLABS, GATES>(p, item, sources, s);
      else
        store_out<SLABS>(p, item, s, o);
    });
  }
}

// Whether a block may have the shared memory of these kernels.
bool shared_fits(Device device) {
  int bytes = 0;
  cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index),
             "device attribute");
  return bytes >= kFastShared;
}

}  // namespace

bool fast_attention(const LinearAttentionProblem& p) {
  static_assert(sizeof(ReadShared<1>) <= kFastShared && sizeof(ReadShared<2>) <= kFastShared);
  const auto aligned = [](const Tensor& t) {
    Rows r;
    rows_in_place(t, 2, &r);
    return rows_aligned(r, 8);
  };
  return p.v.dtype() == DType::bf16 && shared_fits(p.v.device()) && p.chunk >= kChunk &&
         p.memory_chunk % kChunk == 0 && p.key_dim() <= 128 && p.key_dim() % 8 == 0 &&
         p.value_dim() % 8 == 0 && aligned(p.q) && aligned(p.k) && aligned(p.v) &&
         p.batch() * p.time() < (int64_t(1) << 31);  // rows of a tensor map
}

FastAttention make_fast_attention(const LinearAttentionProblem& problem, const Cut& cut,
                                  const LinearAttentionSaved& saved, const Tensor& before) {
  FastAttention p{make_attention<bf16>(problem, cut, saved, before)};
  p.gates = reinterpret_cast<FastGates*>(ptr<float>(saved.gates));
  p.steps = StepSource(problem.gate);
  return p;
}

LinearAttentionSaved fast_attention_fwd(const LinearAttentionProblem& problem, const Tensor& o,
                                        const Tensor& ht, const Tensor& contributions) {
  const Device device = problem.v.device();
  const int64_t h = problem.heads(), groups = problem.groups();
  const int64_t k = problem.key_dim(), v = problem.value_dim();
  const Cut cut(problem);
  const LinearAttentionSaved saved{
      .states = Tensor::empty({cut.chunks, h, v, k}, DType::bf16, device),
      .gates = Tensor::empty({cut.chunks, h, kGateFloats}, DType::f32, device)};
  const Tensor before = run_offsets(problem, cut);
  const cudaStream_t stream = stream_of(o);
  const FastAttention p = make_fast_attention(problem, cut, saved, before);
  Tensor buffers[3];
  const AttentionSegments segments = cut_sequences(p, device, buffers);
  // With one segment the scan works out the gates and leaves them for the others.
  const bool own_gates = segments.count == 1;
  if (cut.chunks > 0 && !own_gates) {
    const int64_t blocks = std::min<int64_t>(ceil_div(cut.chunks * h, kThreads / 32), 65536);
    gate_kernel<<<unsigned(blocks), kThreads, 0, stream>>>(p);
    check_launch();
  }
  const TileSource keys[2] = {token_source(p, p.q, k, groups, p.q_step, device),
                              token_source(p, p.k, k, groups, p.k_step, device)};
  const TileSource values = token_source(p, p.v, v, h, p.v_step, device);
  const ScanSources<2> sources{{keys[0], keys[1]}, values, {}, can_map({keys[0], keys[1], values})};
  const ScanSources<1> written{{keys[1]}, values, {}, sources.mapped};
  if (segments.count > 1) begin_segments(p, segments, written, p.h0, false, stream);
  visit_fast_slabs(k, [&]<int SLABS>() {
    launch_fast<ReadShared<SLABS>>(own_gates ? read_kernel<SLABS, true> : read_kernel<SLABS, false>,
                                   kReadThreads, grid_of(AttentionItem::count(p, segments)), stream,
                                   p, segments, sources, ptr<bf16>(o), ptr<float>(ht));
  });
  if (contributions) write_contributions(p, segments, written, contributions, stream);
  return saved;
}

}  // namespace ebb::gpu::linear_attention
