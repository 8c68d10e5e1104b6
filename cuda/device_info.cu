// Facts about a GPU (tensor/device_info.h).
#include "cuda/common.cuh"
#include "cuda/device.cuh"
#include "tensor/device_info.h"

namespace ebb::gpu {

DeviceInfo device_info(Device device) {
  cudaDeviceProp p{};
  cuda_check(cudaGetDeviceProperties(&p, device.index), "device properties");
  int driver = 0;
  size_t free = 0, total = 0;
  make_current(device);
  cuda_check(cudaMemGetInfo(&free, &total), "free memory");
  cuda_check(cudaDriverGetVersion(&driver), "driver version");
  DeviceInfo info;
  info.name = p.name;
  info.memory = int64_t(p.totalGlobalMem);
  info.free = int64_t(free);
  info.processors = p.multiProcessorCount;
  info.cache = p.l2CacheSize;
  info.driver = std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10);
  info.capability = std::to_string(p.major) + "." + std::to_string(p.minor);
  return info;
}

}  // namespace ebb::gpu
