// Gates with parameters per channel on the CPU (decay_gate, forget_gate): a formula over the rows
// of an input, and backwards sums over the tokens of two terms per channel, in f64 and a fixed
// order.
#pragma once
#include <algorithm>
#include <vector>

#include "ops/common.h"
#include "ops/rows.h"

namespace ebb {

// A gate's parameter beside x: f32 (f64 beside f64) in every precision mode.
inline Tensor gate_parameter(const char* op, const char* what, const Tensor& t, const Tensor& x) {
  check(t.dtype() == DType::f32 || t.dtype() == DType::f64,
        "{}: {} {} is {}; gate parameters stay f32", op, what, t.shape(), t.dtype());
  return parameter_values(op, what, t, x);
}

namespace cpu {

// f<T>(), T float or double.
template <class F>
void visit_gate(DType t, F&& f) {
  t == DType::f64 ? f.template operator()<double>() : f.template operator()<float>();
}

// g = gate(x, channel), g dense.
template <class T, class Gate>
void gate_rows(const Rows& x, const Tensor& g, Gate&& gate) {
#pragma omp parallel for if (g.numel() > 4096)
  for (int64_t n = 0; n < x.count; ++n) {
    const T* in = x.t.data<T>() + n * x.stride;
    T* out = g.data<T>() + n * x.width;
    for (int64_t c = 0; c < x.width; ++c) out[c] = gate(in[c], c);
  }
}

// slopes(x, dg, channel) gives {dx, a second term}. Writes dx where it is defined and returns the
// sums over the tokens: [width] of dx, then [width] of the second term.
template <class T, class Slopes>
std::vector<double> gate_row_gradients(const Rows& x, const Tensor& dg, const Tensor& dx,
                                       Slopes&& slopes) {
  constexpr int64_t kRows = 512;  // tokens of a partial sum
  const int64_t width = x.width, blocks = (x.count + kRows - 1) / kRows;
  std::vector<double> partial(size_t(blocks * 2 * width)), sum(size_t(2 * width));
#pragma omp parallel for if (dg.numel() > 4096)
  for (int64_t b = 0; b < blocks; ++b) {
    double *first = partial.data() + b * 2 * width, *second = first + width;
    for (int64_t n = b * kRows; n < std::min(x.count, (b + 1) * kRows); ++n) {
      const T *in = x.t.data<T>() + n * x.stride, *g = dg.data<T>() + n * width;
      for (int64_t c = 0; c < width; ++c) {
        const auto [d, other] = slopes(in[c], g[c], c);
        if (dx) dx.data<T>()[n * width + c] = d;
        first[c] += double(d);
        second[c] += double(other);
      }
    }
  }
  for (int64_t b = 0; b < blocks; ++b)
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += partial[size_t(b) * sum.size() + i];
  return sum;
}

}  // namespace cpu
}  // namespace ebb
