// Shared argument checks of operators. Every message opens with the operator's name.
#pragma once
#include <initializer_list>

#include "autograd/node.h"
#include "autograd/tape.h"
#include "tensor/check.h"
#include "tensor/tensor.h"

namespace ebb {

// CPU kernels run f32 and f64, CUDA kernels f32 and bf16.
inline void check_compute_dtype(const char* op, const char* what, const Tensor& t) {
  const DType other = t.on_cuda() ? DType::bf16 : DType::f64;
  check(t.dtype() == DType::f32 || t.dtype() == other,
        "{}: {} {} is {} on {}; want f32 or {} there", op, what, t.shape(), t.dtype(), t.device(),
        other);
}

// Elementwise operators, movements and reductions also take bf16 on the CPU (computed in f32).
inline void check_float(const char* op, const char* what, const Tensor& t) {
  check(t.defined(), "{}: {} is undefined", op, what);
  check(is_float(t.dtype()), "{}: {} {} is {}, want a float type", op, what, t.shape(), t.dtype());
  check(!t.on_cuda() || t.dtype() != DType::f64, "{}: {} {} is f64 on {}; want f32 or bf16 there",
        op, what, t.shape(), t.device());
}

inline void check_defined(const char* op, const char* what, const Tensor& t) {
  check(t.defined(), "{}: {} is undefined", op, what);
}

inline void check_shape(const char* op, const char* what, const Tensor& t, const Shape& want) {
  check_defined(op, what, t);
  check(t.shape() == want, "{}: {} is {}, want {}", op, what, t.shape(), want);
}

inline void check_same_device(const char* op, const Tensor& x,
                              std::initializer_list<const Tensor*> others) {
  for (const Tensor* t : others)
    if (t->defined() && t->device() != x.device())
      fail("{}: inputs {} on {} and {} on {}", op, x.shape(), x.device(), t->shape(), t->device());
}

// A small per-channel parameter next to activations x: f32 beside bf16 or f32, f64 beside f64;
// bf16 ones are widened. Dense.
inline Tensor parameter_values(const char* op, const char* what, const Tensor& t, const Tensor& x) {
  check(is_float(t.dtype()), "{}: {} {} is {}, want a float type", op, what, t.shape(), t.dtype());
  return t.to(accumulate_type(x.dtype())).contiguous();
}

}  // namespace ebb
