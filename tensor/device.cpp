#include "tensor/device.h"

#include <charconv>

#include "tensor/check.h"
#include "tensor/memory.h"

namespace ebb {

Device Device::parse(const std::string& text) {
  if (text == "cpu") return cpu();
  if (text == "cuda") return cuda(0);
  if (text.starts_with("cuda:")) {
    int index = -1;
    const char* end = text.data() + text.size();
    const auto r = std::from_chars(text.data() + 5, end, index);
    if (r.ec == std::errc() && r.ptr == end && index >= 0) return cuda(index);
  }
  fail("device '{}': want cpu, cuda or cuda:N", text);
}

std::string Device::str() const {
  return is_cuda() ? "cuda:" + std::to_string(index) : std::string("cpu");
}

int cuda_device_count() {
  if constexpr (kWithCuda) return gpu::device_count(nullptr);
  return 0;
}

std::string cuda_unavailable_reason() {
  std::string reason = "this build has no CUDA (configure with -DEBB_CUDA=ON)";
  if constexpr (kWithCuda) {
    reason.clear();
    gpu::device_count(&reason);
  }
  return reason;
}

Device default_device() { return cuda_device_count() > 0 ? Device::cuda() : Device::cpu(); }

Stream current_stream(Device device) {
  if constexpr (kWithCuda)
    if (device.is_cuda()) return gpu::current_stream(device);
  return {device, nullptr};
}

Stream new_stream(Device device) {
  if constexpr (kWithCuda)
    if (device.is_cuda()) return gpu::new_stream(device);
  return {device, nullptr};
}

void synchronize(Device device) {
  if constexpr (kWithCuda)
    if (device.is_cuda()) gpu::synchronize(device);
}

StreamGuard::StreamGuard(Stream stream) : previous_(ebb::current_stream(stream.device)) {
  if constexpr (kWithCuda)
    if (stream.device.is_cuda()) gpu::set_current_stream(stream);
}
StreamGuard::~StreamGuard() {
  if constexpr (kWithCuda)
    if (previous_.device.is_cuda()) gpu::set_current_stream(previous_);
}

}  // namespace ebb
