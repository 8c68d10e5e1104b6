// Views and rearrangements that pass gradients; values of any dtype, any strides, any device.
//   Var heads = transpose(reshape(q, {B, T, H, K}), 1, 2);   // [B,H,T,K], no copy
//   std::vector<Var> qkv = split(x, -1, {dq, dk, dv});       // backward: one concat, or none
// Nothing is saved. Negative dimensions count from the end. Cutting one tensor into several pieces
// with split costs one pass in backward; with slice, a full gradient per piece, all added up.
#pragma once
#include <vector>

#include "autograd/var.h"
#include "ops/cost.h"

namespace ebb {

// Views where the strides allow it; reshape copies where they do not.
Var reshape(const Var& x, const Shape& shape);  // one -1 allowed
Var flatten(const Var& x, int first, int last);
Var transpose(const Var& x, int a, int b);
Var permute(const Var& x, const std::vector<int>& order);
Var unsqueeze(const Var& x, int dim);
Var squeeze(const Var& x, int dim);
Var select(const Var& x, int dim, int64_t index);  // drops the dimension
Var slice(const Var& x, int dim, int64_t begin, int64_t end, int64_t step = 1);
Var expand(const Var& x, const Shape& shape);  // backward sums the repeats, in f32 or f64
std::vector<Var> split(const Var& x, int dim, const std::vector<int64_t>& sizes);
std::vector<Var> split(const Var& x, int dim, int64_t parts);  // equal ones

// Copies.
Var contiguous(const Var& x);                        // x itself when dense
Var concat(const std::vector<Var>& parts, int dim);  // same dtype and other sizes
Var stack(const std::vector<Var>& parts, int dim);   // along a new dimension
Var pad(const Var& x, int dim, int64_t before, int64_t after, double value = 0);
Var repeat_interleave(const Var& x, int dim, int64_t n);  // each entry n times: grouped heads
Var cast(const Var& x, DType dtype);                      // gradients come back in x's dtype
Var to_device(const Var& x, Device device);               // gradients come back on x's device

// Of those that copy: `elements` read and written. Views cost nothing.
Cost movement_cost(int64_t elements, DType from, DType to);

}  // namespace ebb
