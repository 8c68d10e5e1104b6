// Gated linear attention, token by token in f64, and its adjoint: the oracle of every chunked
// version. g is one log decay per head or one per key channel.
//   S_t = e^{g_t} S_{t−1} + w_t k_t v_tᵀ     o_t = scale·S_tᵀ q_t + skip·v_t
// and the same recurrence started from zero every `memory` tokens, whose last state is a
// contribution. Dense f64 CPU tensors in, fresh ones out. cu: offsets of packed sequences over the
// flat tokens, empty for one sequence per batch row.
#pragma once
#include <cmath>
#include <vector>

#include "tensor/tensor.h"

namespace ebb::testing::reference {

struct LinearAttentionInputs {
  Tensor q, k;       // [B,T,G,K]
  Tensor v;          // [B,T,H,V]
  Tensor g;          // [B,T,H] or [B,T,H,K]
  Tensor h0 = {};    // [N,H,K,V] or undefined
  Tensor w = {};     // [B,T,H] or undefined: 1
  Tensor skip = {};  // [H] or undefined: 0
  double scale = 1;
  std::vector<int64_t> cu = {};
  int64_t memory = 0;
};

class LinearAttention {
 public:
  explicit LinearAttention(const LinearAttentionInputs& in) : in_(in), cu_(in.cu) {
    const int64_t batch = in.q.size(0), time = in.q.size(1);
    if (cu_.empty())
      for (int64_t n = 0; n <= batch; ++n) cu_.push_back(n * time);
    groups_ = in.q.size(2), h_ = in.v.size(2), k_ = in.q.size(3), v_ = in.v.size(3);
    by_channel_ = in.g.dim() == 4;
    first_run_.push_back(0);
    for (size_t n = 0; n + 1 < cu_.size(); ++n)
      first_run_.push_back(first_run_.back() +
                           (in.memory ? (cu_[n + 1] - cu_[n] + in.memory - 1) / in.memory : 0));
    o = Tensor::zeros(in.v.shape(), DType::f64);
    ht = Tensor::zeros({sequences(), h_, k_, v_}, DType::f64);
    contributions = Tensor::zeros({first_run_.back(), h_, k_, v_}, DType::f64);
    for (int64_t n = 0; n < sequences(); ++n)
      for (int64_t h = 0; h < h_; ++h) forward(n, h);
  }

  // After backward(): gradients in the shapes of the inputs. dht, dcontributions may be undefined.
  void backward(const Tensor& d_o, const Tensor& dht, const Tensor& dcontributions) {
    dq = Tensor::zeros_like(in_.q), dk = Tensor::zeros_like(in_.k), dv = Tensor::zeros_like(in_.v);
    dg = Tensor::zeros_like(in_.g), dw = Tensor::zeros(in_.v.shape().first(3), DType::f64);
    dskip = Tensor::zeros({h_}, DType::f64), dh0 = Tensor::zeros_like(ht);
    for (int64_t n = 0; n < sequences(); ++n)
      for (int64_t h = 0; h < h_; ++h) adjoint(n, h, d_o, dht, dcontributions);
  }

  Tensor o, ht, contributions, dq, dk, dv, dg, dw, dskip, dh0;

 private:
  using State = std::vector<double>;  // [K,V]
  int64_t sequences() const { return int64_t(cu_.size()) - 1; }
  double* key(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + (token * groups_ + head / (h_ / groups_)) * k_;
  }
  double* value(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + (token * h_ + head) * v_;
  }
  double* gate(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + token * h_ + head;
  }
  double* decay(const Tensor& t, int64_t token, int64_t head, int64_t channel) const {
    const int64_t row = token * h_ + head;
    return t.data<double>() + (by_channel_ ? row * k_ + channel : row);
  }
  double* state(const Tensor& t, int64_t row, int64_t head) const {
    return t.data<double>() + (row * h_ + head) * k_ * v_;
  }
  double weight(int64_t t, int64_t head) const { return in_.w ? *gate(in_.w, t, head) : 1; }
  double skip(int64_t head) const { return in_.skip ? in_.skip.data<double>()[head] : 0; }
  size_t at(int64_t i, int64_t j) const { return size_t(i * v_ + j); }

  State zero() const { return State(size_t(k_ * v_), 0.0); }
  State start(int64_t n, int64_t head) const {
    State s = zero();
    if (in_.h0) s.assign(state(in_.h0, n, head), state(in_.h0, n, head) + k_ * v_);
    return s;
  }
  void advance(int64_t t, int64_t head, State& s) const {
    const double *k = key(in_.k, t, head), *v = value(in_.v, t, head);
    const double w = weight(t, head);
    for (int64_t i = 0; i < k_; ++i) {
      const double alpha = std::exp(*decay(in_.g, t, head, i));
      for (int64_t j = 0; j < v_; ++j) s[at(i, j)] = alpha * s[at(i, j)] + w * k[i] * v[j];
    }
  }
  bool opens(int64_t n, int64_t t) const {
    return in_.memory && (t - cu_[size_t(n)]) % in_.memory == 0;
  }
  bool ends(int64_t n, int64_t t) const {
    return in_.memory && (t + 1 == cu_[size_t(n) + 1] || opens(n, t + 1));
  }
  int64_t run(int64_t n, int64_t t) const {
    return first_run_[size_t(n)] + (t - cu_[size_t(n)]) / in_.memory;
  }

  void forward(int64_t n, int64_t head) {
    State s = start(n, head), m = zero();
    for (int64_t t = cu_[size_t(n)]; t < cu_[size_t(n) + 1]; ++t) {
      advance(t, head, s);
      if (opens(n, t)) m = zero();
      advance(t, head, m);
      if (ends(n, t)) std::copy(m.begin(), m.end(), state(contributions, run(n, t), head));
      const double *q = key(in_.q, t, head), *v = value(in_.v, t, head);
      for (int64_t j = 0; j < v_; ++j) {
        double read = 0;
        for (int64_t i = 0; i < k_; ++i) read += q[i] * s[at(i, j)];
        value(o, t, head)[j] = in_.scale * read + skip(head) * v[j];
      }
    }
    std::copy(s.begin(), s.end(), state(ht, n, head));
  }

  void adjoint(int64_t n, int64_t head, const Tensor& d_o, const Tensor& dht,
               const Tensor& dcontributions) {
    const int64_t begin = cu_[size_t(n)], end = cu_[size_t(n) + 1];
    std::vector<State> after, memory_before;  // the state after, the run's before each token
    State s = start(n, head), first = s, m = zero(), ds = zero(), dm = zero();
    for (int64_t t = begin; t < end; ++t) {
      if (opens(n, t)) m = zero();
      memory_before.push_back(m);
      advance(t, head, m);
      advance(t, head, s);
      after.push_back(s);
    }
    if (dht) ds.assign(state(dht, n, head), state(dht, n, head) + k_ * v_);
    for (int64_t t = end - 1; t >= begin; --t) {
      const State& before = t > begin ? after[size_t(t - begin - 1)] : first;
      if (ends(n, t) && dcontributions) {
        const double* d = state(dcontributions, run(n, t), head);
        dm.assign(d, d + k_ * v_);
      }
      token_adjoint(t, head, d_o, after[size_t(t - begin)], before,
                    memory_before[size_t(t - begin)], ds, dm);
    }
    std::copy(ds.begin(), ds.end(), state(dh0, n, head));
  }

  // ds, dm: gradients of the states after the token in, of those before it out.
  void token_adjoint(int64_t t, int64_t head, const Tensor& d_o, const State& after,
                     const State& before, const State& memory_before, State& ds, State& dm) {
    const double *q = key(in_.q, t, head), *k = key(in_.k, t, head), *v = value(in_.v, t, head);
    const double* y = value(d_o, t, head);
    const double w = weight(t, head);
    for (int64_t j = 0; j < v_; ++j) {
      value(dv, t, head)[j] += skip(head) * y[j];
      dskip.data<double>()[head] += v[j] * y[j];
    }
    for (int64_t i = 0; i < k_; ++i) {
      const double alpha = std::exp(*decay(in_.g, t, head, i));
      for (int64_t j = 0; j < v_; ++j) {
        double &d = ds[at(i, j)], &e = dm[at(i, j)];
        key(dq, t, head)[i] += in_.scale * after[at(i, j)] * y[j];
        d += in_.scale * q[i] * y[j];
        key(dk, t, head)[i] += w * v[j] * (d + e);
        value(dv, t, head)[j] += w * k[i] * (d + e);
        *gate(dw, t, head) += k[i] * v[j] * (d + e);
        *decay(dg, t, head, i) += alpha * (d * before[at(i, j)] + e * memory_before[at(i, j)]);
        d *= alpha;
        e *= alpha;
      }
    }
  }

  LinearAttentionInputs in_;
  std::vector<int64_t> cu_, first_run_;
  int64_t groups_ = 0, h_ = 0, k_ = 0, v_ = 0;
  bool by_channel_ = false;
};

// The key that is shared with the decays, k = 1 − e^g, and what its gradient adds to theirs.
inline Tensor shared_key(const Tensor& g) {
  const Tensor k = Tensor::empty(g.shape(), DType::f64);
  for (int64_t i = 0; i < g.numel(); ++i) k.data<double>()[i] = -std::expm1(g.data<double>()[i]);
  return k;
}
inline void add_shared_key_gradient(const Tensor& g, const Tensor& dk, const Tensor& dg) {
  for (int64_t i = 0; i < g.numel(); ++i)
    dg.data<double>()[i] -= std::exp(g.data<double>()[i]) * dk.data<double>()[i];
}

}  // namespace ebb::testing::reference
