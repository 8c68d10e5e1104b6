// What the normalisations share: operands of any strides as rows, row sums and ordered column sums
// on the CPU.
#pragma once
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <vector>

#include "ops/common.h"
#include "ops/rows.h"

namespace ebb {

// How operands [...,D] become [tokens, groups, width], width = D/slices dense values that are
// normalised together. A slice of a wider projection [B,T,H,V], whose heads are dense but whose
// tokens lie further apart, is read in place with H·slices groups (inner = 2).
struct RowForm {
  int inner = 1;
  int64_t slices = 1;
};

inline RowForm row_form(std::initializer_list<const Tensor*> operands, int64_t slices) {
  const auto in_place = [&](int inner) {
    return std::all_of(operands.begin(), operands.end(), [&](const Tensor* t) {
      Rows r;
      return !t->defined() || (t->dim() >= inner && rows_in_place(*t, inner, &r));
    });
  };
  return {!in_place(1) && in_place(2) ? 2 : 1, slices};
}

// The view [tokens, groups, width]; of a copy where the strides do not allow a view. An undefined
// tensor stays undefined.
inline Tensor to_rows(const Tensor& t, RowForm form) {
  if (!t.defined()) return {};
  const Rows r = as_rows(t, form.inner);
  const int64_t width = t.shape().back() / form.slices, groups = width ? r.width / width : 0;
  return Tensor::wrap(r.t.storage(), t.dtype(), {r.count, groups, width}, {r.stride, width, 1},
                      r.t.offset());
}

// One f32 (f64 for f64) value per row: [tokens, groups].
inline Tensor row_statistics(const Tensor& rows) {
  return Tensor::empty({rows.size(0), rows.size(1)}, accumulate_type(rows.dtype()), rows.device());
}

namespace cpu {

inline constexpr int64_t kParallelValues = 16384;  // below, threads cost more than they gain

// f.operator()<T>() with T = float or double.
template <class F>
void visit_cpu(DType t, F&& f) {
  if (t == DType::f32)
    f.template operator()<float>();
  else
    f.template operator()<double>();
}

template <class T>
T* data_or_null(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

// Weights or, where they are absent, as many constants. Loops then need no null pointer: GCC would
// vectorise the question as masked loads from address 0, at hundreds of cycles each.
inline Tensor or_constant(const Tensor& w, int64_t columns, double value, DType t) {
  return w.defined() ? w : Tensor::full({columns}, value, t);
}

// Row i of [tokens, groups, width]; null for an undefined tensor.
template <class T>
struct RowsAt {
  T* p = nullptr;
  int64_t stride = 0, groups = 1, width = 0;

  explicit RowsAt(const Tensor& t) {
    if (t.defined()) p = t.data<T>(), stride = t.stride(0), groups = t.size(1), width = t.size(2);
  }
  explicit operator bool() const { return p != nullptr; }
  T* operator()(int64_t i) const {
    return p ? p + i / groups * stride + i % groups * width : nullptr;
  }
};

// Σ_j f(j) in f64: the sums of f32 rows of any length stay exact to f32.
template <class F>
double row_sum(int64_t d, F f) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < d; ++j) sum += double(f(j));
  return sum;
}

// 1/sqrt(m + eps) of a mean (or sum) of squares. An overflow must not pass for a row of zeros.
inline double rstd_of(double m, double eps) {
  return std::isinf(m) ? std::numeric_limits<double>::quiet_NaN() : 1 / std::sqrt(m + eps);
}

// Calls body(i, sums) for every row i < n. sums [columns] collects column sums (null if columns =
// 0); rows are cut into at most 64 blocks whatever the number of threads, each with its own sums,
// and those are added in order. Returns Σ [columns].
template <class A, class Body>
std::vector<A> for_rows_summing(int64_t n, int64_t columns, int64_t values, Body body) {
  const int64_t blocks = std::min<int64_t>(n, 64), rows = blocks ? (n + blocks - 1) / blocks : 0;
  std::vector<A> partial(size_t(blocks * columns)), total(static_cast<size_t>(columns));
#pragma omp parallel for if (values > kParallelValues)
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t i = b * rows; i < std::min(n, (b + 1) * rows); ++i)
      body(i, columns ? partial.data() + b * columns : nullptr);
#pragma omp parallel for if (blocks * columns > kParallelValues)
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t b = 0; b < blocks; ++b) total[size_t(j)] += partial[size_t(b * columns + j)];
  return total;
}

}  // namespace cpu
}  // namespace ebb
