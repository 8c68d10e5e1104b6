#include "autograd/tape.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <queue>
#include <unordered_map>
#include <unordered_set>

#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {
namespace {

thread_local bool grad_mode = true;
thread_local bool anomaly_mode = false;
std::atomic<uint64_t> next_sequence{1};

// dst += src in the accumulator's type. CPU or CUDA, any strides of src.
void add_into(const Tensor& dst, const Tensor& src);

bool all_finite(const Tensor& t) {
  if (!is_float(t.dtype()) || t.numel() == 0) return true;
  if constexpr (kWithCuda)
    if (t.on_cuda()) return gpu::all_finite(t);
  const Tensor dense = t.contiguous();
  return visit_float(t.dtype(), [&]<class T>() {
    const T* p = dense.data<T>();
    bool ok = true;
#pragma omp parallel for reduction(&& : ok) if (dense.numel() > 65536)
    for (int64_t i = 0; i < dense.numel(); ++i) ok = ok && std::isfinite(acc_t<T>(p[i]));
    return ok;
  });
}

void check_finite(const char* op, const char* pass, const char* what, size_t i, const Tensor& t) {
  if (t.defined() && !all_finite(t))
    fail("anomaly: {} {} produced a non-finite value in {} {} of shape {}", op, pass, what, i,
         t.shape());
}

}  // namespace

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
  const Tensor& t = dy_[size_t(output)];
  if (t.defined()) return t;
  const Node::OutputInfo& info = node_.outputs[size_t(output)];
  return Tensor::zeros(info.shape, info.dtype, info.device);
}

void BackwardContext::grad(int input, Tensor gradient) {
  const Slot* s = node_.inputs.at(size_t(input)).get();
  check(s != nullptr, "{}: gradient handed over for input {} that needs none", node_.op, input);
  check(gradient.shape() == s->shape, "{}: gradient of input {} is {}, the input is {}", node_.op,
        input, gradient.shape(), s->shape);
  check(gradient.dtype() == s->dtype || gradient.dtype() == accumulate_type(s->dtype),
        "{}: gradient of input {} is {}, the input is {}", node_.op, input, gradient.dtype(),
        s->dtype);
  grads_[size_t(input)] = std::move(gradient);
}

Tensor BackwardContext::accumulator(int input) const {
  const Slot* s = node_.inputs.at(size_t(input)).get();
  // Hooks want to see the gradient by itself, so no adding in place then.
  if (!s || !s->is_leaf() || !s->hooks.empty() || !s->grad.defined()) return {};
  if (s->grad.dtype() != s->grad_dtype || !s->grad.is_contiguous()) return {};
  return s->grad;
}

void BackwardContext::grad_accumulated(int input) {
  const Slot* s = node_.inputs.at(size_t(input)).get();
  check(s && s->grad.defined(), "{}: input {} has no accumulator", node_.op, input);
  s->grad.bump_version();
  accumulated_[size_t(input)] = true;
}

bool will_record(std::span<const Var> inputs) {
  return grad_mode &&
         std::any_of(inputs.begin(), inputs.end(), [](const Var& v) { return v.requires_grad(); });
}

std::vector<Var> record(const char* op, std::span<const Var> inputs, std::vector<Tensor> saved,
                        std::vector<Tensor> outputs, BackwardFn backward) {
  if (anomaly_mode)
    for (size_t i = 0; i < outputs.size(); ++i)
      check_finite(op, "forward", "output", i, outputs[i]);
  std::vector<Var> vars;
  vars.reserve(outputs.size());
  if (!will_record(inputs)) {
    for (Tensor& t : outputs) vars.emplace_back(std::move(t));
    return vars;
  }
  auto node = std::make_shared<Node>();
  node->op = op;
  node->sequence = next_sequence++;
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

NoGrad::NoGrad() : previous_(grad_mode) { grad_mode = false; }
NoGrad::~NoGrad() { grad_mode = previous_; }
bool grad_enabled() { return grad_mode; }

AnomalyMode::AnomalyMode() : previous_(anomaly_mode) { anomaly_mode = true; }
AnomalyMode::~AnomalyMode() { anomaly_mode = previous_; }

namespace {

struct GradMode {  // sets the mode for a scope, either way
  explicit GradMode(bool on) : previous(grad_mode) { grad_mode = on; }
  ~GradMode() { grad_mode = previous; }
  bool previous;
};

// Gradients on their way: for each node not yet run, what has arrived at its outputs.
class Walk {
 public:
  explicit Walk(bool retain) : retain_(retain) {}

  // The slot's gradient has one more term. `fresh`: nobody else holds this tensor.
  void arrive(const std::shared_ptr<Slot>& slot, Tensor gradient, bool fresh) {
    if (slot->is_leaf()) {
      Entry& e = leaves_[slot.get()];
      e.slot = slot;
      if (slot->hooks.empty())
        add_to_leaf(*slot, gradient, fresh);  // no need to wait
      else
        add(e.gradient, std::move(gradient), fresh, e.fresh);
      return;
    }
    Node* node = slot->producer.get();
    check(!node->released,
          "backward: the graph through {} was already consumed; pass retain to keep it", node->op);
    auto [it, added] = pending_.try_emplace(node);
    Pending& p = it->second;
    if (added) {
      p.node = slot->producer;
      p.dy.resize(node->outputs.size());
      p.fresh.resize(node->outputs.size());
      p.slots.resize(node->outputs.size());
      queue_.push(node);
    }
    const size_t i = size_t(slot->index);
    bool owned = p.fresh[i];
    add(p.dy[i], std::move(gradient), fresh, owned);
    p.fresh[i] = owned;
    p.slots[i] = slot;
  }

  void run() {
    while (!queue_.empty()) {
      Node* node = queue_.top();
      queue_.pop();
      auto handle = pending_.extract(node);
      step(std::move(handle.mapped()));
    }
    for (auto& [ptr, e] : leaves_) {
      if (e.gradient.defined())
        add_to_leaf(*e.slot, with_hooks(*e.slot, std::move(e.gradient)), false);
      // Copied: a callback may add or remove callbacks.
      for (const auto callbacks = e.slot->after_accumulate; const auto& fn : callbacks)
        if (!e.notified) fn(*e.slot);
    }
  }

 private:
  struct Entry {
    std::shared_ptr<Slot> slot;
    Tensor gradient;
    bool fresh = false;
    bool notified = false;
  };
  struct Pending {
    std::shared_ptr<Node> node;
    std::vector<Tensor> dy;
    std::vector<bool> fresh;
    std::vector<std::shared_ptr<Slot>> slots;
  };
  struct Later {
    bool operator()(const Node* a, const Node* b) const { return a->sequence < b->sequence; }
  };

  static void add(Tensor& sum, Tensor term, bool term_fresh, bool& sum_fresh) {
    if (!sum.defined()) {
      sum = std::move(term);
      sum_fresh = term_fresh;
      return;
    }
    if (!sum_fresh || !sum.is_contiguous()) {  // someone else may be looking at it
      const DType wide = term.dtype() == sum.dtype() ? sum.dtype() : accumulate_type(sum.dtype());
      Tensor copy_of_sum = Tensor::empty(sum.shape(), wide, sum.device());
      copy(copy_of_sum, sum);
      sum = std::move(copy_of_sum);
      sum_fresh = true;
    }
    add_into(sum, term);
  }

  static Tensor with_hooks(const Slot& slot, Tensor gradient) {
    for (const auto& hook : slot.hooks) {
      const Tensor replaced = hook(gradient);
      if (!replaced.defined()) continue;
      check(replaced.shape() == slot.shape, "gradient hook: returned {}, want {}", replaced.shape(),
            slot.shape);
      gradient = replaced;
    }
    return gradient;
  }

  static void add_to_leaf(Slot& slot, const Tensor& gradient, bool fresh) {
    if (slot.grad.defined()) {
      add_into(slot.grad, gradient);
      slot.grad.bump_version();
    } else if (fresh && gradient.dtype() == slot.grad_dtype && gradient.is_contiguous()) {
      slot.grad = gradient;
    } else {
      slot.grad = Tensor::empty(slot.shape, slot.grad_dtype, slot.device);
      copy(slot.grad, gradient);
    }
  }

  void step(Pending p) {
    Node& node = *p.node;
    for (size_t i = 0; i < p.dy.size(); ++i) {
      if (!p.dy[i].defined()) continue;
      Slot& slot = *p.slots[i];
      // An operator sees the dtype it produced, whatever the terms were summed in.
      Tensor dy = with_hooks(slot, std::move(p.dy[i]).to(slot.dtype));
      if (slot.retain_grad) slot.grad = dy.clone();
      p.dy[i] = std::move(dy);
    }
    BackwardContext ctx(node, std::move(p.dy));
    {
      OpScope scope(node.op);
      node.backward(ctx);
    }
    std::vector<Tensor> grads = ctx.take_gradients();
    for (size_t i = 0; i < grads.size(); ++i) {
      if (anomaly_mode) check_finite(node.op, "backward", "the gradient of input", i, grads[i]);
      if (ctx.accumulated(int(i))) leaves_[node.inputs[i].get()].slot = node.inputs[i];
      if (!grads[i].defined() || !node.inputs[i]) continue;
      // Fresh if nothing but this vector refers to the storage (an op may pass dy through).
      const bool fresh = grads[i].storage().use_count() == 1;
      arrive(node.inputs[i], std::move(grads[i]), fresh);
    }
    if (!retain_) {
      node.released = true;
      node.saved.clear();
      node.saved_versions.clear();
      node.backward = nullptr;
    }
  }

  bool retain_;
  std::unordered_map<Node*, Pending> pending_;
  std::unordered_map<Slot*, Entry> leaves_;
  std::priority_queue<Node*, std::vector<Node*>, Later> queue_;
};

}  // namespace

void backward(const Var& root, const Tensor& upstream, BackwardOptions options) {
  backward(std::span(&root, 1), std::span(&upstream, 1), options);
}

void backward(std::span<const Var> roots, std::span<const Tensor> upstream,
              BackwardOptions options) {
  check(upstream.size() == roots.size(), "backward: {} roots, {} upstream gradients", roots.size(),
        upstream.size());
  const GradMode off(false);
  Walk walk(options.retain);
  for (size_t i = 0; i < roots.size(); ++i) {
    const Var& root = roots[i];
    check(root.requires_grad(),
          "backward: root {} does not depend on anything that requires a "
          "gradient",
          i);
    Tensor dy = upstream[i];
    if (!dy.defined()) {
      check(root.numel() == 1, "backward: root {} has shape {}; give an upstream gradient", i,
            root.shape());
      dy = Tensor::full(root.shape(), 1, root.dtype(), root.device());
    }
    check(dy.shape() == root.shape(), "backward: upstream gradient {} for a root of shape {}",
          dy.shape(), root.shape());
    walk.arrive(root.slot(), dy.to(root.dtype(), root.device()), false);
  }
  walk.run();
}

namespace {

void collect_nodes(std::span<const Var> roots, const std::function<void(const Node&)>& visit,
                   uint64_t after = 0) {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> work;
  const auto push = [&](const std::shared_ptr<Slot>& s) {
    if (s && s->producer && s->producer->sequence > after && seen.insert(s->producer.get()).second)
      work.push_back(s->producer.get());
  };
  for (const Var& r : roots) push(r.slot());
  while (!work.empty()) {
    const Node* n = work.back();
    work.pop_back();
    visit(*n);
    for (const auto& s : n->inputs) push(s);
  }
}

}  // namespace

int64_t saved_bytes(std::span<const Var> roots, std::span<const Tensor> except) {
  std::unordered_set<const Storage*> seen;
  for (const Tensor& t : except) seen.insert(t.storage().get());
  int64_t bytes = 0;
  collect_nodes(roots, [&](const Node& n) {
    for (const Tensor& t : n.saved)
      if (t.defined() && seen.insert(t.storage().get()).second)
        bytes += int64_t(t.storage()->bytes);
  });
  return bytes;
}

std::vector<Var> recompute(std::function<std::vector<Var>(std::span<const Var>)> fn,
                           std::vector<Var> inputs) {
  if (!grad_mode) return fn(inputs);
  const RandomState before = random_state();
  std::vector<Tensor> outputs, saved;
  {
    const NoGrad off;
    for (Var& y : fn(inputs)) outputs.push_back(y.value());
  }
  for (const Var& x : inputs) saved.push_back(x.value());
  // The outputs must ask for gradients even when only parameters captured by fn want them, so an
  // always-present leaf stands in as an input.
  std::vector<Var> recorded = inputs;
  recorded.push_back(Var::leaf(Tensor::zeros({}, DType::f32)));
  return record("recompute", recorded, std::move(saved), std::move(outputs),
                [fn = std::move(fn), before, n = int(inputs.size())](BackwardContext& ctx) {
                  const RandomState now = random_state();
                  const uint64_t start = next_sequence++;
                  std::vector<Var> in, roots;
                  std::vector<Tensor> dy;
                  {
                    const GradMode on(true);
                    random_state() = before;
                    for (int i = 0; i < n; ++i)
                      in.push_back(ctx.needs(i) ? Var::leaf(ctx.saved(i)) : Var(ctx.saved(i)));
                    const std::vector<Var> again = fn(in);
                    random_state() = now;
                    for (size_t i = 0; i < again.size(); ++i) {
                      if (!again[i].requires_grad() || !ctx.has_dy(int(i))) continue;
                      roots.push_back(again[i]);
                      dy.push_back(ctx.dy(int(i)));
                    }
                  }
                  collect_nodes(
                      roots,
                      [&](const Node& node) {
                        for (const auto& s : node.inputs)
                          check(!s || !s->producer || s->producer->sequence > start,
                                "recompute: {} uses a recorded Var captured from outside; pass it "
                                "through `inputs`",
                                node.op);
                      },
                      start);
                  if (!roots.empty()) backward(roots, dy);
                  for (int i = 0; i < n; ++i)
                    if (ctx.needs(i) && in[size_t(i)].grad().defined())
                      ctx.grad(i, in[size_t(i)].grad());
                });
}

namespace {

void add_into(const Tensor& dst, const Tensor& src) {
  const Tensor term = src.to(dst.device());
  if constexpr (kWithCuda)
    if (dst.on_cuda()) return gpu::add_into(dst, term);
  const Tensor dense = term.contiguous();
  const int64_t n = dst.numel();
  visit_float(dst.dtype(), [&]<class D>() {
    visit_float(dense.dtype(), [&]<class S>() {
      D* d = dst.data<D>();
      const S* s = dense.data<S>();
#pragma omp parallel for if (n > 65536)
      for (int64_t i = 0; i < n; ++i) d[i] = D(acc_t<D>(d[i]) + acc_t<D>(s[i]));
    });
  });
}

}  // namespace

}  // namespace ebb
