// AdamW over a list of tensors (ops/adamw.h): one launch, one block per chunk of 8192 elements.
// Per element it reads p, m, v, g and writes p, m, v and the bf16 shadow, 30 bytes in all.
#include "cuda/common.cuh"
#include "ops/adamw.h"

namespace ebb::gpu {
namespace {

using Row = AdamWList::Row;
constexpr int kThreads = 256;
constexpr int kPack = 4;   // elements of one 16-byte access
constexpr int kPacks = 2;  // packs in flight per thread

__global__ void begin_kernel(AdamWScalars* g_scalars, const double* g_squares, AdamWOptions o) {
  AdamWScalars s = *g_scalars;
  adamw_begin_step(s, *g_squares, o);
  *g_scalars = s;
}

__device__ bool aligned(const void* p, unsigned bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// grid: chunks. 1 leave if this step is skipped.  2 find the tensor; its coefficients.
// 3 whole packs: load p, m, v, g, update, store with the shadow.  4 the rest one by one (all of the
// chunk where an address is not aligned).
__global__ void __launch_bounds__(kThreads, 4)
    adamw_kernel(const Row* g_rows, const TensorChunk* g_chunks, const AdamWScalars* g_scalars,
                 AdamWOptions o) {
  if (g_scalars->skip != 0) return;                // 1
  const TensorChunk chunk = g_chunks[blockIdx.x];  // 2
  const Row row = g_rows[chunk.row];
  const AdamWCoefficients<float> k(*g_scalars, row, o);
  float* __restrict__ g_p = static_cast<float*>(row.p) + chunk.begin;
  float* __restrict__ g_m = static_cast<float*>(row.m) + chunk.begin;
  float* __restrict__ g_v = static_cast<float*>(row.v) + chunk.begin;
  const float* __restrict__ g_g = static_cast<const float*>(row.g) + chunk.begin;
  __nv_bfloat16* __restrict__ g_shadow =
      row.shadow ? static_cast<__nv_bfloat16*>(row.shadow) + chunk.begin : nullptr;
  const int64_t left = row.numel - chunk.begin;
  const int items = int(left < kChunkItems ? left : kChunkItems);
  const bool vector = aligned(g_p, 16) && aligned(g_m, 16) && aligned(g_v, 16) &&
                      aligned(g_g, 16) && aligned(g_shadow, 8);
  const int packs = vector ? items / kPack : 0;
  for (int at = threadIdx.x; at < packs; at += kThreads * kPacks) {  // 3
    float r_p[kPacks][kPack], r_m[kPacks][kPack], r_v[kPacks][kPack], r_g[kPacks][kPack];
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int i = (at + u * kThreads) * kPack;
      if (i >= packs * kPack) continue;
      load_pack(r_p[u], g_p + i);
      load_pack(r_m[u], g_m + i);
      load_pack(r_v[u], g_v + i);
      load_pack(r_g[u], g_g + i);
    }
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int i = (at + u * kThreads) * kPack;
      if (i >= packs * kPack) continue;
#pragma unroll
      for (int j = 0; j < kPack; ++j) adamw_element(r_p[u][j], r_g[u][j], r_m[u][j], r_v[u][j], k);
      store_pack(g_p + i, r_p[u]);
      store_pack(g_m + i, r_m[u]);
      store_pack(g_v + i, r_v[u]);
      if (g_shadow) store_pack(g_shadow + i, r_p[u]);
    }
  }
  for (int i = packs * kPack + threadIdx.x; i < items; i += kThreads) {  // 4
    float p = g_p[i], m = g_m[i], v = g_v[i];
    adamw_element(p, g_g[i], m, v, k);
    g_p[i] = p, g_m[i] = m, g_v[i] = v;
    if (g_shadow) g_shadow[i] = from_float<__nv_bfloat16>(p);
  }
}

}  // namespace

void adamw_begin(const Tensor& scalars, const Tensor& squares, const AdamWOptions& options) {
  begin_kernel<<<1, 1, 0, stream_of(scalars)>>>(static_cast<AdamWScalars*>(scalars.raw()),
                                                static_cast<const double*>(squares.raw()), options);
  check_launch();
}

void adamw(const AdamWList& list, const Tensor& scalars, const AdamWOptions& options) {
  const int64_t chunks = list.table().chunk_count();
  adamw_kernel<<<unsigned(chunks), kThreads, 0, stream_of(scalars)>>>(
      list.table().rows<Row>(), list.table().chunks(),
      static_cast<const AdamWScalars*>(scalars.raw()), options);
  check_launch();
}

}  // namespace ebb::gpu
