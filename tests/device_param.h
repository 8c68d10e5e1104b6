// Tests that run on every device there is, as TEST_P over Device: the GPU instance skips, saying
// why, where there is none.
#pragma once
#include <gtest/gtest.h>

#include "tensor/check.h"
#include "tensor/tensor.h"

namespace ebb::testing {

class OnDevice : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (device().is_cuda() && cuda_device_count() == 0)
      GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  Device device() const { return GetParam(); }
  // f32 and the other dtype kernels have there.
  std::vector<DType> dtypes() const {
    return {DType::f32, device().is_cuda() ? DType::bf16 : DType::f64};
  }
  Tensor values(const std::vector<double>& v, DType t = DType::f32) const {
    return Tensor::from(v, {int64_t(v.size())}).to(t, device());
  }
  Tensor values(const std::vector<double>& v, const Shape& shape, DType t = DType::f32) const {
    return Tensor::from(v, shape).to(t, device());
  }
};

inline std::string device_name(const ::testing::TestParamInfo<Device>& info) {
  return info.param.is_cuda() ? "cuda" : "cpu";
}
inline auto every_device() { return ::testing::Values(Device::cpu(), Device::cuda()); }

// fn must throw an Error whose text contains `part`.
template <class F>
void expect_error(const char* part, F&& fn) {
  try {
    fn();
    ADD_FAILURE() << "no error; wanted one with \"" << part << '"';
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

}  // namespace ebb::testing
