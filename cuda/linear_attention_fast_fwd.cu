// Gated linear attention in bf16 on tensor cores, forward: one scan with the gates and the read-out
// (cuda/linear_attention_fast.cuh).
#include "cuda/linear_attention_carry.cuh"
#include "cuda/linear_attention_runs.cuh"
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
    GateRecord(p, gates).put(p.gates[item]);
  }
}

// ---- the scan with the read-out ----

// Four groups of four warps: one carries the state, two read out, every other chunk each, one
// fetches and stores.
constexpr int kReadThreads = 512;

template <int SLABS>
struct ReadShared {
  static constexpr int kStages = SLABS == 1 ? 6 : 4, kKeys = 2;  // an even number of stages
  ScanStage<SLABS, 2> stage[kStages];                            // keys: q, k
  SwizzledTile states[2][SLABS], out[2];                         // [V,K], o
  alignas(16) FastGates gates[kStages];
  uint64_t arrived[kStages];
};

// A warp's 16 rows of P = scale·(x∘Γ)·w below the diagonal, skip on it, as left operands.
__device__ __forceinline__ void score_rows(unsigned (&to)[4][4], const float (&x)[8][4],
                                           const FastGates& gates, float scale, float skip,
                                           int warp, const Lane& l) {
  const int r = 16 * warp + l.g;
  const float high[2] = {gates.high[r], gates.high[r + 8]};
  const float low[2] = {gates.low[r], gates.low[r + 8]};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float y[4] = {};
    const int c = 8 * n + 2 * l.c;
    if (n <= 2 * warp + 1) {
      const float2 h = pair(gates.high, c), d = pair(gates.low, c), weight = pair(gates.beta, c);
      const float factor[2] = {scale * weight.x, scale * weight.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e >> 1;
        const float decay =
            exp2_fast((high[half] - (e & 1 ? h.y : h.x)) + (low[half] - (e & 1 ? d.y : d.x)));
        y[e] = factor[e & 1] * decay * x[n][e];
      }
    }
    if (n >= 2 * warp) {  // on the diagonal, or above
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = r + 8 * (e >> 1), column = c + (e & 1);
        y[e] = column < row ? y[e] : column == row ? y[e] + skip : 0.f;
      }
    }
    to[n / 2][2 * (n & 1)] = pack_bf16(y[0], y[1]);
    to[n / 2][2 * (n & 1) + 1] = pack_bf16(y[2], y[3]);
  }
}

// A reading group, 16 tokens a warp. Per chunk 1 q kᵀ, q S. 2 P = scale·(q kᵀ∘Γ)·w, skip on the
// diagonal. 3 o = scale γ q S + P v.
template <int SLABS>
__device__ __forceinline__ void read_out(const FastAttention& p, const AttentionItem& item,
                                         ReadShared<SLABS>& s, Arrivals& arrivals, int side,
                                         bf16_t* o) {
  constexpr int kUsers = 256 + kScanFetchThreads, kFreed = 256 + kScanStoreThreads;
  const Lane l;
  const int warp = (int(threadIdx.x) >> 5) & 3, m0 = 16 * warp, r = m0 + l.g;
  const float skip = p.skip ? p.skip[item.h] : 0.f;
  Turn turn{side};
  for (int step = side; step < item.steps; step += 2) {
    arrivals.wait(s.arrived, turn.at);
    const ScanStage<SLABS, 2>& now = s.stage[turn.at];
    const FastGates& gates = s.gates[turn.at];
    float x[8][4], out[8][4];
    warpgroup_begin();  // 1
    multiply_tiles<true, Inner::last, Inner::last>(x, now.keys[0][0], now.keys[1][0], warp);
#pragma unroll
    for (int j = 1; j < SLABS; ++j)
      multiply_tiles<false, Inner::last, Inner::last>(x, now.keys[0][j], now.keys[1][j], warp);
    warpgroup_commit();
    barrier_wait<256>(kStateReadable + side);
    warpgroup_begin();
    multiply_tiles<true, Inner::last, Inner::last>(out, now.keys[0][0], s.states[side][0], warp);
#pragma unroll
    for (int j = 1; j < SLABS; ++j)
      multiply_tiles<false, Inner::last, Inner::last>(out, now.keys[0][j], s.states[side][j], warp);
    warpgroup_commit();
    warpgroup_wait<1>();
    settle(x);
    unsigned a[4][4];
    score_rows(a, x, gates, p.scale, skip, warp, l);  // 2
    const float gamma[2] = {p.scale * gates.gamma[r], p.scale * gates.gamma[r + 8]};
    warpgroup_wait<0>();
    settle(out);
    if (step + 2 < item.steps) barrier_arrive<kFreed>(kStateFree + side);
#pragma unroll
    for (int n = 0; n < 8; ++n)  // 3
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= gamma[e >> 1];
    settle(out);
    warpgroup_begin();
    multiply_columns(out, a, now.v);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(out);
    barrier_arrive<kUsers>(kStageDone + turn.at);
    const Span span = item.span(item.template chunk<false>(step));
    values_as_left(a, out);
    put_tile_rows(s.out[side], a, m0, l);
    store_rows(o + p.value_at(span.first, item.h) + item.v0, p.value_stride(), s.out[side], m0,
               span.rows, p.value_dim - item.v0);
    turn.next<ReadShared<SLABS>::kStages>(2);
  }
}

template <int SLABS, bool GATES>
__global__ void __launch_bounds__(kReadThreads, 1)
    read_kernel(FastAttention p, AttentionSegments cut,
                const __grid_constant__ ScanSources<2> sources,
                const __grid_constant__ TileTarget states, bf16_t* o, float* ht) {
  auto& s = swizzled_shared<ReadShared<SLABS>>();
  open_stages(s.arrived);
  Arrivals arrivals;
  if (threadIdx.x < 128) {
    take_registers<160>();
    each_attention_item<0, 128, 256, 128>(p, cut, [&](const AttentionItem& item) {
      carry_state<SLABS, Carry::forward, 128>(p, item, cut, s, arrivals, p.h0, ht);
    });
  } else if (threadIdx.x < 384) {
    take_registers<136>();
    const int side = threadIdx.x < 256 ? 0 : 1;
    each_attention_item<1, 128, 256, 128>(
        p, cut, [&](const AttentionItem& item) { read_out<SLABS>(p, item, s, arrivals, side, o); });
  } else {
    give_registers<80>();
    each_attention_item<2, 128, 256, 128>(p, cut, [&](const AttentionItem& item) {
      if (threadIdx.x < 384 + kScanFetchThreads)
        fetch_steps<256, false, false, SLABS, GATES>(p, item, sources, s);
      else
        store_states<SLABS, false, 128>(p, item, s, states);
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
         (p.memory_chunk < kChunk || p.memory_chunk % kChunk == 0) && p.key_dim() <= 128 &&
         p.key_dim() % 8 == 0 && p.value_dim() % 8 == 0 && aligned(p.q) && aligned(p.k) &&
         aligned(p.v) && p.batch() * p.time() < (int64_t(1) << 31);  // rows of a tensor map
}

FastAttention make_fast_attention(const LinearAttentionProblem& problem, const Cut& cut,
                                  const LinearAttentionSaved& saved, const Tensor& before) {
  FastAttention p{make_attention<bf16>(problem, cut, saved, before)};
  p.gates = reinterpret_cast<FastGates*>(ptr<float>(saved.gates));
  p.steps = StepSource(problem.gate);
  return p;
}

LinearAttentionSaved fast_attention_fwd(const LinearAttentionProblem& given, const Tensor& o,
                                        const Tensor& ht, const Tensor& contributions) {
  const LinearAttentionProblem problem = without_apart_runs(given);
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
                                   p, segments, sources, state_target(p, p.states, device),
                                   ptr<bf16>(o), ptr<float>(ht));
  });
  if (contributions && !runs_apart(given))
    write_contributions(p, segments, written, contributions, stream);
  else if (contributions)
    write_short_runs(given, saved, contributions, stream);
  return saved;
}

}  // namespace ebb::gpu::linear_attention
