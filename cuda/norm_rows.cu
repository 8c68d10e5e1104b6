// Host side of cuda/norm_rows.cuh and cuda/norm_sums.cuh: the second stage of the weight gradients.
#include "cuda/norm_sums.cuh"

#include <algorithm>
#include <bit>
#include <numeric>

namespace ebb::gpu {
namespace {

constexpr int kSumWarps = 32;

// grid (columns/32, 1 or 2). 1 each warp adds its share of the rows of 32 columns, 2 the 32 shares
// of a column meet in one warp. The order of additions depends on `rows` alone.
__global__ void __launch_bounds__(32 * kSumWarps)
    sum_partials_kernel(const float* g_partial, float* g_out, const float* g_partial2,
                        float* g_out2, int64_t rows, int64_t columns) {
  __shared__ float s_sum[kSumWarps][33];
  const float* g_in = blockIdx.y ? g_partial2 : g_partial;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int64_t first = int64_t(blockIdx.x) * 32;
  float sum = 0;
  if (first + lane < columns)
#pragma unroll 8
    for (int64_t r = warp; r < rows; r += kSumWarps) sum += g_in[r * columns + first + lane];
  s_sum[warp][lane] = sum;  // 1
  __syncthreads();
  sum = warp_sum(s_sum[lane][warp]);  // 2
  float* g_to = blockIdx.y ? g_out2 : g_out;
  if (lane == 0 && first + warp < columns) g_to[first + warp] = sum;
}

constexpr int kAlign = 16;
bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.raw()) % kAlign == 0; }
bool rows_aligned(const Tensor& t) {
  return aligned(t) && (t.size(0) <= 1 || t.stride(0) * item_size(t.dtype()) % kAlign == 0);
}

}  // namespace

RowPlan plan_rows(const Tensor& x, std::initializer_list<const Tensor*> rows,
                  std::initializer_list<const Tensor*> weights) {
  RowPlan plan;
  plan.tokens = x.size(0), plan.groups = x.size(1), plan.width = x.size(2);
  plan.vector = true;
  for (const Tensor* t : rows)
    if (t->defined())
      plan.vector =
          plan.vector && rows_aligned(*t) && plan.width % (kAlign / item_size(t->dtype())) == 0;
  for (const Tensor* t : weights)
    if (t->defined()) {
      plan.vector = plan.vector && aligned(*t);
      plan.weight_groups = int(t->numel() / plan.width);
    }
  if (plan.groups > INT32_MAX) throw Error(std::string(current_op()) + ": too many groups");
  const int64_t lanes = std::max<int64_t>(1, ceil_div(plan.width, kRowValues));
  plan.wide = lanes > kRowThreads;
  if (plan.wide)
    plan.lanes = kRowThreads;
  else
    plan.lanes = lanes <= 32 ? int(std::bit_ceil(uint64_t(lanes))) : int(ceil_div(lanes, 32) * 32);
  plan.slots = kRowThreads / plan.lanes;
  plan.span = int(std::gcd(plan.groups, int64_t(plan.slots)));
  plan.token_slots = plan.slots / plan.span;
  plan.spans = int(plan.groups / plan.span);
  return plan;
}

int64_t row_blocks(const RowPlan& plan, int blocks_per_multiprocessor, Device device) {
  const int64_t fill = int64_t(multiprocessors(device)) * blocks_per_multiprocessor;
  const int64_t work = ceil_div(plan.tokens, plan.token_slots);
  return std::clamp<int64_t>(fill / plan.spans, 1, std::max<int64_t>(work, 1));
}

void sum_partials(const Tensor& partial, const Tensor& out, const Tensor& partial2,
                  const Tensor& out2) {
  if (!out.defined()) {
    if (out2.defined()) sum_partials(partial2, out2);
    return;
  }
  const int64_t columns = out.numel(), rows = columns ? partial.numel() / columns : 0;
  if (columns == 0) return;
  const dim3 grid(unsigned(ceil_div(columns, 32)), out2.defined() ? 2 : 1);
  sum_partials_kernel<<<grid, 32 * kSumWarps, 0, stream_of(out)>>>(
      ptr<float>(partial), ptr<float>(out), ptr<float>(partial2), ptr<float>(out2), rows, columns);
  check_launch();
}

}  // namespace ebb::gpu
