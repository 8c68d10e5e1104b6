// Gated delta rule in bf16 on tensor cores: the gradients of every chunk for heads of 136 to 256
// channels (cuda/delta_fast_gradients.cu has the narrower ones and the notation). K is worked on in
// two halves of 128 channels, one after the other: what no channel has a part in is found with the
// first, sums over channels go on with the second.
#include "cuda/delta_fast_gradients.cuh"

namespace ebb::gpu::delta {
namespace {

using namespace rule;

struct WideShared {
  static constexpr int kSlabs = 2;  // of a half
  ValueStage<2> stage[2];
  SwizzledTile q[2], k[2], later_k[2];  // the half's, and the second half's of k
  SwizzledTile scores, s_ds, s_dm;
  RuleGates gates;
  float row_z[2][64], reads[2][64], kept[64];  // as in GradientShared
  float column_z[8][64];
  float value_p[64], key_p[64];
  float carry[8];

  __device__ __forceinline__ SwizzledTile& ds() { return s_ds; }
  __device__ __forceinline__ SwizzledTile& dm() { return s_dm; }
  __device__ __forceinline__ SwizzledTile (&dq())[2] { return stage[0].state; }
  __device__ __forceinline__ SwizzledTile (&dk())[2] { return stage[0].dstate; }
  __device__ __forceinline__ float4* exchange() { return reinterpret_cast<float4*>(&stage[1]); }
  // With the first half.
  __device__ __forceinline__ void multiply_keys(float (&x)[8][4], int warp) const {
    multiply_tiles<true, Inner::last, Inner::last>(x, k[0], k[0], warp);
    multiply_tiles<false, Inner::last, Inner::last>(x, k[1], k[1], warp);
    multiply_tiles<false, Inner::last, Inner::last>(x, later_k[0], later_k[0], warp);
    multiply_tiles<false, Inner::last, Inner::last>(x, later_k[1], later_k[1], warp);
  }
};

template <int SLABS>
__device__ __forceinline__ void clear(float (&x)[SLABS][8][4]) {
#pragma unroll
  for (int j = 0; j < SLABS; ++j)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[j][n][e] = 0.f;
}

// A half's tiles, by all threads.
template <bool FIRST, int GROUP>
__device__ __forceinline__ void fetch_half(const FastBackward& p, Span span, int64_t chunk, int hv,
                                           WideShared& s) {
  constexpr int kSlab = FIRST ? 0 : 2;
  const ValueRows values(p, span, hv);
  fetch_values(p, span, chunk, hv, 0, kSlab, s.stage[0]);
  if (p.value_dim > kFastTile) fetch_values(p, span, chunk, hv, kFastTile, kSlab, s.stage[1]);
  fetch_keys(p, p.q, span, hv, kSlab, s.q);
  fetch_keys(p, p.k, span, hv, kSlab, s.k);
  if (FIRST) {
    fetch_keys(p, p.k, span, hv, 2, s.later_k);
    fetch_chunk(p, span, chunk, hv, s);
  }
  commit_copies();
  wait_copy_groups<0>();
  publish_tiles();
  meet<GROUP>();
  if (!FIRST) write_value_gradients<false>(p, s, values, span, hv, 0);  // X is not read again
}

// The first group's way through a half; `a` holds ds from the first one on.
template <bool FIRST>
__device__ __forceinline__ void read_half(const FastBackward& p, WideShared& s, ReadGradients<2>& x,
                                          unsigned (&a)[4][4], float& carry, Span span,
                                          int64_t chunk, int hv, int warp, const Lane& l) {
  constexpr int kSlab = FIRST ? 0 : 2;
  fetch_half<FIRST, 0>(p, span, chunk, hv, s);
  clear(x.dq), clear(x.dk);
  carry += value_products<FIRST, !FIRST>(p, s, x, span, chunk, hv, kSlab, warp);
  if (FIRST) x.template scores<false>(s, p.scale, a, warp, l);
  x.template row_sums<false, !FIRST>(s, p.scale, warp, l);
  if (!FIRST && (threadIdx.x & 31) == 0) s.carry[warp] = carry;
  publish_tiles();
  meet<0>();
  x.keys(s, a, warp);
  hand_over<2>(s, x.dk);
  put_gradients<2>(s.dq(), x.dq, 16 * warp, l);
  if (p.dq_terms) write_terms<2>(p, p.dq_terms, x.dq, span, hv, 64 * kSlab, 16 * warp, l);
  meet<0>();
  if (!FIRST && warp == 0) write_gate_gradients(p, s, span, chunk, hv);
  meet<0>();
  store_gradients(p, s, span, hv, kSlab);
  meet<0>();
}
// The second group's.
template <bool FIRST>
__device__ __forceinline__ void erase_half(const FastBackward& p, WideShared& s,
                                           EraseGradients<2>& x, unsigned (&a)[4][4], float& carry,
                                           Span span, int64_t chunk, int hv, int warp,
                                           const Lane& l) {
  constexpr int kSlab = FIRST ? 0 : 2;
  fetch_half<FIRST, 1>(p, span, chunk, hv, s);
  clear(x.dk);
  carry += value_products<FIRST, !FIRST>(p, s, x, span, chunk, hv, kSlab, warp);
  float key_p[2] = {};
  if (FIRST) x.template scores<false>(s, a, key_p, warp, l);
  x.template row_sums<!FIRST>(s, key_p, warp, l);
  if (!FIRST && (threadIdx.x & 31) == 0) s.carry[4 + warp] = carry;
  publish_tiles();
  meet<1>();
  x.keys(s, a, warp);
  meet<1>();
  take_over<2>(s, x.dk);
  put_gradients<2>(s.dk(), x.dk, 16 * warp, l);
  if (p.dk_terms) write_terms<2>(p, p.dk_terms, x.dk, span, hv, 64 * kSlab, 16 * warp, l);
  meet<1>();
  store_gradients(p, s, span, hv, kSlab);
  meet<1>();
}

// Block (head, chunk).
__global__ void __launch_bounds__(kRuleThreads, 1) wide_gradient_kernel(FastBackward p) {
  auto& s = swizzled_shared<WideShared>();
  const Lane l;
  const int warp = (int(threadIdx.x) >> 5) & 3, hv = int(blockIdx.x);
  for (int64_t chunk = blockIdx.y; chunk < p.chunks; chunk += gridDim.y) {
    const Span span = span_of(p, chunk);
    if (span.rows == 0) return;
    unsigned a[4][4];
    float carry = 0;
    if (threadIdx.x < kRuleThreads / 2) {
      ReadGradients<2> x = {};
      read_half<true>(p, s, x, a, carry, span, chunk, hv, warp, l);
      read_half<false>(p, s, x, a, carry, span, chunk, hv, warp, l);
    } else {
      EraseGradients<2> x = {};
      erase_half<true>(p, s, x, a, carry, span, chunk, hv, warp, l);
      erase_half<false>(p, s, x, a, carry, span, chunk, hv, warp, l);
    }
  }
}

}  // namespace

void wide_chunk_gradients(const FastBackward& p, cudaStream_t stream) {
  launch_fast<WideShared>(wide_gradient_kernel, kRuleThreads, chunk_grid(p), stream, p);
}

}  // namespace ebb::gpu::delta
