#include "tensor/compare.h"

#include <cmath>
#include <cstring>

#include "tensor/check.h"

namespace ebb {

double relative_error(const Tensor& x, const Tensor& ref) {
  check(x.shape() == ref.shape(), "compare: {} with {}", x.shape(), ref.shape());
  const auto a = x.to_vector<double>(), b = ref.to_vector<double>();
  double diff = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) != std::isnan(b[i])) return INFINITY;
    if ((std::isinf(a[i]) || std::isinf(b[i])) && a[i] != b[i]) return INFINITY;
    if (std::isnan(a[i]) || std::isinf(a[i])) continue;
    diff += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return size > 0 ? std::sqrt(diff / size) : std::sqrt(diff);
}

double euclidean_norm(const Tensor& x) {
  double sum = 0;
  for (const double v : x.to_vector<double>()) sum += v * v;
  return std::sqrt(sum);
}

bool all_finite(const Tensor& x) {
  if (!is_float(x.dtype()) || x.numel() == 0) return true;
  if constexpr (kWithCuda)
    if (x.on_cuda()) return gpu::all_finite(x);
  const Tensor dense = x.contiguous();
  return visit_float(x.dtype(), [&]<class T>() {
    const T* p = dense.data<T>();
    const int64_t n = dense.numel();
    bool ok = true;
#pragma omp parallel for reduction(&& : ok) if (n > 65536)
    for (int64_t i = 0; i < n; ++i) ok = ok && std::isfinite(acc_t<T>(p[i]));
    return ok;
  });
}

bool bitwise_equal(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  const Tensor x = a.cpu().contiguous(), y = b.cpu().contiguous();
  return x.numel() == 0 || std::memcmp(x.raw(), y.raw(), size_t(x.nbytes())) == 0;
}

}  // namespace ebb
