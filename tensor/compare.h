// How far two tensors are apart, for checks: synchronises, and but for all_finite works on the
// host.
#pragma once
#include "tensor/tensor.h"

namespace ebb {

// ‖x − ref‖ / ‖ref‖ over the whole tensor, in f64; ‖x‖ where ref is all zero. NaN or infinity in
// one and not in the other gives infinity. Throws when shapes differ.
double relative_error(const Tensor& x, const Tensor& ref);
double euclidean_norm(const Tensor& x);  // Euclidean, in f64
bool all_finite(const Tensor& x);        // on its own device; true for integers
// Same shape, dtype and bytes; two undefined tensors are equal.
bool bitwise_equal(const Tensor& a, const Tensor& b);

}  // namespace ebb
