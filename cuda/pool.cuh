// The caching pool of one GPU. cudaMalloc hands out segments; each segment is a chain of blocks
// that are split on allocation and merged with free neighbours on release.
//   small segments (2 MiB) serve blocks up to 1 MiB, large ones (20 MiB, or the request) the rest
// A free block is reused at once on the stream it was allocated on: work there is ordered anyway.
// It reaches other streams only by way of the driver (empty_cache, or when memory runs out).
#pragma once
#include <cuda_runtime.h>

#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensor/memory.h"

namespace ebb::gpu {

struct Heap;

struct Block {
  char* base = nullptr;
  size_t size = 0;       // bytes of the segment it covers
  size_t requested = 0;  // bytes the caller asked for
  cudaStream_t stream = nullptr;
  Heap* heap = nullptr;   // where it goes when free
  Block* prev = nullptr;  // neighbours in the segment
  Block* next = nullptr;
  bool small = false;                       // class of the segment
  bool used = false;                        // held by a storage, or waiting for other streams
  bool guarded = false;                     // red zones on both sides of the caller's bytes
  int waiting = 0;                          // events that must pass before it is free
  std::vector<cudaStream_t> other_streams;  // recorded users besides `stream`
};

struct BlockOrder {  // by stream, then size (best fit), then address
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    if (a->size != b->size) return a->size < b->size;
    return a->base < b->base;
  }
};

// Free blocks that may serve the same requests: the pool's own, or those of one graph arena.
struct Heap {
  std::set<Block*, BlockOrder> free_small, free_large;
  std::set<Block*> firsts;  // the first block of every segment
  int64_t reserved = 0;
  int device = 0;
  bool is_arena = false;
  std::set<Block*, BlockOrder>& free_list(bool small) { return small ? free_small : free_large; }
};

class Pool {
 public:
  explicit Pool(int device);

  // heap: an arena, or null for the pool's own. Throws Error when memory is exhausted.
  void* allocate(size_t bytes, cudaStream_t stream, Heap* heap);
  void release(void* user) noexcept;
  // Work queued on `stream` so far at the time of release must finish before the block is reused.
  void record_use(void* user, cudaStream_t stream);
  MemoryStats stats() const;
  void reset_peak();
  void empty_cache();
  void check_red_zones();

  Heap* create_arena();
  // Its memory, live blocks included, passes to the pool.
  void destroy_arena(Heap* arena);
  int64_t reserved(const Heap* arena) const;

 private:
  Block* find_free(size_t size, bool small, cudaStream_t stream, Heap& heap);
  Block* new_segment(size_t size, size_t asked, bool small, cudaStream_t stream, Heap& heap);
  void split(Block* b, size_t size);
  void make_free(Block* b);
  Block* absorb_next(Block* b);
  void wait_for_users(Block* b);
  void finish_waiting(bool block_until_done);
  void free_segments(Heap& heap);
  [[noreturn]] void out_of_memory(size_t asked);
  bool zones_intact(const Block& b, std::string* error) const;

  const int device_;
  mutable std::mutex mutex_;
  Heap own_;
  std::unordered_map<void*, Block*> live_;  // by the caller's pointer
  std::deque<std::pair<cudaEvent_t, Block*>> events_;
  std::vector<cudaEvent_t> spare_events_;
  std::vector<std::string> overruns_;  // found at release, reported by check_red_zones
  MemoryStats stats_;
};

}  // namespace ebb::gpu
