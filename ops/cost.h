// Analytic cost of an operator: the least it must do, counted from shapes alone. Each operator's
// header declares its own, forward and backward apart:
//   Cost c = rms_norm_cost(Pass::forward, x.shape(), DType::bf16);
// bytes: every input read once and every output written once, as stored (what backward needs and
// forward saves included; scratch such as partial sums left out). flops: one per add, multiply,
// compare or special function. Divided by the device's ceilings they give the floor a measurement
// is compared with.
#pragma once

namespace ebb {

struct Cost {
  double bytes = 0;
  double flops = 0;
};

enum class Pass { forward, backward };

inline Cost operator+(const Cost& a, const Cost& b) {
  return {a.bytes + b.bytes, a.flops + b.flops};
}

}  // namespace ebb
