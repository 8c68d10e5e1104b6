// Timed events (tensor/event.h).
#include "cuda/device.cuh"
#include "tensor/event.h"

namespace ebb::gpu {

void* event_create(Device device) {
  make_current(device);
  cudaEvent_t event = nullptr;
  cuda_check(cudaEventCreate(&event), "event");
  return event;
}

void event_destroy(void* event) { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void event_record(void* event, Device device) {
  cuda_check(cudaEventRecord(static_cast<cudaEvent_t>(event), stream_on(device)), "event record");
}

double event_milliseconds(void* from, void* to) {
  cuda_check(cudaEventSynchronize(static_cast<cudaEvent_t>(to)), "event");
  float ms = 0;
  cuda_check(
      cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to)),
      "event time");
  return ms;
}

}  // namespace ebb::gpu
