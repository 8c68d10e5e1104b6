#include "tensor/device_info.h"

#include <omp.h>
#include <unistd.h>

#include <fstream>

namespace ebb {
namespace {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name") && !line.starts_with("Model")) continue;
    const size_t at = line.find(": ");
    if (at != std::string::npos) return line.substr(at + 2);
  }
  return "unknown CPU";
}

}  // namespace

DeviceInfo device_info(Device device) {
  if constexpr (kWithCuda)
    if (device.is_cuda()) return gpu::device_info(device);
  DeviceInfo info;
  info.name = cpu_name();
  info.memory = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  info.processors = omp_get_max_threads();
#ifdef _SC_LEVEL3_CACHE_SIZE
  info.cache = std::max(0L, sysconf(_SC_LEVEL3_CACHE_SIZE));
#endif
  return info;
}

}  // namespace ebb
