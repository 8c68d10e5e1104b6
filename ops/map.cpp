#include "ops/map.h"

#include <omp.h>

#include <algorithm>

#include "ops/map_formulas.h"
#include "tensor/check.h"

namespace ebb {
namespace {

constexpr int64_t kParallelItems = 1 << 15;
constexpr int64_t kTile = 512;  // elements worked on at a time: buffers stay in the L1 cache

bool is_comparison(MapOp op) { return op >= MapOp::eq; }

template <class A, class T>
A widen(T v) {
  if constexpr (std::is_same_v<T, bf16>)
    return A(float(v));
  else
    return A(v);
}

// Elements [begin, begin + n) of operand k in row-major order of the plan's sizes.
template <class A, class T>
void gather(A* to, const MapPlan& p, int k, int64_t begin, int64_t n) {
  const int64_t* stride = p.stride[k];
  const int last = p.rank - 1;
  int64_t at[kMaxDims], offset = 0, rest = begin;
  for (int d = last; d >= 0; --d) {
    at[d] = d ? rest % p.size[d] : rest;
    rest /= p.size[d];
    offset += at[d] * stride[d];
  }
  for (int64_t done = 0; done < n;) {
    const int64_t run = std::min(n - done, p.size[last] - at[last]), step = stride[last];
    const T* from = static_cast<const T*>(p.in[k]) + offset;
    if (step == 0)
      std::fill(to + done, to + done + run, widen<A>(*from));
    else
      for (int64_t j = 0; j < run; ++j) to[done + j] = widen<A>(from[j * step]);
    done += run;
    at[last] += run;
    offset += run * step;
    for (int d = last; d > 0 && at[d] == p.size[d]; --d) {
      offset += stride[d - 1] - p.size[d] * stride[d];
      at[d] = 0;
      ++at[d - 1];
    }
  }
}

// The same elements, in place where they already are dense values of type A.
template <class A>
const A* tile_of(A* buffer, const MapPlan& p, int k, int64_t begin, int64_t n) {
  if (p.in_dtype[k] == dtype_of<A>::value && p.rank == 1 && p.stride[k][0] == 1)
    return static_cast<const A*>(p.in[k]) + begin;
  visit_any(p.in_dtype[k], [&]<class T>() { gather<A, T>(buffer, p, k, begin, n); });
  return buffer;
}

template <int inputs, class A>
void run(const MapPlan& p) {
  const int64_t tiles = (p.numel + kTile - 1) / kTile;
#pragma omp parallel for if (p.numel > kParallelItems)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    A buffer[inputs][kTile], result[kTile];
    const int64_t begin = tile * kTile, n = std::min(kTile, p.numel - begin);
    const A* in[inputs];
    for (int k = 0; k < inputs; ++k) in[k] = tile_of<A>(buffer[k], p, k, begin, n);
    const bool direct = p.out_dtype == dtype_of<A>::value;
    A* out = direct ? static_cast<A*>(p.out) + begin : result;
    const auto loop = [&](auto f) {
      // Functions of fewer operands do not look at the others.
      const A *a = in[0], *b = in[inputs > 1], *c = in[inputs > 2 ? 2 : 0];
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) out[j] = f(a[j], b[j], c[j]);
    };
    if constexpr (std::is_integral_v<A>)
      visit_comparison<A>(p.f.op, loop);
    else
      visit_map<inputs, A>(p.f.op, A(p.f.p0), A(p.f.p1), loop);
    if (!direct)
      visit_any(p.out_dtype, [&]<class T>() {
        for (int64_t j = 0; j < n; ++j) static_cast<T*>(p.out)[begin + j] = T(out[j]);
      });
  }
}

template <int inputs>
void run_typed(const MapPlan& p) {
  bool wide = p.out_dtype == DType::f64, integers = true;
  for (int k = 0; k < inputs; ++k) {
    wide |= p.in_dtype[k] == DType::f64;
    integers &= !is_float(p.in_dtype[k]);
  }
  if constexpr (inputs == 2)
    if (is_comparison(p.f.op) && integers) return run<2, int64_t>(p);
  wide ? run<inputs, double>(p) : run<inputs, float>(p);
}

// Appends the dimensions of the result, dropping those of size 1 and merging neighbours that lie
// dense in every operand.
void collapse(MapPlan* p, const Shape& shape, const Tensor (&in)[kMapInputs]) {
  p->rank = 0;
  for (int d = 0; d < shape.size(); ++d) {
    if (shape[d] == 1) continue;
    bool merge = p->rank > 0;
    for (int k = 0; merge && k < p->inputs; ++k)
      merge = p->stride[k][p->rank - 1] == in[k].stride(d) * shape[d];
    const int at = merge ? p->rank - 1 : p->rank++;
    p->size[at] = (merge ? p->size[at] : 1) * shape[d];
    for (int k = 0; k < p->inputs; ++k) p->stride[k][at] = in[k].stride(d);
  }
  if (p->rank == 0) {  // a single element
    p->rank = 1;
    p->size[0] = 1;
    for (int k = 0; k < p->inputs; ++k) p->stride[k][0] = 1;
  }
}

}  // namespace

namespace cpu {

void map(const MapPlan& p) {
  if (p.inputs == 1) return run_typed<1>(p);
  if (p.inputs == 2) return run_typed<2>(p);
  run_typed<3>(p);
}

}  // namespace cpu

Tensor map(const MapFunction& f, DType out, const Tensor& a, const Tensor& b, const Tensor& c) {
  const char* op = current_op();
  Tensor in[kMapInputs] = {a, b, c};
  MapPlan p;
  p.f = f;
  p.inputs = c.defined() ? 3 : b.defined() ? 2 : 1;
  Shape shape = a.shape();
  for (int k = 1; k < p.inputs; ++k) shape = broadcast_shapes(op, shape, in[k].shape());
  for (int k = 0; k < p.inputs; ++k) {
    check(in[k].device() == a.device(), "{}: operands on {} and {}", op, a.device(),
          in[k].device());
    check(!a.on_cuda() || in[k].dtype() != DType::f64, "{}: {} is f64 on {}; want f32 or bf16", op,
          in[k].shape(), a.device());
    if (in[k].shape() != shape) in[k] = in[k].expand(shape);
    p.in[k] = in[k].raw();
    p.in_dtype[k] = in[k].dtype();
  }
  const Tensor result = Tensor::empty(shape, out, a.device());
  p.numel = result.numel();
  if (p.numel == 0) return result;
  collapse(&p, shape, in);
  p.out = result.raw();
  p.out_dtype = out;
  if constexpr (kWithCuda) {
    if (a.on_cuda()) {
      gpu::map(p, current_stream(a.device()));
      return result;
    }
  }
  cpu::map(p);
  return result;
}

}  // namespace ebb
