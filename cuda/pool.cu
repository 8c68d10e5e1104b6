#include "cuda/pool.cuh"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cuda/device.cuh"

namespace ebb::gpu {
namespace {

constexpr size_t kRound = 512;
constexpr size_t kSmallLimit = size_t(1) << 20;  // requests up to this share small segments
constexpr size_t kSmallSegment = size_t(2) << 20;
constexpr size_t kLargeSegment = size_t(20) << 20;  // serves requests up to half of it
constexpr size_t kHuge = kLargeSegment / 2;
constexpr size_t kSegmentRound = size_t(2) << 20;
constexpr size_t kRedZone = 256;
constexpr int kRedByte = 0xAB;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

std::string amount(size_t bytes) {
  char text[64];
  if (bytes >= size_t(1) << 30)
    std::snprintf(text, sizeof text, "%.2f GiB", double(bytes) / double(1 << 30));
  else if (bytes >= size_t(1) << 20)
    std::snprintf(text, sizeof text, "%.2f MiB", double(bytes) / double(1 << 20));
  else
    std::snprintf(text, sizeof text, "%zu bytes", bytes);
  return text;
}

char* user_pointer(const Block& b) { return b.base + (b.guarded ? kRedZone : 0); }

}  // namespace

Pool::Pool(int device) : device_(device) { own_.device = device; }

void* Pool::allocate(size_t bytes, cudaStream_t stream, Heap* arena) {
  if (!arena && is_capturing(stream))
    throw Error(std::string(current_op()) +
                ": allocates memory while its stream is being captured; memory of a graph must "
                "come from a GraphArena");
  const std::lock_guard lock(mutex_);
  finish_waiting(false);
  const bool guard = red_zones_enabled();
  const size_t size = round_up(bytes + (guard ? 2 * kRedZone : 0), kRound);
  const bool small = size <= kSmallLimit;
  Heap& heap = arena ? *arena : own_;
  Block* b = find_free(size, small, stream, heap);
  if (!b) b = new_segment(size, bytes, small, stream, heap);
  split(b, size);
  b->used = true;
  b->guarded = guard;
  b->requested = bytes;
  char* user = user_pointer(*b);
  live_[user] = b;
  stats_.current += int64_t(bytes);
  stats_.peak = std::max(stats_.peak, stats_.current);
  ++stats_.allocations;
  if (guard) {
    cuda_check(cudaMemsetAsync(b->base, kRedByte, kRedZone, stream), "red zone");
    cuda_check(cudaMemsetAsync(user + bytes, kRedByte, kRedZone, stream), "red zone");
  }
  return user;
}

Block* Pool::find_free(size_t size, bool small, cudaStream_t stream, Heap& heap) {
  auto& list = heap.free_list(small);
  Block key;
  key.stream = stream;
  key.size = size;
  const auto it = list.lower_bound(&key);
  if (it == list.end() || (*it)->stream != stream) return nullptr;
  Block* b = *it;
  list.erase(it);
  return b;
}

Block* Pool::new_segment(size_t size, size_t asked, bool small, cudaStream_t stream, Heap& heap) {
  const size_t bytes = small          ? kSmallSegment
                       : size < kHuge ? kLargeSegment
                                      : round_up(size, kSegmentRound);
  const RelaxedCapture relaxed;
  make_current(Device::cuda(device_));
  void* base = nullptr;
  cudaError_t code = cudaMalloc(&base, bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    cudaDeviceSynchronize();  // refused while a stream is captured; cudaFree waits by itself then
    cudaGetLastError();
    finish_waiting(true);
    free_segments(own_);
    code = cudaMalloc(&base, bytes);
  }
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    out_of_memory(asked);
  }
  cuda_check(code, "cudaMalloc");
  auto* b = new Block;
  b->base = static_cast<char*>(base);
  b->size = bytes;
  b->stream = stream;
  b->heap = &heap;
  b->small = small;
  heap.firsts.insert(b);
  heap.reserved += int64_t(bytes);
  stats_.reserved += int64_t(bytes);
  return b;
}

// Leaves `size` bytes in b and returns the rest to its heap, unless the rest is too small to be
// worth a block.
void Pool::split(Block* b, size_t size) {
  const size_t rest = b->size - size;
  if (b->small ? rest < kRound : rest <= kSmallLimit) return;
  auto* tail = new Block;
  tail->base = b->base + size;
  tail->size = rest;
  tail->stream = b->stream;
  tail->heap = b->heap;
  tail->small = b->small;
  tail->prev = b;
  tail->next = b->next;
  if (tail->next) tail->next->prev = tail;
  b->next = tail;
  b->size = size;
  tail->heap->free_list(tail->small).insert(tail);
}

void Pool::release(void* user) noexcept {
  const std::lock_guard lock(mutex_);
  const auto it = live_.find(user);
  if (it == live_.end()) return;
  Block* b = it->second;
  live_.erase(it);
  stats_.current -= int64_t(b->requested);
  std::string error;
  if (b->guarded && !zones_intact(*b, &error)) {
    std::fprintf(stderr, "ebb: %s\n", error.c_str());
    overruns_.push_back(error);
  }
  b->guarded = false;
  if (b->other_streams.empty())
    make_free(b);
  else
    wait_for_users(b);
}

void Pool::make_free(Block* b) {
  b->used = false;
  b->requested = 0;
  auto& list = b->heap->free_list(b->small);
  if (b->next && !b->next->used) {
    list.erase(b->next);
    absorb_next(b);
  }
  if (b->prev && !b->prev->used) {
    list.erase(b->prev);
    b = absorb_next(b->prev);
  }
  list.insert(b);
}

Block* Pool::absorb_next(Block* b) {
  Block* gone = b->next;
  b->size += gone->size;
  b->next = gone->next;
  if (b->next) b->next->prev = b;
  delete gone;
  return b;
}

void Pool::record_use(void* user, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const auto it = live_.find(user);
  if (it == live_.end() || it->second->stream == stream) return;
  auto& streams = it->second->other_streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

// The block was used on other streams: an event behind the work queued there tells when it is
// free. In an arena that order would hold for the capture but not for the graph's replays, so
// there the block rests until the arena dies.
void Pool::wait_for_users(Block* b) {
  if (b->heap->is_arena) return;
  const RelaxedCapture relaxed;
  int before = device_;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  for (const cudaStream_t stream : b->other_streams) {
    cudaEvent_t event = nullptr;
    if (!spare_events_.empty()) {
      event = spare_events_.back();
      spare_events_.pop_back();
    } else if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) {
      continue;
    }
    if (is_capturing(stream) || cudaEventRecord(event, stream) != cudaSuccess) {
      spare_events_.push_back(event);
      continue;
    }
    ++b->waiting;
    events_.emplace_back(event, b);
  }
  cudaSetDevice(before);
  b->other_streams.clear();
  if (b->waiting == 0) make_free(b);
}

void Pool::finish_waiting(bool block_until_done) {
  if (events_.empty()) return;
  const RelaxedCapture relaxed;
  std::deque<std::pair<cudaEvent_t, Block*>> still;
  for (auto& [event, b] : events_) {
    const cudaError_t code = block_until_done ? cudaEventSynchronize(event) : cudaEventQuery(event);
    if (code == cudaErrorNotReady) {
      cudaGetLastError();
      still.emplace_back(event, b);
      continue;
    }
    spare_events_.push_back(event);
    if (--b->waiting == 0) make_free(b);
  }
  events_.swap(still);
}

// Gives wholly free segments back to the driver. The device must be idle on them.
void Pool::free_segments(Heap& heap) {
  for (auto it = heap.firsts.begin(); it != heap.firsts.end();) {
    Block* b = *it;
    if (b->used || b->next || cudaFree(b->base) != cudaSuccess) {
      ++it;
      continue;
    }
    heap.free_list(b->small).erase(b);
    heap.reserved -= int64_t(b->size);
    stats_.reserved -= int64_t(b->size);
    delete b;
    it = heap.firsts.erase(it);
  }
  cudaGetLastError();
}

void Pool::out_of_memory(size_t asked) {
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  cudaGetLastError();
  const auto size = [](int64_t n) { return amount(size_t(n)); };
  throw Error(std::string(current_op()) + ": out of memory on cuda:" + std::to_string(device_) +
              ": asked for " + amount(asked) + "; " + size(stats_.current) + " in use (peak " +
              size(stats_.peak) + "), " + size(stats_.reserved) + " reserved by ebb, " +
              amount(free) + " free of the GPU's " + amount(total) +
              "; use a smaller batch or shorter sequences, recomputation, or bf16");
}

MemoryStats Pool::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Pool::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak = stats_.current;
}

void Pool::empty_cache() {
  const std::lock_guard lock(mutex_);
  cuda_check(cudaDeviceSynchronize(), "empty the memory cache");
  finish_waiting(true);
  free_segments(own_);
}

bool Pool::zones_intact(const Block& b, std::string* error) const {
  if (is_capturing(b.stream)) return true;  // nothing has run yet
  const RelaxedCapture relaxed;
  unsigned char zone[2 * kRedZone];
  const char* user = user_pointer(b);
  // In the order of the block's stream, so that earlier kernels have finished.
  if (cudaMemcpyAsync(zone, b.base, kRedZone, cudaMemcpyDeviceToHost, b.stream) != cudaSuccess ||
      cudaMemcpyAsync(zone + kRedZone, user + b.requested, kRedZone, cudaMemcpyDeviceToHost,
                      b.stream) != cudaSuccess ||
      cudaStreamSynchronize(b.stream) != cudaSuccess)
    return true;  // the failure comes back at the next checked call
  for (size_t i = 0; i < sizeof zone; ++i) {
    if (zone[i] == kRedByte) continue;
    const int64_t at =
        i < kRedZone ? int64_t(i) - int64_t(kRedZone) : int64_t(b.requested + i - kRedZone);
    *error = "write outside a cuda:" + std::to_string(device_) + " block of " +
             std::to_string(b.requested) + " bytes, at byte " + std::to_string(at);
    return false;
  }
  return true;
}

void Pool::check_red_zones() {
  const std::lock_guard lock(mutex_);
  cuda_check(cudaDeviceSynchronize(), "check red zones");
  std::vector<std::string> errors;
  errors.swap(overruns_);
  std::string error;
  for (const auto& [user, b] : live_)
    if (b->guarded && !zones_intact(*b, &error)) errors.push_back(error);
  if (!errors.empty()) throw Error(errors.front());
}

Heap* Pool::create_arena() {
  auto* heap = new Heap;
  heap->device = device_;
  heap->is_arena = true;
  return heap;
}

void Pool::destroy_arena(Heap* arena) {
  const std::lock_guard lock(mutex_);
  {
    // A graph that uses the memory may still run, on another stream than the memory's.
    const RelaxedCapture relaxed;
    cudaDeviceSynchronize();
    cudaGetLastError();
  }
  std::vector<Block*> rested;
  for (Block* first : arena->firsts) {
    own_.firsts.insert(first);
    for (Block* b = first; b; b = b->next) {
      b->heap = &own_;
      if (!b->used) own_.free_list(b->small).insert(b);
      // Released, but kept from reuse because other streams were involved.
      const auto it = live_.find(user_pointer(*b));
      if (b->used && (it == live_.end() || it->second != b) && b->waiting == 0) rested.push_back(b);
    }
  }
  own_.reserved += arena->reserved;
  delete arena;
  for (Block* b : rested) {
    b->other_streams.clear();
    make_free(b);
  }
}

int64_t Pool::reserved(const Heap* arena) const {
  const std::lock_guard lock(mutex_);
  return arena->reserved;
}

}  // namespace ebb::gpu
