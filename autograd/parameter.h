// Parameter: a trained tensor. It owns the fp32 master, the fp32 gradient and, in bf16 training of
// matrices, a bf16 shadow that operators read and the optimizer refreshes. Vectors (norm weights,
// gates, biases, A_log, dt_bias, D) have no shadow: operators read their fp32 master.
#pragma once
#include <memory>

#include "autograd/var.h"

namespace ebb {

class Parameter {
 public:
  Parameter() = default;
  explicit Parameter(Tensor master);  // f32 or f64

  bool defined() const { return state_ != nullptr; }
  const Tensor& master() const { return state_->master; }
  Tensor grad() const { return state_->slot->grad; }  // undefined until a backward pass
  void set_grad(Tensor g) const;  // of the master's shape and device; undefined: none
  void zero_grad() const { state_->slot->grad = Tensor(); }
  const Tensor& shadow() const { return state_->shadow; }  // undefined without bf16 training
  // Operators that read this parameter in f32 always (conv kernels) opt out of bf16 training.
  void keep_f32() const { state_->shadow_allowed = false; }
  bool uses_shadow() const { return state_->shadow_allowed; }
  void enable_shadow() const;            // creates it from the master
  void refresh_shadow() const;           // after the master changed
  void set_master(Tensor master) const;  // replaces values, device or dtype; drops the gradient
  // What operators read: the shadow where there is one, with the gradient going to grad().
  Var var() const { return Var(state_->shadow ? state_->shadow : state_->master, state_->slot); }
  const std::shared_ptr<Slot>& slot() const { return state_->slot; }

 private:
  struct State {
    Tensor master, shadow;
    bool shadow_allowed = true;
    std::shared_ptr<Slot> slot;
  };
  std::shared_ptr<State> state_;
};

}  // namespace ebb
