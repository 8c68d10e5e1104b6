// Plain f64 matrix products: dense f64 CPU tensors in, a fresh tensor out.
#pragma once
#include "tensor/tensor.h"

namespace ebb::testing::reference {

// a [...,m,k], b [...,k,n], leading dimensions broadcast.
inline Tensor matmul(const Tensor& a, const Tensor& b) {
  const int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  Shape batch =
      broadcast_shapes("reference", a.shape().first(a.dim() - 2), b.shape().first(b.dim() - 2));
  const int lead = batch.size();
  Shape a_shape = batch, b_shape = batch, c_shape = batch;
  for (const int64_t d : {m, k}) a_shape.push_back(d);
  for (const int64_t d : {k, n}) b_shape.push_back(d);
  for (const int64_t d : {m, n}) c_shape.push_back(d);
  const Tensor left = a.expand(a_shape).contiguous(), right = b.expand(b_shape).contiguous();
  const Tensor c = Tensor::zeros(c_shape, DType::f64);
  const int64_t products = lead ? batch.numel() : 1;
  for (int64_t g = 0; g < products; ++g)
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t q = 0; q < k; ++q)
          sum +=
              left.data<double>()[(g * m + i) * k + q] * right.data<double>()[(g * k + q) * n + j];
        c.data<double>()[(g * m + i) * n + j] = sum;
      }
  return c;
}

// x [...,in], w [out,in], bias [out] or undefined.
inline Tensor linear(const Tensor& x, const Tensor& w, const Tensor& bias) {
  const int64_t in = w.size(1), out = w.size(0);
  Shape shape = x.shape().first(x.dim() - 1);
  const int64_t rows = shape.numel();
  shape.push_back(out);
  const Tensor y = Tensor::zeros(shape, DType::f64);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t o = 0; o < out; ++o) {
      double sum = bias ? bias.data<double>()[o] : 0;
      for (int64_t q = 0; q < in; ++q)
        sum += x.data<double>()[i * in + q] * w.data<double>()[o * in + q];
      y.data<double>()[i * out + o] = sum;
    }
  return y;
}

}  // namespace ebb::testing::reference
