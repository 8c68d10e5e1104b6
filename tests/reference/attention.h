// Causal softmax attention and rotary embedding, pair by pair in f64, and their adjoints: the
// oracle of every tiled version. Dense f64 CPU tensors in, fresh ones out.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

struct AttentionInputs {
  Tensor q;     // [B,Tq,H,P]
  Tensor k, v;  // [B,Tk,Hkv,P]
  double scale = 1;
  int64_t window = 0;                       // 0: none
  std::vector<int64_t> cu = {}, keys = {};  // offsets of packed sequences; empty: rows of the batch
};

class CausalAttention {
 public:
  explicit CausalAttention(const AttentionInputs& in) : in_(in), cu_(in.cu), keys_(in.keys) {
    const int64_t batch = in.q.size(0);
    if (keys_.empty()) keys_ = cu_;
    if (cu_.empty())
      for (int64_t n = 0; n <= batch; ++n)
        cu_.push_back(n * in.q.size(1)), keys_.push_back(n * in.k.size(1));
    heads_ = in.q.size(2), key_heads_ = in.k.size(2), width_ = in.q.size(3);
    o = Tensor::zeros(in.q.shape(), DType::f64);
    lse = Tensor::zeros(in.q.shape().first(3), DType::f64);
    each_query([&](int64_t t, int64_t h, int64_t first, int64_t last) {
      const auto a = weights(t, h, first, last);
      for (int64_t j = first; j <= last; ++j)
        for (int64_t c = 0; c < width_; ++c)
          query(o, t, h)[c] += a[size_t(j - first)] * key(in_.v, j, h)[c];
    });
  }
  void backward(const Tensor& d_o) {
    dq = Tensor::zeros_like(in_.q), dk = Tensor::zeros_like(in_.k), dv = Tensor::zeros_like(in_.v);
    each_query([&](int64_t t, int64_t h, int64_t first, int64_t last) {
      const auto a = weights(t, h, first, last);
      const double* y = query(d_o, t, h);
      double mean = 0;
      for (int64_t c = 0; c < width_; ++c) mean += y[c] * query(o, t, h)[c];
      for (int64_t j = first; j <= last; ++j) {
        double da = 0;
        for (int64_t c = 0; c < width_; ++c) da += y[c] * key(in_.v, j, h)[c];
        const double ds = in_.scale * a[size_t(j - first)] * (da - mean);
        for (int64_t c = 0; c < width_; ++c) {
          query(dq, t, h)[c] += ds * key(in_.k, j, h)[c];
          key(dk, j, h)[c] += ds * query(in_.q, t, h)[c];
          key(dv, j, h)[c] += a[size_t(j - first)] * y[c];
        }
      }
    });
  }
  Tensor o, lse, dq, dk, dv;

 private:
  double* query(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + (token * heads_ + head) * width_;
  }
  double* key(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + (token * key_heads_ + head / (heads_ / key_heads_)) * width_;
  }
  // f(query token, head, first and last key token) in flat tokens.
  template <class F>
  void each_query(F&& f) const {
    for (size_t n = 0; n + 1 < cu_.size(); ++n)
      for (int64_t t = cu_[n]; t < cu_[n + 1]; ++t) {
        const int64_t last = keys_[n + 1] - (cu_[n + 1] - t);
        const int64_t first = in_.window ? std::max(keys_[n], last - in_.window + 1) : keys_[n];
        for (int64_t h = 0; h < heads_; ++h) f(t, h, first, last);
      }
  }
  std::vector<double> weights(int64_t t, int64_t h, int64_t first, int64_t last) const {
    std::vector<double> a;
    double top = -INFINITY, total = 0;
    for (int64_t j = first; j <= last; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < width_; ++c) dot += query(in_.q, t, h)[c] * key(in_.k, j, h)[c];
      a.push_back(in_.scale * dot);
      top = std::max(top, a.back());
    }
    for (double& x : a) total += x = std::exp(x - top);
    for (double& x : a) x /= total;
    lse.data<double>()[t * heads_ + h] = top + std::log(total);
    return a;
  }

  AttentionInputs in_;
  std::vector<int64_t> cu_, keys_;
  int64_t heads_ = 0, key_heads_ = 0, width_ = 0;
};

// y of x [B,T,H,P] at positions start[n] + offset + 0, 1, ...; `cosine`: [B,T,H,2P].
inline Tensor rotary(const Tensor& x, double base, int64_t offset, bool cosine,
                     const std::vector<int64_t>& start, std::vector<int64_t> cu) {
  const int64_t B = x.size(0), T = x.size(1), H = x.size(2), P = x.size(3);
  if (cu.empty())
    for (int64_t n = 0; n <= B; ++n) cu.push_back(n * T);
  const Tensor y = Tensor::empty({B, T, H, cosine ? 2 * P : P}, DType::f64);
  const double* in = x.data<double>();
  double* out = y.data<double>();
  for (size_t n = 0; n + 1 < cu.size(); ++n)
    for (int64_t t = cu[n]; t < cu[n + 1]; ++t)
      for (int64_t h = 0; h < H; ++h)
        for (int64_t j = 0; j < P; ++j) {
          const int64_t pair = j < P / 2 ? j : j - P / 2, at = (t * H + h) * P;
          const double position = double(t - cu[n] + offset + (start.empty() ? 0 : start[n]));
          const double angle = position * std::pow(base, -2.0 * double(pair) / double(P));
          const double c = std::cos(angle), s = std::sin(angle);
          if (cosine) {
            out[2 * at + j] = in[at + j] * (j < P / 2 ? c : 1);
            out[2 * at + P + j] = in[at + j] * (j < P / 2 ? s : 0);
          } else {
            out[at + j] = j < P / 2 ? in[at + j] * c - in[at + j + P / 2] * s
                                    : in[at + j] * c + in[at + j - P / 2] * s;
          }
        }
  return y;
}

}  // namespace ebb::testing::reference
