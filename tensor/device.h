// Where a tensor lives and which queue its work goes to.
#pragma once
#include <cstdint>
#include <string>

namespace ebb {

#ifdef EBB_WITH_CUDA
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

enum class DeviceType : uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  static Device cpu() { return {}; }
  static Device cuda(int index = 0) { return {DeviceType::cuda, index}; }
  // "cpu", "cuda" or "cuda:1"; anything else throws.
  static Device parse(const std::string& text);

  bool is_cuda() const { return type == DeviceType::cuda; }
  bool operator==(const Device&) const = default;
  std::string str() const;
};

// A queue of device work; handle is a cudaStream_t. On the CPU there is one, with no handle.
struct Stream {
  Device device;
  void* handle = nullptr;
  bool operator==(const Stream&) const = default;
};

// Number of usable GPUs; 0 in a CPU build or without a driver.
int cuda_device_count();
// Why there is none (no CUDA in this build, no driver, too old a GPU); empty when there is one.
std::string cuda_unavailable_reason();
// The first GPU where there is one, else the CPU.
Device default_device();

// The stream the calling thread's operators use on a device. ebb never uses CUDA's legacy default
// stream, so that a step can be captured as a graph.
Stream current_stream(Device device);
Stream new_stream(Device device);
void synchronize(Device device);

// Makes a stream current for this thread until the end of scope.
class StreamGuard {
 public:
  explicit StreamGuard(Stream stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  Stream previous_;
};

}  // namespace ebb
