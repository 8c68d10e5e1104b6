// The key that gated linear attention shares with its decays, k = 1 − e^g
// (ops/linear_attention_channel.h). The recurrence itself is that of the delta rule with a decay
// per channel (cuda/delta_rule_channel*.cu), which erases nothing here.
#include "cuda/common.cuh"
#include "ops/linear_attention_channel.h"

namespace ebb::gpu {
namespace {

constexpr int kThreads = 256, kPack = 4;

// Thread: kPack neighbouring elements at a time, the last ones singly; `packs` = count/kPack, or 0
// where the tensors are not aligned.
template <class T>
__global__ void __launch_bounds__(kThreads)
    key_kernel(const float* __restrict__ g_g, T* __restrict__ g_k, int64_t packs, int64_t count) {
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = first; i < packs; i += step) {
    float x[kPack];
    load_pack(x, g_g + i * kPack);
#pragma unroll
    for (float& e : x) e = -expm1f(e);
    store_pack(g_k + i * kPack, x);
  }
  for (int64_t i = packs * kPack + first; i < count; i += step)
    g_k[i] = from_float<T>(-expm1f(g_g[i]));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    key_gradient_kernel(const float* __restrict__ g_g, const T* __restrict__ g_dk,
                        float* __restrict__ g_dg, int64_t packs, int64_t count) {
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = first; i < packs; i += step) {
    float g[kPack], dk[kPack], dg[kPack];
    load_pack(g, g_g + i * kPack);
    load_pack(dk, g_dk + i * kPack);
    load_pack(dg, g_dg + i * kPack);
#pragma unroll
    for (int e = 0; e < kPack; ++e) dg[e] -= expf(g[e]) * dk[e];
    store_pack(g_dg + i * kPack, dg);
  }
  for (int64_t i = packs * kPack + first; i < count; i += step)
    g_dg[i] -= expf(g_g[i]) * to_float(g_dk[i]);
}

int64_t packs_of(const Tensor& a, const Tensor& b, const Tensor& c) {
  for (const Tensor* t : {&a, &b, &c})
    if (reinterpret_cast<uintptr_t>(t->raw()) % 16 != 0) return 0;
  return a.numel() / kPack;
}
unsigned blocks_for(int64_t count) {
  return unsigned(std::min<int64_t>(ceil_div(count, kThreads * kPack), 1 << 16));
}

}  // namespace

void shared_key(const Tensor& g, const Tensor& k) {
  if (g.numel() == 0) return;
  visit_compute(k.dtype(), [&]<class Host>() {
    key_kernel<<<blocks_for(g.numel()), kThreads, 0, stream_of(g)>>>(ptr<float>(g), ptr<Host>(k),
                                                                     packs_of(g, k, k), g.numel());
    check_launch();
  });
}

void shared_key_bwd(const Tensor& g, const Tensor& dk, const Tensor& dg) {
  if (g.numel() == 0) return;
  visit_compute(dk.dtype(), [&]<class Host>() {
    key_gradient_kernel<<<blocks_for(g.numel()), kThreads, 0, stream_of(g)>>>(
        ptr<float>(g), ptr<Host>(dk), ptr<float>(dg), packs_of(g, dk, dg), g.numel());
    check_launch();
  });
}

}  // namespace ebb::gpu
