// Base of tests that need a GPU: skipped, with the reason, where there is none.
#pragma once
#include <gtest/gtest.h>

#include "tensor/check.h"
#include "tensor/device.h"
#include "tensor/device_info.h"
#include "tensor/memory.h"

namespace ebb::testing {

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  }
  // Whether a test may use this much beside other processes; cached blocks of earlier tests are
  // given back first.
  bool has_memory(int64_t bytes) const {
    empty_cache(gpu_);
    return device_info(gpu_).free > bytes + (int64_t(2) << 30);
  }
  const Device gpu_ = Device::cuda();
};

template <class F>
std::string error_message(F fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace ebb::testing
