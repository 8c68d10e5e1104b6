#include "tensor/event.h"

namespace ebb {

Event::Event(Device device) : device_(device) {
  if constexpr (kWithCuda)
    if (device.is_cuda()) handle_ = gpu::event_create(device);
}

Event::~Event() {
  if constexpr (kWithCuda)
    if (handle_) gpu::event_destroy(handle_);
}

void Event::record() {
  if constexpr (kWithCuda)
    if (handle_) return gpu::event_record(handle_, device_);
  time_ = std::chrono::steady_clock::now();
}

double Event::milliseconds_until(const Event& later) const {
  if constexpr (kWithCuda)
    if (handle_) return gpu::event_milliseconds(handle_, later.handle_);
  return std::chrono::duration<double, std::milli>(later.time_ - time_).count();
}

}  // namespace ebb
