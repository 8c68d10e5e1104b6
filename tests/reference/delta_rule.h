// The delta family token by token in f64, and its adjoint: the oracle of every chunked version.
//   S̃ = Diag(e^{g_t}) S     u = w_t∘v_t − S̃ᵀ(b_t∘k_t)     S = S̃ + k_t uᵀ     o_t = scale·Sᵀ q_t
// with the decay g [K], the erase gate b [K] and the write gate w [V] of each token written out.
// Dense f64 CPU tensors in, fresh ones out. cu: offsets of packed sequences over the flat tokens,
// empty for one sequence per batch row.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"
#include "tests/reference/state_columns.h"

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
  explicit DeltaRule(const DeltaRuleInputs& in)
      : in_(in), cu_(in.cu), decay_(Tensor::empty(in.g.shape(), DType::f64)) {
    const int64_t batch = in.q.size(0), time = in.q.size(1);
    if (cu_.empty())
      for (int64_t n = 0; n <= batch; ++n) cu_.push_back(n * time);
    h_ = in.q.size(2), hv_ = in.v.size(2), k_ = in.q.size(3), v_ = in.v.size(3);
    for (int64_t i = 0; i < in.g.numel(); ++i)
      decay_.data<double>()[i] = std::exp(in.g.data<double>()[i]);
    o = Tensor::zeros(in.v.shape(), DType::f64);
    ht = Tensor::zeros({sequences(), hv_, k_, v_}, DType::f64);
    each_part(sequences(), hv_, v_, [&](int64_t n, int64_t h, int64_t j) { forward({n, h, j}); });
  }

  // After backward(): gradients in the shapes of the inputs. dht may be undefined.
  void backward(const Tensor& d_o, const Tensor& dht) {
    dq = Tensor::zeros_like(in_.q), dk = Tensor::zeros_like(in_.k), dv = Tensor::zeros_like(in_.v);
    dg = Tensor::zeros_like(in_.g), db = Tensor::zeros_like(in_.b), dw = Tensor::zeros_like(in_.w);
    dh0 = Tensor::zeros_like(ht);
    each_part(sequences(), hv_, v_, [&](int64_t n, int64_t h, int64_t j) {
      adjoint({n, h, j}, d_o, dht);
    });
  }

  Tensor o, ht, dq, dk, dv, dg, db, dw, dh0;

 private:
  struct Part {
    int64_t n, head, column;
  };
  struct State {
    StateColumns s;
    Columns u = {};  // of the last token
  };

  int64_t sequences() const { return int64_t(cu_.size()) - 1; }
  double* key(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + (token * h_ + head / (hv_ / h_)) * k_;
  }
  double* wide(const Tensor& t, int64_t token, int64_t head, int64_t width) const {
    return t.data<double>() + (token * hv_ + head) * width;
  }
  Columns value(const Tensor& t, int64_t token, const Part& at) const {
    return load_columns(wide(t, token, at.head, v_), at.column, v_);
  }
  void put(const Tensor& t, int64_t token, const Part& at, const Columns& x) const {
    store_columns(wide(t, token, at.head, v_), at.column, v_, x);
  }
  double* matrix(const Tensor& t, const Part& at) const {
    return t.defined() ? t.data<double>() + (at.n * hv_ + at.head) * k_ * v_ : nullptr;
  }
  State start(const Part& at) const { return {load_state(matrix(in_.h0, at), k_, at.column, v_)}; }

  void step(int64_t t, const Part& at, State& state) const {
    const double *k = key(in_.k, t, at.head), *b = wide(in_.b, t, at.head, k_);
    const double* decay = wide(decay_, t, at.head, k_);
    const Columns v = value(in_.v, t, at), w = value(in_.w, t, at);
    Columns read{}, u;
    for (int64_t i = 0; i < k_; ++i) {
      Columns& x = state.s[size_t(i)];
      for (size_t j = 0; j < kColumns; ++j) x[j] *= decay[i], read[j] += x[j] * b[i] * k[i];
    }
    for (size_t j = 0; j < kColumns; ++j) u[j] = w[j] * v[j] - read[j];
    for (int64_t i = 0; i < k_; ++i)
      for (size_t j = 0; j < kColumns; ++j) state.s[size_t(i)][j] += k[i] * u[j];
    state.u = u;
  }

  void forward(const Part& at) const {
    State state = start(at);
    for (int64_t t = cu_[size_t(at.n)]; t < cu_[size_t(at.n) + 1]; ++t) {
      step(t, at, state);
      const double* q = key(in_.q, t, at.head);
      Columns out{};
      for (int64_t i = 0; i < k_; ++i)
        for (size_t j = 0; j < kColumns; ++j) out[j] += in_.scale * q[i] * state.s[size_t(i)][j];
      put(o, t, at, out);
    }
    store_state(matrix(ht, at), at.column, v_, state.s);
  }

  void adjoint(const Part& at, const Tensor& d_o, const Tensor& dht) const {
    StateColumns ds = load_state(matrix(dht, at), k_, at.column, v_);
    each_token_backwards(
        cu_[size_t(at.n)], cu_[size_t(at.n) + 1], start(at),
        [&](int64_t t, State& state) { step(t, at, state); },
        [&](int64_t t, const State& before, const State& after) {
          token_adjoint(t, at, value(d_o, t, at), before.s, after, ds);
        });
    store_state(matrix(dh0, at), at.column, v_, ds);
  }

  // ds: gradient of the state after the token in, of that before it out. y: of the token's output.
  void token_adjoint(int64_t t, const Part& at, const Columns& y, const StateColumns& before,
                     const State& after, StateColumns& ds) const {
    const double *q = key(in_.q, t, at.head), *k = key(in_.k, t, at.head);
    const double *b = wide(in_.b, t, at.head, k_), *decay = wide(decay_, t, at.head, k_);
    double *to_q = key(dq, t, at.head), *to_k = key(dk, t, at.head);
    double *to_g = wide(dg, t, at.head, k_), *to_b = wide(db, t, at.head, k_);
    Columns du{};
    for (int64_t i = 0; i < k_; ++i) {
      Columns& d = ds[size_t(i)];
      double read = 0, written = 0;
#pragma omp simd reduction(+ : read, written)
      for (size_t j = 0; j < kColumns; ++j) {
        read += after.s[size_t(i)][j] * y[j];
        d[j] += in_.scale * q[i] * y[j];
        du[j] += k[i] * d[j];
        written += d[j] * after.u[j];
      }
      to_q[i] += in_.scale * read, to_k[i] += written;
    }
    Columns v = value(in_.v, t, at), w = value(in_.w, t, at);
    for (size_t j = 0; j < kColumns; ++j) v[j] *= du[j], w[j] *= du[j];
    put(dv, t, at, w), put(dw, t, at, v);
    for (int64_t i = 0; i < k_; ++i) {
      Columns& d = ds[size_t(i)];
      double erased = 0, decayed = 0;
#pragma omp simd reduction(+ : erased, decayed)
      for (size_t j = 0; j < kColumns; ++j) {
        const double s = before[size_t(i)][j] * decay[i];
        erased -= s * du[j];
        d[j] -= b[i] * k[i] * du[j];
        decayed += d[j] * s;
        d[j] *= decay[i];
      }
      to_g[i] += decayed, to_b[i] += k[i] * erased, to_k[i] += b[i] * erased;
    }
  }

  DeltaRuleInputs in_;
  std::vector<int64_t> cu_;
  Tensor decay_;  // e^g
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
