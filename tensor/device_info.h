// Facts about a device, for records of measurements.
#pragma once
#include <cstdint>
#include <string>

#include "tensor/device.h"

namespace ebb {

struct DeviceInfo {
  std::string name;        // "NVIDIA H200", "AMD EPYC 9654 96-Core Processor"
  int64_t memory = 0;      // bytes
  int64_t free = 0;        // bytes of it that no process holds now; 0 on the CPU
  int processors = 0;      // multiprocessors, or threads the CPU operators use
  int64_t cache = 0;       // bytes of the last level shared by all; 0 where unknown
  std::string driver;      // newest CUDA version the driver supports; "" on the CPU
  std::string capability;  // "9.0"; "" on the CPU
};
DeviceInfo device_info(Device device);

namespace gpu {
DeviceInfo device_info(Device device);
}

}  // namespace ebb
