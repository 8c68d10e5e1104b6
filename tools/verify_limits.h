// How far an operator may be from the golden cases, and from the exact values in bf16.
#pragma once
#include <string>

#include "tensor/dtype.h"

namespace ebb::tools {

// Limits on ‖x − ref‖ / ‖ref‖ over a tensor.
struct Limits {
  double output = 0;
  double gradient = 0;
};

// f32 (and f64) against a golden case. Throws for an operator without a line in the table. `decay`:
// what the case says of its decays, if it does: "mixed" ones are those of decay_mixed, "zero" ones
// those of decay_near_zero, whatever the case is called.
Limits golden_limits(const std::string& op, const std::string& case_name, const std::string& decay);
// bf16 against f64 on the same rounded inputs.
inline constexpr Limits kBf16Limits = {8e-3, 1.5e-2};

// Whole models against the golden folders. bf16: rounding the weights alone costs half of it.
struct ModelLimits {
  double activation = 0;  // hidden states and logits
  double loss = 0;
  double gradient = 0;
  double gate_gradient = 0;  // A_log, dt_bias
};
ModelLimits model_limits(const std::string& model_type, DType dtype);

// grad.g of a recurrence whose decay is almost 0: the true gradient lies below the rounding noise
// of q·dq − k·dk, so the error is measured against the size of those two terms.
bool measured_against_cancellation(const std::string& op, const std::string& case_name,
                                   const std::string& decay, const std::string& tensor);
inline constexpr double kCancellationLimit = 1e-6;

}  // namespace ebb::tools
