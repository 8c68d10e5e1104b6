#include "tensor/memory.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "tensor/check.h"

namespace ebb {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kRedZone = 256;
constexpr int kRedByte = 0xAB;

std::atomic<bool> poison_on{false};
std::atomic<bool> red_zones_on{false};
std::atomic<int64_t> cpu_current{0}, cpu_peak{0}, cpu_allocations{0};
thread_local const char* op_name = "";
// Bytes in use on the CPU and on the GPU before the operator's first allocation there; -1: none
// yet.
thread_local int64_t op_base[2] = {-1, -1};
constexpr int kDevices = 65;  // the CPU, then GPUs
std::atomic<int64_t> workspace[kDevices];

int slot_of(Device d) { return d.is_cuda() ? 1 + std::min(d.index, kDevices - 2) : 0; }

void raise_to(std::atomic<int64_t>& largest, int64_t value) {
  int64_t seen = largest;
  while (value > seen && !largest.compare_exchange_weak(seen, value)) {
  }
}

// After an allocation of `bytes`.
void note_workspace(Device d, size_t bytes) {
  if (!*op_name) return;
  const int64_t now = memory_stats(d).current;
  int64_t& base = op_base[d.is_cuda()];
  if (base < 0) base = now - int64_t(bytes);
  raise_to(workspace[slot_of(d)], now - base);
}

// Blocks allocated while red zones were on: user pointer -> size.
std::mutex guarded_mutex;
std::unordered_map<void*, size_t>& guarded_blocks() {
  static auto* blocks = new std::unordered_map<void*, size_t>();  // outlives every static Tensor
  return *blocks;
}

bool zones_intact(void* user, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(user);
  for (size_t i = 1; i <= kRedZone; ++i)
    if (p[-std::ptrdiff_t(i)] != kRedByte) return false;
  for (size_t i = 0; i < kRedZone; ++i)
    if (p[bytes + i] != kRedByte) return false;
  return true;
}

void* cpu_allocate(size_t bytes) {
  const bool guard = red_zones_on;
  const size_t zone = guard ? kRedZone : 0;
  const size_t total = (bytes + 2 * zone + kAlign - 1) / kAlign * kAlign;
  auto* base = static_cast<unsigned char*>(std::aligned_alloc(kAlign, total));
  if (!base) {
    const MemoryStats s = memory_stats(Device::cpu());
    fail("{}: out of memory on cpu: asked for {} bytes, {} in use, peak {}", current_op(), bytes,
         s.current, s.peak);
  }
  unsigned char* user = base + zone;
  if (guard) {
    std::memset(base, kRedByte, zone);
    std::memset(user + bytes, kRedByte, zone);
    std::lock_guard lock(guarded_mutex);
    guarded_blocks()[user] = bytes;
  }
  if (poison_on) std::memset(user, 0xFF, bytes);
  const int64_t now = cpu_current += int64_t(bytes);
  ++cpu_allocations;
  raise_to(cpu_peak, now);
  return user;
}

void cpu_release(void* user, size_t bytes) {
  bool guarded = false, intact = true;
  {
    std::lock_guard lock(guarded_mutex);
    if (auto it = guarded_blocks().find(user); it != guarded_blocks().end()) {
      guarded = true;
      intact = zones_intact(user, it->second);
      guarded_blocks().erase(it);
    }
  }
  if (!intact) {  // a destructor cannot throw, and memory is already corrupt
    fmt::print(stderr, "ebb: write outside a cpu block of {} bytes\n", bytes);
    std::abort();
  }
  std::free(static_cast<unsigned char*>(user) - (guarded ? kRedZone : 0));
  cpu_current -= int64_t(bytes);
}

}  // namespace

Storage::~Storage() {
  if (owner || !data) return;
  if constexpr (kWithCuda) {
    if (device.is_cuda()) {
      gpu::release(*this);
      return;
    }
  }
  cpu_release(data, bytes);
}

std::shared_ptr<Storage> allocate(size_t bytes, Device device) {
  auto s = std::make_shared<Storage>();
  s->device = device;
  if (bytes == 0) return s;
  if constexpr (kWithCuda) {
    if (device.is_cuda()) {
      s->data = gpu::allocate(bytes, device, &s->stream, &s->arena);
      s->bytes = bytes;
      if (poison_on) gpu::fill_byte(s->data, device, 0xFF, bytes);
      note_workspace(device, bytes);
      return s;
    }
  }
  check(!device.is_cuda(), "{}: no CUDA here: {}", current_op(), cuda_unavailable_reason());
  s->data = cpu_allocate(bytes);
  s->bytes = bytes;
  note_workspace(device, bytes);
  return s;
}

std::shared_ptr<Storage> borrow(const void* data, size_t bytes, std::shared_ptr<void> owner) {
  check(owner != nullptr, "borrow: memory without an owner");
  auto s = std::make_shared<Storage>();
  s->data = const_cast<void*>(data);
  s->bytes = bytes;
  s->owner = std::move(owner);
  return s;
}

MemoryStats memory_stats(Device device) {
  MemoryStats s{cpu_current, cpu_peak, cpu_current, cpu_allocations};
  if constexpr (kWithCuda)
    if (device.is_cuda()) s = gpu::memory_stats(device);
  s.workspace = workspace[slot_of(device)];
  return s;
}

void reset_peak_memory(Device device) {
  workspace[slot_of(device)] = 0;
  if constexpr (kWithCuda)
    if (device.is_cuda()) return gpu::reset_peak_memory(device);
  cpu_peak = cpu_current.load();
}

void empty_cache(Device device) {
  if constexpr (kWithCuda)
    if (device.is_cuda()) gpu::empty_cache(device);
}

void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device, size_t bytes) {
  if (bytes == 0) return;
  if constexpr (kWithCuda)
    if (dst_device.is_cuda() || src_device.is_cuda())
      return gpu::copy_bytes(dst, dst_device, src, src_device, bytes);
  std::memmove(dst, src, bytes);
}

void zero_bytes(void* dst, Device device, size_t bytes) {
  if (bytes == 0) return;
  if constexpr (kWithCuda)
    if (device.is_cuda()) return gpu::zero_bytes(dst, device, bytes);
  std::memset(dst, 0, bytes);
}

void set_poison(bool on) { poison_on = on; }
bool poison_enabled() { return poison_on; }
void set_red_zones(bool on) { red_zones_on = on; }
bool red_zones_enabled() { return red_zones_on; }

void check_red_zones(Device device) {
  if constexpr (kWithCuda)
    if (device.is_cuda()) return gpu::check_red_zones(device);
  std::lock_guard lock(guarded_mutex);
  for (const auto& [user, bytes] : guarded_blocks())
    check(zones_intact(user, bytes), "write outside a cpu block of {} bytes", bytes);
}

// An operator made of others counts as a whole.
OpScope::OpScope(const char* op) : previous_(op_name) {
  if (!*previous_) op_base[0] = op_base[1] = -1;
  op_name = op;
}
OpScope::~OpScope() { op_name = previous_; }
const char* current_op() { return *op_name ? op_name : "ebb"; }

GraphArena::GraphArena(Device device) : device_(device) {
  check(device.is_cuda(), "graph arena: device is {}, want a GPU", device);
  if constexpr (kWithCuda) impl_ = gpu::arena_create(device);
}
GraphArena::~GraphArena() {
  if constexpr (kWithCuda)
    if (impl_) gpu::arena_destroy(impl_);
}
void GraphArena::begin_use() {
  if constexpr (kWithCuda) gpu::arena_use(impl_, true);
}
void GraphArena::end_use() {
  if constexpr (kWithCuda) gpu::arena_use(impl_, false);
}
int64_t GraphArena::reserved() const {
  if constexpr (kWithCuda) return gpu::arena_reserved(impl_);
  return 0;
}

}  // namespace ebb
