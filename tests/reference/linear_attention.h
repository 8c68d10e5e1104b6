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
#include "tests/reference/state_columns.h"

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
  explicit LinearAttention(const LinearAttentionInputs& in)
      : in_(in), cu_(in.cu), decay_(Tensor::empty(in.g.shape(), DType::f64)) {
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
    for (int64_t i = 0; i < in.g.numel(); ++i)
      decay_.data<double>()[i] = std::exp(in.g.data<double>()[i]);
    each_part(sequences(), h_, v_, [&](int64_t n, int64_t h, int64_t j) { forward({n, h, j}); });
  }

  // After backward(): gradients in the shapes of the inputs. dht, dcontributions may be undefined.
  void backward(const Tensor& d_o, const Tensor& dht, const Tensor& dcontributions) {
    dq = Tensor::zeros_like(in_.q), dk = Tensor::zeros_like(in_.k), dv = Tensor::zeros_like(in_.v);
    dg = Tensor::zeros_like(in_.g), dw = Tensor::zeros(in_.v.shape().first(3), DType::f64);
    dskip = Tensor::zeros({h_}, DType::f64), dh0 = Tensor::zeros_like(ht);
    each_part(sequences(), h_, v_, [&](int64_t n, int64_t h, int64_t j) {
      adjoint({n, h, j}, d_o, dht, dcontributions);
    });
  }

  Tensor o, ht, contributions, dq, dk, dv, dg, dw, dskip, dh0;

 private:
  struct Part {
    int64_t n, head, column;
  };
  struct State {
    StateColumns s, run;  // run: empty without contributions
  };

  int64_t sequences() const { return int64_t(cu_.size()) - 1; }
  double* key(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + (token * groups_ + head / (h_ / groups_)) * k_;
  }
  Columns value(const Tensor& t, int64_t token, const Part& at) const {
    return load_columns(t.data<double>() + (token * h_ + at.head) * v_, at.column, v_);
  }
  void put(const Tensor& t, int64_t token, const Part& at, const Columns& x) const {
    store_columns(t.data<double>() + (token * h_ + at.head) * v_, at.column, v_, x);
  }
  double* gate(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + token * h_ + head;
  }
  // Of channel i: [i·by_channel_].
  double* decay(const Tensor& t, int64_t token, int64_t head) const {
    return t.data<double>() + (token * h_ + head) * (by_channel_ ? k_ : 1);
  }
  double* matrix(const Tensor& t, int64_t row, int64_t head) const {
    return t ? t.data<double>() + (row * h_ + head) * k_ * v_ : nullptr;
  }
  double weight(int64_t t, int64_t head) const { return in_.w ? *gate(in_.w, t, head) : 1; }
  double skip(int64_t head) const { return in_.skip ? in_.skip.data<double>()[head] : 0; }

  StateColumns zero() const { return StateColumns(size_t(k_), Columns{}); }
  State start(const Part& at) const {
    return {load_state(matrix(in_.h0, at.n, at.head), k_, at.column, v_),
            in_.memory ? zero() : StateColumns()};
  }
  void advance(int64_t t, const Part& at, StateColumns& s) const {
    const double *k = key(in_.k, t, at.head), *alpha = decay(decay_, t, at.head);
    const double w = weight(t, at.head);
    const Columns v = value(in_.v, t, at);
    for (size_t i = 0; i < s.size(); ++i)
      for (size_t j = 0; j < kColumns; ++j)
        s[i][j] = alpha[i * by_channel_] * s[i][j] + w * k[i] * v[j];
  }
  void advance(int64_t t, const Part& at, State& state) const {
    advance(t, at, state.s);
    if (opens(at.n, t)) state.run = zero();
    advance(t, at, state.run);
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

  void forward(const Part& at) const {
    State state = start(at);
    for (int64_t t = cu_[size_t(at.n)]; t < cu_[size_t(at.n) + 1]; ++t) {
      advance(t, at, state);
      if (ends(at.n, t))
        store_state(matrix(contributions, run(at.n, t), at.head), at.column, v_, state.run);
      const double* q = key(in_.q, t, at.head);
      Columns read{}, out = value(in_.v, t, at);
      for (size_t i = 0; i < size_t(k_); ++i)
        for (size_t j = 0; j < kColumns; ++j) read[j] += q[i] * state.s[i][j];
      for (size_t j = 0; j < kColumns; ++j) out[j] = in_.scale * read[j] + skip(at.head) * out[j];
      put(o, t, at, out);
    }
    store_state(matrix(ht, at.n, at.head), at.column, v_, state.s);
  }

  void adjoint(const Part& at, const Tensor& d_o, const Tensor& dht,
               const Tensor& dcontributions) const {
    State d{load_state(matrix(dht, at.n, at.head), k_, at.column, v_), zero()};
    const StateColumns none = zero();
    each_token_backwards(
        cu_[size_t(at.n)], cu_[size_t(at.n) + 1], start(at),
        [&](int64_t t, State& state) { advance(t, at, state); },
        [&](int64_t t, const State& before, const State& after) {
          if (ends(at.n, t) && dcontributions)
            d.run = load_state(matrix(dcontributions, run(at.n, t), at.head), k_, at.column, v_);
          const bool first = !in_.memory || opens(at.n, t);  // of a run
          token_adjoint(t, at, value(d_o, t, at), after.s, before.s, first ? none : before.run, d);
        });
    store_state(matrix(dh0, at.n, at.head), at.column, v_, d.s);
  }

  // d: gradients of the states after the token in, of those before it out. y: of its output.
  void token_adjoint(int64_t t, const Part& at, const Columns& y, const StateColumns& after,
                     const StateColumns& before, const StateColumns& run, State& d) const {
    const double *q = key(in_.q, t, at.head), *k = key(in_.k, t, at.head);
    const double* alpha = decay(decay_, t, at.head);
    double *to_q = key(dq, t, at.head), *to_k = key(dk, t, at.head);
    double* to_g = decay(dg, t, at.head);
    const double w = weight(t, at.head);
    const Columns v = value(in_.v, t, at);
    Columns to_v{};
    double to_skip = 0, weighted = 0;
    for (size_t j = 0; j < kColumns; ++j) {
      to_v[j] = skip(at.head) * y[j];
      to_skip += v[j] * y[j];
    }
    for (size_t i = 0; i < size_t(k_); ++i) {
      const double a = alpha[i * by_channel_];
      double read = 0, written = 0, decayed = 0;
#pragma omp simd reduction(+ : read, written, decayed)
      for (size_t j = 0; j < kColumns; ++j) {
        double &s = d.s[i][j], &r = d.run[i][j];
        read += after[i][j] * y[j];
        s += in_.scale * q[i] * y[j];
        to_v[j] += w * k[i] * (s + r);
        written += v[j] * (s + r);
        decayed += s * before[i][j] + r * run[i][j];
        s *= a, r *= a;
      }
      to_q[i] += in_.scale * read, to_k[i] += w * written, weighted += k[i] * written;
      to_g[i * by_channel_] += a * decayed;
    }
    put(dv, t, at, to_v);
    dskip.data<double>()[at.head] += to_skip, *gate(dw, t, at.head) += weighted;
  }

  LinearAttentionInputs in_;
  std::vector<int64_t> cu_, first_run_;
  Tensor decay_;  // e^g
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
