#include "autograd/node.h"

#include <algorithm>
#include <atomic>

#include "autograd/tape.h"
#include "autograd/tape_state.h"
#include "tensor/check.h"
#include "tensor/compare.h"

namespace ebb {

namespace detail {

TapeState& tape_state() {
  thread_local TapeState state;
  return state;
}

uint64_t next_sequence() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

void FirstRun::note(const char* op, const Var& v) {
  check(v.slot()->is_leaf(),
        "recompute: {} uses a recorded Var of shape {} captured from outside; pass it through "
        "`inputs`",
        op, v.shape());
  if (seen_.insert(v.slot().get()).second) captured.push_back(v);
}

void check_finite(const char* op, const char* pass, const char* what, size_t i, const Tensor& t) {
  check(!t.defined() || all_finite(t),
        "anomaly: {} {} produced a non-finite value in {} {} of shape {}", op, pass, what, i,
        t.defined() ? t.shape() : Shape());
}

}  // namespace detail

using detail::tape_state;

Node::~Node() {
  // A chain of nodes owned only by its successor would recurse once per node; a thread-local
  // worklist flattens that.
  thread_local std::vector<std::shared_ptr<Slot>>* pending = nullptr;
  if (pending) {
    for (auto& s : inputs)
      if (s) pending->push_back(std::move(s));
    return;
  }
  std::vector<std::shared_ptr<Slot>> work;
  pending = &work;
  for (auto& s : inputs)
    if (s) work.push_back(std::move(s));
  while (!work.empty()) {
    const std::shared_ptr<Slot> s = std::move(work.back());
    work.pop_back();
  }
  pending = nullptr;
}

BackwardContext::BackwardContext(const Node& node, std::vector<Tensor> dy)
    : node_(node),
      dy_(std::move(dy)),
      grads_(node.inputs.size()),
      accumulated_(node.inputs.size(), false) {}

const Tensor& BackwardContext::saved(int i) const {
  const Tensor& t = node_.saved.at(size_t(i));
  check(!t.defined() || t.version() == node_.saved_versions[size_t(i)],
        "{}: a tensor of shape {} saved for backward was changed in place after the forward pass",
        node_.op, t.shape());
  return t;
}

Tensor BackwardContext::dy(int output) const {
  const Tensor& t = dy_.at(size_t(output));
  if (t.defined()) return t;
  const Node::OutputInfo& info = node_.outputs[size_t(output)];
  return Tensor::zeros(info.shape, info.dtype, info.device);
}

void BackwardContext::grad(int input, Tensor gradient) {
  const Slot* s = node_.inputs.at(size_t(input)).get();
  check(s != nullptr, "{}: gradient handed over for input {} that needs none", node_.op, input);
  if (!gradient.defined()) return;  // nothing flows that way
  check(!grads_[size_t(input)].defined() && !accumulated_[size_t(input)],
        "{}: gradient of input {} handed over twice", node_.op, input);
  check(gradient.shape() == s->shape, "{}: gradient of input {} is {}, the input is {}", node_.op,
        input, gradient.shape(), s->shape);
  check(gradient.dtype() == s->dtype || gradient.dtype() == accumulate_type(s->dtype),
        "{}: gradient of input {} is {}, the input is {}", node_.op, input, gradient.dtype(),
        s->dtype);
  check(gradient.device() == s->device, "{}: gradient of input {} is on {}, the input on {}",
        node_.op, input, gradient.device(), s->device);
  grads_[size_t(input)] = std::move(gradient);
}

Tensor BackwardContext::accumulator(int input) const {
  const Slot* s = node_.inputs.at(size_t(input)).get();
  // Hooks want to see the gradient by itself, so no adding in place then.
  if (!s || !s->is_leaf() || !s->hooks.empty() || !s->grad.defined()) return {};
  if (s->grad.dtype() != s->grad_dtype || !s->grad.is_contiguous()) return {};
  if (s->grad.shape() != s->shape || s->grad.device() != s->device) return {};
  if (s->grad.storage()->owner) return {};  // read-only: backward() adds to a copy
  return s->grad;
}

void BackwardContext::grad_accumulated(int input) {
  check(accumulator(input).defined(), "{}: input {} has no accumulator", node_.op, input);
  check(!grads_[size_t(input)].defined() && !accumulated_[size_t(input)],
        "{}: gradient of input {} handed over twice", node_.op, input);
  node_.inputs[size_t(input)]->grad.bump_version();
  accumulated_[size_t(input)] = true;
}

bool will_record(std::span<const Var> inputs) {
  return tape_state().recording &&
         std::any_of(inputs.begin(), inputs.end(), [](const Var& v) { return v.requires_grad(); });
}

std::vector<Var> record(const char* op, std::span<const Var> inputs, std::vector<Tensor> saved,
                        std::vector<Tensor> outputs, BackwardFn backward) {
  if (tape_state().anomaly)
    for (size_t i = 0; i < outputs.size(); ++i)
      detail::check_finite(op, "forward", "output", i, outputs[i]);
  if (detail::FirstRun* run = tape_state().first_run)
    for (const Var& v : inputs)
      if (v.requires_grad()) run->note(op, v);
  std::vector<Var> vars;
  vars.reserve(outputs.size());
  if (!will_record(inputs)) {
    for (Tensor& t : outputs) vars.emplace_back(std::move(t));
    return vars;
  }
  auto node = std::make_shared<Node>();
  node->op = op;
  node->sequence = detail::next_sequence();
  node->inputs.reserve(inputs.size());
  for (const Var& v : inputs) node->inputs.push_back(v.slot());
  node->saved_versions.reserve(saved.size());
  for (const Tensor& t : saved) node->saved_versions.push_back(t.version());
  node->saved = std::move(saved);
  node->backward = std::move(backward);
  for (size_t i = 0; i < outputs.size(); ++i) {
    Tensor& t = outputs[i];
    if (!t.defined() || !is_float(t.dtype())) {
      node->outputs.push_back({});
      vars.emplace_back(std::move(t));
      continue;
    }
    auto slot = std::make_shared<Slot>();
    slot->producer = node;
    slot->index = int(i);
    slot->dtype = slot->grad_dtype = t.dtype();
    slot->shape = t.shape();
    slot->device = t.device();
    node->outputs.push_back({t.shape(), t.dtype(), t.device(), slot});
    vars.emplace_back(std::move(t), std::move(slot));
  }
  return vars;
}

NoGrad::NoGrad() : previous_(tape_state().recording), first_run_(tape_state().first_run) {
  tape_state().recording = false;
  tape_state().first_run = nullptr;  // what happens under NoGrad wants no gradient later either
}
NoGrad::~NoGrad() {
  tape_state().recording = previous_;
  tape_state().first_run = first_run_;
}
bool grad_enabled() { return tape_state().recording; }

AnomalyMode::AnomalyMode() : previous_(tape_state().anomaly) { tape_state().anomaly = true; }
AnomalyMode::~AnomalyMode() { tape_state().anomaly = previous_; }

}  // namespace ebb
