// State-memory attention, token by token in f64 from its definition: the oracle of the tiled
// versions. Dense f64 CPU tensors in, fresh ones out. cu: offsets of packed sequences over the flat
// tokens, empty for one sequence per batch row.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

struct StateMemoryInputs {
  Tensor q, e, c;               // [B,T,*,N], [B,T,*,P], [B,T,*,N]
  Tensor memories;              // [M,H,N,P]
  Tensor gate = {}, base = {};  // [B,T,*], [B,T,H,P] or undefined
  double eps = 1e-6, eps_row = 1e-12, scale = 1;
  bool normalize = true;
  int64_t memory_chunk = 1;
  std::vector<int64_t> cu = {};
};

class StateMemory {
 public:
  explicit StateMemory(const StateMemoryInputs& in) : in_(in) {
    const int64_t batch = in.q.size(0), time = in.q.size(1);
    h_ = in.memories.size(1), n_ = in.memories.size(2), p_ = in.memories.size(3);
    o = Tensor::zeros({batch, time, h_, p_}, DType::f64);
    r = Tensor::zeros_like(o);
    lse = Tensor::zeros({batch, time, h_}, DType::f64);
    std::vector<int64_t> cu = in.cu;
    if (cu.empty())
      for (int64_t b = 0; b <= batch; ++b) cu.push_back(b * time);
    int64_t first = 0;  // the sequence's first memory
    for (size_t s = 0; s + 1 < cu.size(); ++s) {
      for (int64_t t = cu[s]; t < cu[s + 1]; ++t)
        for (int64_t h = 0; h < h_; ++h) token(t, h, first, (t - cu[s]) / in.memory_chunk);
      first += (cu[s + 1] - cu[s] + in.memory_chunk - 1) / in.memory_chunk;
    }
  }
  Tensor o, r, lse;

 private:
  using Row = std::vector<double>;
  Row vector(const Tensor& t, int64_t token, int64_t head) const {
    const int64_t of = t.size(2), width = t.size(3);
    const double* x = t.data<double>() + (token * of + head / (h_ / of)) * width;
    return {x, x + width};
  }
  Row unit(Row x, double eps) const {
    double mean = 0;
    for (const double v : x) mean += v * v / double(x.size());
    if (in_.normalize)
      for (double& v : x) v /= std::sqrt(mean + eps);
    return x;
  }
  void token(int64_t t, int64_t h, int64_t first, int64_t visible) {
    const Row q = unit(vector(in_.q, t, h), in_.eps), e = unit(vector(in_.e, t, h), in_.eps);
    const Row c = vector(in_.c, t, h);
    Row logits;
    std::vector<Row> values;
    double largest = -INFINITY, total = 0;
    for (int64_t m = first; m < first + visible; ++m) {
      double logit = 0;
      Row value(size_t(p_), 0.0);
      for (int64_t i = 0; i < n_; ++i) {
        const double* x = in_.memories.data<double>() + ((m * h_ + h) * n_ + i) * p_;
        const Row key = unit(Row(x, x + p_), in_.eps_row);
        for (int64_t j = 0; j < p_; ++j) {
          logit += in_.scale * q[size_t(i)] * key[size_t(j)] * e[size_t(j)];
          value[size_t(j)] += c[size_t(i)] * x[j];
        }
      }
      logits.push_back(logit);
      values.push_back(value);
      largest = std::fmax(largest, logit);
    }
    for (const double l : logits) total += std::exp(l - largest);
    double* R = r.data<double>() + (t * h_ + h) * p_;
    for (size_t m = 0; m < logits.size(); ++m)
      for (int64_t j = 0; j < p_; ++j)
        R[j] += std::exp(logits[m] - largest) / total * values[m][size_t(j)];
    if (visible) lse.data<double>()[t * h_ + h] = largest + std::log(total);
    double gate = 1;
    if (in_.gate) {
      const int64_t of = in_.gate.size(2);
      gate = in_.gate.data<double>()[t * of + h / (h_ / of)];
    }
    for (int64_t j = 0; j < p_; ++j) {
      const int64_t at = (t * h_ + h) * p_ + j;
      o.data<double>()[at] = (in_.base ? in_.base.data<double>()[at] : 0) + gate * R[j];
    }
  }

  StateMemoryInputs in_;
  int64_t h_ = 0, n_ = 0, p_ = 0;
};

}  // namespace ebb::testing::reference
