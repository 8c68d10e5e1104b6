// Diagonal plus low rank, token by token in f64: the oracle of ops/dplr.
//   S_t = Diag(e^{w_t}) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ      o_t = scale · S_tᵀ r_t
// Dense f64 CPU tensors in, fresh ones out. cu: offsets of packed sequences over the flat tokens,
// empty for one sequence per batch row.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

struct DplrInputs {
  Tensor r, w, k;  // [B,T,H,K]
  Tensor v;        // [B,T,H,V]
  Tensor a, b;     // [B,T,H,K]
  Tensor h0 = {};  // [N,H,K,V] or undefined
  double scale = 1;
  std::vector<int64_t> cu = {};
};

struct Dplr {
  explicit Dplr(const DplrInputs& in) {
    const int64_t batch = in.r.size(0), time = in.r.size(1), h = in.r.size(2);
    const int64_t kk = in.r.size(3), vv = in.v.size(3);
    std::vector<int64_t> cu = in.cu;
    if (cu.empty())
      for (int64_t n = 0; n <= batch; ++n) cu.push_back(n * time);
    const int64_t sequences = int64_t(cu.size()) - 1;
    o = Tensor::zeros(in.v.shape(), DType::f64);
    ht = in.h0.defined() ? in.h0.clone() : Tensor::zeros({sequences, h, kk, vv}, DType::f64);
    for (int64_t n = 0; n < sequences; ++n)
      for (int64_t i = 0; i < h; ++i)
        for (int64_t t = cu[size_t(n)]; t < cu[size_t(n) + 1]; ++t)
          token(in, (t * h + i) * kk, (t * h + i) * vv, kk, vv,
                ht.data<double>() + (n * h + i) * kk * vv);
  }

  Tensor o, ht;

 private:
  void token(const DplrInputs& in, int64_t key, int64_t value, int64_t kk, int64_t vv, double* s) {
    const double *r = in.r.data<double>() + key, *w = in.w.data<double>() + key;
    const double *k = in.k.data<double>() + key, *v = in.v.data<double>() + value;
    const double *a = in.a.data<double>() + key, *b = in.b.data<double>() + key;
    for (int64_t j = 0; j < vv; ++j) {
      double y = 0, read = 0;
      for (int64_t d = 0; d < kk; ++d) y += a[d] * s[d * vv + j];
      for (int64_t d = 0; d < kk; ++d) {
        double& x = s[d * vv + j];
        x = std::exp(w[d]) * x + b[d] * y + k[d] * v[j];
        read += r[d] * x;
      }
      o.data<double>()[value + j] = in.scale * read;
    }
  }
};

}  // namespace ebb::testing::reference
