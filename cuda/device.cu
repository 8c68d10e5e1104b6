// GPUs, streams, errors and flags (tensor/device.h, tensor/device_flags.h, cuda/common.cuh).
#include <atomic>
#include <cstdlib>
#include <mutex>

#include "cuda/device.cuh"
#include "tensor/device_flags.h"

namespace ebb::gpu {
namespace {

constexpr int kOldest = 80;
thread_local cudaStream_t thread_streams[kMaxDevices] = {};  // null: the device's default

__global__ void probe_kernel() {}

std::string version_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

int capability_of(int index) {
  int major = 0, minor = 0;
  cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
             "compute capability");
  cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index),
             "compute capability");
  return major * 10 + minor;
}

struct Found {
  int count = 0;
  std::string reason;
};

std::string why_no_device(cudaError_t code) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  cudaGetLastError();
  const auto text = [](int v) {
    return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
  };
  if (driver == 0) return "no NVIDIA driver is installed (libcuda.so.1 was not found)";
  if (code == cudaErrorInsufficientDriver)
    return "the NVIDIA driver supports CUDA " + text(driver) + ", this build needs " +
           text(runtime) + ": update the driver";
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (code == cudaErrorNoDevice || code == cudaSuccess)
    return std::string("no GPU is visible") +
           (visible ? std::string(" (CUDA_VISIBLE_DEVICES=") + visible + ")" : std::string());
  return std::string("the GPU cannot be used: ") + cudaGetErrorString(code);
}

// Devices keep CUDA's numbers, so the usable ones are those before the first too old one.
Found find_devices() {
  Found f;
  int n = 0;
  const cudaError_t code = cudaGetDeviceCount(&n);
  if (code != cudaSuccess || n == 0) {
    f.reason = why_no_device(code);
    return f;
  }
  for (; f.count < n && f.count < kMaxDevices; ++f.count) {
    const int capability = capability_of(f.count);
    if (capability >= kOldest) continue;
    f.reason = "GPU " + std::to_string(f.count) + " is compute capability " +
               version_text(capability) + "; ebb needs " + version_text(kOldest) +
               " or newer (CUDA_VISIBLE_DEVICES selects others)";
    break;
  }
  return f;
}

const Found& found() {
  static const Found f = find_devices();
  return f;
}

DeviceState* create_state(int index) {
  const Found& f = found();
  if (f.count == 0) throw Error("cuda:" + std::to_string(index) + ": " + f.reason);
  if (index < 0 || index >= f.count)
    throw Error("cuda:" + std::to_string(index) + ": there are " + std::to_string(f.count) +
                " usable GPUs" + (f.reason.empty() ? "" : "; " + f.reason));
  cuda_check(cudaSetDevice(index), "select GPU");
  auto* s = new DeviceState;
  s->index = index;
  s->capability = capability_of(index);
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, probe_kernel) != cudaSuccess) {
    cudaGetLastError();
    throw Error("cuda:" + std::to_string(index) + " is compute capability " +
                version_text(s->capability) + ", for which this build has no code; configure " +
                "with -DEBB_CUDA_ARCHITECTURES=" + std::to_string(s->capability));
  }
  cuda_check(cudaDeviceGetAttribute(&s->multiprocessors, cudaDevAttrMultiProcessorCount, index),
             "number of multiprocessors");
  const RelaxedCapture relaxed;
  cuda_check(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking), "create stream");
  const size_t bytes = sizeof(int32_t) * size_t(DeviceFlag::count);
  cuda_check(cudaMalloc(&s->flags, bytes), "allocate device flags");
  cuda_check(cudaMemsetAsync(s->flags, 0, bytes, s->stream), "clear device flags");
  cuda_check(cudaStreamSynchronize(s->stream), "clear device flags");
  s->pool = new Pool(index);
  return s;
}

bool context_is_lost(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorMisalignedAddress:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
      return true;
    default:
      return false;
  }
}

}  // namespace

void throw_cuda_error(cudaError_t code, const char* what) {
  cudaGetLastError();  // an ordinary error must not come back at the next launch
  std::string message = std::string(current_op()) + ": " + what + ": " + cudaGetErrorString(code) +
                        " (" + cudaGetErrorName(code) + ")";
  if (context_is_lost(code))
    message +=
        "; some earlier kernel failed and the GPU is lost to this process: restart it, with "
        "CUDA_LAUNCH_BLOCKING=1 to see the operator";
  throw Error(message);
}

DeviceState& device_state(Device device) {
  static std::atomic<DeviceState*> states[kMaxDevices];
  static std::mutex mutex;
  const bool in_range = device.index >= 0 && device.index < kMaxDevices;
  if (in_range)
    if (DeviceState* s = states[device.index].load(std::memory_order_acquire)) return *s;
  const std::lock_guard lock(mutex);
  if (in_range)
    if (DeviceState* s = states[device.index].load(std::memory_order_acquire)) return *s;
  DeviceState* s = create_state(device.index);
  states[device.index].store(s, std::memory_order_release);
  return *s;
}

void make_current(Device device) {
  int now = -1;
  if (cudaGetDevice(&now) != cudaSuccess || now != device.index)
    cuda_check(cudaSetDevice(device.index), "select GPU");
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

int multiprocessors(Device device) { return device_state(device).multiprocessors; }
int compute_capability(Device device) { return device_state(device).capability; }
int32_t* device_flags(Device device) { return device_state(device).flags; }

int device_count(std::string* reason) {
  if (reason && found().count == 0) *reason = found().reason;
  return found().count;
}

// Every launch asks for its stream, so this is also where the device becomes current.
Stream current_stream(Device device) {
  const DeviceState& s = device_state(device);
  make_current(device);
  const cudaStream_t mine = thread_streams[device.index];
  return {device, mine ? mine : s.stream};
}

void set_current_stream(Stream stream) {
  device_state(stream.device);
  thread_streams[stream.device.index] = static_cast<cudaStream_t>(stream.handle);
}

Stream new_stream(Device device) {
  device_state(device);
  make_current(device);
  cudaStream_t s = nullptr;
  cuda_check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "create stream");
  return {device, s};
}

void synchronize(Device device) {
  device_state(device);
  make_current(device);
  cuda_check(cudaDeviceSynchronize(), "synchronize");
}

}  // namespace ebb::gpu
