// Plain f64 formulas of the short convolution and the token shift, token by token: dense f64 CPU
// tensors in, fresh tensors out. cu: sequence borders over the flat tokens; empty: dense rows.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

inline std::vector<int64_t> borders(std::vector<int64_t> cu, int64_t batch, int64_t time) {
  if (cu.empty())
    for (int64_t b = 0; b <= batch; ++b) cu.push_back(b * time);
  return cu;
}

// {y [B,T,D], final state [N,D,W]}. bias, state may be undefined.
inline std::vector<Tensor> causal_conv1d(const Tensor& x, const Tensor& w, const Tensor& bias,
                                         const Tensor& state, bool silu,
                                         const std::vector<int64_t>& cu_seqlens = {}) {
  const auto cu = borders(cu_seqlens, x.size(0), x.size(1));
  const int64_t n_seq = int64_t(cu.size()) - 1, d = x.size(2), width = w.size(-1);
  const Tensor y = Tensor::zeros_like(x), last = Tensor::zeros({n_seq, d, width}, DType::f64);
  for (int64_t n = 0; n < n_seq; ++n) {
    for (int64_t c = 0; c < d; ++c) {
      // All inputs of the channel: W from before the sequence, then its own.
      std::vector<double> in;
      for (int64_t j = 0; j < width; ++j)
        in.push_back(state.defined() ? state.data<double>()[(n * d + c) * width + j] : 0);
      for (int64_t f = cu[size_t(n)]; f < cu[size_t(n) + 1]; ++f) {
        in.push_back(x.data<double>()[f * d + c]);
        double pre = bias.defined() ? bias.data<double>()[c] : 0;
        for (int64_t j = 0; j < width; ++j)
          pre += w.data<double>()[c * width + j] * in[in.size() - size_t(width) + size_t(j)];
        y.data<double>()[f * d + c] = silu ? pre / (1 + std::exp(-pre)) : pre;
      }
      for (int64_t j = 0; j < width; ++j)
        last.data<double>()[(n * d + c) * width + j] = in[in.size() - size_t(width) + size_t(j)];
    }
  }
  return {y, last};
}

// {out [M,B,T,D], last [N,D]}: out_m = x·keep + δ ⊙ mu_m with δ_t = x_{t−1} − x_t; keep = 1 for
// the mixes, 0 (with mu = 1) for δ itself.
inline std::vector<Tensor> token_shift(const Tensor& x, const Tensor& mu, const Tensor& first,
                                       double keep, const std::vector<int64_t>& cu_seqlens = {}) {
  const auto cu = borders(cu_seqlens, x.size(0), x.size(1));
  const int64_t n_seq = int64_t(cu.size()) - 1, d = x.size(2), mixes = mu.size(0);
  const Tensor out = Tensor::zeros({mixes, x.size(0), x.size(1), d}, DType::f64);
  const Tensor last = Tensor::zeros({n_seq, d}, DType::f64);
  for (int64_t n = 0; n < n_seq; ++n) {
    for (int64_t c = 0; c < d; ++c) {
      double before = first.defined() ? first.data<double>()[n * d + c] : 0;
      for (int64_t f = cu[size_t(n)]; f < cu[size_t(n) + 1]; ++f) {
        const double now = x.data<double>()[f * d + c];
        for (int64_t m = 0; m < mixes; ++m)
          out.data<double>()[m * x.numel() + f * d + c] =
              keep * now + (before - now) * mu.data<double>()[m * d + c];
        before = now;
      }
      last.data<double>()[n * d + c] = before;
    }
  }
  return {out, last};
}

// {y [B,T,D], last [N,D]}; key [I,D], value [D,I].
inline std::vector<Tensor> channel_mix(const Tensor& x, const Tensor& x_k, const Tensor& key,
                                       const Tensor& value, const Tensor& last,
                                       const std::vector<int64_t>& cu_seqlens = {}) {
  const int64_t d = x.size(2), inner = key.size(0), tokens = x.size(0) * x.size(1);
  const auto shifted = token_shift(x, x_k.view({1, d}), last, 1, cu_seqlens);
  const Tensor y = Tensor::zeros_like(x);
  for (int64_t f = 0; f < tokens; ++f)
    for (int64_t i = 0; i < inner; ++i) {
      double u = 0;
      for (int64_t c = 0; c < d; ++c)
        u += shifted[0].data<double>()[f * d + c] * key.data<double>()[i * d + c];
      if (u <= 0) continue;
      for (int64_t c = 0; c < d; ++c)
        y.data<double>()[f * d + c] += u * u * value.data<double>()[c * inner + i];
    }
  return {y, shifted[1]};
}

}  // namespace ebb::testing::reference
