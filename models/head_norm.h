// The output norm of mixers whose gate and weight may be missing.
#pragma once
#include "autograd/parameter.h"
#include "ops/gated_rms_norm.h"
#include "ops/rms_norm.h"

namespace ebb {

// rms(o)·w·silu(gate) over the last axis; w and gate may be undefined (1).
inline Var head_norm(const Var& o, const Var& gate, const Parameter& w, double eps) {
  const Var weight = w.defined() ? w.var() : Var();
  return gate ? gated_rms_norm(o, gate, weight, {.eps = float(eps)})
              : rms_norm(o, weight, float(eps));
}

}  // namespace ebb
