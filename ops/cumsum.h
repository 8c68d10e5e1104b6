// Inclusive cumulative sums.
//   cumsum(x, -1)                          // y[...,i] = Σ_{j<=i} x[...,j]
//   cumsum(x, 1, ScanOrder::backward)      // y[:,t] = Σ_{s>=t} x[:,s]
//   cumsum(x, layout)                      // x [B,T,...] along time, afresh at each sequence
// x: f32, f64 (CPU), bf16, any strides; y has x's dtype, running sums are f32 (f64 for f64) over
// chunks of fixed length. Saves nothing; the gradient is the scan in the other direction.
#pragma once
#include "autograd/var.h"
#include "ops/cost.h"
#include "ops/seq_layout.h"

namespace ebb {

enum class ScanOrder { forward, backward };

Var cumsum(const Var& x, int dim, ScanOrder order = ScanOrder::forward);
Var cumsum(const Var& x /*[B,T,...]*/, const SeqLayout& layout,
           ScanOrder order = ScanOrder::forward);
Cost cumsum_cost(const Shape& x, DType dtype);  // either pass

// Dense x, y [outer,n,inner], scanned along n. A packed layout has outer = 1 and n flat tokens.
struct ScanShape {
  int64_t outer = 1, n = 1, inner = 1;
};
namespace cpu {
void cumsum(const Tensor& x, ScanShape s, const SeqLayout& layout, ScanOrder order,
            const Tensor& y);
}
namespace gpu {
void cumsum(const Tensor& x, ScanShape s, const SeqLayout& layout, ScanOrder order,
            const Tensor& y);
}

}  // namespace ebb
