// Copy and convert between any two layouts, dtypes and devices.
#include <omp.h>

#include <cstring>

#include "tensor/check.h"
#include "tensor/tensor.h"

namespace ebb {
namespace {

constexpr int64_t kParallelItems = 1 << 16;

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

// Drops size-1 dimensions and merges neighbours that are dense in both tensors.
void simplify(Shape* shape, Shape* a, Shape* b) {
  Shape s, sa, sb;
  for (int i = 0; i < shape->size(); ++i) {
    const int64_t n = (*shape)[i];
    if (n == 1) continue;
    const int k = s.size() - 1;
    if (k >= 0 && sa[k] == (*a)[i] * n && sb[k] == (*b)[i] * n) {
      s[k] *= n;
      sa[k] = (*a)[i];
      sb[k] = (*b)[i];
    } else {
      s.push_back(n);
      sa.push_back((*a)[i]);
      sb.push_back((*b)[i]);
    }
  }
  *shape = s, *a = sa, *b = sb;
}

template <class D, class S>
void copy_loop(D* dst, const S* src, Shape shape, Shape ds, Shape ss) {
  simplify(&shape, &ds, &ss);
  if (shape.empty()) {
    *dst = convert<D>(*src);
    return;
  }
  const int64_t inner = shape.back(), di = ds.back(), si = ss.back();
  const int rank = shape.size() - 1;
  const int64_t outer = shape.numel() / inner;
#pragma omp parallel for if (outer * inner > kParallelItems && outer > 1)
  for (int64_t row = 0; row < outer; ++row) {
    D* d = dst;
    const S* s = src;
    int64_t rest = row;
    for (int i = rank - 1; i >= 0; --i) {
      const int64_t at = rest % shape[i];
      rest /= shape[i];
      d += at * ds[i];
      s += at * ss[i];
    }
    for (int64_t j = 0; j < inner; ++j) d[j * di] = convert<D>(s[j * si]);
  }
}

void copy_on_cpu(const Tensor& dst, const Tensor& src) {
  if (dst.dtype() == src.dtype() && dst.is_contiguous() && src.is_contiguous()) {
    std::memmove(dst.raw(), src.raw(), size_t(dst.nbytes()));
    return;
  }
  visit_any(dst.dtype(), [&]<class D>() {
    visit_any(src.dtype(), [&]<class S>() {
      copy_loop<D, S>(dst.data<D>(), src.data<S>(), dst.shape(), dst.strides(), src.strides());
    });
  });
}

}  // namespace

void copy(const Tensor& dst, const Tensor& src) {
  check(dst.shape() == src.shape(), "copy: {} into {}", src.shape(), dst.shape());
  if (dst.numel() == 0) return;
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
