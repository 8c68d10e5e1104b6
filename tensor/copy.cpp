// Copy and convert between any two layouts, dtypes and devices.
#include <algorithm>
#include <cstring>

#include "tensor/check.h"
#include "tensor/strided.h"
#include "tensor/tensor.h"

namespace ebb {
namespace {

constexpr int64_t kParallelItems = 1 << 16;
constexpr int64_t kRun = 1 << 14;  // elements one task copies at least
constexpr int64_t kTile = 32;

template <class To, class From>
To convert(From v) {
  if constexpr (std::is_same_v<To, From>)
    return v;
  else if constexpr (std::is_same_v<From, bf16>)
    return convert<To>(float(v));
  else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>)
    return float_to_int<To>(v);
  else
    return To(v);
}

template <class D, class S>
void copy_run(D* d, const S* s, int64_t n, int64_t ds, int64_t ss) {
  if (ds == 1 && ss == 1) {
    if constexpr (std::is_same_v<D, S>)
      std::memcpy(d, s, size_t(n) * sizeof(D));
    else
      for (int64_t i = 0; i < n; ++i) d[i] = convert<D>(s[i]);
  } else if (ds == 1 && ss == 0) {
    std::fill(d, d + n, convert<D>(*s));
  } else {
    for (int64_t i = 0; i < n; ++i) d[i * ds] = convert<D>(s[i * ss]);
  }
}

// Offsets of the row with this index, dimensions `first`... of the plan.
struct Row {
  Row(const StridedPlan& plan, int first, int64_t index) : p(plan), from(first) {
    for (int i = from; i < p.rank; ++i) {
      at[i] = index % p.n[i];
      index /= p.n[i];
      d += at[i] * p.ds[i];
      s += at[i] * p.ss[i];
    }
  }
  void next() {
    for (int i = from; i < p.rank; ++i) {
      d += p.ds[i];
      s += p.ss[i];
      if (++at[i] < p.n[i]) return;
      d -= p.n[i] * p.ds[i];
      s -= p.n[i] * p.ss[i];
      at[i] = 0;
    }
  }
  const StridedPlan& p;
  int from;
  int64_t at[kMaxDims] = {};
  int64_t d = 0, s = 0;
};

// The destination is dense along dimension 0, the source along y. Tiles go through a small buffer,
// so that every cache line is read and written once: rows a power of two apart would evict each
// other.
template <class D, class S>
void copy_tiles(D* dst, const S* src, const StridedPlan& p, int y) {
  StridedPlan outer;
  for (int i = 1; i < p.rank; ++i)
    if (i != y) outer.add(p.n[i], p.ds[i], p.ss[i]);
  const int64_t nx = p.n[0], ny = p.n[y], sx = p.ss[0], dy = p.ds[y];
  const int64_t strips = (ny + kTile - 1) / kTile, tasks = outer.count() * strips;
#pragma omp parallel for if (p.count() > kParallelItems)
  for (int64_t task = 0; task < tasks; ++task) {
    const Row row(outer, 0, task / strips);
    const int64_t y0 = task % strips * kTile, y1 = std::min(ny, y0 + kTile);
    D tile[kTile][kTile];
    for (int64_t x0 = 0; x0 < nx; x0 += kTile) {
      const int64_t x1 = std::min(nx, x0 + kTile);
      for (int64_t i = x0; i < x1; ++i)
        for (int64_t j = y0; j < y1; ++j)
          tile[j - y0][i - x0] = convert<D>(src[row.s + i * sx + j]);
      for (int64_t j = y0; j < y1; ++j)
        std::memcpy(dst + row.d + j * dy + x0, tile[j - y0], size_t(x1 - x0) * sizeof(D));
    }
  }
}

template <class D, class S>
void copy_loop(D* dst, const S* src, StridedPlan p) {
  if (p.rank == 0) p.add(1, 1, 1);
  if (const int y = transpose_partner(p)) return copy_tiles(dst, src, p, y);
  if (p.rank == 1 && p.n[0] > 2 * kRun) {  // cut one long run into many
    const int64_t runs = p.n[0] / kRun, done = runs * kRun, rest = p.n[0] - done;
    copy_run(dst + done * p.ds[0], src + done * p.ss[0], rest, p.ds[0], p.ss[0]);
    p.n[0] = kRun;
    p.add(runs, kRun * p.ds[0], kRun * p.ss[0]);
  }
  const int64_t inner = p.n[0], rows = p.count() / inner;
  const int64_t rows_per_task = std::max<int64_t>(1, kRun / inner);
  const int64_t tasks = (rows + rows_per_task - 1) / rows_per_task;
#pragma omp parallel for if (p.count() > kParallelItems)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t first = task * rows_per_task, last = std::min(rows, first + rows_per_task);
    Row row(p, 1, first);
    for (int64_t r = first; r < last; ++r, row.next())
      copy_run(dst + row.d, src + row.s, inner, p.ds[0], p.ss[0]);
  }
}

void copy_on_cpu(const Tensor& dst, const Tensor& src) {
  const StridedPlan p = make_plan(dst.shape(), dst.strides(), src.strides());
  visit_any(dst.dtype(), [&]<class D>() {
    visit_any(src.dtype(), [&]<class S>() { copy_loop(dst.data<D>(), src.data<S>(), p); });
  });
}

// The bytes from the first to the last element.
std::pair<const char*, const char*> extent(const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const auto* first = static_cast<const char*>(t.raw());
  return {first, first + (last + 1) * item_size(t.dtype())};
}

bool share_memory(const Tensor& a, const Tensor& b) {
  if (!a.same_storage(b)) return false;
  const auto [a0, a1] = extent(a);
  const auto [b0, b1] = extent(b);
  return a0 < b1 && b0 < a1;
}

}  // namespace

void cpu::fill(const Tensor& t, double value) {
  if (t.numel() == 0) return;
  const StridedPlan layout = make_plan(t.shape(), t.strides(), t.strides());
  StridedPlan p;
  for (int i = 0; i < layout.rank; ++i)
    if (layout.ds[i] != 0) p.add(layout.n[i], layout.ds[i], 0);
  visit_any(t.dtype(), [&]<class T>() {
    const T v = convert<T>(value);
    copy_loop(t.data<T>(), &v, p);
  });
}

void copy(const Tensor& dst, const Tensor& src) {
  check(dst.defined() && src.defined(), "{}: copy of an undefined tensor", current_op());
  check(dst.shape() == src.shape(), "copy: {} into {}", src.shape(), dst.shape());
  dst.bump_version();
  if (dst.numel() == 0) return;
  check(!dst.may_overlap_itself(),
        "copy: into {} with strides {}, whose elements overlap; make it contiguous() first",
        dst.shape(), dst.strides());
  if (share_memory(dst, src)) {
    const bool same = dst.raw() == src.raw() && dst.strides() == src.strides();
    if (same && dst.dtype() == src.dtype()) return;
    return copy(dst, src.clone());
  }
  if constexpr (kWithCuda) {
    if (dst.on_cuda() && dst.device() == src.device()) return gpu::copy_strided(dst, src);
    if (dst.on_cuda() || src.on_cuda()) {
      // Across devices bytes travel densely and in the source's type; each side does its own
      // conversion and striding.
      const Tensor from = src.contiguous();
      if (dst.is_contiguous() && dst.dtype() == src.dtype())
        return copy_bytes(dst.raw(), dst.device(), from.raw(), from.device(), size_t(dst.nbytes()));
      const Tensor landed = Tensor::empty(src.shape(), src.dtype(), dst.device());
      copy_bytes(landed.raw(), landed.device(), from.raw(), from.device(), size_t(landed.nbytes()));
      return copy(dst, landed);
    }
  }
  copy_on_cpu(dst, src);
}

}  // namespace ebb
