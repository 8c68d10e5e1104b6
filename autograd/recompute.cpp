#include "autograd/tape.h"
#include "autograd/tape_state.h"
#include "tensor/check.h"
#include "tensor/random.h"

namespace ebb {
namespace {

using RecomputeFn = std::function<std::vector<Var>(std::span<const Var>)>;

// Runs the thread's generator from another state for a scope.
class RandomScope {
 public:
  explicit RandomScope(const RandomState& start) : previous_(random_state()) {
    random_state() = start;
  }
  ~RandomScope() { random_state() = previous_; }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  RandomState previous_;
};

std::vector<Var> constants(std::span<const Var> vars) {
  std::vector<Var> out;
  for (const Var& v : vars) out.push_back(v.detach());
  return out;
}

// The second run and its backward pass. The node's inputs are n inputs of fn, then the captured
// leaves.
void run_again(BackwardContext& ctx, const RecomputeFn& fn, const RandomState& start,
               std::span<const Var> captured) {
  const int n = ctx.inputs() - int(captured.size());
  const uint64_t first_sequence = detail::next_sequence();
  for (size_t k = 0; k < captured.size(); ++k) ctx.saved(n + int(k));  // checks for changes
  std::vector<Var> in, own, again;
  for (int i = 0; i < n; ++i) {
    in.push_back(ctx.needs(i) ? Var::leaf(ctx.saved(i)) : Var(ctx.saved(i)));
    if (ctx.needs(i)) own.push_back(in.back());
  }
  {
    const detail::TapeScope on(true, nullptr);
    const RandomScope same_numbers(start);
    again = fn(in);
  }
  std::vector<Var> roots;
  std::vector<Tensor> dy;
  for (size_t i = 0; i < again.size(); ++i) {
    if (!again[i].requires_grad() || !ctx.has_dy(int(i))) continue;
    roots.push_back(std::move(again[i]));
    dy.push_back(ctx.dy(int(i)));
  }
  again.clear();
  if (roots.empty()) return;
  detail::InnerGradients inner = detail::backward_inside(roots, dy, own, captured, first_sequence);
  for (int i = 0; i < n; ++i)
    if (ctx.needs(i)) ctx.grad(i, std::move(in[size_t(i)].slot()->grad));
  for (size_t k = 0; k < captured.size(); ++k) {
    if (inner.reached[k]) ctx.grad_accumulated(n + int(k));
    ctx.grad(n + int(k), std::move(inner.gradients[k]));
  }
}

}  // namespace

std::vector<Var> recompute(RecomputeFn fn, std::vector<Var> inputs) {
  // Inside another recomputed function's first run there is nothing to keep.
  if (!grad_enabled()) return fn(inputs);
  const RandomState start = random_state();
  detail::FirstRun first;
  std::vector<Tensor> outputs;
  {
    const detail::TapeScope off(false, &first);
    for (const Var& y : fn(constants(inputs))) {
      if (y.requires_grad()) first.note("a result", y);
      outputs.push_back(y.value());
    }
  }
  std::vector<Var> recorded = inputs;
  recorded.insert(recorded.end(), first.captured.begin(), first.captured.end());
  std::vector<Tensor> saved;
  for (const Var& x : recorded) saved.push_back(x.value());
  return record("recompute", recorded, std::move(saved), std::move(outputs),
                [fn = std::move(fn), start, captured = std::move(first.captured)](
                    BackwardContext& ctx) { run_again(ctx, fn, start, captured); });
}

}  // namespace ebb
