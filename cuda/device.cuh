// Host-side state of each GPU: facts, default stream, memory pool, error flags. Internal to the
// runtime files of cuda/ (device.cu, pool.cu, memory.cu).
#pragma once
#include "cuda/common.cuh"
#include "cuda/pool.cuh"

namespace ebb::gpu {

inline constexpr int kMaxDevices = 64;

struct DeviceState {
  int index = 0;
  int multiprocessors = 0;
  int capability = 0;  // 80, 90, ...
  cudaStream_t stream = nullptr;
  Pool* pool = nullptr;
  int32_t* flags = nullptr;  // [DeviceFlag::count]
};

// Created at first use and never destroyed: tensors of static lifetime are freed after main().
// Throws when there is no such GPU.
DeviceState& device_state(Device device);
// Makes the device the calling thread's current one.
void make_current(Device device);
inline cudaStream_t stream_on(Device device) {
  return static_cast<cudaStream_t>(gpu::current_stream(device).handle);
}
bool is_capturing(cudaStream_t stream);

// Lets the calling thread allocate and query while some stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace ebb::gpu
