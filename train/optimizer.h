// AdamW over a model's parameters (the step itself: ops/adamw.h).
//   AdamW optimizer(decay_groups(model.named_parameters(), 0.1), {.lr = 3e-4, .clip = 1.0});
//   optimizer.zero_grad();
//   backward(loss);
//   optimizer.step();                        // norm, clip, update; no synchronisation
//   double norm = optimizer.read().grad_norm;
// Build it after the model is on its device and in its precision. Parameters that have no gradient
// are left alone.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "nn/module.h"
#include "ops/adamw.h"

namespace ebb {

struct ParamGroup {
  std::vector<NamedParameter> parameters;
  double weight_decay = 0;
  double lr_scale = 1;  // times the learning rate of the step
};

enum class LearningRates {
  one,       // the same for all
  by_model,  // times the factor that a parameter's module gives it
};

// A group for each weight decay and factor of the learning rate that occurs: weight decay for what
// its module marks, none for the rest (`decay_all`: for that too). In the order in which they first
// occur; none is empty.
std::vector<ParamGroup> decay_groups(const std::vector<NamedParameter>& parameters,
                                     double weight_decay, bool decay_all = false,
                                     LearningRates rates = LearningRates::one);

struct AdamWConfig {
  double lr = 3e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double clip = 0;  // largest global gradient norm; 0: no clipping
};

class AdamW {
 public:
  explicit AdamW(const std::vector<ParamGroup>& groups, const AdamWConfig& config = {});

  // Zeros the gradients there are, in place: their addresses stay, as a captured step and an
  // operator's accumulator want.
  void zero_grad();
  void step() {
    gradient_squares();
    apply();
  }
  // The two halves of step(), for whoever must sum squares over ranks in between.
  const Tensor& gradient_squares();  // f64 []: Σ g² of the gradients as they are
  void apply();

  // Between steps; these write device memory, so a captured step sees them.
  void set_lr(double lr);
  // Gradients are divided by this first: the number of valid tokens where losses are sums. A view
  // of the device value, f64 [], to be copied to from the host or from a device tensor.
  Tensor grad_divisor() const { return adamw_scalar(scalars_, AdamWScalar::grad_divisor); }

  // Counters, norm and scale of the last step. Synchronises.
  AdamWScalars read() const { return read_adamw_scalars(scalars_); }
  const Tensor& scalars() const { return scalars_; }  // on the device

  int64_t state_bytes() const;  // of the moments

  // "NAME.exp_avg", "NAME.exp_avg_sq" (views), "step", "skipped". Loading is strict: one error
  // lists every missing, unexpected and mis-shaped entry, before anything is changed.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  struct Entry {
    Parameter parameter;
    std::vector<NamedParameter> names;  // several where matrices are fused, or tied
    Tensor m, v;
    double weight_decay = 0, lr_scale = 1;
  };
  void add(const NamedParameter& p, const ParamGroup& group);

  AdamWOptions options_;
  std::vector<Entry> entries_;
  Tensor scalars_, squares_;
  AdamWList list_;
  TensorList gradients_;
};

}  // namespace ebb
