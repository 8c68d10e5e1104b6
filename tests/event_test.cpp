// Timers and device facts; on the GPU where there is one.
#include "tensor/event.h"

#include <gtest/gtest.h>

#include <thread>

#include "tensor/device_info.h"
#include "tensor/tensor.h"

namespace ebb::testing {
namespace {

TEST(Event, CpuEventsAreTheClock) {
  Event start(Device::cpu()), stop(Device::cpu());
  start.record();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  stop.record();
  EXPECT_GE(start.milliseconds_until(stop), 20);
  EXPECT_LT(start.milliseconds_until(stop), 20000);
}

TEST(Event, GpuEventsTimeTheStream) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  const Device gpu = Device::cuda();
  Event start(gpu), middle(gpu), stop(gpu);
  const Tensor small = Tensor::empty({1 << 10}, DType::f32, gpu);
  const Tensor big = Tensor::empty({1 << 28}, DType::f32, gpu);  // 1 GiB
  small.fill_(1), big.fill_(1);
  start.record();
  small.fill_(2);
  middle.record();
  big.fill_(2);
  stop.record();
  const double first = start.milliseconds_until(middle), second = middle.milliseconds_until(stop);
  EXPECT_GT(first, 0);
  EXPECT_GT(second, 0.1);  // no GPU writes 10 TB/s
  EXPECT_NEAR(start.milliseconds_until(stop), first + second, 0.05);
}

TEST(DeviceInfo, Cpu) {
  const DeviceInfo info = device_info(Device::cpu());
  EXPECT_FALSE(info.name.empty());
  EXPECT_GT(info.memory, int64_t(1) << 28);
  EXPECT_GE(info.processors, 1);
}

TEST(DeviceInfo, Gpu) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  const DeviceInfo info = device_info(Device::cuda());
  EXPECT_FALSE(info.name.empty());
  EXPECT_GT(info.memory, int64_t(1) << 30);
  EXPECT_GT(info.processors, 1);
  EXPECT_GT(info.cache, 1 << 20);
  EXPECT_GE(info.capability, "8");
  EXPECT_FALSE(info.driver.empty());
}

}  // namespace
}  // namespace ebb::testing
