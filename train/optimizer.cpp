#include "train/optimizer.h"

#include <algorithm>
#include <map>
#include <set>

#include "tensor/check.h"

namespace ebb {

std::vector<ParamGroup> decay_groups(const std::vector<NamedParameter>& parameters,
                                     double weight_decay, bool decay_all, LearningRates rates) {
  std::vector<ParamGroup> groups;
  for (const NamedParameter& p : parameters) {
    const double decay = decay_all || p.decay == WeightDecay::on ? weight_decay : 0;
    const double scale = rates == LearningRates::by_model ? p.lr_factor : 1;
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const ParamGroup& g) {
      return g.weight_decay == decay && g.lr_scale == scale;
    });
    if (same == groups.end())
      groups.push_back({.parameters = {p}, .weight_decay = decay, .lr_scale = scale});
    else
      same->parameters.push_back(p);
  }
  return groups;
}

AdamW::AdamW(const std::vector<ParamGroup>& groups, const AdamWConfig& config)
    : options_{config.beta1, config.beta2, config.eps} {
  check(config.beta1 >= 0 && config.beta1 < 1 && config.beta2 >= 0 && config.beta2 < 1,
        "AdamW: betas {} and {}, want [0, 1)", config.beta1, config.beta2);
  check(float(config.eps) > 0, "AdamW: eps {} must be positive in f32", config.eps);  // 0/0
  check(config.clip >= 0, "AdamW: clip {} must not be negative", config.clip);
  for (const ParamGroup& group : groups)
    for (const NamedParameter& p : group.parameters) add(p, group);
  check(!entries_.empty(), "AdamW: no parameters");
  const Device device = entries_[0].parameter.master().device();
  scalars_ = adamw_scalars({.lr = config.lr, .max_norm = config.clip}, device);
  squares_ = Tensor::zeros({}, DType::f64, device);
}

void AdamW::add(const NamedParameter& p, const ParamGroup& group) {
  const auto same = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) {
    return e.parameter.slot() == p.parameter.slot();
  });
  if (same == entries_.end()) {
    const Tensor& master = p.parameter.master();
    entries_.push_back({p.parameter,
                        {p},
                        Tensor::zeros_like(master),
                        Tensor::zeros_like(master),
                        group.weight_decay,
                        group.lr_scale});
    return;
  }
  check(same->weight_decay == group.weight_decay && same->lr_scale == group.lr_scale,
        "AdamW: {} and {} are one tensor in memory, in groups that differ", same->names[0].name,
        p.name);
  // Tied names share their moments; the first one stands for all in the state.
  for (const NamedParameter& known : same->names)
    if (known.begin == p.begin && known.rows == p.rows) return;
  same->names.push_back(p);
}

int64_t AdamW::state_bytes() const {
  int64_t bytes = 0;
  for (const Entry& e : entries_) bytes += e.m.nbytes() + e.v.nbytes();
  return bytes;
}

void AdamW::zero_grad() {
  std::vector<Tensor> gradients;
  for (const Entry& e : entries_)
    if (e.parameter.grad().defined()) gradients.push_back(e.parameter.grad());
  gradients_.set(std::move(gradients), "zero_grad");
  zero_all(gradients_);
}

const Tensor& AdamW::gradient_squares() {
  std::vector<Tensor> gradients;
  std::vector<AdamWTensor> tensors;
  for (const Entry& e : entries_) {
    const Tensor& master = e.parameter.master();
    check(master.device() == e.m.device() && master.dtype() == e.m.dtype() &&
              master.shape() == e.m.shape(),
          "AdamW: {} is {} {} on {}, its moments are {} {} on {}; build the optimizer after moving "
          "the model",
          e.names[0].name, master.dtype(), master.shape(), master.device(), e.m.dtype(),
          e.m.shape(), e.m.device());
    const Tensor grad = e.parameter.grad();
    if (!grad.defined()) continue;
    gradients.push_back(grad);
    tensors.push_back({master, grad, e.m, e.v, e.parameter.shadow(), e.weight_decay, e.lr_scale});
  }
  list_.set(std::move(tensors));
  gradients_.set(std::move(gradients), "AdamW");
  sum_of_squares(gradients_, squares_);
  return squares_;
}

void AdamW::apply() {
  adamw_begin(scalars_, squares_, options_);
  adamw(list_, scalars_, options_);
}

void AdamW::set_lr(double lr) {
  adamw_scalar(scalars_, AdamWScalar::lr).copy_(Tensor::full({}, lr, DType::f64));
}

StateDict AdamW::state_dict() const {
  StateDict out;
  for (const Entry& e : entries_)
    for (const NamedParameter& p : e.names) {
      const auto part = [&](const Tensor& t) {
        return t.dim() == 0 ? t : t.slice(0, p.begin, p.begin + p.rows).view(p.shape);
      };
      out.emplace_back(p.name + ".exp_avg", part(e.m));
      out.emplace_back(p.name + ".exp_avg_sq", part(e.v));
    }
  const AdamWScalars s = read();
  out.emplace_back("step", Tensor::full({}, s.step, DType::i64));
  out.emplace_back("skipped", Tensor::full({}, s.skipped, DType::i64));
  return out;
}

void AdamW::load_state_dict(const StateDict& state) {
  const std::map<std::string, Tensor> given(state.begin(), state.end());
  const StateDict mine = state_dict();
  std::set<std::string> names;
  std::string problems;
  for (const auto& [name, tensor] : mine) {
    names.insert(name);
    const auto it = given.find(name);
    if (it == given.end())
      problems += fmt::format("\n  missing {} {}", name, tensor.shape());
    else if (it->second.shape() != tensor.shape())
      problems += fmt::format("\n  {} is {}, want {}", name, it->second.shape(), tensor.shape());
    else if (it->second.dtype() != tensor.dtype())  // a narrower type would not resume exactly
      problems += fmt::format("\n  {} is {}, want {}", name, it->second.dtype(), tensor.dtype());
  }
  for (const auto& [name, tensor] : given)
    if (!names.count(name)) problems += fmt::format("\n  unexpected {} {}", name, tensor.shape());
  check(problems.empty(), "AdamW: the state does not fit these parameters:{}", problems);
  for (const auto& [name, tensor] : mine)
    if (is_float(tensor.dtype())) tensor.copy_(given.at(name));
  AdamWScalars s = read();
  s.step = given.at("step").item();
  s.skipped = given.at("skipped").item();
  scalars_.copy_(adamw_scalars(s, Device::cpu()));
}

}  // namespace ebb
