// Delta rule with a decay per channel in bf16 on tensor cores: the gradients of every chunk, head
// and slab of 64 channels from X, V' and the states and their gradients
// (ops/delta_rule_channel_cpu_bwd.cpp). With E_ij = e^{G_i−G_j} by channel,
//   dq_i = scale e^{G_i}∘(S dO_i)  + Σ_{j<=i} dP_ij k_j∘E_ij
//   p_i  =     − e^{G_i}∘(S X_i)   + Σ_{j<i} dM_ij k_j∘E_ij
//   r_j  =  e^{G_n−G_j}∘(D V'_j)   + Σ_{i>=j} dP_ij q_i∘E_ij + Σ_{i>j} dM_ij (b_i k_i)∘E_ij
// E does not factor over the chunk within the range of floats. So pairs j < i are taken by a tree:
// blocks of 64, 32, ..., 2 times, in each the pairs of its upper with its lower half, for which E
// is the decay from j to the middle times that from the middle to i: products of numbers <= 1. And
// dg_t, the terms z_i = q_i∘dq_i + (b_i k_i)∘p_i and y_j = k_j∘r_j whose exponent contains g_t, is
//   e^{G_n}∘<S,D> + Σ of z_i over i >= t and of y_j over j < t, each level inside its half blocks
// so that nothing ever cancels: with the levels from the largest down, z of what has been summed so
// far goes at each level from the upper half to all of the lower one, and y the other way.
//
// Where nothing is erased (p, dM and b absent), operands of the tree are sums of two numbers in
// bf16: three products instead of two, and what is left of their errors are those of the states.
//
// Everything is held transposed (cuda/delta_channel_warp.cuh), so that decays work on registers and
// no scaled operand leaves them. Warps 0-3 own dq and p of the 64 channels
// (delta_channel_rows.cuh), warps 4-7 own r (delta_channel_columns.cuh).
#include "cuda/delta_channel_columns.cuh"
#include "cuda/delta_channel_logit_gradients.cuh"
#include "cuda/delta_channel_rows.cuh"

namespace ebb::gpu::delta {
namespace {

using Backward = FastChannelBackward;

__device__ __forceinline__ ChannelItem item_again(const Backward& p, int64_t first) {
  unsigned x, y;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
  return {p, first, x, y};
}

// Four warps' way through an item. All eight meet at the barriers.
template <bool GATED, class Products, template <bool, class> class Gradients, class P>
__device__ __forceinline__ void run(const P& p, const ChannelItem& item, int64_t first,
                                    ChannelShared& s) {
  float beta = 0;
  if (!GATED && !kPlain<P> && int(threadIdx.x) < item.span.rows)
    if constexpr (kOfLogits<P>)
      beta = made_strength(p, item.chunk, item.hv, int(threadIdx.x));
    else
      beta = p.erase_strength(item.span.first + threadIdx.x, item.hv);
  Products x;
  x.settle_all();
  for (int v0 = 0; v0 < p.value_dim; v0 += 64) {
    const int i = v0 / 64 % 2;
    if (i == 0 && v0 > 0) {
      meet<Products::kGroup>();
      fetch_stages(p, item_again(p, first), v0, s);
      commit_copies();
    }
    if (i == 0)
      wait_copy_groups<1>();
    else
      wait_copy_groups<0>();
    publish_tiles();
    meet<Products::kGroup>();
    x.template values<GATED>(p, item, s.stage[i], v0);
    warpgroup_wait<0>();
    x.settle_all();
  }
  wait_copy_groups<0>();
  meet<Products::kGroup>();
  if constexpr (GATED && kOfLogits<P>)
    fetch_erase(p, item, s);
  else if (GATED)
    s.now.erase.fetch(p.erase + item.gate_at(p), p.gate_stride(), item.span.rows, item.channels(p));
  commit_copies();
  if constexpr (kOfLogits<P>) normalize_keys(p, item, s);
  if (threadIdx.x == 0) s.now.item = item;
  Gradients<GATED, P> side(p, s, x);
  side.prepare(x.sums, beta, item);
  wait_copy_groups<0>();
  meet<Products::kGroup>();
  if constexpr (GATED && kOfLogits<P>) make_erase<Products::kGroup>(p, s);
  side.tree();
  side.put_tile();
  meet<Products::kGroup>();
  side.last();
}

// Block (head and slab of 64 channels, chunk − first). No loop over items: the compiler would keep
// what all of them share in registers.
template <bool GATED, class P>
__global__ void __launch_bounds__(kGradientThreads, 2) gradient_kernel(P p, int64_t first) {
  auto& s = swizzled_shared<ChannelShared>();
  const ChannelItem item(p, first, blockIdx.x, blockIdx.y);
  if (item.span.rows == 0 || item.channels(p) <= 0) return;
  fetch_stages(p, item, 0, s);
  fetch_keys(p, item, s);
  commit_copies();
  if (threadIdx.x < kGradientThreads / 2)
    run<GATED, RowProducts<kPlain<P>>, RowGradients>(p, item, first, s);
  else
    run<GATED, ColumnProducts<kPlain<P>>, ColumnGradients>(p, item, first, s);
  if constexpr (kOfLogits<P>) return store_raw_gradients<GATED>(p, s);
  barrier_wait<kGradientThreads>(0);
  const TilePlace at(thread_again());
  const ChannelItem& now = s.now.item;
  const int rows = now.span.rows, cols = now.channels(p);
  if (p.dq) at.store(p.dq + now.key_at(p), p.key_stride(), s.q, rows, cols);
  if (p.dk) at.store(p.dk + now.key_at(p), p.key_stride(), s.k, rows, cols);
  if (!p.dg) return;
#pragma unroll 1
  for (int r = at.r; r < rows; r += 32)
    if (at.c < cols)
      store_finished(p.dg + now.gate_at(p) + r * p.gate_stride() + at.c, s.now.erase.at(r, at.c));
}

template <class P>
void launch_gradients(void (*kernel)(P, int64_t), const P& p, cudaStream_t stream) {
  constexpr int64_t kMost = 65535;
  const unsigned slabs = p.key_dim > 128 ? 4 : p.key_dim > 64 ? 2 : 1;  // a power of two
  for (int64_t first = 0; first < p.chunks; first += kMost) {
    const dim3 grid(slabs * unsigned(p.value_heads), unsigned(std::min(p.chunks - first, kMost)));
    launch_fast<ChannelShared>(kernel, kGradientThreads, grid, stream, p, first);
  }
}

}  // namespace

void channel_fast_gradients(const FastChannelBackward& p, cudaStream_t stream) {
  using Plain = PlainChannelBackward;
  if (p.plain) return launch_gradients(gradient_kernel<false, Plain>, Plain{p}, stream);
  launch_gradients(p.erase ? gradient_kernel<true, Backward> : gradient_kernel<false, Backward>, p,
                   stream);
}
void channel_fast_gradients(const LogitChannelBackward& p, cudaStream_t stream) {
  using P = LogitChannelBackward;
  launch_gradients(p.gated ? gradient_kernel<true, P> : gradient_kernel<false, P>, p, stream);
}

}  // namespace ebb::gpu::delta
