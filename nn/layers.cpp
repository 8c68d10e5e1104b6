#include "nn/layers.h"

#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/layer_norm.h"
#include "ops/matmul.h"
#include "ops/rms_norm.h"
#include "ops/swiglu.h"

namespace ebb {

Linear::Linear(int64_t in, int64_t out, bool bias) {
  weight_ = register_parameter("weight", Tensor::zeros({out, in}));
  if (bias) bias_ = register_parameter("bias", Tensor::zeros({out}), WeightDecay::off);
}

Var Linear::forward(const Var& x) const {
  return linear(x, weight_.var(), bias_.defined() ? bias_.var() : Var());
}

Embedding::Embedding(int64_t vocab, int64_t dim) {
  weight_ = register_parameter("weight", Tensor::zeros({vocab, dim}));
}

Var Embedding::forward(const Tensor& ids) const { return embedding(weight_.var(), ids); }

Norm::Norm(int64_t dim, double eps, NormKind kind, bool bias) : eps_(eps), kind_(kind) {
  weight_ = register_parameter("weight", Tensor::full({dim}, 1), WeightDecay::off);
  if (bias) bias_ = register_parameter("bias", Tensor::zeros({dim}), WeightDecay::off);
}

Var Norm::forward(const Var& x) const {
  if (kind_ == NormKind::rms) return rms_norm(x, weight_.var(), float(eps_));
  return layer_norm(x, weight_.var(), bias_.defined() ? bias_.var() : Var(), float(eps_));
}

std::pair<Var, Var> Norm::add_forward(const Var& x, const Var& residual) const {
  if (kind_ == NormKind::layer) {
    const Var sum = add(x, residual);
    return {forward(sum), sum};
  }
  const AddRmsNorm r = add_rms_norm(x, residual, weight_.var(), float(eps_));
  return {r.y, r.u};
}

SwigluMlp::SwigluMlp(int64_t dim, int64_t width) : width_(width) {
  gate_up_ = register_fused({{"gate_proj.weight", {width, dim}}, {"up_proj.weight", {width, dim}}});
  down_ = register_parameter("down_proj.weight", Tensor::zeros({dim, width}));
}

Var SwigluMlp::forward(const Var& x) const {
  return linear(swiglu(linear(x, gate_up_.var())), down_.var());
}

}  // namespace ebb
