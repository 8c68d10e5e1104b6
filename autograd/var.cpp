#include "autograd/var.h"

#include "tensor/check.h"

namespace ebb {

Var Var::leaf(Tensor value) {
  check(value.defined() && is_float(value.dtype()),
        "leaf: only defined float tensors can want a gradient");
  auto slot = std::make_shared<Slot>();
  slot->dtype = value.dtype();
  slot->grad_dtype = accumulate_type(value.dtype());
  slot->shape = value.shape();
  slot->device = value.device();
  return Var(std::move(value), std::move(slot));
}

void Var::register_hook(std::function<Tensor(const Tensor&)> fn) const {
  check(slot_ != nullptr, "register_hook: this Var does not require a gradient");
  slot_->hooks.push_back(std::move(fn));
}

void Var::retain_grad() const {
  check(slot_ != nullptr, "retain_grad: this Var does not require a gradient");
  slot_->retain_grad = true;
}

}  // namespace ebb
