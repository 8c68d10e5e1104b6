#include "autograd/parameter.h"

#include "tensor/check.h"

namespace ebb {

Parameter::Parameter(Tensor master) : state_(std::make_shared<State>()) {
  set_master(std::move(master));
}

void Parameter::set_master(Tensor master) const {
  check(master.defined() && (master.dtype() == DType::f32 || master.dtype() == DType::f64),
        "parameter: the master must be f32 or f64");
  const bool shadowed = state_->shadow.defined();
  if (!state_->slot) {
    state_->slot = Var::leaf(master).slot();
  } else {  // the same slot, so that hooks and callbacks stay
    Slot& slot = *state_->slot;
    slot.dtype = slot.grad_dtype = master.dtype();
    slot.shape = master.shape();
    slot.device = master.device();
    slot.grad = Tensor();
  }
  state_->master = std::move(master);
  state_->shadow = Tensor();
  if (shadowed) enable_shadow();
}

void Parameter::set_grad(Tensor g) const {
  if (g.defined()) {
    check(g.shape() == master().shape() && is_float(g.dtype()),
          "parameter: gradient {} of {}, the master is {}", g.shape(), g.dtype(), master().shape());
    check(g.device() == master().device(), "parameter: gradient on {}, the master on {}",
          g.device(), master().device());
  }
  state_->slot->grad = std::move(g);
}

void Parameter::enable_shadow() const {
  state_->shadow = state_->master.to(DType::bf16);
  state_->slot->dtype = DType::bf16;
}

void Parameter::refresh_shadow() const {
  if (state_->shadow) state_->shadow.copy_(state_->master);
}

}  // namespace ebb
