// The walk: backward(), gradient modes, recomputation, anomaly mode, accounting.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "autograd/node.h"
#include "autograd/var.h"

namespace ebb {

namespace detail {
struct FirstRun;
}

struct BackwardOptions {
  bool retain = false;  // keep the graph for another backward pass
};
// Accumulates d(sum of roots · upstream)/dleaf into every leaf's grad. An upstream gradient may be
// undefined only for a root of one element (then 1). Graphs are consumed as they are walked: what
// an operator saved is released when its backward has run.
// A leaf is complete, its hooks run and its after_accumulate callbacks are called, as soon as the
// last operator of this graph that uses it has run, not at the end of the walk. A leaf that no
// gradient reached is not reported.
// After an exception the gradients hold part of the sum and part of the graph is consumed; new
// graphs are not affected.
void backward(const Var& root, const Tensor& upstream = {}, BackwardOptions options = {});
void backward(std::span<const Var> roots, std::span<const Tensor> upstream,
              BackwardOptions options = {});

// Nothing is recorded on this thread while alive.
class NoGrad {
 public:
  NoGrad();
  ~NoGrad();
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool previous_;
  detail::FirstRun* first_run_;
};
bool grad_enabled();

// Names the first operator that produced a non-finite value, forward or backward, by throwing
// there. Synchronises after every operator: for debugging.
class AnomalyMode {
 public:
  AnomalyMode();
  ~AnomalyMode();
  AnomalyMode(const AnomalyMode&) = delete;
  AnomalyMode& operator=(const AnomalyMode&) = delete;

 private:
  bool previous_;
};

// Activation checkpointing: runs fn without recording and keeps only `inputs`; backward runs it
// again, recording, with the same random numbers. fn may use leaves (parameters) it captured, but
// must receive every other recorded Var through `inputs`; using a captured one is an error at once.
// Inputs may be undefined; recompute may be nested; under NoGrad fn simply runs.
std::vector<Var> recompute(std::function<std::vector<Var>(std::span<const Var>)> fn,
                           std::vector<Var> inputs);

// Bytes of distinct storages the graph behind the roots keeps alive, those of `except` left out
// (parameters, which live anyway).
int64_t saved_bytes(std::span<const Var> roots, std::span<const Tensor> except = {});
inline int64_t saved_bytes(const Var& root, std::span<const Tensor> except = {}) {
  return saved_bytes(std::span(&root, 1), except);
}

}  // namespace ebb
