// The scans of the delta rule with a decay per channel in bf16 on tensor cores
// (cuda/delta_fast.cuh): as those of the gated delta rule, with the decays already in the operands
// that delta_rule_channel.cu has made, so that only γ_n is left for the state.
#include "cuda/delta_fragments.cuh"
#include "cuda/delta_rule_channel.cuh"

namespace ebb::gpu::delta {
namespace {

constexpr int kThreads = 128;

template <int SLABS>
struct Operands {  // of one chunk
  bf16_t erased[64 * key_row(SLABS)], kept[64 * key_row(SLABS)], queries[64 * key_row(SLABS)];
  bf16_t ap[64 * kPairRow];  // A beside P
  bf16_t v[64 * kRow];       // w∘V or V; in the reverse scan dO
  float total[64 * SLABS], beta[kChunk];
};
template <int SLABS, int STAGES>
struct ScanShared {
  Operands<SLABS> stage[STAGES];
  Staging<SLABS> staging[4];
};

template <int SLABS>
__device__ __forceinline__ void fetch_operands(const Channel<bf16_t>& p, Span span, int64_t chunk,
                                               int hv, Operands<SLABS>& s) {
  constexpr int ld = key_row(SLABS), K = 64 * SLABS;
  const int64_t row = p.row_at(span.first, hv), key = row * p.key_dim;
  fetch_tile<K, kThreads>(s.erased, ld, p.erased + key, p.key_dim, span.rows, p.key_dim);
  fetch_tile<64, kThreads>(s.ap, kPairRow, p.a + row * kChunk, kChunk, span.rows, kChunk);
  fetch_tile<K, kThreads>(s.queries, ld, p.queries + key, p.key_dim, span.rows, p.key_dim);
  fetch_tile<64, kThreads>(s.ap + 64, kPairRow, p.scores + row * kChunk, kChunk, span.rows, kChunk);
  fetch_tile<K, kThreads>(s.kept, ld, p.kept + key, p.key_dim, span.rows, p.key_dim);
  const float* total = p.total + p.total_at(chunk, hv);
  fetch_floats<kThreads>(s.total, total, p.key_dim);
  fetch_floats<kThreads>(s.beta, total + p.key_dim, kChunk);
}

// state [16,K] times γ_n by channel; channels beyond K stay zero whatever s_total holds there.
template <int SLABS>
__device__ __forceinline__ void decay_state(float (&state)[8 * SLABS][4], const float* s_total,
                                            int key_dim, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 8 * SLABS; ++n) {
    if (8 * n >= key_dim) continue;
    const float2 f = *reinterpret_cast<const float2*>(s_total + 8 * n + 2 * l.c);
    state[n][0] *= f.x, state[n][1] *= f.y, state[n][2] *= f.x, state[n][3] *= f.y;
  }
}

// y [16, 64 tokens] += x [16,K] operandᵀ.
template <int SLABS>
__device__ __forceinline__ void times_transposed(float (&y)[8][4],
                                                 const unsigned (&x)[4 * SLABS][4],
                                                 const bf16_t* s_operand, const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4 * SLABS; ++k)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      unsigned b[4];
      right(b, s_operand, key_row(SLABS), 16 * k, 16 * n, l);
      mma(y[2 * n], x[k], b[0], b[1]);
      mma(y[2 * n + 1], x[k], b[2], b[3]);
    }
}
// state [16,K] += x [16, 64 tokens] operand.
template <int SLABS>
__device__ __forceinline__ void add_to_state(float (&state)[8 * SLABS][4],
                                             const unsigned (&x)[4][4], const bf16_t* s_operand,
                                             const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int n = 0; n < 4 * SLABS; ++n) {
      unsigned b[4];
      right_transposed(b, s_operand, key_row(SLABS), 16 * k, 16 * n, l);
      mma(state[2 * n], x[k], b[0], b[1]);
      mma(state[2 * n + 1], x[k], b[2], b[3]);
    }
}
// y [16, 64 tokens] += x Lᵀ, or x L, for a lower triangular L [64,64] of s.ap.
__device__ __forceinline__ void times_lower_transposed(float (&y)[8][4], const unsigned (&x)[4][4],
                                                       const bf16_t* s_l, const Lane& l) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int n = k; n < 4; ++n) {
      unsigned b[4];
      right(b, s_l, kPairRow, 16 * k, 16 * n, l);
      mma(y[2 * n], x[k], b[0], b[1]);
      mma(y[2 * n + 1], x[k], b[2], b[3]);
    }
}
__device__ __forceinline__ void times_lower(float (&y)[8][4], const unsigned (&x)[4][4],
                                            const bf16_t* s_l, const Lane& l) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int k = n; k < 4; ++k) {
      unsigned b[4];
      right_transposed(b, s_l, kPairRow, 16 * k, 16 * n, l);
      mma(y[2 * n], x[k], b[0], b[1]);
      mma(y[2 * n + 1], x[k], b[2], b[3]);
    }
}
__device__ __forceinline__ void to_left(unsigned (&a)[4][4], const float (&x)[8][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) as_left(a[k], x[2 * k], x[2 * k + 1]);
}

// Item (sequence, head, 64 columns of V); warp w has 16 of the columns and Sᵀ [16,K] in registers.
// Per chunk: 1 store S. 2 Y = w∘V − K̂ S. 3 V' = A Y, stored. 4 o = Q̃ S + P V', stored.
// 5 S = Diag(γ_n) S + K̄ᵀ V'. At the end: 6 ht. Chunks are fetched STAGES−1 ahead.
template <int SLABS, int STAGES>
__global__ void __launch_bounds__(kThreads) scan_kernel(Channel<bf16_t> p, bf16_t* o, float* ht) {
  auto& s = dynamic_shared<ScanShared<SLABS, STAGES>>();
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  const int64_t tiles = (p.value_dim + kFastTile - 1) / kFastTile;
  for (int64_t item = blockIdx.x; item < p.sequences * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * kFastTile, hv = int(item / tiles % p.value_heads);
    const int64_t n_seq = item / tiles / p.value_heads;
    const int vw = v0 + 16 * warp, cols = p.value_dim - vw;  // of this warp; perhaps none
    const ChunkWalk walk(p, n_seq);
    const int64_t state_of = (n_seq * p.value_heads + hv) * p.key_dim * p.value_dim;
    float state[8 * SLABS][4];
    read_transposed<SLABS>(state, p.h0 ? p.h0 + state_of : nullptr, p.key_dim, p.value_dim, vw, l);
    auto fetch = [&](int64_t i) {
      if (i < walk.count) {
        const Span span = walk.span(p, i);
        Operands<SLABS>& to = s.stage[i % STAGES];
        const bf16_t* v = p.written ? p.written + p.row_at(span.first, hv) * p.value_dim
                                    : p.v + p.value_at(span.first, hv);
        fetch_tile<64, kThreads>(to.v, kRow, v + v0, p.written ? p.value_dim : p.value_stride(),
                                 span.rows, p.value_dim - v0);
        fetch_operands(p, span, walk.first + i, hv, to);
      }
      commit_copies();
    };
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    for (int64_t i = 0; i < walk.count; ++i) {
      wait_copy_groups<STAGES - 2>();
      __syncthreads();
      fetch(i + STAGES - 1);
      if (cols <= 0) continue;
      const Operands<SLABS>& now = s.stage[i % STAGES];
      const Span span = walk.span(p, i);

      unsigned sa[4 * SLABS][4];  // 1
#pragma unroll
      for (int k = 0; k < 4 * SLABS; ++k) as_left(sa[k], state[2 * k], state[2 * k + 1]);
      float y[8][4] = {};  // 2
      times_transposed<SLABS>(y, sa, now.erased, l);
      s.staging[warp].write_state(
          p.states + p.state_at(walk.first + i, hv) + int64_t(vw) * p.key_dim, p.key_dim, sa, cols);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        unsigned v[4];
        load_matrices_transposed(
            v, now.v + (16 * n + l.low + 8 * l.high) * kRow + 16 * warp + 8 * l.odd);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 b = *reinterpret_cast<const float2*>(now.beta + 8 * (2 * n + h) + 2 * l.c);
          float(&x)[4] = y[2 * n + h];
          x[0] = b.x * low_half(v[2 * h]) - x[0];
          x[1] = b.y * high_half(v[2 * h]) - x[1];
          x[2] = b.x * low_half(v[2 * h + 1]) - x[2];
          x[3] = b.y * high_half(v[2 * h + 1]) - x[3];
        }
      }
      unsigned ya[4][4], va[4][4];
      to_left(ya, y);
      float values[8][4] = {}, out[8][4] = {};
      times_lower_transposed(values, ya, now.ap, l);  // 3
      times_transposed<SLABS>(out, sa, now.queries, l);
      to_left(va, values);
      decay_state<SLABS>(state, now.total, p.key_dim, l);  // 5
      add_to_state<SLABS>(state, va, now.kept, l);
      s.staging[warp].write_values(p.values + p.row_at(span.first, hv) * p.value_dim + vw,
                                   p.value_dim, va, span.rows, cols);
      times_lower_transposed(out, va, now.ap + 64, l);  // 4
      to_left(va, out);
      s.staging[warp].write_values(o + p.value_at(span.first, hv) + vw, p.value_stride(), va,
                                   span.rows, cols);
    }
    if (ht)  // 6
      write_transposed<SLABS>(ht + state_of, state, p.key_dim, p.value_dim, vw, l);
    wait_copy_groups<0>();
    __syncthreads();
  }
}

// Item as in the scan, Dᵀ [16,K] in registers. Per chunk, from the last: 1 store D. 2 dV' = K̄ D +
// Pᵀ dO. 3 X = Aᵀ dV', stored. 4 D = Diag(γ_n) D + Q̃ᵀ dO − K̂ᵀ X. At the end: 5 dh0.
template <int SLABS, int STAGES>
__global__ void __launch_bounds__(kThreads) reverse_kernel(ChannelBackward<bf16_t> p) {
  auto& s = dynamic_shared<ScanShared<SLABS, STAGES>>();
  const Lane l;
  const int warp = int(threadIdx.x) >> 5;
  const int64_t tiles = (p.value_dim + kFastTile - 1) / kFastTile;
  for (int64_t item = blockIdx.x; item < p.sequences * p.value_heads * tiles; item += gridDim.x) {
    const int v0 = int(item % tiles) * kFastTile, hv = int(item / tiles % p.value_heads);
    const int64_t n_seq = item / tiles / p.value_heads;
    const int vw = v0 + 16 * warp, cols = p.value_dim - vw;
    const ChunkWalk walk(p, n_seq);
    const int64_t state_of = (n_seq * p.value_heads + hv) * p.key_dim * p.value_dim;
    float state[8 * SLABS][4];
    read_transposed<SLABS>(state, p.dht ? p.dht + state_of : nullptr, p.key_dim, p.value_dim, vw,
                           l);
    auto fetch = [&](int64_t step) {
      if (step < walk.count) {
        const int64_t i = walk.count - 1 - step;
        const Span span = walk.span(p, i);
        Operands<SLABS>& to = s.stage[step % STAGES];
        fetch_tile<64, kThreads>(to.v, kRow, p.d_o + p.value_at(span.first, hv) + v0,
                                 p.value_stride(), span.rows, p.value_dim - v0);
        fetch_operands<SLABS>(p, span, walk.first + i, hv, to);
      }
      commit_copies();
    };
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    for (int64_t step = 0; step < walk.count; ++step) {
      wait_copy_groups<STAGES - 2>();
      __syncthreads();
      fetch(step + STAGES - 1);
      if (cols <= 0) continue;
      const Operands<SLABS>& now = s.stage[step % STAGES];
      const int64_t i = walk.count - 1 - step;
      const Span span = walk.span(p, i);

      float dv[8][4] = {};  // 2
      {
        unsigned da[4 * SLABS][4];  // 1
#pragma unroll
        for (int k = 0; k < 4 * SLABS; ++k) as_left(da[k], state[2 * k], state[2 * k + 1]);
        times_transposed<SLABS>(dv, da, now.kept, l);
        s.staging[warp].write_state(
            p.dstates + p.state_at(walk.first + i, hv) + int64_t(vw) * p.key_dim, p.key_dim, da,
            cols);
      }
      unsigned doa[4][4], xa[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) left_transposed(doa[k], now.v, kRow, 16 * warp, 16 * k, l);
      times_lower(dv, doa, now.ap + 64, l);
      to_left(xa, dv);
      float x[8][4] = {};  // 3
      times_lower(x, xa, now.ap, l);
      to_left(xa, x);
      decay_state<SLABS>(state, now.total, p.key_dim, l);  // 4
      add_to_state<SLABS>(state, doa, now.queries, l);
      s.staging[warp].write_values(p.x + p.row_at(span.first, hv) * p.value_dim + vw, p.value_dim,
                                   xa, span.rows, cols);
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) xa[k][e] ^= 0x80008000u;  // −X
      add_to_state<SLABS>(state, xa, now.erased, l);
    }
    if (p.dh0)  // 5
      write_transposed<SLABS>(p.dh0 + state_of, state, p.key_dim, p.value_dim, vw, l);
    wait_copy_groups<0>();
    __syncthreads();
  }
}

constexpr int kStages = 2;

}  // namespace

bool channel_fast_path(const DeltaRuleProblem& p) {
  const auto aligned = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
  };
  const bool fits = compute_capability(p.v.device()) == 90 ||
                    compute_capability(p.v.device()) >= 100 ||
                    (compute_capability(p.v.device()) == 80 && p.key_dim() <= 64);
  return fits && p.v.dtype() == DType::bf16 && p.chunk >= kChunk && p.key_dim() <= 128 &&
         p.key_dim() % 8 == 0 && p.value_dim() % 8 == 0 && aligned(p.v);
}

void channel_fast_scan(const Channel<bf16_t>& p, bf16_t* o, float* ht, cudaStream_t stream) {
  visit_fast_slabs(p.key_dim, [&]<int SLABS>() {
    launch_fast<ScanShared<SLABS, kStages>>(
        scan_kernel<SLABS, kStages>, kThreads,
        grid_of(p.sequences * p.value_heads * ceil_div(p.value_dim, kFastTile)), stream, p, o, ht);
  });
}

void channel_fast_reverse(const ChannelBackward<bf16_t>& p, cudaStream_t stream) {
  visit_fast_slabs(p.key_dim, [&]<int SLABS>() {
    launch_fast<ScanShared<SLABS, kStages>>(
        reverse_kernel<SLABS, kStages>, kThreads,
        grid_of(p.sequences * p.value_heads * ceil_div(p.value_dim, kFastTile)), stream, p);
  });
}

}  // namespace ebb::gpu::delta
