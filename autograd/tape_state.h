// What the tape's own sources share (node.cpp, backward.cpp, recompute.cpp). Not for operators.
#pragma once
#include <memory>
#include <span>
#include <unordered_set>
#include <vector>

#include "autograd/node.h"

namespace ebb::detail {

// The first run of a recomputed function: nothing is recorded, but the leaves it uses without
// having received them are written down, because the second run will want their gradients.
struct FirstRun {
  std::vector<Var> captured;
  void note(const char* op, const Var& v);  // throws for a recorded Var

 private:
  std::unordered_set<const Slot*> seen_;
};

struct TapeState {  // per thread
  bool recording = true;
  bool anomaly = false;
  FirstRun* first_run = nullptr;
};
TapeState& tape_state();

// Sets the modes for a scope and restores them, exceptions included.
class TapeScope {
 public:
  TapeScope(bool recording, FirstRun* first_run) : previous_(tape_state()) {
    tape_state().recording = recording;
    tape_state().first_run = first_run;
  }
  ~TapeScope() { tape_state() = previous_; }
  TapeScope(const TapeScope&) = delete;
  TapeScope& operator=(const TapeScope&) = delete;

 private:
  TapeState previous_;
};

uint64_t next_sequence();  // strictly increasing over all threads

// Anomaly mode's check of one tensor, named as in "rms_norm forward ... output 0".
void check_finite(const char* op, const char* pass, const char* what, size_t i, const Tensor& t);

// dst += src, in dst's type. dst is dense; src may have any strides, float type and device.
void add_into(const Tensor& dst, const Tensor& src);

// The backward pass of a function run for the second time. Its graph may end only in `own` leaves
// (the stand-ins for its inputs) and in `captured` ones. The latter belong to the graph outside:
// they are not reported complete here, and where one has hooks its gradient is returned.
struct InnerGradients {
  std::vector<Tensor> gradients;  // per captured leaf; undefined where it went to slot.grad
  std::vector<bool> reached;      // per captured leaf: slot.grad was added to
};
InnerGradients backward_inside(std::span<const Var> roots, std::span<const Tensor> upstream,
                               std::span<const Var> own, std::span<const Var> captured,
                               uint64_t first_sequence);

}  // namespace ebb::detail
