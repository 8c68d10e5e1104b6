// The delta family token by token in f64, and its adjoint: the oracle of every chunked version.
//   S̃ = Diag(e^{g_t}) S     u = w_t∘v_t − S̃ᵀ(b_t∘k_t)     S = S̃ + k_t uᵀ     o_t = scale·Sᵀ q_t
// with the decay g [K], the erase gate b [K] and the write gate w [V] of each token written out.
// Dense f64 CPU tensors in, fresh ones out. cu: offsets of packed sequences over the flat tokens,
// empty for one sequence per batch row.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

struct DeltaRuleInputs {
  Tensor q, k;     // [B,T,H,K]
  Tensor v;        // [B,T,HV,V]
  Tensor g, b;     // [B,T,HV,K]
  Tensor w;        // [B,T,HV,V]
  Tensor h0 = {};  // [N,HV,K,V] or undefined
  double scale = 1;
  std::vector<int64_t> cu = {};
};

class DeltaRule {
 public:
  explicit DeltaRule(const DeltaRuleInputs& in) : in_(in), cu_(in.cu) {
    const int64_t batch = in.q.size(0), time = in.q.size(1);
    if (cu_.empty())
      for (int64_t n = 0; n <= batch; ++n) cu_.push_back(n * time);
    h_ = in.q.size(2), hv_ = in.v.size(2), k_ = in.q.size(3), v_ = in.v.size(3);
    o = Tensor::zeros(in.v.shape(), DType::f64);
    ht = Tensor::zeros({sequences(), hv_, k_, v_}, DType::f64);
    for (int64_t n = 0; n < sequences(); ++n)
      for (int64_t h = 0; h < hv_; ++h) forward(n, h);
  }

  // After backward(): gradients in the shapes of the inputs. dht may be undefined.
  void backward(const Tensor& d_o, const Tensor& dht) {
    dq = Tensor::zeros_like(in_.q), dk = Tensor::zeros_like(in_.k), dv = Tensor::zeros_like(in_.v);
    dg = Tensor::zeros_like(in_.g), db = Tensor::zeros_like(in_.b), dw = Tensor::zeros_like(in_.w);
    dh0 = Tensor::zeros_like(ht);
    for (int64_t n = 0; n < sequences(); ++n)
      for (int64_t h = 0; h < hv_; ++h) adjoint(n, h, d_o, dht);
  }

  Tensor o, ht, dq, dk, dv, dg, db, dw, dh0;

 private:
  using State = std::vector<double>;  // [K,V]
  int64_t sequences() const { return int64_t(cu_.size()) - 1; }
  double* key(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + (token * h_ + head / (hv_ / h_)) * k_;
  }
  double* wide(const Tensor& t, int64_t token, int64_t head, int64_t width) const {
    return t.data<double>() + (token * hv_ + head) * width;
  }
  double* state(const Tensor& t, int64_t n, int64_t head) const {
    return t.data<double>() + (n * hv_ + head) * k_ * v_;
  }

  State start(int64_t n, int64_t head) const {
    State s(size_t(k_ * v_), 0.0);
    if (in_.h0.defined()) s.assign(state(in_.h0, n, head), state(in_.h0, n, head) + k_ * v_);
    return s;
  }

  // Advances s by one token; decayed and u receive S̃ and u_t.
  void step(int64_t t, int64_t head, State& s, State& decayed, State& u) const {
    const double *k = key(in_.k, t, head), *v = wide(in_.v, t, head, v_);
    const double *g = wide(in_.g, t, head, k_), *b = wide(in_.b, t, head, k_);
    const double* w = wide(in_.w, t, head, v_);
    decayed = s;
    for (int64_t i = 0; i < k_; ++i)
      for (int64_t j = 0; j < v_; ++j) decayed[size_t(i * v_ + j)] *= std::exp(g[i]);
    u.assign(size_t(v_), 0);
    for (int64_t j = 0; j < v_; ++j) {
      double read = 0;
      for (int64_t i = 0; i < k_; ++i) read += decayed[size_t(i * v_ + j)] * b[i] * k[i];
      u[size_t(j)] = w[j] * v[j] - read;
    }
    for (int64_t i = 0; i < k_; ++i)
      for (int64_t j = 0; j < v_; ++j)
        s[size_t(i * v_ + j)] = decayed[size_t(i * v_ + j)] + k[i] * u[size_t(j)];
  }

  void forward(int64_t n, int64_t head) {
    State s = start(n, head), decayed, u;
    for (int64_t t = cu_[size_t(n)]; t < cu_[size_t(n) + 1]; ++t) {
      step(t, head, s, decayed, u);
      const double* q = key(in_.q, t, head);
      for (int64_t i = 0; i < k_; ++i)
        for (int64_t j = 0; j < v_; ++j)
          wide(o, t, head, v_)[j] += in_.scale * q[i] * s[size_t(i * v_ + j)];
    }
    std::copy(s.begin(), s.end(), state(ht, n, head));
  }

  void adjoint(int64_t n, int64_t head, const Tensor& d_o, const Tensor& dht) {
    const int64_t begin = cu_[size_t(n)], end = cu_[size_t(n) + 1];
    std::vector<State> before;  // the state entering each token
    State s = start(n, head), decayed, u, ds(size_t(k_ * v_), 0.0);
    for (int64_t t = begin; t < end; ++t) {
      before.push_back(s);
      step(t, head, s, decayed, u);
    }
    if (dht.defined()) ds.assign(state(dht, n, head), state(dht, n, head) + k_ * v_);
    for (int64_t t = end - 1; t >= begin; --t) {
      s = before[size_t(t - begin)];
      step(t, head, s, decayed, u);
      token_adjoint(t, head, d_o, s, decayed, u, ds);
    }
    std::copy(ds.begin(), ds.end(), state(dh0, n, head));
  }

  // s: after the token. ds: gradient of s in, of the state before the token out.
  void token_adjoint(int64_t t, int64_t head, const Tensor& d_o, const State& s,
                     const State& decayed, const State& u, State& ds) {
    const double *q = key(in_.q, t, head), *k = key(in_.k, t, head);
    const double *v = wide(in_.v, t, head, v_), *w = wide(in_.w, t, head, v_);
    const double *g = wide(in_.g, t, head, k_), *b = wide(in_.b, t, head, k_);
    const double* y = wide(d_o, t, head, v_);
    State du(size_t(v_), 0.0);
    for (int64_t i = 0; i < k_; ++i)
      for (int64_t j = 0; j < v_; ++j) {
        key(dq, t, head)[i] += in_.scale * s[size_t(i * v_ + j)] * y[j];
        ds[size_t(i * v_ + j)] += in_.scale * q[i] * y[j];
        du[size_t(j)] += k[i] * ds[size_t(i * v_ + j)];
        key(dk, t, head)[i] += ds[size_t(i * v_ + j)] * u[size_t(j)];
      }
    for (int64_t j = 0; j < v_; ++j) {
      wide(dv, t, head, v_)[j] = w[j] * du[size_t(j)];
      wide(dw, t, head, v_)[j] = v[j] * du[size_t(j)];
    }
    for (int64_t i = 0; i < k_; ++i) {
      double dbk = 0, decay = 0;
      for (int64_t j = 0; j < v_; ++j) {
        double& d = ds[size_t(i * v_ + j)];
        dbk -= decayed[size_t(i * v_ + j)] * du[size_t(j)];
        d -= b[i] * k[i] * du[size_t(j)];
        decay += d * decayed[size_t(i * v_ + j)];
        d *= std::exp(g[i]);
      }
      wide(dg, t, head, k_)[i] = decay;
      wide(db, t, head, k_)[i] = k[i] * dbk;
      key(dk, t, head)[i] += b[i] * dbk;
    }
  }

  DeltaRuleInputs in_;
  std::vector<int64_t> cu_;
  int64_t h_ = 0, hv_ = 0, k_ = 0, v_ = 0;
};

// Scalar decay and gate [B,T,HV]: g, beta repeated over the channels, their gradients summed.
class GatedDeltaRule {
 public:
  GatedDeltaRule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                 const Tensor& beta, const Tensor& h0, double scale,
                 const std::vector<int64_t>& cu = {})
      : core_({q, k, v, over(g, q.size(3)), over(beta, q.size(3)), over(beta, v.size(3)), h0, scale,
               cu}),
        o(core_.o),
        ht(core_.ht) {}
  void backward(const Tensor& d_o, const Tensor& dht) {
    core_.backward(d_o, dht);
    dq = core_.dq, dk = core_.dk, dv = core_.dv, dh0 = core_.dh0;
    dg = sum_last(core_.dg), dbeta = sum_last(core_.db);
    const Tensor write = sum_last(core_.dw);
    for (int64_t i = 0; i < dbeta.numel(); ++i) dbeta.data<double>()[i] += write.data<double>()[i];
  }

 private:
  static Tensor over(const Tensor& gate, int64_t width) {
    Shape shape = gate.shape();
    shape.push_back(width);
    return gate.unsqueeze(-1).expand(shape).contiguous();
  }
  static Tensor sum_last(const Tensor& t) {
    const int64_t width = t.shape().back();
    const Tensor out = Tensor::zeros(t.shape().first(t.dim() - 1), DType::f64);
    for (int64_t i = 0; i < t.numel(); ++i) out.data<double>()[i / width] += t.data<double>()[i];
    return out;
  }
  DeltaRule core_;

 public:
  Tensor o, ht, dq, dk, dv, dg, dbeta, dh0;
};

}  // namespace ebb::testing::reference
