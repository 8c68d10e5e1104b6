#include "nn/module.h"

#include <algorithm>
#include <set>

#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {

Tensor NamedParameter::value() const {
  return parameter.master().slice(0, begin, begin + rows).view(shape);
}

Tensor NamedParameter::grad() const {
  const Tensor g = parameter.grad();
  return g.defined() ? g.slice(0, begin, begin + rows).view(shape) : Tensor();
}

void Module::collect(const std::string& prefix, Kind kind, std::vector<NamedParameter>* out) const {
  for (const Entry& e : entries_) {
    if (e.child) {
      e.child->collect(prefix + e.parameter.name + ".", kind, out);
      continue;
    }
    if (e.buffer && kind == Kind::parameters) continue;
    out->push_back(e.parameter);
    out->back().name = prefix + e.parameter.name;
  }
}

std::vector<NamedParameter> Module::named_parameters() const {
  std::vector<NamedParameter> out;
  collect("", Kind::parameters, &out);
  return out;
}

std::vector<NamedParameter> Module::named_state() const {
  std::vector<NamedParameter> out;
  collect("", Kind::with_buffers, &out);
  return out;
}

std::vector<Parameter> Module::distinct_parameters() const {
  std::vector<Parameter> out;
  std::set<const Slot*> seen;
  for (const NamedParameter& p : named_state())
    if (seen.insert(p.parameter.slot().get()).second) out.push_back(p.parameter);
  return out;
}

int64_t Module::parameter_count() const {
  int64_t n = 0;
  for (const NamedParameter& p : named_parameters()) n += p.shape.numel();
  return n;
}

StateDict Module::state_dict() const {
  StateDict out;
  for (const NamedParameter& p : named_state()) out.emplace_back(p.name, p.value());
  return out;
}

void Module::load_state_dict(const StateDict& state) {
  std::map<std::string, Tensor> given(state.begin(), state.end());
  std::string problems;
  const std::vector<NamedParameter> mine = named_state();
  for (const NamedParameter& p : mine) {
    const auto it = given.find(p.name);
    if (it == given.end())
      problems += fmt::format("\n  missing {} {}", p.name, p.shape);
    else if (it->second.shape() != p.shape)
      problems += fmt::format("\n  {} is {}, want {}", p.name, it->second.shape(), p.shape);
    else if (!is_float(it->second.dtype()))
      problems += fmt::format("\n  {} is {}, want a float type", p.name, it->second.dtype());
  }
  std::set<std::string> names;
  for (const NamedParameter& p : mine) names.insert(p.name);
  for (const auto& [name, tensor] : given)
    if (!names.count(name)) problems += fmt::format("\n  unexpected {} {}", name, tensor.shape());
  check(problems.empty(), "load_state_dict: the tensors do not fit this model:{}", problems);
  for (const NamedParameter& p : mine) p.value().copy_(given.at(p.name));
  for (const Parameter& p : distinct_parameters()) p.refresh_shadow();
}

void Module::to(Device device) {
  for (const Parameter& p : distinct_parameters()) p.set_master(p.master().to(device));
}

void Module::enable_bf16() {
  for (const Parameter& p : distinct_parameters())
    if (p.master().dim() >= 2 && p.uses_shadow()) p.enable_shadow();
}

void Module::zero_grad() {
  for (const Parameter& p : distinct_parameters()) p.zero_grad();
}

Parameter Module::register_parameter(const std::string& name, Tensor master, WeightDecay decay,
                                     double lr_factor) {
  Parameter p(std::move(master));
  const Shape shape = p.master().shape();
  entries_.push_back(
      {{name, p, 0, shape.empty() ? 1 : shape[0], shape, decay, lr_factor}, nullptr});
  return p;
}

Parameter Module::register_buffer(const std::string& name, Tensor values) {
  Parameter p = register_parameter(name, std::move(values), WeightDecay::off);
  p.keep_f32();
  entries_.back().buffer = true;
  return p;
}

Parameter Module::register_fused(std::span<const FusedPart> parts, int64_t row_multiple,
                                 WeightDecay decay) {
  int64_t rows = 0;
  const int64_t columns = parts[0].shape.from(1).numel();
  for (const FusedPart& part : parts) {
    check(part.shape.from(1).numel() == columns, "register_fused: {} is {}, want rows of {}",
          part.name, part.shape, columns);
    rows += part.shape[0];
  }
  rows = (rows + row_multiple - 1) / row_multiple * row_multiple;
  Parameter p(Tensor::zeros({rows, columns}));
  int64_t begin = 0;
  for (const FusedPart& part : parts) {
    entries_.push_back({{part.name, p, begin, part.shape[0], part.shape, decay}, nullptr});
    begin += part.shape[0];
  }
  return p;
}

void Module::register_module(const std::string& name, Module& child) {
  Entry e;
  e.parameter.name = name;
  e.child = &child;
  entries_.push_back(std::move(e));
}

uint64_t name_hash(const std::string& name) {
  uint64_t h = 14695981039346656037ull;
  for (unsigned char c : name) h = (h ^ c) * 1099511628211ull;
  return h;
}

void init_uniform(const NamedParameter& p, uint64_t seed, double bound) {
  Tensor drawn = Tensor::empty(p.shape, DType::f32);
  fill_uniform(drawn, {seed, name_hash(p.name)}, -bound, bound);
  p.value().copy_(drawn);
}

void init_normal(const NamedParameter& p, uint64_t seed, double std) {
  Tensor drawn = Tensor::empty(p.shape, DType::f32);
  fill_normal(drawn, {seed, name_hash(p.name)}, 0, std);
  p.value().copy_(drawn);
}

}  // namespace ebb
