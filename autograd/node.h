// Node: one recorded operator. How an operator records itself:
//
//   Tensor y = ...forward...;
//   return record("rms_norm", {x, w}, {x.value(), w.value(), rstd}, {y},
//                 [eps](BackwardContext& ctx) {
//                   const Tensor &x = ctx.saved(0), &w = ctx.saved(1), &rstd = ctx.saved(2);
//                   Tensor dy = ctx.dy(0);                   // always defined, zeros if unused
//                   if (ctx.needs(0)) ctx.grad(0, ...);      // fresh gradient of input 0
//                   if (ctx.needs(1)) ctx.grad(1, ...);
//                 })[0];
//
// Backward captures scalars only; every tensor it needs goes through `saved`, where it is counted
// and protected against in-place changes. An operator may save its own outputs.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "autograd/var.h"

namespace ebb {

class BackwardContext;
using BackwardFn = std::function<void(BackwardContext&)>;

struct Node {
  const char* op = "";
  uint64_t sequence = 0;                      // creation order; backward walks it downwards
  std::vector<std::shared_ptr<Slot>> inputs;  // null where no gradient is wanted
  std::vector<Tensor> saved;
  std::vector<uint64_t> saved_versions;
  struct OutputInfo {
    Shape shape;
    DType dtype;
    Device device;
    std::weak_ptr<Slot> slot;
  };
  std::vector<OutputInfo> outputs;
  BackwardFn backward;
  bool released = false;  // consumed by a backward pass without retain

  Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  ~Node();  // iterative: deep graphs do not recurse
};

// What a backward function sees.
class BackwardContext {
 public:
  BackwardContext(const Node& node, std::vector<Tensor> dy);

  int inputs() const { return int(node_.inputs.size()); }
  bool needs(int input) const { return node_.inputs.at(size_t(input)) != nullptr; }
  const Tensor& saved(int i) const;  // throws if changed in place since forward
  bool has_dy(int output) const { return dy_.at(size_t(output)).defined(); }
  Tensor dy(int output) const;  // dtype and shape of the output, any strides
  // Hands over the gradient of an input, once; it may have the value's dtype or its accumulate
  // type (f32 for a bf16 value, where sums over many tokens are returned unrounded). Undefined:
  // zero.
  void grad(int input, Tensor gradient);
  // The dense fp32/fp64 accumulator of a leaf input, if it has one already: add to it in place
  // (a GEMM with beta = 1) and call grad_accumulated(input) instead of grad().
  Tensor accumulator(int input) const;
  void grad_accumulated(int input);
  const char* op() const { return node_.op; }

  std::vector<Tensor> take_gradients() { return std::move(grads_); }
  bool accumulated(int input) const { return accumulated_.at(size_t(input)); }

 private:
  const Node& node_;
  std::vector<Tensor> dy_;
  std::vector<Tensor> grads_;
  std::vector<bool> accumulated_;
};

// Wraps the outputs as Vars. Records a node when gradients are enabled and an input needs one;
// otherwise nothing is saved and the outputs are constants. Undefined Vars may stand for absent
// optional inputs. Integer outputs get no slot. In anomaly mode checks the outputs here.
std::vector<Var> record(const char* op, std::span<const Var> inputs, std::vector<Tensor> saved,
                        std::vector<Tensor> outputs, BackwardFn backward);
inline std::vector<Var> record(const char* op, std::initializer_list<Var> inputs,
                               std::vector<Tensor> saved, std::vector<Tensor> outputs,
                               BackwardFn backward) {
  return record(op, std::span(inputs.begin(), inputs.size()), std::move(saved), std::move(outputs),
                std::move(backward));
}
// True when record() would keep something: lets an operator skip computing what only backward
// needs.
bool will_record(std::span<const Var> inputs);
inline bool will_record(std::initializer_list<Var> inputs) {
  return will_record(std::span(inputs.begin(), inputs.size()));
}

}  // namespace ebb
