// RWKV-7's native initialisation (models/rwkv7.h).
#include <algorithm>
#include <cmath>

#include "models/language_model.h"
#include "models/rwkv7.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

namespace ebb {
namespace {

// Columns (or, of a wide matrix, rows) of length 1 and orthogonal, times gain: the Q of a Gaussian
// matrix whose R has a positive diagonal, as Q = A R⁻¹ with AᵀA = RᵀR. A second round takes out the
// rounding of the first.
Tensor orthogonalized(Tensor a /*[m,n] f64, m >= n*/) {
  const int64_t n = a.size(1);
  for (int round = 0; round < 2; ++round) {
    const Tensor gram = matmul(a.transpose(0, 1), a).value().contiguous();
    double* g = gram.data<double>();
    for (int64_t i = 0; i < n; ++i) {  // Cholesky, the upper factor in place
      for (int64_t k = 0; k < i; ++k)
        for (int64_t j = i; j < n; ++j) g[i * n + j] -= g[k * n + i] * g[k * n + j];
      const double root = std::sqrt(g[i * n + i]);
      for (int64_t j = i; j < n; ++j) g[i * n + j] /= root;
    }
    const Tensor inverse = Tensor::zeros({n, n}, DType::f64);
    double* x = inverse.data<double>();
    for (int64_t i = n - 1; i >= 0; --i) {  // row i of R⁻¹ from the rows below
      x[i * n + i] = 1;
      for (int64_t k = i + 1; k < n; ++k)
        for (int64_t j = k; j < n; ++j) x[i * n + j] -= g[i * n + k] * x[k * n + j];
      for (int64_t j = i; j < n; ++j) x[i * n + j] /= g[i * n + i];
    }
    a = matmul(a, inverse).value();
  }
  return a;
}

void init_orthogonal(const NamedParameter& p, uint64_t seed, double gain) {
  const bool tall = p.shape[0] >= p.shape[1];
  init_normal(p, seed, 1);
  const Tensor drawn = p.value().to(DType::f64);
  const Tensor q = orthogonalized(tall ? drawn : drawn.transpose(0, 1).contiguous());
  p.value().copy_(mul(tall ? q : q.transpose(0, 1), gain).value().to(DType::f32));
}

// What the rule of a layer's vectors depends on.
struct Position {
  int64_t layer, layers, channels, head_dim;
  double depth() const { return layers > 1 ? double(layer) / double(layers - 1) : 0; }
  double rest() const { return 1 - double(layer) / double(layers); }
  double fraction(int64_t n) const { return double(n) / double(channels); }
  double linear(int64_t n) const { return line(n) - 0.5; }
  double line(int64_t n) const { return channels > 1 ? double(n) / double(channels - 1) : 0; }
  double zigzag(int64_t n) const {
    const double half = 0.5 * double(head_dim - 1);
    const double c = half > 0 ? (double(n % head_dim) - half) / half : 0;
    return c * std::abs(c);
  }
  double decay(int64_t n) const {
    return -6 + 6 * std::pow(line(n), 1 + std::pow(depth(), 0.3)) + 0.5 + 2.5 * zigzag(n);
  }
};

template <class F>
void fill_by_channel(const NamedParameter& p, F&& f) {
  std::vector<float> x;
  for (int64_t n = 0; n < p.shape.numel(); ++n) x.push_back(float(f(n)));
  p.value().copy_(Tensor::from(x, p.shape));
}

// One tensor of a layer; `name` without the layer's prefix.
void init_layer_tensor(const NamedParameter& p, const std::string& name, const Position& at,
                       uint64_t seed) {
  const auto mix = [&](double power) {
    fill_by_channel(p, [&](int64_t n) { return 1 - std::pow(at.fraction(n), power); });
  };
  const auto fill = [&](double x) { p.value().fill_(x); };
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is({"attn.x_r", "attn.x_g"})) return mix(0.2 * at.rest());
  if (is({"attn.x_w", "attn.x_a"})) return mix(0.9 * at.rest());
  if (is({"attn.x_k", "attn.x_v"})) return mix(0.7 * at.rest());
  if (is({"ffn.x_k"})) return mix(std::pow(at.rest(), 4));
  if (is({"attn.k_k"}))
    return fill_by_channel(p, [&](int64_t n) { return 0.71 - 0.1 * at.linear(n); });
  if (is({"attn.k_a"})) return fill(1.02);
  if (is({"attn.r_k"})) return fill(-0.04);
  if (is({"attn.w_lora.lora.2.bias"}))
    return fill_by_channel(p, [&](int64_t n) { return at.decay(n); });
  if (is({"attn.a_lora.lora.2.bias"}))
    return fill_by_channel(
        p, [&](int64_t n) { return -0.19 + 0.3 * at.zigzag(n) + 0.4 * at.linear(n); });
  if (is({"attn.v_lora.lora.2.bias"}))
    return fill_by_channel(p, [&](int64_t n) { return 0.73 - 0.4 * at.linear(n); });
  if (is({"attn.g_norm.weight"}))
    return fill(std::pow(double(at.layer + 1) / double(at.layers), 0.7));
  if (name.ends_with("bias")) return fill(0);
  if (name.find("norm") != std::string::npos) return fill(1);
  if (is({"attn.o_proj.weight", "ffn.value.weight"}) || name.ends_with(".lora.0.weight"))
    return fill(0);
  const bool small = is({"attn.k_proj.weight"}) || name.ends_with(".lora.2.weight");
  init_orthogonal(p, seed, small ? 0.1 : 1);
}

}  // namespace

void init_rwkv7_weights(LanguageModel& model, uint64_t seed) {
  const ModelConfig& c = model.config();
  for (const NamedParameter& p : model.named_parameters()) {
    const std::string mark = "layers.";
    const size_t at = p.name.find(mark);
    if (at != std::string::npos) {
      const size_t dot = p.name.find('.', at + mark.size());
      const int64_t layer = std::stoll(p.name.substr(at + mark.size(), dot));
      init_layer_tensor(p, p.name.substr(dot + 1),
                        {layer, c.num_hidden_layers, c.hidden_size, c.head_dim}, seed);
    } else if (p.name.ends_with("embeddings.weight")) {
      init_uniform(p, seed, 1e-4);
    } else if (p.shape.size() == 1) {
      p.value().fill_(p.name.ends_with("bias") ? 0 : 1);
    } else {
      const double ratio = double(c.vocab_size) / double(c.hidden_size);
      init_orthogonal(p, seed, 0.5 * std::sqrt(std::max(ratio, 1.0)));
    }
    p.parameter.refresh_shadow();
  }
}

std::vector<float> native_rwkv7_decay_bias(int64_t layer, int64_t layers, int64_t channels,
                                           int64_t head_dim) {
  const Position at{layer, layers, channels, head_dim};
  std::vector<float> out;
  for (int64_t n = 0; n < channels; ++n) out.push_back(float(at.decay(n)));
  return out;
}

}  // namespace ebb
