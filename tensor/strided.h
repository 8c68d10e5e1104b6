// Element-wise traversal of two strided tensors, for copies on both devices: which dimensions
// remain after reordering and merging.
#pragma once
#include <cstdint>

#include "tensor/shape.h"

namespace ebb {

// Dimensions innermost first, in the order of the destination's memory; size-1 dimensions are
// gone and neighbours that are dense in both tensors are merged. Strides in elements.
struct StridedPlan {
  int rank = 0;
  int64_t n[kMaxDims] = {};
  int64_t ds[kMaxDims] = {};  // of the destination
  int64_t ss[kMaxDims] = {};  // of the source

  int64_t count() const {
    int64_t c = 1;
    for (int i = 0; i < rank; ++i) c *= n[i];
    return c;
  }
  void add(int64_t size, int64_t d_stride, int64_t s_stride) {
    n[rank] = size;
    ds[rank] = d_stride;
    ss[rank++] = s_stride;
  }
  bool inner_dense() const { return rank == 0 || (ds[0] == 1 && ss[0] == 1); }
  bool dense() const { return rank <= 1 && inner_dense(); }
};

inline StridedPlan make_plan(const Shape& shape, const Shape& ds, const Shape& ss) {
  int order[kMaxDims], kept = 0;
  for (int i = shape.size() - 1; i >= 0; --i) {
    if (shape[i] == 1) continue;
    int at = kept++;  // insertion sort by the destination's stride
    for (; at > 0 && ds[order[at - 1]] > ds[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  StridedPlan p;
  for (int k = 0; k < kept; ++k) {
    const int i = order[k], last = p.rank - 1;
    if (last >= 0 && ds[i] == p.ds[last] * p.n[last] && ss[i] == p.ss[last] * p.n[last])
      p.n[last] *= shape[i];
    else
      p.add(shape[i], ds[i], ss[i]);
  }
  return p;
}

// The dimension along which the source is dense, where the destination is dense along another
// and tiles pay; 0 when there is none.
inline int transpose_partner(const StridedPlan& p) {
  if (p.rank < 2 || p.ds[0] != 1 || p.ss[0] == 1 || p.n[0] < 8) return 0;
  for (int i = 1; i < p.rank; ++i)
    if (p.ss[i] == 1 && p.n[i] >= 8) return i;
  return 0;
}

}  // namespace ebb
