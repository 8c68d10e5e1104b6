#include "nn/mixer.h"

#include "tensor/check.h"

namespace ebb {

Tensor Mixer::gate_preactivations(const Tensor&) const {
  fail("this mixer has no decay gate to calibrate");
}

}  // namespace ebb
