// The GPU memory pool: reuse, statistics, streams, arenas, running out, red zones; CUDA errors.
#include <cstdlib>
#include <regex>
#include <thread>

#include "tensor/graph.h"
#include "tensor/tensor.h"
#include "tests/cuda_fixture.h"

namespace ebb::testing {
namespace {

constexpr int64_t kMiB = int64_t(1) << 20;

class PoolCuda : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    empty_cache(gpu_);
    reset_peak_memory(gpu_);
  }
  void TearDown() override {
    set_poison(false);
    set_red_zones(false);
  }
  Tensor bytes(int64_t n) const { return Tensor::empty({n}, DType::u8, gpu_); }
  MemoryStats stats() const { return memory_stats(gpu_); }
};
using PoolCudaDeathTest = PoolCuda;

bool inside(const Tensor& t, const void* begin, int64_t size) {
  const auto* p = static_cast<const char*>(t.raw());
  return p >= begin && p < static_cast<const char*>(begin) + size;
}

TEST_F(PoolCuda, AFreedBlockIsReusedAtOnce) {
  for (const int64_t n : {int64_t(1), int64_t(511), 3 * kMiB, 40 * kMiB}) {
    Tensor a = bytes(n);
    const void* where = a.raw();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(where) % 256, 0u);
    a = Tensor();
    const int64_t reserved = stats().reserved;
    const Tensor b = bytes(n);
    EXPECT_EQ(b.raw(), where) << n;
    EXPECT_EQ(stats().reserved, reserved);
  }
}

TEST_F(PoolCuda, Statistics) {
  const MemoryStats start = stats();
  {
    const Tensor a = bytes(1000), view = a.slice(0, 10, 20);
    EXPECT_EQ(stats().current, start.current + 1000);
    { const Tensor b = bytes(5 * kMiB); }
    EXPECT_EQ(stats().current, start.current + 1000);
    EXPECT_GE(stats().reserved, stats().current);
  }
  EXPECT_EQ(stats().current, start.current);
  EXPECT_EQ(stats().peak, start.current + 1000 + 5 * kMiB);
  EXPECT_EQ(stats().allocations, start.allocations + 2);
  EXPECT_GT(stats().reserved, start.reserved);
  empty_cache(gpu_);
  EXPECT_EQ(stats().reserved, start.reserved);
  reset_peak_memory(gpu_);
  EXPECT_EQ(stats().peak, start.current);
  EXPECT_EQ(bytes(0).raw(), nullptr);
}

TEST_F(PoolCuda, NeighboursMergeAgain) {
  Tensor a = bytes(4 * kMiB), b = bytes(4 * kMiB), c = bytes(4 * kMiB);  // one 20 MiB segment
  const auto* first = static_cast<const char*>(a.raw());
  EXPECT_EQ(static_cast<const char*>(b.raw()) - first, 4 * kMiB);
  EXPECT_EQ(static_cast<const char*>(c.raw()) - first, 8 * kMiB);
  a = Tensor();
  c = Tensor();
  b = Tensor();
  EXPECT_EQ(bytes(20 * kMiB).raw(), first);
  Tensor d = bytes(4 * kMiB), e = bytes(4 * kMiB);
  d = Tensor();
  EXPECT_EQ(bytes(3 * kMiB).raw(), first);  // best fit: the hole, not the rest of the segment
}

TEST_F(PoolCuda, SmallBlocksShareASegment) {
  const int64_t before = stats().reserved;
  std::vector<Tensor> many;
  for (int i = 0; i < 4000; ++i) many.push_back(bytes(500));
  EXPECT_EQ(stats().reserved - before, 2 * kMiB);
}

TEST_F(PoolCuda, OtherStreamsGetOtherBlocks) {
  Tensor a = bytes(5 * kMiB);
  const void* where = a.raw();
  a = Tensor();
  {
    const StreamGuard guard(new_stream(gpu_));
    EXPECT_NE(bytes(5 * kMiB).raw(), where);
  }
  EXPECT_EQ(bytes(5 * kMiB).raw(), where);
}

// Keeps the current stream of the GPU busy for some tens of milliseconds.
void keep_busy(Device gpu) {
  const Tensor x = Tensor::empty({512 * kMiB}, DType::u8, gpu), y = Tensor::empty_like(x);
  for (int i = 0; i < 100; ++i) y.copy_(x);
}

TEST_F(PoolCuda, RecordedStreamsDelayReuse) {
  const Stream side = new_stream(gpu_);
  Tensor x = Tensor::full({5 * kMiB}, 1, DType::u8, gpu_), y = Tensor::empty_like(x);
  const void* where = x.raw();
  synchronize(gpu_);
  {
    const StreamGuard guard(side);
    keep_busy(gpu_);
    y.copy_(x);
  }
  x.record_stream(side);
  y.record_stream(side);
  x = Tensor();
  const Tensor next = Tensor::full({5 * kMiB}, 2, DType::u8, gpu_);
  EXPECT_NE(next.raw(), where);
  synchronize(gpu_);
  EXPECT_EQ(y.select(0, 0).item(), 1);
  EXPECT_EQ(bytes(5 * kMiB).raw(), where);  // now it is free
}

TEST_F(PoolCuda, StreamsBelongToTheThread) {
  const Stream mine = current_stream(gpu_), side = new_stream(gpu_);
  EXPECT_NE(mine.handle, nullptr);  // never the legacy default stream
  EXPECT_NE(mine, side);
  {
    const StreamGuard guard(side);
    EXPECT_EQ(current_stream(gpu_), side);
    std::thread([&] { EXPECT_EQ(current_stream(gpu_), mine); }).join();
    const Tensor x = Tensor::full({1000}, 3, DType::f32, gpu_);
    EXPECT_EQ(x.storage()->stream, side);
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>(1000, 3));
  }
  EXPECT_EQ(current_stream(gpu_), mine);
}

TEST_F(PoolCuda, ManyThreadsAndStreams) {
  const MemoryStats start = stats();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const StreamGuard guard(new_stream(gpu_));
      std::vector<std::pair<Tensor, int>> live;
      for (int i = 0; i < 300; ++i) {
        const int64_t n = 1 + (i * 7919 + t * 131) % 300000;
        const int value = (i + 60 * t) % 251;
        live.emplace_back(Tensor::full({n}, value, DType::u8, gpu_), value);
        if (live.size() < 20) continue;
        const auto& [x, want] = live[size_t(i) % live.size()];
        const std::vector<uint8_t> got = x.to_vector<uint8_t>();
        ASSERT_TRUE(std::all_of(got.begin(), got.end(), [&](uint8_t v) { return v == want; }));
        live.erase(live.begin() + i % int(live.size()));
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(stats().current, start.current);
}

TEST_F(PoolCuda, ArenaBlocksStayInTheArena) {
  const MemoryStats start = stats();
  const void* where = nullptr;
  {
    GraphArena arena(gpu_);
    arena.begin_use();
    Tensor a = bytes(5 * kMiB);
    where = a.raw();
    EXPECT_NE(a.storage()->arena, nullptr);
    a = Tensor();
    EXPECT_EQ(bytes(5 * kMiB).raw(), where);  // reused inside
    arena.end_use();
    EXPECT_EQ(arena.reserved(), 20 * kMiB);
    EXPECT_EQ(stats().reserved, start.reserved + 20 * kMiB);
    for (int i = 0; i < 8; ++i) {
      const Tensor b = bytes(5 * kMiB);
      EXPECT_FALSE(inside(b, where, 20 * kMiB));
      EXPECT_EQ(b.storage()->arena, nullptr);
    }
    empty_cache(gpu_);
    EXPECT_EQ(arena.reserved(), 20 * kMiB);
    arena.begin_use();
    EXPECT_EQ(bytes(5 * kMiB).raw(), where);
    arena.end_use();
  }
  EXPECT_EQ(bytes(5 * kMiB).raw(), where);  // the memory went to the pool
  empty_cache(gpu_);
  EXPECT_EQ(stats().reserved, start.reserved);
}

TEST_F(PoolCuda, TensorsMayOutliveTheirArena) {
  Tensor kept;
  const int64_t before = stats().reserved;
  {
    GraphArena arena(gpu_);
    arena.begin_use();
    const Tensor gone = bytes(kMiB);
    kept = Tensor::full({300}, 7, DType::f32, gpu_);
    arena.end_use();
  }
  EXPECT_EQ(kept.to_vector<float>(), std::vector<float>(300, 7));
  std::vector<Tensor> others;
  for (int i = 0; i < 200; ++i) others.push_back(Tensor::full({300}, 1, DType::f32, gpu_));
  EXPECT_EQ(kept.to_vector<float>(), std::vector<float>(300, 7));
  kept = Tensor();
  others.clear();
  empty_cache(gpu_);
  EXPECT_EQ(stats().reserved, before);
}

TEST_F(PoolCuda, ArenaBlocksUsedByOtherStreamsRest) {
  const Stream side = new_stream(gpu_);
  GraphArena arena(gpu_);
  arena.begin_use();
  Tensor a = bytes(5 * kMiB);
  const void* where = a.raw();
  a.record_stream(side);
  a = Tensor();
  synchronize(gpu_);
  EXPECT_NE(bytes(5 * kMiB).raw(), where);
  arena.end_use();
}

TEST_F(PoolCuda, ArenaUseNestsAndChecksItself) {
  GraphArena outer(gpu_), inner(gpu_);
  outer.begin_use();
  inner.begin_use();
  EXPECT_EQ(error_message([&] { outer.end_use(); }),
            "graph arena: end_use() without begin_use() on this thread");
  std::thread([&] { EXPECT_EQ(bytes(10).storage()->arena, nullptr); }).join();
  const void* in_inner = bytes(10).storage()->arena;
  inner.end_use();
  EXPECT_NE(bytes(10).storage()->arena, in_inner);
  outer.end_use();
  EXPECT_EQ(bytes(10).storage()->arena, nullptr);
}

TEST_F(PoolCuda, CaptureWithoutAnArenaIsRefused) {
  if constexpr (kWithCuda) {
    gpu::graph_begin(gpu_);
    const OpScope op("demo");
    const std::string text = error_message([&] { bytes(100); });
    gpu::graph_abandon(gpu_);
    EXPECT_EQ(text,
              "demo: allocates memory while its stream is being captured; memory of a graph must "
              "come from a GraphArena");
  }
  EXPECT_EQ(Tensor::full({2}, 1, DType::f32, gpu_).to_vector<float>(), std::vector<float>(2, 1));
}

TEST_F(PoolCuda, HostCopiesInCaptureAreRefused) {
  const Tensor x = Tensor::full({4}, 1, DType::f32, gpu_), host = Tensor::zeros({4});
  const std::function<void()> works[] = {[&] { x.copy_(host); }, [&] { x.cpu(); }};
  for (const auto& work : works) {
    GraphCapture graph(gpu_);
    const OpScope op("demo");
    EXPECT_EQ(error_message([&] { graph.capture(work); }),
              "demo: copies between host and GPU while its stream is being captured");
  }
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 1));
}

TEST_F(PoolCuda, CaptureMayGrowTheArena) {
  const Tensor x = Tensor::full({1000}, 1, DType::f32, gpu_);
  std::vector<Tensor> out;
  GraphCapture graph(gpu_);
  graph.capture([&] {
    for (int i = 0; i < 50; ++i) out.push_back(x.expand({1000 + i, 1000}).contiguous());
  });
  EXPECT_GT(graph.reserved(), 50 * 4000000);
  for (const float v : {2.f, 3.f}) {
    x.fill_(v);
    graph.replay();
    for (const Tensor& t : out) ASSERT_EQ(t.select(0, t.size(0) - 1).select(0, 999).item(), v);
  }
  out.clear();
}

TEST_F(PoolCuda, OutOfMemorySaysWhatToKnow) {
  const Tensor kept = bytes(3 * kMiB);
  {
    const OpScope op("demo");
    const std::string text = error_message([&] { bytes(int64_t(1) << 45); });
    EXPECT_TRUE(std::regex_search(
        text, std::regex("^demo: out of memory on cuda:0: asked for 32768\\.00 GiB; [0-9.]+ "
                         "[MG]iB in use \\(peak [0-9.]+ [MG]iB\\), [0-9.]+ [MG]iB reserved by "
                         "ebb, [0-9.]+ GiB free of the GPU's [0-9.]+ GiB; use a smaller batch")))
        << text;
  }
  EXPECT_EQ(Tensor::full({2}, 1, DType::f32, gpu_).to_vector<float>(), std::vector<float>(2, 1));
}

// Of what other processes leave, which may become less meanwhile.
TEST_F(PoolCuda, CachedMemoryIsGivenUpBeforeFailing) {
  const int64_t free = device_info(gpu_).free;
  for (const int percent : {50, 55, 60}) {
    const int64_t n = free / 100 * percent;  // does not fit beside what the last one left
    Tensor x;
    const std::string error = error_message([&] { x = bytes(n); });
    if (error != "no error") {
      empty_cache(gpu_);
      ASSERT_LT(device_info(gpu_).free, n) << error;
      GTEST_SKIP() << "other processes have taken what was free";
    }
    EXPECT_EQ(x.numel(), n);
  }
  empty_cache(gpu_);
}

TEST_F(PoolCuda, Poison) {
  set_poison(true);
  for (const DType t : {DType::f32, DType::f64, DType::bf16})
    EXPECT_TRUE(std::isnan(Tensor::empty({1}, t, gpu_).item())) << name(t);
  EXPECT_EQ(Tensor::empty({1}, DType::i32, gpu_).item(), -1);
}

TEST_F(PoolCuda, RedZonesFindEveryByteAround) {
  set_red_zones(true);
  const Tensor x = Tensor::zeros({13}, DType::u8, gpu_);
  auto* p = static_cast<char*>(x.raw());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 256, 0u);
  EXPECT_NO_THROW(check_red_zones(gpu_));
  for (const int64_t at : {-256, -1, 13, 14, 13 + 255}) {
    unsigned char kept = 0, other = 0;
    copy_bytes(&kept, Device::cpu(), p + at, gpu_, 1);
    other = static_cast<unsigned char>(~kept);
    copy_bytes(p + at, gpu_, &other, Device::cpu(), 1);
    EXPECT_EQ(error_message([&] { check_red_zones(gpu_); }),
              "write outside a cuda:0 block of 13 bytes, at byte " + std::to_string(at));
    copy_bytes(p + at, gpu_, &kept, Device::cpu(), 1);
    EXPECT_NO_THROW(check_red_zones(gpu_));
  }
  x.fill_(3);
  EXPECT_NO_THROW(check_red_zones(gpu_));
}

TEST_F(PoolCuda, RedZonesAreCheckedWhenABlockIsFreed) {
  set_red_zones(true);
  {
    const Tensor x = Tensor::zeros({4}, DType::f32, gpu_);
    zero_bytes(static_cast<char*>(x.raw()) + 16, gpu_, 4);
  }
  EXPECT_EQ(error_message([&] { check_red_zones(gpu_); }),
            "write outside a cuda:0 block of 16 bytes, at byte 16");
  EXPECT_NO_THROW(check_red_zones(gpu_));  // reported once
}

TEST_F(PoolCuda, AnOrdinaryCudaErrorIsThrownOnce) {
  if constexpr (kWithCuda) {
    const OpScope op("demo");
    const Tensor x = Tensor::zeros({4}, DType::f32, gpu_);
    char host[16];
    // Host memory where device memory is promised.
    const std::string text =
        error_message([&] { gpu::copy_bytes(host, gpu_, x.raw(), gpu_, size_t(1) << 62); });
    EXPECT_TRUE(text.starts_with("demo: copy: ")) << text;
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>(4, 0));
  }
}

TEST_F(PoolCudaDeathTest, AFatalErrorSaysThatTheGpuIsLost) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        auto s = std::make_shared<Storage>();
        s->data = reinterpret_cast<void*>(uintptr_t(1) << 20);  // nothing is mapped there
        s->bytes = 4096;
        s->device = gpu_;
        s->owner = std::make_shared<int>();
        const Tensor x = Tensor::wrap(s, DType::f32, {100}, {2}, 0);
        if constexpr (kWithCuda) gpu::fill(x, 1);
        const OpScope op("demo");
        std::fputs(error_message([&] { synchronize(gpu_); }).c_str(), stderr);
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0),
      "demo: synchronize: .*illegal memory access.*GPU is lost to this process");
}

}  // namespace
}  // namespace ebb::testing
