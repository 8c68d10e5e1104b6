#include "tensor/device_flags.h"

#include "tensor/check.h"
#include "tensor/memory.h"

namespace ebb {

const char* describe(DeviceFlag flag) {
  switch (flag) {
    case DeviceFlag::embedding_id:
      return "embedding: a token id lies outside the table";
    case DeviceFlag::cross_entropy_label:
      return "cross_entropy: a label is neither a class nor ignore_index";
    case DeviceFlag::positive_decay:
      return "a log decay is positive (want g <= 0)";
    case DeviceFlag::gather_index:
      return "index_select or gather: an index lies outside the dimension";
    case DeviceFlag::unbounded_decay:
      return "a log decay lies below the declared lower_bound";
    case DeviceFlag::count:
      break;
  }
  return "unknown device flag";
}

int32_t* device_flags(Device device) {
  if constexpr (kWithCuda)
    if (device.is_cuda()) return gpu::device_flags(device);
  static int32_t flags[int(DeviceFlag::count)] = {};
  return flags;
}

uint32_t read_and_clear_device_flags(Device device) {
  constexpr int n = int(DeviceFlag::count);
  int32_t host[n] = {};
  int32_t* flags = device_flags(device);
  copy_bytes(host, Device::cpu(), flags, device, sizeof host);
  uint32_t up = 0;
  for (int i = 0; i < n; ++i) up |= host[i] ? 1u << i : 0u;
  if (up) zero_bytes(flags, device, sizeof host);
  return up;
}

void check_device_flags(Device device) {
  const uint32_t up = read_and_clear_device_flags(device);
  if (!up) return;
  std::string message;
  for (int i = 0; i < int(DeviceFlag::count); ++i)
    if (up >> i & 1u)
      message += (message.empty() ? "" : "; ") + std::string(describe(DeviceFlag(i)));
  throw Error(message);
}

}  // namespace ebb
