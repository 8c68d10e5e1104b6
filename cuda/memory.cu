// Raw GPU memory (tensor/memory.h): the pool's entry points, copies and fills.
#include "cuda/device.cuh"

namespace ebb::gpu {
namespace {

thread_local std::vector<Heap*> arenas_in_use;

Heap* arena_for(Device device) {
  for (size_t i = arenas_in_use.size(); i-- > 0;)
    if (arenas_in_use[i]->device == device.index) return arenas_in_use[i];
  return nullptr;
}

class Event {
 public:
  Event() { cuda_check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create event"); }
  ~Event() { cudaEventDestroy(event_); }  // takes effect once the event has passed
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Between two GPUs: after what is queued on the source's stream, and before what follows there
// (the source may be freed or overwritten next).
void copy_across(void* dst, Device dst_device, const void* src, Device src_device, size_t bytes) {
  const cudaStream_t from = stream_on(src_device);
  const Event ready;
  cuda_check(cudaEventRecord(ready.get(), from), "copy between GPUs");
  const cudaStream_t to = stream_on(dst_device);
  cuda_check(cudaStreamWaitEvent(to, ready.get(), 0), "copy between GPUs");
  cuda_check(cudaMemcpyPeerAsync(dst, dst_device.index, src, src_device.index, bytes, to),
             "copy between GPUs");
  const Event done;
  cuda_check(cudaEventRecord(done.get(), to), "copy between GPUs");
  make_current(src_device);
  cuda_check(cudaStreamWaitEvent(from, done.get(), 0), "copy between GPUs");
  make_current(dst_device);
}

}  // namespace

void* allocate(size_t bytes, Device device, Stream* stream, void** arena) {
  *stream = gpu::current_stream(device);
  Heap* heap = arena_for(device);
  *arena = heap;
  return device_state(device).pool->allocate(bytes, static_cast<cudaStream_t>(stream->handle),
                                             heap);
}

void release(Storage& storage) { device_state(storage.device).pool->release(storage.data); }

void record_stream(const Storage& storage, Stream stream) {
  device_state(storage.device)
      .pool->record_use(storage.data, static_cast<cudaStream_t>(stream.handle));
}

void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device, size_t bytes) {
  if (dst_device.is_cuda() && src_device.is_cuda() && dst_device != src_device)
    return copy_across(dst, dst_device, src, src_device, bytes);
  const cudaStream_t stream = stream_on(dst_device.is_cuda() ? dst_device : src_device);
  // A graph would keep the host address and read or write it again at every replay.
  if (dst_device != src_device && is_capturing(stream))
    throw Error(std::string(current_op()) +
                ": copies between host and GPU while its stream is being captured");
  const cudaMemcpyKind kind = !dst_device.is_cuda()   ? cudaMemcpyDeviceToHost
                              : !src_device.is_cuda() ? cudaMemcpyHostToDevice
                                                      : cudaMemcpyDeviceToDevice;
  if (kind != cudaMemcpyDeviceToDevice) {
    // A graph would read or write this host memory at every replay, long after it is gone.
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(stream, &status), "capture status");
    if (status != cudaStreamCaptureStatusNone)
      throw Error(std::string(current_op()) +
                  ": copies between host and device cannot be part of a captured graph");
  }
  cuda_check(cudaMemcpyAsync(dst, src, bytes, kind, stream), "copy");
  // Host memory is pageable: copies from it have been staged on return, copies to it must finish.
  if (!dst_device.is_cuda()) cuda_check(cudaStreamSynchronize(stream), "copy to host");
}

void zero_bytes(void* dst, Device device, size_t bytes) { fill_byte(dst, device, 0, bytes); }

void fill_byte(void* dst, Device device, int byte, size_t bytes) {
  cuda_check(cudaMemsetAsync(dst, byte, bytes, stream_on(device)), "fill memory");
}

MemoryStats memory_stats(Device device) { return device_state(device).pool->stats(); }
void reset_peak_memory(Device device) { device_state(device).pool->reset_peak(); }

void empty_cache(Device device) {
  Pool* pool = device_state(device).pool;
  make_current(device);
  pool->empty_cache();
}

void check_red_zones(Device device) {
  Pool* pool = device_state(device).pool;
  make_current(device);
  pool->check_red_zones();
}

void* arena_create(Device device) { return device_state(device).pool->create_arena(); }

void arena_destroy(void* arena) {
  auto* heap = static_cast<Heap*>(arena);
  std::erase(arenas_in_use, heap);
  const Device device = Device::cuda(heap->device);
  make_current(device);
  device_state(device).pool->destroy_arena(heap);
}

void arena_use(void* arena, bool begin) {
  auto* heap = static_cast<Heap*>(arena);
  if (begin) {
    arenas_in_use.push_back(heap);
    return;
  }
  if (arenas_in_use.empty() || arenas_in_use.back() != heap)
    throw Error("graph arena: end_use() without begin_use() on this thread");
  arenas_in_use.pop_back();
}

int64_t arena_reserved(const void* arena) {
  const auto* heap = static_cast<const Heap*>(arena);
  return device_state(Device::cuda(heap->device)).pool->reserved(heap);
}

}  // namespace ebb::gpu
