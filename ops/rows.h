// A tensor read in place as rows of dense elements, `stride` elements apart: how operators that
// work channel by channel take a slice of a wider projection without copying it.
//   Rows x = as_rows(t);          // [...,d] -> count rows of d elements
//   Rows a = as_rows(t, 2);       // [...,H,K] -> count rows of H·K elements
// Anything that cannot be seen that way (a transposed view, a broadcast last dimension) is copied.
#pragma once
#include "tensor/tensor.h"

namespace ebb {

struct Rows {
  Tensor t = {};       // the tensor the rows lie in: keeps them alive
  int64_t count = 0;   // rows
  int64_t width = 0;   // elements of a row, dense
  int64_t stride = 0;  // elements between the starts of neighbouring rows; 0 for repeated rows
};

// The last `inner` dimensions form the row. False, and r->t is not to be read so, when the tensor
// would have to be copied.
inline bool rows_in_place(const Tensor& t, int inner, Rows* r) {
  const int split = t.dim() - inner;
  *r = {t, 1, 1, 0};
  for (int d = 0; d < t.dim(); ++d) (d < split ? r->count : r->width) *= t.size(d);
  int64_t dense = 1;
  bool in_place = true;
  for (int d = t.dim() - 1; d >= split; --d) {
    in_place = in_place && (t.size(d) == 1 || t.stride(d) == dense);
    dense *= t.size(d);
  }
  // Dimensions of size 1 have no say: their strides may hold anything.
  int64_t next = -1;  // stride the next outer dimension must have to continue the rows
  for (int d = split - 1; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (next < 0)
      r->stride = t.stride(d);
    else
      in_place = in_place && t.stride(d) == next;
    next = t.stride(d) * t.size(d);
  }
  return in_place || r->count * r->width == 0;
}

inline Rows as_rows(const Tensor& t, int inner = 1) {
  Rows r;
  if (rows_in_place(t, inner, &r)) return r;
  r.t = t.contiguous();
  r.stride = r.width;
  return r;
}

// True when every row starts on a multiple of `elements` elements, as wide loads need.
inline bool rows_aligned(const Rows& r, int64_t elements) {
  const auto address = reinterpret_cast<uintptr_t>(r.t.raw());
  return r.width % elements == 0 && (r.count <= 1 || r.stride % elements == 0) &&
         address % uintptr_t(elements * item_size(r.t.dtype())) == 0;
}

}  // namespace ebb
