// A DART language model (models.md 10; with use_sma = false a Mamba-2), token by token in f64 from
// its definition: the oracle of the model. One sequence of ids in, logits [T,V] out. Reads the
// tensors of the state dict by name; groups, clamped steps and missing biases are not covered.
#pragma once
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "models/language_model.h"

namespace ebb::testing::reference {

class DartReference {
 public:
  explicit DartReference(const LanguageModel& model) : c_(model.config()) {
    for (const auto& [name, t] : model.state_dict())
      weights_[name] = t.to(DType::f64).to_vector<double>();
  }

  std::vector<double> logits(const std::vector<int64_t>& ids) const {
    const int64_t d = c_.hidden_size, V = c_.vocab_size;
    const std::vector<double>& table = weights_.at("backbone.embeddings.weight");
    std::vector<Row> x;
    for (const int64_t id : ids)
      x.emplace_back(table.begin() + id * d, table.begin() + (id + 1) * d);
    for (int64_t l = 0; l < c_.num_hidden_layers; ++l) layer(l, &x);
    const std::vector<double>& head =
        c_.tie_word_embeddings ? table : weights_.at("lm_head.weight");
    std::vector<double> out;
    for (Row& h : x) {
      h = normed(h, weights_.at("backbone.norm_f.weight"));
      for (int64_t v = 0; v < V; ++v) {
        double sum = 0;
        for (int64_t j = 0; j < d; ++j) sum += head[size_t(v * d + j)] * h[size_t(j)];
        out.push_back(sum);
      }
    }
    return out;
  }

 private:
  using Row = std::vector<double>;
  struct Matrix {  // [N,P]
    int64_t n = 0, p = 0;
    Row v = {};
    Matrix(int64_t n, int64_t p) : n(n), p(p), v(size_t(n * p), 0.0) {}
    double& at(int64_t i, int64_t j) { return v[size_t(i * p + j)]; }
    double at(int64_t i, int64_t j) const { return v[size_t(i * p + j)]; }
  };

  Row normed(const Row& x, const Row& w) const {
    double mean = 0;
    for (const double v : x) mean += v * v / double(x.size());
    Row out = x;
    for (size_t i = 0; i < x.size(); ++i)
      out[i] *= w[i] / std::sqrt(mean + double(float(c_.norm_eps)));  // the layers keep it so
    return out;
  }
  static Row unit(Row x, double eps) {
    double mean = 0;
    for (const double v : x) mean += v * v / double(x.size());
    for (double& v : x) v /= std::sqrt(mean + eps);
    return x;
  }
  static double silu(double x) { return x / (1 + std::exp(-x)); }
  // W x, W [rows, x.size()].
  static Row times(const Row& w, const Row& x) {
    Row out(w.size() / x.size(), 0.0);
    for (size_t i = 0; i < out.size(); ++i)
      for (size_t j = 0; j < x.size(); ++j) out[i] += w[i * x.size() + j] * x[j];
    return out;
  }
  static Row part(const Row& x, int64_t begin, int64_t size) {
    return {x.begin() + begin, x.begin() + begin + size};
  }

  void layer(int64_t l, std::vector<Row>* x) const {
    const std::string name = "backbone.layers." + std::to_string(l) + ".";
    const auto w = [&](const char* rest) -> const Row& { return weights_.at(name + rest); };
    const int64_t H = c_.num_heads, P = c_.head_dim, N = c_.state_size, inner = H * P;
    const bool own = c_.is_dart() && !c_.sma_shared_read;
    const int64_t channels = inner + (own ? 3 : 2) * N, taps = c_.conv_size;
    std::vector<Matrix> state(size_t(H), Matrix(N, P)), open = state;
    std::vector<std::vector<Matrix>> runs(static_cast<size_t>(H));  // complete ones
    std::vector<Row> before;                                        // inputs of the convolution
    for (size_t t = 0; t < x->size(); ++t) {
      const Row u = normed((*x)[t], w("norm.weight"));
      const Row all = times(w("mixer.in_proj.weight"), u);
      before.push_back(part(all, inner, channels));
      Row conv = w("mixer.conv1d.bias");
      for (int64_t ch = 0; ch < channels; ++ch) {
        for (int64_t k = 0; k < taps; ++k)
          if (int64_t(t) >= k)
            conv[size_t(ch)] += w("mixer.conv1d.weight")[size_t(ch * taps + taps - 1 - k)] *
                                before[t - size_t(k)][size_t(ch)];
        conv[size_t(ch)] = silu(conv[size_t(ch)]);
      }
      const Row B = part(conv, inner, N), C = part(conv, inner + N, N);
      const Row read = own ? part(conv, inner + 2 * N, N) : C;
      const bool sma = c_.is_dart() && c_.use_sma;
      Row q, e;
      double gate = 0;
      if (sma) {
        q = times(w("mixer.q_proj.weight"), u), e = times(w("mixer.e_proj.weight"), u);
        if (c_.sma_normalize) q = unit(q, c_.sma_eps), e = unit(e, c_.sma_eps);
        gate = silu(times(w("mixer.g_proj.weight"), u)[0]);
      }
      Row y(size_t(inner), 0.0);
      for (int64_t h = 0; h < H; ++h) {
        const double step =
            std::log1p(std::exp(all[size_t(inner + channels + h)] + w("mixer.dt_bias")[size_t(h)]));
        const double decay = std::exp(-std::exp(w("mixer.A_log")[size_t(h)]) * step);
        for (Matrix* m : {&state[size_t(h)], &open[size_t(h)]})
          for (int64_t i = 0; i < N; ++i)
            for (int64_t j = 0; j < P; ++j)
              m->at(i, j) = decay * m->at(i, j) + step * B[size_t(i)] * conv[size_t(h * P + j)];
        const Row found = sma ? attend(runs[size_t(h)], q, e, read) : Row(size_t(P), 0.0);
        for (int64_t j = 0; j < P; ++j) {
          double& out = y[size_t(h * P + j)];
          for (int64_t i = 0; i < N; ++i) out += C[size_t(i)] * state[size_t(h)].at(i, j);
          out += gate * found[size_t(j)] + w("mixer.D")[size_t(h)] * conv[size_t(h * P + j)];
        }
        if (sma && int64_t(t + 1) % c_.sma_chunk == 0) {
          runs[size_t(h)].push_back(open[size_t(h)]);
          open[size_t(h)] = Matrix(N, P);
        }
      }
      for (int64_t j = 0; j < inner; ++j) y[size_t(j)] *= silu(all[size_t(j)]);
      const Row mixed = times(w("mixer.out_proj.weight"), normed(y, w("mixer.norm.weight")));
      for (size_t j = 0; j < mixed.size(); ++j) (*x)[t][j] += mixed[j];
    }
  }

  // R: softmax over the runs of q·(Δ e)/√N, Δ with rows of root mean square 1, values cᵀΔ.
  Row attend(const std::vector<Matrix>& runs, const Row& q, const Row& e, const Row& c) const {
    const int64_t N = int64_t(q.size()), P = int64_t(e.size());
    Row weights, out(size_t(P), 0.0);
    double total = 0;
    for (const Matrix& m : runs) {
      double logit = 0;
      for (int64_t i = 0; i < N; ++i) {
        double key = 0;
        Row row = part(m.v, i * P, P);
        if (c_.sma_normalize) row = unit(row, c_.sma_eps_row);
        for (int64_t j = 0; j < P; ++j) key += row[size_t(j)] * e[size_t(j)];
        logit += q[size_t(i)] * key / std::sqrt(double(N));
      }
      weights.push_back(std::exp(logit));
      total += weights.back();
    }
    for (size_t r = 0; r < runs.size(); ++r)
      for (int64_t i = 0; i < N; ++i)
        for (int64_t j = 0; j < P; ++j)
          out[size_t(j)] += weights[r] / total * c[size_t(i)] * runs[r].at(i, j);
    return out;
  }

  ModelConfig c_;
  std::map<std::string, Row> weights_;
};

}  // namespace ebb::testing::reference
