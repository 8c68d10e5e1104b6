#include "ops/indexing.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "ops/common.h"

namespace ebb {

namespace cpu {
namespace {

constexpr int64_t kParallelItems = 1 << 15;

void check_range(const Tensor& index, int64_t n) {
  const int64_t* p = index.data<int64_t>();
  for (int64_t i = 0; i < index.numel(); ++i)
    if (p[i] < 0 || p[i] >= n)
      fail("{}: index {} at position {} lies outside [0,{})", current_op(), p[i], i, n);
}

}  // namespace

void index_select_fwd(const Tensor& x, const Tensor& ids, GatherShape s, const Tensor& y) {
  check_range(ids, s.n);
  const int64_t* id = ids.data<int64_t>();
  const size_t row = size_t(s.inner * item_size(x.dtype()));
  const char* from = static_cast<const char*>(x.raw());
  char* to = static_cast<char*>(y.raw());
#pragma omp parallel for if (y.numel() > kParallelItems)
  for (int64_t i = 0; i < s.outer * s.m; ++i)
    std::memcpy(to + size_t(i) * row, from + size_t(i / s.m * s.n + id[i % s.m]) * row, row);
}

void index_select_bwd(const Tensor& dy, const Tensor& ids, GatherShape s, const Tensor& dx) {
  // Positions by row, in their order: a counting sort.
  const int64_t* id = ids.data<int64_t>();
  std::vector<int64_t> begin(size_t(s.n + 1)), position(size_t(s.m));
  for (int64_t m = 0; m < s.m; ++m) ++begin[size_t(id[m] + 1)];
  for (size_t i = 0; i < size_t(s.n); ++i) begin[i + 1] += begin[i];
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (int64_t m = 0; m < s.m; ++m) position[size_t(next[size_t(id[m])]++)] = m;
  visit_float(dy.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const T* g = dy.data<T>();
    A* out = dx.data<A>();
#pragma omp parallel for if (dy.numel() > kParallelItems)
    for (int64_t i = 0; i < s.outer * s.n; ++i) {
      const int64_t o = i / s.n, r = i % s.n;
      for (int64_t k = begin[size_t(r)]; k < begin[size_t(r) + 1]; ++k) {
        const T* row = g + (o * s.m + position[size_t(k)]) * s.inner;
        for (int64_t j = 0; j < s.inner; ++j) out[i * s.inner + j] += A(row[j]);
      }
    }
  });
}

void gather_fwd(const Tensor& x, const Tensor& index, GatherShape s, const Tensor& y) {
  check_range(index, s.n);
  const int64_t* id = index.data<int64_t>();
  visit_any(x.dtype(), [&]<class T>() {
    const T* from = x.data<T>();
    T* to = y.data<T>();
#pragma omp parallel for if (y.numel() > kParallelItems)
    for (int64_t i = 0; i < s.outer * s.m * s.inner; ++i) {
      const int64_t c = i % s.inner, o = i / s.inner / s.m;
      to[i] = from[(o * s.n + id[i]) * s.inner + c];
    }
  });
}

void gather_bwd(const Tensor& dy, const Tensor& index, GatherShape s, const Tensor& dx) {
  const int64_t* id = index.data<int64_t>();
  visit_float(dy.dtype(), [&]<class T>() {
    using A = acc_t<T>;
    const T* g = dy.data<T>();
    A* out = dx.data<A>();
    // A column (o,c) of dx has one owner, which walks its indices in order.
#pragma omp parallel for if (dy.numel() > kParallelItems)
    for (int64_t column = 0; column < s.outer * s.inner; ++column) {
      const int64_t o = column / s.inner, c = column % s.inner;
      for (int64_t m = 0; m < s.m; ++m) {
        const int64_t i = (o * s.m + m) * s.inner + c;
        out[(o * s.n + id[i]) * s.inner + c] += A(g[i]);
      }
    }
  });
}

}  // namespace cpu

namespace {

// Common checks; returns dim counted from the front and splits x's shape around it.
int prepare(const char* op, const Var& x, int dim, const Tensor& index, GatherShape* s) {
  check_defined(op, "x", x.value());
  check_defined(op, "index", index);
  check(dim >= -x.dim() && dim < x.dim(), "{}: dimension {} of x {}", op, dim, x.shape());
  if (dim < 0) dim += x.dim();
  check(index.dtype() == DType::i64 || index.dtype() == DType::i32,
        "{}: index {} is {}, want i64 or i32", op, index.shape(), index.dtype());
  check_same_device(op, x.value(), {&index});
  s->outer = x.shape().first(dim).numel();
  s->n = x.size(dim);
  s->inner = x.shape().from(dim + 1).numel();
  return dim;
}

}  // namespace

Var index_select(const Var& x, int dim, const Tensor& ids) {
  const char* op = "index_select";
  const OpScope scope(op);
  GatherShape s;
  dim = prepare(op, x, dim, ids, &s);
  check(ids.dim() == 1, "{}: ids is {}, want one dimension", op, ids.shape());
  s.m = ids.numel();
  Shape shape = x.shape();
  shape[dim] = s.m;
  const Tensor from = x.value().contiguous(), id = ids.to(DType::i64).contiguous();
  const Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  if (y.numel()) {
    if (kWithCuda && y.on_cuda())
      gpu::index_select_fwd(from, id, s, y);
    else
      cpu::index_select_fwd(from, id, s, y);
  }
  return record(op, {x}, {id}, {y}, [s, shape = x.shape()](BackwardContext& ctx) {
    const Tensor dy = ctx.dy(0).contiguous();
    const Tensor dx = Tensor::zeros(shape, accumulate_type(dy.dtype()), dy.device());
    if (dy.numel()) {
      if (kWithCuda && dy.on_cuda())
        gpu::index_select_bwd(dy, ctx.saved(0), s, dx);
      else
        cpu::index_select_bwd(dy, ctx.saved(0), s, dx);
    }
    ctx.grad(0, dx);
  })[0];
}

Var gather(const Var& x, int dim, const Tensor& index) {
  const char* op = "gather";
  const OpScope scope(op);
  GatherShape s;
  dim = prepare(op, x, dim, index, &s);
  Shape want = x.shape();
  if (index.dim() == x.dim()) want[dim] = s.m = index.size(dim);
  check(index.shape() == want,
        "{}: index is {}, x is {}; want the same sizes except in dimension {}", op, index.shape(),
        x.shape(), dim);
  const Tensor from = x.value().contiguous(), id = index.to(DType::i64).contiguous();
  const Tensor y = Tensor::empty(want, x.dtype(), x.device());
  if (y.numel()) {
    if (kWithCuda && y.on_cuda())
      gpu::gather_fwd(from, id, s, y);
    else
      cpu::gather_fwd(from, id, s, y);
  }
  return record(op, {x}, {id}, {y}, [s, shape = x.shape()](BackwardContext& ctx) {
    const Tensor dy = ctx.dy(0).contiguous();
    const Tensor dx = Tensor::zeros(shape, accumulate_type(dy.dtype()), dy.device());
    if (dy.numel()) {
      if (kWithCuda && dy.on_cuda())
        gpu::gather_bwd(dy, ctx.saved(0), s, dx);
      else
        cpu::gather_bwd(dy, ctx.saved(0), s, dx);
    }
    ctx.grad(0, dx);
  })[0];
}

Cost indexing_cost(Pass pass, const Shape& x, int64_t picked, int64_t indices, DType dtype) {
  const double n = double(picked), item = double(item_size(dtype)), ids = 8 * double(indices);
  if (pass == Pass::forward) return {2 * n * item + ids, 0};
  return {n * item + double(x.numel()) * double(item_size(accumulate_type(dtype))) + ids, n};
}

}  // namespace ebb
