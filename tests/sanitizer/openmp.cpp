// Tells the thread sanitizer how OpenMP's threads wait for each other. GCC's libgomp is not
// instrumented, so every hand-over between its threads would look like a race. The linker sends its
// calls that order memory here (--wrap, CMakeLists.txt). Critical sections and tasks are not used.
//   GOMP_parallel: what the caller did happens before the region, and all of it before the return.
//   GOMP_loop_end, GOMP_barrier: everything before happens before everything after.
extern "C" {

void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __real_GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
void __real_GOMP_loop_end();
void __real_GOMP_barrier();

namespace {

struct Region {
  void (*body)(void*);
  void* data;
  char end;  // its address stands for the region's end
};

char barrier;  // its address stands for all barriers

void run(void* argument) {
  __tsan_acquire(argument);  // before the first look at it
  auto* region = static_cast<Region*>(argument);
  region->body(region->data);
  __tsan_release(&region->end);
}

}  // namespace

void __wrap_GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  Region region{body, data, 0};
  __tsan_release(&region);
  __real_GOMP_parallel(run, &region, threads, flags);
  __tsan_acquire(&region.end);
}

void __wrap_GOMP_loop_end() {
  __tsan_release(&barrier);
  __real_GOMP_loop_end();
  __tsan_acquire(&barrier);
}

void __wrap_GOMP_barrier() {
  __tsan_release(&barrier);
  __real_GOMP_barrier();
  __tsan_acquire(&barrier);
}

}  // extern "C"
