// Raw memory on every device: allocation, copies, fills, statistics and the debugging aids the op
// suite relies on (poison, red zones). tensor/memory.cpp holds the CPU side, cuda/memory.cu the
// stream-ordered caching pool.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tensor/device.h"

namespace ebb {

// One block of memory, shared by all views into it. `version` counts in-place changes.
struct Storage {
  void* data = nullptr;
  size_t bytes = 0;
  Device device;
  uint64_t version = 0;
  Stream stream;                // the stream the block was allocated on
  void* arena = nullptr;        // graph-private arena it belongs to, if any
  std::shared_ptr<void> owner;  // keeps foreign memory alive (a mapped file); else null
  Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  ~Storage();  // returns the block to its allocator
};

// bytes may be 0 (data is then null). Uninitialised, or filled with NaN bytes when poisoning is on.
// `op` is named in the out-of-memory error.
std::shared_ptr<Storage> allocate(size_t bytes, Device device);
// Memory owned by someone else; never written to by ebb, `owner` is kept alive.
std::shared_ptr<Storage> borrow(const void* data, size_t bytes, std::shared_ptr<void> owner);

struct MemoryStats {
  int64_t current = 0;   // bytes in live storages
  int64_t peak = 0;      // largest `current` since reset_peak
  int64_t reserved = 0;  // bytes held from the system (GPU pool: cached blocks included)
  int64_t allocations = 0;
  // Most that one operator's forward or backward had in use beyond what was there at its first
  // allocation, its results included, since reset_peak.
  int64_t workspace = 0;
};
MemoryStats memory_stats(Device device);
void reset_peak_memory(Device device);
// Returns cached, unused blocks to the driver (no effect on the CPU).
void empty_cache(Device device);

// Bytes from host or device memory to host or device memory, ordered on the current stream of the
// GPU involved; a copy that ends in host memory has completed on return.
void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device, size_t bytes);
void zero_bytes(void* dst, Device device, size_t bytes);

// Debugging aids, for tests. Poison: new memory holds 0xFF bytes (NaN in every float type, -1 in
// the integers). Red zones: 256 guard bytes on both sides of every block, verified by
// check_red_zones() and when the block is freed.
void set_poison(bool on);
bool poison_enabled();
void set_red_zones(bool on);
bool red_zones_enabled();
// Throws naming device and block size if any guard byte of a live block has changed.
void check_red_zones(Device device);

// Names the operator in out-of-memory and launch errors and in the accounting of workspace, for the
// calling thread.
class OpScope {
 public:
  explicit OpScope(const char* op);
  ~OpScope();
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;

 private:
  const char* previous_;
};
const char* current_op();  // "ebb" outside any operator

// While alive, GPU blocks of this thread come from a private set of segments that no one else
// reuses, so that addresses recorded in a captured CUDA graph stay valid until the arena dies.
class GraphArena {
 public:
  explicit GraphArena(Device device);
  ~GraphArena();
  GraphArena(const GraphArena&) = delete;
  GraphArena& operator=(const GraphArena&) = delete;
  // Routes this thread's allocations into the arena until end_use() on the same thread. Blocks
  // still alive when the arena dies stay valid and go to the pool when freed.
  void begin_use();
  void end_use();
  int64_t reserved() const;  // bytes

 private:
  void* impl_ = nullptr;
  Device device_;
};

// What the CUDA backend implements (cuda/memory.cu).
namespace gpu {
void* allocate(size_t bytes, Device device, Stream* stream, void** arena);
void release(Storage& storage);
void record_stream(const Storage& storage, Stream stream);
void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device, size_t bytes);
void zero_bytes(void* dst, Device device, size_t bytes);
void fill_byte(void* dst, Device device, int byte, size_t bytes);
MemoryStats memory_stats(Device device);
void reset_peak_memory(Device device);
void empty_cache(Device device);
void check_red_zones(Device device);
int device_count(std::string* reason);
Stream current_stream(Device device);
void set_current_stream(Stream stream);
Stream new_stream(Device device);
void synchronize(Device device);
void* arena_create(Device device);
void arena_destroy(void* arena);
void arena_use(void* arena, bool begin);
int64_t arena_reserved(const void* arena);
}  // namespace gpu

}  // namespace ebb
