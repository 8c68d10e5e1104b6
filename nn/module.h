// Module: named parameters in a tree, with PyTorch's vocabulary.
//   struct Mlp : Module {
//     Mlp() { w_ = register_parameter("up.weight", Tensor::zeros({8, 4})); }
//     Parameter w_;
//   };
// Names join with dots: register_module("mlp", mlp) gives "mlp.up.weight".
//
// Matrices that multiply the same input can be one Parameter in memory (one GEMM) and still be
// separate tensors by name: register_fused() stacks them by rows.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "autograd/parameter.h"

namespace ebb {

enum class WeightDecay { on, off };  // matrices and conv kernels on; gates, norms, biases off

// A tensor by its public name: rows [begin, begin + rows) of a Parameter, seen in `shape`.
struct NamedParameter {
  std::string name;
  Parameter parameter;
  int64_t begin = 0;
  int64_t rows = 0;
  Shape shape;
  WeightDecay decay = WeightDecay::on;
  double lr_factor = 1;  // times the learning rate, where training follows its model in that
  Tensor value() const;  // view of the master, [shape]
  Tensor grad() const;   // view of the gradient, or undefined
};

using StateDict = std::vector<std::pair<std::string, Tensor>>;

class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  std::vector<NamedParameter> named_parameters() const;  // registration order
  int64_t parameter_count() const;                       // elements of the named parameters
  StateDict state_dict() const;                          // views of the masters, and of the buffers
  // Copies values in. Strict: throws one error listing every missing, unexpected and mis-shaped
  // entry, before anything is changed.
  void load_state_dict(const StateDict& state);
  void to(Device device);  // moves masters (gradients are dropped)
  void enable_bf16();      // bf16 shadows for every matrix
  void zero_grad();

 protected:
  Parameter register_parameter(const std::string& name, Tensor master,
                               WeightDecay decay = WeightDecay::on, double lr_factor = 1);
  // A tensor that belongs to the state but is not trained (frozen scales): moved, saved and loaded
  // with the parameters, not among them. Read it by master().
  Parameter register_buffer(const std::string& name, Tensor values);
  struct FusedPart {
    std::string name;
    Shape shape;  // first dimension: rows; the rest must hold as many elements for every part
  };
  // One Parameter [sum of rows rounded up to `row_multiple`, columns]; the padding rows are zero
  // and stay so (their gradient is zero).
  Parameter register_fused(std::span<const FusedPart> parts, int64_t row_multiple = 1,
                           WeightDecay decay = WeightDecay::on);
  Parameter register_fused(std::initializer_list<FusedPart> parts, int64_t row_multiple = 1,
                           WeightDecay decay = WeightDecay::on) {
    return register_fused(std::span(parts.begin(), parts.size()), row_multiple, decay);
  }
  void register_module(const std::string& name, Module& child);  // a member of this module

 private:
  enum class Kind { parameters, with_buffers };
  void collect(const std::string& prefix, Kind kind, std::vector<NamedParameter>* out) const;
  std::vector<NamedParameter> named_state() const;  // parameters and buffers
  std::vector<Parameter> distinct_parameters() const;

  struct Entry {
    NamedParameter parameter;
    Module* child = nullptr;  // when set, parameter.name is the child's name
    bool buffer = false;
  };
  std::vector<Entry> entries_;
};

// Draws every tensor whose purpose is its public name, so that two models with the same seed agree
// tensor by tensor whatever else they contain. N(0, std²).
void init_normal(const NamedParameter& p, uint64_t seed, double std);
// The same, uniform in [-bound, bound).
void init_uniform(const NamedParameter& p, uint64_t seed, double bound);
uint64_t name_hash(const std::string& name);  // FNV-1a

}  // namespace ebb
