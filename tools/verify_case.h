// Golden cases of operators: reading one, running it, comparing it.
// A case file holds in.<x>, out.<x>, dout.<x> (upstream gradients) and grad.<x>, the gradient of
// Σ dout·out, and a JSON text "case" with the parameters.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "autograd/var.h"
#include "tools/verify_result.h"

namespace ebb::tools {

struct GoldenCase {
  std::string op, name;
  nlohmann::json parameters;
  std::map<std::string, Tensor> in, out, dout, grad;  // on the CPU, floats in f32
};
// Throws, naming the file, when it is damaged or does not fit together.
GoldenCase load_golden_case(const std::string& path);

// What an adapter sees of a case: inputs by name, undefined where the case has none.
class CaseInputs {
 public:
  CaseInputs(const nlohmann::json& parameters, std::map<std::string, Var> inputs)
      : parameters_(parameters), inputs_(std::move(inputs)) {}
  Var operator[](const std::string& name) const;
  bool has(const std::string& parameter) const {  // null counts as absent
    return parameters_.contains(parameter) && !parameters_[parameter].is_null();
  }
  double number(const std::string& parameter) const;
  int64_t whole(const std::string& parameter) const;
  std::string text(const std::string& parameter) const;
  const std::map<std::string, Var>& all() const { return inputs_; }

 private:
  const nlohmann::json& parameters_;
  std::map<std::string, Var> inputs_;
};
using CaseOutputs = std::map<std::string, Var>;

// One golden operator in terms of ebb's operators.
struct Adapter {
  std::string op;
  CaseOutputs (*run)(const CaseInputs&);
  std::vector<std::string> f32_inputs = {};  // stay f32 beside bf16 activations
};
const std::vector<Adapter>& adapters();  // tools/verify_adapters.cpp

// f32 and f64: against the golden tensors. bf16 cannot be: rounding the inputs moves the truth. So
// first our own f64 on the CPU must meet the golden tensors from the golden inputs ("f64 ..."), and
// then bf16 must meet that f64 run, both from the same rounded inputs and upstream gradients.
std::vector<VerifyResult> verify_case(const GoldenCase& c, const Adapter& adapter, Device device,
                                      DType dtype);

}  // namespace ebb::tools
