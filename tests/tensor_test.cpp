#include <gtest/gtest.h>

#include "tensor/check.h"
#include "tensor/random.h"
#include "tensor/tensor.h"

namespace ebb {
namespace {

TEST(Tensor, ViewsShareStorage) {
  Tensor x = Tensor::arange(24, DType::f32).view({2, 3, 4});
  EXPECT_EQ(x.transpose(0, 2).select(0, 1).to_vector<float>(),
            (std::vector<float>{1, 13, 5, 17, 9, 21}));
  EXPECT_THROW(x.transpose(0, 2).view({24}), Error);
  EXPECT_EQ(x.transpose(1, 2).reshape({2, 12}).size(1), 12);
}

}  // namespace
}  // namespace ebb
