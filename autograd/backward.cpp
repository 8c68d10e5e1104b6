// The walk. A first pass over the graph counts how many terms every gradient will have, so that
// the second, in reverse order of creation, knows when a leaf is complete.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "autograd/tape.h"
#include "autograd/tape_state.h"
#include "tensor/check.h"

namespace ebb {
namespace {

using SlotPtr = std::shared_ptr<Slot>;

Tensor dense_copy(const Tensor& t, DType type) {
  Tensor dense = Tensor::empty(t.shape(), type, t.device());
  copy(dense, t);
  return dense;
}

// A gradient being summed. `fresh`: nobody else holds the tensor, so it may be added to.
struct Sum {
  Tensor value;
  bool fresh = false;

  void add(Tensor term, bool term_fresh, DType type) {
    if (!value.defined()) {
      value = std::move(term);
      fresh = term_fresh;
      return;
    }
    const auto usable = [type](const Tensor& t, bool is_fresh) {
      return is_fresh && t.is_contiguous() && t.dtype() == type;
    };
    if (!usable(value, fresh) && usable(term, term_fresh)) {
      std::swap(value, term);
    } else if (!usable(value, fresh)) {
      value = dense_copy(value, type);
    }
    fresh = true;
    detail::add_into(value, term);
  }
};

struct Leaf {
  SlotPtr slot;
  int64_t waiting = 0;   // consumers that have not run yet
  bool reached = false;  // a gradient arrived
  Sum hooked;            // kept apart while hooks wait for the complete gradient
};

// What has arrived at the outputs of a node that has not run yet.
struct Arrivals {
  std::vector<Sum> dy;
  std::vector<SlotPtr> slots;
};

class Walk {
 public:
  explicit Walk(bool retain) : retain_(retain) {}

  // Collects every node behind the roots. Nothing is changed before this has succeeded.
  void survey(std::span<const Var> roots) {
    std::unordered_set<const Node*> seen;
    const auto edge = [&](const SlotPtr& s) {
      if (!s) return;
      if (s->is_leaf()) {
        Leaf& leaf = leaves_[s.get()];
        leaf.slot = s;
        ++leaf.waiting;
        return;
      }
      check(!s->producer->released,
            "backward: the graph through {} was already consumed; pass retain to keep it",
            s->producer->op);
      ++terms_[s.get()];
      if (seen.insert(s->producer.get()).second) order_.push_back(s->producer);
    };
    for (const Var& r : roots) edge(r.slot());
    for (size_t i = 0; i < order_.size(); ++i) {
      const Node& node = *order_[i];
      for (const SlotPtr& s : node.inputs) edge(s);
    }
    // Inputs exist before the node that uses them, so creation order is a topological order.
    std::sort(order_.begin(), order_.end(),
              [](const auto& a, const auto& b) { return a->sequence < b->sequence; });
  }

  // The leaves of `captured` belong to a graph outside this one, which reports them complete.
  void leave_open(std::span<const Var> captured) {
    for (const Var& v : captured) open_.insert(v.slot().get());
  }
  const std::vector<std::shared_ptr<Node>>& nodes() const { return order_; }
  std::unordered_map<const Slot*, Leaf>& leaves() { return leaves_; }

  void run(std::span<const Var> roots, std::vector<Tensor> upstream) {
    for (size_t i = 0; i < roots.size(); ++i)
      arrive(roots[i].slot(), std::move(upstream[i]), false);
    for (const Var& r : roots) settle(r.slot());
    while (!order_.empty()) {
      const std::shared_ptr<Node> node = std::move(order_.back());
      order_.pop_back();
      step(*node);
    }
  }

 private:
  void arrive(const SlotPtr& slot, Tensor gradient, bool fresh) {
    if (slot->is_leaf()) {
      Leaf& leaf = leaves_.at(slot.get());
      leaf.reached = true;
      if (slot->hooks.empty())
        add_to_leaf(*slot, gradient, fresh);
      else
        leaf.hooked.add(std::move(gradient), fresh, slot->grad_dtype);
      return;
    }
    Arrivals& a = arrivals_[slot->producer.get()];
    if (a.dy.empty()) {
      a.dy.resize(slot->producer->outputs.size());
      a.slots.resize(slot->producer->outputs.size());
    }
    Sum& sum = a.dy[size_t(slot->index)];
    // Two bf16 terms are added in f32 and rounded once; of more, the running sum stays wide.
    const bool narrow = terms_.at(slot.get()) <= 2 && gradient.dtype() == slot->dtype &&
                        (!sum.value.defined() || sum.value.dtype() == slot->dtype);
    sum.add(std::move(gradient), fresh, narrow ? slot->dtype : accumulate_type(slot->dtype));
    a.slots[size_t(slot->index)] = slot;
  }

  // One consumer of the slot has run (or will never have anything to say).
  void settle(const SlotPtr& slot) {
    if (!slot || !slot->is_leaf()) return;
    Leaf& leaf = leaves_.at(slot.get());
    if (--leaf.waiting > 0 || !leaf.reached || open_.count(slot.get())) return;
    if (leaf.hooked.value.defined())
      add_to_leaf(*slot, with_hooks(*slot, std::move(leaf.hooked.value), slot->grad_dtype), false);
    // Copied: a callback may add or remove callbacks.
    for (const auto callbacks = slot->after_accumulate; const auto& fn : callbacks) fn(*slot);
  }

  static Tensor with_hooks(const Slot& slot, Tensor gradient, DType type) {
    gradient = std::move(gradient).to(type);
    for (const auto hooks = slot.hooks; const auto& hook : hooks) {
      const Tensor replaced = hook(gradient);
      if (!replaced.defined()) continue;
      check(replaced.shape() == slot.shape, "gradient hook: returned {}, want {}", replaced.shape(),
            slot.shape);
      gradient = replaced.to(type, slot.device);
    }
    return gradient;
  }

  static void add_to_leaf(Slot& slot, const Tensor& gradient, bool fresh) {
    if (slot.grad.defined()) {
      // Someone may have set a gradient of another layout or type, or one in a mapped file.
      if (!slot.grad.is_contiguous() || slot.grad.dtype() != slot.grad_dtype ||
          slot.grad.storage()->owner)
        slot.grad = dense_copy(slot.grad, slot.grad_dtype);
      detail::add_into(slot.grad, gradient);
      slot.grad.bump_version();
    } else if (fresh && gradient.dtype() == slot.grad_dtype && gradient.is_contiguous() &&
               int64_t(gradient.storage()->bytes) == gradient.nbytes()) {
      slot.grad = gradient;
    } else {
      slot.grad = dense_copy(gradient, slot.grad_dtype);
    }
  }

  void step(Node& node) {
    if (auto handle = arrivals_.extract(&node); !handle.empty()) {
      std::vector<Tensor> grads = call(node, std::move(handle.mapped()));
      // Gone before the gradients travel on: what only passed through is then nobody else's.
      if (!retain_) release_saved(node);
      for (size_t i = 0; i < grads.size(); ++i) {
        if (!grads[i].defined()) continue;
        const bool fresh = grads[i].storage().use_count() == 1;
        arrive(node.inputs[i], std::move(grads[i]), fresh);
      }
    }
    for (const SlotPtr& s : node.inputs) settle(s);
    if (retain_) return;
    release_saved(node);
    node.inputs.clear();
  }

  // Runs the node's backward function; leaves it added to by itself are marked here.
  std::vector<Tensor> call(Node& node, Arrivals a) {
    std::vector<Tensor> dy(a.dy.size());
    for (size_t i = 0; i < a.dy.size(); ++i) {
      if (!a.dy[i].value.defined()) continue;
      Slot& slot = *a.slots[i];
      // An operator sees the dtype it produced, whatever the terms were summed in.
      dy[i] = with_hooks(slot, std::move(a.dy[i].value), slot.dtype);
      if (!slot.retain_grad) continue;
      if (slot.grad.defined())
        detail::add_into(slot.grad, dy[i]);
      else
        slot.grad = dy[i].clone();
    }
    BackwardContext ctx(node, std::move(dy));
    {
      OpScope scope(node.op);
      node.backward(ctx);
    }
    std::vector<Tensor> grads = ctx.take_gradients();
    const bool anomaly = detail::tape_state().anomaly;
    for (size_t i = 0; i < grads.size(); ++i) {
      const bool added = ctx.accumulated(int(i));
      if (added) leaves_.at(node.inputs[i].get()).reached = true;
      if (anomaly)
        detail::check_finite(node.op, "backward", "the gradient of input", i,
                             added ? node.inputs[i]->grad : grads[i]);
    }
    return grads;
  }

  static void release_saved(Node& node) {
    node.released = true;
    node.saved.clear();
    node.saved_versions.clear();
    node.backward = nullptr;
  }

  bool retain_;
  std::vector<std::shared_ptr<Node>> order_;
  std::unordered_map<const Slot*, int> terms_;
  std::unordered_map<const Node*, Arrivals> arrivals_;
  std::unordered_map<const Slot*, Leaf> leaves_;
  std::unordered_set<const Slot*> open_;
};

// Upstream gradients in the roots' dtype and on their device; ones where none was given.
std::vector<Tensor> checked_upstream(std::span<const Var> roots, std::span<const Tensor> upstream) {
  check(upstream.size() == roots.size(), "backward: {} roots, {} upstream gradients", roots.size(),
        upstream.size());
  std::vector<Tensor> out;
  for (size_t i = 0; i < roots.size(); ++i) {
    const Var& root = roots[i];
    check(root.requires_grad(),
          "backward: root {} does not depend on anything that requires a gradient", i);
    Tensor dy = upstream[i];
    if (!dy.defined()) {
      check(root.numel() == 1, "backward: root {} has shape {}; give an upstream gradient", i,
            root.shape());
      dy = Tensor::full(root.shape(), 1, root.dtype(), root.device());
    }
    check(dy.shape() == root.shape(), "backward: upstream gradient {} for a root of shape {}",
          dy.shape(), root.shape());
    check(is_float(dy.dtype()), "backward: the upstream gradient of root {} is {}", i, dy.dtype());
    if (detail::tape_state().anomaly) detail::check_finite("backward", "upstream", "root", i, dy);
    out.push_back(dy.to(root.dtype(), root.device()));
  }
  return out;
}

}  // namespace

void backward(const Var& root, const Tensor& upstream, BackwardOptions options) {
  backward(std::span(&root, 1), std::span(&upstream, 1), options);
}

void backward(std::span<const Var> roots, std::span<const Tensor> upstream,
              BackwardOptions options) {
  const detail::TapeScope off(false, nullptr);
  std::vector<Tensor> dy = checked_upstream(roots, upstream);
  Walk walk(options.retain);
  walk.survey(roots);
  walk.run(roots, std::move(dy));
}

namespace detail {

InnerGradients backward_inside(std::span<const Var> roots, std::span<const Tensor> upstream,
                               std::span<const Var> own, std::span<const Var> captured,
                               uint64_t first_sequence) {
  const TapeScope off(false, nullptr);
  std::vector<Tensor> dy = checked_upstream(roots, upstream);
  Walk walk(false);
  walk.survey(roots);
  for (const auto& node : walk.nodes())
    check(node->sequence >= first_sequence,
          "recompute: the second run uses a recorded Var ({}) captured from outside; pass it "
          "through `inputs`",
          node->op);
  std::unordered_set<const Slot*> known;
  for (const Var& v : own) known.insert(v.slot().get());
  for (const Var& v : captured) known.insert(v.slot().get());
  for (const auto& [slot, leaf] : walk.leaves())
    check(known.count(slot),
          "recompute: the second run uses a leaf of shape {} that the first did not", slot->shape);
  walk.leave_open(captured);
  walk.run(roots, std::move(dy));

  InnerGradients out;
  for (const Var& v : captured) {
    const auto it = walk.leaves().find(v.slot().get());
    const bool reached = it != walk.leaves().end() && it->second.reached;
    Tensor hooked = reached ? std::move(it->second.hooked.value) : Tensor();
    out.reached.push_back(reached && !hooked.defined());
    out.gradients.push_back(std::move(hooked));
  }
  return out;
}

void add_into(const Tensor& dst, const Tensor& src) {
  check(dst.shape() == src.shape(), "backward: a gradient of {} added to one of {}", src.shape(),
        dst.shape());
  const Tensor term = src.to(dst.device());
  if (dst.numel() == 0) return;
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

}  // namespace detail

int64_t saved_bytes(std::span<const Var> roots, std::span<const Tensor> except) {
  std::unordered_set<const Storage*> counted;
  for (const Tensor& t : except)
    if (t.defined()) counted.insert(t.storage().get());
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> work;
  const auto push = [&](const SlotPtr& s) {
    if (s && s->producer && seen.insert(s->producer.get()).second)
      work.push_back(s->producer.get());
  };
  for (const Var& r : roots) push(r.slot());
  int64_t bytes = 0;
  while (!work.empty()) {
    const Node* n = work.back();
    work.pop_back();
    for (const Tensor& t : n->saved)
      if (t.defined() && counted.insert(t.storage().get()).second)
        bytes += int64_t(t.storage()->bytes);
    for (const SlotPtr& s : n->inputs) push(s);
  }
  return bytes;
}

}  // namespace ebb
