// Var: a Tensor that may be recorded on the tape.
//   Var w = Var::leaf(Tensor::from(...));        // wants a gradient
//   Var loss = sum(mul(x, w));
//   backward(loss);
//   w.grad();                                     // dloss/dw
// Operators take and return Var; their CPU and CUDA bodies take Tensor and cannot record.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace ebb {

struct Node;

// Where a gradient goes. Holds no values of the forward pass.
struct Slot {
  std::shared_ptr<Node> producer;  // null for a leaf
  int index = 0;                   // which output of the producer
  DType dtype = DType::f32;        // of the value
  Shape shape;
  Device device;
  Tensor grad;                    // leaf: the accumulated gradient; else only while retained
  bool retain_grad = false;       // keep grad of a non-leaf
  DType grad_dtype = DType::f32;  // leaf gradients: f64 for f64 values, else f32
  std::vector<std::function<Tensor(const Tensor&)>> hooks;   // may replace the gradient
  std::vector<std::function<void(Slot&)>> after_accumulate;  // leaf: once per backward, complete
  bool is_leaf() const { return producer == nullptr; }
};

class Var {
 public:
  Var() = default;                                 // undefined: an absent optional input
  Var(Tensor value) : value_(std::move(value)) {}  // a constant (implicit on purpose)
  static Var leaf(Tensor value);                   // floats only; accumulates .grad()
  Var(Tensor value, std::shared_ptr<Slot> slot)
      : value_(std::move(value)), slot_(std::move(slot)) {}

  bool defined() const { return value_.defined(); }
  explicit operator bool() const { return defined(); }
  const Tensor& value() const { return value_; }
  bool requires_grad() const { return slot_ != nullptr; }
  const std::shared_ptr<Slot>& slot() const { return slot_; }
  Tensor grad() const { return slot_ ? slot_->grad : Tensor(); }
  void zero_grad() const {
    if (slot_) slot_->grad = Tensor();
  }
  Var detach() const { return Var(value_); }
  // fn(gradient) -> gradient to use instead (undefined keeps it). Called once per backward, in the
  // order of registration, with the complete gradient of this Var from that pass. It must not
  // change its argument in place, nor capture this Var (which would own itself).
  void register_hook(std::function<Tensor(const Tensor&)> fn) const;
  void retain_grad() const;  // of a result: grad() accumulates as a leaf's does, hooks applied

  const Shape& shape() const { return value_.shape(); }
  int64_t size(int d) const { return value_.size(d); }
  int dim() const { return value_.dim(); }
  int64_t numel() const { return value_.numel(); }
  DType dtype() const { return value_.dtype(); }
  Device device() const { return value_.device(); }
  bool on_cuda() const { return value_.on_cuda(); }

 private:
  Tensor value_;
  std::shared_ptr<Slot> slot_;
};

}  // namespace ebb
