// Memory on the CPU: statistics, poison, red zones, borrowed memory, the name in errors.
#include "tensor/memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tensor/check.h"
#include "tensor/device_flags.h"
#include "tensor/tensor.h"

namespace ebb::testing {
namespace {

const Device kCpu = Device::cpu();

template <class F>
std::string message(F fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

class Memory : public ::testing::Test {
 protected:
  void TearDown() override {
    set_poison(false);
    set_red_zones(false);
  }
};
using MemoryDeathTest = Memory;

TEST_F(Memory, Statistics) {
  const MemoryStats start = memory_stats(kCpu);
  reset_peak_memory(kCpu);
  {
    const Tensor a = Tensor::empty({1000});
    const Tensor view = a.slice(0, 0, 10);
    EXPECT_EQ(memory_stats(kCpu).current, start.current + 4000);
    { const Tensor b = Tensor::empty({500}, DType::f64); }
    EXPECT_EQ(memory_stats(kCpu).current, start.current + 4000);
  }
  const MemoryStats end = memory_stats(kCpu);
  EXPECT_EQ(end.current, start.current);
  EXPECT_EQ(end.peak, start.current + 8000);
  EXPECT_EQ(end.allocations, start.allocations + 2);
  reset_peak_memory(kCpu);
  EXPECT_EQ(memory_stats(kCpu).peak, start.current);
}

TEST_F(Memory, WorkspaceIsWhatOneOperatorAllocates) {
  reset_peak_memory(kCpu);
  const Tensor outside = Tensor::empty({1000});  // belongs to no operator
  EXPECT_EQ(memory_stats(kCpu).workspace, 0);
  Tensor result;
  {
    const OpScope op("outer");
    result = Tensor::empty({10});
    {
      const OpScope inner("inner");  // counts as a part of the outer one
      const Tensor scratch = Tensor::empty({100});
    }
    const Tensor more = Tensor::empty({50});
  }
  EXPECT_EQ(memory_stats(kCpu).workspace, 440);
  {
    const OpScope op("small");
    const Tensor t = Tensor::empty({109});
  }
  EXPECT_EQ(memory_stats(kCpu).workspace, 440);  // the largest, not the sum
  {
    const OpScope op("large");
    const Tensor t = Tensor::empty({111});
  }
  EXPECT_EQ(memory_stats(kCpu).workspace, 444);
  reset_peak_memory(kCpu);
  EXPECT_EQ(memory_stats(kCpu).workspace, 0);
}

TEST_F(Memory, ViewsKeepTheBlock) {
  const int64_t before = memory_stats(kCpu).current;
  Tensor view;
  {
    const Tensor a = Tensor::full({100}, 3);
    view = a.slice(0, 40, 42);
  }
  EXPECT_EQ(memory_stats(kCpu).current, before + 400);
  EXPECT_EQ(view.to_vector<float>(), (std::vector<float>{3, 3}));
  view = Tensor();
  EXPECT_EQ(memory_stats(kCpu).current, before);
}

TEST_F(Memory, ZeroBytes) {
  const std::shared_ptr<Storage> s = allocate(0, kCpu);
  EXPECT_EQ(s->data, nullptr);
  EXPECT_EQ(s->bytes, 0u);
  zero_bytes(nullptr, kCpu, 0);
  copy_bytes(nullptr, kCpu, nullptr, kCpu, 0);
}

TEST_F(Memory, PoisonIsNaNInEveryFloatType) {
  set_poison(true);
  for (const DType t : {DType::f32, DType::f64, DType::bf16})
    EXPECT_TRUE(std::isnan(Tensor::empty({1}, t).item())) << name(t);
  EXPECT_EQ(Tensor::empty({1}, DType::i64).item(), -1);
  EXPECT_EQ(Tensor::empty({1}, DType::u8).item(), 255);
  EXPECT_EQ(Tensor::zeros({1}).item(), 0);
}

TEST_F(Memory, RedZonesFindEveryByteAround) {
  set_red_zones(true);
  const Tensor x = Tensor::zeros({13}, DType::u8);
  auto* p = x.data<uint8_t>();
  EXPECT_NO_THROW(check_red_zones(kCpu));
  for (const int64_t at : {-256, -1, 13, 14, 13 + 255}) {
    const uint8_t kept = p[at];
    p[at] = uint8_t(~kept);
    EXPECT_EQ(message([] { check_red_zones(kCpu); }), "write outside a cpu block of 13 bytes");
    p[at] = kept;
    EXPECT_NO_THROW(check_red_zones(kCpu));
  }
  for (int i = 0; i < 13; ++i) p[i] = uint8_t(i);
  EXPECT_NO_THROW(check_red_zones(kCpu));
}

TEST_F(Memory, RedZonesMayGoOnAndOffWhileBlocksLive) {
  const Tensor plain = Tensor::zeros({10});
  set_red_zones(true);
  Tensor guarded = Tensor::zeros({10});
  set_red_zones(false);
  EXPECT_NO_THROW(check_red_zones(kCpu));
  guarded = Tensor();
  EXPECT_NO_THROW(check_red_zones(kCpu));
}

TEST_F(MemoryDeathTest, FreeingADamagedBlockStops) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        set_red_zones(true);
        const Tensor x = Tensor::zeros({4});
        x.data<float>()[4] = 1;
      },
      "write outside a cpu block of 16 bytes");
}

TEST_F(Memory, BorrowedMemoryIsReadOnlyAndKept) {
  auto owner = std::make_shared<std::vector<float>>(std::vector<float>{1, 2, 3, 4});
  const std::weak_ptr<std::vector<float>> alive = owner;
  const int64_t before = memory_stats(kCpu).current;
  Tensor t = Tensor::wrap(borrow(owner->data(), 16, owner), DType::f32, {2, 2}, {2, 1}, 0);
  owner.reset();
  EXPECT_EQ(memory_stats(kCpu).current, before);  // not ours
  const Tensor row = t.select(0, 1);
  t = Tensor();
  EXPECT_EQ(row.to_vector<float>(), (std::vector<float>{3, 4}));
  const OpScope op("demo");
  EXPECT_EQ(message([&] { row.fill_(0); }),
            "demo: in-place change of read-only memory (a mapped file), tensor [2]; clone() it "
            "first");
  EXPECT_THROW(row.zero_(), Error);
  EXPECT_THROW(row.copy_(Tensor::zeros({2})), Error);
  EXPECT_THROW(copy(row, Tensor::zeros({2})), Error);
  EXPECT_THROW(row.bump_version(), Error);
  EXPECT_EQ(row.to_vector<float>(), (std::vector<float>{3, 4}));
  EXPECT_NO_THROW(row.clone().fill_(0));
  EXPECT_FALSE(alive.expired());
}

TEST_F(Memory, BorrowNeedsAnOwner) {
  float x = 1;
  EXPECT_THROW(borrow(&x, 4, nullptr), Error);
}

TEST_F(Memory, OutOfMemoryNamesTheOperator) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's allocator stops the process instead of returning null";
#endif
  const OpScope op("demo");
  const std::string text = message([] { Tensor::empty({int64_t(1) << 48}, DType::u8); });
  EXPECT_TRUE(text.starts_with("demo: out of memory on cpu: asked for 281474976710656 bytes, "))
      << text;
}

TEST_F(Memory, OperatorNamesNestAndBelongToTheThread) {
  EXPECT_STREQ(current_op(), "ebb");
  const OpScope outer("outer");
  {
    const OpScope inner("inner");
    EXPECT_STREQ(current_op(), "inner");
    std::thread([] { EXPECT_STREQ(current_op(), "ebb"); }).join();
  }
  EXPECT_STREQ(current_op(), "outer");
}

TEST_F(Memory, ThreadsAllocateAtOnce) {
  set_red_zones(true);
  const MemoryStats start = memory_stats(kCpu);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 500; ++i) {
        const Tensor x = Tensor::zeros({i % 17});
        if (i % 50 == 0) check_red_zones(kCpu);
      }
    });
  for (std::thread& t : threads) t.join();
  const MemoryStats end = memory_stats(kCpu);
  EXPECT_EQ(end.current, start.current);
  EXPECT_EQ(end.allocations, start.allocations + 4 * (500 - 30));  // 30 of 500 are empty
}

TEST_F(Memory, CpuHasOneStreamAndNoArena) {
  EXPECT_EQ(current_stream(kCpu), new_stream(kCpu));
  const StreamGuard guard(new_stream(kCpu));
  synchronize(kCpu);
  empty_cache(kCpu);
  EXPECT_EQ(message([] { GraphArena arena(kCpu); }), "graph arena: device is cpu, want a GPU");
  EXPECT_THROW(Tensor::zeros({1}).record_stream({Device::cuda(), nullptr}), Error);
  Tensor::zeros({1}).record_stream(current_stream(kCpu));
}

TEST_F(Memory, DeviceFlagsReportAndClear) {
  EXPECT_EQ(read_and_clear_device_flags(kCpu), 0u);
  device_flags(kCpu)[int(DeviceFlag::positive_decay)] = 1;
  device_flags(kCpu)[int(DeviceFlag::embedding_id)] = 1;
  EXPECT_EQ(message([] { check_device_flags(kCpu); }),
            std::string(describe(DeviceFlag::embedding_id)) + "; " +
                describe(DeviceFlag::positive_decay));
  EXPECT_NO_THROW(check_device_flags(kCpu));
}

}  // namespace
}  // namespace ebb::testing
