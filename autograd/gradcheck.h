// Gradient checks for your own operators:
//   GradcheckResult r = gradcheck([](auto in) { return std::vector{my_op(in[0], in[1])}; },
//                                 {x, w}, {.full_jacobian = true});
//   if (!r.ok) puts(r.message.c_str());
#pragma once
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "autograd/var.h"

namespace ebb {

struct GradcheckOptions {
  double tolerance = 1e-6;     // on |<Ju, v> - <u, Jt v>| / max(1e-8, scale of the two sides)
  double step = 1e-4;          // of the central difference (fourth order: two steps each side)
  int directions = 3;          // random directions u, v
  bool full_jacobian = false;  // every input element against every output element, too
  uint64_t seed = 1;
};

struct GradcheckResult {
  bool ok = true;
  double worst = 0;            // largest relative error seen
  std::string message = {};    // which input, output and element, when not ok
  int worst_input = -1;        // the input whose gradient is wrong, and the flat index of the
  int64_t worst_element = -1;  // element furthest off (searched in inputs of up to 4096)
};

using GradFn = std::function<std::vector<Var>(std::span<const Var>)>;

// inputs: f64 CPU tensors, or undefined for absent optional ones. Integer inputs are held fixed.
// The function must be smooth within 2·step of the inputs: keep them off kinks (max, relu, a tie).
// Without a float input or a float output there is nothing to check, and the result is not ok.
GradcheckResult gradcheck(const GradFn& fn, std::span<const Tensor> inputs,
                          GradcheckOptions options = {});
inline GradcheckResult gradcheck(const GradFn& fn, std::initializer_list<Tensor> inputs,
                                 GradcheckOptions options = {}) {
  return gradcheck(fn, std::span(inputs.begin(), inputs.size()), options);
}

}  // namespace ebb
