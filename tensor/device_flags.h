// Data-dependent errors without host synchronisation. A kernel (or CPU loop) raises a flag; the
// training step, or a test, asks at its end:
//   check_device_flags(x.device());   // throws "embedding: a token id lies outside [0, 32000)" ...
// On the CPU, operators throw at once instead of raising flags.
#pragma once
#include <cstdint>

#include "tensor/device.h"

namespace ebb {

enum class DeviceFlag : int {
  embedding_id,         // embedding: id outside the table
  cross_entropy_label,  // label outside [0, V) and not ignore_index
  positive_decay,       // a log decay above 0
  gather_index,         // index_select and friends
  unbounded_decay,      // a log decay below the bound that was declared
  count
};
const char* describe(DeviceFlag flag);

// Device address of int32 [count], zero at start; kernels store 1 (no atomics needed).
int32_t* device_flags(Device device);
// Synchronises the current stream, throws if any flag is up and clears them all.
void check_device_flags(Device device);
// Same without throwing: bit i is flag i.
uint32_t read_and_clear_device_flags(Device device);

namespace gpu {
int32_t* device_flags(Device device);
}

}  // namespace ebb
