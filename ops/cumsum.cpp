#include "ops/cumsum.h"

#include <omp.h>

#include <algorithm>

#include "ops/common.h"

namespace ebb {

namespace cpu {
namespace {

constexpr int64_t kParallelItems = 1 << 14;
constexpr int64_t kTile = 64;  // columns scanned together

}  // namespace

void cumsum(const Tensor& x, ScanShape s, const SeqLayout& layout, ScanOrder order,
            const Tensor& y) {
  const std::vector<int64_t> whole = {0, s.n};
  const std::vector<int64_t>& bounds = layout.is_packed() ? layout.host() : whole;
  const int64_t sequences = int64_t(bounds.size()) - 1, tiles = (s.inner + kTile - 1) / kTile;
  visit_float(x.dtype(), [&]<class T>() {
    const T* from = x.data<T>();
    T* to = y.data<T>();
#pragma omp parallel for collapse(2) if (s.outer * s.n * s.inner > kParallelItems)
    for (int64_t task = 0; task < s.outer * tiles; ++task) {
      for (int64_t q = 0; q < sequences; ++q) {
        const int64_t o = task / tiles, c0 = task % tiles * kTile;
        const int64_t width = std::min(kTile, s.inner - c0), begin = bounds[size_t(q)];
        const int64_t length = bounds[size_t(q) + 1] - begin;
        double sum[kTile] = {};  // wider than f32 needs: free here
        for (int64_t r = 0; r < length; ++r) {
          const int64_t t = begin + (order == ScanOrder::forward ? r : length - 1 - r);
          const int64_t at = (o * s.n + t) * s.inner + c0;
          for (int64_t c = 0; c < width; ++c) {
            sum[c] += double(acc_t<T>(from[at + c]));
            to[at + c] = T(sum[c]);
          }
        }
      }
    }
  });
}

}  // namespace cpu

namespace {

Tensor scan(const Tensor& x, const ScanShape& s, const SeqLayout& layout, ScanOrder order) {
  const Tensor from = x.contiguous(), y = Tensor::empty_like(from);
  if (y.numel() == 0) return y;
  if (kWithCuda && y.on_cuda())
    gpu::cumsum(from, s, layout, order, y);
  else
    cpu::cumsum(from, s, layout, order, y);
  return y;
}

Var run(const Var& x, const ScanShape& s, const SeqLayout& layout, ScanOrder order) {
  const Tensor y = scan(x.value(), s, layout, order);
  const ScanOrder other = order == ScanOrder::forward ? ScanOrder::backward : ScanOrder::forward;
  return record("cumsum", {x}, {}, {y}, [s, layout, other](BackwardContext& ctx) {
    ctx.grad(0, scan(ctx.dy(0), s, layout, other));
  })[0];
}

}  // namespace

Var cumsum(const Var& x, int dim, ScanOrder order) {
  const OpScope scope("cumsum");
  check_float("cumsum", "x", x.value());
  check(dim >= -x.dim() && dim < x.dim(), "cumsum: dimension {} of x {}", dim, x.shape());
  if (dim < 0) dim += x.dim();
  const ScanShape s{x.shape().first(dim).numel(), x.size(dim), x.shape().from(dim + 1).numel()};
  return run(x, s, {}, order);
}

Var cumsum(const Var& x, const SeqLayout& layout, ScanOrder order) {
  const OpScope scope("cumsum");
  check_float("cumsum", "x", x.value());
  check(x.dim() >= 2, "cumsum: x is {}, want [B,T,...]", x.shape());
  const int64_t batch = x.size(0), time = x.size(1), inner = x.shape().from(2).numel();
  layout.check_covers("cumsum", batch, time, x.device());
  if (!layout.is_packed()) return run(x, {batch, time, inner}, {}, order);
  return run(x, {1, batch * time, inner}, layout, order);
}

Cost cumsum_cost(const Shape& x, DType dtype) {
  const double n = double(x.numel());
  return {2 * n * double(item_size(dtype)), n};
}

}  // namespace ebb
