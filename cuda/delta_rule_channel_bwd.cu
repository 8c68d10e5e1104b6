// Delta rule with a decay per channel, backward, in four kernels: 1 the operands of every chunk
// again (delta_rule_channel.cu), 2 the gradient of V' inside each chunk, 3 the scan from the last
// chunk to the first, 4 the gradients of every chunk (delta_rule_channel_gradients.cu); with
// grouped heads or more than one slab 5, their sums. Equations of
// ops/delta_rule_channel_cpu_bwd.cpp. In bf16, where channel_fast_path() says so, the kernels of
// delta_fast_channel*.cu.
#include "cuda/delta_channel_logits.cuh"

namespace ebb::gpu::delta {
namespace {

template <class T>
using Backward = ChannelBackward<T>;

template <class T>
struct LocalShared {
  T p[kTileRows * row_length<T>(64)], d_o[kTileRows * row_length<T>(64)];
};

// Item (chunk, head, 64 columns of V). X = Pᵀ dO.
template <class T>
__global__ void __launch_bounds__(kTileThreads) local_kernel(Backward<T> p) {
  auto& s = dynamic_shared<LocalShared<T>>();
  constexpr int ld = row_length<T>(64);
  const int64_t tiles = (p.value_dim + 63) / 64;
  for (int64_t item = blockIdx.x; item < p.chunks * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * 64, cols = min(64, p.value_dim - v0);
    const int hv = int(item / tiles % p.value_heads);
    const Span span = span_of(p, item / tiles / p.value_heads);
    if (span.rows == 0) return;
    load_square(p.scores, p, span, hv, s.p);
    load_tile(s.d_o, ld, kTileRows, 64, p.d_o + p.value_at(span.first, hv) + v0, p.value_stride(),
              span.rows, cols);
    wait_copies();
    __syncthreads();
    Accumulator<T, 64> acc;
    acc.clear();
    multiply<Stored::columns, Stored::rows>(acc, s.p, ld, s.d_o, ld, (span.rows + 15) & ~15);
    __syncthreads();
    acc.put(s.p, ld, [](int, int, float v) { return v; });
    __syncthreads();
    store_tile(p.x + p.row_at(span.first, hv) * p.value_dim + v0, p.value_dim, s.p, ld, span.rows,
               cols);
    __syncthreads();
  }
}

template <class T, int SLABS>
struct ReverseStage {
  static constexpr bool kAllSlabs = all_slabs_fit<T, SLABS>(3);
  static constexpr int kHeld = kAllSlabs ? SLABS : 1;
  T kept[kAllSlabs ? SLABS : 1][kAllSlabs ? kTileRows * row_length<T>(64) : 8];  // K̄
  T queries[kHeld][kTileRows * row_length<T>(64)];  // scale q∘γ; slab by slab K̄ before it
  T erased[kHeld][kTileRows * row_length<T>(64)];   // K̂
  T a[kTileRows * row_length<T>(64)];
  T d_o[kTileRows * row_length<T>(kScanColumns)];
  T x[kTileRows * row_length<T>(kScanColumns)];  // Pᵀ dO, then dV', then −X
  float total[64 * SLABS];
};
template <class T, int SLABS>
struct ReverseShared {
  static constexpr int kTile = kTileRows * row_length<T>(kScanColumns);
  static constexpr int kStages = stages_beside<ReverseStage<T, SLABS>>(kTile * sizeof(T));
  ReverseStage<T, SLABS> stage[kStages];
  T state[kTile];  // a slab of D; X
};

template <class T, int SLABS>
__device__ void load_stage(const Backward<T>& p, Span span, int64_t chunk, int hv, int v0,
                           ReverseStage<T, SLABS>& s) {
  constexpr int ld_v = row_length<T>(kScanColumns);
  const int cols = min(kScanColumns, p.value_dim - v0);
  if constexpr (ReverseStage<T, SLABS>::kAllSlabs)
    for (int slab = 0; slab < SLABS; ++slab) {
      load_operand(p.kept, p, span, hv, slab, s.kept[slab]);
      load_operand(p.queries, p, span, hv, slab, s.queries[slab]);
      load_operand(p.erased, p, span, hv, slab, s.erased[slab]);
    }
  load_square(p.a, p, span, hv, s.a);
  load_tile(s.d_o, ld_v, kTileRows, kScanColumns, p.d_o + p.value_at(span.first, hv) + v0,
            p.value_stride(), span.rows, cols);
  load_tile(s.x, ld_v, kTileRows, kScanColumns, p.x + p.row_at(span.first, hv) * p.value_dim + v0,
            p.value_dim, span.rows, cols);
  load_tile(s.total, 64 * SLABS, 1, 64 * SLABS, p.total + p.total_at(chunk, hv), p.key_dim + kChunk,
            1, p.key_dim);
}

// Item (sequence, head, 32 columns of V), D in registers as S in the forward scan. Per chunk, from
// the last: 1 store D. 2 dV' = Pᵀ dO + K̄ D. 3 X = Aᵀ dV', stored. 4 D = Diag(γ_n) D + Q̃ᵀ dO −
// K̂ᵀ X. At the end: 5 dh0.
template <class T, int SLABS>
__global__ void __launch_bounds__(kTileThreads) reverse_kernel(Backward<T> p) {
  using Shared = ReverseShared<T, SLABS>;
  using Stage = ReverseStage<T, SLABS>;
  auto& s = dynamic_shared<Shared>();
  constexpr int ld = row_length<T>(64), ld_v = row_length<T>(kScanColumns);
  const int64_t tiles = (p.value_dim + kScanColumns - 1) / kScanColumns;
  for (int64_t item = blockIdx.x; item < p.sequences * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * kScanColumns, cols = min(kScanColumns, p.value_dim - v0);
    const int hv = int(item / tiles % p.value_heads);
    const int64_t n = item / tiles / p.value_heads;
    const ChunkWalk walk(p, n);
    Accumulator<T, kScanColumns> state[SLABS];
    read_state(state, p.dht, n * p.value_heads + hv, v0, p);
    if (walk.count > 0)
      load_stage<T, SLABS>(p, walk.span(p, walk.count - 1), walk.first + walk.count - 1, hv, v0,
                           s.stage[0]);
    for (int64_t step = 0; step < walk.count; ++step) {
      const int64_t i = walk.count - 1 - step;
      Stage& now = s.stage[step % Shared::kStages];
      const Span span = walk.span(p, i);
      const int rows = (span.rows + 15) & ~15;
      wait_copies();
      __syncthreads();
      const bool more = i > 0;
      if (more && Shared::kStages > 1)
        load_stage<T, SLABS>(p, walk.span(p, i - 1), walk.first + i - 1, hv, v0,
                             s.stage[(step + 1) % Shared::kStages]);

      Accumulator<T, kScanColumns> acc;  // 1, 2
      acc.clear();
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        if (!Stage::kAllSlabs) load_operand(p.kept, p, span, hv, slab, now.queries[0]);
        state[slab].put(s.state, ld_v, [](int, int, float v) { return v; });
        if (!Stage::kAllSlabs) wait_copies();
        __syncthreads();
        store_state(p.dstates + p.state_at(walk.first + i, hv), p, slab, v0, cols, s.state);
        multiply<Stored::rows, Stored::rows>(
            acc, Stage::kAllSlabs ? now.kept[slab] : now.queries[0], ld, s.state, ld_v, 64);
        __syncthreads();
      }
      acc.put(now.x, ld_v,
              [&](int r, int c, float kd) { return to_float(now.x[r * ld_v + c]) + kd; });
      __syncthreads();

      acc.clear();  // 3
      multiply<Stored::columns, Stored::rows>(acc, now.a, ld, now.x, ld_v, rows);
      __syncthreads();
      acc.put(s.state, ld_v, [](int, int, float v) { return v; });
      acc.put(now.x, ld_v, [&](int, int, float v) { return -v; });
      if (!Stage::kAllSlabs) {
        load_operand(p.queries, p, span, hv, 0, now.queries[0]);
        load_operand(p.erased, p, span, hv, 0, now.erased[0]);
        wait_copies();
      }
      __syncthreads();
      store_tile(p.x + p.row_at(span.first, hv) * p.value_dim + v0, p.value_dim, s.state, ld_v,
                 span.rows, cols);

#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {  // 4
        const int held = Stage::kAllSlabs ? slab : 0;
        if (!Stage::kAllSlabs && slab > 0) {
          __syncthreads();
          load_operand(p.queries, p, span, hv, slab, now.queries[0]);
          load_operand(p.erased, p, span, hv, slab, now.erased[0]);
          wait_copies();
          __syncthreads();
        }
        state[slab].each([&](int r, int, float& v) { v *= now.total[64 * slab + r]; });
        multiply<Stored::columns, Stored::rows>(state[slab], now.queries[held], ld, now.d_o, ld_v,
                                                rows);
        multiply<Stored::columns, Stored::rows>(state[slab], now.erased[held], ld, now.x, ld_v,
                                                rows);
      }
      __syncthreads();
      if (more && Shared::kStages == 1)
        load_stage<T, SLABS>(p, walk.span(p, i - 1), walk.first + i - 1, hv, v0, now);
    }
    if (p.dh0) write_state(p.dh0, state, n * p.value_heads + hv, v0, p);  // 5
    __syncthreads();
  }
}

// out[i] = Σ_slabs parts[slab,i], in order.
template <class T>
__global__ void sum_slabs_kernel(const float* parts, T* out, int64_t count, int slabs) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * blockDim.x) {
    float sum = 0;
    for (int s = 0; s < slabs; ++s) sum += parts[s * count + i];
    out[i] = from_float<T>(sum);
  }
}

void sum_slabs(const Tensor& parts, const Tensor& out) {
  const int64_t count = out.numel();
  if (count == 0) return;
  const int64_t blocks = std::min<int64_t>(ceil_div(count, 256), 65536);
  visit_compute(out.dtype(), [&]<class Host>() {
    sum_slabs_kernel<<<unsigned(blocks), 256, 0, stream_of(out)>>>(
        ptr<float>(parts), ptr<Host>(out), count, int(parts.size(0)));
    check_launch();
  });
}

}  // namespace
}  // namespace ebb::gpu::delta

namespace ebb::gpu {

void channel_delta_rule_bwd(const DeltaRuleProblem& problem, const DeltaRuleSaved& saved,
                            const Tensor& dense_d_o, const Tensor& dht,
                            const DeltaRuleGradients& grads) {
  using namespace delta;
  const DType dtype = problem.v.dtype();
  const Device device = problem.v.device();
  const int64_t hv = problem.value_heads(), k = problem.key_dim(), v = problem.value_dim();
  const int64_t tokens = problem.batch() * problem.time(), slabs = ceil_div(k, 64);
  const int group = int(hv / problem.heads());
  const bool fast = saved.gates.defined();  // the states lie as [V,K]
  const bool plain = fast && is_plain(problem);
  const bool aligned = reinterpret_cast<uintptr_t>(dense_d_o.raw()) % 16 == 0;
  const Tensor d_o = fast && !aligned ? dense_d_o.clone() : dense_d_o;
  const Tensor x = plain ? Tensor() : Tensor::empty(saved.values.shape(), dtype, device);
  const Tensor dstates = Tensor::empty(saved.states.shape(), dtype, device);
  const Tensor dq_terms = group_terms(problem, grads.dq), dk_terms = group_terms(problem, grads.dk);
  Tensor dbeta = grads.dbeta;
  if (dbeta && slabs > 1) dbeta = Tensor::empty({slabs, tokens, hv}, DType::f32, device);
  const ChannelOperands operands = make_operands(problem, grads, plain);
  const Tensor before = chunk_offsets(problem);
  const cudaStream_t stream = stream_of(dstates);
  visit_compute(dtype, [&]<class Host>() {
    using T = device_t<Host>;
    Backward<T> p{make_channel<Host>(problem, saved, operands, before)};
    p.plain = plain;
    p.d_o = ptr<Host>(d_o), p.dht = ptr<float>(dht);
    p.x = ptr<Host>(x), p.dstates = ptr<Host>(dstates);
    p.dq = group == 1 ? ptr<Host>(grads.dq) : nullptr;
    p.dk = group == 1 ? ptr<Host>(grads.dk) : nullptr;
    p.dv = ptr<Host>(grads.dv);
    if (grads.dv && !grads.dv.is_contiguous()) p.dvalue_step = token_step(grads.dv, 2);
    p.dq_terms = ptr<float>(dq_terms), p.dk_terms = ptr<float>(dk_terms);
    p.dh0 = ptr<float>(grads.dh0);
    if (!problem.A_log) p.dg = ptr<float>(grads.dg);
    if (!problem.in_place || slabs > 1) p.dbeta = ptr<float>(dbeta);
    if (!problem.sigmoid) p.derase = ptr<float>(grads.derase), p.dwrite = ptr<float>(grads.dwrite);
    if constexpr (sizeof(T) == 2)
      if (fast) {
        if (problem.in_place) return raw_backward(p, problem, grads, stream);
        channel_fast_prepare(p, Prepare::operands, stream);
        channel_fast_reverse(p, device, stream);
        channel_fast_gradients(p, stream);
        return;
      }
    prepare<T>(p, Prepare::operands, stream);
    launch_tiles<LocalShared<T>>(local_kernel<T>, p.chunks * hv * ceil_div(v, 64), stream, p);
    visit_slabs(k, [&]<int SLABS>() {
      launch_tiles<ReverseShared<T, SLABS>>(reverse_kernel<T, SLABS>,
                                            scan_blocks(p.sequences, hv, v), stream, p);
    });
    channel_gradients<T>(p, stream);
  });
  if (dq_terms) sum_groups(dq_terms, grads.dq, group);
  if (dk_terms) sum_groups(dk_terms, grads.dk, group);
  if (dbeta && slabs > 1) sum_slabs(dbeta, grads.dbeta);
}

}  // namespace ebb::gpu
