// Reductions over any set of dimensions.
//   sum(x)                            // everything -> []
//   mean(x, {0, 2}, KeepDim::yes)     // [B,T,d] -> [1,T,1]
//   logsumexp(x, -1)
// x: f32, f64 (CPU), bf16, any strides; results in x's dtype, accumulated in f32 (f64 for f64) in
// an order fixed by the shape. Of no elements: sum and norm2 are 0, mean is NaN, logsumexp −∞; max,
// min and argmax refuse. NaN propagates; argmax is the first NaN if there is one.
#pragma once
#include <initializer_list>
#include <vector>

#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

enum class KeepDim { no, yes };

// Dimensions to reduce; negative ones count from the end.
class Dims {
 public:
  Dims(int d) : list_{d} {}                               // implicit on purpose
  Dims(std::initializer_list<int> list) : list_(list) {}  // {}: reduces nothing
  explicit Dims(std::vector<int> list) : list_(std::move(list)) {}
  static Dims all();
  // Bit d is set when dimension d of a tensor of this rank is reduced. Throws, naming op.
  unsigned mask(const char* op, const Shape& shape) const;

 private:
  std::vector<int> list_;
  bool all_ = false;
};

Var sum(const Var& x, const Dims& dims = Dims::all(), KeepDim keep = KeepDim::no);
Var mean(const Var& x, const Dims& dims = Dims::all(), KeepDim keep = KeepDim::no);
// sqrt(Σ x²); its gradient at 0 is 0. Saves x and the result.
Var norm2(const Var& x, const Dims& dims = Dims::all(), KeepDim keep = KeepDim::no);
// Σ (x − mean)² / (n − correction), in two passes.
Var variance(const Var& x, const Dims& dims, int64_t correction = 1, KeepDim keep = KeepDim::no);
// The gradient goes to the first extreme element (row-major over the reduced dimensions). Saves
// its position, i64.
Var max(const Var& x, const Dims& dims = Dims::all(), KeepDim keep = KeepDim::no);
Var min(const Var& x, const Dims& dims = Dims::all(), KeepDim keep = KeepDim::no);
// log Σ exp(x), without overflow. Saves x and the result.
Var logsumexp(const Var& x, const Dims& dims = Dims::all(), KeepDim keep = KeepDim::no);
// Position of the first maximum, row-major over the reduced dimensions: i64, no gradient.
Tensor argmax(const Var& x, const Dims& dims = Dims::all(), KeepDim keep = KeepDim::no);
Tensor argmin(const Var& x, const Dims& dims = Dims::all(), KeepDim keep = KeepDim::no);

// Of a reduction of x to `results` elements.
Cost reduce_cost(Pass pass, const Shape& x, DType dtype, int64_t results);

// ---- not recorded; for backward passes ----

// Σ x·factor over the masked dimensions, kept as size 1; factor (x's shape) may be undefined.
Tensor sum_over(const Tensor& x, unsigned mask, DType out, double divisor = 1,
                const Tensor& factor = {});
// The gradient of broadcasting `shape` to x's shape: sums the repeated dimensions, in the
// accumulate type (f32 for bf16); x itself, reshaped, when nothing was repeated.
Tensor sum_to(const Tensor& x, const Shape& shape, const Tensor& factor = {});
// A result with the masked dimensions kept or dropped, repeated to x's shape. A view.
Tensor expand_reduced(const Tensor& y, const Shape& x, unsigned mask);

// Kernels see dense x [outer,n,inner] and write y [outer,inner].
struct ReduceShape {
  int64_t outer = 1, n = 1, inner = 1;
};
namespace cpu {
void sum(const Tensor& x, const Tensor& factor, ReduceShape s, double divisor, const Tensor& y);
// negate: the minimum. y or index may be undefined.
void max(const Tensor& x, ReduceShape s, bool negate, const Tensor& y, const Tensor& index);
void logsumexp(const Tensor& x, ReduceShape s, const Tensor& y);  // y in the accumulate type
}  // namespace cpu
namespace gpu {
void sum(const Tensor& x, const Tensor& factor, ReduceShape s, double divisor, const Tensor& y);
void max(const Tensor& x, ReduceShape s, bool negate, const Tensor& y, const Tensor& index);
void logsumexp(const Tensor& x, ReduceShape s, const Tensor& y);
}  // namespace gpu

}  // namespace ebb
