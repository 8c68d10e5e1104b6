#include "tools/verify_case.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "autograd/tape.h"
#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/device_flags.h"
#include "tensor/safetensors.h"
#include "tools/verify_limits.h"

namespace ebb::tools {
namespace {

// Values of one run, f64 on the CPU: "out.y", "grad.x", ...
using Values = std::map<std::string, Tensor>;

struct Spec {
  Device device = {};
  DType compute = DType::f64;   // what the operator runs in
  DType rounding = DType::f64;  // what inputs and upstream gradients are rounded to first
};

Tensor rounded(const Tensor& t, DType rounding, bool keep_f32) {
  if (!is_float(t.dtype()) || rounding != DType::bf16 || keep_f32) return t;
  return t.to(DType::bf16).to(DType::f32);
}

Values run(const GoldenCase& c, const Adapter& adapter, const Spec& spec) {
  std::map<std::string, Var> inputs;
  for (const auto& [name, value] : c.in) {
    const auto& f32 = adapter.f32_inputs;
    const bool keep = std::find(f32.begin(), f32.end(), name) != f32.end();
    if (!is_float(value.dtype())) {
      inputs[name] = Var(value.to(spec.device));
      continue;
    }
    const DType dtype = keep && spec.compute == DType::bf16 ? DType::f32 : spec.compute;
    inputs[name] = Var::leaf(rounded(value, spec.rounding, keep).to(dtype, spec.device).clone());
  }
  const CaseInputs wrapped(c.parameters, inputs);
  const CaseOutputs outputs = adapter.run(wrapped);
  Values values;
  std::vector<Var> roots;
  std::vector<Tensor> upstream;
  for (const auto& [name, want] : c.out) {
    const auto found = outputs.find(name);
    check(found != outputs.end(), "{}: the adapter gives no output {}", c.op, name);
    const Var& y = found->second;
    check(y.shape() == want.shape(), "{}: out.{} is {}, golden {}", c.op, name, y.shape(),
          want.shape());
    values["out." + name] = y.value().to(DType::f64, Device::cpu());
    if (!c.dout.count(name)) continue;
    check(y.requires_grad(), "{}: out.{} has a golden upstream gradient but none in ebb", c.op,
          name);
    roots.push_back(y);
    upstream.push_back(rounded(c.dout.at(name), spec.rounding, false).to(y.dtype(), spec.device));
  }
  if (!roots.empty()) backward(roots, upstream);
  check_device_flags(spec.device);
  for (const auto& [name, want] : c.grad) {
    const Var& x = inputs.at(name);
    // An input that touches nothing with an upstream gradient has gradient 0.
    values["grad." + name] = x.grad().defined() ? x.grad().to(DType::f64, Device::cpu())
                                                : Tensor::zeros(want.shape(), DType::f64);
    check(values["grad." + name].shape() == want.shape(), "{}: grad.{} is {}, golden {}", c.op,
          name, values["grad." + name].shape(), want.shape());
  }
  return values;
}

Values golden_values(const GoldenCase& c) {
  Values values;
  for (const auto& [name, t] : c.out) values["out." + name] = t.to(DType::f64);
  for (const auto& [name, t] : c.grad) values["grad." + name] = t.to(DType::f64);
  return values;
}

// What kind of decays the case says it has, or nothing.
std::string decay_of(const GoldenCase& c) {
  const auto found = c.parameters.find("decay");
  return found != c.parameters.end() && found->is_string() ? found->get<std::string>() : "";
}

// Outputs first.
std::vector<std::string> compared_names(const GoldenCase& c) {
  std::vector<std::string> names;
  for (const auto& [name, unused] : c.out) names.push_back("out." + name);
  for (const auto& [name, unused] : c.grad) names.push_back("grad." + name);
  return names;
}

double product_norm(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i] * x[i] * y[i];
  return std::sqrt(sum);
}

double difference_norm(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
  return std::sqrt(sum);
}

// Measures: "relative" ‖x−ref‖/‖ref‖; "exact zero" ‖x‖ where the reference is all zero;
// "cancellation" ‖x−ref‖ / (‖q·dq‖ + ‖k·dk‖), for decays almost 0.
VerifyResult compare(const GoldenCase& c, const std::string& name, const Values& got,
                     const Values& want, const Limits& limits, double cancellation_limit) {
  const Tensor &x = got.at(name), &ref = want.at(name);
  VerifyResult r{.name = name};
  if (ref.numel() && euclidean_norm(ref) == 0) {
    r.measure = "exact zero";
    r.error = euclidean_norm(x);
    r.limit = 0;
  } else if (measured_against_cancellation(c.op, c.name, decay_of(c), name)) {
    r.measure = "cancellation";
    r.error = difference_norm(x, ref) / (product_norm(c.in.at("q"), want.at("grad.q")) +
                                         product_norm(c.in.at("k"), want.at("grad.k")));
    r.limit = cancellation_limit;
  } else {
    r.error = relative_error(x, ref);
    r.limit = name.starts_with("out.") ? limits.output : limits.gradient;
  }
  return r;
}

// The convolution keeps four inputs of the past and reads three: the oldest has gradient zero.
void check_unused_cache_column(const GoldenCase& c, const Values& got,
                               std::vector<VerifyResult>& results) {
  const auto grad = got.find("grad.cache");
  if (c.op != "short_conv" || grad == got.end()) return;
  results.push_back({.name = "grad.cache[:,:,0]",
                     .error = euclidean_norm(grad->second.slice(2, 0, 1)),
                     .measure = "exact zero"});
}

std::map<std::string, Tensor>* group_of(GoldenCase& c, const std::string& prefix) {
  if (prefix == "in") return &c.in;
  if (prefix == "out") return &c.out;
  if (prefix == "dout") return &c.dout;
  if (prefix == "grad") return &c.grad;
  return nullptr;
}

void check_fits(const GoldenCase& c) {
  check(!c.in.empty() && !c.out.empty(), "no in.* or no out.* tensor");
  for (const auto& [name, t] : c.dout)
    check(c.out.count(name) && c.out.at(name).shape() == t.shape(), "dout.{} fits no output", name);
  for (const auto& [name, t] : c.grad)
    check(c.in.count(name) && c.in.at(name).shape() == t.shape(), "grad.{} fits no input", name);
  check(!c.grad.empty() || c.dout.empty(), "upstream gradients, but no gradients");
}

}  // namespace

Var CaseInputs::operator[](const std::string& name) const {
  const auto found = inputs_.find(name);
  return found == inputs_.end() ? Var() : found->second;
}

double CaseInputs::number(const std::string& parameter) const {
  check(has(parameter) && parameters_[parameter].is_number(), "parameter {} is missing", parameter);
  return parameters_[parameter].get<double>();
}

int64_t CaseInputs::whole(const std::string& parameter) const {
  const double v = number(parameter);
  check(std::abs(v) <= 0x1p53 && v == std::floor(v), "parameter {} is {}, want a whole number",
        parameter, v);
  return int64_t(v);
}

std::string CaseInputs::text(const std::string& parameter) const {
  check(has(parameter) && parameters_[parameter].is_string(), "parameter {} is missing", parameter);
  return parameters_[parameter].get<std::string>();
}

GoldenCase load_golden_case(const std::string& path) {
  const SafeTensors file(path);
  GoldenCase c;
  c.name = std::filesystem::path(path).stem().string();
  try {
    c.parameters = parse_json(file.metadata("case"), "metadata \"case\"");
    check(c.parameters.is_object() && c.parameters.contains("op"), "metadata names no op");
    c.op = c.parameters["op"].get<std::string>();
    if (c.parameters.contains("name")) c.name = c.parameters["name"].get<std::string>();
    for (const std::string& name : file.names()) {
      const size_t dot = name.find('.');
      auto* group = dot == std::string::npos ? nullptr : group_of(c, name.substr(0, dot));
      check(group, "unexpected tensor {}", name);
      const Tensor t = file.get(name).clone();
      check(!is_float(t.dtype()) || all_finite(t), "{} holds a NaN or infinity", name);
      (*group)[name.substr(dot + 1)] = is_float(t.dtype()) ? t.to(DType::f32) : t;
    }
    check_fits(c);
  } catch (const nlohmann::json::exception& e) {
    fail("{}: metadata \"case\" is not the JSON expected: {}", path, json_problem(e));
  } catch (const Error& e) {
    const std::string what = e.what();
    throw Error(what.find(path) == std::string::npos ? path + ": " + what : what);
  }
  return c;
}

std::vector<VerifyResult> verify_case(const GoldenCase& c, const Adapter& adapter, Device device,
                                      DType dtype) {
  const Values golden = golden_values(c);
  const std::vector<std::string> names = compared_names(c);
  const Limits limits = golden_limits(c.op, c.name, decay_of(c));
  std::vector<VerifyResult> results;
  const auto against_golden = [&](const Values& got, const std::string& prefix) {
    for (const std::string& name : names) {
      results.push_back(compare(c, name, got, golden, limits, kCancellationLimit));
      results.back().name = prefix + name;
    }
    check_unused_cache_column(c, got, results);
  };
  if (dtype != DType::bf16) {
    against_golden(run(c, adapter, {.device = device, .compute = dtype}), "");
    return results;
  }
  against_golden(run(c, adapter, {}), "f64 ");
  const Values exact = run(c, adapter, {.rounding = DType::bf16});
  const Values got =
      run(c, adapter, {.device = device, .compute = DType::bf16, .rounding = DType::bf16});
  for (const std::string& name : names) {
    VerifyResult r = compare(c, name, got, exact, kBf16Limits, kBf16Limits.gradient);
    r.golden_error = relative_error(got.at(name), golden.at(name));
    results.push_back(r);
  }
  check_unused_cache_column(c, got, results);
  return results;
}

}  // namespace ebb::tools
