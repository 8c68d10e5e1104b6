// Layers: modules around single operators.
#pragma once
#include "nn/module.h"

namespace ebb {

// y = x Wᵀ (+ b), weight [out,in].
class Linear : public Module {
 public:
  Linear(int64_t in, int64_t out, bool bias = false);
  Var forward(const Var& x) const;  // [...,in] -> [...,out]
  const Parameter& weight() const { return weight_; }

 private:
  Parameter weight_, bias_;
};

// Token table [V,d].
class Embedding : public Module {
 public:
  Embedding(int64_t vocab, int64_t dim);
  Var forward(const Tensor& ids) const;  // [...] -> [...,d]
  const Parameter& weight() const { return weight_; }

 private:
  Parameter weight_;
};

enum class NormKind { rms, layer };

// RMSNorm with a weight, or LayerNorm with weight and (if asked for) bias.
class Norm : public Module {
 public:
  Norm(int64_t dim, double eps, NormKind kind = NormKind::rms, bool bias = false);
  Var forward(const Var& x) const;
  // Adds first: returns {norm(x + residual), x + residual}.
  std::pair<Var, Var> add_forward(const Var& x, const Var& residual) const;
  const Parameter& weight() const { return weight_; }

 private:
  Parameter weight_, bias_;
  double eps_;
  NormKind kind_;
};

// down(silu(gate(x)) ⊙ up(x)); gate and up are one product.
class SwigluMlp : public Module {
 public:
  SwigluMlp(int64_t dim, int64_t width);
  Var forward(const Var& x) const;

 private:
  Parameter gate_up_, down_;
  int64_t width_;
};

}  // namespace ebb
