// Toeplitz position encoding, token by token in f64, with the whole state k m^T that the op does
// not keep. Dense f64 CPU tensors.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

struct Toeplitz {
  Tensor q, k;         // [H,P]
  Tensor theta;        // [H]
  Tensor norm;         // [H*P]
  Tensor out;          // [H*P,H*P]
  double eps = 1e-5f;  // as the norm takes it
};

// What is added to x [B,T,d]; the sequences are rows [cu[n], cu[n+1]) of the B*T tokens.
inline Tensor toeplitz(const Toeplitz& p, const Tensor& x, const std::vector<int64_t>& cu) {
  const int64_t H = p.q.size(0), P = p.q.size(1), d = H * P;
  const double *q = p.q.data<double>(), *k = p.k.data<double>(), *in = x.data<double>();
  const Tensor y = Tensor::zeros(x.shape(), DType::f64);
  for (size_t n = 0; n + 1 < cu.size(); ++n) {
    std::vector<double> state(size_t(H * P * P));
    for (int64_t t = cu[n]; t < cu[n + 1]; ++t) {
      std::vector<double> read(static_cast<size_t>(d));
      for (int64_t h = 0; h < H; ++h) {
        const double lambda = 1 / (1 + std::exp(-p.theta.data<double>()[h]));
        for (int64_t i = 0; i < P; ++i)
          for (int64_t j = 0; j < P; ++j) {
            double& s = state[size_t((h * P + i) * P + j)];
            s = lambda * s + k[h * P + i] * in[t * d + h * P + j];
            read[size_t(h * P + j)] += s * q[h * P + i];
          }
      }
      double squares = 0;
      for (const double r : read) squares += r * r;
      const double rms = std::sqrt(squares / double(d) + p.eps);
      for (int64_t i = 0; i < d; ++i)
        for (int64_t j = 0; j < d; ++j)
          y.data<double>()[t * d + i] +=
              p.out.data<double>()[i * d + j] * read[size_t(j)] / rms * p.norm.data<double>()[j];
    }
  }
  return y;
}

}  // namespace ebb::testing::reference
