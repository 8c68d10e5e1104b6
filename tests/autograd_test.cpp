#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "ops/rms_norm.h"
#include "tensor/check.h"

namespace ebb {
namespace {

TEST(Tape, InPlaceChangeOfASavedTensorNamesTheOp) {
  const Var x = Var::leaf(Tensor::full({2, 4}, 1.5)), w = Var::leaf(Tensor::full({4}, 1));
  const Var y = rms_norm(x, w, 1e-5f);
  x.value().fill_(3);
  try {
    backward(y, Tensor::full({2, 4}, 1));
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("rms_norm"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace ebb
